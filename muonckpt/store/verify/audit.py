"""Audits: every element is there exactly once, and bytes and descriptions are those that were written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...algebra.box import Index
from ...algebra.fingerprint import as_hex, combine
from ...names.errors import ChecksumError, DamageError, DiskError, LayoutError, SourceError
from ...names.wording import Finding, listed
from ...programs.signs import INTEGRITY_FILE, MEGATRON_FILE, METADATA_FILE
from ...record.record import MANIFEST_FILE, Blob, Chunk, Extent, Manifest, StateRecord, first_rows_of, with_chunks
from ..formats.registry import DCP, OWN
from ..formats.torch_save import tensor_item
from ..io.checksums import Sums, crc32, xxh3_128
from ..io.location import (
    Location,
    Remote,
    entries_of,
    is_file,
    is_there,
    items_beside,
    length_of,
    location,
    source_errors,
)
from ..io.regular import Pace, open_regular, read_text_file
from ..open_checkpoint import DISK_FAILS, OpenCheckpoint, check_blob
from ..reading.dtypes import itemsize
from ..reading.payloads import BAND_BYTES, Payloads, Progress, check_chunk, chunk_bands, count_nonfinite, payload_of
from .damage import Damage, damage_by_files, damage_of_files, findings_by_files, misplaced_files, open_remains
from .diagnosis import Diagnosis, diagnosis_at, diagnosis_of
from .run import has_lost_all
from .small_tensors import examine_small
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
            opened = open_remains(place)
        except SourceError as error:
            if not (isinstance(error, DamageError) or has_lost_all(place)):
                raise
            finding = Finding("description", str(error))
            return AuditReport(0, 0, 0, 0, 0, {}, (finding,), (), diagnosis_at(place))
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
    disk_errors = dict(by_files.disk_errors)
    unopened = [Finding("disk", str(error)) for error in disk_errors.values()]
    # Read all tensors, and all items.
    with ThreadPoolExecutor(jobs) as pool:
        advance = lambda count: progress(count, total)  # noqa: E731
        work = _Audit(checkpoint, advance, pool, by_files.chunks.copy(), disk_errors)
        for tensors in _batches(manifest.tensors):
            work.check_tensors(tensors, jobs)
        lost_items = by_files.items | set(work.check_items(manifest))
    descriptions = (*findings_by_files(checkpoint), *_description_findings(checkpoint))
    integrity = _against_integrity(path) if of_one_folder else ()
    findings = (*unopened, *descriptions, *work.findings, *integrity)
    # Report the losses, or other places of the same bytes.
    files = {**by_files.files, **dict.fromkeys(disk_errors, DISK_FAILS)}
    damage = replace(
        by_files, chunks=work.lost_chunks, items=lost_items, files=files, read=True, disk_errors=disk_errors
    )
    damage = replace(damage, misplaced=misplaced_files(checkpoint, damage) if damage else {})
    damage = replace(damage, mixed_up=not damage.misplaced and _is_of_another_save(checkpoint, damage))
    return AuditReport(
        tensors=len(manifest.tensors),
        chunks=int((manifest.elements > 0).sum()),
        blobs=len(manifest.blobs),
        payload_bytes=total,
        unchecked=work.unchecked,
        fingerprints=work.fingerprints,
        findings=findings,
        notes=tuple(notes),
        diagnosis=diagnosis_of(checkpoint, damage.with_findings(findings)),
    )


def damage_in(path: Location, keys: Collection[str]) -> Damage | None:
    """Read tensors and items of a checkpoint, and return its damage with theirs; None if all checksums are right.

    Raises:
        SourceError, UnavailableError: they cannot be read, which does not tell what their bytes are.
    """
    with open_remains(path) as checkpoint:
        manifest, payloads = checkpoint.outline, checkpoint.payloads
        is_lost = np.zeros(len(manifest.columns), np.bool_)
        for tensor, start in zip(manifest.tensors, first_rows_of(manifest.tensors).tolist(), strict=False):
            if tensor.key in keys:
                [located] = checkpoint.locate([tensor])
                for row, chunk in enumerate(located.chunks, start):
                    is_lost[row] = _has_other_checksum(partial(check_chunk, payloads, located, chunk))
        blobs = [blob for blob in manifest.blobs if blob.key in keys]
        items = frozenset(blob.key for blob in blobs if _has_other_checksum(partial(check_blob, payloads, blob)))
        damage = damage_by_files(checkpoint)
    if not (is_lost.any() or items):
        return None
    return replace(damage, chunks=damage.chunks | is_lost, items=damage.items | items)


def _has_other_checksum(check: Callable[[], None]) -> bool:
    try:
        check()
    except ChecksumError:
        return True
    return False


_BATCHES = 1 << 11, 1 << 14
"""Chunks that are opened and distributed to threads at a time: few enough to have an object for each, and to show
progress soon."""


def _batches(tensors: Sequence[StateRecord]) -> Iterator[Sequence[StateRecord]]:
    batch: list[StateRecord] = []
    count, limit = 0, _BATCHES[0]
    for tensor in tensors:
        batch.append(tensor)
        count += len(tensor.chunks)
        if count >= limit:
            yield batch
            batch, count, limit = [], 0, min(2 * limit, _BATCHES[1])
    yield batch


@dataclass(frozen=True, slots=True)
class _ChunkResult:
    """The comparison of a chunk with its records.

    Attributes:
        share: in the fingerprint; None if the chunk cannot be read.
        nonfinite: how many elements are infinite or NaN.
        faults: the kind and the reason of each.
    """

    share: int | None
    nonfinite: int = 0
    faults: tuple[tuple[str, str], ...] = ()

    @property
    def is_lost(self) -> bool:
        """Whether elements are lost, and not only what other programs read around them."""
        return self.share is None or any(kind != "metadata" for kind, _ in self.faults)


@dataclass(slots=True)
class _Audit:
    """The comparison of all bytes with their records, and its findings so far.

    Attributes:
        lost_chunks: for each chunk of the manifest whether it is lost, at first by the files' sizes alone.
        disk_errors: of files that the disk cannot read, by name.
        row: of the next tensor's first chunk.
    """

    checkpoint: OpenCheckpoint
    advance: Callable[[int], None]
    pool: ThreadPoolExecutor
    lost_chunks: NDArray[np.bool_]
    disk_errors: dict[str, DiskError]
    row: int = 0
    unchecked: int = 0
    fingerprints: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def check_tensors(self, tensors: Sequence[StateRecord], jobs: int) -> None:
        """Compare the next tensors of the manifest with their records: small ones together, others by their chunks."""
        payloads = self.checkpoint.payloads
        # The elements of chunks are found in their items; those of chunks that are lost are not looked for.
        bounds = first_rows_of(tensors)
        is_lost = self.lost_chunks[self.row : self.row + bounds[-1]]
        kept = tensors
        if is_lost.any():
            spans = pairwise(bounds.tolist())
            kept = with_chunks(tensors, [np.flatnonzero(~is_lost[start:stop]).tolist() for start, stop in spans])
        located, errors = self.checkpoint.locate_each(kept)
        # Each thread examines the small ones of its part.
        parts = [located[len(located) * part // jobs : len(located) * (part + 1) // jobs] for part in range(jobs)]
        examine = partial(examine_small, payloads, whole_items=self.checkpoint.format is OWN)
        is_sound, shares = map(np.concatenate, zip(*self.pool.map(examine, parts), strict=True))
        # The shares of chunks sum up to the fingerprint, modulo 2**64.
        bounds = first_rows_of(located)
        num_unsound = np.diff(np.append(0, np.cumsum(~is_sound))[bounds]).tolist()
        sums = np.diff(np.append(np.uint64(0), np.cumsum(shares))[bounds]).tolist()
        for number, (tensor, part) in enumerate(zip(tensors, located, strict=True)):
            if tensor.fingerprint is None:
                self.unchecked += sum(chunk.box.numel > 0 and not payloads.has_checksum(chunk) for chunk in part.chunks)
            fingerprint: str | None = as_hex(sums[number])
            is_whole = num_unsound[number] == 0 and len(part.chunks) == len(tensor.chunks) and not tensor.coverage_fault
            if is_whole and tensor.fingerprint in (None, fingerprint):
                self.advance(tensor.boxes.elements * itemsize(tensor.dtype))
            else:
                rows = slice(bounds[number], bounds[number + 1])
                known = {index: int(share) for index, share in enumerate(shares[rows]) if is_sound[rows][index]}
                fingerprint = self._check_chunks(tensor, part, known, errors)
            if fingerprint is not None:
                self.fingerprints[tensor.key] = fingerprint
            self.row += len(tensor.chunks)

    def _check_chunks(
        self,
        tensor: StateRecord,
        located: StateRecord,
        known_shares: Mapping[int, int],
        errors: Mapping[tuple[str, Index], SourceError | DiskError],
    ) -> str | None:
        """Compare a tensor with its records; return its fingerprint, None if a chunk cannot be read.

        Args:
            located: the tensor with the chunks that are not known to be lost.
            known_shares: of sound ones of these.
        """

        def check(number: int) -> _ChunkResult:
            chunk = located.chunks[number]
            if number in known_shares:
                self.advance(chunk.box.numel * itemsize(tensor.dtype))
                return _ChunkResult(known_shares[number])
            try:
                if error := errors.get((tensor.key, chunk.box.lo)):
                    raise error
                return _check_chunk(self.checkpoint, tensor, chunk, self.advance)
            except DiskError as error:
                self.disk_errors[chunk.item.file] = error
                fault = "disk", str(error)
            except (SourceError, LayoutError) as error:
                fault = "unreadable", str(error)
            # A chunk without elements loses nothing with its file.
            return _ChunkResult(None, faults=(fault,)) if chunk.box.numel else _ChunkResult(0)

        is_lost = self.lost_chunks[self.row : self.row + len(tensor.chunks)]
        results = [_GONE] * len(tensor.chunks)
        remaining = np.flatnonzero(~is_lost).tolist()
        for number, result in zip(remaining, self.pool.map(check, range(len(remaining))), strict=True):
            results[number] = result
        shares = [result.share for result in results if result.share is not None]
        fingerprint = as_hex(combine(*shares)) if len(shares) == len(results) else None
        findings = list(_tensor_findings(tensor, results, fingerprint))
        self.findings += findings
        # Elements that agree with their fingerprint, or with all digests, are those that were written, whatever the
        # other says: one of the two records is damaged.
        if fingerprint is None or fingerprint != tensor.fingerprint:
            is_lost |= np.array([result.is_lost for result in results], np.bool_)
            has_digests = all(chunk.digest is not None for chunk in tensor.chunks if chunk.box.numel)
            if not (is_lost.any() or has_digests) and any(finding.kind == "fingerprint" for finding in findings):
                is_lost[:] = True  # one of its chunks, and nothing tells which
        return fingerprint

    def check_items(self, manifest: Manifest) -> Iterator[str]:
        """Yield the keys of damaged items."""
        for blob in manifest.blobs:
            try:
                check_blob(self.checkpoint.payloads, blob)
            except DiskError as error:
                self.disk_errors[blob.item.file] = error
                self.findings.append(Finding("disk", str(error), (blob.key,)))
                yield blob.key
            except (SourceError, LayoutError) as error:
                self.findings.append(Finding("blob", str(error), (blob.key,)))
                yield blob.key


_GONE = _ChunkResult(None, faults=(("unreadable", "its file is missing, was cut, or cannot be opened"),))


def _check_chunk(
    checkpoint: OpenCheckpoint, tensor: StateRecord, chunk: Chunk, advance: Callable[[int], None]
) -> _ChunkResult:
    """Compare a chunk with its digest, its CRC-32 and the bytes around it, in one pass over its elements."""
    payloads, sums, num_nonfinite = checkpoint.payloads, Sums(), 0
    # The CRC-32 of strided chunks is that of their bytes as they are stored.
    for words, origin in chunk_bands(payloads, tensor, chunk):
        sums.add(words, origin)
        num_nonfinite += count_nonfinite(words, tensor.dtype)
        advance(words.nbytes)
    checksum = sums.checksum if chunk.strides is None else crc32(payloads.bands(payload_of(tensor, chunk)))
    # Each record is compared, also where another one agrees: one of them may be damaged.
    faults = []
    try:
        payloads.check_item(chunk.item)
    except SourceError as error:
        faults.append(("crc32c", str(error)))
    if chunk.digest not in (None, sums.digest):
        faults.append(("digest", f"digest {sums.digest}, expected {chunk.digest}"))
    if chunk.crc32 not in (None, checksum):
        faults.append(("crc32", f"CRC-32 {checksum:08x}, expected {chunk.crc32:08x}"))
    if checkpoint.format is OWN and not _is_framed(payloads, tensor, chunk, checksum):
        faults.append(("metadata", "expected its elements in an item of torch.save, found other bytes around them"))
    return _ChunkResult(sums.share, num_nonfinite, tuple(faults))


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


def _tensor_findings(
    tensor: StateRecord, results: Sequence[_ChunkResult], fingerprint: str | None
) -> Iterator[Finding]:
    names = (tensor.key,)
    if fault := tensor.coverage_fault:
        yield Finding("coverage", fault, names)
    subjects = [f"tensor {tensor.key!r} box {chunk.box} in {chunk.item.file}" for chunk in tensor.chunks]
    for subject, result in zip(subjects, results, strict=True):
        for kind, reason in result.faults:
            yield Finding(kind, f"{subject}: {reason}", names)
    if fingerprint and tensor.fingerprint not in (None, fingerprint):
        message = f"tensor {tensor.key!r}: fingerprint {fingerprint}, expected {tensor.fingerprint}"
        yield Finding("fingerprint", message, names)
    places = [subject for subject, result in zip(subjects, results, strict=True) if result.nonfinite]
    if places:
        count = sum(result.nonfinite for result in results)
        message = f"{count} elements of tensor {tensor.key!r} are infinite or NaN, the first in {places[0]}"
        yield Finding("nonfinite", message, names)


def _is_of_another_save(checkpoint: OpenCheckpoint, damage: Damage) -> bool:
    """Return whether files are whole by DCP's description and their own checksums, and mostly not what ours says."""
    num_lost, num_stored = damage.by_file
    is_mostly_whole = (2 * num_lost <= num_stored)[num_stored > 0]
    if checkpoint.format is not OWN or damage.files or not num_lost.any() or is_mostly_whole.any():
        return False
    try:
        with OpenCheckpoint(checkpoint.path, DCP) as stock:
            for tensor in stock.locate(stock.outline.tensors):
                for number in np.flatnonzero(tensor.boxes.numel)[:1].tolist():
                    check_chunk(stock.payloads, tensor, tensor.chunks[number])
            return not stock.faults
    except (SourceError, LayoutError):
        return False


