"""Resharding a checkpoint without a training run: one plan per tensor, executed as streamed file IO.

`plan_job` decides everything that does not need the data: which boxes go into which file, and where in it.  `run`
checks the source, fills the files front to back in bands of bounded size, fingerprints the bytes as they pass,
compares with the source's fingerprints, and publishes.  No tensor is ever deserialised.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from .. import record
from ..box import Box
from ..errors import DestinationError, Interrupted, MuonckptError, SourceError, about
from ..fingerprint import as_hex, combine
from ..layout import Buffer
from ..layouts.mesh import row_layout
from ..plan import Copy, make_plan
from ..record import Blob, Chunk, Extent, Manifest, StateRecord
from ..store import directory
from ..store.payload import Payloads
from ..store.stored_zip import ALIGNMENT
from .journal import Journal
from .mover import Item, Mover, Progress, TargetFile, frame_of


@dataclass(frozen=True, slots=True)
class Job:
    """Everything about a reshard that does not need the data.  ``state`` tells whether the source has changed since."""

    source: Path
    manifest: Manifest
    state: tuple[object, ...]
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
        return sum(file.payload for file in self.files)

    def digest(self) -> str:
        """Equal for two jobs that would write the same files from the same source."""
        whole = hashlib.blake2b(self.manifest.to_json().encode(errors="surrogatepass"), digest_size=16)
        whole.update(repr(self.state).encode())
        for file in self.files:
            targets = [(item.tensor.key, item.chunk) for item in file.items]
            whole.update(repr((file.name, file.length, targets)).encode(errors="surrogatepass"))
        return whole.hexdigest()


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
            target = row_layout(tensor.shape, ranks if tensor.shape else 1)  # one rank writes what has no rows
            plan = make_plan(tensor.chunk_layout(), target)
        copies: defaultdict[Buffer, list[Copy]] = defaultdict(list)
        for copy in plan.copies:
            copies[copy.target.buffer].append(copy)
        for fragment in target.fragments:
            rank = fragment.place.buffer
            assert isinstance(rank, int)
            items[rank].append((tensor, fragment.box, tuple(copies[rank])))
    files = (_lay_out(f"__{rank}_0.distcp", manifest.blobs if rank == 0 else (), items[rank]) for rank in range(ranks))
    return Job(source, manifest, _state_of(source, manifest), ranks, tuple(file for file in files if file.length))


def check_destination(source: Path, destination: Path) -> None:
    """Raises:
    DestinationError: something is there already, or it lies inside the source.
    """
    directory.refuse_existing(destination)
    if source.resolve() in destination.resolve().parents:
        raise DestinationError(f"{destination} lies inside the source {source}; choose a place outside of it")


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
    check_destination(job.source, destination)
    journal = Journal(destination, job.digest(), resume)
    stop = threading.Event()
    try:
        with journal, Payloads(job.source) as payloads:
            try:
                mover = Mover(payloads, journal.staged, max(memory // (2 * threads), 1 << 16), stop, progress)
                _in_threads(mover, job, journal, threads, stop)
                return _publish(job, journal, destination)
            except OSError as error:
                journal.discard()
                raise DestinationError(f"cannot write {destination}: {error}") from error
            except MuonckptError:
                journal.discard()
                raise
    except KeyboardInterrupt:
        raise Interrupted(
            f"stopped with {len(journal.done)} of {len(job.files)} files written; run the same command with "
            f"--resume to go on, or remove {journal.staged}"
        ) from None


def _publish(job: Job, journal: Journal, destination: Path) -> Manifest:
    """Describe the finished files and give them their name."""
    if not _is_unchanged(job):
        raise SourceError(f"{job.source} changed while it was read; nothing was published")
    manifest = _describe(job, journal)
    for leftover in (record.FILE, ".metadata"):  # of a run that was killed between here and the end
        (journal.staged / leftover).unlink(missing_ok=True)
    directory.write_manifest(manifest, journal.staged)
    directory.publish(journal.staged, destination)
    journal.forget()
    return manifest


def _lay_out(name: str, blobs: tuple[Blob, ...], parts: list[tuple[StateRecord, Box, tuple[Copy, ...]]]) -> TargetFile:
    """Items end to end, each aligned; blobs first, as DCP does."""
    at = 0
    moved = []
    for blob in blobs:
        moved.append((blob, dataclasses.replace(blob, item=Extent(name, at, blob.item.length))))
        at = _aligned(at + blob.item.length)
    items = []
    for tensor, box, copies in parts:
        frame = frame_of(tensor.dtype, box.shape)
        item = Extent(name, at, frame.length)
        payload = Extent(name, at + frame.payload_offset, frame.payload_length)
        items.append(Item(tensor, Chunk(box, item, payload), copies))
        at = _aligned(item.end)
    return TargetFile(name, tuple(moved), tuple(items), at)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _in_threads(mover: Mover, job: Job, journal: Journal, threads: int, stop: threading.Event) -> None:
    """Check every source chunk, then write every file that is not finished."""
    chunks = [(tensor, chunk) for tensor in job.manifest.tensors for chunk in tensor.chunks if chunk.box.numel]
    with ThreadPoolExecutor(threads) as pool:
        try:
            for _ in pool.map(lambda found: mover.check(*found), chunks):
                pass
            finished = pool.map(lambda file: mover.is_finished(file, journal.done.get(file.name)), job.files)
            todo = [file for file, is_finished in zip(job.files, finished, strict=True) if not is_finished]
            for file, written in zip(todo, pool.map(mover.write, todo), strict=True):
                journal.add(file.name, written)
        except BaseException:
            stop.set()
            raise


def _state_of(source: Path, manifest: Manifest) -> tuple[object, ...]:
    """Which files the source has, how long they are and when they were changed.

    Raises:
        SourceError: one is missing.
    """
    names = {c.item.file for t in manifest.tensors for c in t.chunks} | {b.item.file for b in manifest.blobs}
    found = []
    for name in sorted(names):
        try:
            state = (source / name).lstat()
        except OSError as error:
            raise SourceError(f"cannot read {source / name}: {error.strerror}") from error
        found.append((name, state.st_ino, state.st_size, state.st_mtime_ns))
    return tuple(found)


def _is_unchanged(job: Job) -> bool:
    try:
        return _state_of(job.source, job.manifest) == job.state
    except SourceError:
        return False


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
        layout = {**mesh, "placements": ["Shard(0)"]} if tensor.shape else None
        tensors.append(dataclasses.replace(tensor, chunks=tuple(chunks[tensor.key]), fingerprint=found, layout=layout))
    source = job.source.resolve().name
    step = {"program": f"muonckpt {version('muonckpt')}", "source": source, "mesh": {"dp": job.ranks}}
    history = [*job.manifest.provenance.get("resharded", []), step]
    return Manifest(tuple(tensors), tuple(blobs), {**job.manifest.provenance, "resharded": history})
