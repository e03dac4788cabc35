"""Opening files that others made: regular ones only, without following a link or waiting for a pipe."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from ...errors import DamageError, SourceError
from .location import Location, Remote


class FileBytes(Protocol):
    """The bytes of a file, by ranges; offsets and lengths in bytes.

    ``gap`` is the largest gap in bytes that one read should include rather than skip; ``most`` the most bytes of one
    read.
    """

    gap: int
    most: int

    @property
    def size(self) -> int:
        """The present size."""
        ...

    def view(self, offset: int, length: int) -> memoryview: ...

    def views(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]: ...

    def release(self, offset: int, length: int) -> None:
        """Free the memory of a range that is not needed for now."""
        ...


class File(Protocol):
    """An open file."""

    @property
    def size(self) -> int: ...

    @property
    def state(self) -> tuple[object, ...]:
        """A value that changes when the file is written."""
        ...

    def read(self, offset: int, length: int) -> bytes:
        """The bytes of a range; fewer where the file ends."""
        ...

    def mapped(self) -> FileBytes:
        """Its bytes, which stay accessible after it has been closed."""
        ...

    def forget(self) -> None:
        """Drop the file from the page cache, so that the next read comes from the disk."""
        ...


class LocalFile:
    """An open local file."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    @property
    def size(self) -> int:
        return os.fstat(self._handle).st_size

    @property
    def state(self) -> tuple[object, ...]:
        status = os.fstat(self._handle)
        return status.st_ino, status.st_size, status.st_mtime_ns

    def read(self, offset: int, length: int) -> bytes:
        return os.pread(self._handle, length, offset)

    def mapped(self) -> Mapped:
        return Mapped(self._handle)

    def forget(self) -> None:
        os.posix_fadvise(self._handle, 0, 0, os.POSIX_FADV_DONTNEED)


class Held:
    """Bytes in memory."""

    gap = most = 1 << 63

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)
        self.size = len(data)

    def view(self, offset: int, length: int) -> memoryview:
        return self._data[offset : offset + length]

    def views(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        return [self.view(*span) for span in ranges]

    def release(self, offset: int, length: int) -> None:
        """Do nothing: the memory belongs to the caller."""


class Mapped:
    """A read-only memory map of a file."""

    gap = most = 1 << 63

    def __init__(self, handle: int) -> None:
        self._map = mmap.mmap(handle, 0, access=mmap.ACCESS_READ) if os.fstat(handle).st_size else None

    @property
    def size(self) -> int:
        """The present size: touching a mapped page behind the end of a cut file would end the process."""
        return min(self._map.size(), len(self._map)) if self._map else 0

    def view(self, offset: int, length: int) -> memoryview:
        return memoryview(self._map or b"")[offset : offset + length]

    def views(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        return [self.view(*span) for span in ranges]

    def release(self, offset: int, length: int) -> None:
        """Unmap the pages: they stay in the page cache, but no longer count as memory of this process."""
        if self._map:
            first = offset // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, first, offset + length - first)


@contextmanager
def open_regular(file: Location) -> Iterator[File]:
    """Open a regular file, without following a link or waiting for a pipe; or an object.

    Raises:
        DamageError: it does not exist.
        SourceError: it is not a regular file, or cannot be opened.
    """
    if isinstance(file, Remote):
        yield file.open()
        return
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        why = "it is a symbolic link, expected a regular file" if error.errno == errno.ELOOP else error.strerror
        kind = DamageError if error.errno == errno.ENOENT else SourceError
        raise kind(f"cannot open {file}: {why}") from error
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise SourceError(f"{file}: expected a regular file, found another kind (a pipe, device or directory)")
        yield LocalFile(handle)
    finally:
        os.close(handle)


def read_whole(file: Location) -> bytes:
    """The bytes of a small regular file, or of a small object.

    Raises:
        DamageError: it does not exist.
        SourceError: it is not a regular file, or cannot be opened.
    """
    with open_regular(file) as opened:
        return opened.read(0, opened.size)
