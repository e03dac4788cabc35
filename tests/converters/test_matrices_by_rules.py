"""Options that say which matrices are in a parameter go with what rules cut and join.

The oracle is the optimizer's own cut: each element of a weight is the number of the matrix in which the source has it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import count

import numpy as np
import pytest
import torch

import muonckpt
from muonckpt.converters.options import grouped
from muonckpt.converters.translate.names import NameRule, NameRules
from muonckpt.optimizer.planning.matrices import Fused, matrices_of
from muonckpt.programs.codings import SPLITS

OURS = {"algorithm": "muon", "lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "convention": "ema"}
TORCH = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "eps": 1e-7, "ns_steps": 5,
         "ns_coefficients": (3.4445, -4.775, 2.0315), "adjust_lr_fn": None}  # fmt: skip
DION = {"algorithm": "muon", "lr": 0.02, "mu": 0.95, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "step": 3,
        "cautious_wd": False, "epsilon": 1e-8, "nesterov": True, "flatten": False, "adjust_lr": "rms_norm"}  # fmt: skip
XTUNER = {**DION, "num_experts": 1, "clip_grad": False}
del XTUNER["cautious_wd"]
COMMON = {"ours": OURS, "torch": TORCH, "dion": DION, "xtuner": XTUNER}
PROGRAMS = {"ours": "muonckpt", "torch": "torch", "dion": "dion", "xtuner": "xtuner"}


def fused_of(options: dict) -> Fused:
    """What our optimizer makes of a group's options, or of the same in the words of dion and XTuner."""
    pieces = options.get("pieces") or options.get("split_sizes")
    return Fused(pieces and tuple(pieces), options.get("columns"), options.get("interleaved") or 1,
                 bool(options.get("flatten")))  # fmt: skip


