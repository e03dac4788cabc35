"""Opening files that others made: regular ones only, without following a link or waiting for a pipe."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np

from ...errors import DamageError, SourceError, about
from .limits import check_description, check_text, on_disk
from .location import Location, Remote

READ_BYTES = 4 << 20
"""Most bytes of a local file in one read from which boxes are gathered: they stay in cache meanwhile."""

_GAP = 64 << 10
"""Largest gap, in bytes, between two pieces of a local file that one read includes."""


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

    def fill(self, buffer: memoryview, offset: int) -> None:
        """Read the bytes from ``offset`` on into a buffer, as many as it has."""
        ...


class File(Protocol):
    """An open file; ``gap`` and ``most`` as those of its bytes."""

    gap: int
    most: int

    @property
    def size(self) -> int: ...

    @property
    def state(self) -> tuple[object, ...]:
        """A value that changes when the file is written."""
        ...

    def read(self, offset: int, length: int) -> bytes:
        """The bytes of a range; fewer where the file ends."""
        ...

    @property
    def on_disk(self) -> int:
        """Bytes that it really has: fewer than its size if it has holes."""
        ...

    def contents(self) -> FileBytes:
        """Its bytes, which stay accessible after it has been closed."""
        ...

    def forget(self) -> None:
        """Drop the file from the page cache, so that the next read comes from the disk."""
        ...


class LocalFile:
    """An open local file."""

    gap, most = _GAP, READ_BYTES

    def __init__(self, path: Path, handle: int) -> None:
        self._path = path
        self._handle = handle

    @property
    def size(self) -> int:
        return _status(self._path, self._handle).st_size

    @property
    def on_disk(self) -> int:
        return on_disk(_status(self._path, self._handle))

    @property
    def state(self) -> tuple[object, ...]:
        status = _status(self._path, self._handle)
        return status.st_ino, status.st_size, status.st_mtime_ns

    def read(self, offset: int, length: int) -> bytes:
        parts = []
        try:
            while length and (part := os.pread(self._handle, length, offset)):  # at most 2 GiB at a time
                parts.append(part)
                offset, length = offset + len(part), length - len(part)
        except OSError as error:
            raise _unreadable(self._path, error) from error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def contents(self) -> LocalBytes:
        return LocalBytes(self._path, os.dup(self._handle))

    def forget(self) -> None:
        os.posix_fadvise(self._handle, 0, 0, os.POSIX_FADV_DONTNEED)


class Held:
    """Bytes in memory."""

    gap, most = _GAP, READ_BYTES

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)
        self.size = len(data)

    def view(self, offset: int, length: int) -> memoryview:
        return self._data[offset : offset + length]

    def views(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        return [self.view(*span) for span in ranges]

    def fill(self, buffer: memoryview, offset: int) -> None:
        buffer[:] = self.view(offset, len(buffer))


class LocalBytes:
    """The bytes of a local file, copied range by range.

    The file is not mapped: if another program cuts a mapped file, touching its pages ends the process (SIGBUS).

    Args:
        handle: a file descriptor, which is closed with this object.
    """

    gap, most = _GAP, READ_BYTES

    def __init__(self, path: Path, handle: int) -> None:
        self._path = path
        self._handle = handle

    def __del__(self) -> None:
        os.close(self._handle)

    @property
    def size(self) -> int:
        return _status(self._path, self._handle).st_size

    def view(self, offset: int, length: int) -> memoryview:
        buffer = np.empty(length, np.uint8).data
        self.fill(buffer, offset)
        return buffer

    def views(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        return [self.view(*span) for span in ranges]

    def fill(self, buffer: memoryview, offset: int) -> None:
        filled = 0
        while filled < len(buffer):
            try:
                count = os.preadv(self._handle, (buffer[filled:],), offset + filled)
            except OSError as error:
                raise _unreadable(self._path, error) from error
            if not count:
                raise DamageError(
                    f"{self._path}: expected {len(buffer)} bytes at byte {offset}, found {filled}: it was cut"
                )
            filled += count


def _status(path: Path, handle: int) -> os.stat_result:
    """What the system says of an open file.

    Raises:
        SourceError: the disk or the server does not answer.
    """
    try:
        return os.fstat(handle)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> SourceError:
    return SourceError(f"cannot read {path}: {error.strerror}")


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
        if not stat.S_ISREG(_status(Path(file), handle).st_mode):
            raise SourceError(f"{file}: expected a regular file, found another kind (a pipe, device or directory)")
        yield LocalFile(file, handle)
    finally:
        os.close(handle)


def read_whole(file: Location) -> bytes:
    """The bytes of a text, JSON or TOML, that describes the files beside it.

    Raises:
        DamageError: it does not exist.
        LimitError: it is longer than in proportion to them, or has too many parts.
        SourceError: it is not a regular file, or cannot be opened.
    """
    with open_regular(file) as opened:
        size = opened.size
        check_description(file, size)
        data = opened.read(0, size)
        with about(file):
            check_text(data)
        return data
