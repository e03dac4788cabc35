"""Copies between tensors of parameters and memories, as few operators: equal boxes together, and views evenly apart.

The update and each slot that travel in a step are copied by a table of their own (`SlotCopies`), whose rows
`equal_boxes` and `view_pairs` sort out once for a set of parameters with gradients.
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
from ..planning.schedule import Schedule

MAX_BLOCK_ELEMENTS = 1 << 16
"""Elements of the largest block of several boxes: 256 KiB in float32; a few exist at a time."""

Sizes = Mapping[int, int]
"""Elements of matrices end to end in one memory, by number; with the empty space after each."""

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
    """A schedule's copies of one slot that travels, by default the update, as backends execute them.

    Their source are units, in a rank's tensors or end to end in a memory; their target are buffers, with offsets in
    bytes.  Copies that go the other way are turned.

    Attributes:
        update_sends: by stage, from tensors to the wire that goes to the owners.
        result_receives: by stage, from the wire that comes back to tensors, turned.
    """

    def __init__(self, schedule: Schedule, slot: int = 0) -> None:
        self._num_units = len(schedule.units)
        self.update_sends: list[Copies] = []
        self.result_receives: list[Copies] = []
        self._update_receives: list[Copies] = []
        self._result_sends: list[Copies] = []
        self._local: list[Copies] = []

        def of_slot(copies: Copies) -> Copies:
            is_of_slot = copies.source // max(self._num_units, 1) == slot
            copies = copies if is_of_slot.all() else copies.rows(is_of_slot)
            return replace(copies, source=copies.source - slot * self._num_units) if slot else copies

        for stage in schedule.stages:
            self.update_sends.append(of_slot(stage.gather.sends))
            self._update_receives.append(of_slot(stage.gather.receives.inverse()))
            self._local.append(of_slot(stage.gather.local))
            self._result_sends.append(of_slot(stage.scatter.sends))
            self.result_receives.append(of_slot(stage.scatter.receives.inverse()))

    def local(self, stage: int, sizes: Sizes, itemsize: int) -> Copies:
        """Return the copies from this rank's tensors to a memory in which units lie end to end."""
        copies, start = _rows_of_units(self._local[stage], sizes)
        return replace(copies, target_offset=(copies.target_offset + start) * itemsize)

    def update_receives(self, stage: int, sizes: Sizes) -> Copies:
        """Return the copies from the wire to a memory in which units lie end to end, turned."""
        copies, start = _rows_of_units(self._update_receives[stage], sizes)
        return replace(copies, source_offset=copies.source_offset + start)

    def result_sends(self, stage: int, sizes: Sizes) -> Copies:
        """Return the copies of results from a memory in which units lie end to end to the wire."""
        copies, start = _rows_of_units(self._result_sends[stage], sizes)
        return replace(copies, source_offset=copies.source_offset + start)

    def sent_elements(self) -> IntArray:
        """Return how many elements of each unit's update this rank sends to owners, or has for itself."""
        elements = np.zeros(self._num_units, np.int64)
        for copies in (*self.update_sends, *self._local):
            np.add.at(elements, copies.source, copies.numel)
        return elements


def _rows_of_units(copies: Copies, sizes: Sizes) -> tuple[Copies, IntArray]:
    """Return the rows of units that lie end to end, and the element at which each row's unit begins."""
    units = np.array(list(sizes), np.int64)
    first = np.searchsorted(copies.source, units)
    unit, rows = expanded(first, np.searchsorted(copies.source, units, side="right") - first)
    return copies.rows(rows), np.cumsum([0, *sizes.values()])[unit]


class BoxKind(NamedTuple):
    """The common properties of a block's boxes: dtype on the wire, learning-rate factor, and whatever else has to be
    equal.
    """

    wire_dtype: torch.dtype
    scale: float = 1.0
    tag: Hashable = ()


@dataclass(frozen=True, slots=True)
class EqualBoxes:
    """Equal boxes of parameters: stacked as ``[count, *sizes]``, computed, and written back, so that a thousand take as
    few operators as one.

    Attributes:
        params: the number of each box's parameter.
        offsets: where the boxes begin in local tensors; none: each is all of its tensor.
        sizes, strides: of each box there.
        wire_views: views of a memory of ``kind.wire_dtype``, ``[count, *sizes]`` together.
    """

    kind: BoxKind
    params: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: Index
    strides: Index
    wire_views: tuple[View, ...]

    def boxes(self, tensors: Tensors) -> list[Tensor]:
        """Return a view of each box in its parameter's tensor, which is contiguous."""
        whole = [tensors[param] for param in self.params]
        if not self.offsets:
            return whole
        pairs = zip(whole, self.offsets, strict=True)
        return [box.as_strided(self.sizes, self.strides, box.storage_offset() + offset) for box, offset in pairs]

    def write(self, memory: Tensor, boxes: Tensor) -> None:
        """Write ``[count, *sizes]`` to a memory of ``kind.wire_dtype``."""
        first = 0
        for view in self.wire_views:
            count = view.sizes[0]
            view.of(memory).copy_(boxes if count == len(self.params) else boxes[first : first + count])
            first += count

    def read(self, memory: Tensor) -> Tensor:
        """Return ``[count, *sizes]`` of a memory of ``kind.wire_dtype``."""
        if len(self.wire_views) == 1:
            return self.wire_views[0].of(memory)
        return torch.cat([view.of(memory) for view in self.wire_views])


