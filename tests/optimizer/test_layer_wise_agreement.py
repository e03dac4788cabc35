"""Layer-wise ranks that differ are told, and an error on one of them reaches all: nobody waits for a time-out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.failing import OutOfMemory, raised
from support.layer_wise_training import Net, gradients, groups
from support.workers import run
from torch import nn

from muonckpt.optimizer import LayerWise

ODD = 1
"""The rank that differs from the others, or fails."""

NAMES = ("qkv", "proj", "up", "bias")


def made(**options: Any) -> tuple[Net, LayerWise]:
    net = Net(NAMES)
    return net, LayerWise(net, groups(net), **options)


def differing_at_construction(rank: int, world: int) -> list[str]:
    odd = rank == ODD
    found = [
        raised(lambda options=options: made(**(options if odd else {})))
        for options in (
            {"ns_coefficients": "keller"},
            {"adjust_lr_fn": "spectral"},
            {"average": False},
            {"layout": "balanced"},
            {"gradient_dtype": torch.bfloat16},
            {"ns_steps": 0},
        )
    ]
    net = Net(NAMES if odd else NAMES[:2])
    return [*found, raised(LayerWise, net, groups(net))]


def test_ranks_that_build_different_optimizers_are_told() -> None:
    wanted = [
        "ns_coefficients of group",
        "adjust_lr_fn of group",
        "average is False",
        "the layout of buffers",
        "gradient_dtype is",
    ]
    for rank, (*messages, refused, parameters) in enumerate(run(3, differing_at_construction)):
        for subject, message in zip(wanted, messages, strict=True):
            assert f"rank {ODD}: " in message and subject in message
        assert "ns_steps=0: expected at least one" in refused and ("ArgumentError: ns_steps" in refused)
        assert refused.startswith("ArgumentError" if rank == ODD else "RuntimeError: ranks do not plan")
        assert "parameter up is" in parameters


def steps_that_fail(rank: int, world: int, layout: str) -> dict[str, str]:
    net, opt = made(layout=layout)
    odd, found = rank == ODD, {}

    def step(what: str, *args: Any) -> None:
        net(gradients(net, 0, rank)).backward()
        found[what] = raised(opt.step, *args)
        opt.zero_grad()

    def fail(*_: Any) -> float:
        if odd:
            raise KeyError("no such batch")
        return 1.0

    step("before")
    step("closure", fail)
    hook = opt.register_step_pre_hook(lambda *_: fail() and None)
    step("hook")
    net(gradients(net, 0, rank)).backward()
    opt.clip_grad_norm_(1.0)
    found["hook after clipping"] = raised(opt.step)
    opt.zero_grad()
    hook.remove()
    opt.param_groups[0]["lr"] = 0.5 if odd else 0.25
    step("rate")
    opt.param_groups[0]["lr"] = 0.25
    opt.param_groups[0]["ns_steps"] = 4 if odd else 5
    step("steps")
    opt.param_groups[0]["ns_steps"] = 5
    if odd:
        for group in opt.param_groups:
            options = dict(group)
            group.clear()
            group.update(reversed(options.items()))
    step("order of options")
    if odd:
        with OutOfMemory(2):
            step("owner")
    else:
        step("owner")
    state = opt.state_dict()
    if odd:
        state["state"] = {**state["state"], 0: {}}
    found["state"] = raised(opt.load_state_dict, state)
    step("after")
    return found


@pytest.mark.parametrize("layout", ["padded-nscost", "balanced"])
def test_an_error_on_one_rank_reaches_all(layout: str) -> None:
    for rank, found in enumerate(run(3, steps_that_fail, layout)):
        assert found.pop("before") == found.pop("order of options") == found.pop("after") == "no error"
        assert f"rank {ODD}: lr of group 0 is 0.5, on rank 0 0.25" in found.pop("rate")
        assert f"rank {ODD}: ns_steps of group 0 is 4, on rank 0 5" in found.pop("steps")
        errors = {"owner": "MemoryError: out of memory", "state": "ArgumentError: the state does not fit"}
        for what, message in found.items():
            error = errors.get(what, "KeyError: 'no such batch'")
            assert message.startswith(error if rank == ODD else "RuntimeError: ") and error in message, (what, message)


def experts_that_fail(rank: int, world: int) -> str:
    """Ranks 0 and 2 share experts, and so do 1 and 3; the owner of some of them fails."""
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    net = Net(("qkv", "stack", "bias"))
    opt = LayerWise(net, groups(net), experts=[net.stack], expert_group=halves[rank % 2])
    if rank == 3:
        opt.register_step_pre_hook(lambda *_: nn.Linear(1, 1)(torch.ones(2)))
    net(gradients(net, 0, rank)).backward()
    return raised(opt.step)


def test_a_group_of_experts_tells_the_others() -> None:
    for rank, message in enumerate(run(4, experts_that_fail)):
        assert message.startswith("RuntimeError: mat1" if rank == 3 else "RuntimeError: an optimizer step"), message


def parameters_that_leave(rank: int, world: int) -> list[str]:
    found = []
    for leave in (
        lambda net, opt: net.to(torch.float64),
        lambda net, opt: setattr(net.up, "data", net.up.detach().clone()),
        lambda net, opt: opt.param_groups[0].update(params=[nn.Parameter(net.up.detach().clone())]),
    ):
        net, opt = made()
        net(gradients(net, 0, rank)).backward()
        if rank == ODD:
            leave(net, opt)
        found.append(raised(opt.step))
    return found


def test_parameters_that_leave_their_buffers_are_refused() -> None:
    for rank, messages in enumerate(run(2, parameters_that_leave)):
        for message in messages:
            assert message.startswith("ArgumentError: parameter" if rank == ODD else "RuntimeError: "), message
            assert "was replaced, cast or moved after the optimizer was built" in message
