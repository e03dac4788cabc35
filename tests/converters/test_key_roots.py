"""Wherever a trainer puts its model and its optimizers, and in whichever form of keys, the same state comes of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.commands import called
from support.translated import W, executed, opened, options, saved, translate
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

import muonckpt
from muonckpt import SourceError, TargetError
from muonckpt.converters.options import grouped
from muonckpt.optimizer import Muon
from muonckpt.programs.detection import with_slots
from muonckpt.programs.registry import DIALECTS

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*did not say options")

NAMES = ("layers.0.w", "state.b")  # the second looks like a place of state
MODEL = {NAMES[0]: W, NAMES[1]: W[0]}
GROUPS = {NAMES[0]: {"lr": 0.5, "momentum": 0.75}, NAMES[1]: {"lr": 0.25, "betas": (0.5, 0.75)}}
STATE = {NAMES[0]: {"momentum_buffer": W + 1},
         NAMES[1]: {"exp_avg": W[0] + 2, "exp_avg_sq": W[0] + 3, "step": torch.tensor(4.0)}}  # fmt: skip


def nested_keys(*names: str) -> dict:
    return {"state": {name: STATE[name] for name in names},
            "param_groups": [{"params": [name], **GROUPS[name]} for name in names]}  # fmt: skip


def flat_keys(*names: str) -> dict:
    state = {f"state.{name}.{slot}": value for name in names for slot, value in STATE[name].items()}
    return state | {f"param_groups.{name}.{key}": value for name in names for key, value in GROUPS[name].items()}


def prefixed(prefix: str, state: dict) -> dict:
    return {prefix + key: value for key, value in state.items()}


NESTED, FLAT = nested_keys(*NAMES), flat_keys(*NAMES)
PLACES = {
    "usual": {"model": MODEL, "optimizer": NESTED},
    "optim": {"model": MODEL, "optim": NESTED},
    "flat": {"model": MODEL, "optimizer": FLAT},
    "flat, the model at the top": {**MODEL, "optim": FLAT},
    "one app": {"app": {"model": MODEL, "optimizers": FLAT}},
    "two optimizers": {"model": MODEL, "optimizer_0": nested_keys(NAMES[0]), "optimizer_1": nested_keys(NAMES[1])},
    "a list of optimizers": {"net": MODEL, "optimizers": [nested_keys(NAMES[0]), nested_keys(NAMES[1])]},
    "two forms": {"model": MODEL, "a": nested_keys(NAMES[0]), "b": flat_keys(NAMES[1])},
    "all in one": {"state_dict": {"model": prefixed("module.", MODEL), "optimizer": NESTED}},
    "keys with dots only": {**prefixed("model.", MODEL), **prefixed("app.optimizer.", FLAT)},
    "with a copy of the model": {"model": MODEL, "ema": {name: value * 2 for name, value in MODEL.items()},
                                 "optim": NESTED},
}  # fmt: skip


@pytest.mark.parametrize("case", PLACES)
def test_state_is_found_under_any_root_and_form_and_put_back_there(case, tmp_path):
    manifest, path = saved(tmp_path, PLACES[case])
    values = opened(path).values
    assert {(t.name, t.slot) for t in with_slots(manifest).tensors if t.slot} == {
        (name, slot) for name, slots in STATE.items() for slot in slots
    }
    asked = {"convention": muonckpt.names.vocabulary.Convention.SUM}
    moved = translate(manifest, values, DIALECTS["muonckpt"], **asked)
    found = executed(path, moved)
    expected = {f"model.{name}": value for name, value in MODEL.items()}
    expected |= {f"optimizer.state.{name}.{slot}": value for name, s in STATE.items() for slot, value in s.items()}
    expected[f"optimizer.state.{NAMES[0]}.momentum_buffer"] = (W + 1) * 0.25
    assert {key: found[key].view("<f4").tolist() for key in expected} == {k: v.tolist() for k, v in expected.items()}
    groups = options(moved)
    numbers = {groups[f"optimizer.param_groups.{n}.params"][0]: n for n in (0, 1)}
    assert {name: groups[f"optimizer.param_groups.{n}.lr"] for name, n in numbers.items()} == {
        name: group["lr"] for name, group in GROUPS.items()
    }
    assert any(note == 'momentum: sum, because `convention="sum"` says so' for note in moved.notes)
    back = translate(manifest, values, **asked)
    assert {tensor.record.path for tensor in back.tensors} == {tensor.path for tensor in manifest.tensors}
    assert {item.path for item in back.items} == {blob.path for blob in manifest.blobs}


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    matrix = matrix / matrix.norm()
    for _ in range(5):
        gram = matrix @ matrix.T
        matrix = 3.4445 * matrix + (-4.775 * gram + 2.0315 * gram @ gram) @ matrix
    return matrix


class SumMuon(torch.optim.Optimizer):
    """A Muon that accumulates a sum, and has options of the same names as torch's."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.02, "momentum": 0.95, "nesterov": True, "ns_steps": 5, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                momentum = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))
                momentum.mul_(group["momentum"]).add_(weight.grad)
                weight.sub_(orthogonal(weight.grad + group["momentum"] * momentum), alpha=group["lr"])


