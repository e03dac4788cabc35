"""Chunks: the stored boxes of tensors and the bytes in which they lie.

A checkpoint can have a million of them.  So the chunks of a manifest are kept as columns (:class:`Columns`), which
tensors share, and boxes once for all tensors that are cut alike (:class:`Boxes`); a :class:`Chunk` is made when it is
asked for.  :class:`Chunks` are those of one tensor, :func:`columns_of` those of many, for code that must not visit
each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, overload

import numpy as np

from .box import MOST_ELEMENTS, Box, Index
from .columns import UNKNOWN, Column, Columns, ColumnsBuilder, Row, check_name
from .errors import LayoutError, SourceError
from .layout import Buffer, Fragment, Place, TensorLayout, dense


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
        if self.offset < 0 or self.length < 0 or self.offset + self.length > MOST_ELEMENTS:
            raise SourceError(f"refused byte range {self.offset}+{self.length} of {self.file!r}")

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class Chunk:
    """One stored box of a tensor.

    ``item`` is the whole item as its store wrote it (for DCP a small zip archive); ``payload`` the raw
    little-endian elements of ``box`` inside it, None while the item has not been opened.  ``digest`` is
    the xxh3-128 of the payload in hex, ``crc32`` the checksum that the item itself carries; None where unknown.
    ``strides`` are those of the elements in the payload, in elements; None for row-major order.  We write row-major
    order only, so manifests do not record strides.
    """

    box: Box
    item: Extent
    payload: Extent | None = None
    digest: str | None = None
    crc32: int | None = None
    strides: Index | None = None

    def stored(self, buffer: Buffer) -> Fragment:
        """The fragment of the elements in the payload, which is called ``buffer``."""
        return _stored(self.box, self.strides, buffer)


@dataclass(frozen=True, slots=True, eq=False)
class Boxes(Sequence[Box]):
    """The boxes of a tensor's chunks, as arrays ``lo`` and ``hi`` of shape ``[boxes, ndim]``, in elements.

    Raises:
        LayoutError: a range is negative or reversed.
    """

    lo: Column
    hi: Column
    numel: Column
    """The number of elements of each box."""
    _hash: int

    @classmethod
    def of(cls, lo: Column, hi: Column) -> Boxes:
        """The boxes with these corners, which nobody may change afterwards."""
        if len(wrong := np.flatnonzero(((lo < 0) | (hi < lo) | (hi > MOST_ELEMENTS)).any(axis=1))):
            Box(tuple(lo[wrong[0]].tolist()), tuple(hi[wrong[0]].tolist()))  # says what is wrong
        if ((hi - lo).prod(axis=1, dtype=np.float64) > MOST_ELEMENTS).any():
            raise LayoutError(f"expected boxes of at most {MOST_ELEMENTS} elements, found more")
        return cls(lo, hi, (hi - lo).prod(axis=1), hash((lo.shape, lo.tobytes(), hi.tobytes())))

    @classmethod
    def of_all(cls, boxes: Sequence[Box], ndim: int) -> Boxes:
        """These boxes as arrays."""
        corners = (
            np.array([corner(box) for box in boxes], np.int64).reshape(len(boxes), ndim) for corner in (_lo, _hi)
        )
        return cls.of(*corners)

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
    def __getitem__(self, index: slice) -> tuple[Box, ...]: ...
    def __getitem__(self, index: int | slice) -> Box | tuple[Box, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        return Box(tuple(self.lo[index].tolist()), tuple(self.hi[index].tolist()))

    def __iter__(self) -> Iterator[Box]:
        return iter(_made(self))


@lru_cache(maxsize=64)
def _made(boxes: Boxes) -> tuple[Box, ...]:
    """The boxes as objects.  Cached: tensors that are cut alike follow one another."""
    return tuple(Box(tuple(lo), tuple(hi)) for lo, hi in zip(boxes.lo.tolist(), boxes.hi.tolist(), strict=True))


def _lo(box: Box) -> Index:
    return box.lo


def _hi(box: Box) -> Index:
    return box.hi


@dataclass(frozen=True, slots=True, eq=False)
class Chunks(Sequence[Chunk]):
    """The chunks of one tensor: rows from ``start`` on of columns, one for each box."""

    columns: Columns
    start: int
    boxes: Boxes

    def __len__(self) -> int:
        return len(self.boxes)

    @property
    def stop(self) -> int:
        return self.start + len(self.boxes)

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Chunk, ...]: ...
    def __getitem__(self, index: int | slice) -> Chunk | tuple[Chunk, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        row = self.start + range(len(self))[index]
        return next(_chunk(self.boxes[index], fields) for fields in self.columns.rows(row, row + 1))

    def __iter__(self) -> Iterator[Chunk]:
        return map(_chunk, self.boxes, self.columns.rows(self.start, self.stop))

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Chunks | tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))


def _chunk(box: Box, row: Row) -> Chunk:
    file, item, length, payload, payload_length, digest, crc32 = row
    return Chunk(
        box,
        Extent(file, item, length),
        None if payload == UNKNOWN else Extent(file, payload, payload_length),
        digest,
        None if crc32 == UNKNOWN else crc32,
    )


def row_of(chunk: Chunk) -> Row:
    """The row of a chunk."""
    payload = (UNKNOWN, UNKNOWN) if chunk.payload is None else (chunk.payload.offset, chunk.payload.length)
    crc32 = UNKNOWN if chunk.crc32 is None else chunk.crc32
    return (chunk.item.file, chunk.item.offset, chunk.item.length, *payload, chunk.digest, crc32)


def stored_rows(chunks: Sequence[Chunk]) -> Iterable[Row]:
    """The rows of the chunks of a tensor."""
    if isinstance(chunks, Chunks):
        return chunks.columns.rows(chunks.start, chunks.stop)
    return map(row_of, chunks)


def rows_numbered(every: Sequence[Sequence[Chunk]], number: int) -> list[Row]:
    """The row of the chunk with this number of each of these tensors."""
    columns = every[0].columns if every and isinstance(every[0], Chunks) else None
    starts = [own.start for own in every if isinstance(own, Chunks) and own.columns is columns and number < len(own)]
    if columns is None or len(starts) < len(every):
        return [row_of(own[number]) for own in every]
    return list(columns.rows_at([start + number for start in starts]))


def stored_items(chunks: Sequence[Chunk]) -> tuple[list[str], list[int], list[int]]:
    """The items of the chunks of a tensor: their files, and their offsets and lengths in bytes."""
    if isinstance(chunks, Chunks):
        span, columns = slice(chunks.start, chunks.stop), chunks.columns
        files = map(columns.names.__getitem__, columns.file[span].tolist())
        return list(files), columns.item[span].tolist(), columns.item_length[span].tolist()
    items = [chunk.item for chunk in chunks]
    return [item.file for item in items], [item.offset for item in items], [item.length for item in items]


def boxes_of(chunks: Sequence[Chunk], shape: Index) -> Boxes:
    """The boxes of the chunks of a tensor of this shape.

    Raises:
        LayoutError: a box has another number of dims.
    """
    if isinstance(chunks, Chunks):
        return chunks.boxes
    for chunk in chunks:
        if chunk.box.ndim != len(shape):
            raise LayoutError(
                f"box {chunk.box} has {chunk.box.ndim} dims, the tensor of shape {shape} has {len(shape)}"
            )
    return Boxes.of_all([chunk.box for chunk in chunks], len(shape))


def strides_of(chunks: Sequence[Chunk]) -> tuple[Index | None, ...] | None:
    """The strides of each chunk, or None if all are row-major."""
    if isinstance(chunks, Chunks):
        return None
    strides = tuple(chunk.strides for chunk in chunks)
    return strides if any(own is not None for own in strides) else None


def columns_of(every: Sequence[Sequence[Chunk]]) -> Columns:
    """The columns of the chunks of many tensors, one tensor after the other."""
    builder = ColumnsBuilder()
    run: Columns | None = None  # columns of which rows from `start` to `stop` come next
    start = stop = 0
    for chunks in every:
        if isinstance(chunks, Chunks) and chunks.columns is run and chunks.start == stop:
            stop = chunks.stop
            continue
        if run is not None:
            builder.add_rows(run, start, stop)
            run = None
        if isinstance(chunks, Chunks):
            run, start, stop = chunks.columns, chunks.start, chunks.stop
            continue
        builder.add(
            [chunk.item.file for chunk in chunks],
            [(chunk.item.offset, chunk.item.length) for chunk in chunks],
            [(c.payload.offset, c.payload.length) if c.payload else (UNKNOWN, UNKNOWN) for c in chunks],
            [UNKNOWN if chunk.crc32 is None else chunk.crc32 for chunk in chunks],
            [None if chunk.digest is None else bytes.fromhex(chunk.digest) for chunk in chunks],
        )
    if run is not None and not builder.rows and stop - start == len(run):
        return run
    if run is not None:
        builder.add_rows(run, start, stop)
    return builder.finished()


def in_columns(every: Sequence[tuple[Sequence[Chunk], Index]]) -> list[Chunks]:
    """The row-major chunks of tensors of these shapes, as columns that they share.

    Raises:
        LayoutError: a box has another number of dims than the shape.
    """
    columns, known, start = columns_of([chunks for chunks, _ in every]), dict[Boxes, Boxes](), 0
    made = []
    for chunks, shape in every:
        boxes = boxes_of(chunks, shape)
        made.append(Chunks(columns, start, known.setdefault(boxes, boxes)))
        start += len(boxes)
    return made


@lru_cache(maxsize=1024)
def layout_in_boxes(shape: Index, boxes: Boxes, strides: tuple[Index | None, ...] | None = None) -> TensorLayout:
    """The layout of a tensor in chunks with these boxes: buffer ``"3"`` is the payload of chunk 3.

    Cached: the tensors of a model have few geometries.

    Args:
        strides: those of each chunk; None if all are row-major.
    """
    each = strides or (None,) * len(boxes)
    fragments = (_stored(box, own, str(i)) for i, (box, own) in enumerate(zip(boxes, each, strict=True)) if box.numel)
    return TensorLayout(shape, tuple(fragments))


def _stored(box: Box, strides: Index | None, buffer: Buffer) -> Fragment:
    return dense(box, buffer) if strides is None else Fragment(box, Place(buffer, 0, strides))
