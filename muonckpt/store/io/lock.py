"""A lock file: one process makes it, and another takes it over only if its user asks to resume the work.

On one machine the kernel knows whether the process that made it is alive.  On a network file system that depends on
the system and its options, and an object store knows nothing of processes.  There a lock left by a crash looks like
one in use, so a process may take it over at its user's request, and the earlier owner can see that it has lost it.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Protocol

from .lines import content
from .location import Location, Remote


class InUse(Exception):
    """A living process has the lock."""


class Lock(Protocol):
    """A lock that this process has opened.

    ``earlier`` are the lines of its earlier owners, or None if the lock is new.
    """

    @property
    def earlier(self) -> list[bytes] | None: ...

    def sign(self, line: bytes) -> None:
        """Become its owner, with a line of its own."""
        ...

    def is_mine(self) -> bool:
        """Whether the lock exists, and no other process has become its owner since."""
        ...

    def close(self) -> None:
        """Let other processes open it."""
        ...


def open_lock(folder: Location, name: str) -> Lock:
    """Open the lock of this name for everything in a directory, or make it.

    Raises:
        InUse: another process has it open.
    """
    return _ObjectLock(folder / name) if isinstance(folder, Remote) else _FileLock(folder, name)


class _FileLock:
    """A file with a line for each owner, of which the last counts.

    Where the file system supports it, the kernel locks the file, so that other machines see it as well, and the
    directory, so that no process enters while it is renamed.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._path, self._line = folder / name, b""
        self._closing = ExitStack()
        with ExitStack() as stack:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, handle)
            _lock(handle)
            if not _is(folder, handle):  # its owner has just renamed it
                raise InUse
            self._path.parent.mkdir(exist_ok=True)
            try:
                self._stream, is_new = stack.enter_context(self._path.open("xb+")), True
            except FileExistsError:
                self._stream, is_new = stack.enter_context(self._path.open("rb+")), False
            _lock(self._stream.fileno())
            self.earlier = None if is_new else self._stream.read().splitlines()
            self._closing = stack.pop_all()

    def sign(self, line: bytes) -> None:
        self._line = line
        self._stream.seek(0, os.SEEK_END)
        self._stream.write(b"\n" + line)  # the line before may have been cut off
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def is_mine(self) -> bool:
        with suppress(FileNotFoundError):
            return self._path.read_bytes().splitlines()[-1:] == [self._line]
        return False

    def close(self) -> None:
        self._closing.close()


def _lock(handle: int) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InUse from None
    except OSError:
        return  # this file system has no such locks


def _is(folder: Path, handle: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), folder.stat())
    return False


class _ObjectLock:
    """The store must support writing an object only if none of that name exists, as S3 and similar stores do."""

    def __init__(self, place: Remote) -> None:
        self._place, self._line = place, b""
        self.earlier = [content(place)] if place.exists() else None

    def sign(self, line: bytes) -> None:
        self._line = line
        if self.earlier is not None:
            self._place.write(line)
            return
        try:
            self._place.create(line)
        except FileExistsError:
            raise InUse from None

    def is_mine(self) -> bool:
        with suppress(FileNotFoundError):
            return content(self._place) == self._line
        return False

    def close(self) -> None:
        """Do nothing: other processes see only the object."""
