"""The files of a destination: which items each holds, and where in it.  Decided without the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from ...plan import Copy
from ...record import Chunk, Extent, StateRecord
from ...store.formats.torch_save.stored_zip import ALIGNMENT
from ...store.io.checksums import Checksum, crc32_of
from ..target.topology import Target
from .journal import Sum
from .outputs import Content, Entry, Wanted


class Frame(Protocol):
    """What lies around the elements of an item; all numbers in bytes."""

    @property
    def head(self) -> bytes: ...

    @property
    def payload_offset(self) -> int: ...

    @property
    def payload_length(self) -> int: ...

    @property
    def length(self) -> int: ...

    @property
    def checksum_of(self) -> Checksum:
        """What the tail says of the elements."""
        ...

    def tail(self, checksum: int) -> bytes:
        """What comes after elements with this checksum."""
        ...


@dataclass(frozen=True, slots=True)
class Bare:
    """The frame of elements with nothing around them."""

    payload_length: int
    head: ClassVar[bytes] = b""
    payload_offset: ClassVar[int] = 0

    @property
    def length(self) -> int:
        return self.payload_length

    @property
    def checksum_of(self) -> Checksum:
        return crc32_of

    def tail(self, checksum: int) -> bytes:
        return b""


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor item to write: where it goes (``chunk``), its frame, and the copies that fill it.

    The places of the copies: the source's in a buffer of ``wanted``, the target's in the payload of this item.
    """

    wanted: Wanted
    chunk: Chunk
    frame: Frame
    copies: tuple[Copy, ...]

    @property
    def tensor(self) -> StateRecord:
        return self.wanted.record

    @property
    def sources(self) -> set[Extent]:
        """The items of the source that it is copied from."""
        chunks = self.wanted.chunks
        return {chunks[copy.source.buffer].item for copy in self.copies if copy.source.buffer in chunks}

    def written(self, passed: Sum) -> Chunk:
        """The chunk, with what is known when its elements have passed."""
        carried = passed.checksum if self.frame.checksum_of is crc32_of else None
        return dataclasses.replace(self.chunk, digest=passed.digest, crc32=carried)


Front = Callable[[Sequence[Sum]], bytes]
"""What a file begins with, made of the sums of its items; as long whatever they are."""


@dataclass(frozen=True, slots=True)
class TargetFile:
    """One file to write: its front, entries, then items, in the order of their places; zeros elsewhere.

    ``length`` in bytes.  A name with slashes lies in folders.
    """

    name: str
    entries: tuple[Entry, ...]
    items: tuple[Item, ...]
    length: int
    front: Front | None = None

    @property
    def count(self) -> int:
        """Of items, tensors and others."""
        return len(self.entries) + len(self.items)

    @property
    def payload(self) -> int:
        """Bytes of elements in it."""
        return sum(item.frame.payload_length for item in self.items)


def entries_in(name: str, entries: Sequence[Entry]) -> tuple[tuple[Entry, ...], int]:
    """The entries one after the other in the file of this name, each aligned; and the byte behind the last."""
    at = 0
    placed = []
    for entry in entries:
        blob = dataclasses.replace(entry.target, item=Extent(name, at, entry.target.item.length))
        placed.append(dataclasses.replace(entry, target=blob))
        at = aligned(blob.item.end)
    return tuple(placed), at


def aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Task:
    """What is asked for: ``content``, made of a source (its name and provenance), chosen by ``select``, to lie as
    ``target`` says."""

    source: str
    provenance: Mapping[str, Any]
    content: Content
    target: Target
    select: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Arranged:
    """The files to write, and what the manifest says of them: ``words`` is the layout of each tensor, by key."""

    files: tuple[TargetFile, ...]
    words: Mapping[str, Mapping[str, Any] | None]
    provenance: Mapping[str, Any]


Arrange = Callable[[Task], Arranged]
"""Decides what goes where in which file."""
