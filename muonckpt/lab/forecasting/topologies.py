"""One topology: the costs of a model on one mesh, in bytes, FLOPs and seconds."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...algebra.box import Index
from ...algebra.layout import TensorLayout
from ...converters.look.holders import balance_of
from ...converters.target.buffer_layouts import cut_parts, place_in
from ...converters.target.topology import LAYOUTS, ROWS, AxisCut, ShardRule, Target
from ...layouts.buffers.buffer_layout import rank_of
from ...layouts.buffers.parameters import GroupSizes, Parameter, newton_schulz
from ...layouts.buffers.placements import PlacementRequest
from ...layouts.flat import owned_layout
from ...layouts.mesh import AxisPlacement, Replicate, Shard, mesh_layout
from ...names.vocabulary import MUON, ParamGroup
from ...optimizer.ground.host_memory import STATE_MEMORIES, TURNS_AHEAD, StateMemory
from ...optimizer.methods.form import MatrixMethod, dtype_named
from ...optimizer.methods.matrix import method_slots
from ...optimizer.newton_schulz.recipe import flops
from ...optimizer.planning.matrices import SHAPES, UPDATE, WEIGHT, Fused, Slot, Spec
from ...optimizer.planning.residence import first_replica, matrix_parts
from ...optimizer.planning.schedule import NOTE, Schedule, Stage, make_schedule, paused_collector
from ...record.record import StateRecord, no_chunks
from ...store.reading.dtypes import itemsize
from .hardware import Rates
from .iteration import MODEL_FLOPS, PLAIN_FSDP, SCHEMES, Training, traffic_of
from .models import ModelParameter, ModelTensors

DESCRIPTIONS = 2
"""A checkpoint's files that describe the others: ``.metadata`` and ``muonckpt.json``."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The costs of a model on one mesh; sizes are in bytes.

    Attributes:
        unused_rules: rules that name an axis that this mesh does not have.
        stages: the number of stages of exchange, of two collectives each.
        sent: how evenly ranks send in a step: ``least``, ``mean``, ``most``, ``busiest_rank``, ``most_to_mean``.
        busiest_sent: the bytes that the busiest rank sends, alignment of wires included.
        newton_schulz: how evenly FLOPs of a step are shared, in the same way; with those of methods besides.
        memory: ``weights``, ``gradients``, ``state`` of the rank that holds the most; ``wires`` of the rank that sends
            the most; and their ``total``.  With ``offload``, ``host`` is the state, and ``state`` what a step has of
            it on the device: about three stages' share.
        held: how evenly ranks hold weights, gradients and state.
        checkpoint: ``bytes`` of weights and state, number of ``files``, and the ``most`` that a rank writes.
        padding: for each ``layout`` of momentum in flat buffers its ``padding_percent``; and the most of a rank divided
            by the mean, of ``elements``, padding included, and of FLOPs of ``newton_schulz`` (None where matrices are
            cut).
        iteration: forward, backward and step: bytes that a rank sends for ``parameters`` and ``gradients`` and, in the
            mean, in the ``exchange``; ``collectives``; ``model_flops`` of all ranks, and ``newton_schulz_share``, the
            FLOPs of Newton-Schulz of all ranks as a share of those (None where tokens are unknown).
        seconds: of ``exchange``, ``newton_schulz`` and ``muon`` in a step, of the ``model``'s forward and backward, of
            their ``traffic``, and of an ``iteration``; of a ``save``, and of a ``reshard`` by one process; None where a
            rate is unknown.
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
    iteration: Mapping[str, float | None]
    seconds: Mapping[str, float | None]

    @property
    def name(self) -> str:
        """The mesh in the form of the command line."""
        return ",".join(f"{axis}={count}" for axis, count in self.mesh.items())


