"""One topology: the costs of a model on one mesh, in bytes and FLOPs."""

from __future__ import annotations

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
from ...layouts.buffers.buffer_layout import BufferLayout
from ...layouts.buffers.parameters import GroupSizes, Parameter
from ...layouts.buffers.placements import PlacementRequest
from ...layouts.flat import owned_layout
from ...layouts.mesh import mesh_layout
from ...names.collector import gc_paused
from ...names.vocabulary import MUON, ParamGroup
from ...optimizer.methods.form import MatrixMethod, dtype_named
from ...optimizer.methods.matrix import method_slots
from ...optimizer.newton_schulz.recipe import flops
from ...optimizer.planning.matrices import UPDATE, WEIGHT, Fused, Slot, Spec
from ...optimizer.planning.residence import first_replica, matrix_parts
from ...optimizer.planning.schedule import NOTE, Stage, make_schedule
from ...record.record import StateRecord, no_chunks
from ...store.reading.dtypes import itemsize
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
        newton_schulz: how evenly FLOPs of a step are shared, in the same way; with those of methods besides.
        memory: ``weights``, ``gradients``, ``state`` of the rank that holds the most; ``wires`` of the rank that sends
            the most; and their ``total``.
        held: how evenly ranks hold weights, gradients and state.
        checkpoint: ``bytes`` of weights and state, number of ``files``, and the ``most`` that a rank writes, or
            reads in a load on this mesh; the most that it receives from others then (``most_received``).
        padding: for each ``layout`` of momentum in flat buffers its ``padding_percent``.
    """

    mesh: Mapping[str, int]
    unused_rules: tuple[str, ...]
    ranks: int
    matrices: int
    stages: int
    sent: Mapping[str, Any]
    newton_schulz: Mapping[str, Any]
    memory: Mapping[str, int]
    held: Mapping[str, Any]
    checkpoint: Mapping[str, int]
    padding: tuple[Mapping[str, Any], ...]

    @property
    def name(self) -> str:
        """The mesh in the form of the command line."""
        return ",".join(f"{axis}={count}" for axis, count in self.mesh.items())


def topology_of(
    model: ModelTensors,
    mesh: Mapping[str, int],
    rules: Sequence[ShardRule],
    options: MuonOptions,
) -> Topology:
    """Lay a model out on a mesh, as ``reshard`` does, and plan a step there.

    Args:
        rules: the first that matches a parameter's name counts; rules with axes that the mesh lacks do not.

    Raises:
        TargetError: a rule cuts a dim that a parameter does not have, or names an axis twice.
    """
    usable_rules: list[ShardRule] = []
    unused_rules: list[str] = []
    for rule in rules:
        if all(axis in mesh for axis, _ in rule.cuts):
            usable_rules.append(rule)
        else:
            unused_rules.append(str(rule))
    target = Target(mesh, tuple(usable_rules))
    layout_of = _make_layout_of(target)
    step = step_plan(model.matrices, layout_of, target.ranks, options)

    # Memory is that of the fullest rank.
    ranks = _bytes_on_ranks(model.parameters, layout_of, target.ranks)
    fullest = int(ranks.total.argmax())
    memory = {name: round(getattr(ranks, name)[fullest]) for name in ("weights", "gradients", "state")}
    memory["wires"] = step.wires

    file_bytes = ranks.file_bytes
    return Topology(
        mesh=dict(mesh),
        unused_rules=tuple(unused_rules),
        ranks=target.ranks,
        matrices=step.matrices,
        stages=len(step.work),
        sent=_balance_of_ranks(step.sent.sum(axis=(0, 1))),
        newton_schulz=_balance_of_ranks(step.work.sum(axis=0)),
        memory={**memory, "total": sum(memory.values())},
        held=_balance_of_ranks(ranks.total.astype(np.int64)),
        checkpoint={
            "bytes": round(file_bytes.sum()),
            "files": int(np.count_nonzero(file_bytes)) + DESCRIPTIONS,
            "most": round(file_bytes.max()),
            # Each stored byte is read once; a rank that holds replicas of others' parts receives them.
            "most_received": round((ranks.weights + ranks.state - file_bytes).max()),
        },
        padding=tuple(_buffer_padding([p for p in model.matrices if p.method and p.method.averages], target)),
    )


def _make_layout_of(target: Target) -> _LayoutOf:
    """Return a function that lays out tensors; equal layouts are one object."""
    default: tuple[AxisCut, ...] = tuple((axis, 0) for axis in target.mesh)

    @cache
    def lay_out(shape: Index, cuts: tuple[AxisCut, ...]) -> TensorLayout:
        placement = target.placement(cuts)
        return mesh_layout(shape, placement.mesh, placement.placements)

    def layout_of(parameter: ModelParameter, shape: Index) -> TensorLayout:
        if not shape:
            return owned_layout((), 0)
        record = StateRecord(
            key=parameter.name, path=(parameter.name,), shape=shape, dtype=parameter.dtype, chunks=no_chunks(len(shape))
        )
        return lay_out(shape, target.cuts(record, default))

    return layout_of


def _balance_of_ranks(shares: Counts) -> dict[str, Any]:
    return balance_of(dict(enumerate(shares.tolist())))


_LayoutOf = Callable[[ModelParameter, Index], TensorLayout]


@dataclass(frozen=True, slots=True, eq=False)
class _RankBytes:
    """Bytes by rank.  Replicas have the same in memory and share the writing of it evenly."""

    weights: Shares
    state: Shares
    file_bytes: Shares

    @property
    def gradients(self) -> Shares:
        """They have the dtype of the weights."""
        return self.weights

    @property
    def total(self) -> Shares:
        return self.weights + self.gradients + self.state


def _bytes_on_ranks(parameters: Sequence[ModelParameter], layout_of: _LayoutOf, num_ranks: int) -> _RankBytes:
    """Add up the bytes of tensors by layouts."""
    # Thousands of parameters have few layouts: each is counted once.
    times: Counter[tuple[str, TensorLayout, int]] = Counter()
    for parameter in parameters:
        times["weights", layout_of(parameter, parameter.shape), itemsize(parameter.dtype)] += 1
        for tensor in parameter.state:
            times["state", layout_of(parameter, tensor.shape), itemsize(tensor.dtype)] += 1
    memory = {"weights": np.zeros(num_ranks), "state": np.zeros(num_ranks)}
    file_bytes = np.zeros(num_ranks)
    for (kind, layout, size), count in times.items():
        elements, file_elements = np.zeros(num_ranks), np.zeros(num_ranks)
        rows, first_rows = layout.by_box
        numel, replicas = (layout.stops - layout.starts).prod(axis=1), np.diff(first_rows)
        ranks, box = np.array(layout.buffers, np.int64)[layout.buffer[rows]], layout.box[rows]
        np.add.at(elements, ranks, numel[box])
        np.add.at(file_elements, ranks, numel[box] / replicas[box])
        memory[kind] += elements * size * count
        file_bytes += file_elements * size * count
    return _RankBytes(memory["weights"], memory["state"], file_bytes)


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
        sent: bytes to other ranks, ``[stages, 2, ranks]``: to the owners, and back.  They include notes, but not the
            alignment of wires: at most 8 bytes between two ranks and collective.
        work: FLOPs of Newton-Schulz and of methods besides, ``[stages, ranks]``.
        wires: the most bytes of wires that the rank which sends the most has in memory at once.
    """

    matrices: int
    sent: Counts
    work: Counts
    wires: int


