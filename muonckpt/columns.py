"""Columns: where the bytes of many chunks lie, an array for each kind of fact instead of an object for each chunk."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .box import MOST_ELEMENTS
from .errors import SourceError

_COMPONENT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")

UNKNOWN = -1
"""Stands in a column for what is not known."""

Column = NDArray[np.int64]

Row = tuple[str, int, int, int, int, str | None, int]
"""File, offset and length of the item, of the payload, digest in hex, and CRC-32 of a chunk."""


@lru_cache(maxsize=4096)
def check_name(file: str) -> None:
    """Check that a name stays inside a directory.

    Raises:
        SourceError: it does not.
    """
    # DCP's own names begin with underscores; a leading dot, a slash or anything exotic never does.
    if not all(map(_COMPONENT.fullmatch, file.split("/"))):
        raise SourceError(f"refused file name {file!r:.300}: expected plain names inside the checkpoint")


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The bytes of many chunks, one row each; a row with `UNKNOWN` has no payload, digest or CRC-32.

    Attributes:
        names: the names of files.
        file: which of the names.
        item, item_length, payload, payload_length: of the extents, in bytes.
        digest: xxh3-128 as 16 bytes, ``[chunks, 16]``.
        has_digest: whether there is one.
        crc32: CRC-32.

    Raises:
        SourceError: a range of bytes ends too far away.
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

    def __post_init__(self) -> None:
        assert {*map(len, self.arrays)} == {len(self.file)}, "a row has a value in each column"
        for offset, length in ((self.item, self.item_length), (self.payload, self.payload_length)):
            if len(far := np.flatnonzero(offset + length > MOST_ELEMENTS)):
                raise SourceError(f"refused byte range {offset[far[0]]}+{length[far[0]]}")

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Columns:
        """These rows as columns.

        Raises:
            SourceError: the name of a file is refused, or a range of bytes ends too far away.
        """
        files, *numbers, digests, crc32 = zip(*rows, strict=True) if (rows := list(rows)) else ((),) * 7
        names = {name: number for number, name in enumerate(dict.fromkeys(files))}
        for name in names:
            check_name(name)
        known = np.array([digest is not None for digest in digests], np.bool_)
        raw = bytes.fromhex("".join([digest or _NO_DIGEST for digest in digests]))
        file, digest = np.array([names[name] for name in files], np.int32), np.frombuffer(raw, np.uint8).reshape(-1, 16)
        item, item_length, payload, payload_length = (np.array(column, np.int64) for column in numbers)
        sums = np.array(crc32, np.int64)
        return cls(tuple(names), file, item, item_length, payload, payload_length, digest, known, sums)

    def __len__(self) -> int:
        return len(self.file)

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """All columns, in the order of the attributes."""
        numbers = (self.item, self.item_length, self.payload, self.payload_length)
        return (self.file, *numbers, self.digest, self.has_digest, self.crc32)

    def taken(self, numbers: slice | Column) -> Columns:
        """The rows with these numbers."""
        return Columns(self.names, *(column[numbers] for column in self.arrays))

    def renamed(self, name_of: Callable[[str], str]) -> Columns:
        """The same rows in files of other names.

        Raises:
            SourceError: a name is refused.
        """
        names = tuple(map(name_of, self.names))
        for name in names:
            check_name(name)
        return replace(self, names=names)

    def rows(self, start: int, stop: int) -> Iterator[Row]:
        """The rows from ``start`` to ``stop``."""
        return self._rows(slice(start, stop))

    def rows_at(self, numbers: Sequence[int]) -> Iterator[Row]:
        """The rows with these numbers."""
        return self._rows(np.array(numbers, np.int64))

    def _rows(self, span: slice | Column) -> Iterator[Row]:
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


_NO_DIGEST = "0" * 32


class ColumnsBuilder:
    """Joins the rows of several columns, whose names of files may differ.

    Columns grow where they are: blocks that are joined at the end would be in memory twice.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._numbers_of: dict[tuple[str, ...], NDArray[np.int32]] = {}
        self._grown = [bytearray() for _ in _NO_ROWS.arrays]
        self.rows = 0

    def add(self, columns: Columns, start: int, stop: int) -> None:
        """Add the rows from ``start`` to ``stop``."""
        if columns.names not in self._numbers_of:
            numbers = [self._numbers.setdefault(name, len(self._numbers)) for name in columns.names]
            self._numbers_of[columns.names] = np.array(numbers, np.int32)
        file, *others = (column[start:stop] for column in columns.arrays)
        for grown, column in zip(self._grown, (self._numbers_of[columns.names][file], *others), strict=True):
            grown += np.ascontiguousarray(column).data.cast("B") if column.size else b""
        self.rows += stop - start

    def finished(self) -> Columns:
        """All rows, in the order in which they were added."""
        pairs = zip(self._grown, _NO_ROWS.arrays, strict=True)
        arrays = (np.frombuffer(grown, none.dtype).reshape(-1, *none.shape[1:]) for grown, none in pairs)
        return Columns(tuple(self._numbers), *arrays)


_NO_ROWS = Columns.of(())