def topology_of(
    model: ModelTensors,
    mesh: Mapping[str, int],
    rules: Sequence[ShardRule],
    options: MuonOptions,
    rates: Rates,
    training: Training = PLAIN_FSDP,
) -> Topology:
    """Lay a model out on a mesh, as ``reshard`` does, and plan a step there.

    Args:
        rules: the first that matches a parameter's name counts; rules with axes that the mesh lacks do not.

    Raises:
        TargetError: a rule cuts a dim that a parameter does not have, or names an axis twice.
    """
    usable = tuple(rule for rule in rules if mesh.keys() >= {axis for axis, _ in rule.cuts})
    target = Target(mesh, usable)
    layout_of = _layouts_on(target)
    step = step_plan(model.matrices, layout_of, target.ranks, options)
    if not SCHEMES[training.scheme].exchange:
        step = step.without_exchange()
    traffic = traffic_of(model, target, training)
    ranks = _bytes_on_ranks(model.parameters, layout_of, step.resting)
    fullest = int(ranks.held.argmax())
    memory = {name: round(getattr(ranks, name)[fullest]) for name in ("weights", "gradients", "state")}
    memory["wires"] = step.wires
    host = {} if options.offload is None else {"host": memory["state"]}
    if host:
        memory["state"] = math.ceil(memory["state"] * min(1, (TURNS_AHEAD + 1) / len(step.work)))
    if traffic.resident is not None:
        memory["weights"] = round(traffic.resident)
    written = ranks.written
    active = training.active or model.active
    model_flops = MODEL_FLOPS * active * training.tokens if active and training.tokens else None
    of_step = step_seconds(step, rates)
    seconds = {**of_step, **traffic.seconds(model_flops, of_step["muon"], rates, target.ranks)}
    seconds |= {"save": None, "reshard": None}
    if rates.disk:
        seconds |= {"save": float(written.max()) / rates.disk, "reshard": 2 * float(written.sum()) / rates.disk}
    return Topology(
        mesh=dict(mesh),
        unused_rules=tuple(str(rule) for rule in rules if rule not in usable),
        ranks=target.ranks,
        matrices=step.matrices,
        stages=len(step.work),
        sent=_balance(step.sent.sum(axis=(0, 1))),
        busiest_sent=step.busiest_sent,
        newton_schulz=_balance(step.work.sum(axis=0)),
        memory={**memory, "total": sum(memory.values()), **host},
        held=_balance(ranks.held.astype(np.int64)),
        checkpoint={
            "bytes": round(written.sum()),
            "files": int(np.count_nonzero(written)) + DESCRIPTIONS,
            "most": round(written.max()),
        },
        padding=tuple(_buffer_padding([p for p in model.matrices if p.method and p.method.averages], target)),
        iteration={
            "parameters": traffic.parameters,
            "gradients": traffic.gradients,
            "exchange": float(step.sent.sum() / target.ranks),
            "collectives": traffic.collectives + 2 * len(step.work) * bool(step.sent.any()),
            "model_flops": model_flops,
            "newton_schulz_share": float(step.work.sum()) / model_flops if model_flops else None,
        },
        seconds=seconds,
    )


def _layouts_on(target: Target) -> _LayoutOf:
    """Return a function that lays out tensors; those laid out alike share one layout object."""
    default: tuple[AxisCut, ...] = tuple((axis, 0) for axis in target.mesh)

    @cache
    def lay_out(shape: Index, cuts: tuple[AxisCut, ...]) -> TensorLayout:
        mesh, axes = target.grid(cuts)
        placements: list[AxisPlacement] = [Shard(dim) for _, dim in cuts]
        placements += [Replicate()] * (len(axes) - len(cuts))
        return mesh_layout(shape, mesh, tuple(placements))

    def layout_of(parameter: ModelParameter, shape: Index) -> TensorLayout:
        if not shape:
            return owned_layout((), 0)
        record = StateRecord(parameter.name, (parameter.name,), shape, parameter.dtype, no_chunks(len(shape)))
        return lay_out(shape, target.cuts(record, default))

    return layout_of


def _balance(shares: Counts) -> dict[str, Any]:
    balance = balance_of(dict(enumerate(shares.tolist())))
    assert balance is not None, "a mesh has ranks"
    return balance.to_json()


