"""Columns: where the bytes of many chunks lie, an array for each kind of fact instead of an object for each chunk."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..algebra.box import MAX_ELEMENTS
from ..names.errors import SourceError

_COMPONENT = re.compile(r"[^./\\][^/\\]{0,254}")

UNKNOWN = -1
"""The value of an unknown number in a column."""

Column = NDArray[np.int64]

_T = TypeVar("_T")

Rows = slice | Column | int
"""A selection of rows of a column."""

_ALL = slice(None)

Row = tuple[str, int, int, int, int, str | None, int]
"""File, offset and length of the item, of the payload, digest in hex, and CRC-32 of a chunk."""


@lru_cache(maxsize=4096)
def check_name(file: str) -> None:
    """Raise `SourceError` unless the name of a file stays inside its directory."""
    # People's names have spaces and signs (epoch=3-step=100.ckpt); what a terminal would obey is not printable.
    if not (file.isprintable() and all(map(_COMPONENT.fullmatch, file.split("/")))):
        raise SourceError(f"refused file name {file!r:.300}: expected plain names inside the checkpoint")


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The bytes of many chunks, one row each; a row with `UNKNOWN` has no payload, digest or CRC-32.

    Chunks of one dtype and shape have as many bytes around their elements: these lengths are kept once, as a frame.

    Attributes:
        names: the names of files.
        file: the index of the file's name.
        item: the offset of the item, in bytes.
        frame: the index of the frame.
        frames: in bytes, the length of the item, the offset of the payload in it, and the length of the payload,
            ``[frames, 3]``.
        digest: xxh3-128 as 16 bytes, ``[chunks, 16]``.

    Raises:
        SourceError: a range of bytes ends too far away.
    """

    names: tuple[str, ...]
    file: NDArray[np.int32]
    item: Column
    frame: NDArray[np.int32]
    frames: NDArray[np.int64]
    digest: NDArray[np.uint8]
    has_digest: NDArray[np.bool_]
    crc32: Column

    def __post_init__(self) -> None:
        assert {*map(len, self.arrays)} == {len(self.file)}, "a row has a value in each column"
        if not len(self) or int(self.item.max()) + 2 * int(np.abs(self.frames).max()) <= MAX_ELEMENTS:
            return  # and no column had to be made for that
        for offset, length in ((self.item, self.item_length()), (self.payload(), self.payload_length())):
            if len(too_far := np.flatnonzero(offset + length > MAX_ELEMENTS)):
                raise SourceError(f"refused byte range {offset[too_far[0]]}+{length[too_far[0]]}")

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Columns:
        """Make columns of rows.

        Raises:
            SourceError: the name of a file is refused, or a range of bytes ends too far away.
        """
        files, *numbers, digests, crc32 = zip(*rows, strict=True) if (rows := list(rows)) else ((),) * 7
        names: dict[str, int] = {}
        file = _number(names, files)
        for name in names:
            check_name(name)
        # Numbers are stored as they are, digests as bytes.
        item, item_length, payload, payload_length, sums = (np.array(c, np.int64) for c in (*numbers, crc32))
        extents = item, item_length, payload, payload_length
        return cls.of_extents(tuple(names), file, *extents, *digest_rows(digests), sums)

    @classmethod
    def of_extents(
        cls,
        names: tuple[str, ...],
        file: NDArray[np.int32],
        item: Column,
        item_length: Column,
        payload: Column,
        payload_length: Column,
        digest: NDArray[np.uint8],
        has_digest: NDArray[np.bool_],
        crc32: Column,
    ) -> Columns:
        """Make the columns of chunks with these extents; both numbers of an unknown payload are `UNKNOWN`.

        Raises:
            SourceError: a range of bytes ends too far away.
        """
        inside = np.where(payload_length == UNKNOWN, 0, payload - item)
        lengths = np.stack([item_length, inside, payload_length], axis=1)
        # Equal frames come in runs: only the first of a run is sorted.
        heads = np.flatnonzero(np.append(True, (lengths[1:] != lengths[:-1]).any(axis=1))[: len(lengths)])
        frames, number = np.unique(lengths[heads], axis=0, return_inverse=True)
        runs = np.diff(np.append(heads, len(lengths)))
        frame: NDArray[np.int32] = np.repeat(number.reshape(-1).astype(np.int32), runs)
        return cls(names, file, item, frame, frames, digest, has_digest, crc32)

    def __len__(self) -> int:
        return len(self.file)

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        return (self.file, self.item, self.frame, self.digest, self.has_digest, self.crc32)

    def item_length(self, rows: Rows = _ALL) -> Column:
        """Return the lengths of items, of all rows or of the given ones, in bytes."""
        return self._frame_field(0, rows)

    def item_end(self) -> Column:
        """Return the offsets after items, in bytes."""
        return self.item + self.item_length()

    def payload(self, rows: Rows = _ALL) -> Column:
        """Return the offsets of payloads, in bytes; `UNKNOWN` where there is none."""
        return np.where(self.payload_length(rows) == UNKNOWN, UNKNOWN, self.item[rows] + self._frame_field(1, rows))

    def payload_length(self, rows: Rows = _ALL) -> Column:
        """Return the lengths of payloads, in bytes; `UNKNOWN` where there is none."""
        return self._frame_field(2, rows)

    def payload_at(self, row: int) -> tuple[int, int] | None:
        """Return the offset and the length of the payload of one row, in bytes; None where there is none."""
        _, inside, length = self.frames[self.frame[row]].tolist()
        return None if length == UNKNOWN else (int(self.item[row]) + inside, length)

    def _frame_field(self, field: int, rows: Rows) -> Column:
        return np.asarray(self.frames[self.frame[rows], field])

    def select(self, rows: slice | Column) -> Columns:
        """Return some rows."""
        file, item, frame, *checksums = (column[rows] for column in self.arrays)
        return Columns(self.names, file, item, frame, self.frames, *checksums)

    def files(self) -> frozenset[str]:
        """Return the names of the files in which rows lie."""
        numbers = np.flatnonzero(np.bincount(self.file))  # np.unique would import masked arrays
        return frozenset(self.names[number] for number in numbers.tolist())

    def is_in(self, files: Collection[str]) -> NDArray[np.bool_]:
        """Return a mask of the rows that are in the given files."""
        return np.isin(self.file, [number for number, name in enumerate(self.names) if name in files])

    def renamed(self, name_of: Callable[[str], str]) -> Columns:
        """Return the same rows in files of other names.

        Raises:
            SourceError: a name is refused.
        """
        names = tuple(map(name_of, self.names))
        for name in names:
            check_name(name)
        return replace(self, names=names)

    def rows(self, rows: slice | Column) -> Iterator[Row]:
        """Return some rows as tuples."""
        return zip(
            map(self.names.__getitem__, self.file[rows].tolist()),
            self.item[rows].tolist(),
            self.item_length(rows).tolist(),
            self.payload(rows).tolist(),
            self.payload_length(rows).tolist(),
            self.digests(rows),
            self.crc32[rows].tolist(),
            strict=True,
        )

    def digests(self, rows: slice | Column) -> list[str | None]:
        """Return the digests of some rows in hex; None where there is none."""
        text = self.digest[rows].tobytes().hex()
        pairs = enumerate(self.has_digest[rows].tolist())
        return [text[32 * number : 32 * number + 32] if has_digest else None for number, has_digest in pairs]


