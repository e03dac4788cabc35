"""What every rank sends, receives and computes in one step, from the plan of the optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..layout import TensorLayout
from ..optimizer.newton_schulz.recipe import flops
from ..optimizer.planning.matrices import PRECISIONS, Fused, Slot, Spec
from ..optimizer.planning.residence import first_replica, matrix_parts
from ..optimizer.planning.schedule import NOTE, Schedule, Stage, make_schedule, paused_collector
from ..vocabulary import MOMENTUM, MUON
from .model_tensors import ModelParameter

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MuonOptions:
    """The options of `muonckpt.optimizer.Muon` that a plan depends on, under its names."""

    ns_steps: int = MUON.ns_steps
    ns_dtype: str = MUON.ns_dtype
    stages: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """A step of all ranks.

    Attributes:
        sent, received: bytes to and from other ranks, ``[stages, 2, ranks]``: to the owners, and back.  Notes are
            counted, the alignment of wires is not: at most 8 bytes between two ranks and collective.
        work: FLOPs of Newton-Schulz, ``[stages, ranks]``.
        busiest: the rank that sends the most; ``busiest_sent`` is what it sends in a step, exactly.
        wires: the most bytes of wires that it has in memory at once.
    """

    matrices: int
    sent: Counts
    received: Counts
    work: Counts
    busiest: int
    busiest_sent: int
    wires: int


def step_plan(
    parameters: Sequence[ModelParameter], layouts: Sequence[TensorLayout], ranks: int, options: MuonOptions
) -> StepPlan:
    """Plan a step as the ranks themselves do it.

    Args:
        parameters: those that hold matrices, in forward order, with their layouts on ranks 0 to ``ranks - 1``.

    Raises:
        LayoutError: pieces do not add up to a parameter's rows.
    """
    specs = _specs(parameters, layouts, options)
    everyone = tuple(range(ranks))
    with paused_collector():
        schedule = make_schedule(specs, everyone, 0, options.stages)
    stages = len(schedule.stages)
    notes = NOTE * (ranks - 1)
    sent, received = np.full((2, stages, 2, ranks), notes, np.int64)
    work = np.zeros((stages, ranks), np.int64)
    alike: defaultdict[tuple[int, int, int, int | None], list[int]] = defaultdict(list)
    for unit in schedule.units:
        [slot], owner = specs[unit.param].slots, unit.owner
        work[unit.stage, owner] += unit.cost
        standing = int(matrix_parts(slot.layout, slot.fused).stands[unit.index])
        replica = first_replica(slot.layout, slot.fused, standing, owner)
        alike[id(specs[unit.param]), standing, unit.stage, replica].append(owner)
    slots = {id(spec): spec.slots[0] for spec in specs}
    for (spec, index, stage, replica), owners in alike.items():
        slot = slots[spec]
        _holders(slot.layout, slot.fused, index).count(owners, replica, slot, sent[stage], received[stage])
    busiest = int(sent.sum(axis=(0, 1)).argmax())
    with paused_collector():
        own = schedule if busiest == 0 else make_schedule(specs, everyone, busiest, options.stages)
    return StepPlan(
        len(schedule.units), sent, received, work, busiest, leaving_bytes(own, busiest), most_wires(own.stages)
    )


def _specs(parameters: Sequence[ModelParameter], layouts: Sequence[TensorLayout], options: MuonOptions) -> list[Spec]:
    """Describe the parameters as planning sees them; equal ones are one object."""
    precision = PRECISIONS[options.ns_dtype]

    def cost(rows: int, columns: int) -> int:
        return flops(rows, columns, options.ns_steps)

    alike: dict[tuple[TensorLayout, Fused], Spec] = {}
    for parameter, layout in zip(parameters, layouts, strict=True):
        fused = Fused(parameter.pieces)
        slot = Slot(MOMENTUM, layout, fused, precision.there, precision.back)
        alike.setdefault((layout, fused), Spec((slot,), cost))
    return [alike[layout, Fused(parameter.pieces)] for parameter, layout in zip(parameters, layouts, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class Holders:
    """Who holds the parts of one matrix.

    ``numel`` of each part, the ``first`` of its holders and their number (``replicas``); the ``rank`` and the ``part``
    of each holder; and ``held``, the parts by rank.
    """

    numel: Counts
    first: Counts
    replicas: Counts
    rank: Counts
    part: Counts
    held: Mapping[int, list[int]]

    def count(self, owners: Sequence[int], replica: int | None, slot: Slot, sent: Counts, received: Counts) -> None:
        """Add what travels of as many such matrices as there are owners, ``[2, ranks]``.

        First as if owners had nothing of them; then what an owner holds itself is taken away.

        Args:
            replica: as `first_replica` of each of the owners.
        """
        there, back, times = slot.there.itemsize, slot.back.itemsize, len(owners)
        number = np.arange(len(self.numel)) if replica is None else np.full(len(self.numel), replica)
        givers = self.rank[self.first + number % self.replicas]
        taken = self.numel[self.part]
        np.add.at(sent[0], givers, times * there * self.numel)
        np.add.at(received[1], self.rank, times * back * taken)
        read, returned = int(self.numel.sum()), int(taken.sum())
        for owner in owners:
            parts = self.held.get(owner, [])
            mine = int(self.numel[parts].sum())
            np.subtract.at(sent[0], givers[parts], there * self.numel[parts])
            received[0, owner] += there * (read - mine)
            sent[1, owner] += back * (returned - mine)
            received[1, owner] -= back * mine


@lru_cache(maxsize=4096)
def _holders(layout: TensorLayout, fused: Fused, index: int) -> Holders:
    parts = matrix_parts(layout, fused)
    numbers = parts.numbers(index)
    part, fragment = parts.holders(numbers)
    replicas = np.bincount(part, minlength=len(numbers))
    ranks = np.array(layout.buffers, np.int64)[layout.buffer[fragment]]
    held: defaultdict[int, list[int]] = defaultdict(list)
    for rank, number in zip(ranks.tolist(), part.tolist(), strict=True):
        held[rank].append(number)
    return Holders(parts.volumes(numbers), np.cumsum(replicas) - replicas, replicas, ranks, part, dict(held))


def leaving_bytes(schedule: Schedule, rank: int) -> int:
    """Return what the rank of this schedule sends to others in bytes, alignment and notes included."""
    routes = (route for stage in schedule.stages for route in (stage.gather, stage.scatter))
    return sum(sum(route.send_counts) - route.send_counts[rank] for route in routes)


def most_wires(stages: Sequence[Stage]) -> int:
    """Return the most bytes of wires in a rank's memory at once.

    While a stage is orthogonalised, the next one gathers and the one before returns.
    """
    most = 0
    for number, stage in enumerate(stages):
        gathering = sum(later.gather.bytes for later in stages[number + 1 : number + 2])
        returning = sum(earlier.scatter.bytes for earlier in stages[number - 1 : number] if number)
        arrived, results = sum(stage.gather.receive_counts), sum(stage.scatter.send_counts)
        most = max(most, gathering + returning + max(stage.gather.bytes, arrived + results, stage.scatter.bytes))
    return most
