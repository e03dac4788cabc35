"""Muon.load_state_dict across changed groups: refused with everything that differs, or started fresh by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.leaves import leaves
from support.regrouped import CHANGES, FRESH, LOADED, build, set_by_hand, state_of, steps, weights_of
from torch import nn

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
    with pytest.raises(ValueError, match="training would go on wrongly") as refused:
        opt.load_state_dict(copy.deepcopy(saved[2]), fresh=fresh)
    listed = {glob for glob, reason in CHANGES.items() if reason in str(refused.value)}
    assert listed == set(FRESH) - set(fresh)
    assert leaves(opt) == before


def test_a_glob_that_matches_nothing_is_refused(saved):
    _, opt = resuming()
    with pytest.raises(ValueError, match=r"fresh=\['lm_head.\*'\] match no parameter"):
        opt.load_state_dict(copy.deepcopy(saved[2]), fresh=[*FRESH, "lm_head.*"])


def numbered(pieces: tuple[int, ...] | None, algorithm: str = "muon") -> Muon:
    chosen: dict[str, Any] = {"pieces": pieces} if algorithm == "muon" else {"algorithm": algorithm, "lr": 1e-3}
    return Muon([{"params": [nn.Parameter(torch.zeros(6, 3))], **chosen}])


def test_without_names_differences_are_told_by_number_and_none_can_be_named():
    state = numbered((2, 4)).state_dict()
    with pytest.raises(ValueError, match=r"pieces=\(2, 4\) in the checkpoint, None now: group 0 parameter 0 \(6, 3\)"):
        numbered(None).load_state_dict(state)
    with pytest.raises(ValueError, match="moved from 'muon' to 'adamw': group 0 parameter 0"):
        numbered(None, "adamw").load_state_dict(state)
    with pytest.raises(ValueError, match="the parameters of this optimizer have no names"):
        numbered((2, 4)).load_state_dict(state, fresh=["*"])
    with pytest.raises(ValueError, match=r"groups of \[1\] parameters, this optimizer of \[2\].*named_parameters"):
        Muon([nn.Parameter(torch.zeros(6, 3)), nn.Parameter(torch.zeros(6, 3))]).load_state_dict(state)