def counted(options: dict, shape: tuple[int, ...]) -> dict:
    """Options with a number of equal blocks of rows as their heights."""
    blocks = options.get("num_heads") or options.get("num_experts") or 1
    return {**options, "pieces": (shape[-2] // blocks,) * blocks} if blocks > 1 else options


def numbered(shape: tuple[int, ...], options: dict, first: count) -> torch.Tensor:
    """A weight whose elements are the numbers of its matrices."""
    weight = torch.zeros(shape)
    for matrix in matrices_of(shape, fused_of(counted(options, shape))):
        number = next(first)
        for piece in matrix:
            weight[tuple(slice(lo, hi) for lo, hi in zip(piece.box.lo, piece.box.hi, strict=True))] = number
    return weight


def saved(path, program: str, groups: list[dict]) -> dict[str, torch.Tensor]:
    """Save a model and its optimizer; ``groups`` have a shape for each parameter."""
    first, slot = count(1), "momentum" if program in ("dion", "xtuner") else "momentum_buffer"
    weights, state, stored = {}, {}, []
    for group in groups:
        options = {**COMMON[program], **{k: v for k, v in group.items() if k != "params"}}
        for name, shape in group["params"].items():
            weights[name] = numbered(shape, options, first)
            state[name] = {slot: weights[name] / 64}
            if program == "xtuner":
                state[name]["lr_ratio"] = ratio(shape, options)
        stored.append({**options, "params": [*group["params"]]})
    muonckpt.save({"model": weights, "optimizer": {"state": state, "param_groups": stored}}, path)
    return weights


def ratio(shape: tuple[int, ...], options: dict) -> float:
    """XTuner's factor of the rate of each of the blocks of rows."""
    if options.get("flatten"):
        return 0.2 * max(shape[0], int(np.prod(shape[1:]))) ** 0.5
    return 0.2 * max(shape[-2] // options["num_experts"], shape[-1]) ** 0.5


def check_matrices(path) -> dict[str, dict]:
    """Check that each matrix of the result is one of the source; return options by parameter."""
    by_name = {}
    with muonckpt.open(path) as checkpoint:
        for group in checkpoint.groups.values():
            by_name |= dict.fromkeys(group["params"], group)
        ids = set[float]()
        for name, options in by_name.items():
            weight = np.asarray(checkpoint.tensors[f"model.{name}"].numpy())
            for matrix in matrices_of(weight.shape, fused_of(counted(options, weight.shape))):
                boxes = [tuple(slice(a, b) for a, b in zip(p.box.lo, p.box.hi, strict=True)) for p in matrix]
                (found,) = set().union(*(np.unique(weight[box]).tolist() for box in boxes))
                assert found not in ids, name
                ids.add(found)
    return by_name


QKV = {"q_proj.weight": (16, 12), "k_proj.weight": (8, 12), "v_proj.weight": (8, 12)}
SPLIT_QKV = NameRule(("qkv_proj.weight",), ("q_proj.weight", "k_proj.weight", "v_proj.weight"), shares=(2, 1, 1))
BY_TURNS = NameRule(("qkv",), ("q", "k", "v"), shares=(2, 1, 1), interleaved=4)
SIDE_BY_SIDE = NameRule(("a", "b"), ("ab",), dim=1)
STACK = NameRule(("x.{e}",), ("x",), each="e", stacked=True)
ROWS_OF_EXPERTS = NameRule(("x.{e}",), ("x",), each="e")
ONE_ABOVE = NameRule(("a", "b"), ("ab",))
CUT_ROWS = NameRule(("ab",), ("a", "b"), shares=(1, 2))
PIECES = {"pieces": (4, 8), "columns": (2, 6)}

CASES = {
    "a method of one's own": ([{"params": QKV, "algorithm": "hyperball"}], [SPLIT_QKV.inverse()]),
    "stacked in a flattened group": ([{"params": {f"x.{e}": (8, 6) for e in range(3)}, "flatten": True}], [STACK]),
    "parts of one group": ([{"params": {**QKV, "o": (12, 16)}}], [SPLIT_QKV.inverse()]),
    "parts of several groups": ([{"params": {n: QKV[n]}} for n in QKV], [SPLIT_QKV.inverse()]),
    "parts with heads": ([{"params": {"a": (8, 12)}, "pieces": (4, 4)}, {"params": {"b": (6, 12)}}], [ONE_ABOVE]),
    "a whole with pieces": ([{"params": {"qkv_proj.weight": (32, 12)}, "pieces": (16, 8, 8)}], [SPLIT_QKV]),
    "by turns": ([{"params": {"qkv": (32, 12)}, "pieces": (4, 2, 2), "interleaved": 4}], [BY_TURNS]),
    "into turns": ([{"params": {"q": (16, 12), "k": (8, 12), "v": (8, 12)}}], [BY_TURNS.inverse()]),
    "side by side": ([{"params": {"a": (8, 6), "b": (8, 10)}}], [SIDE_BY_SIDE]),
    "columns apart": ([{"params": {"ab": (8, 12)}, "columns": (6, 6)}], [SIDE_BY_SIDE.inverse()]),
    "both ways": ([{"params": {"ab": (12, 8)}, **PIECES}], [CUT_ROWS]),
    "both ways, there and back": ([{"params": {"ab": (12, 8)}, **PIECES}], [CUT_ROWS, ONE_ABOVE]),
    "experts in a stack": ([{"params": {f"x.{e}": (8, 6) for e in range(3)}, "pieces": (4, 4)}], [STACK]),
    "experts out of a stack": ([{"params": {"x": (3, 8, 6)}, "pieces": (4, 4)}], [STACK.inverse()]),
    "experts one above the other": ([{"params": {f"x.{e}": (8, 6) for e in range(3)}}], [ROWS_OF_EXPERTS]),
    "a stack one above the other": ([{"params": {"x": (3, 8, 6)}}], [STACK.inverse(), ROWS_OF_EXPERTS]),
    "kernels": ([{"params": {"a": (4, 3, 2, 2), "b": (8, 3, 2, 2)}, "flatten": True}], [ONE_ABOVE]),
    "rows of kernels": ([{"params": {"ab": (12, 3, 2)}, "flatten": True, "pieces": (4, 8)}], [CUT_ROWS]),
    "the other parameters": ([{"params": {"a": (8, 6), "b": (8, 6), "c": (8, 6)}, "pieces": (4, 4)}], [ONE_ABOVE]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("to", [None, "muonckpt"])
def test_each_matrix_of_ours_stays_one(case, to, tmp_path):
    groups, rules = CASES[case]
    saved(tmp_path / "source", "ours", groups)
    call = muonckpt.convert if to else lambda *a, **o: muonckpt.reshard(*a, mesh={"dp": 2}, **o)
    report = call(tmp_path / "source", tmp_path / "made", **grouped(to_dialect=to, rules=NameRules(tuple(rules))))
    found = check_matrices(tmp_path / "made")
    if case == "the other parameters":
        assert (found["c"]["pieces"], found["ab"]["pieces"]) == ((4, 4), (4, 4, 4, 4))
    assert not [check for check in report.checklist if "pieces" in check.subject or "matri" in check.subject]


OF_OTHERS = [
    (source, case)
    for source, own in (("torch", set()), ("dion", {"flatten"}))
    for case, (groups, _) in CASES.items()
    if all({*group} - {"params"} <= own for group in groups)
]


@pytest.mark.parametrize(("source", "case"), OF_OTHERS)
def test_matrices_of_other_programs_stay_ours(source, case, tmp_path):
    """One program's parameters are a matrix each, or a stack; ours have the options after rules."""
    groups, rules = CASES[case]
    saved(tmp_path / "source", source, groups)
    options = grouped(to_dialect="muonckpt", rules=NameRules(tuple(rules)), from_dialect=source)
    muonckpt.convert(tmp_path / "source", tmp_path / "made", **options)
    check_matrices(tmp_path / "made")


def converted(tmp_path, source: str, groups: list[dict], rules: NameRules, to: str | None = None):
    saved(tmp_path / "source", source, groups)
    options = grouped(to_dialect=to, rules=rules, from_dialect=PROGRAMS[source])
    report = muonckpt.convert(tmp_path / "source", tmp_path / "made", **options)
    with muonckpt.open(tmp_path / "made") as checkpoint:
        groups = list(checkpoint.groups.values())
        items = dict(checkpoint.items)
    return {name: group for group in groups for name in group["params"]}, report, items


@pytest.mark.parametrize("to", [None, "dion"])
def test_dions_blocks_of_rows_go_with_their_parts(to, tmp_path):
    whole = [{"params": {"qkv_proj.weight": (32, 12)}, "split_sizes": (16, 8, 8), "num_heads": None}]
    found, report, _ = converted(tmp_path / "split", "dion", whole, NameRules((SPLIT_QKV,)), to)
    assert {name: group["split_sizes"] for name, group in found.items()} == dict.fromkeys(QKV)
    assert not [check for check in report.checklist if "split_sizes" in check.subject or "pieces" in check.subject]
    heads = [{"params": {"a": (8, 12)}, "num_heads": 2, "split_sizes": None}, {"params": {"b": (4, 12)},
             "num_heads": None, "split_sizes": None}]  # fmt: skip
    found, _, _ = converted(tmp_path / "joined", "dion", heads, NameRules((ONE_ABOVE,)), to)
    assert (found["ab"]["split_sizes"], found["ab"]["num_heads"]) == ((4, 4, 4), None)
    check_matrices(tmp_path / "joined" / "made")


def test_no_heads_are_refused():
    with pytest.raises(muonckpt.SourceError, match="a parameter has 0 equal matrices"):
        SPLITS.read({"num_heads": 0, "split_sizes": None}, (8, 12))


@pytest.mark.parametrize("to", [None, "xtuner"])
def test_xtuners_experts_and_rates_go_with_their_parts(to, tmp_path):
    groups = [{"params": {"x": (24, 6)}, "num_experts": 3}, {"params": {"o": (6, 12)}, "num_experts": 1}]
    out = NameRule(("x",), ("x.{e}",), each="e", count=3)
    found, report, items = converted(tmp_path / "out", "xtuner", groups, NameRules((out,)), to)
    assert {name: group["num_experts"] for name, group in found.items()} == {"x.0": 1, "x.1": 1, "x.2": 1, "o": 1}
    ratios = {name: items[f"optimizer.state.{name}.lr_ratio"] for name in found}
    assert ratios == {name: pytest.approx(0.2 * max(8, 6) ** 0.5) for name in ("x.0", "x.1", "x.2")} | {
        "o": 0.2 * 12**0.5
    }
    assert not [check for check in report.checklist if "pieces" in check.subject or "lr_ratio" in check.subject]
    experts = [{"params": {f"x.{e}": (8, 6) for e in range(3)}, "num_experts": 1}]
    found, _, items = converted(tmp_path / "in", "xtuner", experts, NameRules((out.inverse(),)), to)
    assert found["x"]["num_experts"] == 3 and items["optimizer.state.x.lr_ratio"] == pytest.approx(0.2 * 8**0.5)


def test_renamed_parameters_of_xtuner_keep_their_rates(tmp_path):
    rename = NameRules((NameRule(("x",), ("y",)),))
    _, _, items = converted(tmp_path, "xtuner", [{"params": {"x": (24, 6)}}], rename)
    assert items["optimizer.state.y.lr_ratio"] == ratio((24, 6), XTUNER)
    assert "optimizer.state.x.lr_ratio" not in items


def test_kernels_whose_momentum_is_stored_as_a_matrix_stay_matrices(tmp_path):
    kernels = {name: torch.ones(rows, 3, 5) for name, rows in (("a", 4), ("b", 8))}
    state = {name: {"momentum_buffer": kernel.flatten(1)} for name, kernel in kernels.items()}
    groups = [{"params": [*kernels], "lr": 0.1, "momentum": 0.9, "use_muon": True}]
    muonckpt.save({"model": kernels, "optimizer": {"state": state, "param_groups": groups}}, tmp_path / "source")
    options = grouped(to_dialect="muonckpt", convention="ema", rules=NameRules((ONE_ABOVE,)))
    muonckpt.convert(tmp_path / "source", tmp_path / "made", **options)
    (group,) = muonckpt.open(tmp_path / "made").groups.values()
    assert (group["pieces"], group["flatten"]) == ((4, 8), True)


def test_what_the_program_cannot_say_is_told(tmp_path):
    """torch.optim.Muon would orthogonalise q, k and v as one matrix; so would ours rows of which some have columns."""
    found, report, _ = converted(tmp_path / "torch", "torch", [{"params": QKV}], NameRules((SPLIT_QKV.inverse(),)))
    assert ("pieces of muon groups", ("(16, 8, 8)",)) in {(c.subject, c.values) for c in report.checklist}
    mixed = [{"params": {"a": (8, 12)}, "columns": (6, 6)}, {"params": {"b": (6, 12)}}]
    found, report, _ = converted(tmp_path / "ours", "ours", mixed, NameRules((ONE_ABOVE,)))
    assert (found["ab"].get("pieces"), found["ab"]["columns"]) == (None, None)
    assert "pieces of ab" in {check.subject for check in report.checklist}


@pytest.mark.parametrize("to", [None, "muonckpt", "dion"])
def test_where_no_groups_are_written_the_matrices_are_told(to, tmp_path):
    weights = {name: torch.ones(shape) for name, shape in QKV.items()}
    state = {name: {"momentum_buffer": weight} for name, weight in weights.items()}
    muonckpt.save({"model": weights, "optimizer": {"state": state}}, tmp_path / "source")
    options = grouped(to_dialect=to, convention="ema", mu=0.9, rules=NameRules((SPLIT_QKV.inverse(),)))
    report = muonckpt.convert(tmp_path / "source", tmp_path / "made", **options)
    assert ("pieces of qkv_proj.weight", ("(16, 8, 8)",)) in {(c.subject, c.values) for c in report.checklist}


def test_megatrons_common_state_is_copied_and_the_matrices_are_told(tmp_path):
    saved(tmp_path / "source", "torch", [{"params": QKV}])
    muonckpt.convert(tmp_path / "source", tmp_path / "there", to_dialect="torch_dist")
    report = muonckpt.convert(tmp_path / "there", tmp_path / "made", **grouped(rules=NameRules((SPLIT_QKV.inverse(),))))
    assert ("pieces of qkv_proj.weight", ("(16, 8, 8)",)) in {(c.subject, c.values) for c in report.checklist}


def test_a_matrix_that_rules_cut_is_told(tmp_path):
    groups = [{"params": {"qkv_proj.weight": (32, 12)}}]
    _, report, _ = converted(tmp_path / "cut", "torch", groups, NameRules((SPLIT_QKV,)), "muonckpt")
    told = {check.subject: check.values for check in report.checklist}
    assert told["a matrix that rules cut"] == tuple(sorted(QKV))
    there_and_back = NameRules((SPLIT_QKV, SPLIT_QKV.inverse()))
    found, report, _ = converted(tmp_path / "back", "torch", groups, there_and_back, "muonckpt")
    assert found["qkv_proj.weight"]["pieces"] is None
    assert "a matrix that rules cut" not in {check.subject for check in report.checklist}


def test_groups_list_the_new_parameters_and_those_that_they_list_once_more(tmp_path):
    """A group is cut in two where its members differ, and the numbers of those after it move."""
    groups = [{"params": {**QKV, "o": (12, 16)}, "param_names": [*QKV, "o"]}, {"params": {"up": (24, 12)}}]
    saved(tmp_path / "source", "ours", groups)
    rules = grouped(rules=NameRules((SPLIT_QKV.inverse(),)))
    muonckpt.convert(tmp_path / "source", tmp_path / "made", **rules)
    with muonckpt.open(tmp_path / "made") as made:
        found = [(g["params"], g.get("param_names"), g.get("pieces")) for g in made.groups.values()]
    whole = ["qkv_proj.weight"]
    assert found == [(whole, whole, (16, 8, 8)), (["o"], ["o"], None), (["up"], None, None)]
    muonckpt.convert(tmp_path / "source", tmp_path / "keys", **grouped(to_dialect="muonckpt", keys="flat"))
    muonckpt.convert(tmp_path / "keys", tmp_path / "flat", **rules)
    items = muonckpt.open(tmp_path / "flat").items
    assert items["optimizer.param_groups.qkv_proj.weight.pieces"] == (16, 8, 8)
    assert items["optimizer.param_groups.o.param_names"] == ["qkv_proj.weight", "o"]
    assert not [key for key in items if "q_proj" in key.replace("qkv_proj", "")]


def test_the_command_says_the_same(tmp_path):
    saved(tmp_path / "source", "ours", [{"params": QKV}])
    (tmp_path / "rules.toml").write_text(NameRules((SPLIT_QKV.inverse(),)).to_toml())
    command = [sys.executable, "-m", "muonckpt", "reshard", "source", "made", "--mesh", "dp=2", "--rules", "rules.toml"]
    told = json.loads(subprocess.run([*command, "--json"], cwd=tmp_path, capture_output=True, check=True).stdout)
    assert told["tensors"] == 2
    with muonckpt.open(tmp_path / "made") as made:
        assert [group["pieces"] for group in made.groups.values()] == [(16, 8, 8)]
