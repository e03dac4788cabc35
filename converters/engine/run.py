"""Resharding a checkpoint without a training run: one plan per tensor, executed as streamed file IO.

`make_job` decides everything that does not need the data (:mod:`.job`).  `run` checks the source, fills the files
front to back in bands of bounded size, fingerprints the bytes as they pass, compares with the source's fingerprints,
and publishes.  No tensor is ever deserialised.  Several processes may share a job (:mod:`.crew`); one alone is a crew
of one.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

from ...errors import DestinationError, Interrupted, SourceError
from ...fingerprint import as_hex, combine
from ...record import Chunk, Extent, Manifest, StateRecord
from ...store.io import publish
from ...store.io.gc_paused import not_collecting
from ...store.io.location import Location, check_memory
from ...store.io.regular import open_regular
from .crew import PATIENCE, Crew
from .job import Job, check_destination, state_of
from .journal import Done
from .mover import Mover, Progress
from .output_files import OutputFile
from .workers import Worker

THREADS = 3
"""By default.  On two cores, some go on while another waits for the disk: rows of 1 GB took 0.84 to 0.95 of the time of
two threads (medians of alternating runs), and no less with four."""

_SLICE = 0.2
"""Seconds of waiting in a row: a signal that comes just before a wait begins is noticed only when it ends."""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """What one worker does of a job: the chunks of the source that it checks, the files that it sees to."""

    chunks: tuple[tuple[StateRecord, Chunk], ...]
    files: tuple[OutputFile, ...]


def part_of(job: Job, worker: Worker, finished: Collection[str] = ()) -> Part:
    """A worker's part: an equal share, by bytes, of the finished files, to look through, and of those to be written.

    Each chunk is checked by every worker that copies from it; what nobody copies from, by the leader.
    """
    mine: set[str] = set()
    for is_finished in (True, False):
        files = [file for file in job.files if (file.name in finished) is is_finished]
        mine.update(file.name for file in files[worker.part([file.length for file in files])])
    checked = _sources(file for file in job.files if file.name in mine)
    if worker.leads:
        others = _sources(file for file in job.files if file.name not in mine)
        checked |= {chunk.item for tensor in job.manifest.tensors for chunk in tensor.chunks} - others
    chunks = ((tensor, chunk) for tensor in job.manifest.tensors for chunk in tensor.chunks if chunk.box.numel)
    return Part(
        tuple(found for found in chunks if found[1].item in checked),
        tuple(file for file in job.files if file.name in mine),
    )


def _sources(files: Iterable[OutputFile]) -> set[Extent]:
    """The items of the source that these files are copied from."""
    return {source for file in files for chunk in file.chunks for source in chunk.sources}


def run(
    job: Job,
    destination: Location,
    *,
    memory: int = 256 << 20,
    threads: int = THREADS,
    resume: bool = False,
    verify: bool = False,
    progress: Progress = lambda count: None,
    worker: Worker | None = None,
    patience: float = PATIENCE,
) -> Manifest | None:
    """Do a job, or a worker's part of it: the destination appears whole, or not at all.

    Args:
        memory: bytes of buffers, all threads together.
        resume: go on where an interrupted run of the same job stopped, with however many workers.
        verify: read every file back before anything is published.
        worker: which one this is of several processes that do the same job; all must see its source and destination.
            None: there is only this one.
        patience: seconds without a sign of life after which another worker counts as lost.

    Returns:
        The manifest of what was published, or None if this worker does not lead: its leader has then published.

    Raises:
        DestinationError: the destination exists, is inside the source, or cannot be written.
        SourceError: the source is damaged, or changed meanwhile.
        Interrupted: Ctrl-C, or a worker was lost; finished files are kept beside the destination for ``resume``.
        MuonckptError: another worker failed; the kind of error that it met.
    """
    check_destination(job.source.path, destination, job.container)
    worker, stop = worker or Worker(), threading.Event()
    check_memory(job.source.path, destination, max((file.length for file in job.files), default=0), threads, memory)
    crew = Crew(destination, job.container.staged(destination), job.digest(), worker, resume, patience, stop)
    try:
        with crew, _writing(destination), job.source.payloads as payloads:
            part = part_of(job, worker, crew.history)
            band_bytes = max(memory // (2 * threads), 1 << 16)
            mover = Mover(payloads, crew.staged, part.chunks, band_bytes, stop, progress)
            _work(mover, part.files, crew, threads, verify, stop)
            crew.finish()
            return _publish(job, crew, destination) if worker.leads else None
    except KeyboardInterrupt:
        raise Interrupted(f"stopped with {crew.known} of {len(job.files)} files written; {crew.way_out}") from None


@contextmanager
def _writing(destination: Location) -> Iterator[None]:
    """Errors of the file system are those of the destination."""
    try:
        yield
    except OSError as error:
        raise DestinationError(f"cannot write {destination}: {error}") from error


def _work(
    mover: Mover, files: Sequence[OutputFile], crew: Crew, threads: int, verify: bool, stop: threading.Event
) -> None:
    """Write those of the files that are not finished, and check the mover's chunks; who returns has seen all whole."""

    def is_finished(file: OutputFile) -> bool:
        return mover.is_finished(file, crew.history.get(file.name))

    with ThreadPoolExecutor(threads) as pool:
        try:
            kept = {file.name for file, whole in _each(pool, is_finished, files) if whole}
            for name in kept:
                crew.add(name, crew.history[name])
            for file, done in _each(pool, mover.write, [file for file in files if file.name not in kept]):
                crew.add(file.name, done)
            for _ in _each(pool, mover.check, list(mover.unchecked)):  # of the files that were kept
                pass
            if verify:
                written = crew.gathered()
                for _ in _each(pool, lambda file: mover.verify(file, written[file.name]), files):
                    pass
        except BaseException:
            stop.set()
            raise


