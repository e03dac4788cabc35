"""Lays tensors out in flat buffers that ranks share: cut evenly, or whole tensors with owners."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...box import Box, Index
from ...layout import Fragment, TensorLayout
from ...layouts.buffers.buffer_layout import BufferLayout, PlacedParameter, divided, end_to_end
from ...layouts.buffers.parameters import GroupSizes, Parameter, split
from ...layouts.buffers.placements import PLACEMENTS, ToPlace
from ...layouts.buffers.records import GroupBuffer, recorded, recorded_run
from ...layouts.mesh import Mesh, Shard, mesh_layout
from ...record import StateRecord
from ...vocabulary import ELEMENTWISE
from .topology import FLAT, AxisCut, LaidOut, Target


def _flat(model: ToPlace) -> tuple[BufferLayout, ...]:
    """Lay all tensors of a dtype end to end, cut into equal parts, even inside a row."""
    buffers, ranks = [], model.sizes.dense
    for parameters in split(model.parameters):
        ranges, buckets = end_to_end([parameters], divisor=ranks)
        buffers.append(BufferLayout("flat", 1, ranks, tuple(ranges.values()), buckets, divided(buckets, ranks)))
    return tuple(buffers)


def placed_in(layout: str, model: ToPlace) -> tuple[BufferLayout, ...]:
    """Return the buffers of a model's parameters in one of `LAYOUTS` that has any."""
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
    """Group the layouts of buffers by the slot of state in them and the global ranks that share them."""
    layouts = defaultdict(list)
    for buffer in buffers:
        layouts[buffer.slot, buffer.group].append(buffer.layout)
    return layouts


def _known_or_fresh(
    source_layouts: Sequence[BufferLayout], fresh: tuple[BufferLayout, ...]
) -> tuple[BufferLayout, ...]:
    """Return the known buffers of the same algorithm if they hold exactly these parameters, else the fresh ones."""
    algorithms = {layout.algorithm for layout in fresh}
    parameters = {placed.parameter for layout in fresh for placed in layout.parameters}
    same = [layout for layout in source_layouts if layout.algorithm in algorithms]
    usable = tuple(layout for layout in same if parameters.issuperset(placed.parameter for placed in layout.parameters))
    return usable if parameters == {placed.parameter for layout in usable for placed in layout.parameters} else fresh


def cut_parts(shape: Index, sizes: Index, cuts: Sequence[AxisCut]) -> dict[int, Box]:
    """Return the parts into which the cut axes divide a tensor, by coordinate, but for those without elements."""
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


def buffers_of_state(provenance: Mapping[str, Any], tensors: Sequence[StateRecord]) -> tuple[GroupBuffer, ...]:
    """Return the buffers that a checkpoint is laid out in.

    If there are none, those of the layer-wise run that saved it, once for each slot of optimizer state.

    Args:
        tensors: the tensors of the checkpoint, which say which parameters have which slots, under which keys.

    Raises:
        SourceError: a record does not follow docs/formats/manifest.md.
    """
    return recorded(provenance) or tuple(_of_state(recorded_run(provenance), tensors))


def _of_state(run: Sequence[GroupBuffer], tensors: Sequence[StateRecord]) -> Iterator[GroupBuffer]:
    """Yield buffers of state: each slot has its tensors at the places of the parameters.

    Only names, shapes and dtypes of the parameters are used; other properties mattered only to the placement.
    """
    slots: defaultdict[str, dict[str | None, StateRecord]] = defaultdict(dict)
    for tensor in tensors:
        if tensor.slot is not None:
            slots[tensor.slot][tensor.name] = tensor
    for slot, named in slots.items():
        for buffer in run:
            parameters = buffer.layout.parameters
            placed_state = tuple(_of(placed, named[placed.name]) for placed in parameters if _fits(placed, named))
            if placed_state:
                layout = replace(buffer.layout, parameters=placed_state)
                yield GroupBuffer(slot, 0, buffer.group, layout.origins, layout)


def _fits(placed: PlacedParameter, named: Mapping[str | None, StateRecord]) -> bool:
    """Return whether a parameter has this slot of state, in the parameter's shape."""
    return placed.name in named and named[placed.name].shape == placed.parameter.shape


def _of(placed: PlacedParameter, tensor: StateRecord) -> PlacedParameter:
    return replace(placed, parameter=Parameter(tensor.key, tensor.shape, tensor.dtype))
