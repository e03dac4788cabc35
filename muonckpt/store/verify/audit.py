"""Audits: every element is there exactly once, and bytes and descriptions are those that were written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from itertools import chain, pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...algebra.box import Index
from ...algebra.fingerprint import as_hex, box_shares, combine
from ...algebra.grouping import batches
from ...names.errors import ChecksumError, DiskError, LayoutError, SourceError
from ...names.wording import Finding, counted, listed
from ...programs.signs import INTEGRITY_FILE, MEGATRON_FILE, METADATA_FILE
from ...record.record import MANIFEST_FILE, Blob, Chunk, Extent, Manifest, StateRecord, first_rows_of, with_chunks
from ..formats.registry import DCP, OWN
from ..formats.torch_save import tensor_item
from ..io.checksums import Sums, crc32
from ..io.location import (
    Location,
    Remote,
    entries_of,
    is_file,
    length_of,
    location,
    source_errors,
)
from ..io.regular import Pace, open_regular, read_text_file
from ..open_checkpoint import DISK_FAILS, OpenCheckpoint, check_blob
from ..reading.dtypes import itemsize
from ..reading.payloads import BAND_BYTES, Payloads, Progress, check_chunk, chunk_bands, count_nonfinite, payload_of
from .damage import HARMLESS, Damage, damage_by_files, damage_of_files, findings_by_files, with_causes
from .diagnosis import Diagnosis, diagnosis_at, diagnosis_of
from .run import is_damaged
from .small_tensors import read_small
from .verification import unless_removed

Verdict = Literal["whole", "readable, unchecked", "faulty"]


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The result of an audit.

    Attributes:
        unchecked: how many chunks that are not lost have no checksum of any kind.
        fingerprints: computed from the bytes on disk, for every tensor that could be read whole.
        notes: remarks that are no faults.
        diagnosis: the faults and losses, and the next step.
    """

    tensors: int
    chunks: int
    blobs: int
    payload_bytes: int
    unchecked: int
    fingerprints: dict[str, str]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    diagnosis: Diagnosis = field(compare=False)

    @property
    def damage(self) -> Damage:
        """Return the losses."""
        return self.diagnosis.damage

    @property
    def verdict(self) -> Verdict:
        """Return ``whole`` if everything agrees with its record, ``faulty`` if there are findings, ``readable,
        unchecked`` if the elements of some chunks have no record.
        """
        return "faulty" if self.findings else "readable, unchecked" if self.unchecked else "whole"


def verify(
    path: str | os.PathLike[str] | Remote,
    *,
    jobs: int = 2,
    progress: Progress = lambda count, total: None,
    pace: Pace | None = None,
) -> AuditReport:
    """Check that a checkpoint of any format is whole: what ``muonckpt verify`` prints.

    Checks coverage, bounds, digests, checksums and fingerprints, and looks for infinite or NaN values.  Faults are
    listed in the report, not raised.  Needs no torch.

    Args:
        path: a path, or a URL such as ``s3://bucket/step1000``.
        jobs: threads that read and check.
        progress: called with the bytes read since the last call, and with the total.
        pace: holds the reading back to a rate.

    Raises:
        SourceError: there is no checkpoint, what describes it cannot be read at all, or it was removed meanwhile.
        UnavailableError: it cannot be read now, or not by this user, which is no damage.  A file of elements that the
            disk cannot read (EIO) is: a finding of the kind ``"disk"``.
    """
    place = location(path, SourceError)
    with unless_removed(place):
        try:
            opened = OpenCheckpoint(place)
        except SourceError as error:
            if not is_damaged(place, error):
                raise
            diagnosis = diagnosis_at(place)
            findings = (Finding("description", diagnosis.sentence),)
            return AuditReport(0, 0, 0, 0, 0, {}, findings, (), diagnosis)
        with opened as checkpoint:
            checkpoint.payloads.pace = pace
            return audit(checkpoint, progress, jobs)