def equal_boxes(
    copies: Copies,
    params: IntArray,
    is_active: Sequence[bool],
    kind_of: Callable[[int], BoxKind],
    shape_of: Callable[[int], Sequence[int]],
) -> list[EqualBoxes]:
    """Return copies, whose sources are units, as blocks of equal boxes of one kind, of up to `MAX_BLOCK_ELEMENTS`, or
    of one box.

    Args:
        params: the parameter of each unit.
        is_active: whether a parameter takes part in the step; rows of others are left out.
        kind_of: the kind of a unit's boxes.
        shape_of: the shape of a parameter's local tensor.
    """
    copies = copies.rows(np.array(is_active, bool)[params[copies.source]])
    if not len(copies):
        return []
    # Kinds get numbers, so that rows are distinguished by columns of integers.
    units, row_unit = np.unique(copies.source, return_inverse=True)
    kinds: dict[BoxKind, int] = {}
    unit_kind = [kinds.setdefault(kind_of(unit), len(kinds)) for unit in units.tolist()]
    row_kind, kind_list = np.array(unit_kind, np.int64)[row_unit], list(kinds)
    copies = replace(copies, source=params[copies.source])

    # Copies have the dims of the widest tensor: others have dims of 1 in front.  A box that is all of its tensor needs
    # no view of it, and keeps the tensor's own dims.
    width, dense = copies.sizes.shape[1], dense_strides(copies.sizes)
    numbers, row_param = np.unique(copies.source, return_inverse=True)
    shapes = [tuple(shape_of(param)) for param in numbers.tolist()]
    wide_shapes = np.array([((1,) * (width - len(shape)) + shape)[-width:] for shape in shapes], np.int64)
    is_dense = (copies.source_strides == dense) | (copies.sizes == 1)
    is_tensor = ((wide_shapes[row_param] == copies.sizes) & is_dense).all(axis=1) & (copies.source_offset == 0)
    ndim = np.where(is_tensor, np.array([len(shape) for shape in shapes], np.int64)[row_param], width)

    # Rows that agree in all of this become blocks of limited size; places on the wire that are evenly apart, a view.
    keys = np.column_stack((row_kind, ndim, is_tensor, copies.sizes, copies.source_strides, copies.target_strides))
    blocks = []
    for rows in _equal_rows(keys, copies):
        head, kind = rows[0], kind_list[row_kind[rows[0]]]
        dims = slice(width - int(ndim[head]), None)
        sizes, strides = tuple(copies.sizes[head, dims].tolist()), tuple(copies.source_strides[head, dims].tolist())
        wire_strides = tuple(copies.target_strides[head, dims].tolist())
        count = max(1, MAX_BLOCK_ELEMENTS // max(1, int(copies.numel[head])))
        for first in range(0, len(rows), count):
            part = rows[first : first + count]
            offset = copies.target_offset[part] // kind.wire_dtype.itemsize
            views = []
            for start, stop, (step,) in _even_runs(offset[:, None]):
                views.append(View((stop - start, *sizes), (step, *wire_strides), int(offset[start])))
            offsets = () if is_tensor[head] else tuple(copies.source_offset[part].tolist())
            blocks.append(
                EqualBoxes(
                    kind,
                    params=tuple(copies.source[part].tolist()),
                    offsets=offsets,
                    sizes=sizes,
                    strides=strides,
                    wire_views=tuple(views),
                )
            )
    return blocks


def view_pairs(copies: Copies, itemsize: int) -> list[tuple[View, View]]:
    """Return copies between one memory and a buffer of bytes, of elements of one size, as pairs of views."""
    pairs = []
    for rows in _equal_rows(np.column_stack((copies.sizes, copies.source_strides, copies.target_strides)), copies):
        columns = copies.sizes, copies.source_strides, copies.target_strides
        sizes, *strides = (tuple(column[rows[0]].tolist()) for column in columns)
        offsets = np.column_stack((copies.source_offset[rows], copies.target_offset[rows] // itemsize))
        for start, stop, steps in _even_runs(offsets):
            sides = zip(steps, strides, offsets[start].tolist(), strict=True)
            memory, buffer = (View((stop - start, *sizes), (step, *along), offset) for step, along, offset in sides)
            pairs.append((memory, buffer))
    return pairs


def _equal_rows(keys: IntArray, copies: Copies) -> Iterator[IntArray]:
    """Yield the numbers of rows with equal keys, in the order of their places in the target."""
    if not len(keys):
        return
    order = np.lexsort((copies.target_offset, *keys.T[::-1]))
    ordered = keys[order]
    yield from np.split(order, np.flatnonzero((ordered[1:] != ordered[:-1]).any(axis=1)) + 1)


def _even_runs(places: IntArray) -> Iterator[tuple[int, int, list[int]]]:
    """Yield (start, stop, steps) of runs of rows of ``places`` ``[n, k]`` that are equally far apart, in steps >= 0.

    ``[[0], [4], [8], [9]]`` has the runs (0, 3, [4]) and (3, 4, [0]).
    """
    # Step i leads from row i to row i + 1. Where step i + 1 is another than step i, a run ends before row i + 2.
    steps = np.diff(places, axis=0)
    changes = [*(np.flatnonzero((steps[1:] != steps[:-1]).any(axis=1)) + 2).tolist(), len(places)]
    start = 0
    while start < len(places):
        is_forward = start + 1 < len(places) and steps[start].min() >= 0
        stop = changes[bisect_right(changes, start + 1)] if is_forward else start + 1
        yield start, stop, steps[start].tolist() if is_forward else [0] * places.shape[1]
        start = stop
