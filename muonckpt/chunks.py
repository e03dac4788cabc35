"""Chunks: the stored boxes of tensors and the bytes in which they lie.

A checkpoint can have a million of them.  So the chunks of a manifest are kept as columns (:class:`Columns`), which
tensors share, and boxes once for all tensors that are cut alike (:class:`Boxes`); a :class:`Chunk` is made when it is
asked for.  :class:`Chunks` are those of one tensor, :func:`columns_of` those of many, for code that must not visit
each of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import overload

import numpy as np
from numpy.typing import NDArray

from .box import MOST_ELEMENTS, Box, Index
from .errors import LayoutError, SourceError
from .layout import Buffer, Fragment, Place, TensorLayout, dense

_COMPONENT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")

UNKNOWN = -1
"""Stands in a column for what is not known."""

Column = NDArray[np.int64]

Row = tuple[str, int, int, int, int, str | None, int]
"""File, offset and length of the item, of the payload, digest in hex, and CRC-32 of a chunk."""


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
        _check_name(self.file)
        if self.offset < 0 or self.length < 0 or self.offset + self.length > MOST_ELEMENTS:
            raise SourceError(f"refused byte range {self.offset}+{self.length} of {self.file!r}")

    @property
    def end(self) -> int:
        return self.offset + self.length


@lru_cache(maxsize=4096)
def _check_name(file: str) -> None:
    """Check that a name stays inside a directory.

    Raises:
        SourceError: it does not.
    """
    # DCP's own names begin with underscores; a leading dot, a slash or anything exotic never does.
    if not all(map(_COMPONENT.fullmatch, file.split("/"))):
        raise SourceError(f"refused file name {file!r:.300}: expected plain names inside the checkpoint")


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


@dataclass(frozen=True, slots=True)
class Columns:
    """The bytes of many chunks, one row each; a row with `UNKNOWN` has no payload, digest or CRC-32.

    Attributes:
        names: the names of files.
        file: which of the names.
        item, item_length, payload, payload_length: of the extents, in bytes.
        digest: xxh3-128 as 16 bytes, ``[chunks, 16]``.
        has_digest: whether there is one.
        crc32: CRC-32.
    """

    names: tuple[str, ...]
    file: NDArray[np.int32]
    item: Column
    item_length: Column
    payload: Column
    payload_length: Column
    digest: NDArray[np.uint8]
    has_digest: NDArray[np.bool_]
    crc32: Column

    def __len__(self) -> int:
        return len(self.file)

    def rows(self, start: int, stop: int) -> Iterator[Row]:
        """The rows from ``start`` to ``stop``."""
        span = slice(start, stop)
        digests = self.digest[span].tobytes().hex()
        return zip(
            map(self.names.__getitem__, self.file[span].tolist()),
            self.item[span].tolist(),
            self.item_length[span].tolist(),
            self.payload[span].tolist(),
            self.payload_length[span].tolist(),
            (
                digests[32 * number : 32 * number + 32] if known else None
                for number, known in enumerate(self.has_digest[span].tolist())
            ),
            self.crc32[span].tolist(),
            strict=True,
        )


class ColumnsBuilder:
    """Collects rows for `Columns`.  Values are not checked here, but for the names of files."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._blocks: list[tuple[NDArray[np.int32], Column, NDArray[np.uint8], NDArray[np.bool_]]] = []
        self._files: list[int] = []
        self._numbers: list[int] = []
        self._digests: list[bytes] = []
        self._known: list[bool] = []
        self.rows = 0

    def add(
        self,
        files: Sequence[str],
        items: Iterable[Sequence[int]],
        payloads: Iterable[Sequence[int]],
        crc32s: Iterable[int],
        digests: Iterable[bytes | None],
    ) -> None:
        """Add rows; `UNKNOWN` stands for a payload, twice, and a CRC-32 that are not known.

        Raises:
            SourceError: the name of a file is refused.
        """
        for name in files:
            if name not in self._names:
                _check_name(name)
                self._names[name] = len(self._names)
        self._files += [self._names[name] for name in files]
        self._numbers += chain.from_iterable(
            (*item, *payload, crc32) for item, payload, crc32 in zip(items, payloads, crc32s, strict=True)
        )
        listed = list(digests)
        self._digests += [digest or bytes(16) for digest in listed]
        self._known += [digest is not None for digest in listed]
        self.rows += len(files)
        if len(self._files) >= 1 << 14:
            self._pack()

    def _pack(self) -> None:
        numbers = np.array(self._numbers, np.int64).reshape(-1, 5)
        digests = np.frombuffer(b"".join(self._digests), np.uint8).reshape(-1, 16)
        self._blocks.append((np.array(self._files, np.int32), numbers, digests, np.array(self._known, np.bool_)))
        self._files, self._numbers, self._digests, self._known = [], [], [], []

    def finished(self) -> Columns:
        """All rows, in the order in which they were added."""
        self._pack()
        file, numbers, digest, known = (np.concatenate(column) for column in zip(*self._blocks, strict=True))
        self._blocks = []
        item, item_length, payload, payload_length, crc32 = np.ascontiguousarray(numbers.T)
        return Columns(tuple(self._names), file, item, item_length, payload, payload_length, digest, known, crc32)


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
    whole = every[0].columns if every and isinstance(every[0], Chunks) else None
    if whole is not None and _are_all_of(every, whole):
        return whole
    builder = ColumnsBuilder()
    for chunks in every:
        builder.add(
            [chunk.item.file for chunk in chunks],
            [(chunk.item.offset, chunk.item.length) for chunk in chunks],
            [(c.payload.offset, c.payload.length) if c.payload else (UNKNOWN, UNKNOWN) for c in chunks],
            [UNKNOWN if chunk.crc32 is None else chunk.crc32 for chunk in chunks],
            [None if chunk.digest is None else bytes.fromhex(chunk.digest) for chunk in chunks],
        )
    return builder.finished()


def _are_all_of(every: Sequence[Sequence[Chunk]], columns: Columns) -> bool:
    """Whether these are all rows of some columns, in order."""
    row = 0
    for chunks in every:
        if not isinstance(chunks, Chunks) or chunks.columns is not columns or chunks.start != row:
            return False
        row += len(chunks)
    return row == len(columns)


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
