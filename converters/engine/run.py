"""Resharding a checkpoint without a training run: one plan per tensor, executed as streamed file IO.

`make_job` decides everything that does not need the data (:mod:`.job`).  `run_job` checks the source, fills the files
front to back in bands of bounded size, fingerprints the bytes as they pass, compares with the source's fingerprints,
and publishes.  No tensor is ever deserialised.  Several processes may share a job (:mod:`.launch`): each writes some of
the files, and the coordinator publishes.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

from ...errors import DestinationError, Interrupted, SourceError
from ...fingerprint import as_hex, combine
from ...record import Chunk, Manifest
from ...store.io import side_file
from ...store.io.gc_paused import gc_paused
from ...store.io.location import Location, check_memory
from ...store.io.regular import open_regular
from ..target.item_file import item_file_location
from .assignment import assignment
from .job import Job, check_destination, file_states
from .journal import FinishedFile, Journal
from .mover import Advance, Mover
from .output_files import OutputFile
from .staging import Coordinator, Staging, how_to_resume, is_unfinished
from .workers import LaunchError, SingleWorker, Worker, Workers, together

MEMORY = 256 << 20
"""Bytes of buffers unless the caller gives another number."""

THREADS = 3
"""By default.  On two cores, some go on while another waits for the disk: rows of 1 GB took 0.84 to 0.95 of the time of
two threads (medians of alternating runs), and no less with four."""

_SLICE = 0.2
"""Seconds of waiting in a row: a signal that comes just before a wait begins is noticed only when it ends."""


def run_job(
    job: Job,
    destination: Location,
    *,
    memory: int = MEMORY,
    threads: int = THREADS,
    resume: bool = False,
    verify: bool = False,
    progress: Advance = lambda count: None,
    workers: Workers | None = None,
) -> Manifest | None:
    """Do a job, or a worker's share of it: the destination appears whole, or not at all.

    Args:
        memory: bytes of buffers, all threads together.
        resume: go on where an interrupted run of the same job stopped, with however many workers.
        verify: read every file back before anything is published.
        workers: the processes that do this job together (:func:`.launch.joined`); all must see its source and
            destination.  None: there is only this one.

    Returns:
        The manifest of what was published, or None if this worker is not the coordinator, which publishes.

    Raises:
        DestinationError: the destination exists, is inside the source, or cannot be written.
        SourceError: the source is damaged, or changed meanwhile.
        LaunchError: the workers do not do the same job.
        Interrupted: Ctrl-C, or a worker was lost; finished files are kept beside the destination for ``resume``.
        MuonckptError: another worker failed; the kind of error that it met.
    """
    workers = workers or SingleWorker()
    check_destination(job.source.path, destination, job.container)
    if job.items:
        side_file.refuse_other(item_file_location(destination), job.items.data)
    check_memory(job.source.path, destination, max((file.length for file in job.files), default=0), threads, memory)
    place, digest, done = job.container.staged(destination), _agreed(job, workers), dict[str, FinishedFile]()
    with (
        _writing(destination),
        _hold(workers, destination, place, digest, resume) as coordinator,
        together(workers),
        _resumable(place, len(job.files), done),
    ):
        staging, history = _begun(coordinator, place, workers)
        mine = assignment(job, workers.me, history)
        band_bytes = max(memory // (2 * threads), 1 << 16)
        with (
            closing(Journal(staging.journals / str(workers.me.rank), digest)) as journal,
            job.source.payloads as payloads,
        ):
            mover = Mover(payloads, staging, mine.chunks, band_bytes, workers.stop, progress)
            for file, finished in _work(mover, mine.files, history, journal, threads, verify, workers.stop):
                done[file.name] = finished
        every = [part for parts in workers.gather(done) for part in parts.items()]
        if coordinator is None:
            return None
        return _publish(job, destination, coordinator, {name: FinishedFile.of(*finished) for name, finished in every})


@contextmanager
def _resumable(place: Location, files: int, done: Mapping[str, FinishedFile]) -> Iterator[None]:
    """Ctrl-C is an error that says how to go on, where there is something to go on with."""
    try:
        yield
    except KeyboardInterrupt:
        if not is_unfinished(place):
            raise
        raise Interrupted(f"stopped with {len(done)} of {files} files written; {how_to_resume(place)}") from None


@contextmanager
def _writing(destination: Location) -> Iterator[None]:
    """Errors of the file system are those of the destination."""
    try:
        yield
    except OSError as error:
        raise DestinationError(f"cannot write {destination}: {error}") from error


def _agreed(job: Job, workers: Workers) -> str:
    """The digest of the job, the same on all workers.

    Raises:
        LaunchError: they have planned different jobs.
    """
    digests: list[str] = workers.gather(job.digest())
    if strangers := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise LaunchError(
            f"{Worker(strangers[0], len(digests))} has planned another job than worker 0: expected the same command "
            "and version, and a source with the same files, for all workers"
        )
    return digests[0]


def _hold(
    workers: Workers, destination: Location, place: Location, digest: str, resume: bool
) -> AbstractContextManager[Coordinator | None]:
    return Coordinator(destination, place, digest, resume) if workers.me.coordinates else nullcontext()


def _begun(
    coordinator: Coordinator | None, place: Location, workers: Workers
) -> tuple[Staging, dict[str, FinishedFile]]:
    """What the coordinator tells all workers: where this run works, and what earlier runs have finished."""
    run, history = workers.gather(coordinator and [coordinator.staging.run, coordinator.history])[0]
    return Staging(place, run), {name: FinishedFile.of(*finished) for name, finished in history.items()}


def _work(
    mover: Mover,
    files: Sequence[OutputFile],
    history: Mapping[str, FinishedFile],
    journal: Journal,
    threads: int,
    verify: bool,
    stop: threading.Event,
) -> Iterator[tuple[OutputFile, FinishedFile]]:
    """The files as they are finished, and the mover's chunks checked; after the last all have been seen whole."""

    def looked_through(file: OutputFile) -> bool:
        whole = mover.is_finished(file, history.get(file.name))
        if whole:
            journal.add(file.name, history[file.name])
        return whole

    def written(file: OutputFile) -> FinishedFile:
        done = mover.write(file)
        journal.add(file.name, done)
        return done

    with ThreadPoolExecutor(threads) as pool:
        try:
            done = {file.name: history[file.name] for file, whole in _each(pool, looked_through, files) if whole}
            yield from ((file, done[file.name]) for file in files if file.name in done)
            for file, finished in _each(pool, written, [file for file in files if file.name not in done]):
                done[file.name] = finished
                yield file, finished
            for _ in _each(pool, mover.check, list(mover.unchecked)):  # of the files that were finished before
                pass
            if verify:
                for _ in _each(pool, lambda file: mover.verify(file, done[file.name]), files):
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


