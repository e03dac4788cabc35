"""One topology: a model on one mesh, what a step moves and computes, what ranks hold, and how long it takes."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..box import Index
from ..converters.look.holders import balance_of
from ..converters.target.buffer_layouts import cut_parts, placed_in
from ..converters.target.topology import LAYOUTS, ROWS, AxisCut, ShardRule, Target
from ..layout import TensorLayout
from ..layouts.buffers.buffer_layout import BufferLayout, rank_of
from ..layouts.buffers.parameters import GroupSizes, Parameter, newton_schulz
from ..layouts.buffers.placements import ToPlace
from ..layouts.flat import owned_layout
from ..layouts.mesh import AxisPlacement, Replicate, Shard, mesh_layout
from ..optimizer.newton_schulz.recipe import flops
from ..optimizer.planning.matrices import PRECISIONS, Fused, Slot, Spec
from ..optimizer.planning.residence import first_replica, matrix_parts
from ..optimizer.planning.schedule import NOTE, Schedule, Stage, make_schedule, paused_collector
from ..record import StateRecord, no_chunks
from ..store.reading.dtypes import itemsize
from ..vocabulary import MOMENTUM, MUON
from .models import ModelParameter, ModelTensors

DESCRIPTIONS = 2
"""Files of a checkpoint that describe the others: ``.metadata`` and ``muonckpt.json``."""


@dataclass(frozen=True, slots=True)
class Topology:
    """What becomes of a model on one mesh; sizes are in bytes.

    Attributes:
        unused_rules: rules that name an axis that this mesh does not have.
        stages: the number of stages of exchange, each with two collectives.
        sent: how evenly ranks send in a step: ``least``, ``mean``, ``most``, ``busiest_rank``, ``most_to_mean``.
        busiest_sent: what the busiest rank sends, alignment of wires included.
        newton_schulz: how evenly FLOPs of a step are shared, in the same way.
        memory: ``weights``, ``gradients``, ``state`` of the rank that holds the most; ``wires`` of the rank that sends
            the most; and their ``total``.
        held: how evenly ranks hold weights, gradients and state.
        checkpoint: ``bytes`` of weights and state, number of ``files``, and the ``most`` that a rank writes.
        padding: `BufferPadding` of each layout in flat buffers of momentum.
        seconds: of ``exchange``, ``newton_schulz`` and ``muon`` in a step, of a ``save``, and of a ``reshard`` by one
            process; None where a rate is unknown.
    """

    mesh: Mapping[str, int]
    unused_rules: tuple[str, ...]
    ranks: int
    matrices: int
    stages: int
    sent: Mapping[str, Any]
    busiest_sent: int
    newton_schulz: Mapping[str, Any]
    memory: Mapping[str, int]
    held: Mapping[str, Any]
    checkpoint: Mapping[str, int]
    padding: tuple[Mapping[str, Any], ...]
    seconds: Mapping[str, float | None]

    @property
    def name(self) -> str:
        """The mesh as the command line has it."""
        return ",".join(f"{axis}={count}" for axis, count in self.mesh.items())

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def topology_of(
    model: ModelTensors, mesh: Mapping[str, int], rules: Sequence[ShardRule], options: MuonOptions, rates: Rates
) -> Topology:
    """Lay a model out on a mesh, as ``reshard`` does, and plan a step there.

    Args:
        rules: the first that matches a parameter's name counts; those with axes that the mesh lacks do not.

    Raises:
        TargetError: a rule cuts a dim that a parameter does not have, or names an axis twice.
    """
    usable = tuple(rule for rule in rules if mesh.keys() >= {axis for axis, _ in rule.cuts})
    target = Target(mesh, usable)
    layout_of = _Layouts(target)
    step = step_plan(model.matrices, [layout_of(p, p.shape) for p in model.matrices], target.ranks, options)
    held = bytes_on_ranks(model.parameters, layout_of, target.ranks)
    return Topology(
        mesh=dict(mesh),
        unused_rules=tuple(str(rule) for rule in rules if rule not in usable),
        ranks=target.ranks,
        matrices=step.matrices,
        stages=len(step.work),
        sent=_balance(step.sent.sum(axis=(0, 1))),
        busiest_sent=step.busiest_sent,
        newton_schulz=_balance(step.work.sum(axis=0)),
        memory=_memory(held, step),
        held=_balance(held.held.astype(np.int64)),
        checkpoint={
            "bytes": round(held.written.sum()),
            "files": int(np.count_nonzero(held.written)) + DESCRIPTIONS,
            "most": round(held.written.max()),
        },
        padding=tuple(padding.to_json() for padding in buffer_padding(model.matrices, target)),
        seconds=_seconds(step_seconds(step, rates), held, rates),
    )


class _Layouts:
    """The layouts of tensors on a target; those of equal tensors are one object."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._default: tuple[AxisCut, ...] = tuple((axis, 0) for axis in target.mesh)
        self._laid_out = cache(self._lay_out)

    def __call__(self, parameter: ModelParameter, shape: Index) -> TensorLayout:
        if not shape:
            return owned_layout((), 0)
        record = StateRecord(parameter.name, (parameter.name,), shape, parameter.dtype, no_chunks(len(shape)))
        return self._laid_out(shape, self.target.cuts(record, self._default))

    def _lay_out(self, shape: Index, cuts: tuple[AxisCut, ...]) -> TensorLayout:
        mesh, axes = self.target.grid(cuts)
        placements: list[AxisPlacement] = [Shard(dim) for _, dim in cuts]
        placements += [Replicate()] * (len(axes) - len(cuts))
        return mesh_layout(shape, mesh, tuple(placements))


