"""The library of `system_calls.c`: compiled once a session, preloaded by scripts, and what Python asks of it."""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("system_calls.c")
_BUILT = tempfile.TemporaryDirectory(prefix="muonckpt-trust-")

NO_COMPILER = None if shutil.which("cc") else "no C compiler (cc): system calls cannot be made to fail"
"""Why these trials cannot be made here."""


class Calls(enum.IntFlag):
    """Kinds of system calls, as in `system_calls.c`."""

    ASKS = 1
    READS = 2
    CREATES = 4
    WRITES = 8
    CHANGES = 16
    SYNCS = 32
    DISK = CREATES | WRITES | CHANGES | SYNCS
    ALL = ASKS | READS | DISK


class Strike(enum.IntEnum):
    """What happens at a call, as in `system_calls.c`."""

    NOTHING = 0
    ONCE = 1
    FROM_THEN_ON = 2
    HALF = 3
    TORN = 4
    KILLED = 5
    CUT = 6
    CHANGED = 7
    SIGNALLED = 8


@dataclass(frozen=True)
class Fault:
    """How a call fails: of which kinds, and what happens at it."""

    name: str
    kinds: Calls
    strike: Strike
    error: int = 0


KILLED = Fault("killed", Calls.DISK, Strike.KILLED)
TORN = Fault("killed amid a write", Calls.WRITES, Strike.TORN)
BROKEN = Fault("EIO", Calls.ALL, Strike.ONCE, errno.EIO)
FULL = Fault("ENOSPC", Calls.CREATES | Calls.WRITES, Strike.FROM_THEN_ON, errno.ENOSPC)
READ_ONLY = Fault("EROFS", Calls.CREATES | Calls.WRITES | Calls.CHANGES, Strike.FROM_THEN_ON, errno.EROFS)
CUT = Fault("cut by another", Calls.READS, Strike.CUT)
CHANGED = Fault("changed by another", Calls.READS, Strike.CHANGED)
INTERRUPTED = Fault("Ctrl-C", Calls.DISK | Calls.READS, Strike.SIGNALLED, signal.SIGINT)
HALF = Fault("half", Calls.WRITES | Calls.READS, Strike.HALF)


@cache
def library() -> Path:
    """The compiled library."""
    built = Path(_BUILT.name) / "system_calls.so"
    command = ["cc", "-O1", "-shared", "-fPIC", "-o", str(built), str(SOURCE), "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    return built


def script(name: str, *arguments: object, timeout: float = 600) -> str:
    """What a script of tests/support prints, started with the library preloaded."""
    command = [sys.executable, str(SOURCE.with_name(name)), *map(str, arguments)]
    variables = os.environ | {"LD_PRELOAD": str(library()), "PYTHONPATH": str(SOURCE.parents[1])}
    completed = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=timeout)
    assert completed.returncode == 0, completed.stderr[-6000:]
    return completed.stdout


def begin(
    folder: Path, kinds: Calls, at: int = 0, strike: Strike = Strike.NOTHING, error: int = 0, log: int = -1
) -> None:
    """From now on count calls of these kinds on what lies in a folder, and strike at one of them.

    Args:
        log: a handle where all that change the disk are written down.
    """
    ctypes.CDLL(None).begin_calls(os.fsencode(folder), int(kinds), ctypes.c_long(at), int(strike), error, log)


def end() -> list[int]:
    """How many there were, of each kind."""
    counts = (ctypes.c_long * 6)()
    ctypes.CDLL(None).end_calls(counts)
    return list(counts)


def total(counts: list[int], kinds: Calls) -> int:
    """How many calls of these kinds."""
    return sum(count for bit, count in enumerate(counts) if kinds & 1 << bit)
