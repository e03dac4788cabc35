"""Muon.load_state_dict across changed groups: refused with everything that differs, or started fresh by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.leaves import leaves
from support.regrouped import CHANGES, FRESH, LOADED, build, set_by_hand, state_of, steps, weights_of
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from muonckpt import ArgumentError
from muonckpt.names.vocabulary import MOMENTUM
from muonckpt.optimizer import Muon
from muonckpt.optimizer.restoration import FreshStart


@pytest.fixture(scope="module")
def saved() -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """Weights and state by name, and the state dict."""
    net, opt = build(changed=False, named=True)
    steps(net, opt, 0, 3)
    return weights_of(net), state_of(net, opt), copy.deepcopy(opt.state_dict())


def resuming() -> tuple[nn.Module, Muon]:
    """With state of its own, which must not stay."""
    net, opt = build(changed=True, named=True)
    steps(net, opt, 7, 8)
    return net, opt


def load(opt: Muon, state: dict[str, Any], by_hook: bool) -> None:
    if not by_hook:
        report = opt.load_state_dict(state, fresh=FRESH)
        assert sorted(report.loaded) == sorted(LOADED) and report.dropped == ("old.weight",)
        assert sorted(report.fresh) == ["head.weight", "norm.bias", "norm.weight", "qkv.1.weight"]
        return
    opt.register_load_state_dict_pre_hook(FreshStart(FRESH))
    with pytest.warns(UserWarning, match=r"(?s)resuming with fresh=.*state loaded: 3.*dropped.*old\.weight"):
        opt.load_state_dict(state)


@pytest.mark.filterwarnings("ignore:hyper-parameters are those of the saved run")
@pytest.mark.parametrize("by_hook", [False, True], ids=["argument", "hook"])
def test_what_is_named_starts_fresh_and_the_rest_goes_on_as_if_set_by_hand(saved, by_hook):
    weights, state, state_dict = saved
    net, opt = resuming()
    given = copy.deepcopy(state_dict)
    load(opt, given, by_hook)
    assert leaves(given) == leaves(state_dict), "what was given is left as it was"
    twin_net, twin = build(changed=True, named=True)
    net.load_state_dict(twin_net.state_dict())
    net.load_state_dict({name: value for name, value in weights.items() if name != "old.weight"}, strict=False)
    set_by_hand(twin_net, twin, weights_of(net), {name: state[name] for name in LOADED})
    assert leaves(opt) == leaves(twin)
    steps(net, opt, 3, 5)
    steps(twin_net, twin, 3, 5)
    assert leaves(weights_of(net)) == leaves(weights_of(twin_net)) and leaves(opt) == leaves(twin)


@pytest.mark.parametrize("left", [None, *CHANGES])
def test_what_is_not_named_is_refused_and_nothing_changed(saved, left):
    _, opt = resuming()
    before = leaves(copy.deepcopy(opt.state_dict()))
    fresh = [glob for glob in FRESH if left not in (None, glob)]
    with pytest.raises(ArgumentError, match="training would go on wrongly") as refused:
        opt.load_state_dict(copy.deepcopy(saved[2]), fresh=fresh)
    listed = {glob for glob, reason in CHANGES.items() if reason in str(refused.value)}
    assert listed == set(FRESH) - set(fresh)
    assert leaves(opt) == before


def test_a_glob_that_matches_nothing_is_refused(saved):
    _, opt = resuming()
    with pytest.raises(ArgumentError, match=r"fresh=\['lm_head.\*'\] match no parameter"):
        opt.load_state_dict(copy.deepcopy(saved[2]), fresh=[*FRESH, "lm_head.*"])


def numbered(pieces: tuple[int, ...] | None, algorithm: str = "normuon") -> Muon:
    chosen: dict[str, Any] = {"lr": 1e-3} if algorithm == "adamw" else {"pieces": pieces}
    chosen["algorithm"] = algorithm
    return Muon([{"params": [nn.Parameter(torch.zeros(6, 3))], **chosen}])


def test_without_names_differences_are_told_by_number_and_none_can_be_named():
    state = numbered((2, 4)).state_dict()
    with pytest.raises(ArgumentError, match=r"=\(2, 4\) in the checkpoint, None now: group 0 parameter 0 \(6, 3\)"):
        numbered(None).load_state_dict(state)
    with pytest.raises(ArgumentError, match="moved from 'normuon' to 'adamw': group 0 parameter 0"):
        numbered(None, "adamw").load_state_dict(state)
    with pytest.raises(ArgumentError, match="the parameters of this optimizer have no names"):
        numbered((2, 4)).load_state_dict(state, fresh=["*"])
    with pytest.raises(ArgumentError, match=r"groups of \[1\] parameters, this optimizer of \[2\].*named_parameters"):
        Muon([nn.Parameter(torch.zeros(6, 3)), nn.Parameter(torch.zeros(6, 3))]).load_state_dict(state)


def test_groups_in_another_order_without_names_are_told_to_be_built_in_the_same():
    matrix, bias = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4))
    groups = [{"params": [matrix], "lr": 0.1}, {"params": [bias], "algorithm": "adamw", "lr": 0.1}]
    with pytest.raises(ArgumentError, match="moved from 'muon' to 'adamw'") as refused:
        Muon(groups[::-1]).load_state_dict(Muon(groups).state_dict())
    told = str(refused.value)
    assert "build the groups of the saved run" in told and "Rule(" not in told and "fresh=" not in told


def test_names_in_place_of_numbers_are_matched_in_any_order():
    """`get_optimizer_state_dict` gives them, and its state may be loaded without `set_optimizer_state_dict`."""
    first, second = nn.ParameterDict(), nn.ParameterDict()
    for net, names in ((first, "xy"), (second, "yx")):
        net.update({name: torch.ones(4, 4) for name in names})
    opt = Muon(first.named_parameters(), lr=0.1)
    first["x"].grad, first["y"].grad = torch.ones(4, 4), torch.eye(4)
    opt.step()
    state = get_optimizer_state_dict(first, opt)
    for load in (Muon.load_state_dict, lambda other, state: set_optimizer_state_dict(second, other, state)):
        other = Muon(second.named_parameters(), lr=0.1)
        load(other, copy.deepcopy(state))
        assert leaves(state_of(second, other)) == leaves(state_of(first, opt))


Part = tuple[nn.Module, float]
"""A module, and the rate of its parameters."""


def of_modules(parts: list[Part], form: str) -> Muon:
    """The parameters of several modules, each named as in its module, so that names repeat."""
    if form == "one group":
        return Muon([pair for part, _ in parts for pair in part.named_parameters()], lr=parts[0][1])
    return Muon([{"params": part.named_parameters(), "lr": lr} for part, lr in parts])


def two_modules() -> list[Part]:
    return [(nn.Linear(4, 4, bias=False), 0.1), (nn.Linear(4, 4, bias=False), 0.2)]


@pytest.mark.filterwarnings("ignore:hyper-parameters are those of the saved run")
@pytest.mark.parametrize("form", ["one group", "two groups"])
def test_parameters_whose_names_repeat_go_by_number(form):
    parts = two_modules()
    opt = of_modules(parts, form)
    for size, (part, _) in enumerate(parts, 1):
        part.weight.grad = size * torch.randn(4, 4)
    opt.step()
    for group in opt.param_groups:
        group["lr"] /= 2
    other = of_modules(two_modules(), form)
    report = other.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert leaves(other.state_dict()) == leaves(opt.state_dict())
    momenta = [slots["momentum_buffer"] for slots in other.state.values()]
    assert not torch.equal(*momenta) and len(report.loaded) == len(set(report.loaded)) == 2
    whole = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in parts])
    third = of_modules([(part, 9.0) for part in whole], form)  # torch gives the names in the model for numbers
    set_optimizer_state_dict(whole, third, get_optimizer_state_dict(nn.ModuleList([part for part, _ in parts]), opt))
    assert leaves(third.state_dict()) == leaves(opt.state_dict())


def test_parameters_whose_names_repeat_in_another_order_are_refused():
    parts = [(nn.Linear(4, 4), 0.1), (nn.Linear(4, 4, bias=False), 0.2)]
    groups = [{"params": part.named_parameters(), "algorithm": "lion", "lr": lr} for part, lr in parts]
    swapped = [{"params": [*part.named_parameters()][::-1], "algorithm": "lion", "lr": lr} for part, lr in parts]
    opt = Muon(groups)
    before = leaves(copy.deepcopy(opt.state_dict()))
    with pytest.raises(
        ValueError, match=r"names repeat and have changed.*'bias', 'weight', 'weight'.*build the groups"
    ):
        opt.load_state_dict(Muon(swapped).state_dict())
    with pytest.raises(ArgumentError, match="the parameters of this optimizer have no names, or share them"):
        opt.load_state_dict(opt.state_dict(), fresh=["weight"])
    assert leaves(opt.state_dict()) == before


@pytest.mark.parametrize("given", [{}, {"model": {}, "optimizer": {}}, nn.Linear(2, 2).state_dict()])
def test_what_is_no_state_dict_of_an_optimizer_is_refused_in_words(given):
    with pytest.raises(ArgumentError, match="expected the state dict of an optimizer, which has 'state'") as refused:
        numbered(None).load_state_dict(given)
    assert all(repr(key) in str(refused.value) for key in given)


def test_its_own_state_is_left_to_an_optimizer_that_starts_others_fresh(recwarn):
    """accelerate loads it when it prepares an optimizer, also after that has been stepped."""
    _, opt = resuming()
    before = leaves(copy.deepcopy(opt.state_dict()))
    opt.register_load_state_dict_pre_hook(FreshStart(["old.*", "head.weight"]))
    opt.load_state_dict(opt.state_dict())
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert leaves(opt.state_dict()) == before and not recwarn.list


def test_momentum_is_kept_whatever_is_fused_now():
    """It is that of the whole parameter; NorMuon's second moment is of the pieces, and is refused above."""
    saved, resumed = numbered((2, 4), "muon"), numbered((3, 3), "muon")
    momentum = saved.state[saved.param_groups[0]["params"][0]]["momentum_buffer"].normal_().clone()
    with pytest.warns(UserWarning, match=r"keeps the code's pieces=\(3, 3\) \(saved \(2, 4\)\)"):
        resumed.load_state_dict(saved.state_dict())
    (param,) = resumed.param_groups[0]["params"]
    assert torch.equal(resumed.state[param]["momentum_buffer"], momentum)
    assert resumed.param_groups[0]["pieces"] == (3, 3)


