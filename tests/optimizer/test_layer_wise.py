"""Layer-wise training: every layout steps as one process does, bit for bit, whatever is reduced or missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from support.workers import run
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex

from muonckpt.errors import LayoutError
from muonckpt.layouts.buffers.recorded import from_json
from muonckpt.optimizer import Muon
from muonckpt.optimizer.layer_wise.optimizer import LayerWise

LAYOUTS = ["padded", "padded-numel", "compact", "legacy", "balanced"]

# (shape, options of its group)
PARAMETERS = {
    "embedding": ((37, 15), {"algorithm": "adamw"}),
    "norm": ((16,), {"algorithm": "adamw"}),
    "qkv": ((48, 16), {"pieces": (32, 8, 8)}),
    "proj": ((16, 16), {}),
    "conv": ((7, 3, 2), {"algorithm": "lion", "cautious": True}),
    "up": ((40, 16), {"algorithm": "normuon"}),
    "down": ((16, 40), {"ns_dtype": "float16", "gram": (2,)}),
    "stack": ((3, 8, 12), {"nesterov": False}),
    "bias": ((5,), {"algorithm": "adamw", "weight_decay": 0.0}),
}


class Net(nn.Module):
    """Parameters whose gradients are what they are multiplied with."""

    def __init__(self, names: tuple[str, ...] = tuple(PARAMETERS), dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name in names:
            value = torch.randn(PARAMETERS[name][0], generator=generator)
            self.register_parameter(name, nn.Parameter(value.to(dtype)))

    def forward(self, by: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum((self.get_parameter(name) * value).sum() for name, value in by.items())


def groups(net: Net) -> list[dict]:
    return [{"params": [p], "lr": 0.02, **PARAMETERS[name][1]} for name, p in net.named_parameters()]


def gradients(net: Net, seed: int, rank: int) -> dict[str, torch.Tensor]:
    """Small whole numbers: their sums are exact in any order and dtype."""
    made = {}
    for index, (name, p) in enumerate(net.named_parameters()):
        generator = torch.Generator().manual_seed(1000 * seed + 10 * rank + index)
        made[name] = torch.randint(-8, 9, p.shape, generator=generator).to(p.dtype)
    return made


@cache
def alone(
    world: int,
    steps: int,
    dtype: torch.dtype = torch.float32,
    names: tuple[str, ...] = tuple(PARAMETERS),
    given: Callable[[str, int], bool] = lambda name, step: True,
    of: Callable[[Net, int, int], dict[str, torch.Tensor]] = gradients,
) -> dict[str, torch.Tensor]:
    """One process with the gradients ``of`` all ranks added up, where they are ``given``; with float32 masters."""
    net = Net(names, dtype)
    master = Net(names)
    master.load_state_dict({name: p.detach().float() for name, p in net.named_parameters()})
    opt = Muon(groups(master))
    for step in range(steps):
        for name, p in master.named_parameters():
            total = sum(of(net, step, rank)[name].float() for rank in range(world))
            p.grad = total if given(name, step) else None
        opt.step()
    found = {name: p.detach().to(dtype) for name, p in master.named_parameters()}
    for name, p in master.named_parameters():
        found |= {f"{name}.{slot}": value for slot, value in opt.state[p].items()}
    return found


def pieces(net: Net, opt: LayerWise) -> dict[str, list]:
    """Parameters, and the chunks that this rank holds of each state tensor, as (offsets, values)."""
    found = {name: p.detach().clone() for name, p in net.named_parameters()}
    for name, p in net.named_parameters():
        for slot, value in opt.state[p].items():
            if value.ndim == 0 or not hasattr(value, "__create_chunk_list__"):
                found[f"{name}.{slot}"] = [((0,) * value.ndim, value.detach().clone())]
                continue
            found[f"{name}.{slot}"] = [
                (tuple(c.offsets), value.__get_tensor_shard__(MetadataIndex(name, c.offsets)).clone())
                for c in value.__create_chunk_list__()
            ]
    return found


def check(found: list[dict], expected: dict[str, torch.Tensor], layout: str = "") -> None:
    """Parameters on every rank; of state each element with exactly one, but for counters, which all have."""
    for key, wanted in expected.items():
        if "." not in key:
            assert all(torch.equal(of_rank[key], wanted) for of_rank in found), (layout, key)
        elif wanted.ndim == 0:
            assert all(torch.equal(of_rank[key][0][1], wanted) for of_rank in found), (layout, key)
        else:
            times = torch.zeros(wanted.shape, dtype=torch.int)
            for of_rank in found:
                for lo, value in of_rank[key]:
                    box = tuple(slice(a, a + n) for a, n in zip(lo, value.shape, strict=True))
                    assert torch.equal(wanted[box], value), (layout, key)
                    times[box] += 1
            assert (times == 1).all(), (layout, key)


def each(rank: int, world: int, function: Callable[..., Any], layouts: Sequence[str], args: tuple) -> dict[str, Any]:
    return {layout: function(rank, world, layout, *args) for layout in layouts}


def run_each(world: int, function: Callable[..., Any], *args: Any, layouts: Sequence[str] = LAYOUTS):
    """(layout, results by rank) of ``function(rank, world, layout, *args)``, all layouts in one job."""
    found = run(world, each, function, layouts, args)
    return [(layout, [of_rank[layout] for of_rank in found]) for layout in layouts]


def trained(rank, world, layout, dtype, steps, options, names=tuple(PARAMETERS)) -> dict:
    net = Net(names, dtype)
    opt = LayerWise(net, groups(net), layout=layout, average=False, bucket_size=700, **options)
    for step in range(steps):
        net(gradients(net, step, rank)).backward()
        opt.step()
    opt.wait()
    return pieces(net, opt)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_layout_steps_as_one_process_does(world, dtype):
    """With 4 ranks some of them own no matrix, and most have no part of a vector."""
    for layout, found in run_each(world, trained, dtype, 3, {}):
        check(found, alone(world, 3, dtype), layout)


@pytest.mark.parametrize("options", [{"exact": False}, {"overlap": True}, {"gradient_dtype": torch.float32}], ids=str)
def test_options_of_transport_change_no_bits(options):
    for layout, found in run_each(3, trained, torch.bfloat16, 3, options, layouts=("padded", "compact")):
        check(found, alone(3, 3, torch.bfloat16), layout)


@pytest.mark.parametrize("names", [("qkv",), ("norm", "up"), ("bias",)], ids=str)
def test_fewer_parameters_than_ranks(names):
    for layout, found in run_each(4, trained, torch.bfloat16, 2, {}, names):
        check(found, alone(4, 2, torch.bfloat16, names), layout)


# --- layouts and refusals ------------------------------------------------------------------------------------------


def of_record(rank: int, world: int) -> tuple[bool, str, str]:
    net = Net()
    opt = LayerWise(net, groups(net), layout="compact")
    written = opt.provenance()["layer_wise"]
    opt.close()
    recorded = [from_json(buffer) for buffer in written["buffers"]]
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
    yield of(lambda net: groups(net), "nothing is exchanged", waves=2)
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


def test_groups_are_fixed_but_their_options_are_live():
    net, other = Net(), Net()
    opt, reference = LayerWise(net, groups(net)), Muon(groups(other))
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
