"""Exporting the tensors of a checkpoint to a format that others read: whole tensors, streamed, and compared afterwards.

`plan_export` decides and refuses; `run` checks the source, writes beside the destination, reads back what was
written, compares the fingerprints of both sides, and publishes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

from numpy.typing import NDArray

from ..box import Box
from ..errors import DestinationError, SourceError
from ..fingerprint import as_hex
from ..record import Manifest, StateRecord
from ..store import directory, safetensors, zarr_writer
from ..store.audit import payload_bytes
from ..store.dtypes import itemsize
from ..store.formats import SAFETENSORS, ZARR, Format, format_of
from ..store.payload import Payloads, check_chunk
from ..store.stream import Fetch, assemble, passing
from ..store.sums import Sums
from .job import check_destination, state_of
from .mover import LARGEST_BAND, Progress

Write = Callable[[Path, Sequence[StateRecord], Fetch, Mapping[str, Any], int | None, int], None]
"""Writes at a path: tensors, their elements, provenance; most bytes of a file (None: as usual), and of a band."""


_BANDS = 32
"""Bands that memory must hold: one moving, its sums' temporaries, and the fingerprint's weights for sixteen."""


@dataclass(frozen=True, slots=True)
class Target:
    """A format to export to.  ``refuse`` raises `SourceError` for tensors that it cannot hold."""

    format: Format
    refuse: Callable[[Sequence[StateRecord]], None]
    write: Write


@dataclass(frozen=True, slots=True)
class Export:
    """Everything about an export that does not need the data.  ``state`` tells whether the source has changed since.

    ``manifest`` is that of the source, ``shard_bytes`` the most bytes of elements in a file (None: as is usual).
    """

    source: Path
    format: Format
    manifest: Manifest
    state: tuple[object, ...]
    target: Target
    shard_bytes: int | None

    @property
    def bytes_to_write(self) -> int:
        """Bytes of elements."""
        return payload_bytes(self.manifest)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Keys of what is no tensor."""
        return tuple(blob.key for blob in self.manifest.blobs)


def _write_safetensors(
    path: Path,
    tensors: Sequence[StateRecord],
    fetch: Fetch,
    provenance: Mapping[str, Any],
    shard_bytes: int | None,
    band_bytes: int,
) -> None:
    if shard_bytes is None:
        safetensors.write_file(path, tensors, fetch, provenance, band_bytes)
    else:
        safetensors.write_sharded(path, tensors, fetch, provenance, shard_bytes, band_bytes)


def _write_zarr(
    path: Path,
    tensors: Sequence[StateRecord],
    fetch: Fetch,
    provenance: Mapping[str, Any],
    shard_bytes: int | None,
    band_bytes: int,
) -> None:
    zarr_writer.write(path, tensors, fetch, provenance, shard_bytes or zarr_writer.SHARD_BYTES, band_bytes)


def _refuse_places(tensors: Sequence[StateRecord]) -> None:
    zarr_writer.nodes(tensors)


TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        "safetensors": Target(SAFETENSORS, safetensors.refuse, _write_safetensors),
        "zarr": Target(ZARR, _refuse_places, _write_zarr),
    }
)
"""The formats by their names on the command line."""


def plan_export(source: Path, target: str, *, tensors_only: bool = False, shard_bytes: int | None = None) -> Export:
    """Read what the source holds, and refuse what the target cannot.

    Args:
        target: a name in `TARGETS`.
        tensors_only: leave out what is no tensor instead of refusing.
        shard_bytes: most bytes of elements in a file.  Without it safetensors is one file, and not a folder.

    Raises:
        SourceError: the source cannot be read; it holds items that are no tensors; the format cannot hold a tensor.
        LayoutError: a tensor has a hole or an overlap.
    """
    found = format_of(source)
    manifest = found.read(source)
    for tensor in manifest.tensors:
        tensor.chunk_layout()
    keys = [blob.key for blob in manifest.blobs]
    if keys and not tensors_only:
        shown = ", ".join(map(repr, keys[:10])) + (", …" if len(keys) > 10 else "")
        raise SourceError(
            f"{source} holds {len(keys)} items that are no tensors, which {target} cannot hold: {shown}; "
            "leave them out with --tensors-only"
        )
    TARGETS[target].refuse(manifest.tensors)
    state = state_of(found.payloads(source).directory, manifest)
    return Export(source, found, manifest, state, TARGETS[target], shard_bytes)


def run(
    job: Export, destination: Path, *, memory: int = 256 << 20, progress: Progress = lambda count: None
) -> Manifest:
    """Do an export: the destination appears whole, compared with its source, or not at all.

    Args:
        memory: bytes of buffers.
        progress: told the bytes that were checked, written or read back: three times `Export.bytes_to_write` in all.

    Returns:
        The manifest of what was written, as it is read back.

    Raises:
        DestinationError: the destination exists, is inside the source, or cannot be written.
        SourceError: the source is damaged, or changed meanwhile.
    """
    check_destination(job.source, destination)
    folder = directory.staging(destination)
    staged = folder / destination.name  # its final name: the manifest of a single file has it
    try:
        folder.mkdir(parents=True)
        manifest = _write(job, staged, max(min(memory // _BANDS, LARGEST_BAND), 1 << 12), progress)
        _publish(staged, destination)
    except OSError as error:
        raise DestinationError(f"cannot write {destination}: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return manifest


def _write(job: Export, staged: Path, band_bytes: int, progress: Progress) -> Manifest:
    """Check the source, write the target, and compare the two."""
    with job.format.payloads(job.source) as payloads:
        for tensor in job.manifest.tensors:
            for chunk in tensor.chunks:
                check_chunk(payloads, tensor, chunk)
                progress(chunk.box.numel * itemsize(tensor.dtype))
        provenance = {**job.manifest.provenance, "exported": _step(job)}
        job.target.write(
            staged, job.manifest.tensors, _fetch(payloads, progress), provenance, job.shard_bytes, band_bytes
        )
        if state_of(payloads.directory, job.manifest) != job.state:
            raise SourceError(f"{job.source} changed while it was read; nothing was published")
    written = job.target.format.read(staged)
    with job.target.format.payloads(staged) as payloads:
        _compare(job, written, _fetch(payloads, progress), band_bytes)
    return written


def _fetch(payloads: Payloads, progress: Progress) -> Fetch:
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
    if found.keys() != {tensor.key for tensor in job.manifest.tensors}:
        raise DestinationError(f"expected {len(job.manifest.tensors)} tensors read back, found {len(found)}")
    for tensor in job.manifest.tensors:
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


def _publish(staged: Path, destination: Path) -> None:
    """Give the finished file or folder its name; neither replaces what may have appeared there meanwhile."""
    if staged.is_dir():
        directory.publish(staged, destination)
        return
    os.link(staged, destination)
    directory.sync_directory(destination.parent)


def _step(job: Export) -> dict[str, Any]:
    source = job.source.resolve().name
    return {"program": f"muonckpt {version('muonckpt')}", "source": source, "left_out": list(job.left_out)}