def test_state_that_nothing_takes_is_refused():
    """Torch's AdamW keeps a maximum with ``amsgrad=True``, which a load would lose without a word."""
    param = nn.Parameter(torch.ones(4))
    stock = torch.optim.AdamW([param], lr=0.1, amsgrad=True)
    param.grad = torch.ones(4)
    stock.step()
    opt = Muon([{"params": [param], "algorithm": "adamw", "lr": 0.1}])
    before = leaves(copy.deepcopy(opt.state_dict()))
    state = stock.state_dict()["state"]
    given = opt.state_dict() | {"state": state}
    with pytest.raises(ArgumentError, match="with max_exp_avg_sq in the checkpoint, not here"):
        opt.load_state_dict(given)
    assert leaves(opt.state_dict()) == before
    del state[0]["max_exp_avg_sq"]
    opt.load_state_dict(given)
    assert torch.equal(opt.state[param]["exp_avg"], stock.state[param]["exp_avg"])


def test_momentum_of_the_other_convention_starts_fresh_or_is_converted():
    def named() -> Muon:
        return Muon([("w", nn.Parameter(torch.ones(4, 3)))], lr=0.1)

    state = named().state_dict()
    group, momentum = state["param_groups"][0], torch.randn(4, 3)
    group["convention"], state["state"][0]["momentum_buffer"] = "sum", momentum
    with pytest.raises(ArgumentError, match=r"expected ema: w. Convert it first: m_ema = \(1 - momentum\) \* m_sum$"):
        named().load_state_dict(state)
    assert named().load_state_dict(state, fresh=["w"]).fresh == ("w",)
    opt = named()
    group["convention"], state["state"][0]["momentum_buffer"] = "ema", (1 - group["momentum"]) * momentum
    opt.load_state_dict(state)
    assert torch.equal(opt.state_dict()["state"][0]["momentum_buffer"], (1 - 0.95) * momentum)


