"""What a reshard will do, decided without the data: which boxes go into which file, and where in it.

For each tensor the source's manifest says where the elements are.  A translation may rename, split or join tensors,
which only makes other layouts of the same buffers.  The container decides which boxes lie in which file; if each rank
has a file, by the layouts of the target.  One plan per tensor then lists the bytes to copy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from ...columns import UNKNOWN
from ...errors import DestinationError, SourceError
from ...layout import Buffer
from ...record import Manifest, StateRecord, record_fields
from ...store.formats.signs import NAMES_FILE, NUMBERED
from ...store.io import publish
from ...store.io.checksums import xxh3_128
from ...store.io.gc_paused import gc_paused
from ...store.io.location import Location, at_each
from ...store.io.regular import open_regular
from ...store.reading.dtypes import itemsize
from ...store.reading.payloads import Payloads
from ..target.container import Container
from ..target.item_file import ItemFile
from ..target.topology import Target
from .checklist import Check
from .output_chunks import ChunkPlan
from .output_files import OutputFile, WriteRequest
from .outputs import Outputs, OutputTensor


class Source(Protocol):
    """What a job reads: an open checkpoint, or several."""

    @property
    def path(self) -> Location:
        """Where it is, for errors."""
        ...

    @property
    def manifest(self) -> Manifest: ...

    @property
    def payloads(self) -> Payloads: ...


AnySource = TypeVar("AnySource", bound=Source)


@dataclass(frozen=True, slots=True)
class Job:
    """Everything about a reshard that does not need the data.

    Args:
        manifest: the part of the source's manifest that is read.
        state: the state of the source's files, which shows whether they change later.
        container: the kind of the files to write.
        select: the shell patterns by which tensors and items were chosen.
        outputs: the tensors to write.
        recorded_layouts, provenance: for the manifest: each tensor's layout as JSON data, by key; and the provenance.
        left_out, notes, checklist: those of the `Outputs`.
        items: the file of non-tensor items, beside a destination that cannot hold them.
    """

    source: Source
    manifest: Manifest
    state: tuple[object, ...]
    target: Target
    container: Container
    select: tuple[str, ...]
    outputs: tuple[OutputTensor, ...]
    recorded_layouts: Mapping[str, Mapping[str, Any] | None]
    provenance: Mapping[str, Any]
    files: tuple[OutputFile, ...]
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    checklist: tuple[Check, ...] = ()
    items: ItemFile | None = None

    @property
    def tensors(self) -> tuple[StateRecord, ...]:
        """The tensors to write, without their chunks."""
        return tuple(output.record for output in self.outputs)

    @property
    def bytes_to_check(self) -> int:
        """Bytes of the source's payloads that are used; all of them are checked first."""
        columns = self.manifest.columns
        return int(columns.payload_length[columns.payload != UNKNOWN].sum())

    @property
    def bytes_to_write(self) -> int:
        """Length of all files."""
        return sum(file.length for file in self.files)

    @property
    def payload_to_write(self) -> int:
        """Bytes of elements in all files; as many are read to write them."""
        return sum(file.payload for file in self.files)

    @property
    def buffers(self) -> Sequence[Mapping[str, Any]]:
        """The flat buffers that are recorded."""
        return tuple(self.provenance.get("buffers", ()))

    @property
    def reads_avoided(self) -> int:
        """Bytes that a reader of whole chunks, such as stock DCP, would read in addition."""
        avoided = 0
        known: dict[ChunkPlan, tuple[int, dict[Buffer, int]]] = {}
        for file in self.files:
            touched: dict[object, int] = {}
            for output, plan in zip(file.chunks.outputs, file.chunks.plans, strict=True):
                if plan not in known:
                    known[plan] = _amounts(output, plan)
                read, of_chunks = known[plan]
                touched |= {output.source_of(buffer): amount for buffer, amount in of_chunks.items()}
                avoided -= read
            avoided += sum(touched.values())
        return avoided

    def digest(self) -> str:
        """Equal for two jobs that would write the same files from the same source."""
        return xxh3_128(self._described())

    def _described(self) -> Iterator[bytes]:
        """Everything in which two jobs can differ, in parts."""
        task = self.state, self.target, self.container.name, self.select, self.items
        yield _text(*task, json.dumps(self.provenance), json.dumps(self.manifest.provenance))
        columns, blobs = self.manifest.columns, self.manifest.blobs
        yield _text(columns.names, blobs, [(tensor.key, len(tensor.chunks)) for tensor in self.manifest.tensors])
        yield from (column.tobytes() for column in columns.arrays)
        tensors = {output.key: number for number, output in enumerate(self.outputs)}
        plans: dict[ChunkPlan, int] = {}
        for output in self.outputs:
            yield _text(_described(output.record), output.places)
        for file in self.files:
            for plan in file.chunks.plans:
                if plan not in plans:
                    plans[plan] = len(plans)
                    yield _text(plan.box.lo, plan.box.hi, plan.frame.payload_offset, plan.frame.length)
            yield _text(file.name, file.length, file.items, len(file.chunks))
            yield file.chunks.offsets.tobytes()
            yield np.array([tensors[output.key] for output in file.chunks.outputs], np.int64).tobytes()
            yield np.array([plans[plan] for plan in file.chunks.plans], np.int64).tobytes()


