"""Copies between tensors of parameters and memories, as few operators: equal boxes together, and views evenly apart.

What travels in a step, the update and each slot besides, is copied by a table of its own (`SlotCopies`), whose rows
`blocks` and `carries` sort out once for a set of parameters with gradients.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...algebra.box import Index
from ...algebra.overlap import IntArray, expanded
from ...algebra.plan import Copies, dense_strides
from ..ground.tensors import view_boxes
from ..planning.schedule import Schedule

MAX_BLOCK_ELEMENTS = 1 << 16
"""Elements of the largest block of several boxes: 256 KiB in float32, of which there are a few at a time."""

Sizes = Mapping[int, int]
"""Elements of matrices that lie end to end in one memory, by number; with what is empty behind each."""

Tensors = Sequence[Tensor] | Mapping[int, Tensor]
"""Local tensors by the number of their parameter."""


@dataclass(frozen=True, slots=True)
class View:
    """A strided view of a contiguous memory, in elements."""

    sizes: Index
    strides: Index
    offset: int

    def of(self, memory: Tensor) -> Tensor:
        return memory.as_strided(self.sizes, self.strides, memory.storage_offset() + self.offset)


class SlotCopies:
    """A schedule's copies of one of the slots that travel, by default the update, as backends execute them: from units,
    in a rank's tensors or end to end in a memory, to buffers with offsets in bytes; copies back are turned.

    Attributes:
        leaving: from tensors to the wire, by stage.
        returning: from the wire to tensors, turned.
    """

    def __init__(self, schedule: Schedule, slot: int = 0) -> None:
        self._units = len(schedule.units)

        def of_slot(copies: Copies) -> Copies:
            chosen = copies.source // max(self._units, 1) == slot
            copies = copies if chosen.all() else copies.rows(chosen)
            return replace(copies, source=copies.source - slot * self._units) if slot else copies

        self.leaving = [of_slot(stage.gather.sends) for stage in schedule.stages]
        self.returning = [of_slot(stage.scatter.receives.inverse()) for stage in schedule.stages]
        self._arriving = [of_slot(stage.gather.receives.inverse()) for stage in schedule.stages]
        self._own = [of_slot(stage.gather.own) for stage in schedule.stages]
        self._released = [of_slot(stage.scatter.sends) for stage in schedule.stages]

    def own(self, stage: int, sizes: Sizes, itemsize: int) -> Copies:
        """Return the copies from tensors to a memory in which units lie end to end."""
        copies, begin = _of_units(self._own[stage], sizes)
        return replace(copies, target_offset=(copies.target_offset + begin) * itemsize)

    def arriving(self, stage: int, sizes: Sizes) -> Copies:
        """Return the copies from the wire to a memory in which units lie end to end, turned."""
        return _from_memory(self._arriving[stage], sizes)

    def released(self, stage: int, sizes: Sizes) -> Copies:
        """Return the copies of results from a memory in which units lie end to end to the wire."""
        return _from_memory(self._released[stage], sizes)

    def sent(self) -> IntArray:
        """Return how many elements of each unit's update this rank sends to owners, or has for itself."""
        sent = np.zeros(self._units, np.int64)
        for copies in (*self.leaving, *self._own):
            np.add.at(sent, copies.source, copies.numel)
        return sent


def _of_units(copies: Copies, sizes: Sizes) -> tuple[Copies, IntArray]:
    """Return the rows of units that lie end to end, and the element at which each row's unit begins."""
    units = np.array(list(sizes), np.int64)
    first = np.searchsorted(copies.source, units)
    unit, rows = expanded(first, np.searchsorted(copies.source, units, side="right") - first)
    return copies.rows(rows), np.cumsum([0, *sizes.values()])[unit]


def _from_memory(copies: Copies, sizes: Sizes) -> Copies:
    copies, begin = _of_units(copies, sizes)
    return replace(copies, source_offset=copies.source_offset + begin)


class BoxKind(NamedTuple):
    """The common properties of a block's boxes: dtype on the wire, learning-rate factor, what else must be equal."""

    wire: torch.dtype
    scale: float = 1.0
    others: Hashable = ()


