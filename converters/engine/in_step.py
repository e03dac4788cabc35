"""Which files are written in step: those that gather their elements from the same items of the source.

For files that are cut along other dims than their source, what is read for one has the elements of the others between
those that it needs (:mod:`muonckpt.store.reading.windows`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from .output_chunks import OutputChunks, is_direct
from .output_files import OutputFile
from .unchecked_chunks import UncheckedChunks

_MOST = 8
"""Files that a thread writes in step.  If it is interrupted, they all are unfinished."""


def in_step(files: Sequence[OutputFile], source: UncheckedChunks, threads: int) -> list[tuple[OutputFile, ...]]:
    """All files in order, in groups to write in step; files that share nothing are groups of their own.

    There are no fewer groups than can be computed at once, and not many more, because each reads the source again.
    """
    runs: list[list[OutputFile]] = []
    before = source.numbered([])
    for file in files:
        gathered = source.numbered(file.chunks.sources(_gathering(file.chunks)))
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
    """The numbers of the chunks whose elements do not lie in runs of bytes."""
    columns = zip(chunks.outputs, chunks.plans, strict=True)
    return [number for number, (output, plan) in enumerate(columns) if not is_direct(output, plan)]