def step_seconds(plan: StepPlan, rates: Rates) -> dict[str, float | None]:
    """Return the seconds of a step, as `Topology.seconds` has them, from the slowest rank of each stage.

    While a stage is orthogonalised, the next one gathers and the one before returns; latencies and element-wise methods
    are left out.
    """
    wires = np.maximum(plan.sent, plan.received).max(axis=2)
    exchange = wires / rates.link if rates.link else None
    compute = plan.work.max(axis=1) / rates.flops if rates.flops else None
    muon = None
    if exchange is not None and compute is not None:
        there, back = [*exchange[:, 0], 0.0], [0.0, *exchange[:, 1]]
        hidden = (max(seconds, there[i + 1] + back[i]) for i, seconds in enumerate(compute))
        muon = float(there[0] + sum(hidden) + back[-1])
    return {
        "exchange": None if exchange is None else float(exchange.sum()),
        "newton_schulz": None if compute is None else float(compute.sum()),
        "muon": muon,
    }


_LayoutOf = Callable[[ModelParameter, Index], TensorLayout]


@dataclass(frozen=True, slots=True, eq=False)
class _RankBytes:
    """Bytes by rank.  Replicas hold the same and share the writing of it evenly."""

    weights: Shares
    state: Shares
    written: Shares

    @property
    def gradients(self) -> Shares:
        """They have the dtype of the weights."""
        return self.weights

    @property
    def held(self) -> Shares:
        return self.weights + self.gradients + self.state


def _bytes_on_ranks(parameters: Sequence[ModelParameter], layout_of: _LayoutOf, resting: Counts) -> _RankBytes:
    """Add up what rests by layouts, and the state ``resting`` at owners."""
    ranks = len(resting)
    times: Counter[tuple[str, TensorLayout, int]] = Counter()
    for parameter in parameters:
        times["weights", layout_of(parameter, parameter.shape), itemsize(parameter.dtype)] += 1
        owned = {slot for slot, kept in parameter.kept.items() if kept.at_owner}
        for tensor in (tensor for tensor in parameter.state if tensor.slot not in owned):
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
    return _RankBytes(totals["weights"], totals["state"] + resting, written + resting)


# A step, from the plan of the optimizer.

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MuonOptions:
    """The options of `muonckpt.optimizer.Muon` that a plan depends on, under its names."""

    ns_steps: int = MUON.ns_steps
    ns_dtype: str = MUON.ns_dtype
    stages: int | None = None
    offload: str | None = None

    @property
    def memory(self) -> StateMemory:
        return STATE_MEMORIES[self.offload]


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """A step of all ranks.

    Attributes:
        sent, received: bytes to and from other ranks, ``[stages, 2, ranks]``: to the owners, and back.  They include
            notes, but not the alignment of wires: at most 8 bytes between two ranks and collective.
        work: FLOPs of Newton-Schulz and of methods besides, ``[stages, ranks]``.
        resting: bytes of state at owners, ``[ranks]``.
        busiest: the rank that sends the most; ``busiest_sent`` are its exact bytes in a step.
        wires: the most bytes of wires that it has in memory at once.
    """

    matrices: int
    sent: Counts
    received: Counts
    work: Counts
    resting: Counts
    busiest: int
    busiest_sent: int
    wires: int

    def without_exchange(self) -> StepPlan:
        """Return the same work where matrices already lie whole with their owners."""
        nothing = np.zeros_like(self.sent)
        return dataclasses.replace(self, sent=nothing, received=nothing, busiest=0, busiest_sent=0, wires=0)


