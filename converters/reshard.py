"""Resharding a checkpoint without a training run: one plan per tensor, executed as streamed file IO.

`plan_job` decides everything that does not need the data: which boxes go into which file, and where in it.  `run`
checks the source, fills the files front to back in bands of bounded size, fingerprints the bytes as they pass,
compares with the source's fingerprints, and publishes.  No tensor is ever deserialised.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from .. import record
from ..box import Box
from ..errors import DestinationError, Interrupted, SourceError, about
from ..fingerprint import as_hex, combine, fingerprint
from ..layouts.mesh import row_layout
from ..plan import Copy, make_plan
from ..record import Blob, Chunk, Extent, Manifest, StateRecord
from ..store import directory, torch_zip
from ..store.band import bands, within
from ..store.dtypes import DType, dtype
from ..store.payload import Payloads, check_blob, check_chunk, crc32, elements, payload_of, xxh3_128
from .journal import Done, Journal, Sum, discard

ALIGNMENT = 64
"""Items start at multiples of this many bytes in a file, so that payloads can be mapped as arrays."""

LARGEST_BAND = 4 << 20
"""Bytes moved at a time, at most: few enough to stay in cache from the copy to the checksums to the write."""

Progress = Callable[[int], None]
"""Told the bytes that have been checked or written since the last call; called from several threads."""


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor item to write: where it goes (``chunk``) and the copies from source chunks that make it."""

    tensor: StateRecord
    chunk: Chunk
    copies: tuple[Copy, ...]


@dataclass(frozen=True, slots=True)
class TargetFile:
    """One file to write.  ``blobs`` pairs what is in the source with where it goes.  ``length`` in bytes."""

    name: str
    blobs: tuple[tuple[Blob, Blob], ...]
    items: tuple[Item, ...]
    length: int


@dataclass(frozen=True, slots=True)
class Job:
    """Everything about a reshard that does not need the data."""

    source: Path
    manifest: Manifest
    ranks: int
    files: tuple[TargetFile, ...]

    @property
    def bytes_to_check(self) -> int:
        """Payload of the source: all of it is checked before it is used."""
        return sum(c.payload.length for t in self.manifest.tensors for c in t.chunks if c.payload)

    @property
    def bytes_to_write(self) -> int:
        """Length of all files."""
        return sum(file.length for file in self.files)

    @property
    def payload_to_write(self) -> int:
        """Bytes of elements in them."""
        return sum(payload_of(item.tensor, item.chunk).length for file in self.files for item in file.items)

    def digest(self) -> str:
        """Equal for two jobs that would write the same files from the same source."""
        return hashlib.blake2b(repr((self.manifest, self.files)).encode(), digest_size=16).hexdigest()


def plan_job(source: Path, ranks: int) -> Job:
    """Cut every tensor of a checkpoint by rows over ``ranks`` ranks; one file a rank, other items in the first.

    Raises:
        SourceError: the source cannot be read.
        LayoutError: a tensor of it has a hole or an overlap.
    """
    manifest = directory.read(source, payloads=True)
    items: list[list[tuple[StateRecord, Box, tuple[Copy, ...]]]] = [[] for _ in range(ranks)]
    for tensor in manifest.tensors:
        with about(tensor.key):
            target = row_layout(tensor.shape, ranks)
            copies = make_plan(tensor.chunk_layout(), target).copies
        for rank, fragments in target.by_buffer().items():
            assert isinstance(rank, int)
            if tensor.shape or rank == 0:  # a 0-d tensor lies on every rank; one of them writes it
                here = tuple(copy for copy in copies if copy.target.buffer == rank)
                items[rank] += [(tensor, fragment.box, here) for fragment in fragments]
    files = (_lay_out(f"__{rank}_0.distcp", manifest.blobs if rank == 0 else (), items[rank]) for rank in range(ranks))
    return Job(source, manifest, ranks, tuple(file for file in files if file.length))


