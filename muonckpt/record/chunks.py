"""Chunks: the stored boxes of tensors and the bytes in which they lie.

A checkpoint can have a million of them.  So they are kept as columns (:class:`Columns`), which tensors share, and boxes
once for all tensors that are cut alike (:class:`Boxes`); a :class:`Chunk` is made on request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from ..algebra.box import MAX_ELEMENTS, Box, Index
from ..algebra.layout import Buffer, Fragment, Place, TensorLayout, dense
from ..names.errors import LayoutError, SourceError
from .columns import UNKNOWN, Column, Columns, ColumnsBuilder, Row, check_name


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of bytes in one file of the checkpoint: a plain name, or several joined by slashes (folders).

    Raises:
        SourceError: the file is not inside the directory by such names, or the range is negative.
    """

    file: str
    offset: int
    length: int

    def __post_init__(self) -> None:
        check_name(self.file)
        if self.offset < 0 or self.length < 0 or self.offset + self.length > MAX_ELEMENTS:
            raise SourceError(f"refused byte range {self.offset}+{self.length} of {self.file!r}")

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class Chunk:
    """One stored box of a tensor.

    Attributes:
        item: the whole item as its store wrote it (for DCP a small zip archive).
        payload: the raw little-endian elements of ``box`` in it; None while the item has not been opened.
        digest: xxh3-128 of the payload in hex; None if unknown.
        crc32: the checksum that the item itself carries; None if unknown.
        strides: in the payload, in elements; None for row-major order, the only one that we write.
    """

    box: Box
    item: Extent
    payload: Extent | None = None
    digest: str | None = None
    crc32: int | None = None
    strides: Index | None = None

    def stored(self, buffer: Buffer) -> Fragment:
        """Return the fragment of the elements in the payload, which is called ``buffer``."""
        return dense(self.box, buffer) if self.strides is None else Fragment(self.box, Place(buffer, 0, self.strides))


@dataclass(frozen=True, slots=True, eq=False)
class Boxes(Sequence[Box]):
    """The boxes of a tensor's chunks, as arrays ``lo`` and ``hi`` of shape ``[boxes, ndim]``, in elements.

    Raises:
        LayoutError: a range is negative or reversed, or a box has too many elements.
    """

    lo: Column
    hi: Column
    numel: Column
    """The number of elements of each box."""
    elements: int
    """The number of elements of all."""
    _hash: int

    @classmethod
    def of(cls, lo: Column, hi: Column) -> Boxes:
        """Make boxes of their corners, which must not change afterwards."""
        if len(wrong := np.flatnonzero(((lo < 0) | (hi < lo) | (hi > MAX_ELEMENTS)).any(axis=1))):
            Box(tuple(lo[wrong[0]].tolist()), tuple(hi[wrong[0]].tolist()))  # raises
        if ((hi - lo).prod(axis=1, dtype=np.float64) > MAX_ELEMENTS).any():
            raise LayoutError(f"expected boxes of at most {MAX_ELEMENTS} elements, found more")
        numel = (hi - lo).prod(axis=1)
        return cls(lo, hi, numel, int(numel.sum()), hash((lo.shape, lo.tobytes(), hi.tobytes())))

    @classmethod
    def of_all(cls, boxes: Sequence[Box], ndim: int) -> Boxes:
        """Make arrays of boxes, which have this number of dims."""
        for box in boxes:
            if box.ndim != ndim:
                raise LayoutError(f"expected boxes of {ndim} dims, found {box}")
        corners = ([box.lo for box in boxes], [box.hi for box in boxes])
        return cls.of(*(np.array(corner, np.int64).reshape(len(boxes), ndim) for corner in corners))

    @property
    def ndim(self) -> int:
        return int(self.lo.shape[1])

    def select(self, numbers: NDArray[np.int64]) -> Boxes:
        """Return the boxes with these numbers."""
        return Boxes.of(self.lo[numbers], self.hi[numbers])

    def __reduce__(self) -> tuple[Any, ...]:
        return Boxes.of, (self.lo, self.hi)  # hashes of bytes are of one process

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Boxes):
            return NotImplemented
        return self.lo.shape == other.lo.shape and bool((self.lo == other.lo).all() and (self.hi == other.hi).all())

    def __len__(self) -> int:
        return len(self.lo)

    @overload
    def __getitem__(self, index: int) -> Box: ...
    @overload
    def __getitem__(self, index: slice) -> Boxes: ...
    def __getitem__(self, index: int | slice) -> Box | Boxes:
        if isinstance(index, slice):
            return self.select(np.arange(len(self))[index])
        return Box(tuple(self.lo[index].tolist()), tuple(self.hi[index].tolist()))

    def __iter__(self) -> Iterator[Box]:
        return iter(_as_objects(self))