def step_plan(parameters: Sequence[ModelParameter], layout_of: _LayoutOf, ranks: int, options: MuonOptions) -> StepPlan:
    """Plan a step as the ranks themselves do it.

    Args:
        parameters: the parameters that hold matrices, in forward order.
        layout_of: lays out a tensor of a parameter, given its shape, on ranks 0 to ``ranks - 1``.

    Raises:
        LayoutError: pieces do not add up to a parameter's rows.
    """
    specs = _make_specs(parameters, layout_of, options)
    everyone = tuple(range(ranks))
    with gc_paused():
        schedule = make_schedule(specs, everyone, 0, options.stages)
    num_stages = len(schedule.stages)
    notes = NOTE * (ranks - 1)
    sent = np.full((num_stages, 2, ranks), notes, np.int64)

    # The work of owners, and the owners of each kind of matrix: parts have the same places for all matrices of a kind.
    work = np.zeros((num_stages, ranks), np.int64)
    owners_by_kind: defaultdict[tuple[int, int, int, int, int | None], list[int]] = defaultdict(list)
    for unit in schedule.units:
        spec, owner = specs[unit.param], unit.owner
        work[unit.stage, owner] += unit.cost
        for slot_index, slot in enumerate(spec.slots):
            matrix = int(matrix_parts(slot.layout, slot.fused).representative[unit.index])
            replica = first_replica(slot.layout, slot.fused, matrix, owner)
            owners_by_kind[id(spec), slot_index, matrix, unit.stage, replica].append(owner)

    # The bytes that travel, counted once for each kind.
    slots_by_spec = {id(spec): spec.slots for spec in specs}
    for (spec_id, slot_index, matrix, stage, replica), owners in owners_by_kind.items():
        slot = slots_by_spec[spec_id][slot_index]
        _find_parts(slot.layout, slot.fused, matrix).count(owners, replica, slot, sent[stage])

    # The schedule of the rank that sends the most has its wires.
    num_units, busiest = len(schedule.units), int(sent.sum(axis=(0, 1)).argmax())
    if busiest:
        with gc_paused():
            schedule = make_schedule(specs, everyone, busiest, options.stages)
    return StepPlan(matrices=num_units, sent=sent, work=work, wires=most_wires(schedule.stages))


