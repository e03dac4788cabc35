"""A lock file, which another process takes over only if its user asks to resume the work.

On one machine the kernel knows whether the process that made it is alive.  A network file system may not, and an object
may stay after a crash.  So a user may take the lock over, and the earlier owner can see that it has lost it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from .location import Location, Remote, is_there
from .new_file import read_object


class InUse(Exception):
    """A living process has the lock."""


def open_lock(folder: Location, name: str) -> FileLock | ObjectLock:
    """Open or make the lock file of this name, which locks the directory; raise `InUse` if another process has it."""
    return ObjectLock(folder / name) if isinstance(folder, Remote) else FileLock(folder, name)


def lock_directory(folder: Path) -> int | None:
    """Lock a directory until the returned handle is closed; None where there are no such locks.

    Raises:
        InUse: another process has locked it, or it has been renamed.
        FileNotFoundError: it has been removed.
    """
    with ExitStack() as stack:
        handle, is_locked = _lock_folder(folder, stack)
        if is_locked:
            stack.pop_all()
            return handle
    return None


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


def _lock_folder(folder: Path, stack: ExitStack) -> tuple[int, bool]:
    """Open and lock a directory; return its handle, which ``stack`` closes, and whether there are such locks."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    stack.callback(os.close, handle)
    is_locked = _lock(handle)
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(handle), folder.stat()):
            return handle, is_locked
    raise InUse  # its owner has just renamed it


class FileLock:
    """Locks by a file with a line for each owner; the last counts, ``earlier`` are those before, None if it is new.

    Where the file system supports it, the kernel locks the file, so that other machines see it, and the directory, so
    that no process enters while it is renamed.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._path, self._line = folder / name, b""
        with ExitStack() as stack:
            # The directory first: who renames it has locked it, too.
            _lock_folder(folder, stack)
            self._path.parent.mkdir(exist_ok=True)
            try:
                self._stream, is_new = stack.enter_context(self._path.open("xb+")), True
            except FileExistsError:
                self._stream, is_new = stack.enter_context(self._path.open("rb+")), False
            # The file's lock is what other machines see; its lines tell who had it.
            _lock(self._stream.fileno())
            self.earlier = None if is_new else self._stream.read().splitlines()
            self._closing = stack.pop_all()

    def sign(self, line: bytes) -> None:
        """Become its owner; the line identifies this process."""
        self._line = line
        self._stream.seek(0, os.SEEK_END)
        self._stream.write(b"\n" + line)  # the line before may have been cut off
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def is_mine(self) -> bool:
        """Return True if the lock exists, and no other process has become its owner since."""
        with suppress(FileNotFoundError):
            return self._path.read_bytes().splitlines()[-1:] == [self._line]
        return False

    def close(self) -> None:
        self._closing.close()


def _lock(handle: int) -> bool:
    """Lock a file; return False if this file system has no such locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InUse from None
    except OSError:
        return False
    return True


class ObjectLock:
    """Locks by an object, in a store such as S3 that can write one only where none exists."""

    def __init__(self, place: Remote) -> None:
        self._place, self._line = place, b""
        self.earlier = [read_object(place)] if is_there(place) else None

    def sign(self, line: bytes) -> None:
        # A user has asked to take over the lock of an earlier owner; a new one must not exist.
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
            return read_object(self._place) == self._line
        return False

    def close(self) -> None:
        """Do nothing: other processes see only the object."""
