"""Layer-wise training: memory, traffic and balance of its layouts; measured on gloo ranks, and computed for models.

*Logical* are the bytes of parameters and gradients alone; *allocated* what a run has of memory after a step, besides
optimizer state, counted by torch's profiler at every allocation; *padding* is of both buffers.  Gloo gives the scratch
memory of a reduce-scatter back on a thread that the profiler does not see, so padded layouts seem to have more than
logical and padding, which they have not.  Traffic is counted at the process group
(`traffic.py`), in processes of their own: what a rank sends in a step, if reductions and gathers are rings.

The models are those of `padding.py`: matrices only, no tensor or pipeline parallelism, experts shared by 8
expert-parallel ranks and looked at from one of them; 16-bit parameters and gradients; Megatron's default buckets.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
import traffic
from machine import describe
from models import Model
from padding import MODELS, SIZES, Buffers, bucket_size, busiest, least_busiest, parameters_of, ranks_of
from step import TRANSFORMER, on_ranks
from torch import nn
from torch.profiler import ProfilerActivity, profile

from muonckpt.layouts.buffers.algorithms import (
    balanced,
    decoupled_total_order,
    legacy_pingpong,
    padded_nscost,
    padded_numel,
)
from muonckpt.layouts.buffers.parameters import Parameter, newton_schulz, numel
from muonckpt.optimizer.layer_wise.optimizer import LayerWise

T = TypeVar("T")

LAYOUTS = {
    "padded-numel": padded_numel,
    "padded-nscost": padded_nscost,
    "decoupled-total-order": decoupled_total_order,
    "legacy-pingpong": legacy_pingpong,
    "balanced": balanced,
}
"""By the name of the placement, what places matrices."""

HALF, FLOAT = 2, 4
"""Bytes of an element in 16 and in 32 bits."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model of equal layers over this many ranks: matrices of these shapes, and a vector as long as the first one's
    rows.  Everything is in float32, so that there are no masters."""

    layers: int
    shapes: tuple[tuple[int, int], ...]
    world: int
    bucket: int
    """Elements at which a bucket closes."""


CASE = Case(6, TRANSFORMER, 4, 1_000_000)


class Net(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.ones(shape) for _ in range(case.layers) for shape in case.shapes)
        self.vectors = nn.ParameterList(torch.ones(case.shapes[0][1]) for _ in range(case.layers))

    def step(self, optimizer: LayerWise) -> None:
        """A gradient for every parameter, and an update."""
        torch.stack([param.sum() for param in self.parameters()]).sum().backward()
        optimizer.step()


def trained(
    case: Case, layout: str, exact: bool = True, group: dist.ProcessGroup | None = None
) -> tuple[Net, LayerWise]:
    """A model that has made its first step; over all ranks if no group is given."""
    net = Net(case)
    groups = [{"params": net.matrices}, {"params": net.vectors, "algorithm": "adamw", "lr": 1e-3}]
    optimizer = LayerWise(net, groups, layout=layout, bucket_size=case.bucket, exact=exact, group=group)
    net.step(optimizer)
    return net, optimizer


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank."""

    logical: int
    allocated: int
    padding: int


def memory(case: Case) -> dict[str, list[Memory]]:
    """By layout, of each rank."""
    return {layout: _of_ranks(_memory(case, layout)) for layout in LAYOUTS}


def _memory(case: Case, layout: str) -> Memory:
    gc.collect()  # what is left of others would be freed during this one
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as events:
        net, optimizer = trained(case, layout)
    changes = (event.nbytes() for event in events.profiler.kineto_results.events() if event.name() == "[memory]")
    state = sum(value.nbytes for slots in optimizer._inner.state.values() for value in slots.values())
    parameters = sum(param.nbytes for param in net.parameters())
    padding = sum(2 * FLOAT * buffer.padding for buffer in optimizer.buffers)
    return Memory(2 * parameters, sum(changes) - state, padding)


@dataclass(frozen=True, slots=True)
class Sent:
    """What one rank takes part in during a step: collectives by name, and bytes that it sends; with the bytes that a
    rank should send on average."""

    collectives: Mapping[str, int]
    bytes: float
    expected: float


def step_traffic(case: Case, group: dist.ProcessGroup | None = None) -> dict[str, list[Sent]]:
    """By layout, and for one also with one all-reduce a bucket, of each rank.  The group counts traffic."""
    traffic_of_layouts = {layout: _traffic(case, layout, True, group) for layout in LAYOUTS}
    return {**traffic_of_layouts, ALL_REDUCED: _traffic(case, ALL_REDUCED.split(",")[0], False, group)}


def _traffic(case: Case, layout: str, exact: bool, group: dist.ProcessGroup | None) -> list[Sent]:
    counters = traffic.register()
    net, optimizer = trained(case, layout, exact, group)
    counters.reset()
    net.step(optimizer)
    return _of_ranks(Sent(dict(counters.collectives), counters.sent, expected_traffic(optimizer.buffers, FLOAT, exact)))