@dataclass(frozen=True, slots=True)
class EqualBoxes:
    """Equal boxes of parameters: stacked as ``[count, *sizes]``, computed, and written back, so that a thousand take as
    few operators as one.

    Attributes:
        params: the number of each box's parameter.
        offsets: where the boxes begin in local tensors; none: each is all of its tensor.
        sizes, strides: of each box there.
        far: views of a buffer of ``kind.wire`` elements, ``[count, *sizes]`` together.
    """

    kind: BoxKind
    params: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: Index
    strides: Index
    far: tuple[View, ...]

    def boxes(self, tensors: Tensors) -> list[Tensor]:
        return view_boxes([tensors[param] for param in self.params], self.sizes, self.strides, self.offsets)

    def put(self, buffer: Tensor, boxes: Tensor) -> None:
        """Write ``[count, *sizes]`` to a buffer of bytes."""
        memory, first = buffer.view(self.kind.wire), 0
        for view in self.far:
            count = view.sizes[0]
            view.of(memory).copy_(boxes if count == len(boxes) else boxes[first : first + count])
            first += count

    def taken(self, buffer: Tensor) -> Tensor:
        views = [view.of(buffer.view(self.kind.wire)) for view in self.far]
        return views[0] if len(views) == 1 else torch.cat(views)


def blocks(
    copies: Copies, kind: IntArray, kinds: Sequence[BoxKind], shape_of: Callable[[int], Sequence[int]]
) -> Iterator[EqualBoxes]:
    """Yield copies, whose sources are parameters, as blocks of equal boxes of one kind, of up to `MAX_BLOCK_ELEMENTS`
    elements, or of one box.

    Args:
        kind: of each row.
        shape_of: the shape of a parameter's local tensor.
    """
    if not len(copies):
        return
    width, dense = copies.sizes.shape[1], dense_strides(copies.sizes)
    params, number = np.unique(copies.source, return_inverse=True)
    shapes = [tuple(shape_of(param)) for param in params.tolist()]
    filled_up = np.array([((1,) * (width - len(shape)) + shape)[-width:] for shape in shapes], np.int64)
    same = (filled_up[number] == copies.sizes) & ((copies.source_strides == dense) | (copies.sizes == 1))
    whole = same.all(axis=1) & (copies.source_offset == 0)
    ndim = np.array([len(shape) for shape in shapes], np.int64)[number]
    kinds_of_rows = np.column_stack((kind, np.where(whole, ndim, width), whole))
    for rows in _equal(
        np.column_stack((kinds_of_rows, copies.sizes, copies.source_strides, copies.target_strides)), copies
    ):
        kind_number, dims, all_of_it = kinds_of_rows[rows[0]].tolist()
        sizes, strides, far_strides = (
            tuple(column[rows[0], width - dims :].tolist())
            for column in (copies.sizes, copies.source_strides, copies.target_strides)
        )
        wire = kinds[kind_number].wire.itemsize
        count = max(1, MAX_BLOCK_ELEMENTS // max(1, int(copies.numel[rows[0]])))
        for first in range(0, len(rows), count):
            cut = rows[first : first + count]
            begin = copies.target_offset[cut] // wire
            far = (
                View((stop - start, *sizes), (apart, *far_strides), int(begin[start]))
                for start, stop, (apart,) in _evenly(begin[:, None])
            )
            offsets = () if all_of_it else tuple(copies.source_offset[cut].tolist())
            yield EqualBoxes(
                kinds[kind_number], tuple(copies.source[cut].tolist()), offsets, sizes, strides, tuple(far)
            )


def carries(copies: Copies, itemsize: int) -> Iterator[tuple[View, View]]:
    """Yield copies between one memory and a buffer of bytes, of elements of one size, as pairs of views."""
    for rows in _equal(np.column_stack((copies.sizes, copies.source_strides, copies.target_strides)), copies):
        sizes, near, far = (
            tuple(column[rows[0]].tolist()) for column in (copies.sizes, copies.source_strides, copies.target_strides)
        )
        begin = np.column_stack((copies.source_offset[rows], copies.target_offset[rows] // itemsize))
        for start, stop, apart in _evenly(begin):
            here, there = (
                View((stop - start, *sizes), (step, *strides), offset)
                for step, strides, offset in zip(apart, (near, far), begin[start].tolist(), strict=True)
            )
            yield here, there


def _equal(keys: IntArray, copies: Copies) -> Iterator[IntArray]:
    if not len(keys):
        return
    order = np.lexsort((copies.target_offset, *keys.T[::-1]))
    ordered = keys[order]
    cuts = np.flatnonzero((ordered[1:] != ordered[:-1]).any(axis=1)) + 1
    yield from np.split(order, cuts)


def _evenly(places: IntArray) -> Iterator[tuple[int, int, list[int]]]:
    """Yield runs of places ``[n, k]``, equally far apart and none before the last: first, end, how far."""
    apart = np.diff(places, axis=0)
    changes = [*(np.flatnonzero((apart[1:] != apart[:-1]).any(axis=1)) + 2).tolist(), len(places)]
    start = 0
    while start < len(places):
        forward = start + 1 < len(places) and apart[start].min() >= 0
        stop = changes[bisect_right(changes, start + 1)] if forward else start + 1
        yield start, stop, apart[start].tolist() if forward else [0] * places.shape[1]
        start = stop
