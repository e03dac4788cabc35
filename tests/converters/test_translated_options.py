"""What one program says in other words than another: options of groups, there and back."""

from __future__ import annotations

import pytest
import torch
from support.golden import golden
from support.translated import (
    PEERS,
    TORCH,
    W,
    executed,
    nested,
    opened,
    options,
    saved,
    translate,
    translated,
)

import muonckpt
from muonckpt import SourceError
from muonckpt.converters.engine.outputs import Action
from muonckpt.converters.options import grouped
from muonckpt.names.resumption import as_tuples
from muonckpt.optimizer import COEFFICIENTS
from muonckpt.programs.registry import DIALECTS

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def there_and_back(source: str, target: str, tmp_path) -> tuple[dict, dict]:
    """The items of a golden checkpoint's optimizer, and of the same after a stay in the target's words."""
    place = golden(PEERS[source]) / "ckpt"
    muonckpt.convert(place, tmp_path / "there", to_dialect=target)
    muonckpt.convert(tmp_path / "there", tmp_path / "back", **grouped(from_dialect=target, to_dialect=source))
    before, after = (muonckpt.open(path).items for path in (place, tmp_path / "back"))
    return {k: before[k] for k in before if k.startswith("optimizer.")}, dict(after)


def test_dions_blocks_of_rows_come_back_from_ours(tmp_path):
    before, after = there_and_back("dion", "muonckpt", tmp_path)
    differing = {key for key in before if as_tuples(after[key]) != as_tuples(before[key])}
    assert {key.rpartition(".")[2] for key in differing} == {"adjust_lr"}  # which AdamW's groups do not use
    assert {tuple(g["pieces"]) for g in muonckpt.open(tmp_path / "there").groups.values() if g.get("pieces")} == {
        (24, 8, 8)
    }


def test_xtuners_experts_and_rates_come_back_from_ours_and_rows_that_it_splits_are_told(tmp_path):
    """Its ``lr_ratio`` shows that it splits rows, and no option says how: that is told, with what a new group has."""
    before, after = there_and_back("xtuner", "muonckpt", tmp_path)
    split = [f"layers.{layer}.attn.qkv.weight" for layer in (0, 1)]
    ratios = {key for key in before if key.endswith(".lr_ratio")}
    assert len(ratios) == 10 and ratios <= after.keys()
    assert {key for key in ratios if before[key] != after[key]} == {f"optimizer.state.{n}.lr_ratio" for n in split}
    places = golden("xtuner_fsdp4") / "ckpt", tmp_path / "back"
    groups = [muonckpt.open(place).groups.values() for place in places]
    theirs, ours = ({name: g["num_experts"] for g in each for name in g["params"]} for each in groups)
    assert theirs == ours and {4, 8} <= {*theirs.values()}
    there = muonckpt.open(tmp_path / "there").groups.values()
    assert all(g["pieces"] is None for g in there if {*split} & {*g["params"]})
    told = {check.subject for check in translated("xtuner_fsdp4/ckpt", "muonckpt").checklist}
    assert {f"pieces of {name}" for name in split} <= told


def test_every_option_that_cannot_be_said_is_reported_with_its_value(tmp_path):
    group = {"lr": 0.1, "momentum": 0.5, "ns_coefficients": "quintic", "ns_steps": 7, "pieces": (1, 1),
             "cautious": True, "adjust_lr_fn": "spectral", "algorithm": "muon", "convention": "ema",
             "initial_lr": 0.4}  # fmt: skip
    manifest, path = saved(tmp_path, nested({"momentum_buffer": W.clone()}, **group))
    result = translate(manifest, opened(path).values, DIALECTS["torch"], source=DIALECTS["muonckpt"])
    told = {check.subject.removesuffix(" of muon groups"): check.values for check in result.checklist}
    lost = {"ns_coefficients": ("'quintic'",), "ns_steps": ("7",), "pieces": ("(1, 1)",), "cautious": ("True",)}
    lost["adjust_lr_fn"] = ("'spectral'",)
    assert lost.items() <= told.items()
    assert options(result)["optimizer.param_groups.0.initial_lr"] == 0.4
    flat = translate(manifest, opened(path).values, DIALECTS["veomni"], source=DIALECTS["muonckpt"])
    assert options(flat)["optimizer.param_groups.w.head_blocks"] == 2
    assert options(flat)["optimizer.param_groups.w.ns_coefficients"] == COEFFICIENTS["quintic"].schedule(7)


def test_amsgrad_is_carried_or_told(tmp_path):
    slots = {"exp_avg": W.clone(), "exp_avg_sq": W.clone(), "step": torch.tensor(3.0)}
    how = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.25, "amsgrad": True}
    manifest, path = saved(tmp_path, nested(slots, **how))
    kept = translate(manifest, opened(path).values, DIALECTS["titan"], source=DIALECTS["torch"])
    assert options(kept)["optimizer.param_groups.w.amsgrad"] is True
    ours = translate(manifest, opened(path).values, DIALECTS["muonckpt"], source=DIALECTS["torch"])
    assert ("amsgrad of adamw groups", ("True",)) in {(check.subject, check.values) for check in ours.checklist}


@pytest.mark.parametrize("option, value", [("maximize", True), ("decoupled_weight_decay", False)])
def test_what_would_turn_the_update_around_is_refused_with_its_value(option, value, tmp_path):
    slots = {"exp_avg": W.clone(), "exp_avg_sq": W.clone(), "step": torch.tensor(3.0)}
    how = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.25, option: value}
    manifest, path = saved(tmp_path, nested(slots, **how))
    with pytest.raises(SourceError, match=r"maximize=True: it goes up|coupled=0.25: decay that is added"):
        translate(manifest, opened(path).values, DIALECTS["muonckpt"], source=DIALECTS["torch"])
    kept = translate(manifest, opened(path).values, DIALECTS["titan"], source=DIALECTS["torch"])
    assert options(kept)[f"optimizer.param_groups.w.{option}"] is value


