"""Runs a job: one plan per tensor, executed as streamed file I/O.

:mod:`.job` decides everything that does not need the data.  `run_job` checks the source, writes the files, compares
their fingerprints with the source's, and publishes.  Several processes may share a job (:mod:`.workers`): each writes
some of the files, and the coordinator publishes.
"""

from __future__ import annotations

import dataclasses
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from queue import Empty, SimpleQueue
from threading import Event
from typing import TypeVar

import numpy as np

from ...algebra.fingerprint import as_hex
from ...names.collector import gc_paused
from ...names.errors import DestinationError, Interrupted, SourceError, unwritable
from ...record.record import Blob, Manifest
from ...store.io import publish
from ...store.io.location import Location, Remote, check_memory, items_beside, refuse_unseen
from ...store.io.regular import open_regular
from .in_step import files_in_step
from .job import Job, Share, check_destination, file_states
from .mover import Mover
from .output_files import FinishedFile, written_tensors
from .source_rows import Advance, SourceChecks
from .workers import LONGEST_WAIT, LaunchError, Worker, Workers

MEMORY = 256 << 20
"""The default size of all buffers together, in bytes."""

THREADS = 3
"""The default number of threads.  On two cores three took 0.84 to 0.95 of the time of two for rows of 1 GB (medians of
alternating runs), because some work while another waits for the disk; four took no less."""

_MAX_TASKS = 1024
"""The most parts into which a million small tasks are divided, because each part is handed to a thread."""