# --- descriptions -----------------------------------------------------------------------------------------------------


def _description_findings(checkpoint: OpenCheckpoint) -> Iterator[Finding]:
    """Yield the damage that descriptions show when they are read."""
    if checkpoint.format is DCP:
        # DCP's own planner makes keys by joining paths.  Where most are such, the others are damaged.
        entries: tuple[StateRecord | Blob, ...] = (*checkpoint.outline.tensors, *checkpoint.outline.blobs)
        paths = {entry.key: ".".join(map(str, entry.path)) for entry in entries}
        strange = [key for key, path in paths.items() if path != key]
        for key in strange if 2 * len(strange) < len(entries) else ():
            message = f"{key!r} in {METADATA_FILE} has the path of {paths[key]!r}; expected the same"
            yield Finding("key", message, (key,))
    items = items_beside(checkpoint.path)
    digest = checkpoint.items_digest
    if digest is not None and is_there(items) and (actual := xxh3_128([read_text_file(items)])) != digest:
        yield Finding("items", f"{items}: digest {actual}, expected {digest}: it is damaged, or of another save")


def _against_integrity(path: Location) -> Iterator[Finding]:
    """Compare whole files with the SHA-256 that Megatron records in ``integrity.json`` if ``verify_integrity`` is set.

    Source: ``save_integrity_manifest`` of ``megatron/core/dist_checkpointing/validation.py`` (August 2026).
    """
    listing = path / INTEGRITY_FILE
    if not is_file(listing):
        return
    try:
        recorded = json.loads(read_text_file(listing))
        files: dict[str, object] = dict(recorded["files"]) if recorded["algorithm"] == "sha256" else {}
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        yield Finding("integrity", f"{listing}: expected JSON with algorithm and files, found other data ({error})")
        return
    # A name comes from outside, and may lead out of the checkpoint.
    for name, expected in sorted(files.items()):
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
