"""Layouts: where a tensor's elements live.

A :class:`Fragment` maps one box of the tensor's global index space to an affine :class:`Place` in a buffer.  A
:class:`TensorLayout` is the fragments of one tensor, on every holder.  Rows, columns, replicas, flat-buffer cuts,
whole-matrix owners, padded buffers and file chunks are all of this one type; where it came from no longer matters.

All offsets, strides and sizes are in elements.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from .box import Box, Index, row_major
from .errors import LayoutError
from .overlap import IntArray, overlaps

Buffer = int | str
"""Names a buffer: the number of the rank that holds it, or any string."""


@dataclass(frozen=True, slots=True)
class Place:
    """Element ``k`` (counted per dim from the box's start) lies at ``offset + sum(k[d] * strides[d])``."""

    buffer: Buffer
    offset: int
    strides: Index


@dataclass(frozen=True, slots=True)
class Fragment:
    """A non-empty box of the tensor and where its elements lie.

    Raises:
        LayoutError: the box is empty, or place and box differ in their number of dims.
    """

    box: Box
    place: Place

    def __post_init__(self) -> None:
        if self.box.numel == 0:
            raise LayoutError(f"a fragment cannot be empty: {self}")
        if len(self.place.strides) != self.box.ndim or self.place.offset < 0:
            raise LayoutError(f"a place needs one stride per dim and an offset >= 0: {self}")

    def place_at(self, index: Index) -> Place:
        """The place of the part of this fragment that begins at the global ``index``, which must lie inside it."""
        offset = self.place.offset
        for new, old, stride in zip(index, self.box.lo, self.place.strides, strict=True):
            offset += (new - old) * stride
        return Place(self.place.buffer, offset, self.place.strides)

    def __str__(self) -> str:
        return f"box {self.box} in buffer {self.place.buffer!r} at {self.place.offset}"


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Every fragment of one tensor of the given logical shape.

    Proved on construction: all boxes lie in the shape; two boxes are either equal (replicas, in different buffers)
    or disjoint; together they cover the tensor exactly.  Padding is not in the index space, so it cannot appear.

    Derived fields serve code that must not visit every fragment: ``holders`` are the replicas of each distinct box, in
    order of first appearance; ``starts`` and ``stops`` those boxes as arrays ``[boxes, max(ndim, 1)]``; ``held`` the
    numbers of the boxes that each buffer holds.

    Raises:
        LayoutError: names the box, its buffer, and what is missing or covered twice.
    """

    shape: Index
    fragments: tuple[Fragment, ...]
    holders: tuple[tuple[Fragment, ...], ...] = field(init=False, repr=False, compare=False)
    held: Mapping[Buffer, tuple[int, ...]] = field(init=False, repr=False, compare=False)
    starts: IntArray = field(init=False, repr=False, compare=False)
    stops: IntArray = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        replicas: defaultdict[Box, list[Fragment]] = defaultdict(list)
        for fragment in self.fragments:
            replicas[fragment.box].append(fragment)
        held: defaultdict[Buffer, list[int]] = defaultdict(list)
        for number, holders in enumerate(replicas.values()):
            for fragment in holders:
                held[fragment.place.buffer].append(number)
        starts, stops = _corners(self.shape, list(replicas))
        object.__setattr__(self, "holders", tuple(map(tuple, replicas.values())))
        object.__setattr__(self, "held", {buffer: tuple(numbers) for buffer, numbers in held.items()})
        object.__setattr__(self, "starts", starts)
        object.__setattr__(self, "stops", stops)
        object.__setattr__(self, "_hash", hash((self.shape, starts.tobytes(), stops.tobytes(), tuple(held))))
        _prove_tiling(self)

    def __hash__(self) -> int:
        return self._hash

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The buffers that hold anything."""
        return tuple(self.held)

    def digest(self) -> bytes:
        """16 bytes of shape and fragments: the same in every process, unlike a hash."""
        from hashlib import blake2b  # loads OpenSSL, which few programs need

        where = np.array([(f.place.offset, *f.place.strides) for f in self.fragments], np.int64)
        names = [(number, fragment.place.buffer) for number, box in enumerate(self.holders) for fragment in box]
        whole = blake2b(repr((self.shape, names)).encode(), digest_size=16)
        for array in (self.starts, self.stops, where):
            whole.update(array.tobytes())
        return whole.digest()


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a parameter and where its first element goes in a matrix with as many dims."""

    box: Box
    origin: Index


def stacked(boxes: Iterable[Box], dim: int) -> tuple[Piece, ...]:
    """Pieces that lay these boxes of a fused parameter one after the other along ``dim``, as one matrix."""
    pieces = []
    start = 0
    for box in boxes:
        pieces.append(Piece(box, tuple(start if d == dim else 0 for d in range(box.ndim))))
        start += box.shape[dim]
    return tuple(pieces)


@lru_cache(maxsize=65536)
def through(pieces: tuple[Piece, ...], layout: TensorLayout) -> TensorLayout:
    """The layout of the matrix that ``pieces`` of a parameter make, given the parameter's layout.  Cached by geometry.

    Raises:
        LayoutError: the pieces do not tile a matrix, or reach outside the parameter.
    """
    for piece in pieces:
        if piece.box not in Box.of(layout.shape):
            raise LayoutError(f"piece {piece.box} reaches outside the parameter of shape {layout.shape}")
    lo, hi = _corners(layout.shape, [piece.box for piece in pieces])
    fragments = []
    for i, j in zip(*overlaps(lo, hi, layout.starts, layout.stops), strict=True):
        piece = pieces[i]
        common = piece.box & layout.holders[j][0].box
        assert common is not None, "overlaps() returned a pair of disjoint boxes"
        moved = common.shift([new - old for new, old in zip(piece.origin, piece.box.lo, strict=True)])
        fragments += [Fragment(moved, fragment.place_at(common.lo)) for fragment in layout.holders[j]]
    ends = [piece.box.shift([o - lo for o, lo in zip(piece.origin, piece.box.lo, strict=True)]).hi for piece in pieces]
    return TensorLayout(tuple(map(max, zip(*ends, strict=True))), tuple(fragments))


def dense(box: Box, buffer: Buffer, offset: int = 0) -> Fragment:
    """A box stored contiguously, row-major, from ``offset`` of ``buffer``."""
    return Fragment(box, Place(buffer, offset, row_major(box.shape)))


def _corners(shape: Index, boxes: Sequence[Box]) -> tuple[IntArray, IntArray]:
    """Boxes as two read-only arrays ``[n, max(ndim, 1)]``; a 0-d tensor counts as one element of one dim."""
    for box in boxes:
        if box.ndim != len(shape):
            raise LayoutError(f"box {box} has {box.ndim} dims, the tensor of shape {shape} has {len(shape)}")
    width = max(len(shape), 1)
    lo = np.array([box.lo or (0,) for box in boxes], np.int64).reshape(-1, width)
    hi = np.array([box.hi or (1,) for box in boxes], np.int64).reshape(-1, width)
    lo.flags.writeable = hi.flags.writeable = False
    return lo, hi


def _prove_tiling(layout: TensorLayout) -> None:
    """Disjoint or equal boxes inside the shape whose volumes add up to the tensor's cover it exactly."""
    lo, hi = layout.starts, layout.stops
    outside = np.flatnonzero((hi > np.array(layout.shape or (1,))).any(axis=1))
    if len(outside):
        raise LayoutError(f"{layout.holders[outside[0]][0]} reaches outside the tensor of shape {layout.shape}")
    i, j = overlaps(lo, hi, lo, hi)
    twice = np.flatnonzero(i != j)
    if len(twice):
        one, other = (layout.holders[pair[twice[0]]][0] for pair in (i, j))
        raise LayoutError(f"{one} and {other} overlap in part; boxes must be equal (replicas) or disjoint")
    whole = Box.of(layout.shape)
    if int((hi - lo).prod(axis=1).sum()) != whole.numel:
        hole = next(holes_in(whole, [replicas[0].box for replicas in layout.holders]))
        holders = ", ".join(map(repr, layout.buffers[:8])) or "none"
        raise LayoutError(f"no buffer holds box {hole} of the tensor of shape {layout.shape} (buffers: {holders})")
    if any(len(set(numbers)) != len(numbers) for numbers in layout.held.values()):
        raise LayoutError("one buffer holds the same box twice; replicas must lie in different buffers")


def holes_in(whole: Box, boxes: Sequence[Box]) -> Iterator[Box]:
    """Boxes of ``whole`` that no box covers.  For errors and other rare cases: simple, not fast."""
    left = [whole]
    for taken in boxes:
        left = [part for box in left for part in _without(box, taken)]
    return iter(left)


def _without(box: Box, taken: Box) -> Iterable[Box]:
    common = box & taken
    if common is None:
        yield box
        return
    lo, hi = list(box.lo), list(box.hi)
    for d in range(box.ndim):
        for start, stop in ((lo[d], common.lo[d]), (common.hi[d], hi[d])):
            if start < stop:
                yield Box((*lo[:d], start, *lo[d + 1 :]), (*hi[:d], stop, *hi[d + 1 :]))
        lo[d], hi[d] = common.lo[d], common.hi[d]
