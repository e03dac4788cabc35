"""`Muon.for_model`: the optimizer of a whole model in one line."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from support.workers import run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from muonckpt.optimizer import Muon
from muonckpt.optimizer.groups import MODULE_TYPES, NO_HEAD, Rule


def net() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 10, bias=False))


HEAD = [Rule("head", "3.weight")]


def algorithms(model: nn.Module, optimizer: Muon) -> dict[str, tuple[str, float]]:
    """The algorithm and the rate of every parameter."""
    stepped = {id(p): (g["algorithm"], g["lr"]) for g in optimizer.param_groups for p in g["params"]}
    return {name: stepped[id(parameter)] for name, parameter in model.named_parameters()}


def test_matrices_have_one_rate_and_the_rest_another():
    model = net()
    optimizer = Muon.for_model(model, lr=0.02, adamw_lr=3e-4, rules=[HEAD, MODULE_TYPES], weight_decay=0.0)
    rest = ("adamw", 3e-4)
    assert algorithms(model, optimizer) == {
        "0.weight": rest,
        "1.weight": ("muon", 0.02),
        "1.bias": rest,
        "2.weight": rest,
        "2.bias": rest,
        "3.weight": rest,
    }
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0}


def test_one_rate_serves_both_only_if_it_is_said():
    with pytest.raises(ValueError, match=r"adamw_lr=3e-4 of Muon.for_model.*match_rms_adamw"):
        Muon.for_model(net(), lr=0.02, rules=[HEAD, MODULE_TYPES])
    model = net()
    optimizer = Muon.for_model(model, lr=3e-4, rules=[HEAD, MODULE_TYPES], adjust_lr_fn="match_rms_adamw")
    assert {rate for _, rate in algorithms(model, optimizer).values()} == {3e-4}


def test_a_single_set_of_rules_and_options_by_kind():
    model = net()
    optimizer = Muon.for_model(
        model,
        lr=0.02,
        adamw_lr=3e-4,
        rules=(NO_HEAD, *MODULE_TYPES),
        kinds={"vector": {"weight_decay": 0.0}, "matrix": {"algorithm": "normuon"}},
    )
    assert algorithms(model, optimizer)["3.weight"] == ("normuon", 0.02)
    assert {g["weight_decay"] for g in optimizer.param_groups if g["algorithm"] == "adamw"} == {0.0, 0.1}


def test_what_rules_do_not_decide_is_refused():
    with pytest.raises(ValueError, match="which matrix is the output head"):
        Muon.for_model(net(), lr=0.02, adamw_lr=3e-4, rules=MODULE_TYPES)


def wrapped(rank: int, world: int, given: bool) -> list[tuple[int, ...]]:
    group = dist.new_group([0, 1])
    model = DistributedDataParallel(nn.Linear(6, 12, bias=False), process_group=group)
    replicas = {"replicas": dist.new_group([rank], use_local_synchronization=True)} if given else {}
    optimizer = Muon.for_model(model, lr=0.02, rules=[[NO_HEAD], MODULE_TYPES], **replicas)
    model.module.weight.grad = model.module.weight.detach().clone()
    optimizer.step()
    return list(optimizer.schedules)


def test_ranks_of_ddp_share_the_matrices_out_unless_told_otherwise():
    assert run(2, wrapped, False) == [[(0, 1)], [(0, 1)]]
    assert run(2, wrapped, True) == [[(0,)], [(1,)]]
