"""The work of a reshard, decided without the data: which boxes go into which file, and which process writes it.

The source's manifest says where elements are; a translation that renames, splits or joins tensors only makes other
layouts of the same buffers; the container decides which boxes go into which file.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ...algebra.layout import TensorLayout
from ...names.collector import gc_paused
from ...names.errors import DestinationError, about
from ...programs.signs import NUMBERED
from ...record.columns import Columns
from ...record.record import Blob, Manifest, StateRecord, record_fields
from ...store.io import publish
from ...store.io.checksums import xxh3_128
from ...store.io.location import Location, map_each
from ...store.io.regular import open_regular
from ...store.open_checkpoint import OpenCheckpoint
from ...store.reading.dtypes import itemsize
from ...store.reading.payloads import Payloads
from ..target.topology import Target
from .container import Arranged, Container, WriteRequest
from .output_files import ChunkPlan, OutputFile
from .outputs import Outputs, unnamed_state
from .source_rows import Mask, SourceRows
from .workers import Worker


@dataclass(frozen=True, slots=True)
class Job:
    """Everything about a reshard that does not need the data.

    Attributes:
        manifest: the part of the source's manifest that is read.
        state: the state of the source's files, which shows whether they change later.
    """

    source: OpenCheckpoint
    manifest: Manifest
    state: tuple[object, ...]
    target: Target
    container: Container
    outputs: Outputs
    arranged: Arranged
    rows: SourceRows

    @property
    def files(self) -> tuple[OutputFile, ...]:
        return self.arranged.files

    @property
    def tensors(self) -> tuple[StateRecord, ...]:
        return tuple(output.record for output in self.outputs.tensors)

    @property
    def bytes_to_check(self) -> int:
        """Bytes of the source's payloads that are used, and so checked."""
        columns = self.rows.columns
        return int(np.maximum(columns.payload_length(), 0).sum())

    @property
    def payload_to_write(self) -> int:
        """Bytes of elements in all files; as many are read to write them."""
        return sum(file.payload for file in self.files)

    @property
    def reads_avoided(self) -> int:
        """Bytes that a reader of whole chunks, such as stock DCP, would read in addition."""
        stored = np.maximum(self.rows.columns.payload_length(), 0)
        avoided = 0
        for file in self.files:
            is_touched = np.zeros(len(self.rows), np.bool_)
            for plan, numbers in file.chunks.grouped(range(len(file.chunks))):
                outputs, table = [file.chunks.outputs[number] for number in numbers], plan.copies.table
                size = itemsize(outputs[0].stored_dtype)
                for buffer in plan.copies.buffers:
                    rows, length = self.rows.rows(outputs, buffer), size * table.numel[table.source == buffer].sum()
                    is_touched[rows] = True
                    avoided -= int(np.minimum(stored[rows], length).sum())  # a constant fills many elements
            avoided += int(stored[is_touched].sum())
        return avoided

    def digest(self) -> str:
        """Return a digest that two jobs share if they would write the same files from the same source."""
        return xxh3_128(self._digest_input())

    def _digest_input(self) -> Iterator[bytes]:
        """Yield the bytes that `digest` covers: all that decides what the files will be.

        Workers plan a job each by itself: digests show whether the plans agree.
        """
        # The present source, and the request.
        task = self.state, self.container.name, self.arranged.items
        yield _repr_bytes(*task, json.dumps(self.arranged.provenance), json.dumps(self.manifest.provenance))
        columns, blobs = self.rows.columns, self.manifest.blobs
        yield _repr_bytes(columns.names, blobs, [(tensor.key, len(tensor.chunks)) for tensor in self.manifest.tensors])
        yield from (column.tobytes() for column in (*columns.arrays, columns.frames))
        # The tensors, each with the chunks of the source that it is made of.
        tensor_numbers = {output.key: number for number, output in enumerate(self.outputs.tensors)}
        plan_numbers: dict[ChunkPlan, int] = {}
        for output in self.outputs.tensors:
            sources = [(self.rows.first(chunks), len(chunks)) for chunks in output.sources]
            # The record without its chunks, which are in the files below, and without its former layout, which the job
            # never uses.
            fields = record_fields(output.record)
            fields.pop("layout", None)
            making = output.scale, output.source_dtype
            yield _repr_bytes(tuple(fields.values()), sources, _layout_digest(output.layout), making)
        # The files: their plans, each once because many chunks share it, and the tensor, plan and offset of each chunk.
        for file in self.files:
            for plan in file.chunks.plans:
                if plan not in plan_numbers:
                    plan_numbers[plan] = len(plan_numbers)
                    yield _repr_bytes(plan.box.lo, plan.box.hi, plan.frame.payload_offset, plan.frame.length)
            yield _repr_bytes(file.name, file.length, file.items, len(file.chunks))
            yield file.chunks.offsets.tobytes()
            yield np.array([tensor_numbers[output.key] for output in file.chunks.outputs], np.int64).tobytes()
            yield np.array([plan_numbers[plan] for plan in file.chunks.plans], np.int64).tobytes()


