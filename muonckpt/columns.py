"""Columns: where the bytes of many chunks lie, an array for each kind of fact instead of an object for each chunk."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

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

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """All columns: numbers first, the digests and whether there is one last."""
        numbers = (self.item, self.item_length, self.payload, self.payload_length, self.crc32)
        return (self.file, *numbers, self.digest, self.has_digest)

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


class ColumnsBuilder:
    """Collects rows for `Columns`.  Values are not checked here, but for the names of files."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._numbers_of: dict[tuple[str, ...], NDArray[np.int32]] = {}
        self._blocks: list[tuple[NDArray[Any], ...]] = []
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
        self._files += [self._number(name) for name in files]
        self._numbers += chain.from_iterable(
            (*item, *payload, crc32) for item, payload, crc32 in zip(items, payloads, crc32s, strict=True)
        )
        listed = list(digests)
        self._digests += [digest or bytes(16) for digest in listed]
        self._known += [digest is not None for digest in listed]
        self.rows += len(files)
        if len(self._files) >= 1 << 14:
            self._pack()

    def add_rows(self, columns: Columns, start: int, stop: int) -> None:
        """Add the rows from ``start`` to ``stop`` of columns.

        Raises:
            SourceError: the name of a file is refused.
        """
        self._pack()
        if columns.names not in self._numbers_of:
            self._numbers_of[columns.names] = np.array([*map(self._number, columns.names)], np.int32)
        file, *others = (column[start:stop] for column in columns.arrays)
        self._blocks.append((self._numbers_of[columns.names][file], *others))
        self.rows += stop - start

    def _number(self, name: str) -> int:
        if name not in self._names:
            check_name(name)
            self._names[name] = len(self._names)
        return self._names[name]

    def _pack(self) -> None:
        if self._files:
            numbers = np.array(self._numbers, np.int64).reshape(-1, 5)
            digests = np.frombuffer(b"".join(self._digests), np.uint8).reshape(-1, 16)
            known = np.array(self._known, np.bool_)
            self._blocks.append((np.array(self._files, np.int32), *np.ascontiguousarray(numbers.T), digests, known))
            self._files, self._numbers, self._digests, self._known = [], [], [], []

    def finished(self) -> Columns:
        """All rows, in the order in which they were added."""
        self._pack()
        blocks, self._blocks = [_no_rows().arrays, *self._blocks], []
        file, item, item_length, payload, payload_length, crc32, digest, known = map(
            np.concatenate, zip(*blocks, strict=True)
        )
        return Columns(tuple(self._names), file, item, item_length, payload, payload_length, digest, known, crc32)


def _no_rows() -> Columns:
    none = np.zeros(0, np.int64)
    return Columns(
        (), none.astype(np.int32), none, none, none, none, np.zeros((0, 16), np.uint8), none.astype(np.bool_), none
    )
