"""Lays tensors out in flat buffers that ranks share: cut evenly, or whole tensors with owners."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...box import Box, Index
from ...layout import Fragment, TensorLayout
from ...layouts.buffers.buffer_layout import BufferLayout
from ...layouts.buffers.group_buffer import GroupBuffer
from ...layouts.buffers.parameters import GroupSizes, Parameter, split
from ...layouts.buffers.placements import PLACEMENTS, ToPlace
from ...layouts.buffers.ranges import divided, end_to_end
from ...layouts.mesh import Mesh, Shard, mesh_layout
from ...record import StateRecord
from ...vocabulary import ELEMENTWISE
from .source_buffers import buffers_of_state
from .topology import FLAT, AxisCut, LaidOut, Target


def _flat(model: ToPlace) -> tuple[BufferLayout, ...]:
    """Buffers in which all tensors of a dtype lie end to end, cut into equal parts, even inside a row."""
    buffers, ranks = [], model.sizes.dense
    for parameters in split(model.parameters):
        ranges, buckets = end_to_end([parameters], divisor=ranks)
        buffers.append(BufferLayout("flat", 1, ranks, tuple(ranges.values()), buckets, divided(buckets, ranks)))
    return tuple(buffers)


def placed_in(layout: str, model: ToPlace) -> tuple[BufferLayout, ...]:
    """The buffers of a model's parameters in one of `LAYOUTS` that has any."""
    return _flat(model) if layout == FLAT else PLACEMENTS[layout].place(model)


def lay_out_in_buffers(target: Target, tensors: Sequence[StateRecord], provenance: Mapping[str, Any]) -> LaidOut:
    """Lay tensors out in buffers; each slot of state, and each part that the cut axes leave, has its own."""
    groups: defaultdict[tuple[str | None, tuple[str, ...]], list[StateRecord]] = defaultdict(list)
    cuts = {tensor.key: target.cuts(tensor, ()) for tensor in tensors}
    for tensor in tensors:
        groups[tensor.slot, tuple(axis for axis, _ in cuts[tensor.key])].append(tensor)
    source_layouts = _by_slot_and_ranks(buffers_of_state(provenance, tensors))
    fragments: dict[str, list[Fragment]] = {tensor.key: [] for tensor in tensors}
    recorded: dict[str, Mapping[str, Any] | None] = dict.fromkeys(fragments)
    buffers: list[GroupBuffer] = []
    for (slot, axes), members in groups.items():
        mesh, _ = target.grid([(axis, 0) for axis in axes])
        parts = math.prod(mesh.shape[: len(axes)])
        share = len(mesh.ranks) // parts
        boxes = {t.key: cut_parts(t.shape, mesh.shape[: len(axes)], cuts[t.key]) for t in members}
        for part in range(parts):
            ranks = mesh.ranks[part * share : (part + 1) * share]
            local = {key: of_part[part] for key, of_part in boxes.items() if part in of_part}
            parameters = tuple(Parameter(t.key, local[t.key].shape, t.dtype) for t in members if t.key in local)
            matrices = frozenset(() if slot in ELEMENTWISE else local)
            fresh = placed_in(target.layout, ToPlace(parameters, matrices, GroupSizes(share)))
            for layout in _known_or_fresh(source_layouts[slot, ranks], fresh):
                names = [placed.name for placed in layout.parameters]
                buffers.append(GroupBuffer(slot, part, ranks, tuple(local[name].lo for name in names), layout))
                recorded |= {name: _recorded(target, layout, cuts[name]) for name in names}
    for buffer in buffers:
        for key, fragment in buffer.fragments():
            fragments[key].append(fragment)
    layouts = {tensor.key: TensorLayout.of(tensor.shape, tuple(fragments[tensor.key])) for tensor in tensors}
    return LaidOut(layouts, recorded, tuple(buffers))


def _by_slot_and_ranks(
    buffers: Iterable[GroupBuffer],
) -> defaultdict[tuple[str | None, tuple[int, ...]], list[BufferLayout]]:
    """The layouts of buffers, by the slot of state in them and the global ranks that share them."""
    layouts = defaultdict(list)
    for buffer in buffers:
        layouts[buffer.slot, buffer.group].append(buffer.layout)
    return layouts


def _known_or_fresh(
    source_layouts: Sequence[BufferLayout], fresh: tuple[BufferLayout, ...]
) -> tuple[BufferLayout, ...]:
    """The known buffers of the same algorithm if they hold exactly the same parameters, else the fresh ones."""
    algorithms = {layout.algorithm for layout in fresh}
    parameters = {placed.parameter for layout in fresh for placed in layout.parameters}
    same = [layout for layout in source_layouts if layout.algorithm in algorithms]
    usable = tuple(layout for layout in same if parameters.issuperset(placed.parameter for placed in layout.parameters))
    return usable if parameters == {placed.parameter for layout in usable for placed in layout.parameters} else fresh


def cut_parts(shape: Index, sizes: Index, cuts: Sequence[AxisCut]) -> dict[int, Box]:
    """The parts into which the cut axes divide a tensor, by coordinate; parts without elements are left out."""
    layout = mesh_layout(shape, Mesh.of(*sizes), tuple(Shard(dim) for _, dim in cuts))
    return {int(fragment.place.buffer): fragment.box for fragment in layout.fragments}


def _recorded(target: Target, buffer: BufferLayout, cuts: Sequence[AxisCut]) -> Mapping[str, Any]:
    return {
        "algorithm": buffer.algorithm,
        "version": buffer.version,
        "mesh": list(target.mesh.values()),
        "axes": list(target.mesh),
        "cuts": [list(cut) for cut in cuts],
    }
