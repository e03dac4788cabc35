"""What a reshard will do, decided without the data: which boxes go into which file, and where in it.

For each tensor the source's manifest says where the elements are.  A translation may rename, split or join tensors,
which only makes other layouts of the same buffers.  The container decides which boxes lie in which file; if each rank
has a file, by the layouts of the target.  One plan per tensor then lists the bytes to copy.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from ...columns import UNKNOWN
from ...errors import DestinationError, SourceError
from ...record import Manifest, StateRecord, record_fields
from ...store.formats.signs import NAMES_FILE, NUMBERED
from ...store.io import publish
from ...store.io.checksums import xxh3_128
from ...store.io.limits import gc_paused
from ...store.io.location import Location, at_each
from ...store.io.regular import open_regular
from ...store.reading.payloads import Payloads
from ..target.topology import Target
from .container import Container, WriteRequest
from .item_file import ItemFile
from .output_files import ChunkPlan, OutputFile
from .outputs import Check, Outputs, OutputTensor, layout_digest
from .source_rows import SourceRows


class Source(Protocol):
    """A source of a job: an open checkpoint, or several."""

    @property
    def path(self) -> Location:
        """The place that errors name."""
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
        rows: the chunks of the source.
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
    rows: SourceRows
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
        columns = self.rows.columns
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
        stored = np.where(self.rows.columns.payload == UNKNOWN, 0, self.rows.columns.payload_length)
        avoided = 0
        for file in self.files:
            touched = np.zeros(len(self.rows) + 1, np.bool_)  # one more, for what is in memory
            for plan, numbers in file.chunks.alike().items():
                alike = defaultdict[tuple[str, ...], list[OutputTensor]](list)
                for number in numbers:
                    alike[file.chunks.outputs[number].dtypes].append(file.chunks.outputs[number])
                for dtypes, outputs in alike.items():
                    for buffer, length in plan.amounts(dtypes).items():
                        rows = self.rows.rows(outputs, buffer)
                        touched[rows] = True
                        avoided -= length * int(np.count_nonzero(rows >= 0))
            avoided += int(stored[touched[:-1]].sum())
        return avoided

    def digest(self) -> str:
        """Equal for two jobs that would write the same files from the same source."""
        return xxh3_128(self._described())

    def _described(self) -> Iterator[bytes]:
        """Yield everything in which two jobs can differ."""
        task = self.state, self.target, self.container.name, self.select, self.items
        yield _text(*task, json.dumps(self.provenance), json.dumps(self.manifest.provenance))
        columns, blobs = self.rows.columns, self.manifest.blobs
        yield _text(columns.names, blobs, [(tensor.key, len(tensor.chunks)) for tensor in self.manifest.tensors])
        yield from (column.tobytes() for column in columns.arrays)
        tensors = {output.key: number for number, output in enumerate(self.outputs)}
        plans: dict[ChunkPlan, int] = {}
        for output in self.outputs:
            made_of = [own if isinstance(own, bytes) else (self.rows.first(own), len(own)) for own in output.sources]
            layouts = tuple(map(layout_digest, output.layouts))
            yield _text(_described(output.record), made_of, layouts, output.making)
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
    """Describe a tensor without its chunks, and without its former layout, which nobody uses."""
    return tuple(value for name, value in record_fields(record).items() if name != "layout")


def _text(*values: object) -> bytes:
    return repr(values).encode(errors="surrogatepass")


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
        SourceRows(manifest),
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
    """Return the names, lengths and modification times of the source's files.

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
