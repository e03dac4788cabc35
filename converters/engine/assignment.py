"""How a job is shared: which files each worker writes, and checks which chunks of the source; and which files a thread
writes in step, because they gather their elements from the same chunks."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .job import Job
from .output_files import OutputChunks, OutputFile, is_direct
from .source_rows import Mask, Unchecked
from .workers import Worker


@dataclass(frozen=True, slots=True)
class Assignment:
    """One worker's part: chunks of the source to check, and files to write."""

    chunks: Unchecked
    files: tuple[OutputFile, ...]


def assignment(job: Job, worker: Worker, finished: Collection[str] = ()) -> Assignment:
    """Return an equal share, by bytes, of the finished files and of those that are still to be written.

    Every worker checks the chunks that it copies from; the coordinator also checks those that no worker copies from.
    """
    unchecked = Unchecked(job.rows)
    if worker.world == 1:  # no need to visit a million chunks
        return Assignment(unchecked, job.files)
    file_names: set[str] = set()
    for is_finished in (True, False):
        files = [file for file in job.files if (file.name in finished) is is_finished]
        ends = (0, *part_ends([file.length for file in files], worker.world))
        file_names.update(file.name for file in files[ends[worker.rank] : ends[worker.rank + 1]])
    own, others = (tuple(file for file in job.files if (file.name in file_names) is is_own) for is_own in (True, False))
    checked, of_others = _sources(job, own), _sources(job, others)
    shared = checked & of_others
    if worker.coordinates:
        checked |= ~of_others
    unchecked.keep(checked, shared)
    return Assignment(unchecked, own)


def part_ends(sizes: Sequence[int], world: int) -> tuple[int, ...]:
    """Return where each of ``world`` contiguous parts of a sequence ends, the largest sum being as small as possible.

    Neighbouring files mostly copy from the same chunks, which a worker then reads once.
    """
    most = range(max(sizes, default=0), sum(sizes) + 1)
    least = most[bisect_left(most, True, key=lambda limit: len(_filled(sizes, limit)) <= world)] if sizes else 0
    ends = _filled(sizes, least)
    return (*ends, *[len(sizes)] * (world - len(ends)))


def _filled(sizes: Sequence[int], limit: int) -> list[int]:
    """Return where parts end if each is filled up to this limit."""
    ends, filled = [], 0
    for index, size in enumerate(sizes):
        if filled + size > limit:
            ends.append(index)
            filled = 0
        filled += size
    return [*ends, len(sizes)]


def _sources(job: Job, files: Iterable[OutputFile]) -> Mask:
    """Return which rows of the source these files are copied from."""
    used = np.zeros(len(job.rows), np.bool_)
    for file in files:
        used |= file.chunks.sources(job.rows)
    return used


_MOST = 8
"""Files that a thread writes in step.  If it is interrupted, they all are unfinished."""


def in_step(files: Sequence[OutputFile], source: Unchecked, threads: int) -> list[tuple[OutputFile, ...]]:
    """All files in order, in groups to write in step; files that share nothing are groups of their own.

    There are no fewer groups than can be computed at once, and not many more, because each reads the source again.
    """
    runs: list[list[OutputFile]] = []
    before = np.zeros(len(source.rows), np.bool_)
    for file in files:
        gathered = file.chunks.sources(source.rows, _gathering(file.chunks))
        if (gathered & before).any():
            runs[-1].append(file)
        else:
            runs.append([file])
        before = gathered
    at_once = min(threads, len(os.sched_getaffinity(0)))
    sizes = [min(-(-len(run) // at_once), _MOST) for run in runs]
    return [
        tuple(run[start : start + size])
        for run, size in zip(runs, sizes, strict=True)
        for start in range(0, len(run), size)
    ]


def _gathering(chunks: OutputChunks) -> list[int]:
    """Return the numbers of the chunks whose elements do not lie in runs of bytes."""
    columns = zip(chunks.outputs, chunks.plans, strict=True)
    return [number for number, (output, plan) in enumerate(columns) if not is_direct(output, plan)]
