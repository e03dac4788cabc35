"""Boxes: axis-aligned, half-open ranges of a tensor's global index space.

Boxes are closed under intersection, and a contiguous range of a flattened tensor is at most ``2 * ndim - 1`` of them
(:func:`flat_boxes`), so nothing else says *which* elements are meant.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import ge, sub
from types import EllipsisType
from typing import Any

from ..names.errors import LayoutError

Index = tuple[int, ...]

MAX_ELEMENTS = 1 << 60
"""No size, offset or number of elements or bytes is larger.  Larger ones come from damaged or hostile files only."""

MAX_DIMS = 64
"""No tensor has more dims; numpy's arrays have as many."""


@dataclass(frozen=True, slots=True)
class Box:
    """The elements ``i`` with ``lo[d] <= i[d] < hi[d]`` for every dim ``d``.

    ``lo`` and ``hi`` have one entry per dim, in elements, with ``0 <= lo[d] <= hi[d] <= MAX_ELEMENTS``.  The box of a
    0-d tensor has no dims and holds its one element.  A box with ``lo[d] == hi[d]`` for some ``d`` is empty.

    Raises:
        LayoutError: the bounds differ in length, or a range is negative or reversed.
    """

    lo: Index
    hi: Index

    def __post_init__(self) -> None:
        if len(self.lo) != len(self.hi):
            raise LayoutError(f"a box needs as many upper as lower bounds, got {self.lo} and {self.hi}")
        for lo, hi in zip(self.lo, self.hi, strict=True):
            if not 0 <= lo <= hi <= MAX_ELEMENTS:
                raise LayoutError(
                    f"a box needs 0 <= lo <= hi <= {MAX_ELEMENTS} in every dim, got lo={self.lo}, hi={self.hi}"
                )

    @classmethod
    def of(cls, shape: Sequence[int]) -> Box:
        """Return the box of a whole tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def ndim(self) -> int:
        return len(self.lo)

    @property
    def shape(self) -> Index:
        return tuple(map(sub, self.hi, self.lo))

    @property
    def numel(self) -> int:
        return math.prod(map(sub, self.hi, self.lo))

    def __and__(self, other: Box) -> Box | None:
        """Return the intersection; None where there is no common element."""
        lo = tuple(map(max, self.lo, other.lo))
        hi = tuple(map(min, self.hi, other.hi))
        return None if any(map(ge, lo, hi)) else Box(lo, hi)

    def __contains__(self, other: Box) -> bool:
        """Return whether every element of ``other`` is in this box."""
        return other.numel == 0 or (self & other) == other

    def shift(self, offset: Sequence[int]) -> Box:
        """Return this box moved by ``offset`` elements per dim."""
        return Box(tuple(map(operator.add, self.lo, offset)), tuple(map(operator.add, self.hi, offset)))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{lo}:{hi}" for lo, hi in zip(self.lo, self.hi, strict=True)) + "]"


Selection = int | slice | EllipsisType | tuple[int | slice | EllipsisType, ...]
"""Numpy's basic indexing, with steps of one."""


def ranges_of(shape: Sequence[int], selection: Selection) -> list[int | range]:
    """Return for each dim of a tensor of this shape the index or the range that a selection takes, as numpy does.

    Raises:
        IndexError: there are more indices than dims, an index is outside its dim, or a step is not one.
    """
    # The ellipsis means whole dims.
    indices: list[Any] = list(selection) if isinstance(selection, tuple) else [selection]
    indices += [] if ... in indices else [...]
    num_whole = len(shape) - len(indices) + 1
    if num_whole < 0 or indices.count(...) > 1:
        raise IndexError(f"{len(shape)} dims, found {len(indices) - 1} indices")
    ellipsis = indices.index(...)
    indices[ellipsis : ellipsis + 1] = [slice(None)] * num_whole
    ranges: list[int | range] = []
    for dim, index in enumerate(indices):
        length = shape[dim]
        if isinstance(index, int) and not -length <= index < length:
            raise IndexError(f"the indices 0 to {length - 1} in dim {dim}, not {index}")
        # Python's own ranges clip slices and count from the end.
        selected: int | range = range(length)[index]
        if isinstance(selected, range) and selected.step != 1:
            raise IndexError(f"slices with a step of 1 only, found {index}")
        ranges.append(selected)
    return ranges


def box_at(shape: Sequence[int], selection: Selection) -> Box:
    """Return the box that a selection takes of a tensor of this shape; an integer takes a range of one.

    Raises:
        IndexError: as `ranges_of`.
    """
    ranges = [range(index, index + 1) if isinstance(index, int) else index for index in ranges_of(shape, selection)]
    lo = tuple(along.start for along in ranges)
    return Box(lo, tuple(start + len(along) for start, along in zip(lo, ranges, strict=True)))


def row_major(shape: Sequence[int]) -> Index:
    """Return the strides, in elements, of a dense row-major tensor of this shape."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Cut elements ``start:stop`` of the flattened (row-major) tensor into boxes, in flat order.

    A range within one index of the first dim is that index times a range of the other dims; any other one is a
    ragged head, a block of whole slices and a ragged tail.  That gives at most ``2 * len(shape) - 1`` boxes.

    Raises:
        LayoutError: the range is reversed or not inside the tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise LayoutError(f"flat range {start}:{stop} is not inside a tensor of shape {tuple(shape)}")
    if start == stop:
        return
    if not shape:
        yield Box((), ())
        return
    slice_numel = math.prod(shape[1:])
    first, head = divmod(start, slice_numel)
    last, tail = divmod(stop, slice_numel)

    def part(index: int, lo: int, hi: int) -> Iterator[Box]:
        for box in flat_boxes(shape[1:], lo, hi):
            yield Box((index, *box.lo), (index + 1, *box.hi))

    # A range within one index of the first dim, or a head, whole slices and a tail.
    if first == last:
        yield from part(first, head, tail)
        return
    if head:
        yield from part(first, head, slice_numel)
        first += 1
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last, *shape[1:]))
    if tail:
        yield from part(last, 0, tail)