@pytest.mark.parametrize(("saved", "live"), [(None, None), (None, 0.1), (0.1, None)])
def test_a_bound_of_a_schedule_may_be_none_on_either_side(saved, live, recwarn):
    """Megatron writes max_lr and min_lr into every group, as None where no schedule bounds the rate."""
    source, target = (Muon([torch.nn.Parameter(torch.ones(2, 2))], lr=0.02) for _ in range(2))
    source.param_groups[0]["max_lr"], target.param_groups[0]["max_lr"] = saved, live
    target.load_state_dict(source.state_dict())
    assert target.param_groups[0]["max_lr"] == saved
    warned = [str(warning.message) for warning in recwarn if "hyper-parameters" in str(warning.message)]
    assert len(warned) == (saved != live) and all(f"max_lr={saved!r}, not {live!r}" in text for text in warned)


def test_state_that_is_swapped_within_an_optimizer_is_not_lost():
    """A state dict has the tensors of the optimizer that gave it, which the load writes to."""
    first, second = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 2))
    opt = Muon([first, second])
    for value, param in enumerate((first, second), 1):
        opt.state[param]["momentum_buffer"].fill_(value)
    state = opt.state_dict()
    state["state"] = {0: state["state"][1], 1: state["state"][0]}
    opt.load_state_dict(state)
    assert [opt.state[param]["momentum_buffer"].unique().item() for param in (first, second)] == [2, 1]


def test_a_view_of_the_optimizers_own_momentum_is_copied_in_its_order():
    """It begins where the momentum does, and is another matrix."""
    weight = torch.nn.Parameter(torch.randn(4, 4))
    optimizer = Muon([weight], lr=0.02)
    weight.grad = torch.randn(4, 4)
    optimizer.step()
    state_dict = optimizer.state_dict()
    [(key, slots)] = state_dict["state"].items()
    view = slots[MOMENTUM].mT
    expected = view.clone()
    state_dict["state"] = {key: {**slots, MOMENTUM: view}}
    optimizer.load_state_dict(state_dict)
    assert torch.equal(optimizer.state[weight][MOMENTUM], expected)
