"""Resharding a checkpoint without a training run: one plan per tensor, executed as streamed file IO.

`make_job` decides everything that does not need the data (:mod:`.job`).  `run` checks the source, fills the files
front to back in bands of bounded size, fingerprints the bytes as they pass, compares with the source's fingerprints,
and publishes.  No tensor is ever deserialised.
"""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..errors import DestinationError, Interrupted, MuonckptError, SourceError
from ..fingerprint import as_hex, combine
from ..record import Chunk, Manifest
from ..store import directory
from ..store.formats import format_of
from .job import Job, check_destination, make_job, state_of
from .journal import Journal
from .mover import Mover, Progress
from .target import Target


def plan_job(source: Path, ranks: int) -> Job:
    """The plainest target: every tensor cut by rows over ``ranks`` ranks.  For others see `make_job`."""
    return make_job(source, Target({"dp": ranks}))


def run(
    job: Job,
    destination: Path,
    *,
    memory: int = 256 << 20,
    threads: int = 2,
    resume: bool = False,
    verify: bool = False,
    progress: Progress = lambda count: None,
) -> Manifest:
    """Do a job: the destination appears whole, or not at all.

    Args:
        memory: bytes of buffers, all threads together.
        resume: go on where an interrupted run of the same job stopped.
        verify: read every file back before anything is published.

    Raises:
        DestinationError: the destination exists, is inside the source, or cannot be written.
        SourceError: the source is damaged, or changed meanwhile.
        Interrupted: Ctrl-C; finished files are kept beside the destination for ``resume``.
    """
    check_destination(job.source, destination)
    journal = Journal(destination, job.digest(), resume)
    stop = threading.Event()
    try:
        with journal, format_of(job.source).payloads(job.source) as payloads:
            try:
                mover = Mover(payloads, journal.staged, max(memory // (2 * threads), 1 << 16), stop, progress)
                _in_threads(mover, job, journal, threads, stop)
                if verify:
                    _read_back(mover, job, journal, threads, stop)
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
    for leftover in job.container.descriptions:  # of a run that was killed between here and the end
        (journal.staged / leftover).unlink(missing_ok=True)
    job.container.describe(manifest, journal.staged)
    directory.publish(journal.staged, destination)
    journal.forget()
    return manifest


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


def _read_back(mover: Mover, job: Job, journal: Journal, threads: int, stop: threading.Event) -> None:
    with ThreadPoolExecutor(threads) as pool:
        try:
            for _ in pool.map(lambda file: mover.verify(file, journal.done[file.name]), job.files):
                pass
        except BaseException:
            stop.set()
            raise


def _is_unchanged(job: Job) -> bool:
    try:
        return state_of(job.source, job.manifest) == job.state
    except SourceError:
        return False


def _describe(job: Job, journal: Journal) -> Manifest:
    """The manifest of what was written, after comparing the fingerprints of both sides.

    Raises:
        SourceError: the moved bytes are not those that the source's manifest describes.
    """
    chunks: dict[str, list[Chunk]] = {tensor.key: [] for tensor in job.tensors}
    shares = dict.fromkeys(chunks, 0)
    blobs = []
    for file in job.files:
        done = journal.done[file.name]
        blobs += [dataclasses.replace(e.target, digest=d) for e, d in zip(file.entries, done.blobs, strict=True)]
        for item, passed in zip(file.items, done.items, strict=True):
            key = item.tensor.key
            chunks[key].append(dataclasses.replace(item.chunk, digest=passed.digest, crc32=passed.crc32))
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
    return Manifest(tuple(tensors), tuple(blobs), _provenance(job))


def _provenance(job: Job) -> dict[str, Any]:
    """That of the source, with what was done now; flat buffers are those of this layout."""
    step = {
        "program": f"muonckpt {version('muonckpt')}",
        "source": job.source.resolve().name,
        "mesh": dict(job.target.mesh),
        "layout": job.target.layout,
        "shard": list(map(str, job.target.rules)),
        "select": list(job.select),
    }
    found = {**job.manifest.provenance, "resharded": [*job.manifest.provenance.get("resharded", []), step]}
    found.pop("buffers", None)
    return {**found, "buffers": list(job.buffers)} if job.buffers else found
