"""safetensors as a destination: tensors end to end behind a header, in one file or in several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...box import Box
from ...record import Chunk, Extent, Manifest
from ...store.formats.safetensors import folder as safetensors
from ...store.io import publish
from ...store.io.location import Location
from ..engine.journal import ChunkSums
from ..engine.output_files import NoFrame, OutputChunk, OutputFile
from ..engine.outputs import OutputTensor
from .whole_files import WholeFiles


@dataclass(frozen=True, slots=True)
class SafetensorsFile(WholeFiles):
    """One file.  In an object store, too, it appears under its name only when it is complete."""

    name: ClassVar[str] = "safetensors"

    @property
    def root(self) -> str:
        return "model.safetensors"

    def staged(self, destination: Location) -> Location:
        return publish.staging_file(destination)

    def files(self, tensors: Sequence[OutputTensor], recorded: Mapping[str, Any]) -> Sequence[OutputFile]:
        safetensors.refuse([output.record for output in tensors])
        return [_file(self.root, tensors, recorded)]

    def describe(self, manifest: Manifest, folder: Location) -> None:
        """Nothing: the header describes the file."""


@dataclass(frozen=True, slots=True)
class SafetensorsFolder(WholeFiles):
    """A folder of files of at most ``shard_bytes`` of elements, and an index."""

    shard_bytes: int
    name: ClassVar[str] = "safetensors"

    def files(self, tensors: Sequence[OutputTensor], recorded: Mapping[str, Any]) -> Sequence[OutputFile]:
        records = [output.record for output in tensors]
        safetensors.refuse(records)
        by_key = {output.key: output for output in tensors}
        shards = safetensors.shards(records, self.shard_bytes)
        return [_file(name, [by_key[record.key] for record in shard], recorded) for name, shard in shards]

    def describe(self, manifest: Manifest, folder: Location) -> None:
        names = [name for name, _ in safetensors.shards(manifest.tensors, self.shard_bytes)]
        safetensors.write_shard_index(manifest, names, folder)


def _file(name: str, tensors: Sequence[OutputTensor], recorded: Mapping[str, Any]) -> OutputFile:
    by_key = {output.key: output for output in tensors}
    records = safetensors.by_element_size([output.record for output in tensors])

    def header(chunk_sums: Sequence[ChunkSums]) -> bytes:
        return safetensors.front(records, recorded, [(sums.digest, sums.share) for sums in chunk_sums])

    end = len(header(()))
    chunks = []
    for record in records:
        output, box = by_key[record.key], Box.of(record.shape)
        place = Extent(name, end, safetensors.length_of(record))
        [copies] = output.copies([box]) if box.numel else [()]
        chunks.append(OutputChunk(output, Chunk(box, place, place), NoFrame(place.length), copies))
        end = place.end
    return OutputFile(name, (), tuple(chunks), end, header)
