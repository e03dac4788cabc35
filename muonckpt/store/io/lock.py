"""Locks of directories: on one machine the kernel knows whether the process that has one is alive."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path


class InUse(Exception):
    """A living process has the lock."""


def lock_directory(folder: Path) -> int | None:
    """Lock a directory until the returned handle is closed; None where there are no such locks.

    Raises:
        InUse: another process has locked it, or it has been renamed.
        FileNotFoundError: it has been removed.
    """
    with ExitStack() as stack:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, handle)
        is_locked = _lock(handle)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), folder.stat()):
                if not is_locked:
                    return None
                stack.pop_all()
                return handle
    raise InUse  # its owner has just renamed it


@contextmanager
def wait_for_lock(folder: Path) -> Iterator[None]:
    """Lock a directory during the block, once no other process does; where there are no such locks do without."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    """Lock a file; return False if this file system has no such locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InUse from None
    except OSError:
        return False
    return True
