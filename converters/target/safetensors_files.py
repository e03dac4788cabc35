"""safetensors as a destination: tensors end to end behind a header, in one file or in several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...box import Box
from ...record import Manifest
from ...store.formats import safetensors
from ...store.io import publish
from ...store.io.location import Location
from ..engine.output_files import OutputChunks, OutputFile, bare, chunk_plans
from ..engine.outputs import OutputTensor
from ..engine.staging import SUMS, ChunkSums
from .container import WholeFiles


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


def safetensors_files(shard_bytes: int | None = None) -> WholeFiles:
    """Return the container of one file, or of files of at most ``shard_bytes`` of elements."""
    return SafetensorsFile() if shard_bytes is None else SafetensorsFolder(shard_bytes)


def _file(name: str, tensors: Sequence[OutputTensor], recorded: Mapping[str, Any]) -> OutputFile:
    by_key = {output.key: output for output in tensors}
    records = safetensors.by_element_size([output.record for output in tensors])

    def header(chunk_sums: ChunkSums) -> bytes:
        sums = [(digest.hex(), share) for digest, _, share in chunk_sums.tolist()]
        return safetensors.front(records, recorded, sums)

    listed = [by_key[record.key] for record in records]
    plans = [chunk_plans(output, [Box.of(output.record.shape)], bare)[0] for output in listed]
    start = len(header(np.empty(0, SUMS)))
    chunks = OutputChunks.end_to_end(name, listed, plans, start)
    return OutputFile(name, (), chunks, chunks.end if listed else start, header)