def step_plan(parameters: Sequence[ModelParameter], layout_of: _LayoutOf, ranks: int, options: MuonOptions) -> StepPlan:
    """Plan a step as the ranks themselves do it.

    Owners of matrices with state are chosen with all others here, where ranks choose them group by group.

    Args:
        parameters: the parameters that hold matrices, in forward order.
        layout_of: lays out a tensor of a parameter, given its shape, on ranks 0 to ``ranks - 1``.

    Raises:
        LayoutError: pieces do not add up to a parameter's rows.
    """
    specs = _specs(parameters, layout_of, options)
    everyone = tuple(range(ranks))
    with paused_collector():
        schedule = make_schedule(specs, everyone, 0, options.stages, options.memory.turn_bytes)
    stages = len(schedule.stages)
    notes = NOTE * (ranks - 1)
    sent, received = np.full((2, stages, 2, ranks), notes, np.int64)
    work, resting = np.zeros((stages, ranks), np.int64), np.zeros(ranks, np.int64)
    alike: defaultdict[tuple[int, int, int, int, int | None], list[int]] = defaultdict(list)
    for unit in schedule.units:
        spec, owner = specs[unit.param], unit.owner
        work[unit.stage, owner] += unit.cost
        resting[owner] += _resting_bytes(parameters[unit.param], *unit.rows_columns) if spec.staying else 0
        for number, slot in enumerate(spec.slots):
            standing = int(matrix_parts(slot.layout, slot.fused).representative[unit.index])
            replica = first_replica(slot.layout, slot.fused, standing, owner)
            alike[id(spec), number, standing, unit.stage, replica].append(owner)
    slots = {id(spec): spec.slots for spec in specs}
    for (kind, number, index, stage, replica), owners in alike.items():
        slot = slots[kind][number]
        _holders(slot.layout, slot.fused, index).count(owners, replica, slot, sent[stage], received[stage])
    busiest = int(sent.sum(axis=(0, 1)).argmax())
    with paused_collector():
        own = schedule
        if busiest:
            own = make_schedule(specs, everyone, busiest, options.stages, options.memory.turn_bytes)
    return StepPlan(
        len(schedule.units), sent, received, work, resting, busiest, leaving_bytes(own, busiest), most_wires(own.stages)
    )


def _specs(parameters: Sequence[ModelParameter], layout_of: _LayoutOf, options: MuonOptions) -> list[Spec]:
    """Describe the parameters as planning sees them; equal ones are one object."""
    alike: dict[Hashable, Spec] = {}
    specs = []
    for parameter in parameters:
        assert parameter.method is not None, "it holds matrices"
        layout = layout_of(parameter, parameter.shape)
        group = {**parameter.options, "ns_steps": options.ns_steps, "ns_dtype": options.ns_dtype}
        stated = repr(sorted(group.items()))
        key = layout, parameter.dtype, parameter.method.name, tuple(parameter.kept.items()), stated
        if key not in alike:
            alike[key] = _spec(parameter, parameter.method, layout, layout_of, group)
        specs.append(alike[key])
    return specs


def _spec(
    parameter: ModelParameter, method: MatrixMethod, layout: TensorLayout, layout_of: _LayoutOf, group: ParamGroup
) -> Spec:
    precision = method.precision(group)
    own = dtype_named(parameter.dtype) or precision.sent_dtype
    slots = [Slot(UPDATE, layout, parameter.fused, precision.sent_dtype, precision.returned_dtype)]
    if method.weight:
        slots.append(Slot(WEIGHT, layout, parameter.fused, own, own, returns=False))
    for slot, (kept, reduced) in method_slots(parameter.shape, group, method).items():
        if not kept.at_owner:
            dtype = kept.dtype or own
            slots.append(Slot(slot, layout_of(parameter, reduced.shape), reduced.fused, dtype, dtype))

    def cost(rows: int, columns: int) -> int:
        iterations = flops(rows, columns, group["ns_steps"]) if method.orthogonalizes else 0
        return max(1, iterations + round(method.cost(rows, columns, group)))

    staying = tuple((slot, kept.shape) for slot, kept in parameter.kept.items() if kept.at_owner)
    return Spec(tuple(slots), cost, staying=staying)


def _resting_bytes(parameter: ModelParameter, rows: int, columns: int) -> int:
    """Return the bytes of state that rests at the owner of one of a parameter's matrices."""
    resting = (kept for kept in parameter.kept.values() if kept.at_owner)
    return sum(
        math.prod(SHAPES[kept.shape].of_matrix(rows, columns)) * itemsize(kept.dtype_name or parameter.dtype)
        for kept in resting
    )


@dataclass(frozen=True, slots=True, eq=False)
class Holders:
    """The holders of the parts of one matrix.

    ``numel``, ``first`` holder and number of holders (``replicas``) of each part; ``rank`` and ``part`` of each holder;
    and ``held``, the parts by rank.
    """

    numel: Counts
    first: Counts
    replicas: Counts
    rank: Counts
    part: Counts
    held: Mapping[int, list[int]]

    def count(self, owners: Sequence[int], replica: int | None, slot: Slot, sent: Counts, received: Counts) -> None:
        """Add the bytes that travel, ``[2, ranks]``, of as many such matrices as there are owners.

        They are counted as if owners had nothing; then each owner's own parts are taken away.

        Args:
            replica: as `first_replica` of each of the owners.
        """
        there, back, times = slot.sent_dtype.itemsize, slot.returned_dtype.itemsize * slot.returns, len(owners)
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
    """Return the bytes that the rank of this schedule sends to others, alignment and notes included."""
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

