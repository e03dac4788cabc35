"""What rewriting a checkpoint did, or would do: what the commands print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..record import Manifest
from ..store.io.location import Location
from .engine.job import Job
from .target.item_file import item_file_location


@dataclass(frozen=True, slots=True)
class FileReport:
    """A file that is written: its name, how many chunks and items are in it, the bytes of elements, and all bytes."""

    file: str
    items: int
    elements: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """What was done, or would be; sizes in bytes.

    Attributes:
        source, destination: where they are.
        format: of the destination.
        ranks, mesh, layout: of the destination; None where tensors are written whole.
        buffers: the flat buffers in which ranks share the tensors, summarised: sizes and padding, what each rank has.
        files: of the destination, but for those that describe the others.
        tensors: how many are written.
        checked: elements of the source that are used; all are compared with what is recorded of them.
        read: elements that are read to be written.
        avoided: what a reader of whole chunks would read besides.
        written: of all files.
        unchecked: how many chunks of the source carry no checksum.
        items_file: where what is no tensor is written, if the format cannot hold it.
        decoded: how many items are in it.
        undecoded: keys of those that it only lists, because they are no plain data.
        left_out: keys of what the source has and the destination has not.
        notes: sentences about what was decided.
        compared: how many fingerprints of the source the tensors were, or are to be, compared with.
        fingerprints: of the tensors that were written, by key; None if nothing was written yet.
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
    compared: int
    fingerprints: Mapping[str, str | None] | None = None

    def finished(self, manifest: Manifest) -> Report:
        """The same, when this was written."""
        return replace(self, fingerprints={tensor.key: tensor.fingerprint for tensor in manifest.tensors})

    def to_json(self) -> dict[str, Any]:
        """JSON data: the attributes under their names."""
        return asdict(self)


def report_of(job: Job, destination: Location, notes: tuple[str, ...] = ()) -> Report:
    """What a job will do, with more notes than its own."""
    chunks = [chunk for tensor in job.manifest.tensors for chunk in tensor.chunks if chunk.box.numel]
    payloads, of_ranks = job.source.payloads, job.container.of_ranks
    return Report(
        source=str(job.source.path),
        destination=str(destination),
        format=job.container.name,
        ranks=job.target.ranks if of_ranks else None,
        mesh=dict(job.target.mesh) if of_ranks else None,
        layout=job.target.layout if of_ranks else None,
        buffers=_summary(job.buffers) if of_ranks else (),
        files=tuple(
            FileReport(
                destination.name if file.name == job.container.root else file.name,
                file.count,
                file.payload,
                file.length,
            )
            for file in job.files
        ),
        tensors=len(job.tensors),
        checked=job.bytes_to_check,
        read=job.payload_to_write,
        avoided=job.reads_avoided,
        written=job.bytes_to_write,
        unchecked=sum(not payloads.is_checked(chunk) for chunk in chunks),
        items_file=None if job.items is None else str(item_file_location(destination)),
        decoded=0 if job.items is None else len(job.items.decoded),
        undecoded=() if job.items is None else job.items.undecoded,
        left_out=job.left_out,
        notes=(*notes, *job.notes),
        compared=sum(tensor.fingerprint is not None for tensor in job.tensors),
    )


def _summary(buffers: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    if not buffers:
        return ()
    from .buffer_summary import buffer_summary, labelled_buffers  # rows need none of it

    return tuple(buffer_summary(labelled_buffers({"buffers": buffers})))
