"""Lays tensors out in flat buffers that ranks share: cut evenly, or whole tensors with owners."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...algebra.box import Box, Index
from ...algebra.layout import Fragment, TensorLayout
from ...layouts.buffers.buffer_layout import BufferLayout, bucket_shards, end_to_end
from ...layouts.buffers.parameters import GroupSizes, Parameter, split
from ...layouts.buffers.placements import PlacementRequest, place_parameters
from ...layouts.buffers.records import GroupBuffer, recorded_buffers, run_buffers
from ...layouts.mesh import Mesh, Shard, mesh_layout
from ...names.vocabulary import ELEMENTWISE
from ...record.record import StateRecord
from .topology import FLAT, AxisCut, Target, TargetLayouts


def place_in(layout: str, model: PlacementRequest) -> tuple[BufferLayout, ...]:
    """Return the buffers of a model's parameters in one of `LAYOUTS` that has any."""
    if layout != FLAT:
        return place_parameters(layout, model)
    buffers, ranks = [], model.sizes.dense
    for parameters in split(model.parameters):  # by dtype
        ranges, buckets = end_to_end([parameters], divisor=ranks)
        buffers.append(
            BufferLayout(
                "flat",
                version=1,
                ranks=ranks,
                parameters=tuple(ranges.values()),
                buckets=buckets,
                shards=bucket_shards(buckets, ranks),
            )
        )
    return tuple(buffers)


def lay_out_in_buffers(target: Target, tensors: Sequence[StateRecord], provenance: Mapping[str, Any]) -> TargetLayouts:
    """Lay tensors out in buffers; each slot of state, and each part that the cut axes leave, has its own.

    Raises:
        SourceError: the buffers in the provenance do not follow docs/formats/manifest.md.
    """
    # Tensors of one slot that the same axes cut share buffers.
    cuts = {tensor.key: target.cuts(tensor, ()) for tensor in tensors}
    groups: defaultdict[tuple[str | None, tuple[str, ...]], list[StateRecord]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.slot, tuple(axis for axis, _ in cuts[tensor.key])].append(tensor)
    source_layouts: defaultdict[tuple[str | None, tuple[int, ...]], list[BufferLayout]] = defaultdict(list)
    for buffer in recorded_buffers(provenance) or _buffers_of_run(run_buffers(provenance), tensors):
        source_layouts[buffer.slot, buffer.group].append(buffer.layout)
    # Each part that the axes leave is laid out by itself, over its ranks.
    buffers: list[GroupBuffer] = []
    recorded: dict[str, Mapping[str, Any] | None] = dict.fromkeys(cuts)
    for (slot, axes), members in groups.items():
        mesh = target.placement([(axis, 0) for axis in axes]).mesh
        sizes = mesh.shape[: len(axes)]
        parts = math.prod(sizes)
        num_ranks = len(mesh.ranks) // parts
        boxes = {tensor.key: cut_parts(tensor.shape, sizes, cuts[tensor.key]) for tensor in members}
        for part in range(parts):
            ranks = mesh.ranks[part * num_ranks : (part + 1) * num_ranks]
            local = {key: tensor_boxes[part] for key, tensor_boxes in boxes.items() if part in tensor_boxes}
            parameters = tuple(Parameter(t.key, local[t.key].shape, t.dtype) for t in members if t.key in local)
            matrices = frozenset(() if slot in ELEMENTWISE else local)
            computed = place_in(target.layout, PlacementRequest(parameters, matrices, GroupSizes(num_ranks)))
            for layout in _source_or_computed(source_layouts[slot, ranks], computed):
                names = [entry.name for entry in layout.parameters]
                buffers.append(
                    GroupBuffer(
                        slot, part=part, group=ranks, origins=tuple(local[name].lo for name in names), layout=layout
                    )
                )
                placement = {"algorithm": layout.algorithm, "version": layout.version}
                placement |= {"mesh": list(target.mesh.values()), "axes": list(target.mesh)}
                for name in names:
                    recorded[name] = {**placement, "cuts": [list(cut) for cut in cuts[name]]}
    fragments: dict[str, list[Fragment]] = {tensor.key: [] for tensor in tensors}
    for buffer in buffers:
        for key, fragment in buffer.fragments():
            fragments[key].append(fragment)
    layouts = {tensor.key: TensorLayout.of(tensor.shape, tuple(fragments[tensor.key])) for tensor in tensors}
    return TargetLayouts(layouts, recorded, tuple(buffers))


def _source_or_computed(
    source_layouts: Sequence[BufferLayout], computed: tuple[BufferLayout, ...]
) -> tuple[BufferLayout, ...]:
    """Return the source's buffers of the same algorithm if they hold exactly these parameters, else those computed."""
    algorithms = {layout.algorithm for layout in computed}
    parameters = _parameters_of(computed)
    candidates = (layout for layout in source_layouts if layout.algorithm in algorithms)
    usable = tuple(layout for layout in candidates if parameters.issuperset(_parameters_of([layout])))
    return usable if parameters == _parameters_of(usable) else computed


def _parameters_of(layouts: Iterable[BufferLayout]) -> set[Parameter]:
    parameters = set[Parameter]()
    for layout in layouts:
        parameters.update(entry.parameter for entry in layout.parameters)
    return parameters


def cut_parts(shape: Index, sizes: Index, cuts: Sequence[AxisCut]) -> dict[int, Box]:
    """Return the parts into which the cut axes divide a tensor, by coordinate, but for those without elements."""
    layout = mesh_layout(shape, Mesh.of(*sizes), tuple(Shard(dim) for _, dim in cuts))
    return {int(fragment.place.buffer): fragment.box for fragment in layout.fragments}


def _buffers_of_run(run: Sequence[GroupBuffer], tensors: Sequence[StateRecord]) -> Iterator[GroupBuffer]:
    """Yield the buffers of the layer-wise run that saved these tensors, once for each slot of optimizer state.

    Each slot has its tensors at the places of the parameters.  Only names, shapes and dtypes of the parameters are
    used; other properties mattered only to the placement.
    """
    # The state of each slot by parameter.
    slots: defaultdict[str, dict[str | None, StateRecord]] = defaultdict(dict)
    for tensor in tensors:
        if tensor.slot is not None:
            slots[tensor.slot][tensor.name] = tensor
    # A parameter without state, or with state of another shape, leaves a gap.
    for slot, named in slots.items():
        for buffer in run:
            members = []
            for entry in buffer.layout.parameters:
                state = named.get(entry.name)
                if state is not None and state.shape == entry.parameter.shape:
                    parameter = Parameter(state.key, state.shape, state.dtype)
                    members.append(replace(entry, parameter=parameter))
            if members:
                layout = replace(buffer.layout, parameters=tuple(members))
                yield GroupBuffer(slot, part=0, group=buffer.group, origins=layout.origins, layout=layout)