def audit(checkpoint: OpenCheckpoint, progress: Progress, jobs: int) -> AuditReport:
    """Verify a checkpoint that is already open; arguments as of `verify`."""
    path, manifest = checkpoint.path, checkpoint.outline
    total = sum(tensor.boxes.elements * itemsize(tensor.dtype) for tensor in manifest.tensors)
    of_one_folder = checkpoint.format in (OWN, DCP)
    orphans = _orphans(path, manifest) if of_one_folder else ()
    notes = [f"{name} belongs to no item of this checkpoint" for name in orphans]
    notes += [f"not read: {listed(checkpoint.not_read)}"] if checkpoint.not_read else []
    by_files = damage_of_files(checkpoint)
    # Read all tensors, and all items.
    results: list[_Result] = []
    with ThreadPoolExecutor(jobs) as pool:
        advance = lambda count: progress(count, total)  # noqa: E731
        row = 0
        for tensors in batches(manifest.tensors, lambda tensor: len(tensor.chunks), _BATCH_CHUNKS):
            stop = row + sum(len(tensor.chunks) for tensor in tensors)
            results += _check_tensors(
                checkpoint, tensors, by_files.chunks[row:stop], by_files.files, pool, jobs, advance
            )
            row = stop
    item_findings = []
    for blob in manifest.blobs:
        try:
            check_blob(checkpoint.payloads, blob)
        except DiskError as error:
            item_findings.append(Finding("disk", str(error), (blob.key, blob.item.file)))
        except (SourceError, LayoutError) as error:
            item_findings.append(Finding("item", str(error), (blob.key,)))
    read_findings = [*chain.from_iterable(result.findings for result in results), *item_findings]
    descriptions = (*findings_by_files(checkpoint), *_key_findings(checkpoint))
    integrity = _against_integrity(path) if of_one_folder else ()
    findings = (*by_files.findings, *descriptions, *read_findings, *integrity)
    # Report the losses, or other places of the same bytes.
    damage = replace(
        by_files,
        chunks=np.concatenate([by_files.chunks[:0], *(result.is_lost for result in results)]),
        items=by_files.items | {finding.names[0] for finding in item_findings},
        files={**by_files.files, **{f.names[-1]: DISK_FAILS for f in read_findings if f.kind == "disk"}},
        read=True,
    )
    if damage:
        damage = with_causes(checkpoint, damage, damage.damaged_files)
    return AuditReport(
        tensors=len(manifest.tensors),
        chunks=int((manifest.elements > 0).sum()),
        blobs=len(manifest.blobs),
        payload_bytes=total,
        unchecked=sum(result.unchecked for result in results),
        fingerprints={result.key: result.fingerprint for result in results if result.fingerprint is not None},
        findings=findings,
        notes=tuple(notes),
        diagnosis=diagnosis_of(path, damage.with_findings(findings)),
    )


def damage_in(path: Location, keys: Collection[str]) -> Damage | None:
    """Read tensors and items of a checkpoint, and return its damage with theirs; None if all checksums are right.

    Raises:
        SourceError, UnavailableError: they cannot be read, which does not tell what their bytes are.
    """
    with OpenCheckpoint(path) as checkpoint:
        manifest, payloads = checkpoint.outline, checkpoint.payloads
        is_lost = np.zeros(len(manifest.columns), np.bool_)
        for tensor, start in zip(manifest.tensors, first_rows_of(manifest.tensors).tolist(), strict=False):
            if tensor.key in keys:
                [located] = checkpoint.locate([tensor])
                for row, chunk in enumerate(located.chunks, start):
                    try:
                        check_chunk(payloads, located, chunk)
                    except ChecksumError:
                        is_lost[row] = True
        items = set[str]()
        for blob in (blob for blob in manifest.blobs if blob.key in keys):
            try:
                check_blob(payloads, blob)
            except ChecksumError:
                items.add(blob.key)
        damage = damage_by_files(checkpoint)
    if not (is_lost.any() or items):
        return None
    return replace(damage, chunks=damage.chunks | is_lost, items=damage.items | items)


