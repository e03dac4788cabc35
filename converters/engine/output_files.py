"""The files of a destination: which items each holds, and where in it.  Decided without the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from ...plan import Copy
from ...record import Blob, Chunk, Extent, StateRecord
from ...store.formats.torch_save.stored_zip import aligned
from ...store.io.checksums import Checksum, crc32_of
from ...store.reading.payloads import Payloads
from ..target.item_file import ItemFile
from ..target.topology import Target
from .journal import ChunkSums
from .outputs import OutputItem, Outputs, OutputTensor


class PayloadFrame(Protocol):
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
class NoFrame:
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
class OutputChunk:
    """One chunk of a tensor to write: where it goes (``stored``), its frame, and the copies that fill it.

    The places of the copies: the source's in a buffer of ``output``, the target's in the payload of this chunk.
    """

    output: OutputTensor
    stored: Chunk
    frame: PayloadFrame
    copies: tuple[Copy, ...]

    @property
    def tensor(self) -> StateRecord:
        return self.output.record

    @property
    def sources(self) -> set[Extent]:
        """The items of the source that it is copied from."""
        chunks = self.output.chunks
        return {chunks[copy.source.buffer].item for copy in self.copies if copy.source.buffer in chunks}

    def written(self, passed: ChunkSums) -> Chunk:
        """The chunk, with what is known when its elements have passed."""
        carried = passed.checksum if self.frame.checksum_of is crc32_of else None
        return dataclasses.replace(self.stored, digest=passed.digest, crc32=carried)


@dataclass(frozen=True, slots=True)
class PlacedItem:
    """An item that is no tensor, and where it goes (``blob``)."""

    output: OutputItem
    blob: Blob


@dataclass(frozen=True, slots=True)
class OutputFile:
    """One file to write: its header, items, then chunks of tensors, in the order of their places; zeros elsewhere.

    ``length`` in bytes.  A name with slashes lies in folders.  ``header`` makes the first bytes of the file from the
    sums of its chunks; how many bytes these are does not depend on the sums.
    """

    name: str
    items: tuple[PlacedItem, ...]
    chunks: tuple[OutputChunk, ...]
    length: int
    header: Callable[[Sequence[ChunkSums]], bytes] | None = None

    @property
    def count(self) -> int:
        """Of chunks and items."""
        return len(self.items) + len(self.chunks)

    @property
    def payload(self) -> int:
        """Bytes of elements in it."""
        return sum(chunk.frame.payload_length for chunk in self.chunks)


def place_items(name: str, items: Sequence[OutputItem]) -> tuple[tuple[PlacedItem, ...], int]:
    """The items one after the other in the file of this name, each aligned; and the byte behind the last."""
    end = 0
    placed = []
    for item in items:
        blob = Blob(item.key, item.path, Extent(name, end, item.length))
        placed.append(PlacedItem(item, blob))
        end = aligned(blob.item.end)
    return tuple(placed), end


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """What is asked for: ``outputs``, made of a source (its name, provenance and bytes), chosen by ``select``, to lie
    as ``target`` says."""

    source: str
    provenance: Mapping[str, Any]
    payloads: Payloads
    outputs: Outputs
    target: Target
    select: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Arranged:
    """The files to write, and what the manifest says of them: ``words`` is the layout of each tensor, by key.

    ``items`` is a file beside the destination with what is no tensor, where the others cannot hold it.
    """

    files: tuple[OutputFile, ...]
    words: Mapping[str, Mapping[str, Any] | None]
    provenance: Mapping[str, Any]
    items: ItemFile | None = None