def _make_specs(parameters: Sequence[ModelParameter], layout_of: _LayoutOf, options: MuonOptions) -> list[Spec]:
    """Describe the parameters as planning sees them; equal ones are one object."""
    spec_by_key: dict[Hashable, Spec] = {}
    specs = []
    for parameter in parameters:
        assert parameter.method is not None, "it holds matrices"
        layout = layout_of(parameter, parameter.shape)
        group = {**parameter.options, "ns_steps": options.ns_steps, "ns_dtype": options.ns_dtype}
        slots = tuple(parameter.method.slots_of(parameter.options).items())
        key = layout, parameter.dtype, parameter.method.name, slots, repr(sorted(group.items()))
        if key not in spec_by_key:
            spec_by_key[key] = _make_spec(parameter, parameter.method, layout, layout_of, group)
        specs.append(spec_by_key[key])
    return specs


def _make_spec(
    parameter: ModelParameter, method: MatrixMethod, layout: TensorLayout, layout_of: _LayoutOf, group: ParamGroup
) -> Spec:
    precision = method.precision(group)
    weight_dtype = dtype_named(parameter.dtype) or precision.sent_dtype
    slots = [Slot(UPDATE, layout, parameter.fused, precision.sent_dtype, precision.returned_dtype)]
    if method.weight:
        slots.append(Slot.unrounded(WEIGHT, layout, parameter.fused, weight_dtype, returns=False))
    for name, (method_slot, reduced) in method_slots(parameter.shape, group, method).items():
        dtype = method_slot.dtype or weight_dtype
        slots.append(Slot.unrounded(name, layout_of(parameter, reduced.shape), reduced.fused, dtype))

    def cost(rows: int, columns: int) -> int:
        iterations = flops(rows, columns, group["ns_steps"]) if method.orthogonalizes else 0
        return max(1, iterations + round(method.cost(rows, columns, group)))

    return Spec(tuple(slots), cost)


@dataclass(frozen=True, slots=True, eq=False)
class PartReplicas:
    """The parts of one matrix and the ranks that have them.

    Attributes:
        numel, first_row, replicas: for each part, its elements, its first row below and its replicas.
        rank, part: a row for each replica.
        by_rank: the parts of each rank.
    """

    numel: Counts
    first_row: Counts
    replicas: Counts
    rank: Counts
    part: Counts
    by_rank: Mapping[int, list[int]]

    def count(self, owners: Sequence[int], replica: int | None, slot: Slot, sent: Counts) -> None:
        """Add the bytes that travel, ``[2, ranks]``, of as many such matrices as there are owners.

        Args:
            replica: as `first_replica` of each of the owners.
        """
        # Gathers come from one replica of each part; results return to all of them.
        gathered_size, returned_size = slot.sent_dtype.itemsize, slot.returned_dtype.itemsize * slot.returns
        index = np.arange(len(self.numel)) if replica is None else np.full(len(self.numel), replica)
        senders = self.rank[self.first_row + index % self.replicas]
        np.add.at(sent[0], senders, len(owners) * gathered_size * self.numel)
        # So far as if owners had no parts: those that they have do not travel.
        returned_total = int(self.numel[self.part].sum())
        for owner in owners:
            owner_parts = self.by_rank.get(owner, [])
            np.subtract.at(sent[0], senders[owner_parts], gathered_size * self.numel[owner_parts])
            sent[1, owner] += returned_size * (returned_total - int(self.numel[owner_parts].sum()))


