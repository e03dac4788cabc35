"""Several open checkpoints as one source: the files of the first are called ``0/NAME``, and so on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from ...layout import Buffer, TensorLayout
from ...record import Blob, Chunk, Extent, Manifest
from ...store.io.location import Location
from ...store.io.regular import FileBytes
from ...store.open_checkpoint import OpenCheckpoint
from ...store.reading.payloads import Payloads
from ..engine.outputs import OutputItem, OutputTensor


class JoinedPayloads(Payloads):
    """The bytes of the files of several checkpoints."""

    def __init__(self, parts: Sequence[Payloads]) -> None:
        super().__init__(parts[0].directory)
        self._parts = parts

    def place(self, name: str) -> Location:
        part, own = self._part(name)
        return part.place(own)

    def is_held(self, name: str) -> bool:
        part, own = self._part(name)
        return part.is_held(own)

    def close(self) -> None:
        super().close()
        for part in self._parts:
            part.close()

    def is_checked(self, chunk: Chunk) -> bool:
        part, own = self._part(chunk.item.file)
        return part.is_checked(replace(chunk, item=replace(chunk.item, file=own)))

    def check_inside(self, item: Extent) -> None:
        part, own = self._part(item.file)
        part.check_inside(replace(item, file=own))

    def on_disk(self, name: str) -> int:
        part, own = self._part(name)
        return part.on_disk(own)

    def _bytes(self, name: str) -> FileBytes:
        part, own = self._part(name)
        return part.reaching(own, 0)

    def _part(self, name: str) -> tuple[Payloads, str]:
        number, _, own = name.partition("/")
        return self._parts[int(number)], own


@dataclass(frozen=True)
class JoinedCheckpoints:
    """Open checkpoints as one source of a job; ``provenance`` is that of the result."""

    parts: Sequence[OpenCheckpoint]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Location:
        return self.parts[0].path

    @cached_property
    def payloads(self) -> Payloads:
        return JoinedPayloads([part.payloads for part in self.parts])

    @cached_property
    def manifest(self) -> Manifest:
        """The tensors and items of all, under their own keys."""
        moved = [part.manifest.moved(partial(_name, number)) for number, part in enumerate(self.parts)]
        tensors = tuple(tensor for manifest in moved for tensor in manifest.tensors)
        return Manifest(tensors, tuple(blob for manifest in moved for blob in manifest.blobs), self.provenance)


def joined_tensor(tensor: OutputTensor, part: int) -> OutputTensor:
    """A tensor to write that is made of this part's elements, as one of the joined checkpoints."""

    def moved(buffer: Buffer) -> Buffer:
        return f"{part}/{buffer}"

    fragments = tensor.layout.fragments
    places = (replace(f, place=replace(f.place, buffer=moved(f.place.buffer))) for f in fragments)
    return replace(
        tensor,
        layout=TensorLayout.of(tensor.layout.shape, tuple(places)),
        chunks={moved(buffer): _moved_chunk(chunk, part) for buffer, chunk in tensor.chunks.items()},
        in_memory={moved(buffer): data for buffer, data in tensor.in_memory.items()},
    )


def joined_item(item: OutputItem, part: int) -> OutputItem:
    """An item to write, as one of the joined checkpoints."""
    return item if item.source is None else replace(item, source=_moved_blob(item.source, part))


def _name(part: int, file: str) -> str:
    """What a file of a part is called here."""
    return f"{part}/{file}"


def _moved(extent: Extent, part: int) -> Extent:
    return replace(extent, file=_name(part, extent.file))


def _moved_chunk(chunk: Chunk, part: int) -> Chunk:
    payload = None if chunk.payload is None else _moved(chunk.payload, part)
    return replace(chunk, item=_moved(chunk.item, part), payload=payload)


def _moved_blob(blob: Blob, part: int) -> Blob:
    return replace(blob, item=_moved(blob.item, part))