_BATCH_CHUNKS = 1 << 11
"""Chunks that are opened and distributed to threads at a time: few enough to have an object for each, and to show
progress soon."""


@dataclass(frozen=True, slots=True)
class _Result:
    """The comparison of a tensor with its records.

    Attributes:
        is_lost: for each chunk whether it is lost.
        fingerprint: None if a chunk cannot be read.
        unchecked: how many chunks that are not lost have no checksum of any kind.
    """

    key: str
    is_lost: NDArray[np.bool_]
    fingerprint: str | None
    unchecked: int
    findings: Sequence[Finding] = ()


class _ChunkResult(NamedTuple):
    """The comparison of a chunk with its records.

    Attributes:
        share: in the fingerprint; None if the chunk cannot be read.
        faults: the kind and the reason of each.
    """

    share: int | None
    faults: Sequence[tuple[str, str]] = ()


def _check_tensors(
    checkpoint: OpenCheckpoint,
    tensors: Sequence[StateRecord],
    is_lost: NDArray[np.bool_],
    file_faults: Mapping[str, str],
    pool: ThreadPoolExecutor,
    jobs: int,
    advance: Callable[[int], None],
) -> Iterator[_Result]:
    """Compare tensors with their records: small ones together, others by their chunks.

    Args:
        is_lost: for each chunk whether it is lost, by the files' sizes alone.
        file_faults: the reasons, by the names of files.
    """
    payloads = checkpoint.payloads
    # The elements of chunks are found in their items; those of chunks that are lost are not looked for.
    spans, kept = [*pairwise(first_rows_of(tensors).tolist())], tensors
    if is_lost.any():
        kept = with_chunks(tensors, [np.flatnonzero(~is_lost[start:stop]).tolist() for start, stop in spans])
    located, errors = checkpoint.locate_each(kept)
    # Each thread reads the small ones of its part.
    parts = [located[len(located) * part // jobs : len(located) * (part + 1) // jobs] for part in range(jobs)]
    small_prints = chain.from_iterable(pool.map(partial(_small_fingerprints, checkpoint), parts))
    for tensor, part, small_print, span in zip(tensors, located, small_prints, spans, strict=True):
        of_tensor, unchecked = is_lost[slice(*span)], 0
        if tensor.fingerprint is None:
            unchecked = sum(chunk.box.numel > 0 and not payloads.has_checksum(chunk) for chunk in part.chunks)
        is_whole = not (of_tensor.any() or tensor.coverage_fault)
        if is_whole and small_print and tensor.fingerprint in (None, small_print):
            advance(tensor.boxes.elements * itemsize(tensor.dtype))
            yield _Result(tensor.key, of_tensor, small_print, unchecked)
            continue
        check = partial(_check_chunk, checkpoint, tensor, errors, advance)
        chunk_results = iter([*pool.map(check, part.chunks)])
        results = list[_ChunkResult]()
        for chunk, gone in zip(tensor.chunks, of_tensor, strict=True):
            fault = file_faults.get(chunk.item.file, "has other bytes")
            kind = "disk" if fault == DISK_FAILS else "unreadable"
            results.append(_ChunkResult(None, ((kind, f"its file {fault}"),)) if gone else next(chunk_results))
        yield _joined(tensor, results, unchecked)


def _small_fingerprints(checkpoint: OpenCheckpoint, tensors: Sequence[StateRecord]) -> list[str | None]:
    """Return the fingerprints of tensors that are small, finite and as recorded; None for the others."""
    is_sound, shares = np.zeros(len(tensors), np.bool_), np.zeros(len(tensors), np.uint64)
    for members, alike in read_small(checkpoint.payloads, tensors, whole_items=checkpoint.format is OWN):
        is_sound[members] = True
        for box, words, agree in alike:
            name = tensors[members[0]].dtype
            if count_nonfinite(words, name):
                agree &= [not count_nonfinite(part, name) for part in words]
            is_sound[members] &= agree
            shares[members] += np.array(box_shares(words, box.lo), np.uint64)
    pairs = zip(is_sound.tolist(), shares.tolist(), strict=True)
    return [as_hex(share) if sound else None for sound, share in pairs]


def _joined(tensor: StateRecord, results: Sequence[_ChunkResult], unchecked: int) -> _Result:
    """Join the results of a tensor's chunks, and compare its fingerprint."""
    shares = [result.share for result in results if result.share is not None]
    fingerprint = as_hex(combine(*shares)) if len(shares) == len(results) else None
    is_lost = np.zeros(len(results), np.bool_)
    # Elements that agree with their fingerprint, or with all digests, are those that were written, whatever the other
    # says: one of the two records is damaged.
    if fingerprint is None or fingerprint != tensor.fingerprint:
        for number, result in enumerate(results):
            is_lost[number] = result.share is None or any(kind not in HARMLESS for kind, _ in result.faults)
        has_digests = all(chunk.digest is not None for chunk in tensor.chunks if chunk.box.numel)
        if tensor.fingerprint and fingerprint and not (is_lost.any() or has_digests):
            is_lost[:] = True  # one of its chunks, and nothing tells which
    findings = [Finding("coverage", fault, (tensor.key,))] if (fault := tensor.coverage_fault) else []
    for chunk, result in zip(tensor.chunks, results, strict=True):
        subject = f"tensor {tensor.key!r} box {chunk.box} in {chunk.item.file}"
        findings += (Finding(kind, f"{subject}: {why}", (tensor.key, chunk.item.file)) for kind, why in result.faults)
    if fingerprint and tensor.fingerprint not in (None, fingerprint):
        message = f"tensor {tensor.key!r}: fingerprint {fingerprint}, expected {tensor.fingerprint}"
        findings.append(Finding("fingerprint", message, (tensor.key,)))
    return _Result(tensor.key, is_lost, fingerprint, unchecked, findings)


def _check_chunk(
    checkpoint: OpenCheckpoint,
    tensor: StateRecord,
    errors: Mapping[tuple[str, Index], SourceError | DiskError],
    advance: Callable[[int], None],
    chunk: Chunk,
) -> _ChunkResult:
    """Read a chunk in one pass over its elements, and compare it with its digest, its CRC-32 and the bytes around it.

    Args:
        errors: why chunks have no known place.
    """
    payloads, sums, num_nonfinite, faults = checkpoint.payloads, Sums(), 0, list[tuple[str, str]]()
    try:
        if error := errors.get((tensor.key, chunk.box.lo)):
            raise error
        for words, origin in chunk_bands(payloads, tensor, chunk):
            sums.add(words, origin)
            num_nonfinite += count_nonfinite(words, tensor.dtype)
            advance(words.nbytes)
        # The CRC-32 of strided chunks is that of their bytes as they are stored.
        checksum = sums.checksum if chunk.strides is None else crc32(payloads.bands(payload_of(tensor, chunk)))
        # Each record is compared, also where another one agrees: one of them may be damaged.
        try:
            payloads.check_item(chunk.item)
        except SourceError as error:
            faults.append(("crc32c", str(error)))
        if chunk.digest not in (None, sums.digest):
            faults.append(("digest", f"digest {sums.digest}, expected {chunk.digest}"))
        if chunk.crc32 not in (None, checksum):
            faults.append(("crc32", f"CRC-32 {checksum:08x}, expected {chunk.crc32:08x}"))
        if checkpoint.format is OWN and not _is_framed(payloads, tensor, chunk, checksum):
            faults.append(("metadata", "torch cannot load it: bytes before or after its elements are damaged"))
        if num_nonfinite:
            faults.append(("nonfinite", f"{counted(num_nonfinite, 'element')} infinite or NaN"))
        return _ChunkResult(sums.share, faults)
    except DiskError as error:
        faults = [("disk", str(error))]
    except (SourceError, LayoutError) as error:
        faults = [("unreadable", str(error))]
    # A chunk without elements loses nothing with its file.
    return _ChunkResult(None, faults) if chunk.box.numel else _ChunkResult(0)


def _is_framed(payloads: Payloads, tensor: StateRecord, chunk: Chunk, checksum: int) -> bool:
    """Return whether a chunk's item has the bytes around its elements that this package writes."""
    template, item = tensor_item.template(tensor.dtype, chunk.box.shape), chunk.item
    if item.length != template.length or chunk.payload != replace(
        item, offset=item.offset + len(template.head), length=template.payload_length
    ):
        return False
    head = bytes(payloads.read_scratch(replace(item, length=len(template.head))))
    start = item.offset + template.tail_offset
    tail = bytes(payloads.read_scratch(Extent(item.file, start, item.end - start)))
    return template.crc32_of(head, tail) == (checksum if chunk.crc32 is None else chunk.crc32)


# --- descriptions -----------------------------------------------------------------------------------------------------


def _key_findings(checkpoint: OpenCheckpoint) -> Iterator[Finding]:
    """Yield keys of DCP that are damaged: its own planner makes them by joining paths."""
    if checkpoint.format is not DCP:
        return
    entries: tuple[StateRecord | Blob, ...] = (*checkpoint.outline.tensors, *checkpoint.outline.blobs)
    paths = {entry.key: ".".join(map(str, entry.path)) for entry in entries}
    strange = [key for key, path in paths.items() if path != key]
    # Another program may have made all of them otherwise.
    for key in strange if 2 * len(strange) < len(entries) else ():
        message = f"{key!r} in {METADATA_FILE} has the path of {paths[key]!r}; expected the same"
        yield Finding("key", message, (key,))


def _against_integrity(path: Location) -> Iterator[Finding]:
    """Compare whole files with the SHA-256 that Megatron records in ``integrity.json`` if ``verify_integrity`` is set.

    Source: ``save_integrity_manifest`` of ``megatron/core/dist_checkpointing/validation.py`` (August 2026).
    """
    listing = path / INTEGRITY_FILE
    if not is_file(listing):
        return
    try:
        recorded = json.loads(read_text_file(listing))
        # Megatron knows no other algorithm; the files of one that comes later are not compared.
        files: dict[str, object] = recorded["files"] if recorded["algorithm"] == "sha256" else {}
        digests = sorted(files.items())
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        yield Finding("integrity", f"{listing}: expected JSON with algorithm and files, found other data ({error})")
        return
    # A name comes from outside, and may lead out of the checkpoint.
    for name, expected in digests:
        digest = sha256()
        try:
            if "/" in name:
                raise SourceError(f"refused file name {name!r:.300}: expected names inside the checkpoint")
            with open_regular(path / name) as file:
                for start in range(0, file.size, BAND_BYTES):
                    digest.update(file.read(start, min(BAND_BYTES, file.size - start)))
        except SourceError as error:
            yield Finding("integrity", f"{listing} has {name!r}: {error}")
            continue
        if digest.hexdigest() != expected:
            message = f"{path / name}: SHA-256 {digest.hexdigest()}, expected {expected!s:.80} by {listing.name}"
            yield Finding("integrity", message)


def _orphans(path: Location, manifest: Manifest) -> Iterator[str]:
    """Yield the names of files that are not empty, and that nothing describes."""
    used = {*manifest.columns.names, *(blob.item.file for blob in manifest.blobs), *manifest.files}
    used |= {MANIFEST_FILE, METADATA_FILE, MEGATRON_FILE, INTEGRITY_FILE}
    with source_errors(path):
        names = {file.name for file in entries_of(path)}
    for name in sorted(names - used):
        if length_of(path / name) != 0:
            yield name
