"""Checking a chunk of which several ranks read a run each: no rank reads more than it needs.

The CRC-32 of the chunk follows from those of the runs.  It detects accidents, as it does in a zip archive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..box import Index
from ..store.io.checksums import crc32_joined


@dataclass(frozen=True, slots=True)
class ByteRun:
    """Bytes ``start:stop`` of a chunk's payload, and their CRC-32 as a rank read them."""

    start: int
    stop: int
    crc32: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"expected a range of bytes, got {self.start}:{self.stop}")


@dataclass(frozen=True, slots=True)
class PartlyRead:
    """The runs that a rank has read of a chunk, with the length and the CRC-32 of its payload as its item records
    them."""

    length: int
    crc32: int
    runs: tuple[ByteRun, ...]


def run_of(window_lo: Index, window: Index, shape: Index) -> tuple[int, int] | None:
    """Where a window of a dense row-major chunk begins and ends, in elements; None if it is not contiguous.

    Args:
        window_lo: its first index in the chunk, one per dim.
        window: its shape.
        shape: that of the chunk.
    """
    start, numel, row = 0, 1, 1
    for lo, n, size in zip(reversed(window_lo), reversed(window), reversed(shape), strict=True):
        if n != 1 and numel != row:  # parts of several rows
            return None
        start, numel, row = start + lo * row, numel * n, row * size
    return start, start + numel


def holds(reads: Sequence[PartlyRead]) -> bool | None:
    """Whether the runs that ranks have read of a chunk are its payload; None if they do not tile it.

    Several ranks may read the same run, as replicas do; their checksums must agree, and so must the items'.
    """
    (length, recorded), *disagreeing = {(read.length, read.crc32) for read in reads}
    sums: dict[tuple[int, int], int] = {}
    for run in (run for read in reads for run in read.runs):
        if sums.setdefault((run.start, run.stop), run.crc32) != run.crc32:
            return False
    reached, total = 0, 0
    for (start, stop), crc32 in sorted(sums.items()):
        if start == reached:
            reached, total = stop, crc32_joined(total, crc32, stop - start)
    return not disagreeing and total == recorded if reached == length else None
