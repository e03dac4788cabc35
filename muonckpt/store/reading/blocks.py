"""Parts of bounded size: bands of a chunk in the order of its bytes, and blocks of a box with strides."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...algebra.box import Box, Index, flat_boxes


@dataclass(frozen=True, slots=True)
class Band:
    """Elements ``start:stop`` of a dense row-major chunk, and their boxes in that order, in global indices."""

    start: int
    stop: int
    boxes: tuple[Box, ...]


def bands(chunk: Box, most: int) -> Iterator[Band]:
    """Cut a chunk into bands of at most ``most`` elements: whole rows where a row is that small."""
    row = math.prod(chunk.shape[1:])
    step = most // row * row if 0 < row <= most else most
    for start in range(0, chunk.numel, max(step, 1)):
        stop = min(start + max(step, 1), chunk.numel)
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


def blocks(shape: Index, strides: Index, gap: int, most: int) -> Iterator[Block]:
    """Cut a box into blocks that have no gaps of more than ``gap`` elements and span at most ``most``."""
    yield from _cut((0,) * len(shape), shape, strides, gap, most)


def _cut(lo: Index, shape: Index, strides: Index, gap: int, most: int) -> Iterator[Block]:
    dims = sorted((dim for dim, length in enumerate(shape) if length > 1), key=lambda dim: -strides[dim])
    reach, is_wide = 1, False
    for dim in reversed(dims):
        is_wide |= strides[dim] - reach > gap
        reach += (shape[dim] - 1) * strides[dim]
    if reach <= most and not is_wide:
        slices = tuple(map(slice, lo, map(operator.add, lo, shape)))
        yield Block(slices, shape, sum(map(operator.mul, lo, strides)), reach)
        return
    cut = dims[0]
    step = 1 if is_wide else max(most // strides[cut], 1)
    for start in range(0, shape[cut], step):
        length = min(step, shape[cut] - start)
        yield from _cut(
            (*lo[:cut], lo[cut] + start, *lo[cut + 1 :]), (*shape[:cut], length, *shape[cut + 1 :]), strides, gap, most
        )


def batches(parts: Iterable[Block], most: int) -> Iterator[list[Block]]:
    """Group blocks, in order, so that a group spans at most ``most`` elements or is one block."""
    batch: list[Block] = []
    used = 0
    for part in parts:
        if batch and used + part.span > most:
            yield batch
            batch, used = [], 0
        batch.append(part)
        used += part.span
    yield batch


def strided_view(flat: NDArray[Any], strides: Index, shape: Index) -> NDArray[Any]:
    """View the elements of a box that begins with the first of ``flat``; read-only.  A last dim of halves stays."""
    if not math.prod(shape):
        return np.empty((*shape, *flat.shape[1:]), flat.dtype)
    step = flat.strides[0]
    steps = (*(stride * step for stride in strides), *flat.strides[1:])
    view: NDArray[Any] = np.ndarray((*shape, *flat.shape[1:]), flat.dtype, flat.data, strides=steps)
    view.flags.writeable = False
    return view
