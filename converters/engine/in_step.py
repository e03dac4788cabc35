"""Files that are written in step: which ones, and how threads share the work on them.

Files cut along other dims than their source gather from the same chunks.  They are written in step, a band of each in
turn, so that one read serves all.  Threads share such files by ranges of their chunks: each reads another part of the
source.  Only what has too few chunks for that is shared by whole files, and then every thread reads all of the source.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from itertools import chain, pairwise
from threading import Lock

import numpy as np

from ...record.columns import Column
from ...store.io.new_file import Writing
from .output_files import OutputFile, is_direct
from .source_rows import Unchecked
from .staging import SUMS, ChunkSums, FinishedFile

_MOST = 8
"""Files that are written in step.  If they are interrupted, they all are unfinished."""

_RANGES = 4
"""Ranges of chunks for each thread: so many that all end at about the same time."""


@dataclass(slots=True)
class Draft:
    """A file that is being written, and what is known of it so far."""

    file: OutputFile
    output: Writing
    items: tuple[str, ...] = ()
    sums: ChunkSums = field(init=False)

    def __post_init__(self) -> None:
        self.sums = np.empty(len(self.file.chunks), SUMS)

    @property
    def finished(self) -> FinishedFile:
        return FinishedFile(self.items, self.sums.tobytes())


Part = list[tuple[Draft, range]]
"""Drafts, and the numbers of the chunks to write of each.  The first part has all drafts, and their first chunks."""


class FilesInStep:
    """Files that ``threads`` threads write in step, each a range of every file's chunks at a time."""

    def __init__(self, files: Sequence[OutputFile], threads: int) -> None:
        self.files = files
        self.threads = threads
        self._lock = Lock()
        self._to_leave = threads
        self._drafts = ExitStack()
        self._parts: Iterator[Part] | None = None
        self._error: BaseException | None = None
        self._open: tuple[Draft, ...] = ()

    def write(
        self, opened: Callable[[OutputFile], AbstractContextManager[Draft]], written: Callable[[Part], None]
    ) -> list[tuple[OutputFile, FinishedFile]]:
        """Write part after part, none of which another thread gets, until none is left.

        The first thread that comes opens the files; the last that leaves closes them, with the error of any.

        Returns:
            The files, once they are finished, for the last thread that leaves; nothing for the others.
        """
        try:
            with self._lock:
                if self._parts is None and self._error is None:
                    self._open = tuple(self._drafts.enter_context(opened(file)) for file in self.files)
                    self._parts = self._divided()
            for part in self._taken():
                written(part)
        except BaseException as error:
            self._error = self._error or error
            raise
        finally:
            with self._lock:
                self._to_leave -= 1
                is_last = self._to_leave == 0
            if is_last:
                self._close()
        return [(draft.file, draft.finished) for draft in self._open] if is_last and self._error is None else []

    def _close(self) -> None:
        error = self._error
        self._drafts.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

    def _taken(self) -> Iterator[Part]:
        while self._error is None:
            with self._lock:
                part = next(self._parts or iter(()), None)
            if part is None:
                return
            yield part

    def _divided(self) -> Iterator[Part]:
        drafts = self._open
        count = _RANGES * self.threads if self.threads > 1 else 1
        ends = [_range_ends(draft.file.chunks.offsets, draft.file.length, count) for draft in drafts]
        first = (0,) * len(drafts)
        for starts, stops in pairwise([first, *zip(*ends, strict=True)]):
            each = zip(drafts, map(range, starts, stops), strict=True)
            yield [(draft, numbers) for draft, numbers in each if numbers or starts is first]


def _range_ends(offsets: Column, length: int, count: int) -> list[int]:
    """Return where each of ``count`` ranges of a file's chunks ends; they have about as many bytes.

    The first has the first chunk; others may be empty.
    """
    ends = np.searchsorted(offsets, length * np.arange(1, count) // count)
    return [*np.clip(ends, 1, None).tolist(), len(offsets)] if len(offsets) else [0] * count


def in_step(files: Sequence[OutputFile], source: Unchecked, threads: int, in_any_order: bool) -> list[FilesInStep]:
    """Return all files in order, grouped by what they gather from: files that share nothing are alone.

    Args:
        in_any_order: whether several threads can write to a file, each somewhere else.
    """
    runs: list[list[OutputFile]] = []
    before = np.zeros(len(source.rows), np.bool_)
    for file in files:
        columns = enumerate(zip(file.chunks.outputs, file.chunks.plans, strict=True))
        in_pieces = [number for number, (output, plan) in columns if not is_direct(output, plan)]
        gathered = file.chunks.sources(source.rows, in_pieces)
        if (gathered & before).any():
            runs[-1].append(file)
        else:
            runs.append([file])
        before = gathered
    at_once = min(threads, len(os.sched_getaffinity(0)))
    groups = list(chain.from_iterable(_cut(run, at_once, in_any_order) for run in runs))
    return [FilesInStep(group, min(-(-at_once // len(groups)), share)) for group, share in groups]


def _cut(files: Sequence[OutputFile], at_once: int, in_any_order: bool) -> Iterator[tuple[Sequence[OutputFile], int]]:
    """Yield files that gather from the same chunks in groups, each with the most threads that can share it.

    There are no more groups than it takes to keep ``at_once`` threads busy, because each reads the source again.
    """
    share = min(map(_largest_share, files)) if in_any_order else 1
    size = min(-(-len(files) // -(-at_once // share)), _MOST)
    yield from ((files[start : start + size], share) for start in range(0, len(files), size))


def _largest_share(file: OutputFile) -> int:
    """Return how many times the largest of a file's chunks goes into the file."""
    if not len(file.chunks):
        return 1
    lengths = np.diff(file.chunks.offsets, append=file.chunks.end)
    return max(int(lengths.sum()) // max(int(lengths.max()), 1), 1)