@lru_cache(maxsize=64)
def _as_objects(boxes: Boxes) -> tuple[Box, ...]:
    """Return the boxes as objects.  Cached: tensors that are cut alike follow one another."""
    return tuple(Box(tuple(lo), tuple(hi)) for lo, hi in zip(boxes.lo.tolist(), boxes.hi.tolist(), strict=True))


Strides = tuple[Index | None, ...]
"""The strides of each chunk of a tensor, as `Chunk.strides`."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunks(Sequence[Chunk]):
    """The chunks of one tensor: rows from ``start`` on of columns, one for each box.

    ``strides`` is None if all chunks are row-major.
    """

    columns: Columns
    start: int
    boxes: Boxes
    strides: Strides | None = None

    @classmethod
    def of(cls, chunks: Iterable[Chunk], ndim: int) -> Chunks:
        """Put the chunks of a tensor with this number of dims on columns of their own.

        Raises:
            LayoutError: a box has another number of dims.
        """
        return in_columns([(tuple(chunks), ndim)])[0]

    @property
    def stop(self) -> int:
        return self.start + len(self.boxes)

    @property
    def rows(self) -> Iterator[Row]:
        return self.columns.rows(slice(self.start, self.stop))

    @property
    def place(self) -> tuple[int, int]:
        """A key that no other tensor's chunks have in this process, if there are any."""
        return id(self.columns), self.start

    def payload(self, number: int) -> Extent | None:
        """Return the extent of the elements of one chunk; None while it has not been opened."""
        row, columns = self.start + number, self.columns
        place = columns.payload_at(row)
        return None if place is None else Extent(columns.names[columns.file[row]], *place)

    def length_and_crc32(self, number: int) -> tuple[int, int]:
        """Return the bytes of the payload of one chunk, and its CRC-32; `UNKNOWN` for what is not recorded."""
        row = self.start + number
        return int(self.columns.payload_length(row)), int(self.columns.crc32[row])

    @property
    def items(self) -> tuple[list[str], list[int], list[int]]:
        """The items of the chunks: their files, and their offsets and lengths in bytes."""
        span, columns = slice(self.start, self.stop), self.columns
        files = map(columns.names.__getitem__, columns.file[span].tolist())
        return list(files), columns.item[span].tolist(), columns.item_length(span).tolist()

    def select(self, numbers: Sequence[int]) -> Chunks:
        """Return the chunks with these ascending numbers."""
        if len(numbers) == len(self):
            return self
        rows = np.array(numbers, np.int64)
        strides = self.strides and tuple(self.strides[number] for number in numbers)
        return Chunks(self.columns.select(self.start + rows), 0, self.boxes.select(rows), strides)

    def __len__(self) -> int:
        return len(self.boxes)

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> Chunks: ...
    def __getitem__(self, index: int | slice) -> Chunk | Chunks:
        if isinstance(index, slice):
            return self.select(range(len(self))[index])
        number = range(len(self))[index]
        (row,) = self.columns.rows(slice(self.start + number, self.start + number + 1))
        return _make_chunk(self.boxes[number], row, None if self.strides is None else self.strides[number])

    def __iter__(self) -> Iterator[Chunk]:
        return map(_make_chunk, self.boxes, self.rows, self.strides or [None] * len(self))

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Chunks) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))


def _make_chunk(box: Box, row: Row, strides: Index | None) -> Chunk:
    file, item, length, payload, payload_length, digest, crc32 = row
    return Chunk(
        box,
        Extent(file, item, length),
        None if payload == UNKNOWN else Extent(file, payload, payload_length),
        digest,
        None if crc32 == UNKNOWN else crc32,
        strides,
    )


