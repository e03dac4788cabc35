"""Lays tensors out in flat buffers that ranks share: cut evenly, or whole tensors with owners."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...algebra.box import Box, Index
from ...algebra.layout import Fragment, TensorLayout
from ...layouts.buffers.buffer_layout import BufferLayout, bucket_shards, end_to_end
from ...layouts.buffers.parameters import GroupSizes, Parameter, split
from ...layouts.buffers.placements import PLACEMENTS, PlacementRequest
from ...layouts.buffers.records import GroupBuffer, recorded_buffers, run_buffers
from ...layouts.mesh import Mesh, Shard, mesh_layout
from ...names.vocabulary import ELEMENTWISE
from ...record.record import StateRecord
from .topology import FLAT, AxisCut, Target, TargetLayouts


def placed_in(layout: str, model: PlacementRequest) -> tuple[BufferLayout, ...]:
    """Return the buffers of a model's parameters in one of `LAYOUTS` that has any."""
    if layout != FLAT:
        return PLACEMENTS[layout].place(model)
    buffers, ranks = [], model.sizes.dense
    for parameters in split(model.parameters):  # by dtype
        ranges, buckets = end_to_end([parameters], divisor=ranks)
        buffers.append(BufferLayout("flat", 1, ranks, tuple(ranges.values()), buckets, bucket_shards(buckets, ranks)))
    return tuple(buffers)


def lay_out_in_buffers(target: Target, tensors: Sequence[StateRecord], provenance: Mapping[str, Any]) -> TargetLayouts:
    """Lay tensors out in buffers; each slot of state, and each part that the cut axes leave, has its own.

    Raises:
        SourceError: the buffers in the provenance do not follow docs/formats/manifest.md.
    """
    groups: defaultdict[tuple[str | None, tuple[str, ...]], list[StateRecord]] = defaultdict(list)
    cuts = {tensor.key: target.cuts(tensor, ()) for tensor in tensors}
    for tensor in tensors:
        groups[tensor.slot, tuple(axis for axis, _ in cuts[tensor.key])].append(tensor)
    source_layouts: defaultdict[tuple[str | None, tuple[int, ...]], list[BufferLayout]] = defaultdict(list)
    for buffer in recorded_buffers(provenance) or _buffers_of_run(run_buffers(provenance), tensors):
        source_layouts[buffer.slot, buffer.group].append(buffer.layout)
    fragments: dict[str, list[Fragment]] = {tensor.key: [] for tensor in tensors}
    in_manifest: dict[str, Mapping[str, Any] | None] = dict.fromkeys(fragments)
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
            fresh = placed_in(target.layout, PlacementRequest(parameters, matrices, GroupSizes(share)))
            for layout in _known_or_fresh(source_layouts[slot, ranks], fresh):
                names = [placed.name for placed in layout.parameters]
                buffers.append(GroupBuffer(slot, part, ranks, tuple(local[name].lo for name in names), layout))
                for name in names:
                    in_manifest[name] = {
                        "algorithm": layout.algorithm,
                        "version": layout.version,
                        "mesh": list(target.mesh.values()),
                        "axes": list(target.mesh),
                        "cuts": [list(cut) for cut in cuts[name]],
                    }
    for buffer in buffers:
        for key, fragment in buffer.fragments():
            fragments[key].append(fragment)
    layouts = {tensor.key: TensorLayout.of(tensor.shape, tuple(fragments[tensor.key])) for tensor in tensors}
    return TargetLayouts(layouts, in_manifest, tuple(buffers))


def _known_or_fresh(
    source_layouts: Sequence[BufferLayout], fresh: tuple[BufferLayout, ...]
) -> tuple[BufferLayout, ...]:
    """Return the source's buffers of the same algorithm if they hold exactly these parameters, else the fresh ones."""
    algorithms = {layout.algorithm for layout in fresh}
    parameters = {placed.parameter for layout in fresh for placed in layout.parameters}
    same = [layout for layout in source_layouts if layout.algorithm in algorithms]
    usable = tuple(layout for layout in same if parameters.issuperset(placed.parameter for placed in layout.parameters))
    return usable if parameters == {placed.parameter for layout in usable for placed in layout.parameters} else fresh


def cut_parts(shape: Index, sizes: Index, cuts: Sequence[AxisCut]) -> dict[int, Box]:
    """Return the parts into which the cut axes divide a tensor, by coordinate, but for those without elements."""
    layout = mesh_layout(shape, Mesh.of(*sizes), tuple(Shard(dim) for _, dim in cuts))
    return {int(fragment.place.buffer): fragment.box for fragment in layout.fragments}


def _buffers_of_run(run: Sequence[GroupBuffer], tensors: Sequence[StateRecord]) -> Iterator[GroupBuffer]:
    """Yield the buffers of the layer-wise run that saved these tensors, once for each slot of optimizer state.

    Each slot has its tensors at the places of the parameters.  Only names, shapes and dtypes of the parameters are
    used; other properties mattered only to the placement.
    """
    slots: defaultdict[str, dict[str | None, StateRecord]] = defaultdict(dict)
    for tensor in tensors:
        if tensor.slot is not None:
            slots[tensor.slot][tensor.name] = tensor
    for slot, named in slots.items():
        for buffer in run:
            placed_state = []
            for placed in buffer.layout.parameters:
                state = named.get(placed.name)
                if state is not None and state.shape == placed.parameter.shape:
                    parameter = Parameter(state.key, state.shape, state.dtype)
                    placed_state.append(replace(placed, parameter=parameter))
            if placed_state:
                layout = replace(buffer.layout, parameters=tuple(placed_state))
                yield GroupBuffer(slot, 0, buffer.group, layout.origins, layout)
