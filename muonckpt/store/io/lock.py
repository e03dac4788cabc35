"""A lock file: made by one process only, and by the next only if it says that it goes on with the work of the first.

On one machine the kernel tells whether the process that made it lives.  On a network file system that depends on the
system and its options, and an object store knows nothing of processes.  There a lock that a crash has left looks like
one in use, so a process may take it over on its user's word, and its earlier owner can see that it has lost it.
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
    """Another process has the lock, and lives."""


class Lock(Protocol):
    """A lock that this process has opened.

    ``earlier`` is what its earlier owners have written into it, or None if it is new.
    """

    @property
    def earlier(self) -> list[bytes] | None: ...

    def sign(self, line: bytes) -> None:
        """Become its owner, with a line that no other owner has."""
        ...

    def is_mine(self) -> bool:
        """Whether the lock is there, and nobody has become its owner since."""
        ...

    def close(self) -> None:
        """Let others open it."""
        ...


def open_lock(folder: Location, name: str) -> Lock:
    """The lock of this name, for all that is in a directory; made if there is none.

    Raises:
        InUse: another process has it open.
    """
    return _ObjectLock(folder / name) if isinstance(folder, Remote) else _FileLock(folder, name)


class _FileLock:
    """A file with a line for each owner, of which the last counts.

    Where the file system can do that, the kernel locks it, so that other machines see it as well, and the directory, so
    that nobody enters while it is renamed.
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
    """The store must be able to write an object only if there is none of that name, as S3 and its like are."""

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
        """Nobody would see it."""
