"""The files of a destination: which items each holds, and where in it.  Decided without the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..box import Box
from ..layouts.group_buffer import GroupBuffer
from ..plan import Copy
from ..record import Chunk, Extent, StateRecord
from ..store.stored_zip import ALIGNMENT
from .content import Entry, Wanted


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

    def tail(self, crc32: int) -> bytes:
        """What comes after elements with this CRC-32."""
        ...


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


@dataclass(frozen=True, slots=True)
class TargetFile:
    """One file to write: entries, then items, in the order of their places; zeros elsewhere.  ``length`` in bytes."""

    name: str
    entries: tuple[Entry, ...]
    items: tuple[Item, ...]
    length: int

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


Part = tuple[Wanted, Box, tuple[Copy, ...]]
"""A box of a tensor that some rank has, and the copies that make it."""


@dataclass(frozen=True, slots=True)
class Filled:
    """The files to write, and the flat buffers used, as the manifest records them."""

    files: tuple[TargetFile, ...]
    buffers: tuple[Mapping[str, Any], ...]


Fill = Callable[[Sequence[GroupBuffer], Sequence[Entry], Sequence[Sequence[Part]]], Filled]
"""Makes files of the flat buffers that ranks share, if the layout has any, of items that are no tensors, and of what
each rank has."""