def _balance(shares: Counts) -> dict[str, Any]:
    balance = balance_of(dict(enumerate(shares.tolist())))
    assert balance is not None, "a mesh has ranks"
    return balance.to_json()


def _memory(held: RankBytes, step: StepPlan) -> dict[str, int]:
    fullest = int(held.held.argmax())
    parts = {name: round(getattr(held, name)[fullest]) for name in ("weights", "gradients", "state")}
    parts["wires"] = step.wires
    return {**parts, "total": sum(parts.values())}


def _seconds(step: StepSeconds, held: RankBytes, rates: Rates) -> dict[str, float | None]:
    save = reshard = None
    if rates.disk:
        save, reshard = float(held.written.max()) / rates.disk, 2 * float(held.written.sum()) / rates.disk
    return {**dataclasses.asdict(step), "save": save, "reshard": reshard}


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of one rank, None where unknown.

    Attributes:
        link: bytes a second that it sends, and receives at the same time.
        disk: bytes a second that it writes or reads.
        flops: floating-point operations a second in Newton-Schulz.
    """

    link: float | None = None
    disk: float | None = None
    flops: float | None = None


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of one step: exchange and Newton-Schulz alone, and both as stages overlap; None where unknown."""

    exchange: float | None
    newton_schulz: float | None
    muon: float | None


def step_seconds(plan: StepPlan, rates: Rates) -> StepSeconds:
    """Return the seconds of the slowest rank of every stage.

    While a stage is orthogonalised, the next one gathers and the one before returns; latencies and the element-wise
    parts of a step are left out.
    """
    wires = np.maximum(plan.sent, plan.received).max(axis=2)
    exchange = wires / rates.link if rates.link else None
    compute = plan.work.max(axis=1) / rates.flops if rates.flops else None
    muon = None
    if exchange is not None and compute is not None:
        there, back = [*exchange[:, 0], 0.0], [0.0, *exchange[:, 1]]
        hidden = (max(seconds, there[i + 1] + back[i]) for i, seconds in enumerate(compute))
        muon = float(there[0] + sum(hidden) + back[-1])
    return StepSeconds(
        None if exchange is None else float(exchange.sum()), None if compute is None else float(compute.sum()), muon
    )


LayoutOf = Callable[[ModelParameter, Index], TensorLayout]


@dataclass(frozen=True, slots=True, eq=False)
class RankBytes:
    """Bytes by rank.  Replicas hold the same and share the writing of it evenly."""

    weights: Shares
    gradients: Shares
    state: Shares
    written: Shares

    @property
    def held(self) -> Shares:
        return self.weights + self.gradients + self.state


def bytes_on_ranks(parameters: Sequence[ModelParameter], layout_of: LayoutOf, ranks: int) -> RankBytes:
    """Return what ranks hold of parameters, gradients in the parameters' dtype and state, and what they save."""
    times: Counter[tuple[str, TensorLayout, int]] = Counter()
    for parameter in parameters:
        times["weights", layout_of(parameter, parameter.shape), itemsize(parameter.dtype)] += 1
        for tensor in parameter.state:
            times["state", layout_of(parameter, tensor.shape), itemsize(tensor.dtype)] += 1
    totals = {"weights": np.zeros(ranks), "state": np.zeros(ranks)}
    written = np.zeros(ranks)
    for (what, layout, size), count in times.items():
        held, share = np.zeros(ranks), np.zeros(ranks)
        rows, first = layout.by_box
        numel, replicas = (layout.stops - layout.starts).prod(axis=1), np.diff(first)
        holders, box = np.array(layout.buffers, np.int64)[layout.buffer[rows]], layout.box[rows]
        np.add.at(held, holders, numel[box])
        np.add.at(share, holders, numel[box] / replicas[box])
        totals[what] += held * size * count
        written += share * size * count
    return RankBytes(totals["weights"], totals["weights"], totals["state"], written)