def step(model: nn.Module, number: int, *optimizers: torch.optim.Optimizer) -> None:
    data = torch.randn(16, 6, generator=torch.Generator().manual_seed(number))
    model.zero_grad()
    model(data).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()


def test_a_flattened_muon_of_sums_goes_on_as_if_nothing_had_happened(tmp_path):
    """Trained, flattened by torch's own option, saved by stock DCP, converted, and trained on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    theirs = SumMuon(model.parameters())
    for number in range(20):
        step(model, number, theirs)
    flat = get_optimizer_state_dict(model, theirs, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save({"model": get_model_state_dict(model), "optim": flat}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    with pytest.raises(SourceError, match=r"`convention=.ema.` or `convention=.sum.`"):
        muonckpt.convert(tmp_path / "theirs", tmp_path / "ours", to_dialect="muonckpt")
    report = muonckpt.convert(
        tmp_path / "theirs", tmp_path / "ours", **grouped(to_dialect="muonckpt", convention="sum")
    )
    assert [note for note in report.notes if note.startswith('momentum: sum, because `convention="sum"`')]

    torch.manual_seed(1)
    again = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    ours = Muon([{"params": list(again.parameters()), "lr": 0.02, "weight_decay": 0.0, "ns_dtype": "float32",
                  "ns_coefficients": "keller", "adjust_lr_fn": "none"}])  # fmt: skip
    step(again, 0, ours)
    state = {"model": get_model_state_dict(again), "optimizer": get_optimizer_state_dict(again, ours)}
    (own_options,) = muonckpt.load(state, tmp_path / "ours").own_options
    assert "momentum=" not in own_options and "lr=" not in own_options.replace("adjust_lr_fn=", "")
    for number in range(20, 24):
        before = [weight.detach().clone() for weight in model.parameters()]
        step(model, number, theirs)
        step(again, number, ours)
        for old, one, other in zip(before, model.parameters(), again.parameters(), strict=True):
            assert (one - other).norm() < 1e-5 * (one - old).norm()


def save(state: dict, path) -> None:
    dcp.save(state, checkpoint_id=path, no_dist=True)


def test_model_and_optimizers_in_sibling_folders_are_one_checkpoint(tmp_path):
    """As accelerate saves them: the optimizers are all under `optimizer`, each in a folder of its own."""
    whole = {"model": MODEL, "optimizer": NESTED}
    save(whole, tmp_path / "whole")
    for place, optimizers in (("one", [NESTED]), ("two", [nested_keys(NAMES[0]), nested_keys(NAMES[1])])):
        folder = tmp_path / place / "checkpoint-10"
        save({"model": MODEL}, folder / "pytorch_model_fsdp_0")
        for number, optimizer in enumerate(optimizers):
            save({"optimizer": optimizer}, folder / f"optimizer_{number}")
        with pytest.raises(SourceError, match=r"Give the path of one, such as .*/checkpoint-10"):
            muonckpt.open(folder.parent)
        report = muonckpt.convert(folder, tmp_path / place / "ours", **grouped(to_dialect="muonckpt", convention="sum"))
        same = muonckpt.convert(
            tmp_path / "whole", tmp_path / place / "o", **grouped(to_dialect="muonckpt", convention="sum")
        )
        assert report.fingerprints == same.fingerprints
        assert [str(check) for check in report.checklist if check.action == "rescaled"] == [
            'rescaled: momentum_buffer: 1 tensor, times 0.25 (momentum: sum, because `convention="sum"` says so)'
        ]
        assert not muonckpt.verify(folder).findings


def test_of_a_runs_checkpoints_none_is_taken_silently(tmp_path):
    for number in (1, 2):
        save({"model": MODEL, "optimizer": NESTED}, tmp_path / "run" / f"iter_{number}")
        save({"model": MODEL}, tmp_path / "weights" / f"step{number}")
    with pytest.raises(SourceError, match="found several, in its folders iter_1, iter_2; give the path"):
        muonckpt.open(tmp_path / "run")
    with pytest.raises(SourceError, match="found several, in its folders step1, step2"):
        muonckpt.open(tmp_path / "weights")


def test_momentum_of_float16_is_not_rescaled_into_infinities_or_zeros(tmp_path):
    state = {"model": {"w": W}, "optimizer": {"state.w.momentum_buffer": W.half() * 6000}}
    manifest, path = saved(tmp_path, state)
    values = opened(path).values
    asked = {"source": DIALECTS["dcp"], "convention": muonckpt.names.vocabulary.Convention.EMA, "mu": 0.95}
    with pytest.raises(SourceError, match=r"'w': its momentum is float16.*may overflow or vanish"):
        translate(manifest, values, DIALECTS["dion"], **asked)
    kept = translate(manifest, values, DIALECTS["muonckpt"], **asked)
    assert [tensor.scale for tensor in kept.tensors] == [None, None]


@pytest.mark.parametrize(("source", "target"), [("sum", "ema"), ("ema", "sum")])
def test_momentum_of_float16_is_rescaled_in_float32_with_one_rounding(source, target, tmp_path):
    """Every finite number of float16: those that would overflow or vanish in it, too.  And home within one rounding."""
    every = torch.arange(1 << 16).to(torch.uint16).view(torch.float16)
    every = every[every.isfinite()].reshape(-1, 2)
    model = {"w": torch.zeros(every.shape)}
    save({"model": model, "optimizer": {"state.w.momentum_buffer": every}}, tmp_path / "half")
    asked = {"mu": 0.95, "from_dialect": "dcp", "to_dialect": "dcp", "state_dtype": "float32"}
    muonckpt.convert(
        tmp_path / "half", tmp_path / "wide", **grouped(convention=source, target_convention=target, **asked)
    )
    factor = 1 - 0.95 if target == "ema" else 1 / (1 - 0.95)
    key = "optimizer.state.w.momentum_buffer"
    with muonckpt.open(tmp_path / "wide") as wide:
        found = wide.tensors[key]
        assert (found.dtype, found.convention) == ("float32", target)
        exactly = (every.double() * factor).float()
        assert torch.equal(torch.from_numpy(found.numpy().copy()), exactly) and exactly.isfinite().all()
    muonckpt.convert(tmp_path / "wide", tmp_path / "home", **grouped(target_convention=source, **asked))
    with muonckpt.open(tmp_path / "home") as home:
        assert torch.equal(torch.from_numpy(home.tensors[key].numpy().copy()).half(), every)


@pytest.mark.filterwarnings("ignore:.* was saved with a muonckpt.json, which is missing")
def test_a_target_has_its_model_and_optimizer_where_they_are_asked_to_be(tmp_path):
    save({"model": MODEL, "optimizer": NESTED}, tmp_path / "theirs")
    asked = {"to_dialect": "dcp", "from_dialect": "dcp", "convention": "sum"}
    plain = muonckpt.convert(tmp_path / "theirs", tmp_path / "plain", **grouped(**asked))
    for number, (form, state) in enumerate({"nested": ("app", "optim", "state"), "flat": ("app", "optim")}.items()):
        out = tmp_path / form
        done = called("convert", tmp_path / "theirs", out, "--to", "dcp", "--from", "dcp", "--convention", "sum",
                      "--keys", form, "--root", "optimizer=app.optim", "--root", "model=")  # fmt: skip
        assert done.returncode == 0, done.stderr
        paths = {tensor.path for tensor in muonckpt.open(out).outline.tensors}
        assert {path for path in paths if len(path) == 1} == {(name,) for name in MODEL}
        assert {path[: 3 - number] for path in paths if len(path) > 1} == {state}
        (out / "muonckpt.json").unlink()
        back = muonckpt.convert(out, tmp_path / f"{form} back", **grouped(**asked))
        assert back.fingerprints == plain.fingerprints
    for roots, message in (({"optim": "x"}, "expected one of model, optimizer"), ({"model": "a..b"}, "such as app")):
        with pytest.raises(TargetError, match=message):
            muonckpt.convert(tmp_path / "theirs", tmp_path / "no", **grouped(roots=roots, **asked))
    with pytest.raises(TargetError, match="without `to_dialect=`"):
        muonckpt.convert(tmp_path / "theirs", tmp_path / "no", **grouped(roots={"model": "x"}))


@pytest.mark.filterwarnings("ignore:.* was saved with a muonckpt.json, which is missing")
def test_any_program_is_written_in_flat_keys_and_read_back(tmp_path):
    save({"model": MODEL, "optimizer": NESTED}, tmp_path / "theirs")
    muonckpt.convert(
        tmp_path / "theirs", tmp_path / "flat", **grouped(to_dialect="dion", keys="flat", convention="sum")
    )
    assert f"state.{NAMES[0]}.momentum" in {t.path[-1] for t in muonckpt.open(tmp_path / "flat").outline.tensors}
    (tmp_path / "flat" / "muonckpt.json").unlink()
    back = muonckpt.convert(tmp_path / "flat", tmp_path / "back", **grouped(to_dialect="dcp", from_dialect="dion"))
    same = muonckpt.convert(tmp_path / "theirs", tmp_path / "same", **grouped(to_dialect="dcp", convention="sum"))
    assert back.fingerprints == same.fingerprints
    assert "momentum: sum, because that is what dion keeps: `from_dialect=` names it" in back.notes
    again = muonckpt.reshard(tmp_path / "flat", tmp_path / "as it is", mesh={"dp": 2})
    assert [note for note in again.notes if note.startswith("momentum: sum, because that is what dion keeps: only it")]
    with pytest.raises(TargetError, match="without `to_dialect=`"):
        muonckpt.convert(tmp_path / "theirs", tmp_path / "none", **grouped(keys="flat"))