T = TypeVar("T")
R = TypeVar("R")


def _each(pool: ThreadPoolExecutor, function: Callable[[T], R], things: Iterable[T]) -> Iterator[tuple[T, R]]:
    """Things and what a function makes of them, as they are finished."""
    finished: SimpleQueue[Future[R]] = SimpleQueue()
    futures = {pool.submit(function, thing): thing for thing in things}
    for future in futures:
        future.add_done_callback(finished.put)
    for _ in range(len(futures)):
        future = _next(finished)
        yield futures[future], future.result()


def _next(queue: SimpleQueue[T]) -> T:
    while True:
        with suppress(Empty):
            return queue.get(timeout=_SLICE)


@not_collecting()
def _publish(job: Job, crew: Crew, destination: Location) -> Manifest:
    """Describe the finished files and give them their name."""
    if not _is_unchanged(job):
        raise SourceError(f"{job.source.path} changed while it was read; nothing was published")
    done = crew.gathered()
    for file in job.files:
        if file.name not in done or _length(crew.staged / file.name) != file.length:
            raise DestinationError(f"{crew.staged / file.name} is not what its worker wrote; nothing was published")
    manifest = _describe(job, done)
    for leftover in job.container.descriptions:  # of a run that was killed between here and the end
        (crew.staged / leftover).unlink(missing_ok=True)
    job.container.describe(manifest, crew.staged)
    publish.publish(crew.staged / job.container.root, destination)
    if crew.staged != destination:
        publish.discard(crew.staged)  # what was linked or copied from there
    return manifest


def _length(file: Location) -> int | None:
    try:
        with open_regular(file) as written:
            return written.size
    except SourceError:
        return None


def _is_unchanged(job: Job) -> bool:
    try:
        return state_of(job.source.path, job.manifest) == job.state
    except SourceError:
        return False


def _describe(job: Job, done_files: Mapping[str, Done]) -> Manifest:
    """The manifest of what was written, after comparing the fingerprints of both sides.

    Raises:
        SourceError: the moved bytes are not those that the source's manifest describes.
    """
    chunks: dict[str, list[Chunk]] = {tensor.key: [] for tensor in job.tensors}
    shares = dict.fromkeys(chunks, 0)
    blobs = []
    for file in job.files:
        done = done_files[file.name]
        blobs += [dataclasses.replace(item.blob, digest=d) for item, d in zip(file.items, done.blobs, strict=True)]
        for chunk, passed in zip(file.chunks, done.items, strict=True):
            key = chunk.tensor.key
            chunks[key].append(chunk.written(passed))
            shares[key] = combine(shares[key], passed.share)
    tensors = []
    for tensor in job.tensors:
        found = as_hex(shares[tensor.key])
        if tensor.fingerprint not in (None, found):
            raise SourceError(
                f"tensor {tensor.key!r}: the moved bytes have fingerprint {found}, the source's manifest says "
                f"{tensor.fingerprint}; nothing was published"
            )
        layout, mine = job.words[tensor.key], tuple(chunks[tensor.key])
        tensors.append(dataclasses.replace(tensor, chunks=mine, fingerprint=found, layout=layout))
    return Manifest(tuple(tensors), tuple(blobs), job.provenance)
