"""Auditing a checkpoint: is every element there exactly once, and are the bytes those that were written?"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Literal

from ..box import Index
from ..errors import DamageError, LayoutError, MuonckptError, SourceError
from ..fingerprint import as_hex, combine
from ..record import MANIFEST_FILE, Blob, Chunk, Chunks, Extent, Manifest, StateRecord
from .descriptions import Finding, description_faults
from .formats.registry import DCP, OWN
from .formats.signs import MEGATRON_FILE, METADATA_FILE
from .io.checksums import Sums, crc32
from .io.location import Location, Remote, location
from .io.regular import open_regular
from .open_checkpoint import OpenCheckpoint
from .reading.bands import bands
from .reading.dtypes import itemsize
from .reading.finite import nonfinite
from .reading.payloads import BAND_BYTES, Payloads, Progress, as_words, payload_of
from .small_tensors import Examined, examined
from .stored_items import check_blob

_BATCHES = 1 << 11, 1 << 14
"""Chunks that are opened, and distributed to threads, at a time: there may be too many to have an object for each, and
whoever watches the progress should not wait for the opening of all."""

Verdict = Literal["whole", "readable, unchecked", "faulty"]


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The result of an audit.  ``unchecked`` chunks have no checksum of any kind; ``notes`` are not faults.

    ``fingerprints`` are computed from the bytes on disk, for every tensor that could be read whole.
    """

    tensors: int
    chunks: int
    blobs: int
    payload_bytes: int
    unchecked: int
    fingerprints: dict[str, str]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """``whole``: everything was compared with what was recorded when it was written, and is that.  ``faulty``:
        there are findings.  ``readable, unchecked``: nothing judges the elements of some chunks."""
        return "faulty" if self.findings else "readable, unchecked" if self.unchecked else "whole"


@dataclass(frozen=True, slots=True)
class _ChunkResult:
    """``share`` of the fingerprint is None if the chunk could not be read; ``where`` names tensor, box and file."""

    where: str
    share: int | None
    nonfinite: int
    findings: tuple[Finding, ...]


def payload_bytes(manifest: Manifest) -> int:
    """Bytes that an audit of this checkpoint reads."""
    return sum(map(_payload_bytes, manifest.tensors))


def _payload_bytes(tensor: StateRecord) -> int:
    return tensor.boxes.elements * itemsize(tensor.dtype)


def _batches(tensors: Sequence[StateRecord]) -> Iterator[Sequence[StateRecord]]:
    """Tensors in order, with at least so many chunks as `_BATCHES` has, at first the fewer."""
    batch: list[StateRecord] = []
    count, enough = 0, _BATCHES[0]
    for tensor in tensors:
        batch.append(tensor)
        count += len(tensor.chunks)
        if count >= enough:
            yield batch
            batch, count, enough = [], 0, min(2 * enough, _BATCHES[1])
    yield batch


def verify(
    path: str | os.PathLike[str] | Remote, *, jobs: int = 2, progress: Progress = lambda count, total: None
) -> AuditReport:
    """Check that a checkpoint of any format is whole: what ``muonckpt verify`` prints.

    Checks coverage, bounds, digests, checksums and fingerprints, and looks for infinite or NaN values.  Faults are
    listed in the report, not raised.  Needs no torch.

    Args:
        path: a path, or a URL such as ``s3://bucket/step1000``.
        jobs: threads that read and check.
        progress: called with the bytes read since the last call, and with the total.

    Raises:
        SourceError: there is no checkpoint, or what describes it cannot be read at all.
    """
    try:
        opened = OpenCheckpoint(location(path, SourceError))
    except DamageError as error:
        return AuditReport(0, 0, 0, 0, 0, {}, (Finding("description", None, str(error)),), ())
    with opened as checkpoint:
        total = payload_bytes(checkpoint.outline)
        return _audit(checkpoint, lambda count: progress(count, total), jobs)