_CutMember = tuple[ModelParameter, tuple[AxisCut, ...]]
_Kind = tuple[Index, tuple[AxisCut, ...]]
"""Parameters of one shape that are cut alike."""


def _buffer_padding(parameters: Sequence[ModelParameter], target: Target) -> Iterator[dict[str, Any]]:
    """Yield `Topology.padding` of every layout in buffers, as ``reshard --layout`` makes them of momentum.

    Dims that the rules cut are cut first; the ranks of the other axes share a buffer.
    """
    groups: defaultdict[tuple[AxisCut, ...], list[ModelParameter]] = defaultdict(list)
    for parameter in parameters:
        none = no_chunks(len(parameter.shape))
        record = StateRecord(parameter.name, (parameter.name,), parameter.shape, parameter.dtype, none)
        groups[target.cuts(record, ())].append(parameter)
    by_axes: defaultdict[tuple[str, ...], list[_CutMember]] = defaultdict(list)
    for cuts, alike in groups.items():
        by_axes[tuple(axis for axis, _ in cuts)] += [(parameter, cuts) for parameter in alike]
    for layout in LAYOUTS if groups else ():
        if layout == ROWS:
            continue
        elements, padding = np.zeros(target.ranks), 0
        work: Shares | None = np.zeros(target.ranks)
        for axes, members in by_axes.items():
            mesh, _ = target.grid([(axis, 0) for axis in axes])
            sizes = mesh.shape[: len(axes)]
            parts = math.prod(sizes)
            share = len(mesh.ranks) // parts
            kinds: list[_Kind] = list(dict.fromkeys((parameter.shape, cuts) for parameter, cuts in members))
            boxes = [cut_parts(shape, sizes, cuts) for shape, cuts in kinds]
            known: dict[tuple[Index | None, ...], tuple[Shares, Shares | None, int]] = {}
            for part in range(parts):
                shapes = tuple(of_part[part].shape if part in of_part else None for of_part in boxes)
                if shapes not in known:
                    known[shapes] = _shares(layout, members, dict(zip(kinds, shapes, strict=True)), share)
                held, costs, padded = known[shapes]
                ranks = list(mesh.ranks[part * share : (part + 1) * share])
                elements[ranks] += held
                padding += padded
                if work is None or costs is None:
                    work = None
                else:
                    work[ranks] += costs
        yield {
            "layout": layout,
            "padding_percent": round(100 * padding / elements.sum(), 2),
            "elements": _most(elements),
            "newton_schulz": None if work is None else _most(work),
        }


def _shares(
    layout: str, members: Sequence[_CutMember], shapes: Mapping[_Kind, Index | None], ranks: int
) -> tuple[Shares, Shares | None, int]:
    """Return elements and FLOPs of one iteration on each of the ranks that share buffers, and the buffers' padding.

    Args:
        shapes: the local shapes; None where a rank has nothing of such parameters.
    """
    local = tuple(
        Parameter(parameter.name, shape, parameter.dtype)
        for parameter, cuts in members
        if (shape := shapes[parameter.shape, cuts]) is not None
    )
    buffers = (
        place_in(layout, PlacementRequest(local, frozenset(p.name for p in local), GroupSizes(ranks))) if local else ()
    )
    elements = np.zeros(ranks)
    work: Shares | None = np.zeros(ranks)
    for buffer in buffers:
        for shard in buffer.shards:
            elements[rank_of(shard)] += shard.stop - shard.start
        if work is None or not buffer.whole:
            work = None
            continue
        owners = buffer.owners
        for placed in buffer.parameters:
            if (owner := owners[placed.name]) is not None:
                work[owner] += newton_schulz(placed.parameter)
    return elements, work, sum(buffer.padding for buffer in buffers)


def _most(shares: Shares) -> float:
    return round(float(shares.max() / shares.mean()), 3)