def _of_ranks(values: T) -> list[T]:
    every: list[T] = [values] * dist.get_world_size()
    dist.all_gather_object(every, values)
    return every


def expected_traffic(buffers: Buffers, itemsize: int, exact: bool = True) -> float:
    """Bytes that a rank sends in a step on average, besides one for each parameter that says whether it has a gradient:
    gradients once and parameters once around a ring.

    Args:
        exact: gradients in unequal shards are reduced to their owners; else all-reduced, which is twice around.
    """
    rounds = [(2 if exact or entry.even else 3) for entry in buffers]
    return sum(n * (b.ranks - 1) / b.ranks * b.numel * itemsize for n, b in zip(rounds, buffers, strict=True))


def show_measured(case: Case) -> None:
    memories, sent = on_ranks(case, "gloo", memory), on_ranks(case, traffic.BACKEND, step_traffic)
    table("layout", "logical MB", "padding MB", "allocated MB", "over logical", "sent MB, mean", "most", "collectives")
    for layout, ranks in sent.items():
        largest = max(memories[layout.split(",")[0]], key=lambda entry: entry.allocated)
        sizes = megabytes(largest.logical, largest.padding, largest.allocated)
        bytes_sent = [entry.bytes for entry in ranks]
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(ranks[0].collectives.items()))
        over = f"{largest.allocated / largest.logical:.4f}"
        row(layout, *sizes, over, *megabytes(sum(bytes_sent) / len(ranks), max(bytes_sent)), kinds)


def megabytes(*values: float) -> list[str]:
    return [f"{value / 1e6:.2f}" for value in values]


def table(*headers: str) -> None:
    row(*headers)
    print(f"|{'---|' * len(headers)}", flush=True)


def row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


@dataclass(frozen=True, slots=True)
class Planned:
    """A model at a number of data-parallel ranks, and its buffers by layout."""

    model: str
    dp: int
    parameters: Sequence[Parameter]
    buffers: Mapping[str, Buffers]

    def over_logical(self, layout: str) -> float:
        return sum(buffer.numel for buffer in self.buffers[layout]) / numel(self.parameters)

    def busiest(self, layout: str) -> float:
        return busiest(self.parameters, ranks_of(self.dp), self.buffers[layout], newton_schulz)


UNPADDED = ("decoupled-total-order", "legacy-pingpong", "balanced")

ALL_REDUCED = "decoupled-total-order, all-reduced"


def show_sizes(every: Sequence[Planned]) -> None:
    """Of the unpadded layouts the most that one of them has."""
    layout_names = ", ".join(UNPADDED)
    names = ["padded-numel", "padded-nscost", layout_names]
    table("model", "dp", "logical GB", *(f"over logical: {name}" for name in names),
          *(f"sent GB: {name}" for name in names), "with all-reduces")  # fmt: skip
    for entry in every:
        over = [entry.over_logical(name) for name in LAYOUTS]
        sent = [expected_traffic(buffers, HALF) / 1e9 for buffers in entry.buffers.values()]
        reduced = expected_traffic(entry.buffers["decoupled-total-order"], HALF, exact=False) / 1e9
        ratios = [f"{ratio:.3f}" for ratio in (*over[:2], max(over[2:]))]
        gigabytes = [f"{value:.1f}" for value in (*sent[:2], max(sent[2:]), reduced)]
        row(entry.model, entry.dp, f"{2 * HALF * numel(entry.parameters) / 1e9:.1f}", *ratios, *gigabytes)


def show_balance(every: Sequence[Planned]) -> None:
    table("model", "dp", *(f"busiest: {name}" for name in LAYOUTS), "bound")
    for entry in every:
        loads = [entry.busiest(name) for name in LAYOUTS]
        bound = least_busiest(entry.parameters, ranks_of(entry.dp))
        row(entry.model, entry.dp, *(f"{load:.3f}" for load in (*loads, bound)))


def planned(models: Sequence[Callable[[], Model]] = MODELS, sizes: Sequence[int] = SIZES) -> Iterator[Planned]:
    for make in models:
        model = make()
        parameters = parameters_of(model)
        for dp in sizes:
            ranks, size = ranks_of(dp), bucket_size(dp)
            buffers = {name: place(parameters, ranks, size) for name, place in LAYOUTS.items()}
            yield Planned(model.name, dp, parameters, buffers)


def main() -> None:
    print(f"{describe()}; {CASE.world} gloo ranks, {CASE.layers * len(CASE.shapes)} float32 matrices and "
          f"{CASE.layers} vectors, buckets of {CASE.bucket} elements\n")  # fmt: skip
    show_measured(CASE)
    every = list(planned())
    print()
    show_sizes(every)
    print()
    show_balance(every)


if __name__ == "__main__":
    main()
