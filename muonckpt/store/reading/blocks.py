"""Parts of bounded size: bands of a chunk in the order of its bytes, and blocks of a box with strides."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...box import Box, Index, flat_boxes


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


def within(box: Box, origin: Index) -> tuple[slice, ...]:
    """Return the slices that select ``box`` from an array whose first element has the global index ``origin``."""
    return tuple(slice(lo - o, hi - o) for lo, hi, o in zip(box.lo, box.hi, origin, strict=True))


@dataclass(frozen=True, slots=True)
class Block:
    """A part ``lo:hi`` of a box, in coordinates of the box."""

    lo: Index
    hi: Index

    @property
    def shape(self) -> Index:
        return tuple(hi - lo for lo, hi in zip(self.lo, self.hi, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(map(slice, self.lo, self.hi))

    def start(self, strides: Index) -> int:
        return sum(map(int.__mul__, self.lo, strides))

    def span(self, strides: Index) -> int:
        return span(self.shape, strides)


def span(shape: Index, strides: Index) -> int:
    """Return the number of elements from the first to the last of a box that is not empty."""
    return 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))


def blocks(shape: Index, strides: Index, gap: int, most: int) -> Iterator[Block]:
    """Cut a box into blocks that have no gaps of more than ``gap`` elements and span at most ``most``."""
    yield from _cut(Block((0,) * len(shape), shape), strides, gap, most)


def _cut(block: Block, strides: Index, gap: int, most: int) -> Iterator[Block]:
    dims = [dim for dim, length in enumerate(block.shape) if length > 1]
    dims.sort(key=lambda dim: -strides[dim])
    reach, wide = 1, []
    for dim in reversed(dims):
        if strides[dim] - reach > gap:
            wide.append(dim)
        reach += (block.shape[dim] - 1) * strides[dim]
    if reach <= most and not wide:
        yield block
        return
    cut = dims[0]
    step = 1 if wide else max(most // strides[cut], 1)
    for start in range(block.lo[cut], block.hi[cut], step):
        stop = min(start + step, block.hi[cut])
        lo, hi = list(block.lo), list(block.hi)
        lo[cut], hi[cut] = start, stop
        yield from _cut(Block(tuple(lo), tuple(hi)), strides, gap, most)


def batches(parts: Sequence[Block], strides: Index, most: int) -> Iterator[list[Block]]:
    """Group blocks, in order, so that a group spans at most ``most`` elements or is one block."""
    batch: list[Block] = []
    used = 0
    for part in parts:
        if batch and used + part.span(strides) > most:
            yield batch
            batch, used = [], 0
        batch.append(part)
        used += part.span(strides)
    yield batch


def strided(flat: NDArray[Any], strides: Index, shape: Index) -> NDArray[Any]:
    """View the elements of a box that begins with the first of ``flat``; read-only.  A last dim of halves stays."""
    if not math.prod(shape):
        return np.empty((*shape, *flat.shape[1:]), flat.dtype)
    step = flat.strides[0]
    return np.lib.stride_tricks.as_strided(
        flat,
        (*shape, *flat.shape[1:]),
        (*(stride * step for stride in strides), *flat.strides[1:]),
        writeable=False,
    )
