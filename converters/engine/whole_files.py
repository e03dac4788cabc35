"""Whole tensors as a destination: safetensors files, or a zarr hierarchy."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...algebra.box import Box
from ...record.record import Manifest, StateRecord, by_key
from ...store.formats import safetensors, zarr_writer
from ...store.formats.zarr import ZarrArray
from ...store.io.checksums import xxh3_128
from ...store.io.location import Location
from .container import Arranged, Container, ItemFile, WriteRequest, extended_provenance
from .output_files import SUMS, ChunkSums, OutputChunks, OutputFile, bare, chunk_plans
from .outputs import OutputTensor


@dataclass(frozen=True, slots=True)
class WholeFiles(Container):
    """Whole tensors, with non-tensor items in a file beside the destination.

    A file has at most ``shard_bytes`` of elements; None means the format's default.
    """

    shard_bytes: int | None = None
    of_ranks = False

    def arrange(self, request: WriteRequest) -> Arranged:
        outputs = request.outputs
        items = ItemFile.of(outputs.items, request.payloads, request.source) if outputs.items else None
        layouts = {output.key: output.record.layout for output in outputs.tensors}
        buffers = request.provenance.get("buffers", ()) if any(layouts.values()) else ()  # layouts refer to them
        step: dict[str, Any] = {}
        if items:
            step = {"items": len(items.decoded), "undecoded": list(items.undecoded)}
            step["items_digest"] = xxh3_128([items.data])
        recorded = extended_provenance(request, "exported", step, None, buffers)
        return Arranged(tuple(self.files(outputs.tensors, recorded)), layouts, recorded, items)

    @abstractmethod
    def files(self, tensors: Sequence[OutputTensor], recorded: Mapping[str, Any]) -> Sequence[OutputFile]:
        """Return the files of these tensors, with this provenance.

        Raises:
            SourceError: the format cannot hold one of the tensors.
        """


@dataclass(frozen=True, slots=True)
class SafetensorsFile(WholeFiles):
    """One file.  In an object store, too, it appears under its name only when it is complete."""

    name = "safetensors"

    @property
    def root(self) -> str:
        return "model.safetensors"

    def files(self, tensors: Sequence[OutputTensor], recorded: Mapping[str, Any]) -> Sequence[OutputFile]:
        safetensors.check_storable(_records(tensors))
        return [_file(self.root, tensors, recorded)]

    def describe(self, manifest: Manifest, folder: Location) -> None:
        """Nothing: the header describes the file."""


@dataclass(frozen=True, slots=True)
class SafetensorsFolder(WholeFiles):
    """A folder of files of at most ``shard_bytes`` of elements, and an index."""

    shard_bytes: int
    name = "safetensors"

    def files(self, tensors: Sequence[OutputTensor], recorded: Mapping[str, Any]) -> Sequence[OutputFile]:
        records = _records(tensors)
        safetensors.check_storable(records)
        outputs_by_key = by_key(tensors)
        files = []
        for name, shard in safetensors.shards(records, self.shard_bytes):
            files.append(_file(name, [outputs_by_key[record.key] for record in shard], recorded))
        return files

    def describe(self, manifest: Manifest, folder: Location) -> None:
        names = [name for name, _ in safetensors.shards(manifest.tensors, self.shard_bytes)]
        safetensors.write_shard_index(manifest, names, folder)


def safetensors_files(shard_bytes: int | None = None) -> WholeFiles:
    """Return the container of one file, or of files of at most ``shard_bytes`` of elements."""
    return SafetensorsFile() if shard_bytes is None else SafetensorsFolder(shard_bytes)


def _records(tensors: Sequence[OutputTensor]) -> list[StateRecord]:
    return [output.record for output in tensors]


def _file(name: str, tensors: Sequence[OutputTensor], recorded: Mapping[str, Any]) -> OutputFile:
    # The widest elements come first, so that all are aligned.
    outputs_by_key = by_key(tensors)
    records = safetensors.by_element_size(_records(tensors))

    def header(chunk_sums: ChunkSums) -> bytes:
        sums = [(digest.hex(), share) for digest, _, share in chunk_sums.tolist()]
        return safetensors.encode_front(records, recorded, sums)

    outputs = [outputs_by_key[record.key] for record in records]
    plans = [chunk_plans(output, [Box.of(output.record.shape)], bare)[0] for output in outputs]
    start = len(header(np.empty(0, SUMS)))
    chunks = OutputChunks.end_to_end(name, outputs, plans, start)
    return OutputFile(name, (), chunks, chunks.end if outputs else start, header)


@dataclass(frozen=True, slots=True)
class ZarrFiles(WholeFiles):
    """A zarr hierarchy with chunks of at most ``chunk_bytes``, which is the least that zarr reads at a time."""

    chunk_bytes: int = zarr_writer.CHUNK_BYTES
    name = "zarr"

    def files(self, tensors: Sequence[OutputTensor], recorded: Mapping[str, Any]) -> Sequence[OutputFile]:
        arrays = self._arrays(_records(tensors))
        files: list[OutputFile] = []
        for output, array in zip(tensors, arrays, strict=True):
            files += _array_files(output, array)
        return files

    def describe(self, manifest: Manifest, folder: Location) -> None:
        zarr_writer.write_descriptions(manifest, self._arrays(manifest.tensors), folder)

    def _arrays(self, tensors: Sequence[StateRecord]) -> list[ZarrArray]:
        return zarr_writer.arrays(tensors, self.shard_bytes, self.chunk_bytes)


def _array_files(output: OutputTensor, array: ZarrArray) -> Iterator[OutputFile]:
    """Yield the files of an array: its chunks, padded to one size, and behind the last of a file their index."""
    files = [(name, list(array.chunks(box))) for name, box in array.files()]
    boxes: list[Box] = []
    for _, numbered_boxes in files:
        boxes += (box for _, box in numbered_boxes)
    # The plans are made for all files at once: together their boxes tile the tensor.
    plans = iter(chunk_plans(output, boxes, bare))
    for name, numbered_boxes in files:
        numbers = [number for number, _ in numbered_boxes]
        index = zarr_writer.index_of(array, numbers)
        framed = []
        for number in numbers:
            plan = next(plans)
            suffix = index if number == numbers[-1] else b""
            frame = zarr_writer.ChunkFrame(plan.frame.payload_length, array.chunk_bytes, suffix)
            framed.append(replace(plan, frame=frame))
        chunks = OutputChunks.end_to_end(name, [output] * len(framed), framed)
        yield OutputFile(name, (), chunks, chunks.end)
