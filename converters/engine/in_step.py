"""Files that are written together: which ones, and how threads share the work on them.

Files cut along other dims than their source gather from the same chunks.  They are written together, a band of each in
turn, so that one read serves all.  Threads share them by ranges of chunks, so that each reads another part of the
source; by files only where there are too few chunks, and then every thread reads all of the source.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from threading import Lock
from typing import NamedTuple

import numpy as np

from ...store.io.new_file import Writing
from .output_files import ChunkSums, FinishedFile, OutputFile
from .source_rows import SourceRows

_MAX_FILES = 32
"""Files that are written together, and so open at once."""

_RANGES_PER_THREAD = 4
"""So many that all threads end at about the same time."""


class Draft(NamedTuple):
    """A file that is being written, with the digests of its items and the sums of its chunks so far."""

    file: OutputFile
    output: Writing
    items: list[str]
    sums: ChunkSums


class FilesInStep:
    """Files whose chunks are written together, part by part, by any threads.

    Attributes:
        parts: for each part, the numbers of the chunks of each file.
        opened: closes the files, with an error if one has ended the work on them.
    """

    def __init__(self, files: Sequence[OutputFile], num_parts: int) -> None:
        self.files = files
        # Ranges of about as many bytes; some may be empty.  Each ends before the first chunk that begins after
        # its share; the first always has the first chunk.
        ranges: list[list[range]] = []
        for file in files:
            num_chunks = len(file.chunks)
            ends = np.searchsorted(file.chunks.offsets, file.length * np.arange(1, num_parts) // num_parts)
            bounds = [0, *np.clip(ends, min(1, num_chunks), None).tolist(), num_chunks]
            ranges.append(list(map(range, bounds, bounds[1:])))
        self.parts = list(zip(*ranges, strict=True))
        self._num_left = len(self.parts)
        self._is_begun = False
        self._drafts: list[Draft] = []
        self.opened = ExitStack()
        self._lock = Lock()

    def begin_part(self, open_draft: Callable[[OutputFile], AbstractContextManager[Draft]]) -> list[Draft]:
        """Return the drafts of all files, which the first call opens; nothing if another thread could not open them."""
        with self._lock:
            if not self._is_begun:
                self._is_begun = True
                self._drafts = [self.opened.enter_context(open_draft(file)) for file in self.files]
            return self._drafts

    def end_part(self) -> list[tuple[str, FinishedFile]]:
        """Count a part as written; the last one closes the files, and returns them by name."""
        with self._lock:
            self._num_left -= 1
            is_last = not self._num_left
        if not is_last:
            return []
        self.opened.close()
        return [(draft.file.name, FinishedFile(tuple(draft.items), draft.sums)) for draft in self._drafts]


def files_in_step(files: Sequence[OutputFile], rows: SourceRows, threads: int, in_any_order: bool) -> list[FilesInStep]:
    """Return all files in order, grouped by what they gather from: files that share nothing are alone.

    Args:
        in_any_order: whether several threads can write to a file, each somewhere else.
    """
    # Files that gather from a chunk of the one before belong together; neighbours that are cut by rows share no bytes.
    runs: list[list[OutputFile]] = []
    former_sources = np.zeros(len(rows), np.bool_)
    for file in files:
        in_pieces = [number for number, plan in enumerate(file.chunks.plans) if not plan.copies.in_runs]
        sources = file.chunks.sources(rows, in_pieces)
        if (sources & former_sources).any():
            runs[-1].append(file)
        else:
            runs.append([file])
        former_sources = sources
    # A run makes no more groups than keep all threads busy, because each group reads the source again.
    busy_threads = min(threads, len(os.sched_getaffinity(0)))
    groups: list[tuple[Sequence[OutputFile], int]] = []
    for run in runs:
        shares = min(map(_max_shares, run)) if in_any_order else 1
        size = min(-(-len(run) // -(-busy_threads // shares)), _MAX_FILES)
        groups += [(run[start : start + size], shares) for start in range(0, len(run), size)]
    # Threads that have no group of their own share one, if it has enough chunks.
    grouped = []
    for group, shares in groups:
        group_threads = min(-(-busy_threads // len(groups)), shares)
        grouped.append(FilesInStep(group, _RANGES_PER_THREAD * group_threads if group_threads > 1 else 1))
    return grouped


def _max_shares(file: OutputFile) -> int:
    """Return how many times the largest of a file's chunks goes into the file."""
    if not len(file.chunks):
        return 1
    lengths = np.diff(file.chunks.offsets, append=file.chunks.end)
    return max(int(lengths.sum()) // max(int(lengths.max()), 1), 1)
