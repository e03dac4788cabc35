"""Files that are written together: which ones, and how threads share the work on them.

Files cut along other dims than their source gather from the same chunks.  They are written together, a band of each in
turn, so that one read serves all.  Threads share them by ranges of chunks, so that each reads another part of the
source; by files only where there are too few chunks, and then every thread reads all of the source.
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
from .output_files import SUMS, ChunkSums, FinishedFile, OutputFile, is_direct
from .source_rows import Unchecked

_MAX_FILES = 32
"""Files that are written together, and so open at once."""

_RANGES_PER_THREAD = 4
"""So many that all threads end at about the same time."""


@dataclass(slots=True)
class Draft:
    """A file that is being written, with the sums of its items and chunks so far."""

    file: OutputFile
    output: Writing
    items: tuple[str, ...] = ()
    sums: ChunkSums = field(init=False)

    def __post_init__(self) -> None:
        self.sums = np.empty(len(self.file.chunks), SUMS)

    @property
    def finished(self) -> FinishedFile:
        return FinishedFile(self.items, self.sums)


Part = list[tuple[Draft, range]]
"""Drafts, and the numbers of the chunks to write of each.  The first part has all drafts, and their first chunks."""


class FilesInStep:
    """Files that ``threads`` threads write together, each a range of every file's chunks at a time."""

    def __init__(self, files: Sequence[OutputFile], threads: int) -> None:
        self.files = files
        self.threads = threads
        self._lock = Lock()
        self._threads_inside = threads
        self._exits = ExitStack()
        self._parts: Iterator[Part] | None = None
        self._error: BaseException | None = None
        self._drafts: tuple[Draft, ...] = ()

    def write(
        self, open_draft: Callable[[OutputFile], AbstractContextManager[Draft]], write_part: Callable[[Part], None]
    ) -> list[tuple[str, FinishedFile]]:
        """Write part after part, each in one thread alone, until none is left.

        The first thread that comes opens the files; the last that leaves closes them, with the error of any.

        Returns:
            The files by name, once they are finished, for the last thread that leaves; nothing for the others.
        """
        try:
            # The first thread opens the files; all take parts until there is none, or one of them has failed.
            with self._lock:
                if self._parts is None and self._error is None:
                    self._drafts = tuple(self._exits.enter_context(open_draft(file)) for file in self.files)
                    self._parts = self._split()
            while self._error is None and (part := self._next_part()) is not None:
                write_part(part)
        except BaseException as error:
            self._error = self._error or error
            raise
        finally:
            # The last thread closes the files: no other one writes any more.
            with self._lock:
                self._threads_inside -= 1
                is_last = self._threads_inside == 0
            if is_last:
                cause = self._error
                self._exits.__exit__(type(cause) if cause else None, cause, cause.__traceback__ if cause else None)
        return [(draft.file.name, draft.finished) for draft in self._drafts] if is_last and self._error is None else []

    def _next_part(self) -> Part | None:
        with self._lock:
            return next(self._parts or iter(()), None)

    def _split(self) -> Iterator[Part]:
        """Yield ranges of all drafts' chunks, of about as many bytes; an empty one counts in the first part only."""
        count = _RANGES_PER_THREAD * self.threads if self.threads > 1 else 1
        ends = [_range_ends(draft.file.chunks.offsets, draft.file.length, count) for draft in self._drafts]
        first_starts = (0,) * len(self._drafts)
        for starts, stops in pairwise([first_starts, *zip(*ends, strict=True)]):
            ranges = zip(self._drafts, map(range, starts, stops), strict=True)
            yield [(draft, numbers) for draft, numbers in ranges if numbers or starts is first_starts]


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
    # Files that gather from a chunk of the one before belong together.
    runs: list[list[OutputFile]] = []
    former_sources = np.zeros(len(source.rows), np.bool_)
    for file in files:
        columns = enumerate(zip(file.chunks.outputs, file.chunks.plans, strict=True))
        in_pieces = [number for number, (output, plan) in columns if not is_direct(output, plan)]
        sources = file.chunks.sources(source.rows, in_pieces)
        if (sources & former_sources).any():
            runs[-1].append(file)
        else:
            runs.append([file])
        former_sources = sources
    # Threads that have no group of their own share one, if it has enough chunks.
    busy_threads = min(threads, len(os.sched_getaffinity(0)))
    groups = list(chain.from_iterable(_groups(run, busy_threads, in_any_order) for run in runs))
    return [FilesInStep(group, min(-(-busy_threads // len(groups)), shares)) for group, shares in groups]


def _groups(
    files: Sequence[OutputFile], threads: int, in_any_order: bool
) -> Iterator[tuple[Sequence[OutputFile], int]]:
    """Yield files that gather from the same chunks in groups, each with the most threads that can share it.

    There are no more groups than it takes to keep the threads busy, because each reads the source again.
    """
    shares = min(map(_max_shares, files)) if in_any_order else 1
    size = min(-(-len(files) // -(-threads // shares)), _MAX_FILES)
    for start in range(0, len(files), size):
        yield files[start : start + size], shares


def _max_shares(file: OutputFile) -> int:
    """Return how many times the largest of a file's chunks goes into the file."""
    if not len(file.chunks):
        return 1
    lengths = np.diff(file.chunks.offsets, append=file.chunks.end)
    return max(int(lengths.sum()) // max(int(lengths.max()), 1), 1)