def run(
    job: Job,
    destination: Path,
    *,
    memory: int = 256 << 20,
    threads: int = 2,
    resume: bool = False,
    progress: Progress = lambda count: None,
) -> Manifest:
    """Do a job: the destination appears whole, or not at all.

    Args:
        memory: bytes of buffers, all threads together.
        resume: go on where an interrupted run of the same job stopped.

    Raises:
        DestinationError: the destination exists, is inside the source, or cannot be written.
        SourceError: the source is damaged, or changed meanwhile.
        Interrupted: Ctrl-C; finished files are kept beside the destination for ``resume``.
    """
    directory.refuse_existing(destination)
    if job.source.resolve() in destination.resolve().parents:
        raise DestinationError(f"{destination} lies inside the source {job.source}; choose a place outside of it")
    staged = destination.parent / f".{destination.name}.reshard.tmp"
    before = _state_of(job)
    stop = threading.Event()
    try:
        with Journal(staged, job.digest(), resume) as journal, Payloads(job.source) as payloads:
            mover = _Mover(payloads, staged, max(memory // (2 * threads), 1 << 16), stop, progress)
            _in_threads(mover, job, journal, threads, stop)
        if _state_of(job) != before:
            raise SourceError(f"{job.source} changed while it was read; nothing was published")
        manifest = _describe(job, journal)
        for leftover in (record.FILE, ".metadata"):  # of a run that was killed between here and the end
            (staged / leftover).unlink(missing_ok=True)
        directory.write_manifest(manifest, staged)
        (staged / Journal.NAME).unlink()
        directory.publish(staged, destination)
        return manifest
    except OSError as error:
        discard(staged)
        raise DestinationError(f"cannot write {destination}: {error}") from error
    except SourceError:
        discard(staged)
        raise


def _lay_out(
    name: str, blobs: tuple[Blob, ...], parts: list[tuple[StateRecord, Box, tuple[Copy, ...]]]
) -> TargetFile:
    """Items end to end, each aligned; blobs first, as DCP does."""
    at = 0
    moved = []
    for blob in blobs:
        moved.append((blob, dataclasses.replace(blob, item=Extent(name, at, blob.item.length))))
        at = _aligned(at + blob.item.length)
    items = []
    for tensor, box, copies in parts:
        frame = torch_zip.frame(tensor.dtype, box.shape)
        item = Extent(name, at, frame.length)
        payload = Extent(name, at + frame.payload_offset, frame.payload_length)
        items.append(Item(tensor, Chunk(box, item, payload), copies))
        at = _aligned(item.end)
    return TargetFile(name, tuple(moved), tuple(items), at)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _in_threads(mover: _Mover, job: Job, journal: Journal, threads: int, stop: threading.Event) -> None:
    """Check every source chunk, then write every file that the journal does not have."""
    chunks = [(tensor, chunk) for tensor in job.manifest.tensors for chunk in tensor.chunks if chunk.box.numel]
    todo = [file for file in job.files if file.name not in journal.done or not mover.is_intact(file, journal)]
    with ThreadPoolExecutor(threads) as pool:
        try:
            for _ in pool.map(lambda found: mover.check(*found), chunks):
                pass
            for file, written in zip(todo, pool.map(mover.write, todo), strict=True):
                journal.add(file.name, written)
        except KeyboardInterrupt:
            stop.set()
            raise Interrupted(
                f"stopped with {len(journal.done)} of {len(job.files)} files written; run the same command with "
                f"--resume to go on, or remove {mover.staged}"
            ) from None
        except BaseException:
            stop.set()
            raise


class _Mover:
    """Moves bytes: the only part that touches data."""

    def __init__(
        self, payloads: Payloads, staged: Path, band_bytes: int, stop: threading.Event, progress: Progress
    ) -> None:
        self.staged = staged
        self._payloads = payloads
        self._band_bytes = min(band_bytes, LARGEST_BAND)
        self._stop = stop
        self._progress = progress

    def check(self, tensor: StateRecord, chunk: Chunk) -> None:
        """Raises `SourceError` if a source chunk is not what was recorded of it."""
        self._go_on()
        check_chunk(self._payloads, tensor, chunk)
        self._progress(payload_of(tensor, chunk).length)

    def write(self, file: TargetFile) -> Done:
        """One file, synced.  The space is taken first, so that a full disk is met before any work."""
        handle = os.open(self.staged / file.name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            os.posix_fallocate(handle, 0, file.length)
            done = Done(
                tuple(self._write_blob(handle, *pair) for pair in file.blobs),
                tuple(self._write_item(handle, item) for item in file.items),
            )
            os.fsync(handle)
        finally:
            os.close(handle)
        return done

    def is_intact(self, file: TargetFile, journal: Journal) -> bool:
        """Whether a file that the journal claims still holds what was written."""
        done = journal.done[file.name]
        extents = [target.item for _, target in file.blobs] + [payload_of(i.tensor, i.chunk) for i in file.items]
        digests = [*done.blobs, *(item.digest for item in done.items)]
        try:
            with Payloads(self.staged) as mine:
                return [xxh3_128(mine.bands(extent)) for extent in extents] == digests
        except SourceError:  # gone, or too short
            return False

    def _write_blob(self, handle: int, source: Blob, target: Blob) -> str:
        raw = check_blob(self._payloads, source)
        _pwrite(handle, raw, target.item.offset)
        return xxh3_128([raw])

    def _write_item(self, handle: int, item: Item) -> Sum:
        kind = dtype(item.tensor.dtype)
        frame = torch_zip.frame(item.tensor.dtype, item.chunk.box.shape)
        at = item.chunk.item.offset
        _pwrite(handle, frame.head, at)
        at += frame.payload_offset
        digest, crc, share = xxhash.xxh3_128(), 0, 0
        for band in bands(item.chunk.box, max(self._band_bytes // kind.itemsize, 1)):
            self._go_on()
            for box in band.boxes:
                words = self._assemble(item, box, kind)
                raw = memoryview(words.reshape(-1).view(np.uint8))
                digest.update(raw)
                crc = crc32([raw], crc)
                share = combine(share, fingerprint(words, box.lo + (0,) * (words.ndim - box.ndim)))
                _pwrite(handle, raw, at)
                at += raw.nbytes
                self._progress(raw.nbytes)
        _pwrite(handle, frame.tail(crc), at)
        for copy in item.copies:
            self._payloads.release(_source(item, copy).item)
        return Sum(digest.hexdigest(), crc, share)

    def _assemble(self, item: Item, box: Box, kind: DType) -> NDArray[Any]:
        """The elements of ``box``, dense, from the source chunks that hold them."""
        halves = (2,) if kind.itemsize > 8 else ()
        words = np.empty((*box.shape, *halves), kind.bits)
        for copy in item.copies:
            common = copy.box & box
            if common is not None:
                chunk = _source(item, copy)
                source = elements(self._payloads, item.tensor, chunk)
                words[within(common, box.lo)] = source[within(common, chunk.box.lo)]
        return words

    def _go_on(self) -> None:
        if self._stop.is_set():
            raise Interrupted("stopped")


def _source(item: Item, copy: Copy) -> Chunk:
    return item.tensor.chunks[int(copy.source.buffer)]


def _pwrite(handle: int, data: bytes | memoryview, at: int) -> None:
    left = memoryview(data)
    while left:
        written = os.pwrite(handle, left, at)
        left, at = left[written:], at + written


def _state_of(job: Job) -> list[tuple[str, int, int]]:
    """Size and time of change of every source file, to see that nobody wrote into it meanwhile."""
    names = {c.item.file for t in job.manifest.tensors for c in t.chunks} | {b.item.file for b in job.manifest.blobs}
    found = []
    for name in sorted(names):
        state = (job.source / name).stat()
        found.append((name, state.st_size, state.st_mtime_ns))
    return found


def _describe(job: Job, journal: Journal) -> Manifest:
    """The manifest of what was written, after comparing the fingerprints of both sides.

    Raises:
        SourceError: the moved bytes are not those that the source's manifest describes.
    """
    chunks: dict[str, list[Chunk]] = {tensor.key: [] for tensor in job.manifest.tensors}
    shares = dict.fromkeys(chunks, 0)
    blobs = []
    for file in job.files:
        done = journal.done[file.name]
        blobs += [dataclasses.replace(to, digest=d) for (_, to), d in zip(file.blobs, done.blobs, strict=True)]
        for item, passed in zip(file.items, done.items, strict=True):
            key = item.tensor.key
            chunks[key].append(dataclasses.replace(item.chunk, digest=passed.digest, crc32=passed.crc32))
            shares[key] = combine(shares[key], passed.share)
    mesh = {"algorithm": "mesh", "version": 1, "mesh": [job.ranks], "axes": ["dp"], "ranks": list(range(job.ranks))}
    tensors = []
    for tensor in job.manifest.tensors:
        found = as_hex(shares[tensor.key])
        if tensor.fingerprint not in (None, found):
            raise SourceError(
                f"tensor {tensor.key!r}: the moved bytes have fingerprint {found}, the source's manifest says "
                f"{tensor.fingerprint}; nothing was published"
            )
        layout = {**mesh, "placements": ["Shard(dim=0)"]} if tensor.shape else None
        tensors.append(
            dataclasses.replace(tensor, chunks=tuple(chunks[tensor.key]), fingerprint=found, layout=layout)
        )
    step = {"program": f"muonckpt {version('muonckpt')}", "source": job.source.name, "mesh": {"dp": job.ranks}}
    history = [*job.manifest.provenance.get("resharded", []), step]
    return Manifest(tuple(tensors), tuple(blobs), {**job.manifest.provenance, "resharded": history})
