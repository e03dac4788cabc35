"""How a job is shared: which files each worker writes, and which chunks of the source it checks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from .job import Job
from .output_chunks import SourceItems
from .output_files import OutputFile
from .unchecked_chunks import UncheckedChunks
from .workers import Worker


@dataclass(frozen=True, slots=True)
class Assignment:
    """The part of one worker: the chunks of the source that it checks, and the files that it writes."""

    chunks: UncheckedChunks
    files: tuple[OutputFile, ...]


def assignment(job: Job, worker: Worker, finished: Collection[str] = ()) -> Assignment:
    """An equal share, by bytes, of the finished files, which are checked, and of those that are still to be written.

    Every worker checks the chunks that it copies from; the coordinator also checks those that no worker copies from.
    """
    source = UncheckedChunks(job.manifest.tensors)
    if worker.world == 1:  # no need to visit a million chunks
        return Assignment(source, job.files)
    file_names: set[str] = set()
    for is_finished in (True, False):
        files = [file for file in job.files if (file.name in finished) is is_finished]
        ends = (0, *part_ends([file.length for file in files], worker.world))
        file_names.update(file.name for file in files[ends[worker.rank] : ends[worker.rank + 1]])
    own, others = (tuple(file for file in job.files if (file.name in file_names) is is_own) for is_own in (True, False))
    checked, of_others = source.numbered(_sources(own)), source.numbered(_sources(others))
    shared = checked & of_others
    if worker.coordinates:
        checked |= ~of_others
    source.keep(checked, shared)
    return Assignment(source, own)


def part_ends(sizes: Sequence[int], world: int) -> tuple[int, ...]:
    """Where each of ``world`` parts of a sequence ends, with the largest sum of sizes in a part as small as possible.

    Parts are contiguous, because neighbouring files mostly copy from the same chunks, which a worker then reads once.
    No part exceeds the mean by more than the largest size.  All workers get the same result.
    """
    most = range(max(sizes, default=0), sum(sizes) + 1)
    least = most[bisect_left(most, True, key=lambda limit: len(_filled(sizes, limit)) <= world)] if sizes else 0
    ends = _filled(sizes, least)
    return (*ends, *[len(sizes)] * (world - len(ends)))


def _filled(sizes: Sequence[int], limit: int) -> list[int]:
    """Where parts end if each is filled up to this limit before the next begins."""
    ends, filled = [], 0
    for index, size in enumerate(sizes):
        if filled + size > limit:
            ends.append(index)
            filled = 0
        filled += size
    return [*ends, len(sizes)]


def _sources(files: Iterable[OutputFile]) -> Iterator[SourceItems]:
    """The items of the source that these files are copied from."""
    return (items for file in files for items in file.chunks.sources())
