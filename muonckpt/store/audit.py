"""Auditing a checkpoint: is every element there, once, and the bytes those that were written?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from isal import isal_zlib
from numpy.typing import NDArray

from .. import record
from ..errors import LayoutError, MuonckptError
from ..fingerprint import as_hex, combine, fingerprint
from ..record import Blob, Chunk, Manifest, StateRecord
from . import dcp, directory, stored_zip
from .band import bands
from .dtypes import dtype
from .payload import BAND, Payloads, check_blob, payload_of

Progress = Callable[[int], None]
"""Told the bytes that have been read since the last call; called from several threads."""

# Exponent bits: all ones mean infinity or NaN (IEEE 754 and bfloat16; the OCP 8-bit format that has infinities).
_EXPONENT = {"float64": 0x7FF << 52, "float32": 0xFF << 23, "float16": 0x1F << 10, "bfloat16": 0xFF << 7}
_EXPONENT |= {"float8_e5m2": 0x1F << 2}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong.  ``kind`` is one word for programs; ``message`` says what, where, expected and found."""

    kind: str
    key: str | None
    message: str


@dataclass(frozen=True, slots=True)
class Report:
    """What an audit saw.  ``unchecked`` chunks have neither digest nor CRC-32; ``notes`` are no faults."""

    tensors: int
    chunks: int
    blobs: int
    payload_bytes: int
    unchecked: int
    fingerprints: dict[str, str]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _ChunkResult:
    share: int
    nonfinite: int
    findings: tuple[Finding, ...]


def payload_bytes(manifest: Manifest) -> int:
    """Bytes that an audit of this checkpoint reads."""
    return sum(chunk.box.numel * dtype(t.dtype).itemsize for t in manifest.tensors for chunk in t.chunks)


def audit(path: Path, progress: Progress = lambda count: None, threads: int = 2) -> Report:
    """Check coverage, bounds, digests, checksums, fingerprints and values of a checkpoint with or without a manifest.

    Findings are collected, not raised.

    Raises:
        SourceError: the metadata cannot be read at all.
    """
    manifest = directory.read(path, payloads=True)
    findings: list[Finding] = list(_against_metadata(path, manifest))
    notes = [f"{name} belongs to no item of this checkpoint" for name in _orphans(path, manifest)]
    fingerprints = {}
    jobs = [(tensor, chunk) for tensor in manifest.tensors for chunk in tensor.chunks if chunk.box.numel]
    with Payloads(path) as payloads, ThreadPoolExecutor(threads) as pool:
        results = pool.map(lambda job: _audit_chunk(payloads, *job, progress), jobs)
        by_key: defaultdict[str, list[_ChunkResult]] = defaultdict(list)
        for (tensor, _), result in zip(jobs, results, strict=True):
            by_key[tensor.key].append(result)
        for tensor in manifest.tensors:
            findings += _audit_tensor(tensor, by_key[tensor.key])
            fingerprints[tensor.key] = as_hex(combine(*(result.share for result in by_key[tensor.key])))
        for blob in manifest.blobs:
            findings += _audit_blob(payloads, blob)
    return Report(
        tensors=len(manifest.tensors),
        chunks=len(jobs),
        blobs=len(manifest.blobs),
        payload_bytes=payload_bytes(manifest),
        unchecked=sum(chunk.digest is None and chunk.crc32 is None for _, chunk in jobs),
        fingerprints=fingerprints,
        findings=tuple(findings),
        notes=tuple(notes),
    )


def nonfinite(words: NDArray[Any], name: str) -> int:
    """How many elements, given as raw bits, are infinite or NaN; 0 for types that have neither."""
    parts = {"complex64": "float32", "complex128": "float64"}.get(name, name)
    if parts not in _EXPONENT:
        return 0
    flat = words.reshape(-1).view(dtype(parts).bits)
    if parts in ("float32", "float64"):  # numpy's own test is vectorised; the other types it does not know
        return int(flat.size - np.count_nonzero(np.isfinite(flat.view(parts))))
    mask = flat.dtype.type(_EXPONENT[parts])
    return int(np.count_nonzero((flat & mask) == mask))


