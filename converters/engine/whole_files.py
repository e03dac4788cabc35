"""Whole tensors as a destination: safetensors files, or a zarr hierarchy."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...algebra.box import Box
from ...names.errors import DestinationError
from ...record.record import Manifest, StateRecord, by_key
from ...store.formats import safetensors, zarr_writer
from ...store.formats.zarr import ZarrArray
from ...store.io.checksums import xxh3_128
from ...store.io.location import Location, names_in
from ...store.reading.dtypes import itemsize
from .container import Arranged, Container, ItemFile, WriteRequest, extended_provenance
from .output_files import SUMS, ChunkSums, OutputChunks, OutputFile, bare, chunk_plans
from .outputs import OutputTensor


class WholeFiles(Container):
    """Whole tensors, with non-tensor items in a file beside the destination.

    A file has at most ``shard_bytes`` of elements; None means the format's default.
    """

    of_ranks = False

    def __init__(self, shard_bytes: int | None = None) -> None:
        self.shard_bytes = shard_bytes

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
        return Arranged(tuple(self.files(outputs.tensors, recorded)), layouts, provenance=recorded, items=items)

    @abstractmethod
    def files(self, tensors: Sequence[OutputTensor], recorded: Mapping[str, Any]) -> Sequence[OutputFile]:
        """Return the files of tensors, with this provenance.

        Raises:
            SourceError: the format cannot hold one of the tensors.
        """


class SafetensorsFiles(WholeFiles):
    """One file, which appears under its name only when it is complete; or a folder of shards, and an index."""

    name = "safetensors"

    def __init__(self, shard_bytes: int | None = None) -> None:
        super().__init__(shard_bytes)
        self.root = safetensors.FILE if shard_bytes is None else ""

    def files(self, tensors: Sequence[OutputTensor], recorded: Mapping[str, Any]) -> Sequence[OutputFile]:
        records, outputs = _records(tensors), by_key(tensors)
        safetensors.check_storable(records)
        if self.shard_bytes is None:
            return [_safetensors_file(safetensors.FILE, tensors, recorded)]
        files = []
        for name, shard in safetensors.shards(records, self.shard_bytes, recorded):
            files.append(_safetensors_file(name, [outputs[record.key] for record in shard], recorded))
        return files

    def describe(self, manifest: Manifest, folder: Location) -> None:
        """Write the index of shards; the header of a single file describes it."""
        if self.shard_bytes is not None:
            # A store has the object that reserves the destination beside them.
            names = [name for name in names_in(folder) if name.endswith(safetensors.ENDING)]
            safetensors.write_shard_index(manifest, names, folder)


def _records(tensors: Sequence[OutputTensor]) -> list[StateRecord]:
    return [output.record for output in tensors]


def _safetensors_file(name: str, tensors: Sequence[OutputTensor], recorded: Mapping[str, Any]) -> OutputFile:
    """Return a file of whole tensors, with a header that holds the digests, shares and provenance."""
    # The largest elements come first, which aligns all tensors.
    outputs = sorted(tensors, key=lambda output: -itemsize(output.record.dtype))
    records = _records(outputs)

    def header(chunk_sums: ChunkSums) -> bytes:
        sums = [(digest.hex(), share) for digest, _, share in chunk_sums.tolist()]
        return safetensors.encode_front(records, recorded, sums)

    plans = [chunk_plans(output, [Box.of(output.record.shape)], bare)[0] for output in outputs]
    start = len(header(np.empty(0, SUMS)))  # a header is as long without sums
    if start - 8 > safetensors.MAX_HEADER_BYTES:  # readers accept no more
        raise DestinationError(
            f"a header of {start} bytes, of at most {safetensors.MAX_HEADER_BYTES}: give a `shard_size=`, for several "
            "files"
        )
    chunks = OutputChunks.end_to_end(name, outputs, plans, start)
    return OutputFile(name, items=(), chunks=chunks, length=chunks.end if outputs else start, header=header)


class ZarrFiles(WholeFiles):
    """A zarr hierarchy of chunks and shards."""

    name = "zarr"

    def files(self, tensors: Sequence[OutputTensor], recorded: Mapping[str, Any]) -> Sequence[OutputFile]:
        arrays = zarr_writer.arrays(_records(tensors), self.shard_bytes)
        files: list[OutputFile] = []
        for output, array in zip(tensors, arrays, strict=True):
            files += _array_files(output, array)
        return files

    def describe(self, manifest: Manifest, folder: Location) -> None:
        zarr_writer.write_descriptions(manifest, zarr_writer.arrays(manifest.tensors, self.shard_bytes), folder)


def _array_files(output: OutputTensor, array: ZarrArray) -> Iterator[OutputFile]:
    """Yield the files of an array: its chunks, padded to one size, and after the last of a file their index."""
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
            frame = zarr_writer.chunk_frame(plan.frame.payload_length, array.chunk_bytes, suffix)
            framed.append(replace(plan, frame=frame))
        chunks = OutputChunks.end_to_end(name, [output] * len(framed), framed)
        yield OutputFile(name, (), chunks=chunks, length=chunks.end)