def _described(record: StateRecord) -> tuple[object, ...]:
    """A tensor without its chunks, and without the layout that it had, which nobody uses."""
    return tuple(value for name, value in record_fields(record).items() if name != "layout")


def _text(*values: object) -> bytes:
    return repr(values).encode(errors="surrogatepass")


def _amounts(output: OutputTensor, plan: ChunkPlan) -> tuple[int, dict[Buffer, int]]:
    """The bytes that a chunk is copied from, and those of each whole chunk of the source that they lie in."""
    chunks, size = output.chunks, itemsize(output.source_record.dtype)
    read = [copy for copy in plan.copies if copy.source.buffer in chunks]
    whole = {copy.source.buffer: chunks[copy.source.buffer].box.numel * size for copy in read}
    return sum(copy.box.numel * size for copy in read), whole


@gc_paused()
def make_job(
    source: AnySource,
    target: Target,
    select: Sequence[str],
    make_outputs: Callable[[AnySource], Outputs],
    container: Container,
) -> Job:
    """Plan to write a checkpoint for ``target`` in the files of ``container``.

    Args:
        select: shell patterns.  Only outputs whose key matches one are written, and only what they need is read;
            empty means everything.
        make_outputs: makes the outputs from the source.

    Raises:
        SourceError: the source cannot be read, or the container cannot hold what is in it.
        TargetError: the target does not fit the tensors, or a pattern matches nothing.
        LayoutError: a tensor of the source has a hole or an overlap.
    """
    outputs = make_outputs(source).selected(select)
    if source.manifest.provenance.get(NUMBERED):
        _refuse_numbers(source, outputs)
    manifest = outputs.used(source.manifest)
    name = source.path.resolve().name
    task = WriteRequest(name, manifest.provenance, source.payloads, outputs, target, tuple(select))
    arranged = container.arrange(task)
    return Job(
        source,
        manifest,
        file_states(source.payloads, manifest),
        target,
        container,
        tuple(select),
        tuple(outputs.tensors),
        arranged.recorded_layouts,
        arranged.provenance,
        arranged.files,
        outputs.left_out,
        outputs.notes,
        outputs.checklist,
        arranged.items,
    )


def check_destination(source: Location, destination: Location, container: Container) -> None:
    """Check that a destination can be written.

    Raises:
        DestinationError: it exists already, or lies inside the source.
    """
    publish.refuse_existing(destination, container.staged(destination))
    if source.resolve() in destination.resolve().parents:
        raise DestinationError(f"{destination} lies inside the source {source}; choose a place outside of it")


def file_states(payloads: Payloads, manifest: Manifest) -> tuple[object, ...]:
    """The files of the source, with their lengths and modification times.

    Raises:
        SourceError: one is missing.
    """
    columns = manifest.columns
    names = {columns.names[number] for number in np.flatnonzero(np.bincount(columns.file)).tolist()}
    names |= {blob.item.file for blob in manifest.blobs}

    def state(name: str) -> tuple[object, ...]:
        if payloads.is_held(name):
            return (name,)
        with open_regular(payloads.place(name)) as file:
            return name, *file.state

    return tuple(at_each(payloads.directory, state, sorted(names)))


def _refuse_numbers(source: Source, outputs: Outputs) -> None:
    """Refuse state of parameters that still have numbers for names."""
    for tensor in outputs.tensors:
        name, slot = tensor.record.name, tensor.record.slot
        if slot is not None and name is not None and name.isdecimal():
            raise SourceError(
                f"{source.path}: {tensor.key!r} is state of number {name}, and nothing in its files says which "
                f"that is: write the names in the order of the optimizer's parameters to {NAMES_FILE} beside them, or "
                "give a table with --rules (docs/formats/trainers.md); or take the model alone, by --select 'model.*'"
            )
