"""What a table was measured on, and what the system counts of this process: nothing that runs here can escape it."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path


def describe() -> str:
    """One line: processor, cores, memory, Python, torch."""
    names = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
             if line.startswith("model name")]  # fmt: skip
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return (
        f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB, "
        f"Python {platform.python_version()}, torch {version('torch')}"
    )


def system_reads() -> tuple[int, int]:
    """Return how many calls of this process have read, and how many bytes they got, of files and sockets alike."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["syscr"]), int(counts["rchar"])


def bytes_read(action: Callable[[], object], needed_bytes: int) -> int:
    """Return how many bytes read calls get during an action.

    Raises:
        RuntimeError: they are fewer than it cannot do without: it reads in a way that is not counted, such as mapping.
    """
    _, before = system_reads()
    action()
    _, after = system_reads()
    return at_least(needed_bytes, after - before, "bytes read")


def at_least(bound: int, counted: int, subject: str) -> int:
    """Return a count.

    Raises:
        RuntimeError: it is below what is known to be the least, so what it counts has got past it.
    """
    if counted < bound:
        raise RuntimeError(f"counted {counted} {subject}, which cannot be fewer than {bound}: the counter misses some")
    return counted


def peak_memory() -> int:
    """Return the most KiB that this process has held; ``ru_maxrss`` would include what its parent held."""
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