def _audit(checkpoint: OpenCheckpoint, passed: Callable[[int], None], jobs: int) -> AuditReport:
    path, payloads = checkpoint.path, checkpoint.payloads
    manifest = checkpoint.outline
    findings: list[Finding] = []
    strangers = _orphans(path, manifest) if checkpoint.format in (OWN, DCP) else []
    notes = [f"{name} belongs to no item of this checkpoint" for name in strangers]
    fingerprints: dict[str, str] = {}
    unchecked = 0
    unlocated: dict[tuple[str, Index], _ChunkResult] = {}
    framed = True

    def examined_part(tensors: Sequence[StateRecord]) -> Examined:
        return examined(payloads, tensors, checkpoint.format is OWN)

    def audited(stored: tuple[StateRecord, Chunk]) -> _ChunkResult:
        return unlocated.get((stored[0].key, stored[1].box.lo)) or _audit_chunk(payloads, *stored, passed)

    with ThreadPoolExecutor(jobs) as pool:
        for opening in _batches(manifest.tensors):
            batch, lost = _located(checkpoint, opening)
            unlocated |= lost
            unchecked += _unchecked(payloads, batch)
            bounds = [len(batch) * part // jobs for part in range(jobs + 1)]
            parts = list(pool.map(examined_part, (batch[slice(*bound)] for bound in pairwise(bounds))))
            framed = framed and all(part.framed for part in parts)
            known = chain.from_iterable(part.fingerprints for part in parts)
            for tensor, fingerprint in zip(batch, known, strict=True):
                if fingerprint is None:
                    chunks = [(tensor, chunk) for chunk in tensor.chunks if chunk.box.numel]
                    results = list(pool.map(audited, chunks))
                    shares = [result.share for result in results if result.share is not None]
                    fingerprint = as_hex(combine(*shares)) if len(shares) == len(chunks) else None
                    findings += _audit_tensor(tensor, results, fingerprint)
                else:
                    passed(_payload_bytes(tensor))
                if fingerprint is not None:
                    fingerprints[tensor.key] = fingerprint
        for blob in manifest.blobs:
            findings += _audit_blob(payloads, blob)
    return AuditReport(
        tensors=len(manifest.tensors),
        chunks=int((manifest.elements > 0).sum()),
        blobs=len(manifest.blobs),
        payload_bytes=payload_bytes(manifest),
        unchecked=unchecked,
        fingerprints=fingerprints,
        findings=(*description_faults(checkpoint, framed), *findings),
        notes=tuple(notes),
    )


def _unchecked(payloads: Payloads, tensors: Sequence[StateRecord]) -> int:
    """Chunks with elements that nothing judges."""
    without_print = (chunk for tensor in tensors if tensor.fingerprint is None for chunk in tensor.chunks)
    return sum(chunk.box.numel > 0 and not payloads.is_checked(chunk) for chunk in without_print)


def _located(
    checkpoint: OpenCheckpoint, tensors: Sequence[StateRecord]
) -> tuple[Sequence[StateRecord], dict[tuple[str, Index], _ChunkResult]]:
    """Tensors with the places of all elements that can be found, and results for the chunks of the others.

    Results are by the tensor's key and the chunk's first index.
    """
    unlocated: dict[tuple[str, Index], _ChunkResult] = {}

    def located(tensor: StateRecord) -> StateRecord:
        try:
            return checkpoint.locate([tensor])[0]
        except SourceError as error:
            if len(tensor.chunks) > 1:  # one of them: find out which
                numbers = range(len(tensor.chunks))
                parts = (located(replace(tensor, chunks=tensor.chunks.only([number]))) for number in numbers)
                every = (chunk for part in parts for chunk in part.chunks)
                return replace(tensor, chunks=Chunks.of(every, len(tensor.shape)))
            where = f"tensor {tensor.key!r} box {tensor.chunks[0].box} in {tensor.chunks[0].item.file}"
            finding = Finding("unreadable", tensor.key, f"{where}: {error}")
            unlocated[tensor.key, tensor.chunks[0].box.lo] = _ChunkResult(where, None, 0, (finding,))
            return tensor

    try:
        return checkpoint.locate(tensors), unlocated
    except SourceError:  # which of them all?
        return tuple(map(located, tensors)), unlocated


def _audit_chunk(payloads: Payloads, tensor: StateRecord, chunk: Chunk, passed: Callable[[int], None]) -> _ChunkResult:
    where = f"tensor {tensor.key!r} box {chunk.box} in {chunk.item.file}"
    sums, bad = Sums(), 0
    try:
        payload = payload_of(tensor, chunk)
        offset = payload.offset
        for band in bands(chunk.box, BAND_BYTES // itemsize(tensor.dtype)):
            for box in band.boxes:
                part = Extent(payload.file, offset, box.numel * itemsize(tensor.dtype))
                if chunk.strides is None:
                    words = as_words(payloads.glance(part), tensor.dtype, box.shape)
                else:
                    words = payloads.gather(payload, tensor.dtype, chunk.stored("").place_at(box.lo), box.shape)
                sums.add(words, box.lo)
                bad += nonfinite(words, tensor.dtype)
                passed(part.length)
                offset = part.end
        checksum = sums.checksum if chunk.strides is None else crc32(payloads.bands(payload))
    except MuonckptError as error:
        return _ChunkResult(where, None, 0, (Finding("unreadable", tensor.key, f"{where}: {error}"),))
    findings = []
    try:
        payloads.check_inside(chunk.item)
    except SourceError as error:
        findings.append(Finding("crc32c", tensor.key, f"{where}: {error}"))
    if chunk.digest not in (None, sums.digest):
        findings.append(Finding("digest", tensor.key, f"{where}: digest {sums.digest}, expected {chunk.digest}"))
    if chunk.crc32 not in (None, checksum):
        message = f"{where}: CRC-32 {checksum:08x}, expected {chunk.crc32:08x}"
        findings.append(Finding("crc32", tensor.key, message))
    return _ChunkResult(where, sums.share, bad, tuple(findings))


def _audit_tensor(tensor: StateRecord, results: list[_ChunkResult], fingerprint: str | None) -> Iterator[Finding]:
    try:
        tensor.chunk_layout()
    except LayoutError as error:
        yield Finding("coverage", tensor.key, str(error))
    for result in results:
        yield from result.findings
    if fingerprint and tensor.fingerprint not in (None, fingerprint):
        message = f"tensor {tensor.key!r}: fingerprint {fingerprint}, expected {tensor.fingerprint}"
        yield Finding("fingerprint", tensor.key, message)
    bad = [result for result in results if result.nonfinite]
    if bad:
        count = sum(result.nonfinite for result in bad)
        message = f"{count} elements of tensor {tensor.key!r} are infinite or NaN, the first in {bad[0].where}"
        yield Finding("nonfinite", tensor.key, message)


def _audit_blob(payloads: Payloads, blob: Blob) -> Iterator[Finding]:
    try:
        check_blob(payloads, blob)
    except MuonckptError as error:
        yield Finding("blob", blob.key, str(error))


def _orphans(path: Location, manifest: Manifest) -> list[str]:
    used = {*manifest.columns.names}
    used |= {blob.item.file for blob in manifest.blobs} | {MANIFEST_FILE, METADATA_FILE, MEGATRON_FILE}
    try:
        names = [file.name for file in path.iterdir()]
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror or error}") from error
    return sorted(name for name in names if name not in used and not _is_empty(path / name))


def _is_empty(file: Location) -> bool:
    try:
        with open_regular(file) as opened:
            return opened.size == 0
    except SourceError:  # not a regular file, so not an empty one
        return False