@gc_paused()
def _publish(job: Job, destination: Location, coordinator: Coordinator, done: Mapping[str, FinishedFile]) -> Manifest:
    """Describe the finished files and give them their name."""
    if not _is_unchanged(job):
        raise SourceError(f"{job.source.path} changed while it was read; nothing was published")
    place = coordinator.staging.place
    coordinator.remove_strays({file.name for file in job.files})
    for file in job.files:
        if file.name not in done or _length(place / file.name) != file.length:
            raise DestinationError(f"{place / file.name} is not what its worker wrote; nothing was published")
    manifest = _describe(job, done)
    with _items_published(job, place, destination):
        job.container.describe(manifest, place)
        coordinator.publish(job.container.root)
    return manifest


def _items_published(job: Job, staged: Location, destination: Location) -> AbstractContextManager[None]:
    """The file of items, if there is one, is there before the destination is."""
    if job.items is None:
        return nullcontext()
    return side_file.published_first(item_file_location(destination), job.items.data, staged / "items.json")


def _length(file: Location) -> int | None:
    try:
        with open_regular(file) as written:
            return written.size
    except SourceError:
        return None


def _is_unchanged(job: Job) -> bool:
    try:
        return file_states(job.source.path, job.manifest) == job.state
    except SourceError:
        return False


def _describe(job: Job, done_files: Mapping[str, FinishedFile]) -> Manifest:
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