def _make_row(chunk: Chunk) -> Row:
    payload = (UNKNOWN, UNKNOWN) if chunk.payload is None else (chunk.payload.offset, chunk.payload.length)
    crc32 = UNKNOWN if chunk.crc32 is None else chunk.crc32
    return (chunk.item.file, chunk.item.offset, chunk.item.length, *payload, chunk.digest, crc32)


def in_columns(tensors: Iterable[tuple[Sequence[Chunk], int]]) -> list[Chunks]:
    """Put the chunks of tensors, each with its number of dims, on columns that they share.

    Raises:
        LayoutError: a box has another number of dims.
    """
    distinct_boxes, rows = dict[Boxes, Boxes](), list[Row]()
    places: list[tuple[int, Boxes, Strides | None]] = []
    # Equal boxes become one value, by which layouts are cached.
    for chunks, ndim in tensors:
        boxes = Boxes.of_all([chunk.box for chunk in chunks], ndim)
        strides = tuple(chunk.strides for chunk in chunks)
        places.append((len(rows), distinct_boxes.setdefault(boxes, boxes), strides if {*strides} - {None} else None))
        rows += map(_make_row, chunks)
    columns = Columns.of(rows)
    return [Chunks(columns, *place) for place in places]


@lru_cache
def no_chunks(ndim: int) -> Chunks:
    """Return the chunks of a tensor that is stored nowhere yet: none."""
    return Chunks.of((), ndim)


def columns_of(tensors: Iterable[Chunks]) -> Columns:
    """Return the columns of the chunks of many tensors, one tensor after the other."""
    builder = ColumnsBuilder()
    run, start, stop = Columns.of(()), 0, 0  # adjacent rows, to be added at once
    for chunks in tensors:
        if chunks.columns is not run or chunks.start != stop:
            builder.add(run, start, stop)
            run, start = chunks.columns, chunks.start
        stop = chunks.stop
    if not builder.rows and stop - start == len(run):
        return run
    builder.add(run, start, stop)
    return builder.build()


def on_columns(tensors: Iterable[Chunks], columns: Columns) -> list[Chunks]:
    """Return chunks of the same boxes and strides whose bytes are in the given rows of columns, in this order."""
    moved, start = list[Chunks](), 0
    for chunks in tensors:
        moved.append(Chunks(columns, start, chunks.boxes, chunks.strides))
        start += len(chunks)
    return moved


def select_chunks(selections: Sequence[tuple[Chunks, tuple[int, ...]]]) -> list[Chunks]:
    """Select chunks of many tensors by their ascending numbers, and put them on columns that they share."""
    rows, start = [np.zeros(0, np.int64)], 0
    for chunks, numbers in selections:
        rows.append(start + np.array(numbers, np.int64))
        start += len(chunks)
    # One selection from the joined columns of all tensors.
    columns = columns_of(chunks for chunks, _ in selections).select(np.concatenate(rows))
    selected, start = [], 0
    for chunks, numbers in selections:
        strides = chunks.strides and tuple(chunks.strides[number] for number in numbers)
        selected.append(Chunks(columns, start, _select_boxes(chunks.boxes, numbers), strides))
        start += len(numbers)
    return selected


@lru_cache(maxsize=1024)
def _select_boxes(boxes: Boxes, numbers: tuple[int, ...]) -> Boxes:
    """Return the boxes with these numbers.  Cached: the tensors of a model have few geometries."""
    return boxes.select(np.array(numbers, np.int64))


@lru_cache(maxsize=1024)
def layout_in_boxes(shape: Index, boxes: Boxes, strides: Strides | None = None) -> TensorLayout:
    """Return the layout of a tensor in chunks with these boxes and strides: buffer 3 is the payload of chunk 3.

    Cached: the tensors of a model have few geometries.
    """
    fragments = []
    for number, (box, along) in enumerate(zip(boxes, strides or (None,) * len(boxes), strict=True)):
        if box.numel:
            fragments.append(dense(box, number) if along is None else Fragment(box, Place(number, 0, along)))
    return TensorLayout.of(shape, fragments)