# A step, from the plan of the optimizer.

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


# Flat buffers.

Shares = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class BufferPadding:
    """A layout: its padding as a share of its buffers, and the most that a rank has, divided by the mean.

    ``elements`` include padding; ``newton_schulz`` is None where matrices are cut.
    """

    layout: str
    padding_percent: float
    elements: float
    newton_schulz: float | None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def buffer_padding(parameters: Sequence[ModelParameter], target: Target) -> Iterator[BufferPadding]:
    """Yield every layout in buffers, as ``reshard --layout`` makes them of these parameters' momentum.

    What the rules cut is cut first; the ranks of the other axes share a buffer.
    """
    groups: defaultdict[tuple[AxisCut, ...], list[ModelParameter]] = defaultdict(list)
    for parameter in parameters:
        none = no_chunks(len(parameter.shape))
        record = StateRecord(parameter.name, (parameter.name,), parameter.shape, parameter.dtype, none)
        groups[target.cuts(record, ())].append(parameter)
    by_axes: defaultdict[tuple[str, ...], list[tuple[ModelParameter, tuple[AxisCut, ...]]]] = defaultdict(list)
    for cuts, members in groups.items():
        by_axes[tuple(axis for axis, _ in cuts)] += [(member, cuts) for member in members]
    for layout in LAYOUTS:
        if layout == ROWS:
            continue
        elements, padding = np.zeros(target.ranks), 0
        work: Shares | None = np.zeros(target.ranks)
        for axes, cut_members in by_axes.items():
            mesh, _ = target.grid([(axis, 0) for axis in axes])
            parts = math.prod(mesh.shape[: len(axes)])
            share = len(mesh.ranks) // parts
            known: dict[tuple[Index | None, ...], tuple[Shares, Shares | None, int]] = {}
            for part, shapes in enumerate(_local_shapes(cut_members, mesh.shape[: len(axes)], parts)):
                if shapes not in known:
                    known[shapes] = _shares(
                        layout, cut_members, dict(zip(_kinds(cut_members), shapes, strict=True)), share
                    )
                held, costs, padded = known[shapes]
                ranks = list(mesh.ranks[part * share : (part + 1) * share])
                elements[ranks] += held
                padding += padded
                work = None if work is None or costs is None else work
                if work is not None and costs is not None:
                    work[ranks] += costs
        percent = round(100 * padding / elements.sum(), 2)
        yield BufferPadding(layout, percent, _most(elements), None if work is None else _most(work))


_Kind = tuple[Index, tuple[AxisCut, ...]]
"""Parameters of one shape that are cut alike."""


def _kinds(members: Sequence[tuple[ModelParameter, tuple[AxisCut, ...]]]) -> list[_Kind]:
    return list(dict.fromkeys((parameter.shape, cuts) for parameter, cuts in members))


def _local_shapes(
    members: Sequence[tuple[ModelParameter, tuple[AxisCut, ...]]], sizes: Index, parts: int
) -> Iterator[tuple[Index | None, ...]]:
    """Yield for each part the shape that every kind has there; None where nothing is left of it."""
    boxes = [cut_parts(shape, sizes, cuts) for shape, cuts in _kinds(members)]
    for part in range(parts):
        yield tuple(of_part[part].shape if part in of_part else None for of_part in boxes)


def _shares(
    layout: str,
    members: Sequence[tuple[ModelParameter, tuple[AxisCut, ...]]],
    shapes: dict[_Kind, Index | None],
    ranks: int,
) -> tuple[Shares, Shares | None, int]:
    """Return elements and FLOPs of one iteration on each of the ranks that share buffers, and the buffers' padding."""
    local = tuple(
        Parameter(parameter.name, shape, parameter.dtype)
        for parameter, cuts in members
        if (shape := shapes[parameter.shape, cuts]) is not None
    )
    buffers = placed_in(layout, ToPlace(local, frozenset(p.name for p in local), GroupSizes(ranks))) if local else ()
    elements = np.zeros(ranks)
    for buffer in buffers:
        for shard in buffer.shards:
            elements[rank_of(shard)] += shard.stop - shard.start
    return elements, _work(buffers, ranks), sum(buffer.padding for buffer in buffers)


def _work(buffers: Sequence[BufferLayout], ranks: int) -> Shares | None:
    work = np.zeros(ranks)
    for buffer in buffers:
        if not buffer.whole:
            return None
        owners = buffer.owners
        for placed in buffer.parameters:
            owner = owners[placed.name]
            if owner is not None:
                work[owner] += newton_schulz(placed.parameter)
    return work


def _most(shares: Shares) -> float:
    return round(float(shares.max() / shares.mean()), 3)
