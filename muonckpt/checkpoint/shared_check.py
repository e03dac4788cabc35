"""Checking a chunk that several ranks read, each a run of it: nobody reads more than it needs.

The CRC-32 of the chunk follows from those of the runs.  It detects accidents, as it does in a zip archive.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..box import Index
from ..store.io.checksums import crc32_joined


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes ``start:stop`` of a chunk's payload, and their CRC-32 as someone read them."""

    start: int
    stop: int
    crc32: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"expected a range of bytes, got {self.start}:{self.stop}")


def run_of(window_lo: Index, window: Index, shape: Index) -> tuple[int, int] | None:
    """Where a window of a dense row-major chunk begins and ends, in elements; None if it is not one run of them.

    Args:
        window_lo: its first index in the chunk, one per dim.
        window: its shape.
        shape: that of the chunk.
    """
    start, numel, row = 0, 1, 1
    for lo, n, size in zip(reversed(window_lo), reversed(window), reversed(shape), strict=True):
        if n != 1 and numel != row:  # several rows of which not all is wanted
            return None
        start, numel, row = start + lo * row, numel * n, row * size
    return start, start + numel


def holds(runs: Iterable[Run], length: int, crc32: int) -> bool | None:
    """Whether what was read is a payload of ``length`` bytes with this CRC-32; None if the runs do not tile it.

    Runs may occur several times, as replicas read them; they must agree.
    """
    found: dict[tuple[int, int], int] = {}
    for run in runs:
        if found.setdefault((run.start, run.stop), run.crc32) != run.crc32:
            return False
    at, total = 0, 0
    for (start, stop), part in sorted(found.items()):
        if start == at:
            at, total = stop, crc32_joined(total, part, stop - start)
    return total == crc32 if at == length else None
