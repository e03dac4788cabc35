"""The files of a destination: the items of each, and their places in it; decided without the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...record import Blob, Extent
from ...store.formats.torch_save.stored_zip import aligned
from ...store.reading.payloads import Payloads
from ..target.item_file import ItemFile
from ..target.topology import Target
from .journal import ChunkSums
from .output_chunks import OutputChunks
from .outputs import OutputItem, Outputs


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
    chunks: OutputChunks
    length: int
    header: Callable[[ChunkSums], bytes] | None = None

    @property
    def count(self) -> int:
        """The number of chunks and items."""
        return len(self.items) + len(self.chunks)

    @property
    def payload(self) -> int:
        """Bytes of elements in this file."""
        return sum(plan.frame.payload_length for plan in self.chunks.plans)


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