def digest_rows(digests: Sequence[str | None]) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Return digests in hex as rows of 16 bytes, and whether there is one."""
    has_digest = np.array([digest is not None for digest in digests], np.bool_)
    raw = bytes.fromhex("".join([digest or _NO_DIGEST for digest in digests]))
    return np.frombuffer(raw, np.uint8).reshape(-1, 16), has_digest


_NO_DIGEST = "0" * 32


class ColumnsBuilder:
    """Joins the rows of several columns, whose names of files and whose frames may differ.

    Columns grow where they are: blocks that are joined at the end would be in memory twice.
    """

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._files_of: dict[tuple[str, ...], NDArray[np.int32]] = {}
        self._frames: dict[tuple[int, ...], int] = {}
        self._frames_of: dict[int, tuple[NDArray[np.int64], NDArray[np.int32]]] = {}  # by the array's id, and the array
        self._bytes = [bytearray() for _ in _NO_ROWS.arrays]
        self.rows = 0

    def add(self, columns: Columns, start: int, stop: int) -> None:
        """Add the rows from ``start`` to ``stop``."""
        # Numbers of files and frames are translated once for each source of rows.
        if columns.names not in self._files_of:
            self._files_of[columns.names] = _number(self._files, columns.names)
        if id(columns.frames) not in self._frames_of:
            numbers = _number(self._frames, map(tuple, columns.frames.tolist()))
            self._frames_of[id(columns.frames)] = columns.frames, numbers
        file, item, frame, *checksums = (column[start:stop] for column in columns.arrays)
        file, frame = self._files_of[columns.names][file], self._frames_of[id(columns.frames)][1][frame]
        # Columns grow as bytes.
        for buffer, column in zip(self._bytes, (file, item, frame, *checksums), strict=True):
            buffer += np.ascontiguousarray(column).data.cast("B") if column.size else b""
        self.rows += stop - start

    def build(self) -> Columns:
        """Return all rows, in the order in which they were added."""
        pairs = zip(self._bytes, _NO_ROWS.arrays, strict=True)
        file, item, frame, *checksums = (
            np.frombuffer(buffer, empty.dtype).reshape(-1, *empty.shape[1:]) for buffer, empty in pairs
        )
        frames = np.array(list(self._frames), np.int64).reshape(-1, 3)
        return Columns(tuple(self._files), file, item, frame, frames, *checksums)


def _number(numbers: dict[_T, int], values: Iterable[_T]) -> NDArray[np.int32]:
    """Return the number of each value; new values get the next numbers."""
    values = list(values)
    for value in dict.fromkeys(values):
        numbers.setdefault(value, len(numbers))
    return np.array(list(map(numbers.__getitem__, values)), np.int32)


_NO_ROWS = Columns.of(())
