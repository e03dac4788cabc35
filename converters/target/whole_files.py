"""Files of formats that hold whole tensors, whatever ranks there are: safetensors and zarr."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...box import Box
from ...errors import SourceError
from ...record import Chunk, Extent
from ...store.formats.safetensors import folder as safetensors
from ...store.formats.zarr import writer as zarr_writer
from ...store.formats.zarr.array import ZarrArray
from ...store.reading.dtypes import itemsize
from ...version import PROGRAM
from ..engine.journal import Sum
from ..engine.output_files import Arrange, Arranged, Bare, Item, TargetFile, Task
from ..engine.outputs import Content, Wanted

MODEL = "model.safetensors"
"""What the file of a checkpoint that is one file is called until it has its own name."""


def safetensors_files(shard_bytes: int | None) -> Arrange:
    """Tensors end to end behind a header, in one file or in files of at most so many bytes of elements."""

    def arrange(task: Task) -> Arranged:
        _refuse_entries(task.content, "safetensors")
        wanted = {each.record.key: each for each in task.content.tensors}
        records = [each.record for each in task.content.tensors]
        safetensors.refuse(records)
        provenance = _provenance(task)
        shards = [(MODEL, records)] if shard_bytes is None else safetensors.shards(records, shard_bytes)
        files = [
            _safetensors_file(name, [wanted[tensor.key] for tensor in safetensors.in_order(shard)], provenance)
            for name, shard in shards
        ]
        return Arranged(tuple(files), {tensor.key: tensor.layout for tensor in records}, provenance)

    return arrange


def _safetensors_file(name: str, tensors: Sequence[Wanted], provenance: Mapping[str, Any]) -> TargetFile:
    records = [each.record for each in tensors]

    def front(passed: Sequence[Sum]) -> bytes:
        return safetensors.front(records, provenance, [(each.digest, each.share) for each in passed])

    at = len(front(()))
    items = []
    for each in tensors:
        box = Box.of(each.record.shape)
        place = Extent(name, at, safetensors.length_of(each.record))
        [copies] = each.copies([box]) if box.numel else [()]
        items.append(Item(each, Chunk(box, place, place), Bare(place.length), copies))
        at = place.end
    return TargetFile(name, (), tuple(items), at, front)


def zarr_files(shard_bytes: int | None) -> Arrange:
    """A file for each shard of each array, with its chunks end to end."""

    def arrange(task: Task) -> Arranged:
        _refuse_entries(task.content, "zarr")
        tensors = task.content.tensors
        arrays = zarr_writer.arrays([each.record for each in tensors], shard_bytes)
        files = (file for each, array in zip(tensors, arrays, strict=True) for file in _zarr_files(each, array))
        return Arranged(tuple(files), {each.record.key: each.record.layout for each in tensors}, _provenance(task))

    return arrange


def _zarr_files(wanted: Wanted, array: ZarrArray) -> Iterator[TargetFile]:
    files = [(name, list(array.chunks(box))) for name, box in array.files()]
    boxes = [box for _, chunks in files for _, box in chunks]
    copies = iter(wanted.copies(boxes) if boxes else ())
    for name, chunks in files:
        index = zarr_writer.index_of(array, [number for number, _ in chunks])
        items: list[Item] = []
        at = 0
        for number, box in chunks:
            behind = index if number == chunks[-1][0] else b""
            payload = Extent(name, at, box.numel * itemsize(array.dtype))
            frame = zarr_writer.ChunkFrame(payload.length, array.chunk_bytes, behind)
            items.append(Item(wanted, Chunk(box, Extent(name, at, frame.length), payload), frame, next(copies)))
            at += frame.length
        yield TargetFile(name, (), tuple(items), at)


def _refuse_entries(content: Content, name: str) -> None:
    """Raises:
    SourceError: there are items that are no tensors.
    """
    if content.entries:
        keys = [each.target.key for each in content.entries]
        shown = ", ".join(map(repr, keys[:10])) + (", …" if len(keys) > 10 else "")
        raise SourceError(
            f"the source holds {len(keys)} items that are no tensors, which {name} cannot hold: {shown}; "
            "leave them out with --tensors-only"
        )


def _provenance(task: Task) -> dict[str, Any]:
    """That of the source, with what is done now; flat buffers only if a tensor still speaks of them."""
    content = task.content
    step = {
        "program": PROGRAM,
        "source": task.source,
        "left_out": list(content.left_out),
        **({"notes": list(content.notes)} if content.notes else {}),
    }
    found = {**task.provenance, "exported": step}
    if not any(each.record.layout for each in content.tensors):
        found.pop("buffers", None)
    return found
