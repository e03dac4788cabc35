"""Runs a job: one plan per tensor, executed as streamed file I/O.

`make_job` decides everything that does not need the data (:mod:`.job`).  `run_job` checks the source, writes the files
in bands of bounded size, computes fingerprints on the way, compares them with the source's, and publishes.  Several
processes may share a job (:mod:`.launch`): each writes some of the files, and the coordinator publishes.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from ...errors import DestinationError, Interrupted, SourceError
from ...fingerprint import as_hex
from ...record import Manifest
from ...store.formats.signs import items_beside
from ...store.io import publish
from ...store.io.limits import gc_paused
from ...store.io.location import Location, check_memory
from ...store.io.regular import open_regular
from .assignment import assignment, in_step
from .job import Job, check_destination, file_states
from .mover import Advance, Mover
from .output_files import OutputFile, written_tensors
from .staging import Coordinator, FinishedFile, Journal, Staging, how_to_resume, is_unfinished
from .workers import LONGEST_WAIT, LaunchError, SingleWorker, Worker, Workers, together

MEMORY = 256 << 20
"""The default size of all buffers together, in bytes."""

THREADS = 3
"""The default number.  On two cores three threads took 0.84 to 0.95 of the time of two for rows of 1 GB (medians of
alternating runs), because some work while another waits for the disk; four took no less."""

_MOST_TASKS = 1024
"""Parts of a million small tasks: a thread is told of each."""


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
        resume: continue an interrupted run of the same job, with any number of workers.
        verify: read every file back before anything is published.
        workers: the processes that share this job (:func:`.launch.joined`); all must see its source and destination.
            None means this process alone.

    Returns:
        The manifest of what was published; None for all workers but the coordinator, which publishes.

    Raises:
        DestinationError: the destination exists, is inside the source, or cannot be written.
        SourceError: the source is damaged, or changed during the run.
        LaunchError: the workers have planned different jobs.
        Interrupted: Ctrl-C, or a worker was lost; finished files stay beside the destination for ``resume``.
        MuonckptError: another worker failed; the same kind of error as there.
    """
    workers = workers or SingleWorker()
    check_destination(job.source.path, destination, job.container)
    if job.items:
        publish.refuse_other(items_beside(destination), job.items.data)
    check_memory(job.source.path, destination, max((file.length for file in job.files), default=0), threads, memory)
    place, digest, files_done = job.container.staged(destination), _agreed(job, workers), dict[str, FinishedFile]()
    with (
        _writing(destination),
        _hold(workers, destination, place, digest, resume) as coordinator,
        together(workers),
        _writing(destination),  # here, too: what the others hear says what could not be written
        _resumable(place, len(job.files), files_done),
    ):
        staging, history = _begun(coordinator, place, workers)
        share = assignment(job, workers.me, history)
        band_bytes = max(memory // (2 * threads), 1 << 16)
        with (
            closing(Journal(staging.journals / str(workers.me.rank), digest)) as journal,
            job.source.payloads as payloads,
        ):
            mover = Mover(payloads, staging, share.chunks, band_bytes, workers.stop, progress)
            for file, finished in _finished_files(mover, share.files, history, journal, threads, verify, workers.stop):
                files_done[file.name] = finished
        gathered = workers.gather(_to_json(files_done))
        if coordinator is None:
            return None
        all_done = {name: FinishedFile.of(*finished) for files in gathered for name, finished in files.items()}
        return _publish(job, destination, coordinator, all_done)


@contextmanager
def _resumable(place: Location, files: int, files_done: Mapping[str, FinishedFile]) -> Iterator[None]:
    """Turn Ctrl-C into an error that says how to continue, if finished files were left."""
    try:
        yield
    except KeyboardInterrupt:
        if not is_unfinished(place):
            raise
        raise Interrupted(f"stopped with {len(files_done)} of {files} files written; {how_to_resume(place)}") from None


@contextmanager
def _writing(destination: Location) -> Iterator[None]:
    """Report errors of the file system as errors of the destination."""
    try:
        yield
    except OSError as error:
        raise DestinationError(f"cannot write {destination}: {error}") from error


def _agreed(job: Job, workers: Workers) -> str:
    """Agree on the digest of the job.

    Raises:
        LaunchError: they have planned different jobs.
    """
    digests: list[str] = workers.gather(job.digest())
    if differing := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise LaunchError(
            f"{Worker(differing[0], len(digests))} has planned another job than worker 0: expected the same command "
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
    """Tell all workers where this run stages its files, and which files earlier runs have finished."""
    told = coordinator and [coordinator.staging.run, _to_json(coordinator.history)]
    run, history = workers.gather(told)[0]
    return Staging(place, run), {name: FinishedFile.of(*finished) for name, finished in history.items()}


def _to_json(files: Mapping[str, FinishedFile]) -> dict[str, Any]:
    return {name: finished.to_json() for name, finished in files.items()}


def _finished_files(
    mover: Mover,
    files: Sequence[OutputFile],
    history: Mapping[str, FinishedFile],
    journal: Journal,
    threads: int,
    verify: bool,
    stop: threading.Event,
) -> Iterator[tuple[OutputFile, FinishedFile]]:
    """Yield files as they are finished.  After the last, all chunks are checked, and files read back if asked for."""

    def is_reusable(file: OutputFile) -> bool:
        whole = mover.is_finished(file, history.get(file.name))
        if whole:
            journal.add(file.name, history[file.name])
        return whole

    def written(group: Sequence[OutputFile]) -> list[tuple[OutputFile, FinishedFile]]:
        done = []
        for file, finished in mover.write(group):
            journal.add(file.name, finished)
            done.append((file, finished))
        return done

    with ThreadPoolExecutor(threads) as pool:
        try:
            files_done = {file.name: history[file.name] for file, whole in _results(pool, is_reusable, files) if whole}
            yield from ((file, files_done[file.name]) for file in files if file.name in files_done)
            left = [file for file in files if file.name not in files_done]
            for _, done in _results(pool, written, in_step(left, mover.unchecked, threads)):
                files_done.update((file.name, finished) for file, finished in done)
                yield from done
            unchecked = mover.unchecked.shared_out(_MOST_TASKS)  # of the files that were finished before
            for _ in _results(pool, mover.check, unchecked):
                pass
            if verify:
                for _ in _results(pool, lambda file: mover.verify(file, files_done[file.name]), files):
                    pass
        except BaseException:
            stop.set()
            raise


T = TypeVar("T")
R = TypeVar("R")


def _results(pool: ThreadPoolExecutor, function: Callable[[T], R], arguments: Iterable[T]) -> Iterator[tuple[T, R]]:
    """Yield arguments with the results of a function, as the calls finish."""
    finished: SimpleQueue[Future[R]] = SimpleQueue()
    futures = {pool.submit(function, argument): argument for argument in arguments}
    for future in futures:
        future.add_done_callback(finished.put)
    for _ in range(len(futures)):
        future = _next(finished)
        yield futures[future], future.result()


def _next(queue: SimpleQueue[T]) -> T:
    while True:
        with suppress(Empty):
            return queue.get(timeout=LONGEST_WAIT)


@gc_paused()
def _publish(
    job: Job, destination: Location, coordinator: Coordinator, files_done: Mapping[str, FinishedFile]
) -> Manifest:
    """Write what describes the finished files, and publish them."""
    if not _is_unchanged(job):
        raise SourceError(f"{job.source.path} changed while it was read; nothing was published")
    place = coordinator.staging.place
    coordinator.remove_strays({file.name for file in job.files})
    for file in job.files:
        if file.name not in files_done or _length(place / file.name) != file.length:
            raise DestinationError(f"{place / file.name} is not what its worker wrote; nothing was published")
    manifest = _describe(job, files_done)
    with _items_published(job, place, destination):
        job.container.describe(manifest, place)
        coordinator.publish(job.container.root)
    return manifest


def _items_published(job: Job, staged: Location, destination: Location) -> AbstractContextManager[None]:
    """Publish the file of items, if there is one, before the destination."""
    if job.items is None:
        return nullcontext()
    return publish.published_first(items_beside(destination), job.items.data, staged / "items.json")


def _length(file: Location) -> int | None:
    try:
        with open_regular(file) as written:
            return written.size
    except SourceError:
        return None


def _is_unchanged(job: Job) -> bool:
    try:
        return file_states(job.source.payloads, job.manifest) == job.state
    except SourceError:
        return False


def _describe(job: Job, files_done: Mapping[str, FinishedFile]) -> Manifest:
    """Compare what was written with the source's fingerprints, and return its manifest.

    Raises:
        SourceError: the moved bytes are not those that the source's manifest describes.
    """
    blobs = [
        dataclasses.replace(item.blob, digest=digest)
        for file in job.files
        for item, digest in zip(file.items, files_done[file.name].items, strict=True)
    ]
    tensors = []
    written = written_tensors(job.outputs, [file for file in job.files if len(file.chunks)], files_done)
    for tensor, (chunks, share) in zip(job.tensors, written, strict=True):
        fingerprint = as_hex(share)
        if tensor.fingerprint not in (None, fingerprint):
            raise SourceError(
                f"tensor {tensor.key!r}: the moved bytes have fingerprint {fingerprint}, the source's manifest says "
                f"{tensor.fingerprint}; nothing was published"
            )
        layout = job.recorded_layouts[tensor.key]
        tensors.append(dataclasses.replace(tensor, chunks=chunks, fingerprint=fingerprint, layout=layout))
    return Manifest(tuple(tensors), tuple(blobs), job.provenance)
