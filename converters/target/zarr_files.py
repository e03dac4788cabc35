"""A zarr hierarchy as a destination: one file for each shard of an array, with its chunks end to end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...record import Manifest, StateRecord
from ...store.formats import zarr_writer
from ...store.formats.zarr_reader import ZarrArray
from ...store.io.location import Location
from ...store.reading.dtypes import itemsize
from ..engine.output_files import ChunkPlan, OutputChunks, OutputFile
from ..engine.outputs import OutputTensor
from .container import WholeFiles


@dataclass(frozen=True, slots=True)
class ZarrFiles(WholeFiles):
    """A zarr hierarchy with chunks of at most ``chunk_bytes``, which is the least that zarr reads at a time."""

    chunk_bytes: int = zarr_writer.CHUNK_BYTES
    name: ClassVar[str] = "zarr"

    def files(self, tensors: Sequence[OutputTensor], recorded: Mapping[str, Any]) -> Sequence[OutputFile]:
        arrays = self._arrays([output.record for output in tensors])
        return [file for output, array in zip(tensors, arrays, strict=True) for file in _files(output, array)]

    def describe(self, manifest: Manifest, folder: Location) -> None:
        zarr_writer.write_descriptions(manifest, self._arrays(manifest.tensors), folder)

    def _arrays(self, tensors: Sequence[StateRecord]) -> list[ZarrArray]:
        return zarr_writer.arrays(tensors, self.shard_bytes, self.chunk_bytes)


def _files(output: OutputTensor, array: ZarrArray) -> Iterator[OutputFile]:
    dtype = output.record.dtype
    files = [(name, list(array.chunks(box))) for name, box in array.files()]
    copies = iter(output.copies([box for _, chunks in files for _, box in chunks]))
    for name, chunks in files:
        index = zarr_writer.index_of(array, [number for number, _ in chunks])
        plans = []
        for number, box in chunks:
            suffix = index if number == chunks[-1][0] else b""
            frame = zarr_writer.ChunkFrame(box.numel * itemsize(dtype), array.chunk_bytes, suffix)
            plans.append(ChunkPlan(box, dtype, frame, next(copies)))
        written = OutputChunks.end_to_end(name, [output] * len(plans), plans)
        yield OutputFile(name, (), written, written.end)