def run_job(
    job: Job,
    destination: Location,
    *,
    memory: int = MEMORY,
    threads: int = THREADS,
    progress: Advance = lambda count: None,
    workers: Workers | None = None,
) -> Manifest | None:
    """Do a job, or a worker's share of it: the destination appears whole, or not at all.

    Args:
        memory: bytes of buffers, all threads together.
        workers: the processes that share this job (:func:`.workers.joined`); all must see its source and destination.
            None means this process alone.

    Returns:
        The manifest of what was published; None for all workers but the coordinator, which publishes.

    Raises:
        DestinationError: the destination exists, is inside the source, or cannot be written.
        SourceError: the source is damaged, or changed during the run.
        LaunchError: the workers have planned different jobs.
        Interrupted: a worker was interrupted or lost.
        MuonckptError: another worker failed; the same kind of error as there.
    """
    # Refuse what cannot end well before anything is written.
    workers = workers or Workers()
    check_destination(job.source.path, destination)
    items = job.arranged.items
    if items:
        publish.refuse_other(items_beside(destination), items.data)
    check_memory(job.source.path, destination, max((file.length for file in job.files), default=0), threads, memory)
    # Each worker has planned the job by itself.
    digests = workers.gather(job.digest()) if workers.me.world > 1 else []
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise LaunchError(
                f"{Worker(rank, len(digests))} has planned another job than worker 0: expected the same command and "
                "version, and a source with the same files, for all workers"
            )
    # An error of one worker ends all of them; the coordinator comes last, and removes the unpublished files.
    with (
        _writing(destination),
        ExitStack() as unpublished,
        workers.together(),
        _writing(destination),  # here, too: the other workers hear which destination could not be written
    ):
        staging = None
        if workers.me.coordinates:
            staging = unpublished.enter_context(publish.Staging(destination, job.container.root))
        staged: Location = workers.broadcast(staging and staging.place)  # type: ignore[assignment]  # it has one
        refuse_unseen(staged, f"rank {workers.me.rank}", DestinationError)
        with job.source.payloads:
            share, band_bytes = Share.of(job, workers.me), max(memory // (2 * threads), 1 << 16)
            files_done = _write_share(job, share, staged, band_bytes, threads, progress, workers)
        # The sums of all files make the manifest, and show that none is missing.
        gathered = workers.gather(files_done)
        return None if staging is None else _publish(job, destination, staging, dict(ChainMap(*gathered)))


@contextmanager
def _writing(destination: Location) -> Iterator[None]:
    """Report errors of the file system as errors of the destination."""
    try:
        yield
    except OSError as error:
        raise unwritable(destination, error) from error


def _write_share(
    job: Job,
    share: Share,
    staged: Location,
    band_bytes: int,
    threads: int,
    progress: Advance,
    workers: Workers,
) -> dict[str, FinishedFile]:
    """Write a worker's share of the files, then check the chunks that no file needs; return the files by name."""
    is_stopped = Event()

    def advance(count: int) -> None:
        if is_stopped.is_set():
            raise Interrupted("stopped")
        progress(count)

    payloads = job.source.payloads
    checks = SourceChecks(payloads, rows=job.rows, selected=share.checked, shared=share.shared, progress=advance)
    mover = Mover(payloads, staged=staged, checks=checks, band_bytes=band_bytes, progress=advance)
    # An object of a store is written front to back, so by one thread.
    groups = files_in_step(share.files, job.rows, threads, in_any_order=not isinstance(staged, Remote))
    files_done: dict[str, FinishedFile] = {}
    # Files that are not finished are closed when all threads have stopped.
    with ExitStack() as unfinished, ThreadPoolExecutor(threads) as pool:
        for group in groups:
            unfinished.push(group.opened)
        try:
            parts = ((group, part) for group in groups for part in group.parts)
            for finished_files in _results_of_calls(pool, workers, mover.write, parts):
                files_done.update(finished_files)
            # The mover has read, and so checked, only the chunks that a file needs.
            waiting = checks.waiting
            rows = np.array_split(waiting, max(min(_MAX_TASKS, len(waiting)), 1))
            for _ in _results_of_calls(pool, workers, checks.check, map(np.ndarray.tolist, rows)):
                pass
        except BaseException:
            is_stopped.set()
            raise
    return files_done


T = TypeVar("T")
R = TypeVar("R")


def _results_of_calls(
    pool: ThreadPoolExecutor, workers: Workers, function: Callable[[T], R], arguments: Iterable[T]
) -> Iterator[R]:
    """Call a function with each argument, in threads; yield the results as the calls finish, in any order.

    Signals, and failures of other workers, are noticed in between.
    """
    finished: SimpleQueue[Future[R]] = SimpleQueue()
    num_left = 0
    for argument in arguments:
        pool.submit(function, argument).add_done_callback(finished.put)
        num_left += 1
    while num_left:
        workers.check_others()
        with suppress(Empty):
            result = finished.get(timeout=LONGEST_WAIT).result()
            num_left -= 1
            yield result


@gc_paused()
def _publish(
    job: Job, destination: Location, staging: publish.Staging, files_done: Mapping[str, FinishedFile]
) -> Manifest:
    """Write what describes the finished files, and publish them."""
    try:
        unchanged = file_states(job.source.payloads, job.rows.columns, job.manifest.blobs) == job.state
    except SourceError:
        unchanged = False
    if not unchanged:
        raise SourceError(f"{job.source.path} changed while it was read; nothing was published")
    # Workers on other machines have written to the place, too.
    staged = staging.place
    for file in job.files:
        if file.name not in files_done or _stored_length(staged / file.name) != file.length:
            raise DestinationError(f"{staged / file.name} is not what its worker wrote; nothing was published")
    manifest, items = _checked_manifest(job, files_done), job.arranged.items
    with ExitStack() as stack:
        if items:
            stack.enter_context(publish.publish_first(items_beside(destination), items.data, staged / "items.json"))
        job.container.describe(manifest, staged)
        staging.publish()
    return manifest


def _stored_length(file: Location) -> int | None:
    """Return the length of a file in bytes; None if it cannot be opened."""
    try:
        with open_regular(file) as written:
            return written.size
    except SourceError:
        return None


def _checked_manifest(job: Job, files_done: Mapping[str, FinishedFile]) -> Manifest:
    """Return the manifest of what was written, after comparing it with the source's fingerprints.

    Raises:
        SourceError: the moved bytes are not those that the source's manifest describes.
    """
    # Items with the digests of what was copied.
    blobs: list[Blob] = []
    for file in job.files:
        digests = zip(file.items, files_done[file.name].items, strict=True)
        blobs += (dataclasses.replace(blob, digest=digest) for (_, blob), digest in digests)
    tensors = []
    chunks_and_shares = written_tensors(
        job.outputs.tensors, [file for file in job.files if len(file.chunks)], files_done
    )
    for tensor, (chunks, share) in zip(job.tensors, chunks_and_shares, strict=True):
        fingerprint = as_hex(share)
        if tensor.fingerprint not in (None, fingerprint):
            raise SourceError(
                f"tensor {tensor.key!r}: the moved bytes have fingerprint {fingerprint}, the source's manifest says "
                f"{tensor.fingerprint}; nothing was published"
            )
        layout = job.arranged.recorded_layouts[tensor.key]
        tensors.append(dataclasses.replace(tensor, chunks=chunks, fingerprint=fingerprint, layout=layout))
    return Manifest(tuple(tensors), tuple(blobs), job.arranged.provenance)
