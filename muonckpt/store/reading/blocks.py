"""Parts of bounded size: bands of a chunk in the order of its bytes, blocks of a strided box, runs of near ranges."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...algebra.box import Box, Index, flat_boxes
from ...record.columns import Column


@dataclass(frozen=True, slots=True)
class Band:
    """Elements ``start:stop`` of a dense row-major chunk, and their boxes in that order, in global indices."""

    start: int
    stop: int
    boxes: tuple[Box, ...]


def bands(chunk: Box, max_elements: int) -> Iterator[Band]:
    """Cut a chunk into bands of at most so many elements: whole rows where a row is that small."""
    # A row is all of the outermost index.
    row = math.prod(chunk.shape[1:])
    step = max(max_elements // row * row if 0 < row <= max_elements else max_elements, 1)
    for start in range(0, chunk.numel, step):
        stop = min(start + step, chunk.numel)
        yield Band(start, stop, tuple(box.shift(chunk.lo) for box in flat_boxes(chunk.shape, start, stop)))


def slices_within(box: Box, origin: Index) -> tuple[slice, ...]:
    """Return the slices that select ``box`` from an array whose first element has the global index ``origin``."""
    return tuple(slice(lo - o, hi - o) for lo, hi, o in zip(box.lo, box.hi, origin, strict=True))


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a box, and where it lies: ``start`` and ``span`` are in elements of the buffer that has the box."""

    slices: tuple[slice, ...]
    shape: Index
    start: int
    span: int


def strided_span(shape: Index, strides: Index) -> int:
    """Return the number of elements from the first to the last of a box that is not empty."""
    return 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))


def blocks(shape: Index, strides: Index, gap: int, max_span: int) -> Iterator[Block]:
    """Cut a box into blocks that have no gaps of more than ``gap`` elements and span at most ``max_span``."""
    yield from _cut_box((0,) * len(shape), shape, strides, gap, max_span)


def _cut_box(lo: Index, shape: Index, strides: Index, gap: int, max_span: int) -> Iterator[Block]:
    """Yield the box as one block if it is small and has no wide gaps; else those of its parts.  Recursive."""
    dims = sorted((dim for dim, length in enumerate(shape) if length > 1), key=lambda dim: -strides[dim])
    reach, is_wide = 1, False
    for dim in reversed(dims):
        is_wide |= strides[dim] - reach > gap
        reach += (shape[dim] - 1) * strides[dim]
    if reach <= max_span and not is_wide:
        slices = tuple(map(slice, lo, map(operator.add, lo, shape)))
        yield Block(slices, shape, start=sum(map(operator.mul, lo, strides)), span=reach)
        return

    # Cut along the dim of the largest stride: its gaps are the largest, and its parts the furthest apart.
    cut = dims[0]
    step = 1 if is_wide else max(max_span // strides[cut], 1)
    for start in range(0, shape[cut], step):
        part_lo = (*lo[:cut], lo[cut] + start, *lo[cut + 1 :])
        part_shape = (*shape[:cut], min(step, shape[cut] - start), *shape[cut + 1 :])
        yield from _cut_box(part_lo, part_shape, strides, gap, max_span)


def strided_view(flat: NDArray[Any], strides: Index, shape: Index) -> NDArray[Any]:
    """View the elements of a box that begins with the first of ``flat``; read-only.  A last dim of halves stays."""
    if not math.prod(shape):
        return np.empty((*shape, *flat.shape[1:]), flat.dtype)
    step = flat.strides[0]
    steps = (*(stride * step for stride in strides), *flat.strides[1:])
    view: NDArray[Any] = np.ndarray((*shape, *flat.shape[1:]), flat.dtype, flat.data, strides=steps)
    view.flags.writeable = False
    return view


@dataclass(frozen=True, slots=True)
class Runs:
    """Joined ranges: the bytes ``start:stop`` of each run in its file, and the number of its ``first`` range."""

    start: Column
    stop: Column
    first: Column

    def members(self, ranges: int) -> Iterator[range]:
        """Yield the numbers of each run's ranges, of so many ranges in all."""
        first = self.first.tolist()
        return map(range, first, [*first[1:], ranges])


def join_ranges(
    start: Column,
    stop: Column,
    gap: int,
    max_bytes: int = sys.maxsize,
    file: NDArray[np.signedinteger[Any]] | None = None,
) -> Runs:
    """Join ranges of bytes, given in the order of ``file`` and ``start``, into runs that are each read at once.

    Args:
        gap: the most bytes between two neighbours in a run: as many as cost less to read than a call.
        max_bytes: the most bytes of a run of several ranges.
        file: the number of each range's file; None: all are in one.
    """
    if not len(start):
        return Runs(start, stop, np.zeros(0, np.int64))
    # A range that is too far from the one before begins a run.
    is_apart = start[1:] > stop[:-1] + gap
    if file is not None:
        is_apart |= file[1:] != file[:-1]
    first = np.flatnonzero(np.append(True, is_apart))

    # Runs that are too long are cut before the range with which they would be.
    if max_bytes < sys.maxsize:
        cuts = []
        for lo, hi in pairwise([*first.tolist(), len(start)]):
            reach = np.maximum.accumulate(stop[lo:hi])
            while lo < hi:
                cuts.append(lo)
                lo = max(hi - len(reach) + int(np.searchsorted(reach, start[lo] + max_bytes, side="right")), lo + 1)
        first = np.array(cuts)
    return Runs(start[first], np.maximum.reduceat(stop, first), first)
