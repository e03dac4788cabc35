"""The report of `reshard` and `convert`: what they did, or would do in a dry run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..record.columns import UNKNOWN
from ..record.record import Manifest
from ..store.io.location import Location, items_beside
from ..store.reading.payloads import tensor_bytes
from .engine.job import Job
from .engine.outputs import Check

_UNEVEN = 2.0
"""A rank that gets this many times the mean is worth a note, if it gets `_MUCH` bytes."""

_MUCH = 64 << 10


@dataclass(frozen=True, slots=True)
class FileReport:
    """A file of the destination: the number of its chunks and items, the bytes of elements, and all bytes."""

    file: str
    items: int
    elements: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """A report of what was done, or would be done; sizes are in bytes.

    Attributes:
        ranks, mesh, layout: of the destination; None if tensors are written whole.
        buffers: `buffer_summary` of the flat buffers that ranks share.
        files: of the destination, without those that only describe others.
        tensors: the number of tensors that are written.
        checked: bytes of the source that are checked against their checksums before they are used.
        read: bytes of elements that are read to be written.
        avoided: bytes that a reader of whole chunks would read in addition.
        written: bytes of all files.
        unchecked: the number of source chunks without a checksum.
        items_file: the file of non-tensor items, if the format cannot hold them; ``decoded`` of them have values there,
            ``undecoded`` ones are only listed, because they are not plain data.
        left_out: keys of the source's tensors and items that are not in the destination.
        notes: sentences about what was decided.
        checklist: what became of each thing, and what the user must set in code, with the values found.
        compared: the number of tensors whose fingerprints are compared with the source's.
        fingerprints: of the tensors that were written, by key; None if nothing was written.
    """

    source: str
    destination: str
    format: str
    ranks: int | None
    mesh: Mapping[str, int] | None
    layout: str | None
    buffers: tuple[Mapping[str, Any], ...]
    files: tuple[FileReport, ...]
    tensors: int
    checked: int
    read: int
    avoided: int
    written: int
    unchecked: int
    items_file: str | None
    decoded: int
    undecoded: tuple[str, ...]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    checklist: tuple[Check, ...]
    compared: int
    fingerprints: Mapping[str, str | None] | None = None

    def finished(self, manifest: Manifest) -> Report:
        """Return the report when everything has been written."""
        return replace(self, fingerprints={tensor.key: tensor.fingerprint for tensor in manifest.tensors})


def report_of(job: Job, destination: Location, notes: tuple[str, ...] = ()) -> Report:
    """Say what a job will do; ``notes`` come before its own."""
    of_ranks, items = job.container.of_ranks, job.arranged.items
    columns = job.rows.columns
    # Columns tell most chunks with a checksum at once; formats know of the others.
    unchecked_rows = np.flatnonzero(job.rows.has_elements & ~columns.has_digest & (columns.crc32 == UNKNOWN)).tolist()
    balance = tuple(_balance_notes(job)) if of_ranks else ()
    files = []
    for file in job.files:
        name = destination.name if file.name == job.container.root else file.name
        files.append(FileReport(name, len(file.items) + len(file.chunks), elements=file.payload, bytes=file.length))
    return Report(
        source=str(job.source.path),
        destination=str(destination),
        format=job.container.name,
        ranks=job.target.ranks if of_ranks else None,
        mesh=dict(job.target.mesh) if of_ranks else None,
        layout=job.target.layout if of_ranks else None,
        buffers=_buffer_summary_of(job.arranged.provenance.get("buffers", ())) if of_ranks else (),
        files=tuple(files),
        tensors=len(job.tensors),
        checked=job.bytes_to_check,
        read=job.payload_to_write,
        avoided=job.reads_avoided,
        written=sum(file.length for file in job.files),
        unchecked=sum(not job.source.payloads.has_checksum(job.rows.at(row)[1]) for row in unchecked_rows),
        items_file=None if items is None else str(items_beside(destination)),
        decoded=0 if items is None else len(items.decoded),
        undecoded=() if items is None else items.undecoded,
        left_out=job.outputs.left_out,
        notes=(*notes, *job.outputs.notes, *balance),
        checklist=job.outputs.checklist,
        compared=sum(tensor.fingerprint is not None for tensor in job.tensors),
    )


def _balance_notes(job: Job) -> Iterator[str]:
    """Yield a note if some ranks get much more than others; it names the largest tensor with too few parts for all."""
    ranks, sizes = job.target.ranks, [file.payload for file in job.files]
    mean, largest = sum(sizes) / ranks, max(sizes, default=0)
    if largest < _MUCH or largest < _UNEVEN * mean:
        return
    # The cure is for the largest tensor without elements on some ranks.
    parts = Counter[str]()
    for file in job.files:
        pairs = zip(file.chunks.outputs, file.chunks.plans, strict=True)
        parts.update(output.key for output, plan in pairs if plan.box.numel)
    tensor_sizes = {tensor.key: tensor_bytes(tensor) for tensor in job.tensors}
    key = max((key for key in tensor_sizes if parts[key] < ranks), key=tensor_sizes.__getitem__, default=None)
    cure = f"; {key!r} has {parts[key]} parts for {ranks} ranks: cut it over more dims, with `shard=`" if key else ""
    size = f"{largest / 2**20:.3g} MiB of tensors, {largest / mean:.3g} times the mean"
    yield f"unbalanced: a rank gets up to {size}{cure}"


def _buffer_summary_of(buffers: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    if not buffers:
        return ()
    from .look.buffer_summary import buffer_summary, labelled_buffers  # not needed for rows

    return tuple(buffer_summary(labelled_buffers({"buffers": buffers})))