def _audit_chunk(payloads: Payloads, tensor: StateRecord, chunk: Chunk, progress: Progress) -> _ChunkResult:
    try:
        extent = payload_of(tensor, chunk)
        raw = payloads.view(extent)
    except MuonckptError as error:
        return _ChunkResult(0, 0, (Finding("unreadable", tensor.key, str(error)),))
    kind = dtype(tensor.dtype)
    digest, crc32, share, bad = xxhash.xxh3_128(), 0, 0, 0
    for band in bands(chunk.box, BAND // kind.itemsize):
        part = raw[band.start * kind.itemsize : band.stop * kind.itemsize]
        digest.update(part)
        crc32 = isal_zlib.crc32(part, crc32)
        words = np.frombuffer(part, kind.bits)
        bad += nonfinite(words, tensor.dtype)
        at = 0
        per_element = max(kind.itemsize // 8, 1)
        for box in band.boxes:
            here = words[at : at + box.numel * per_element]
            shape = box.shape if per_element == 1 else (*box.shape, per_element)
            share = combine(share, fingerprint(here.reshape(shape), box.lo + (0,) * (len(shape) - box.ndim)))
            at += here.size
        progress(len(part))
    payloads.release(extent)
    where = f"tensor {tensor.key!r} box {chunk.box} in {chunk.item.file}"
    findings = []
    if chunk.digest not in (None, digest.hexdigest()):
        findings.append(Finding("digest", tensor.key, f"{where}: digest {digest.hexdigest()}, expected {chunk.digest}"))
    if chunk.crc32 not in (None, crc32):
        findings.append(Finding("crc32", tensor.key, f"{where}: CRC-32 {crc32:08x}, expected {chunk.crc32:08x}"))
    return _ChunkResult(share, bad, tuple(findings))


def _audit_tensor(tensor: StateRecord, results: list[_ChunkResult]) -> Iterator[Finding]:
    try:
        tensor.chunk_layout()
    except LayoutError as error:
        yield Finding("coverage", tensor.key, str(error))
    for result in results:
        yield from result.findings
    found = as_hex(combine(*(result.share for result in results)))
    if tensor.fingerprint not in (None, found):
        message = f"tensor {tensor.key!r}: fingerprint {found}, expected {tensor.fingerprint}"
        yield Finding("fingerprint", tensor.key, message)
    bad = sum(result.nonfinite for result in results)
    if bad:
        yield Finding("nonfinite", tensor.key, f"tensor {tensor.key!r}: {bad} elements are infinite or NaN")


def _audit_blob(payloads: Payloads, blob: Blob) -> Iterator[Finding]:
    """By its digest if there is one, and by the checksums of the zip archive that it is."""
    try:
        raw = check_blob(payloads, blob)
        for member in stored_zip.read_members(lambda at, count: raw[at : at + count], 0, len(raw)):
            crc32 = isal_zlib.crc32(raw[member.offset : member.offset + member.length])
            if member.crc32 not in (None, crc32):
                message = f"item {blob.key!r} in {blob.item.file}: CRC-32 of {member.name!r} is {crc32:08x}"
                yield Finding("crc32", blob.key, f"{message}, expected {member.crc32:08x}")
    except MuonckptError as error:
        yield Finding("blob", blob.key, str(error))


def _against_metadata(path: Path, manifest: Manifest) -> Iterator[Finding]:
    """What stock programs would read must be what the manifest describes."""
    if not (path / record.FILE).exists():
        return
    try:
        stock = dcp.read(path, payloads=True)
    except MuonckptError as error:
        yield Finding("metadata", None, f"{path / '.metadata'}: {error}")
        return
    ours = {key: (kind, where) for key, kind, where in _places(manifest)}
    theirs = {key: (kind, where) for key, kind, where in _places(stock)}
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            yield Finding("metadata", key, f"the manifest and .metadata disagree about {key!r}")


def _places(manifest: Manifest) -> Iterator[tuple[str, Any, Any]]:
    for tensor in manifest.tensors:
        places = frozenset((chunk.box, chunk.payload) for chunk in tensor.chunks if chunk.box.numel)
        yield tensor.key, (tensor.dtype, tensor.shape), places
    for blob in manifest.blobs:
        yield blob.key, "blob", blob.item


def _orphans(path: Path, manifest: Manifest) -> list[str]:
    used = {chunk.item.file for tensor in manifest.tensors for chunk in tensor.chunks}
    used |= {blob.item.file for blob in manifest.blobs} | {record.FILE, ".metadata"}
    return sorted(file.name for file in path.iterdir() if file.name not in used and file.stat().st_size)
