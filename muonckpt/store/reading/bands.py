"""Bands: a chunk cut into pieces of bounded size, in the order in which its bytes lie."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ...box import Box, Index, flat_boxes


@dataclass(frozen=True, slots=True)
class Band:
    """Elements ``start:stop`` of a dense row-major chunk, and their boxes, in that order, in global indices."""

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
    """The slices that select ``box`` from an array whose first element has the global index ``origin``."""
    return tuple(slice(lo - o, hi - o) for lo, hi, o in zip(box.lo, box.hi, origin, strict=True))
