"""Layer-wise training: every layout steps as one process does, bit for bit, whatever is reduced or missing."""

from __future__ import annotations

import pytest
import torch
from support import sweep
from support.layer_wise_training import PARAMETERS, Net, alone, check, gradients, groups, pieces, run_each
from support.workers import run
from torch import nn

from muonckpt import LayoutError
from muonckpt.layouts.buffers.records import run_buffers
from muonckpt.optimizer import LayerWise, Muon, StepExecution


def trained(rank, world, layout, dtype, steps, options, names=tuple(PARAMETERS), grouped=groups) -> dict:
    net = Net(names, dtype)
    opt = LayerWise(net, grouped(net), layout=layout, average=False, bucket_size=700, **options)
    for step in range(steps):
        net(gradients(net, step, rank)).backward()
        opt.step()
    opt.wait()
    return pieces(net, opt)


WORLDS = [(world, dtype) for world in (1, 2, 3, 4) for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize(("world", "dtype"), sweep(WORLDS, WORLDS[0], WORLDS[4], WORLDS[7]), ids=str)
def test_every_layout_steps_as_one_process_does(world, dtype):
    """With 4 ranks some of them own no matrix, and most have no part of a vector."""
    for layout, found in run_each(world, trained, dtype, 3, {}):
        check(found, alone(world, 3, dtype), layout)


@pytest.mark.parametrize("options", [{"exact": False}, {"overlap": True}, {"gradient_dtype": torch.float32}], ids=str)
def test_options_of_transport_change_no_bits(options):
    for layout, found in run_each(
        3, trained, torch.bfloat16, 3, options, layouts=("padded-nscost", "decoupled-total-order")
    ):
        check(found, alone(3, 3, torch.bfloat16), layout)


def in_bfloat16(net: Net) -> list[dict]:
    """The groups, with all of their state in bfloat16."""
    slots = {"adamw": "state_dtype", "lion": "state_dtype"}
    return [{**group, slots.get(group.get("algorithm"), "momentum_dtype"): "bfloat16"} for group in groups(net)]


def test_state_in_bfloat16_has_the_bits_of_one_process():
    for layout, found in run_each(3, trained, torch.float32, 3, {}, tuple(PARAMETERS), in_bfloat16):
        check(found, alone(3, 3, grouped=in_bfloat16), layout)


@pytest.mark.parametrize("names", [("qkv",), ("norm", "up"), ("bias",)], ids=str)
def test_fewer_parameters_than_ranks(names):
    for layout, found in run_each(4, trained, torch.bfloat16, 2, {}, names):
        check(found, alone(4, 2, torch.bfloat16, names), layout)


# --- layouts and refusals ------------------------------------------------------------------------------------------


def of_record(rank: int, world: int) -> tuple[bool, str, str]:
    net = Net()
    opt = LayerWise(net, groups(net), layout="decoupled-total-order")
    written = opt.provenance()["layer_wise"]
    opt.close()
    recorded = [buffer.layout for buffer in run_buffers({"layer_wise": written})]
    again = LayerWise(net, groups(net), layout=recorded)
    same = again.buffers == opt.buffers and again.provenance()["layer_wise"]["buffers"] == written["buffers"]
    messages = []
    for names in (("qkv",), tuple(PARAMETERS)):
        other = Net(names, torch.bfloat16)
        try:
            LayerWise(other, groups(other), layout=recorded)
        except LayoutError as error:
            messages.append(str(error))
    return same, *messages


def test_recorded_buffers_are_used_as_they_are_or_refused():
    for same, other_names, other_dtype in run(2, of_record):
        assert same and "do not fit the model" in other_names and "do not fit the model" in other_dtype


def refusals():
    def of(change, message, **options):
        return pytest.param(change, options, message, id=message)

    yield of(lambda net: groups(net), "expected one of padded", layout="scattered")
    yield of(lambda net: groups(net), "exchanges nothing", execution=StepExecution(stages=2))
    yield of(lambda net: groups(net)[:-1], "in no group.*: bias")
    yield of(
        lambda net: [*groups(net), {"params": [nn.Parameter(torch.ones(2, 2))]}], "1 parameters .* not the model's"
    )
    yield of(lambda net: net.parameters(), "needs? a matrix|not clear")
    yield of(lambda net: groups(net.requires_grad_(False)), "frozen")

    def small(net):
        net.qkv = nn.Parameter(net.qkv.data.to(torch.float8_e4m3fn))
        return groups(net)

    def dimless(net):
        net.bias = nn.Parameter(torch.tensor(1.0))
        return groups(net)

    def taken(net):
        LayerWise(net, groups(net))
        return groups(net)

    yield of(small, "FP8 and FP4")
    yield of(dimless, "give it a dim")
    yield of(taken, "several optimizer instances")


@pytest.mark.parametrize(("change", "options", "message"), [*refusals()])
def test_what_cannot_be_managed_is_refused(change, options, message):
    net = Net()
    grouped = change(net)
    with pytest.raises((ValueError, LayoutError), match=message):
        LayerWise(net, grouped, **options)


def area(rows: int, columns: int) -> float:
    return rows * columns / 100


def test_groups_are_fixed_but_their_options_are_live():
    """The scale is a function, of all groups or of one."""
    net, other = Net(), Net()
    of_one = [groups(each) for each in (net, other)]
    for given in of_one:
        next(group for group in given if "algorithm" not in group)["adjust_lr_fn"] = lambda rows, columns: (
            rows / columns
        )
    opt = LayerWise(net, of_one[0], adjust_lr_fn=area)
    reference = Muon(of_one[1], adjust_lr_fn=area)
    with pytest.raises(ValueError, match="fixed at construction"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (opt, reference)]
    for step in range(3):
        given = gradients(net, step, 0)
        net(given).backward()
        other(given).backward()
        for each in (opt, reference, *schedules):
            each.step()
        reference.zero_grad()
    check([pieces(net, opt)], {name: p.detach() for name, p in other.named_parameters()})
