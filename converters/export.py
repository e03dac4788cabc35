"""Writing formats that hold whole tensors: streamed from any layout, read back, and compared.

`plan_export` decides and refuses; `run` checks the source, writes beside the destination, reads back what was
written, compares the fingerprints of both sides, and publishes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..box import Box
from ..errors import DestinationError, SourceError
from ..fingerprint import as_hex
from ..layout import Fragment, TensorLayout
from ..record import Manifest, StateRecord
from ..store import directory, safetensors, zarr_writer
from ..store.dtypes import itemsize
from ..store.formats import SAFETENSORS, ZARR, Format, format_of
from ..store.payload import Payloads, check_chunk
from ..store.remote import Location, check_memory
from ..store.stream import Fetch, FilePlan, assemble, passing
from ..store.sums import Sums
from .content import Translate, Wanted, as_they_are
from .elements import gathered
from .job import check_destination, state_of
from .mover import LARGEST_BAND, Progress

_BANDS = 32
"""Bands that memory must hold: one moving, its sums' temporaries, and the fingerprint's weights for sixteen."""


@dataclass(frozen=True, slots=True)
class Target:
    """A format of whole tensors.

    Args:
        format: reads what was written.
        refuse: raises `SourceError` for tensors that it cannot hold.
        files: what will be written, of tensors, provenance, and the most bytes of elements in a file (None: as usual).
        write: writes at a path the same, with the tensors' elements, in bands of so many bytes.
    """

    format: Format
    refuse: Callable[[Sequence[StateRecord]], object]
    files: Callable[[Sequence[StateRecord], Mapping[str, Any], int | None], tuple[FilePlan, ...]]
    write: Callable[[Location, Sequence[StateRecord], Fetch, Mapping[str, Any], int | None, int], None]


@dataclass(frozen=True, slots=True)
class Export:
    """Everything about an export that does not need the data.

    Args:
        manifest: of the source, as much of it as is read.
        state: tells whether the source has changed since.
        wanted: the tensors to write.
        provenance: for what is written.
        shard_bytes: the most bytes of elements in a file (None: as is usual).
        files: to write; one called ``""`` is the destination itself.
        left_out, notes: as `Content` has them.
    """

    source: Location
    manifest: Manifest
    state: tuple[object, ...]
    target: Target
    wanted: tuple[Wanted, ...]
    provenance: Mapping[str, Any]
    shard_bytes: int | None
    files: tuple[FilePlan, ...]
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def tensors(self) -> tuple[StateRecord, ...]:
        """To write, without their chunks."""
        return tuple(each.record for each in self.wanted)

    @property
    def bytes_to_check(self) -> int:
        """Payload of the source that is used: all of it is checked before."""
        return sum(c.box.numel * itemsize(t.dtype) for t in self.manifest.tensors for c in t.chunks)

    @property
    def bytes_to_write(self) -> int:
        """Length of all files."""
        return sum(file.length for file in self.files)

    @property
    def payload_to_write(self) -> int:
        """Bytes of elements in them: as many are read to write them, and read back."""
        return sum(file.payload for file in self.files)

    @property
    def reads_avoided(self) -> int:
        """Bytes of the chunks that are used which belong to no tensor that is written."""
        chunks = (
            chunk.box.numel * itemsize(each.record.dtype) for each in self.wanted for chunk in each.chunks.values()
        )
        return max(sum(chunks) - self.payload_to_write, 0)


TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        "safetensors": Target(SAFETENSORS, safetensors.refuse, safetensors.files, safetensors.write),
        "zarr": Target(ZARR, zarr_writer.nodes, zarr_writer.files, zarr_writer.write),
    }
)
"""The formats by their names on the command line."""


def plan_export(
    source: Location,
    target: str,
    select: Sequence[str] = (),
    translate: Translate = as_they_are,
    shard_bytes: int | None = None,
) -> Export:
    """Read what the source holds, and refuse what the target cannot.

    Args:
        target: a name in `TARGETS`.
        select, translate: as for `make_job`.
        shard_bytes: most bytes of elements in a file.  Without it safetensors is one file, and not a folder.

    Raises:
        SourceError: the source cannot be read; there are items that are no tensors; the format cannot hold a tensor.
        TargetError: a pattern fits nothing.
        LayoutError: a tensor has a hole or an overlap.
    """
    manifest = format_of(source).read(source)
    content = translate(manifest).selected(select)
    if content.entries:
        keys = [each.target.key for each in content.entries]
        shown = ", ".join(map(repr, keys[:10])) + (", …" if len(keys) > 10 else "")
        raise SourceError(
            f"{source} holds {len(keys)} items that are no tensors, which {target} cannot hold: {shown}; "
            "leave them out with --tensors-only"
        )
    used, records = content.used(manifest), [each.record for each in content.tensors]
    TARGETS[target].refuse(records)
    step = {"program": f"muonckpt {version('muonckpt')}", "source": source.resolve().name}
    more = {"left_out": list(content.left_out), **({"notes": list(content.notes)} if content.notes else {})}
    provenance = {**manifest.provenance, "exported": {**step, **more}}
    if not any(record.layout for record in records):
        provenance.pop("buffers", None)  # no tensor speaks of them any more
    return Export(
        source,
        used,
        state_of(source, used),
        TARGETS[target],
        tuple(content.tensors),
        provenance,
        shard_bytes,
        TARGETS[target].files(records, provenance, shard_bytes),
        content.left_out,
        content.notes,
    )


def run(
    job: Export, destination: Location, *, memory: int = 256 << 20, progress: Progress = lambda count: None
) -> Manifest:
    """Do an export: the destination appears whole, compared with its source, or not at all.

    Args:
        memory: bytes of buffers.
        progress: told the bytes that were checked, written or read back: `Export.bytes_to_check` and twice
            `Export.payload_to_write` in all.

    Returns:
        The manifest of what was written, as it is read back.

    Raises:
        DestinationError: the destination exists, is inside the source, or cannot be written.
        SourceError: the source is damaged, or changed meanwhile.
    """
    check_destination(job.source, destination)
    check_memory(job.source, destination, max((file.length for file in job.files), default=0), 1, memory)
    folder = directory.staging(destination)
    staged = folder / destination.name  # its final name: the manifest of a single file has it
    try:
        folder.mkdir(parents=True)
        manifest = _write(job, staged, max(min(memory // _BANDS, LARGEST_BAND), 1 << 12), progress)
        directory.publish(staged, destination)
    except OSError as error:
        raise DestinationError(f"cannot write {destination}: {error}") from error
    finally:
        directory.discard(folder)
    return manifest


def _write(job: Export, staged: Location, band_bytes: int, progress: Progress) -> Manifest:
    """Check the source, write the target, and compare the two."""
    with format_of(job.source).payloads(job.source) as payloads:
        for tensor in job.manifest.tensors:
            for chunk in tensor.chunks:
                check_chunk(payloads, tensor, chunk)
                progress(chunk.box.numel * itemsize(tensor.dtype))
        fetch = _fetch(job, payloads, progress)
        job.target.write(staged, job.tensors, fetch, job.provenance, job.shard_bytes, band_bytes)
        if state_of(job.source, job.manifest) != job.state:
            raise SourceError(f"{job.source} changed while it was read; nothing was published")
    written = job.target.format.read(staged)
    with job.target.format.payloads(staged) as payloads:
        _compare(job, written, _read_back(payloads, progress), band_bytes)
    return written


def _fetch(job: Export, payloads: Payloads, progress: Progress) -> Fetch:
    wanted = {each.record.key: each for each in job.wanted}

    def fetch(tensor: StateRecord, box: Box) -> NDArray[Any]:
        each = wanted[tensor.key]
        fragments = _covering(each.layout, box)
        words = gathered(payloads, each, fragments, box)
        for buffer in {fragment.place.buffer for fragment in fragments} & each.chunks.keys():
            payloads.release(each.chunks[buffer].item)
        progress(words.nbytes)
        return words

    return fetch


def _covering(layout: TensorLayout, box: Box) -> list[Fragment]:
    """The fragments that have elements of a box, one of each that are replicas."""
    lo, hi = box.lo or (0,), box.hi or (1,)  # as the arrays of a layout have a tensor without dims
    common = (layout.starts < hi) & (layout.stops > lo)
    return [layout.holders[number][0] for number in np.flatnonzero(common.all(axis=1)).tolist()]


def _read_back(payloads: Payloads, progress: Progress) -> Fetch:
    def fetch(tensor: StateRecord, box: Box) -> NDArray[Any]:
        words = assemble(payloads, tensor, box)
        for chunk in tensor.chunks:
            if chunk.box & box:
                payloads.release(chunk.item)
        progress(words.nbytes)
        return words

    return fetch


def _compare(job: Export, written: Manifest, fetch: Fetch, band_bytes: int) -> None:
    """Both sides have the same tensors, and the bytes now on disk have the fingerprints of both manifests.

    Raises:
        SourceError: the source's bytes are not those that its manifest describes.
        DestinationError: what was read back is not what was written.
    """
    found = {tensor.key: tensor for tensor in written.tensors}
    if found.keys() != {tensor.key for tensor in job.tensors}:
        raise DestinationError(f"expected {len(job.tensors)} tensors read back, found {len(found)}")
    for tensor in job.tensors:
        target = found[tensor.key]
        if tensor.fingerprint not in (None, target.fingerprint):
            raise SourceError(
                f"tensor {tensor.key!r}: the bytes have fingerprint {target.fingerprint}, the source's manifest says "
                f"{tensor.fingerprint}; nothing was published"
            )
        sums = Sums()
        for _ in passing(fetch, target, Box.of(target.shape), band_bytes, sums):
            pass
        described = replace(target, chunks=tensor.chunks, fingerprint=tensor.fingerprint)
        if described != tensor or as_hex(sums.share) != target.fingerprint:
            raise DestinationError(
                f"tensor {tensor.key!r}: read back with fingerprint {as_hex(sums.share)} as {described}, expected "
                f"{target.fingerprint} as {tensor}; nothing was published"
            )
