"""Machines by hand: ranks of one host that take themselves for ranks of several, and what each reads."""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

Ranges = Mapping[str, Sequence[tuple[int, int]]]
"""Ranges of bytes by the names of files."""


@contextmanager
def on_machine(number: int) -> Iterator[None]:
    """Give this process another host name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: f"machine-{number}")
        yield


@contextmanager
def recorded_reads() -> Iterator[dict[str, list[tuple[int, int]]]]:
    """Record the ranges that this process reads of files with data."""
    ranges: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    honest = os.preadv

    def read(handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        filled = honest(handle, buffers, offset)
        ranges[Path(f"/proc/self/fd/{handle}").readlink().name].append((offset, offset + filled))
        return filled

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", read)
        yield ranges


def bytes_of_cluster(ranges_of_ranks: Sequence[Ranges], machines: Sequence[int]) -> int:
    """Return the bytes that a file system gives to machines, each of which caches what it gets."""
    total = 0
    for machine in set(machines):
        by_file: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for ranges, of_rank in zip(ranges_of_ranks, machines, strict=True):
            for name, of_file in ranges.items() if of_rank == machine else ():
                by_file[name] += of_file
        for of_file in by_file.values():
            reached = 0
            for start, stop in sorted(of_file):
                total += max(stop - max(start, reached), 0)
                reached = max(reached, stop)
    return total
