"""Opening files that somebody else made: regular ones only, without following a link or waiting for a pipe."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from ...errors import SourceError
from .location import Location, Remote


class FileBytes(Protocol):
    """The bytes of a file, by ranges; offsets and lengths in bytes.

    ``gap`` is the most bytes between two ranges that are rather taken along than asked apart; ``most`` what may be
    asked at once.
    """

    gap: int
    most: int

    @property
    def size(self) -> int:
        """Now."""
        ...

    def view(self, offset: int, length: int) -> memoryview: ...

    def views(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]: ...

    def release(self, offset: int, length: int) -> None:
        """They are not needed for now."""
        ...


class File(Protocol):
    """An open file."""

    @property
    def size(self) -> int: ...

    @property
    def state(self) -> tuple[object, ...]:
        """Another one as soon as somebody has written the file."""
        ...

    def read(self, offset: int, length: int) -> bytes:
        """That range; shorter where the file ends before."""
        ...

    def mapped(self) -> FileBytes:
        """Its bytes, also after it has been closed."""
        ...

    def forget(self) -> None:
        """What is read next should come from the disk."""
        ...


class LocalFile:
    """An open file of this machine."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    @property
    def size(self) -> int:
        return os.fstat(self._handle).st_size

    @property
    def state(self) -> tuple[object, ...]:
        found = os.fstat(self._handle)
        return found.st_ino, found.st_size, found.st_mtime_ns

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
        return [self.view(*each) for each in ranges]

    def release(self, offset: int, length: int) -> None:
        """They are somebody else's."""


class Mapped:
    """A read-only memory map of a file."""

    gap = most = 1 << 63

    def __init__(self, handle: int) -> None:
        self._map = mmap.mmap(handle, 0, access=mmap.ACCESS_READ) if os.fstat(handle).st_size else None

    @property
    def size(self) -> int:
        """Now: to touch a page of a map whose file has been cut meanwhile ends the process."""
        return min(self._map.size(), len(self._map)) if self._map else 0

    def view(self, offset: int, length: int) -> memoryview:
        return memoryview(self._map or b"")[offset : offset + length]

    def views(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        return [self.view(*each) for each in ranges]

    def release(self, offset: int, length: int) -> None:
        """Its pages stay in the page cache, but no longer count as memory of this process."""
        if self._map:
            first = offset // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, first, offset + length - first)


@contextmanager
def open_regular(file: Location) -> Iterator[File]:
    """A regular file, opened without following a link or waiting for a pipe; or an object.

    Raises:
        SourceError: there is none.
    """
    if isinstance(file, Remote):
        yield file.open()
        return
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        why = "it is a symbolic link, expected a regular file" if error.errno == errno.ELOOP else error.strerror
        raise SourceError(f"cannot open {file}: {why}") from error
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise SourceError(f"{file}: expected a regular file, found another kind (a pipe, device or directory)")
        yield LocalFile(handle)
    finally:
        os.close(handle)
