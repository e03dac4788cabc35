"""What the layouts in flat buffers would do to momentum on a mesh: padding, and how evenly ranks share it."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..box import Index
from ..converters.target.buffer_layouts import cut_parts, placed_in
from ..converters.target.topology import LAYOUTS, ROWS, AxisCut, Target
from ..layouts.buffers.buffer_layout import BufferLayout, rank_of
from ..layouts.buffers.parameters import GroupSizes, Parameter, newton_schulz
from ..layouts.buffers.placements import ToPlace
from ..record import StateRecord, no_chunks
from .model_tensors import ModelParameter

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
