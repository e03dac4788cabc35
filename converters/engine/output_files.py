"""The files of a destination: the items of each, and their places in it; decided without the data."""

from __future__ import annotations

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
    """The bytes around the elements of a stored chunk; lengths and offsets are in bytes."""

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
        """The checksum of the elements that the tail contains."""
        ...

    def tail(self, checksum: int) -> bytes:
        """The bytes after elements with this checksum."""
        ...


@dataclass(frozen=True, slots=True)
class NoFrame:
    """The frame of elements that are stored with nothing around them."""

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
    """A chunk of a tensor to write: where it goes (``stored``), its frame, and the copies that fill it.

    The copies go from buffers of ``output`` to the payload of this chunk.
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
        """The items of the source that this chunk is copied from."""
        chunks = self.output.chunks
        return {chunks[copy.source.buffer].item for copy in self.copies if copy.source.buffer in chunks}

    def written(self, sums: ChunkSums) -> Chunk:
        """The chunk with the checksums of its elements."""
        crc32 = sums.checksum if self.frame.checksum_of is crc32_of else None
        return Chunk(self.stored.box, self.stored.item, self.stored.payload, sums.digest, crc32)


@dataclass(frozen=True, slots=True)
class PlacedItem:
    """A non-tensor item, and where it goes (``blob``)."""

    output: OutputItem
    blob: Blob


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file to write: its header, items and chunks of tensors, in the order of their places, with zeros between them.

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
        """The number of chunks and items."""
        return len(self.items) + len(self.chunks)

    @property
    def payload(self) -> int:
        """Bytes of elements in this file."""
        return sum(chunk.frame.payload_length for chunk in self.chunks)


def place_items(name: str, items: Sequence[OutputItem]) -> tuple[tuple[PlacedItem, ...], int]:
    """The items one after the other in the file of this name, each aligned; and the offset behind the last."""
    end = 0
    placed = []
    for item in items:
        blob = Blob(item.key, item.path, Extent(name, end, item.length))
        placed.append(PlacedItem(item, blob))
        end = aligned(blob.item.end)
    return tuple(placed), end


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """What a container shall write: ``outputs``, made from a source (its name, provenance and payloads), chosen by
    ``select``, for ``target``."""

    source: str
    provenance: Mapping[str, Any]
    payloads: Payloads
    outputs: Outputs
    target: Target
    select: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Arranged:
    """The files to write, and what the manifest says about them.

    ``recorded_layouts`` are the layouts of tensors as JSON data, by key.  ``items`` is a file beside the destination
    for the non-tensor items, if the other files cannot hold them.
    """

    files: tuple[OutputFile, ...]
    recorded_layouts: Mapping[str, Mapping[str, Any] | None]
    provenance: Mapping[str, Any]
    items: ItemFile | None = None
