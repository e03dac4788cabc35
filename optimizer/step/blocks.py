"""Equal boxes that move together: what is done to a thousand of them takes as few operators as what is done to one.

Boxes that lie equally far apart in a buffer are one strided view of it (`Stretch`).  Boxes that rest in tensors of
their own are stacked into one dense tensor, computed there, and written back (`EqualBoxes`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from ...box import Index, row_major
from ..rounding import exact_dtype, rounded_once
from .moves import Move

Sort = TypeVar("Sort", bound=Hashable)

LARGEST_BLOCK = 1 << 16
"""Elements of the largest block of more than one box: 256 KiB in float32, of which there are a few at a time."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Boxes in a buffer, each ``strides[0]`` elements after the one before; in elements.

    Attributes:
        sizes: how many, and the sizes of each.
        strides: from one to the next, and within each.
    """

    sizes: Index
    strides: Index
    offset: int

    def of(self, memory: Tensor) -> Tensor:
        """A view of a contiguous tensor, ``[count, *sizes]``."""
        return memory.as_strided(self.sizes, self.strides, memory.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class EqualBoxes:
    """Equal boxes that rest in tensors, each at an offset there, and where they are in a buffer, one after the other.

    Attributes:
        tensors: the number of each box's tensor.
        offsets: where it begins there, in elements.
        whole: each is all of a tensor of its sizes.
        far: ``[count, *sizes]`` of the buffer, together; of elements of ``dtype``.
    """

    tensors: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: Index
    strides: Index
    whole: bool
    far: tuple[Stretch, ...]
    dtype: torch.dtype

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The boxes, views of tensors that are contiguous."""
        if self.whole:
            return [tensors[number] for number in self.tensors]
        return [
            tensors[number].as_strided(self.sizes, self.strides, tensors[number].storage_offset() + offset)
            for number, offset in zip(self.tensors, self.offsets, strict=True)
        ]

    def put(self, buffer: Tensor, boxes: Tensor) -> None:
        """Write boxes ``[count, *sizes]`` to a buffer of bytes."""
        memory, first = buffer.view(self.dtype), 0
        for stretch in self.far:
            count = stretch.sizes[0]
            stretch.of(memory).copy_(boxes if count == len(boxes) else boxes[first : first + count])
            first += count

    def taken(self, buffer: Tensor) -> Tensor:
        """The boxes that lie in a buffer of bytes, ``[count, *sizes]``; perhaps a view."""
        memory = buffer.view(self.dtype)
        found = [stretch.of(memory) for stretch in self.far]
        return found[0] if len(found) == 1 else torch.cat(found)


def blocks_of(
    moves: Iterable[tuple[torch.dtype, Sort, Move]], shapes: Sequence[Sequence[int]]
) -> list[tuple[Sort, EqualBoxes]]:
    """Moves as blocks of those that are equal and of one kind.

    Args:
        moves: with the dtype of their buffer, and their kind.
        shapes: of the tensors that moves number.
    """
    alike: defaultdict[tuple[Sort, torch.dtype, bool, Index, Index, Index], list[Move]] = defaultdict(list)
    for dtype, kind, move in moves:
        dense = move.near == 0 and row_major(move.sizes) == move.near_strides
        whole = dense and tuple(shapes[move.tensor]) == move.sizes
        alike[kind, dtype, whole, move.sizes, move.near_strides, move.far_strides].append(move)
    return [
        (
            kind,
            EqualBoxes(
                tuple(move.tensor for move in cut),
                tuple(move.near for move in cut),
                sizes,
                strides,
                whole,
                tuple(_far(cut, dtype.itemsize)),
                dtype,
            ),
        )
        for (kind, dtype, whole, sizes, strides, _), some in alike.items()
        for cut in _cut(sorted(some, key=lambda move: move.far))
    ]


Carry = tuple[Stretch, Stretch]
"""Equal boxes in a memory, and where they are in a buffer."""


def carries_of(moves: Iterable[Move], dtype: torch.dtype) -> list[Carry]:
    """Moves between one memory, tensor 0, and a buffer, both of one dtype, as pairs of stretches of equal boxes."""
    alike: defaultdict[tuple[Index, Index, Index], list[Move]] = defaultdict(list)
    for move in moves:
        alike[move.sizes, move.near_strides, move.far_strides].append(move)
    item = dtype.itemsize
    found = []
    for some in alike.values():
        some.sort(key=lambda move: move.far)
        for start, stop, (near, far) in _evenly([(move.near, move.far // item) for move in some]):
            first, sizes = some[start], (stop - start, *some[start].sizes)
            here = Stretch(sizes, (near, *first.near_strides), first.near)
            found.append((here, Stretch(sizes, (far, *first.far_strides), first.far // item)))
    return found


def _far(moves: Sequence[Move], item: int) -> Iterator[Stretch]:
    for start, stop, (apart,) in _evenly([(move.far // item,) for move in moves]):
        first = moves[start]
        yield Stretch((stop - start, *first.sizes), (apart, *first.far_strides), first.far // item)


def _evenly(places: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Runs of places that are equally far apart, none before the one before it: first, end, and how far."""
    start = 0
    while start < len(places):
        stop, apart = start + 1, (0,) * len(places[start])
        while stop < len(places):
            step = tuple(here - before for here, before in zip(places[stop], places[stop - 1], strict=True))
            if min(step) < 0 or (stop > start + 1 and step != apart):
                break
            stop, apart = stop + 1, step
        yield start, stop, apart
        start = stop


def _cut(moves: Sequence[Move]) -> Iterator[Sequence[Move]]:
    """Runs of equal moves of up to `LARGEST_BLOCK` elements, or of one."""
    count = max(1, LARGEST_BLOCK // max(1, prod(moves[0].sizes)))
    return (moves[first : first + count] for first in range(0, len(moves), count))


def as_one(boxes: Sequence[Tensor]) -> Tensor:
    """Equal boxes as one tensor, ``[count, *sizes]``; a view of a single one."""
    return torch.stack(list(boxes)) if len(boxes) > 1 else boxes[0].unsqueeze(0)


@contextmanager
def lent(boxes: Sequence[Tensor]) -> Iterator[Tensor]:
    """Change equal boxes in place: lends ``[count, *sizes]``, float32 at least, which is rounded into them once."""
    if len(boxes) == 1:
        with rounded_once([boxes[0].unsqueeze(0)]) as [[exact]]:
            yield exact
        return
    stack = torch.stack(list(boxes))
    exact = stack.to(exact_dtype(stack))
    yield exact
    torch._foreach_copy_(list(boxes), exact.unbind())
