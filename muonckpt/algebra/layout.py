"""Layouts: the places of a tensor's elements.

A :class:`Fragment` maps one box of the tensor's global index space to an affine :class:`Place` in a buffer.  A
:class:`TensorLayout` is the fragments of one tensor, on every holder.  Rows, columns, replicas, flat-buffer cuts,
whole-matrix owners, padded buffers and file chunks are all of this one type.

All offsets, strides and sizes are in elements.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

from ..names.errors import LayoutError
from .box import MAX_ELEMENTS, Box, Index, row_major
from .overlap import IntArray, first_fault, overlaps, tile

Buffer = int | str
"""Names a buffer: the number of the rank that holds it, or any string."""


@dataclass(frozen=True, slots=True)
class Place:
    """Element ``k`` (counted per dim from the box's start) has the address ``offset + sum(k[d] * strides[d])``."""

    buffer: Buffer
    offset: int
    strides: Index


@dataclass(frozen=True, slots=True)
class Fragment:
    """A non-empty box of the tensor and the place of its elements.

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
        """Return the place of the part of this fragment that begins at the global ``index``, which lies inside it."""
        offset = self.place.offset
        for begin, lo, stride in zip(index, self.box.lo, self.place.strides, strict=True):
            offset += (begin - lo) * stride
        return Place(self.place.buffer, offset, self.place.strides)

    def __str__(self) -> str:
        return f"box {self.box} in buffer {self.place.buffer!r} at {self.place.offset}"


@dataclass(frozen=True, eq=False)
class TensorLayout:
    """Every fragment of one tensor of the given logical shape, as columns: thousands of ranks may hold parts of it.

    `of` makes one of fragments, `of_columns` of arrays; ``fragments`` and ``holders`` are made of the columns when they
    are first used, `fragments_of` and `boxes_of` for one buffer alone.

    Proved on construction: all boxes are inside the shape; two boxes are either equal (replicas, in different buffers)
    or disjoint; together they cover the tensor exactly.  Padding is not in the index space, so it cannot appear.

    Attributes:
        starts, stops: the corners of each distinct box, ``[boxes, max(ndim, 1)]``, in order of first appearance; a 0-d
            tensor counts as one element of one dim.
        buffers: those that hold anything, in order of first appearance.
        box, buffer: for each fragment the numbers of its box and of its buffer, ``[fragments]``.
        offset, strides: of each fragment's place, ``[fragments]`` and ``[fragments, ndim]``.

    Raises:
        LayoutError: names the box, its buffer, and the box that is missing or covered twice.
    """

    shape: Index
    starts: IntArray
    stops: IntArray
    buffers: tuple[Buffer, ...]
    box: IntArray
    buffer: IntArray
    offset: IntArray
    strides: IntArray

    @classmethod
    def of(cls, shape: Index, fragments: Iterable[Fragment]) -> TensorLayout:
        """Make the layout of fragments, in their order."""
        fragments = tuple(fragments)
        boxes: dict[Box, int] = {}
        buffers: dict[Buffer, int] = {}
        box = [boxes.setdefault(fragment.box, len(boxes)) for fragment in fragments]
        buffer = [buffers.setdefault(fragment.place.buffer, len(buffers)) for fragment in fragments]
        starts, stops = corners_of(shape, list(boxes))
        offset = [fragment.place.offset for fragment in fragments]
        strides = np.array([fragment.place.strides for fragment in fragments], np.int64)
        numbers, holders, offsets = (np.array(column, np.int64) for column in (box, buffer, offset))
        along = strides.reshape(len(fragments), len(shape))
        return cls(shape, starts, stops, tuple(buffers), numbers, holders, offsets, along)

    @classmethod
    def of_columns(
        cls,
        shape: Index,
        corners: tuple[IntArray, IntArray],
        buffers: tuple[Buffer, ...],
        buffer: IntArray,
        offset: IntArray,
        strides: IntArray,
    ) -> TensorLayout:
        """Make the layout of fragments that are rows of arrays; ``corners`` are those of each fragment's box."""
        rows = np.concatenate(corners, axis=1)
        boxes: dict[Hashable, int] = {}
        # Equal rows are equal bytes: boxes are numbered by them, in order of first appearance.
        keys = rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1]))).ravel().tolist()
        box = np.array([boxes.setdefault(key, len(boxes)) for key in keys], np.int64)
        first = np.flatnonzero(np.diff(np.maximum.accumulate(box), prepend=-1))
        lo, hi = (corner[first] for corner in corners)
        return cls(shape, lo, hi, buffers, box, buffer, offset, strides)

    def __post_init__(self) -> None:
        for array in self._arrays:
            array.flags.writeable = False
        _prove_rows(self)
        _prove_tiling(self)

    @property
    def _arrays(self) -> tuple[IntArray, ...]:
        return self.starts, self.stops, self.box, self.buffer, self.offset, self.strides

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, TensorLayout):
            return NotImplemented
        return (self.shape, self.buffers) == (other.shape, other.buffers) and all(
            map(np.array_equal, self._arrays, other._arrays)
        )

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.starts.tobytes(), self.stops.tobytes(), self.buffers))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def fragments(self) -> tuple[Fragment, ...]:
        """All fragments, in their first order."""
        return tuple(self._fragments(slice(None)))

    @cached_property
    def holders(self) -> tuple[tuple[Fragment, ...], ...]:
        """The replicas of each distinct box, in the order of ``starts``."""
        rows, first = self.by_box
        return tuple(
            tuple(self.fragments[row] for row in rows[begin:end].tolist()) for begin, end in pairwise(first.tolist())
        )

    @cached_property
    def by_box(self) -> tuple[IntArray, IntArray]:
        """The numbers of all fragments, box by box, and where each box's begin; the last entry is their count."""
        rows = np.argsort(self.box, kind="stable")
        return rows, np.searchsorted(self.box[rows], np.arange(len(self.starts) + 1))

    def find_fragments(self, box: IntArray, buffer: IntArray) -> tuple[IntArray, IntArray]:
        """Return a mask of the buffers (by number; -1 for none) that hold these boxes, and the fragments."""
        keys, fragments = self._by_holder
        wanted_keys = box * len(self.buffers) + buffer
        row = np.minimum(np.searchsorted(keys, wanted_keys), len(keys) - 1)
        return (buffer >= 0) & (keys[row] == wanted_keys), fragments[row]

    @cached_property
    def _by_holder(self) -> tuple[IntArray, IntArray]:
        """Keys of boxes and their buffers, ascending, and the fragments."""
        keys = self.box * len(self.buffers) + self.buffer
        fragments = np.argsort(keys)
        return keys[fragments], fragments

    def boxes_of(self, buffer: Buffer) -> IntArray:
        """Return the numbers of the boxes that a buffer holds, ascending; empty if it holds nothing."""
        return np.sort(self.box[self._rows_of(buffer)])

    def fragments_of(self, buffer: Buffer) -> tuple[Fragment, ...]:
        """Return the fragments in a buffer, in the order of all."""
        return tuple(self._fragments(self._rows_of(buffer)))

    def _rows_of(self, buffer: Buffer) -> IntArray:
        return np.flatnonzero(self.buffer == self.buffers.index(buffer)) if buffer in self.buffers else _NONE

    def _fragments(self, rows: IntArray | slice) -> Iterator[Fragment]:
        box, ndim = self.box[rows], len(self.shape)
        buffers = map(self.buffers.__getitem__, self.buffer[rows].tolist())
        corners = (map(tuple, corner[box, :ndim].tolist()) for corner in (self.starts, self.stops))
        strides = map(tuple, self.strides[rows].tolist())
        return map(Fragment, map(Box, *corners), map(Place, buffers, self.offset[rows].tolist(), strides))

    @property
    def total_numel(self) -> int:
        """Elements in all buffers together, replicas counted."""
        return int((self.stops - self.starts).prod(axis=1)[self.box].sum())

    def digest(self) -> bytes:
        """Return 16 bytes of shape and fragments, the same in every process, unlike a hash."""
        from hashlib import blake2b  # loads OpenSSL, which few programs need

        rows, _ = self.by_box
        buffers = map(self.buffers.__getitem__, self.buffer[rows].tolist())
        names = list(zip(self.box[rows].tolist(), buffers, strict=True))
        digest = blake2b(repr((self.shape, names)).encode(), digest_size=16)
        for array in (self.starts, self.stops, np.column_stack((self.offset, self.strides))):
            digest.update(array.tobytes())
        return digest.digest()


