"""What a step did, asked of checkpoints whose steps were made here, right or faulty: right, or "cannot tell"."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import sweep
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import muonckpt
from muonckpt import TargetError
from muonckpt.cli.main import run as muonckpt_command
from muonckpt.lab import StepAudit, audit_step
from muonckpt.optimizer import Muon

KELLER = (3.4445, -4.7750, 2.0315)
GROUP = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "ns_coefficients": KELLER, "eps": 1e-7,
         "ns_steps": 5, "adjust_lr_fn": "original"}  # fmt: skip
SHAPES = {"up.0": (48, 32), "up.1": (48, 32), "up.2": (48, 32), "down.0": (32, 64), "down.1": (32, 64)}


@dataclass(frozen=True)
class Truth:
    """What the optimizer of a test does to its matrices."""

    rows: tuple[int, ...] | None = None
    columns: tuple[int, ...] | None = None
    blocks: int = 1
    flatten: bool = False
    dtype: torch.dtype = torch.float32
    coefficients: tuple[float, float, float] = KELLER
    nesterov: bool = True
    momentum: float = 0.95
    decay: float = 0.1
    scale_rows: int = 0
    orthogonal: bool = True
    left_out: tuple[str, ...] = ()
    recorded: dict[str, object] = field(default_factory=dict)


def _orthogonal(matrix: Tensor, truth: Truth) -> Tensor:
    x = matrix.to(truth.dtype)
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        a, b, c = truth.coefficients
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if matrix.shape[0] > matrix.shape[1] else x).float()


def _direction(source: Tensor, truth: Truth) -> Tensor:
    """Orthogonalise each matrix that the truth cuts out of a parameter."""
    whole = source.flatten(1) if truth.flatten else source
    result = torch.empty_like(whole)
    height = whole.shape[0] // truth.blocks
    top = 0
    for rows in truth.rows or (height,):
        index = torch.cat([torch.arange(b * height + top, b * height + top + rows) for b in range(truth.blocks)])
        left = 0
        for columns in truth.columns or (whole.shape[1],):
            part = whole[index, left : left + columns]
            result[index, left : left + columns] = _orthogonal(part, truth) if truth.orthogonal else part
            left += columns
        top += rows
    return result.view(source.shape)


def _train(folder: Path, truth: Truth, shapes: dict[str, tuple[int, ...]], dtype=torch.float32, seed=0) -> list[Path]:
    """Take steps on random gradients with structure, and save the last two as torch.optim.Muon would."""
    generator = torch.Generator().manual_seed(seed)
    group = {
        **GROUP,
        "weight_decay": truth.decay,
        "momentum": truth.momentum,
        "nesterov": truth.nesterov,
        "ns_coefficients": truth.coefficients,
    }
    weights = {name: torch.randn(shape, generator=generator) * 0.05 for name, shape in shapes.items()}
    momenta = {name: torch.zeros(shape) for name, shape in shapes.items()}
    saved = []
    for step in range(6):
        for name, weight in weights.items():
            gradient = torch.randn(weight.shape, generator=generator) * 0.01
            momenta[name].lerp_(gradient, 1 - truth.momentum)
            if name in truth.left_out:
                continue
            source = gradient.lerp(momenta[name], truth.momentum) if truth.nesterov else momenta[name]
            rows = truth.scale_rows or weight.shape[0]
            width = math.prod(weight.shape[1:])
            scale = math.sqrt(max(1, rows / width)) if truth.orthogonal else 1
            weight.mul_(1 - 0.02 * truth.decay).add_(_direction(source, truth), alpha=-0.02 * scale)
        if step >= 4:
            options = {**group, **truth.recorded, "params": list(shapes)}
            state = {n: {"momentum_buffer": m.clone()} for n, m in momenta.items()}
            path = folder / f"step-{step}"
            _save(path, {n: w.to(dtype) for n, w in weights.items()}, state, options)
            saved.append(path)
    return saved


def _save(path: Path, weights: dict[str, Tensor], state: dict[str, dict[str, Tensor]], options: dict[str, object]):
    content = {"model": weights, "optimizer": {"state": state, "param_groups": [options]}}
    dcp.save(content, checkpoint_id=path, no_dist=True)


def _audit(folder: Path, truth: Truth, shapes=SHAPES, **options: object) -> StepAudit:
    before, after = _train(folder, truth, shapes, **options)
    return audit_step(before, after)


def _cuts(audit: StepAudit, name: str = "up.0") -> set[tuple[object, ...]]:
    [verdict] = [v for v in audit.verdicts if v.name == name]
    return {(cut.flatten, cut.pieces, cut.columns, cut.interleaved) for cut in verdict.cuts}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_true_step_is_explained_and_contradicts_nothing(tmp_path, dtype):
    audit = _audit(tmp_path, Truth(dtype=dtype))
    assert {v.status for v in audit.verdicts} == {"explained"}
    assert not audit.findings
    for verdict in audit.verdicts:
        assert [cut.pieces or cut.columns for cut in verdict.cuts] == [None]
        assert [(way.method, way.name, way.steps, way.nesterov) for way in verdict.rules] == [
            ("muon", "keller", 5, True)
        ]
        assert "original" in verdict.scales
        assert verdict.decay == pytest.approx(0.02 * 0.1, rel=0.15 if dtype == torch.bfloat16 else 0.001)
    searched = [v for v in audit.verdicts if v.rival is not None]
    assert all(v.rival > 2 * v.bound and v.momenta[0] <= 0.95 <= v.momenta[1] for v in searched if v.momenta)


FAULTS = {
    "rows of 2 ranks": (
        Truth(rows=(24, 24)),
        (False, (24, 24), None, 1),
        "(gate and up, or heads, or experts, or the rows of 2",
    ),
    "rows of 5 ranks": (Truth(rows=(10, 10, 10, 10, 8)), (False, (10, 10, 10, 10, 8), None, 1), "rows of 5 ranks"),
    "columns of 4 ranks": (Truth(columns=(8,) * 4), (False, None, (8,) * 4, 1), "columns of 4 ranks"),
    "query groups": (Truth(rows=(8, 4, 4), blocks=3), (False, (8, 4, 4), None, 3), "in 3 query groups"),
    "grouped queries": (Truth(rows=(24, 12, 12)), (False, (24, 12, 12), None, 1), "2 query heads"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_slice_that_was_orthogonalised_is_named(tmp_path, fault):
    truth, cut, words = FAULTS[fault]
    audit = _audit(tmp_path, truth, {"up.0": (48, 32), "up.1": (48, 32)})
    assert _cuts(audit) == {cut}
    assert {v.status for v in audit.verdicts} == {"explained"}
    [finding] = audit.findings
    assert words in finding.message
    assert finding.names == ("up.0", "up.1")


def test_a_cut_that_nobody_lists_is_not_taken_for_another(tmp_path):
    audit = _audit(tmp_path, Truth(rows=(7, 41)), {"up.0": (48, 32)})
    [verdict] = audit.verdicts
    assert verdict.status == "unexplained"
    assert not verdict.cuts


def test_kernels_are_one_matrix_or_a_stack(tmp_path):
    audit = _audit(tmp_path, Truth(flatten=True), {"up.0": (12, 4, 3, 3)})
    assert _cuts(audit) == {(True, None, None, 1)}


OPTIONS = {
    "nesterov": (Truth(nesterov=False, recorded={"nesterov": True}), "the step was without Nesterov; recorded: True"),
    "momentum": (Truth(momentum=0.9, recorded={"momentum": 0.95}), "recorded: 0.95"),
    "decay": (Truth(decay=0.0, recorded={"weight_decay": 0.1}), "weight decay was"),
    "scale": (Truth(scale_rows=64), "the rate was scaled by 1.414 for 48x32, as no known rule; recorded: original"),
    "orthogonal": (Truth(orthogonal=False), "nothing was orthogonalised"),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_what_contradicts_a_recorded_option_is_told(tmp_path, option):
    truth, words = OPTIONS[option]
    audit = _audit(tmp_path, truth, {"up.0": (48, 32)})
    assert any(words in finding.message for finding in audit.findings), audit.findings


def test_a_layer_that_the_step_left_out_is_told(tmp_path):
    audit = _audit(tmp_path, Truth(left_out=("up.1",)))
    [finding] = audit.findings
    assert finding.names == ("up.1",)
    assert "its momentum changed, and the weight not" in finding.message


@pytest.mark.parametrize("slot", ["momentum before", "momentum after", "weight"])
def test_a_flipped_bit_is_found_by_layers_of_its_kind(tmp_path, slot):
    before, after = _train(tmp_path, Truth(), SHAPES)
    weights = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    state = {name: {"momentum_buffer": torch.zeros(shape)} for name, shape in SHAPES.items()}
    content = {"model": weights, "optimizer": {"state": state}}
    dcp.load(content, checkpoint_id=before if slot == "momentum before" else after, no_dist=True)
    tensor = weights["up.1"] if slot == "weight" else state["up.1"]["momentum_buffer"]
    tensor.view(torch.int32)[5, 7] ^= 1 << 27
    flipped = tmp_path / "flipped"
    _save(flipped, weights, state, {**GROUP, "params": list(SHAPES)})
    audit = audit_step(*((flipped, after) if slot == "momentum before" else (before, flipped)))
    [finding] = audit.findings
    assert finding.names == ("up.1",)
    assert "[5, 7]" in finding.message
    assert slot.split()[0] in finding.message


def test_weights_in_16_bits_are_never_a_wrong_sure(tmp_path):
    audit = _audit(tmp_path, Truth(rows=(24, 24)), {"up.0": (48, 32)}, dtype=torch.bfloat16)
    [verdict] = audit.verdicts
    assert verdict.status == "cannot tell" or _cuts(audit) == {(False, (24, 24), None, 1)}


def _save_ours(model: nn.Module, optimizer: Muon, path: Path, **options: object) -> None:
    names = ("model", "optimizer")
    muonckpt.save(dict(zip(names, get_state_dict(model, optimizer), strict=True)), path, **options)


def test_ours_is_explained_in_all_methods(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 48), nn.Linear(48, 24))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = Muon([
        {"params": matrices[:1], "lr": 0.02}, {"params": matrices[1:], "lr": 0.02, "algorithm": "normuon"},
        {"params": vectors[:1], "algorithm": "adamw", "lr": 1e-3},
        {"params": vectors[1:], "algorithm": "lion", "lr": 1e-3},
    ])  # fmt: skip
    for step in range(4):
        model(torch.randn(16, 24)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= 2:
            _save_ours(model, optimizer, tmp_path / str(step))
    audit = audit_step(tmp_path / "2", tmp_path / "3")
    assert [v.status for v in audit.verdicts] == ["explained"] * 4
    assert {v.rules[0].method for v in audit.verdicts} == {"muon", "normuon", "adamw", "lion"}
    assert not audit.findings


def test_a_method_that_cannot_be_made_again_is_not_asked_about(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False)
    optimizer = Muon([{"params": [*model.parameters()], "algorithm": "adamuon"}])
    for step in range(3):
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        _save_ours(model, optimizer, tmp_path / str(step))
    [verdict] = audit_step(tmp_path / "1", tmp_path / "2").verdicts
    assert (verdict.status, verdict.reason) == ("not asked", "adamuon: its update cannot be made again of its state")


def test_steps_that_are_not_consecutive_are_refused(tmp_path):
    before, _ = _train(tmp_path, Truth(), {"up.0": (8, 8)})
    with pytest.raises(TargetError, match="no parameter of one name"):
        _train(other := tmp_path / "other", Truth(), {"else": (8, 8)})
        audit_step(before, other / "step-5")
    model = nn.Linear(4, 4, bias=False)
    optimizer = Muon(model.parameters())
    for step in (1, 5):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        _save_ours(model, optimizer, tmp_path / f"at-{step}", provenance={"step": step})
    with pytest.raises(TargetError, match=r"of step 1 .* of step 5: expected two consecutive steps"):
        audit_step(tmp_path / "at-1", tmp_path / "at-5")


def test_what_would_take_too_long_is_listed(tmp_path):
    before, after = _train(tmp_path, Truth(), {"up.0": (48, 32)})
    [verdict] = audit_step(before, after, flops=10).verdicts
    assert verdict.status == "not asked"
    assert "flops" in verdict.reason


def test_the_command_prints_it_and_exits_with_1_for_a_contradiction(tmp_path, capsys):
    before, after = _train(tmp_path / "true", Truth(), {"up.0": (48, 32)})
    assert muonckpt_command(["lab", "audit-step", str(before), str(after)]) == 0
    assert "the whole matrix" in capsys.readouterr().out
    before, after = _train(tmp_path / "cut", Truth(rows=(24, 24)), {"up.0": (48, 32)})
    assert muonckpt_command(["lab", "audit-step", str(before), str(after)]) == 1
    assert "2 parts of 24 rows" in capsys.readouterr().out


def _random_truth(generator: np.random.Generator, shape: tuple[int, int]) -> Truth:
    def cut(size: int) -> tuple[int, ...] | None:
        match generator.integers(4):
            case 0:
                return None
            case 1:
                count = int(generator.choice([n for n in (2, 3, 4, 6, 8) if size % n == 0]))
                return (size // count,) * count
            case _:
                edges = np.sort(generator.choice(np.arange(2, size - 2), int(generator.integers(1, 4)), replace=False))
                return tuple(int(n) for n in np.diff([0, *edges, size]))

    truth = Truth(rows=cut(shape[0])) if generator.integers(2) else Truth(columns=cut(shape[1]))
    coefficients = [KELLER, (1.875, -1.25, 0.375), (2.0, -1.5, 0.5), (3.0, -3.2, 1.2)][generator.integers(4)]
    return replace(
        truth, nesterov=bool(generator.integers(2)), momentum=float(generator.choice([0.8, 0.9, 0.95, 0.99])),
        dtype=[torch.float32, torch.bfloat16][generator.integers(2)], coefficients=coefficients,
        recorded={"nesterov": True, "momentum": 0.95, "ns_coefficients": KELLER},
    )  # fmt: skip


@pytest.mark.parametrize("seed", sweep(range(40), 0, 1, 2))
def test_a_verdict_is_right_or_cannot_tell(tmp_path, seed):
    generator = np.random.default_rng(seed)
    shape = (int(generator.choice([24, 48])), int(generator.choice([24, 36])))
    truth = _random_truth(generator, shape)
    audit = _audit(tmp_path, truth, {"w": shape}, seed=seed)
    [verdict] = audit.verdicts
    if verdict.status == "explained":
        assert _cuts(audit, "w") == {(False, truth.rows, truth.columns, 1)}, truth
        [recipe] = verdict.rules
        assert recipe.nesterov == truth.nesterov, truth
        if truth.nesterov:
            assert verdict.momenta[0] - 1e-3 <= truth.momentum <= verdict.momenta[1] + 1e-3