# Steps.

ADAMW = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.25}


def averages(**slots) -> dict:
    return {"exp_avg": W.clone(), "exp_avg_sq": W.clone(), **slots}


@pytest.mark.parametrize("source", ["torch", "muonckpt"])
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32", "float64", "int64", "int32", "uint8"])
def test_a_step_counter_of_any_dtype_is_read_and_the_users_number_goes_before_it(kind, source, tmp_path):
    group = ADAMW | ({"algorithm": "adamw", "cautious": False} if source == "muonckpt" else {})
    manifest, path = saved(tmp_path, nested(averages(step=torch.tensor(48, dtype=getattr(torch, kind))), **group))
    values, into = opened(path).values, DIALECTS["muonckpt"]
    for step, expected in ((None, 48), (300, 300)):
        made = translate(manifest, values, into, step=step)
        (counter,) = (tensor for tensor in made.tensors if tensor.record.slot == "step")
        same = step is None and (kind == "float32" or (source == "muonckpt" and kind not in ("bfloat16", "float16")))
        assert counter.record.dtype == (kind if same else "float32")
        if not same:
            assert [executed(path, made)[counter.key].view("<f4")] == [expected]
    told = [check for check in made.checklist if check.subject == "the number of steps"]
    assert [check.values for check in told] == [("300",)]


@pytest.mark.parametrize(("kind", "last"), [("bfloat16", 256), ("float16", 2048)])
def test_a_counter_that_has_come_to_its_end_is_doubted(kind, last, tmp_path):
    """Adding one to it changes nothing."""
    for step, doubted in ((last - 1, False), (last, True)):
        counter = torch.tensor(step, dtype=getattr(torch, kind))
        assert (counter + 1 == counter) == doubted
        manifest, path = saved(tmp_path / str(step), nested(averages(step=counter), **ADAMW))
        made = translate(manifest, opened(path).values, DIALECTS["muonckpt"])
        assert any("give `step=`" in check.reason for check in made.checklist) == doubted


@pytest.mark.parametrize("count", [2.5, float("nan"), float("inf"), "lost", None])
def test_what_is_no_number_of_steps_is_replaced_by_the_users(count, tmp_path):
    """A fraction, nothing at all, and a counter that is left out by `drop`."""
    slots = averages(**({} if count is None else {"step": torch.tensor(2.5 if count == "lost" else count)}))
    manifest, path = saved(tmp_path, nested(slots, **ADAMW))
    values, dropped = opened(path).values, frozenset({"step"} if count == "lost" else ())
    with pytest.raises(SourceError, match=r"give `step=`|no method of dcp"):
        translate(manifest, values, DIALECTS["muonckpt"], drop=dropped)
    made = translate(manifest, values, DIALECTS["muonckpt"], drop=dropped, step=300)
    (counter,) = (tensor for tensor in made.tensors if tensor.record.slot == "step")
    assert [executed(path, made)[counter.key].view("<f4")] == [300]


def test_steps_that_a_group_counts_are_those_of_parameters_without_a_counter(tmp_path):
    """As fused Adams of apex and Transformer Engine keep them; also in the own program's words, by the user."""
    manifest, path = saved(tmp_path, nested(averages(), **ADAMW, step=7))
    made = translate(manifest, opened(path).values, DIALECTS["muonckpt"])
    (counter,) = (tensor for tensor in made.tensors if tensor.record.slot == "step")
    assert [executed(path, made)[counter.key].view("<f4")] == [7]
    group = {"lr": 0.1, "mu": 0.5, "algorithm": "muon", "epsilon": 1e-8, "cautious_wd": False, "step": 7}
    manifest, path = saved(tmp_path / "dion", nested({"momentum": W.clone()}, **group))
    made = translate(manifest, opened(path).values, step=300)
    assert options(made)["optimizer.param_groups.0.step"] == 300


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("option", ["lr", "weight_decay", "momentum"])
def test_a_number_with_which_no_update_is_possible_is_said_and_goes_nowhere(option, wrong, tmp_path):
    """Whoever resumes from it would train with it, or be refused by the optimizer."""
    manifest, path = saved(tmp_path, nested({"momentum_buffer": W}, **TORCH | {option: wrong}))
    made = translate(manifest, opened(path).values, DIALECTS["muonckpt"])
    assert f"optimizer.param_groups.0.{option}" not in options(made)
    told = {check.action: check for check in made.checklist if check.subject == f"{option} of muon groups"}
    assert told[Action.LEFT].values == (repr(wrong),) and "expected a" in told[Action.LEFT].reason
    assert Action.SET in told
    manifest, path = saved(tmp_path / "fine", nested({"momentum_buffer": W}, **TORCH))
    fine = translate(manifest, opened(path).values, DIALECTS["muonckpt"])
    assert options(fine)[f"optimizer.param_groups.0.{option}"] == TORCH[option]


def test_betas_of_which_one_is_no_number_are_not_half_kept(tmp_path):
    group = ADAMW | {"betas": (0.9, float("nan"))}
    manifest, path = saved(tmp_path, nested(averages(step=torch.tensor(3.0)), **group))
    made = translate(manifest, opened(path).values, DIALECTS["muonckpt"])
    assert "optimizer.param_groups.0.betas" not in options(made)
    assert [c.values for c in made.checklist if c.subject == "betas of adamw groups" and c.action is Action.LEFT] == [
        ("(0.9, nan)",)
    ]