_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a parameter and the place of its first element in a matrix with as many dims."""

    box: Box
    origin: Index


def stacked(boxes: Iterable[Box], dim: int) -> tuple[Piece, ...]:
    """Return pieces that lay boxes of a fused parameter one after the other along ``dim``, as one matrix."""
    pieces = []
    start = 0
    for box in boxes:
        pieces.append(Piece(box, tuple(start if d == dim else 0 for d in range(box.ndim))))
        start += box.shape[dim]
    return tuple(pieces)


@lru_cache(maxsize=65536)
def through(pieces: tuple[Piece, ...], layout: TensorLayout) -> TensorLayout:
    """Return the layout of the matrix that ``pieces`` of a parameter make, from the parameter's layout.

    Cached by geometry.

    Raises:
        LayoutError: the pieces do not tile a matrix, or reach outside the parameter.
    """
    for piece in pieces:
        if piece.box not in Box.of(layout.shape):
            raise LayoutError(f"piece {piece.box} reaches outside the parameter of shape {layout.shape}")
    lo, hi = corners_of(layout.shape, [piece.box for piece in pieces])
    # The part of each fragment in each piece moves to the piece's origin in the matrix.
    fragments = []
    for i, j in zip(*overlaps(lo, hi, layout.starts, layout.stops), strict=True):
        piece = pieces[i]
        common = piece.box & layout.holders[j][0].box
        assert common is not None, "overlaps() returned a pair of disjoint boxes"
        box = common.shift(_shift(piece))
        fragments += [Fragment(box, fragment.place_at(common.lo)) for fragment in layout.holders[j]]
    ends = [piece.box.shift(_shift(piece)).hi for piece in pieces]
    return TensorLayout.of(tuple(map(max, zip(*ends, strict=True))), fragments)


def _shift(piece: Piece) -> list[int]:
    return [origin - lo for origin, lo in zip(piece.origin, piece.box.lo, strict=True)]


def dense(box: Box, buffer: Buffer, offset: int = 0) -> Fragment:
    """Return the fragment of a box stored contiguously, row-major, from ``offset`` of ``buffer``."""
    return Fragment(box, Place(buffer, offset, row_major(box.shape)))


def corners_of(shape: Index, boxes: Sequence[Box]) -> tuple[IntArray, IntArray]:
    """Return boxes as two read-only arrays ``[n, max(ndim, 1)]``; a 0-d tensor counts as one element of one dim."""
    for box in boxes:
        if box.ndim != len(shape):
            raise LayoutError(f"box {box} has {box.ndim} dims, the tensor of shape {shape} has {len(shape)}")
    width = max(len(shape), 1)
    lo = np.array([box.lo or (0,) for box in boxes], np.int64).reshape(-1, width)
    hi = np.array([box.hi or (1,) for box in boxes], np.int64).reshape(-1, width)
    lo.flags.writeable = hi.flags.writeable = False
    return lo, hi


def _prove_rows(layout: TensorLayout) -> None:
    """Prove that boxes and buffers are numbered in order of first appearance, and no place is before its buffer."""
    for numbers, count in ((layout.box, len(layout.starts)), (layout.buffer, len(layout.buffers))):
        highest = np.maximum.accumulate(np.append(-1, numbers))
        if numbers.min(initial=0) < 0 or np.diff(highest).max(initial=0) > 1 or highest[-1] + 1 != count:
            raise LayoutError(f"{count} boxes or buffers, numbered {numbers}: not in order of first appearance")
    if len(layout.strides) != len(layout.box) or layout.strides.shape[1] != len(layout.shape):
        raise LayoutError(f"strides of shape {layout.strides.shape}: a place needs one stride per dim")
    if layout.offset.min(initial=0) < 0 or (layout.stops <= layout.starts).any():
        raise LayoutError(f"a fragment of a tensor of shape {layout.shape} is empty, or begins before its buffer")


def _prove_tiling(layout: TensorLayout) -> None:
    """Prove that boxes are disjoint and cover the shape: they are inside it, and hold each element exactly once."""
    lo, hi, shape = layout.starts, layout.stops, np.array(layout.shape or (1,))
    outside = np.flatnonzero((hi > shape).any(axis=1))
    if len(outside):
        raise LayoutError(f"{_replica(layout, outside[0])} reaches outside the tensor of shape {layout.shape}")
    if Box.of(layout.shape).numel > MAX_ELEMENTS:
        raise LayoutError(f"a tensor of shape {layout.shape} has more than {MAX_ELEMENTS} elements")
    if not tile(shape, lo, hi):
        start, stop, overlapping = first_fault(shape, lo, hi)
        if len(overlapping):
            a, b = (_replica(layout, box) for box in overlapping)
            raise LayoutError(f"{a} and {b} overlap in part; boxes must be equal (replicas) or disjoint")
        hole = Box(*(tuple(corner[: len(layout.shape)].tolist()) for corner in (start, stop)))
        holders = ", ".join(map(repr, layout.buffers[:8])) or "none"
        raise LayoutError(f"no buffer holds box {hole} of the tensor of shape {layout.shape} (buffers: {holders})")
    pairs = np.sort(layout.box * len(layout.buffers) + layout.buffer)  # np.unique would import masked arrays
    if (pairs[1:] == pairs[:-1]).any():
        raise LayoutError("one buffer holds the same box twice; replicas must be in different buffers")


def _replica(layout: TensorLayout, box: int) -> Fragment:
    """Return the first fragment of a box, without making the others, which may be a million."""
    return next(layout._fragments(np.flatnonzero(layout.box == box)[:1]))


def holes_in(whole: Box, boxes: Iterable[Box], limit: int | None = None) -> list[Box]:
    """Return the parts of a box that no box covers, by their first indices.

    Args:
        limit: stop as soon as there are more parts, and return them, though later boxes may cover some: for boxes that
            may lie as an enemy wishes.
    """
    lo, hi = (np.array([corner], np.int64).reshape(1, -1) for corner in (whole.lo, whole.hi))
    for box in boxes:
        first, last = np.maximum(lo, box.lo), np.minimum(hi, box.hi)
        cut = (first < last).all(axis=1)
        if not cut.any():
            continue
        parts = [(lo[~cut], hi[~cut])]
        begin, end, first, last = lo[cut], hi[cut], first[cut], last[cut]
        for d in range(whole.ndim):  # the boxes below and above it, within the covered range of the dims before
            for start, stop in ((begin[:, d], first[:, d]), (last[:, d], end[:, d])):
                is_part = start < stop
                part_lo, part_hi = begin[is_part], end[is_part]
                part_lo[:, d], part_hi[:, d] = start[is_part], stop[is_part]
                parts.append((part_lo, part_hi))
            begin[:, d], end[:, d] = first[:, d], last[:, d]
        lo, hi = map(np.concatenate, zip(*parts, strict=True))
        if limit is not None and len(lo) > limit:
            break
    return [Box(tuple(a), tuple(b)) for a, b in sorted(zip(lo.tolist(), hi.tolist(), strict=True))]