@lru_cache(maxsize=4096)
def _find_parts(layout: TensorLayout, fused: Fused, index: int) -> PartReplicas:
    """Return the parts of a matrix, by its number in the parameter, and the ranks that hold replicas of each."""
    parts = matrix_parts(layout, fused)
    numbers = parts.numbers(index)
    part, fragment = parts.find_replicas(numbers)
    replicas = np.bincount(part, minlength=len(numbers))
    ranks = np.array(layout.buffers, np.int64)[layout.buffer[fragment]]
    by_rank: defaultdict[int, list[int]] = defaultdict(list)
    for rank, number in zip(ranks.tolist(), part.tolist(), strict=True):
        by_rank[rank].append(number)
    return PartReplicas(
        numel=parts.volumes(numbers),
        first_row=np.cumsum(replicas) - replicas,
        replicas=replicas,
        rank=ranks,
        part=part,
        by_rank=dict(by_rank),
    )


def most_wires(stages: Sequence[Stage]) -> int:
    """Return the most bytes of wires in a rank's memory at once.

    While a stage is orthogonalised, the next one gathers and the one before returns.
    """
    peak_bytes = 0
    for number, stage in enumerate(stages):
        gathering = stages[number + 1].gather.bytes if number + 1 < len(stages) else 0
        returning = stages[number - 1].scatter.bytes if number else 0
        arrived, results = sum(stage.gather.receive_counts), sum(stage.scatter.send_counts)
        stage_bytes = max(stage.gather.bytes, arrived + results, stage.scatter.bytes)
        peak_bytes = max(peak_bytes, gathering + returning + stage_bytes)
    return peak_bytes


# Flat buffers.

Shares = NDArray[np.float64]

_CutMember = tuple[ModelParameter, tuple[AxisCut, ...]]
_Kind = tuple[Index, tuple[AxisCut, ...]]
"""Parameters of one shape with the same cuts."""


def _buffer_padding(parameters: Sequence[ModelParameter], target: Target) -> Iterator[dict[str, Any]]:
    """Yield `Topology.padding` of every layout in buffers, as ``reshard --layout`` makes them of momentum.

    Dims that the rules cut are cut first; the ranks of the other axes share a buffer.
    """
    members_by_cuts: defaultdict[tuple[AxisCut, ...], list[_CutMember]] = defaultdict(list)
    for parameter in parameters:
        chunks = no_chunks(len(parameter.shape))
        record = StateRecord(
            key=parameter.name, path=(parameter.name,), shape=parameter.shape, dtype=parameter.dtype, chunks=chunks
        )
        cuts = target.cuts(record, ())
        members_by_cuts[cuts].append((parameter, cuts))
    members_by_axes: defaultdict[tuple[str, ...], list[_CutMember]] = defaultdict(list)
    for cuts, members in members_by_cuts.items():
        members_by_axes[tuple(axis for axis, _ in cuts)] += members
    for layout in LAYOUTS if parameters else ():
        if layout == ROWS:
            continue
        elements = padding = 0
        for axes, members in members_by_axes.items():
            # The leading axes of this mesh cut; a part of it is the ranks with one place on these.
            mesh = target.placement([(axis, 0) for axis in axes]).mesh
            sizes = mesh.shape[: len(axes)]
            num_parts = math.prod(sizes)
            kinds: list[_Kind] = list(dict.fromkeys((parameter.shape, cuts) for parameter, cuts in members))
            boxes_by_kind = [cut_parts(shape, sizes, cuts) for shape, cuts in kinds]
            # Most parts have the same local shapes, so their buffers are made once.
            times: Counter[tuple[Index | None, ...]] = Counter()
            for part in range(num_parts):
                times[tuple(boxes[part].shape if part in boxes else None for boxes in boxes_by_kind)] += 1
            for shapes, count in times.items():
                local_shapes = dict(zip(kinds, shapes, strict=True))
                buffers = _place_in_buffers(layout, members, local_shapes, len(mesh.ranks) // num_parts)
                padding += count * sum(buffer.padding for buffer in buffers)
                for buffer in buffers:
                    elements += count * sum(shard.stop - shard.start for shard in buffer.shards)
        yield {"layout": layout, "padding_percent": round(100 * padding / elements, 2)}


def _place_in_buffers(
    layout: str, members: Sequence[_CutMember], shapes: Mapping[_Kind, Index | None], ranks: int
) -> tuple[BufferLayout, ...]:
    """Return the buffers that some ranks share.

    Args:
        shapes: the local shapes; None where a rank has nothing of such parameters.
    """
    local = []
    for parameter, cuts in members:
        shape = shapes[parameter.shape, cuts]
        if shape is not None:
            local.append(Parameter(parameter.name, shape, parameter.dtype))
    request = PlacementRequest(tuple(local), frozenset(parameter.name for parameter in local), GroupSizes(ranks))
    return place_in(layout, request) if local else ()
