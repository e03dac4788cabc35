"""muonckpt.load with fresh=[GLOB, ...]: exactly what is named starts anew, everything else is loaded or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.failing import raised
from support.leaves import leaves
from support.regrouped import (
    CHANGES,
    FRESH,
    LOADED,
    RATES,
    Net,
    build,
    set_by_hand,
    state_of,
    steps,
    weights_of,
)
from support.workers import run
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import muonckpt
from muonckpt import SourceError
from muonckpt.optimizer import Muon

FORMS = {form: StateDictOptions(flatten_optimizer_state_dict=form == "flat") for form in ("nested", "flat")}

Truth = tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]
"""Weights and state of the run that was saved, whole, by name."""


def template(net: Net, opt: Muon, form: str = "nested") -> dict[str, Any]:
    weights, state = get_state_dict(net, opt, options=FORMS[form])
    return {"model": weights, "optimizer": state}


def save(rank: int, world: int, folder: str) -> Truth:
    net, opt = build(changed=False)
    steps(net, opt, 0, 3)
    for form in FORMS:
        muonckpt.save(template(net, opt, form), f"{folder}/{form}")
    return weights_of(net), state_of(net, opt)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, Truth]:
    folder = tmp_path_factory.mktemp("regrouped")
    return folder, run(2, save, str(folder))[0]


def resume(rank: int, world: int, path: str, form: str, truth: Truth) -> str:
    """Resume in an optimizer that has been stepped; everything that is not as it must be fails here."""
    weights, state = truth
    net, opt = build(changed=True)
    steps(net, opt, 7, 8)
    present = weights_of(net)
    loaded = template(net, opt, form)
    report = muonckpt.load(loaded, path, fresh=FRESH)
    set_state_dict(
        net,
        opt,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
        options=FORMS[form],
    )
    twin_net, twin = build(changed=True)
    kept = {name: value for name, value in present.items() if name not in weights}
    assert set(kept) == {"norm.weight", "norm.bias"}
    set_by_hand(twin_net, twin, {**weights, **kept}, {name: state[name] for name in LOADED})
    for one_steps in (0, 2):
        steps(net, opt, 3, 3 + one_steps)
        steps(twin_net, twin, 3, 3 + one_steps)
        assert leaves(weights_of(net)) == leaves(weights_of(twin_net))
        assert leaves(state_of(net, opt)) == leaves(state_of(twin_net, twin))
        assert [group["lr"] for group in opt.param_groups] == RATES
    return str(report)


@pytest.mark.filterwarnings("ignore:hyper-parameters are those of the saved run")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_named_starts_fresh_and_the_rest_goes_on_bit_for_bit(saved, form, ranks):
    """As a model and optimizer set by hand from what was saved, on the same and on another number of ranks."""
    folder, truth = saved
    reports = run(ranks, resume, str(folder / form), form, truth)
    assert set(reports) == {
        "2 weights stay as initialised: model.norm.bias, model.norm.weight\n"
        "state loaded: 3\n"
        "state starts fresh: 4 (head.weight, norm.*, qkv.1.weight)\n"
        "dropped, only in the checkpoint: 2 (model.old.weight, old.weight)"
    }


def test_a_load_of_a_model_alone_counts_weights(tmp_path):
    state = template(*build(changed=False))
    muonckpt.save(state, tmp_path / "saved")
    report = muonckpt.load({"model": state["model"]}, tmp_path / "saved", allow_extra=["optimizer.*"])
    assert str(report) == f"weights loaded: {len(state['model'])}"


# --- refusals: everything that differs, by name, on all ranks, and nothing is touched -------------------------------


def refusal(state_dict: dict[str, Any], path: Path, **arguments: Any) -> str:
    before = leaves(state_dict)
    with pytest.raises(SourceError) as refused:
        muonckpt.load(state_dict, path, **arguments)
    assert leaves(state_dict) == before
    return str(refused.value)


@pytest.mark.parametrize("form", FORMS)
def test_fresh_is_not_offered_where_weights_are_missing_too(saved, form):
    message = refusal(template(*build(changed=True), form), saved[0] / form)
    assert "it has no 2 parameters such as 'norm.bias'; 2 parameters differ: moved from 'muon' to 'adamw'" in message
    assert "cannot be told which is which: here norm.bias, norm.weight; there old.weight" in message
    assert "fresh" not in message


@pytest.mark.parametrize("form", FORMS)
def test_fresh_is_offered_for_state_alone(saved, form):
    state = template(*build(changed=True), form)
    message = refusal(state, saved[0] / form, fresh=["norm.*", "old.*"])
    fresh = eval(message.partition("muonckpt.load(..., fresh=")[2].partition(")")[0])
    assert {*fresh} == {"head.weight", "qkv.1.weight"}
    assert muonckpt.load(state, saved[0] / form, fresh=["norm.*", "old.*", *fresh]).loaded


@pytest.mark.parametrize("glob", CHANGES)
def test_what_is_not_named_is_refused(saved, glob):
    others = [other for other in FRESH if other != glob]
    message = refusal(template(*build(changed=True)), saved[0] / "nested", fresh=others)
    told = "missing key 'model.norm.*'" if glob == "norm.*" else CHANGES[glob]
    assert told in message
    assert not any(CHANGES[other] in message for other in others)


def different(rank: int, world: int, path: str, by_rank: bool) -> str:
    fresh = [*FRESH, "head.bias"] if by_rank and rank else FRESH if by_rank else []
    return raised(lambda: muonckpt.load(template(*build(changed=True)), path, fresh=fresh))


@pytest.mark.parametrize("by_rank", [True, False])
def test_all_ranks_raise_one_error(saved, by_rank):
    first, second = run(2, different, str(saved[0] / "nested"), by_rank)
    assert first == second
    assert ("load was called with fresh=" if by_rank else "2 parameters differ") in first


def test_a_weight_of_another_shape_is_not_passed_over(saved):
    state = template(*build(changed=True))
    state["model"]["head.weight"] = torch.zeros(6, 8)
    message = refusal(state, saved[0] / "nested", fresh=FRESH)
    assert "'model.head.weight' has shape (5, 8), expected (6, 8)" in message


def test_state_that_would_have_fitted_is_told(saved):
    """So a glob that was forgotten in the script is seen at the next resume."""
    report = muonckpt.load(template(*build(changed=True)), saved[0] / "nested", fresh=[*FRESH, "qkv.2.*"])
    assert report.discarded == ("qkv.2.weight",) and "qkv.2.weight" in report.fresh
    everything = muonckpt.load(template(*build(changed=True)), saved[0] / "nested", fresh=["*"])
    assert everything.loaded == () and everything.kept == ("model.norm.bias", "model.norm.weight")


# --- parameter groups -----------------------------------------------------------------------------------------------


def grouped(*rates_and_numbers: tuple[float, tuple[int, ...]]) -> tuple[nn.Module, Muon]:
    net = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3)))
    return net, Muon([{"params": [net[i].weight for i in numbers], "lr": rate} for rate, numbers in rates_and_numbers])


def two_groups(form: str, path: Path, *rates: float) -> Path:
    """Saved: parameters 0 and 1 in a group, 2 in another."""
    first, second = rates
    net, opt = grouped((first, (0, 1)), (second, (2,)))
    muonckpt.save(template(net, opt, form), path)
    return path


@pytest.mark.filterwarnings("ignore:hyper-parameters are those of the saved run")
@pytest.mark.parametrize("form", FORMS)
def test_a_group_that_was_split_takes_the_options_it_had(form, tmp_path):
    path = two_groups(form, tmp_path / "c", 0.25, 0.5)
    net, opt = grouped((1.0, (2,)), (2.0, (1,)), (3.0, (0,)))
    state = template(net, opt, form)
    muonckpt.load(state, path)
    set_state_dict(net, opt, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=FORMS[form])
    assert [group["lr"] for group in opt.param_groups] == [0.5, 0.25, 0.25]


def test_groups_of_equal_options_may_be_joined(tmp_path):
    state = template(*grouped((1.0, (2, 1, 0))))
    muonckpt.load(state, two_groups("nested", tmp_path / "c", 0.25, 0.25))
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.25


def test_groups_of_different_options_are_not_joined_silently(tmp_path):
    path = two_groups("nested", tmp_path / "c", 0.25, 0.5)
    message = refusal(template(*grouped((1.0, (0, 1, 2)))), path)
    assert "from a group with other options than their other groups (lr=0.25, theirs 0.5): 2.weight" in message
    state = template(*grouped((1.0, (0, 1, 2))))
    assert muonckpt.load(state, path, fresh=["2.*"]).loaded == ("0.weight", "1.weight")
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.25


@pytest.mark.parametrize("fresh", [[], ["1.*"]])
def test_a_flattened_state_dict_that_does_not_tell_groups_apart_is_refused(fresh, tmp_path):
    path = two_groups("flat", tmp_path / "c", 0.25, 0.5)
    message = refusal(template(*grouped((1.0, (0, 1, 2))), "flat"), path, fresh=fresh)
    assert "(lr=0.25, theirs 0.5): 2.weight" in message and "flatten_optimizer_state_dict=False" in message


def test_a_parameter_whose_options_a_flattened_state_dict_lacks_is_refused_or_keeps_its_own(tmp_path):
    state = template(*grouped((0.25, (0, 1)), (0.5, (2,))), "flat")
    cut = {key: value for key, value in state["optimizer"].items() if not key.startswith("param_groups.2.weight.")}
    muonckpt.save({**state, "optimizer": cut}, tmp_path / "c")
    target = template(*grouped((1.0, (0, 1)), (2.0, (2,))), "flat")
    message = refusal(target, tmp_path / "c")
    assert "in no parameter group of the checkpoint" in message and "ungrouped=['2.weight']" in message
    with pytest.warns(UserWarning, match="did not say options, .*: all of 2.weight"):
        muonckpt.load(target, tmp_path / "c", ungrouped=["2.weight"])
    assert [target["optimizer"][f"param_groups.{number}.weight.lr"] for number in range(3)] == [0.25, 0.25, 2.0]


def test_what_the_template_does_not_ask_for_is_passed_over_only_if_that_is_allowed(tmp_path):
    path = two_groups("nested", tmp_path / "c", 0.25, 0.5)
    state = template(*grouped((1.0, (0, 1)), (2.0, (2,))))
    del state["optimizer"]["state"]["1.weight"]
    assert "1 parameter differs: only in the checkpoint: 1.weight" in refusal(state, path)
    assert muonckpt.load(state, path, fresh=["1.*"]).dropped == ("1.weight",)
    assert muonckpt.load(state, path, allow_extra=True).loaded == ("0.weight", "2.weight")


# --- what fresh cannot name -----------------------------------------------------------------------------------------


def test_parameters_that_have_numbers_cannot_be_named(tmp_path):
    _, opt = grouped((1.0, (0, 1, 2)))
    muonckpt.save({"optimizer": opt.state_dict()}, tmp_path / "c")
    message = refusal({"optimizer": opt.state_dict()}, tmp_path / "c", fresh=["*"])
    assert "the parameters of 'optimizer' have numbers" in message and "get_optimizer_state_dict" in message


def test_only_state_that_begins_as_zeros_starts_fresh(tmp_path):
    net = nn.Linear(3, 3)
    opt = torch.optim.Rprop(net.parameters())  # its step sizes begin at a rate
    muonckpt.save(template(net, opt), tmp_path / "c")
    message = refusal(template(net, opt), tmp_path / "c", fresh=["bias"])
    assert "'bias' cannot start fresh" in message and "how its prev" in message


# --- what keeps the state comes first --------------------------------------------------------------------------------


def small() -> tuple[nn.Module, Muon]:
    net = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 4))
    groups = [{"params": [net[0].weight, net[1].weight]}, {"params": [net[1].bias], "algorithm": "adamw", "lr": 1e-3}]
    return net, Muon(groups, lr=0.02)


GIVEN = {
    "objects": lambda net, opt: {"model": net, "optimizer": opt},
    "nested": template,
    "flat": lambda net, opt: template(net, opt, "flat"),
}
SAID = {
    "objects": "optimizer.state_dict(), by number",
    "nested": "from get_optimizer_state_dict, by name",
    "flat": "a flattened get_optimizer_state_dict",
}


@pytest.mark.parametrize("loaded", GIVEN)
@pytest.mark.parametrize("form", GIVEN)
def test_an_optimizer_saved_in_another_form_is_refused_with_the_form_that_keeps_its_state(form, loaded, tmp_path):
    net, opt = small()
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    opt.step()
    muonckpt.save(GIVEN[form](net, opt), tmp_path / "c")
    twin, other = small()
    if loaded != form:
        with pytest.raises(SourceError, match=r"'optimizer' was saved from .* To keep all of its state") as refused:
            muonckpt.load(GIVEN[loaded](twin, other), tmp_path / "c")
        was, _, to_be = str(refused.value).partition("is to be loaded into")
        assert SAID[form] in was and SAID[loaded].removeprefix("from ") in to_be
        assert "fresh=" not in str(refused.value) and "missing key" not in str(refused.value)
    again = GIVEN[form](twin, other)
    muonckpt.load(again, tmp_path / "c")
    if form != "objects":
        arguments = {"model_state_dict": again["model"], "optim_state_dict": again["optimizer"]}
        set_state_dict(twin, other, **arguments, options=FORMS[form])
    assert leaves(state_of(twin, other)) == leaves(state_of(net, opt))


def renamed(state: dict[str, Any], name: Any) -> dict[str, Any]:
    optimizer = state["optimizer"]
    return {
        "model": {name(key): value for key, value in state["model"].items()},
        "optimizer": {
            "state": {name(key): value for key, value in optimizer["state"].items()},
            "param_groups": [{**g, "params": [*map(name, g["params"])]} for g in optimizer["param_groups"]],
        },
    }


WRAPPED = {
    "module.": (lambda name: f"module.{name}", ("module.{tail*}", "{tail*}")),
    "net.model.": (lambda name: f"net.model.{name}", ("net.model.{tail*}", "{tail*}")),
    "_orig_mod.": (lambda name: name.replace(".", "._orig_mod."), ("{a}._orig_mod.{tail*}", "{a}.{tail*}")),
}


@pytest.mark.parametrize("wrapper", WRAPPED)
@pytest.mark.parametrize("is_saved_wrapped", [True, False])
def test_what_a_wrapper_has_put_into_names_is_renamed_by_the_rules_to_write(is_saved_wrapped, wrapper, tmp_path):
    name, rule = WRAPPED[wrapper]
    plain, wrapped = template(*small()), renamed(template(*small()), name)
    saved, target = (wrapped, plain) if is_saved_wrapped else (plain, wrapped)
    muonckpt.save(saved, tmp_path / "c")
    told, _, table = refusal(target, tmp_path / "c").partition(", with FILE:\n")
    old, new = rule if is_saved_wrapped else rule[::-1]
    assert table == f"[[rule]]\nfrom = {old!r}\nto = {new!r}" and "fresh" not in told
    (tmp_path / "FILE").write_text(table)
    translation = muonckpt.Translation(rules=str(tmp_path / "FILE"))
    muonckpt.convert(tmp_path / "c", tmp_path / "d", translation=translation)
    assert len(muonckpt.load(target, tmp_path / "d").loaded) == 3
    assert leaves(target) == leaves(renamed_to(target, saved))


def renamed_to(target: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """Return what was saved, under the names of the target in their order."""
    names = dict(zip(saved["model"], target["model"], strict=True))
    return renamed(saved, names.__getitem__)


def test_globs_may_come_from_an_iterator(tmp_path):
    def optimizer(value: float) -> dict[str, Any]:
        state = {name: {"momentum_buffer": torch.full((2,), value)} for name in "ab"}
        return {"state": state, "param_groups": [{"params": ["a", "b"], "lr": 1.0}]}

    muonckpt.save({"optimizer": optimizer(1.0), "more": 1}, tmp_path / "c")
    target = {"optimizer": optimizer(7.0)}
    report = muonckpt.load(target, tmp_path / "c", fresh=iter(["b"]), allow_extra=iter(["more"]))
    assert (report.loaded, report.fresh) == (("a",), ("b",))
    assert [slots["momentum_buffer"].tolist() for slots in target["optimizer"]["state"].values()] == [[1, 1], [0, 0]]
