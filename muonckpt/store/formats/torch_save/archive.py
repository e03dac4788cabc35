"""A file of ``torch.save`` with many tensors, laid out before any of their elements is known.

What it holds is given as plain data and `Record`s, among them those of :meth:`Archive.tensor`.  `seal` decides where
everything lies; :meth:`Archive.around` are the bytes between the storages, for given checksums of these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from ....algebra.box import Index, row_major
from ...reading.dtypes import DTYPES, itemsize
from .inert_pickle import PERSISTENT, Global, Pickler, Record
from .stored_zip import (
    MEMBER_ALIGNMENT,
    SERIALIZATION_ID,
    ZipEntry,
    descriptor,
    directory,
    local_header,
    store,
)

_ORDERED = Global("collections OrderedDict")


def ordered(items: Mapping[str, object]) -> Record:
    """Return an ``OrderedDict``."""
    return Record(_ORDERED, (), items=cast(dict[object, object], dict(items)))


def sizes(shape: Index) -> Record:
    """Return a ``torch.Size``."""
    return Record(Global("torch Size"), (shape,))


class Archive:
    """One file.

    Attributes:
        offsets: where each storage begins, in bytes of the file; known when it is sealed, as is ``length``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.lengths: list[int] = []
        self.offsets: list[int] = []
        self.length = 0
        self._entries: list[ZipEntry] = []
        self._front = b""

    def tensor(self, dtype: str, shape: Index) -> Record:
        """Return a new tensor with a storage of its own, the last one."""
        numel, key = math.prod(shape), str(len(self.lengths))
        self.lengths.append(numel * itemsize(dtype))
        storage = Record(Global(PERSISTENT), ("storage", Global(f"torch {DTYPES[dtype].storage}"), key, "cpu", numel))
        parts = (storage, 0, shape, row_major(shape), False, ordered({}))
        return Record(Global("torch._utils _rebuild_tensor_v2"), parts)

    def seal(self, content: object) -> None:
        """Lay out the archive of this content, in which every tensor is."""
        pickler = Pickler()
        pickler.put(content)
        contents = (
            ("data.pkl", bytes(pickler.out) + b"."),
            (".format_version", b"1"),
            (".storage_alignment", str(MEMBER_ALIGNMENT).encode()),
            ("byteorder", b"little"),
        )
        self._front, entries = store(contents, 0)
        self._entries = list(entries)
        end = len(self._front)
        for number, length in enumerate(self.lengths):
            entry = ZipEntry(f"data/{number}", end, length, 0)
            self._entries.append(entry)
            self.offsets.append(end + len(local_header(entry)))
            end = self.offsets[-1] + length + len(descriptor(entry))
        self.length = end + len(self._end(end, self._entries))

    def around(self, checksums: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Yield what lies around the storages, with the offset of each part, given their CRC-32s."""
        yield 0, self._front
        first = len(self._entries) - len(self.lengths)
        entries = self._entries[:first]
        end = len(self._front)
        for entry, offset, checksum in zip(self._entries[first:], self.offsets, checksums, strict=True):
            entries.append(ZipEntry(entry.name, entry.header_offset, entry.size, checksum))
            yield end, local_header(entries[-1])
            end = offset + entry.size
            yield end, descriptor(entries[-1])
            end += len(descriptor(entries[-1]))
        yield end, self._end(end, entries)

    def _end(self, start: int, entries: Sequence[ZipEntry]) -> bytes:
        rest, last = store((("version", b"3\n"), (".data/serialization_id", SERIALIZATION_ID)), start)
        return rest + directory((*entries, *last), start + len(rest))