_layout_digest = lru_cache(maxsize=1024)(TensorLayout.digest)
"""Cached, because tensors of the same geometry share their layout."""


def _repr_bytes(*values: object) -> bytes:
    return repr(values).encode(errors="surrogatepass")


@gc_paused()
def make_job(
    source: OpenCheckpoint,
    target: Target,
    select: Sequence[str],
    make_outputs: Callable[[OpenCheckpoint], Outputs],
    container: Container,
) -> Job:
    """Plan to write a checkpoint for ``target`` in the files of ``container``.

    Args:
        select: shell patterns of the keys to write, empty for all; only what these need is read.
        make_outputs: makes the outputs from the source.

    Raises:
        SourceError: the source cannot be read, or the container cannot hold its contents.
        TargetError: the target does not fit the tensors, or a pattern matches nothing.
        LayoutError: a tensor of the source has a hole or an overlap.
    """
    # State of numbered parameters cannot be written under unknown names.
    outputs = make_outputs(source).selected(select)
    if source.manifest.provenance.get(NUMBERED):
        for output in outputs.tensors:
            name = output.record.name
            if output.record.slot is not None and name is not None and name.rpartition("#")[2].isdecimal():
                with about(source.path):
                    raise unnamed_state(source.manifest.provenance, name)
    # The container sees only the used part of the source.
    manifest = outputs.used(source.manifest)
    request = WriteRequest(
        source.path.resolve().name,
        provenance=manifest.provenance,
        payloads=source.payloads,
        outputs=outputs,
        target=target,
        select=tuple(select),
    )
    arranged, rows = container.arrange(request), SourceRows(manifest)
    state = file_states(source.payloads, rows.columns, manifest.blobs)
    return Job(source, manifest, state, target, container, outputs, arranged, rows)


def check_destination(source: Location, destination: Location) -> None:
    """Refuse a destination that exists already, or lies inside the source.

    Raises:
        DestinationError: it does.
    """
    publish.refuse_existing(destination)
    if source.resolve() in destination.resolve().parents:
        raise DestinationError(f"{destination} lies inside the source {source}; choose a place outside of it")


def file_states(payloads: Payloads, columns: Columns, blobs: Sequence[Blob]) -> tuple[object, ...]:
    """Return the names, lengths and modification times of the files of a source's chunks and items.

    Raises:
        SourceError: one is missing.
    """
    names = columns.files() | {blob.item.file for blob in blobs}

    def state(name: str) -> tuple[object, ...]:
        if payloads.is_in_memory(name):
            return (name,)
        with open_regular(payloads.place(name)) as file:
            return name, *file.state

    return tuple(map_each(payloads.directory, state, sorted(names)))


@dataclass(frozen=True, slots=True)
class Share:
    """One worker's part of a job: files to write, and chunks of the source to check; the shared ones others check too.

    Every worker checks the chunks that it copies from; the coordinator also checks those that no worker copies from.
    """

    files: tuple[OutputFile, ...]
    checked: Mask
    shared: Mask

    @classmethod
    def of(cls, job: Job, worker: Worker) -> Share:
        """Return an equal share, by bytes, of the files."""
        if worker.world == 1:  # no need to visit a million chunks
            return cls(job.files, job.rows.has_elements, np.zeros(len(job.rows), np.bool_))
        ends = (0, *part_ends([file.length for file in job.files], worker.world))
        start, stop = ends[worker.rank], ends[worker.rank + 1]
        local_sources = _rows_copied_from(job, job.files[start:stop])
        remote_sources = _rows_copied_from(job, (*job.files[:start], *job.files[stop:]))
        checked = job.rows.has_elements & (local_sources | ~remote_sources if worker.coordinates else local_sources)
        return cls(job.files[start:stop], checked, local_sources & remote_sources)


def part_ends(sizes: Sequence[int], world: int) -> tuple[int, ...]:
    """Return where each of ``world`` contiguous parts of a sequence ends, the largest sum being as small as possible.

    Neighbouring files mostly copy from the same chunks, which a worker then reads once.
    """
    if not sizes:
        return (0,) * world
    limits = range(max(sizes), sum(sizes) + 1)
    limit = limits[bisect_left(limits, True, key=lambda limit: len(_part_ends(sizes, limit)) <= world)]
    ends = _part_ends(sizes, limit)
    return (*ends, *[len(sizes)] * (world - len(ends)))


def _part_ends(sizes: Sequence[int], limit: int) -> list[int]:
    """Return where parts end if each is filled up to this limit."""
    ends, total = [], 0
    for index, size in enumerate(sizes):
        if total + size > limit:
            ends.append(index)
            total = 0
        total += size
    return [*ends, len(sizes)]


def _rows_copied_from(job: Job, files: Iterable[OutputFile]) -> Mask:
    is_source = np.zeros(len(job.rows), np.bool_)
    for file in files:
        is_source |= file.chunks.sources(job.rows)
    return is_source
