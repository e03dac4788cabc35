"""Files that others made: opened only if regular, without following a link or waiting for a pipe; lengths checked."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np

from ...names.errors import DamageError, LostFileError, SourceError, about
from ...record.record import Extent
from .limits import check_description, check_text, on_disk
from .location import Location, Remote, RemoteFile, map_each
from .pace import Pace

READ_BYTES = 8 << 20
"""Most bytes of a local file in one read from which boxes are gathered: they stay in cache meanwhile."""

_GAP = 64 << 10
"""Largest gap, in bytes, between two pieces of a local file that one read includes."""

_IN_ORDER = 2 << 20
"""Bytes of a local file that are read at a time where all are read in order."""

_PACED = 1 << 20
"""Most bytes of a local file that are read without asking again, so that no burst exceeds the rate by much."""


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
        """Return the bytes that it has on the disk: fewer than its size if it has holes."""
        return on_disk(_status(self._path, self._handle))

    @property
    def state(self) -> tuple[object, ...]:
        """Return a value that changes when the file is written."""
        status = _status(self._path, self._handle)
        return status.st_ino, status.st_size, status.st_mtime_ns

    def read(self, offset: int, length: int) -> bytes:
        """Read a range; fewer bytes where the file ends."""
        parts = []
        try:
            while length and (part := os.pread(self._handle, length, offset)):  # at most 2 GiB at a time
                parts.append(part)
                offset, length = offset + len(part), length - len(part)
        except OSError as error:
            raise _unreadable(self._path, error) from error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def contents(self) -> LocalBytes:
        """Return its bytes, which stay accessible after it has been closed."""
        try:
            return LocalBytes(self._path, os.dup(self._handle))
        except OSError as error:
            raise _unreadable(self._path, error) from error

    def in_order(self) -> Iterator[memoryview]:
        """Yield all bytes from the first to the last, in memory that the next ones overwrite.

        They come from the disk, past the system's cache, where the file system can do that: pages of the cache cost
        more than to read them.  Elsewhere the system is asked to drop its pages first.
        """
        buffer, offset, size = memoryview(mmap.mmap(-1, _IN_ORDER)), 0, self.size  # begins with a page
        os.posix_fadvise(self._handle, 0, 0, os.POSIX_FADV_DONTNEED)
        past_cache = self._set_past_cache(True)
        while offset < size:
            try:
                count = os.preadv(self._handle, (buffer,), offset)
            except OSError as error:
                if not past_cache or error.errno != errno.EINVAL:
                    raise _unreadable(self._path, error) from error
                past_cache = not self._set_past_cache(False)  # the disk's blocks are larger than pages
                continue
            if not count:
                return
            yield buffer[:count]
            offset += count

    def _set_past_cache(self, wanted: bool) -> bool:
        """Let reads go past the system's cache, or through it; return whether the file system does so."""
        flags = fcntl.fcntl(self._handle, fcntl.F_GETFL) & ~os.O_DIRECT
        try:
            fcntl.fcntl(self._handle, fcntl.F_SETFL, flags | (os.O_DIRECT if wanted else 0))
        except OSError:
            return False
        return True


class Held:
    """Bytes in memory that stand in for a file."""

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

    It is not mapped: if another program cuts a mapped file, touching its pages ends the process (SIGBUS).

    Args:
        handle: a file descriptor, which this object closes.
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


class PacedBytes:
    """The bytes of a file, read at a pace."""

    def __init__(self, file: LocalBytes | RemoteFile, pace: Pace) -> None:
        self._file, self._pace = file, pace
        self.gap, self.most = file.gap, file.most

    @property
    def size(self) -> int:
        return self._file.size

    def view(self, offset: int, length: int) -> memoryview:
        self._pace(length)
        return self._file.view(offset, length)

    def views(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        self._pace(sum(length for _, length in ranges))
        return self._file.views(ranges)

    def fill(self, buffer: memoryview, offset: int) -> None:
        for start in range(0, len(buffer), _PACED):
            part = buffer[start : start + _PACED]
            self._pace(len(part))
            self._file.fill(part, offset + start)


def _status(path: Path, handle: int) -> os.stat_result:
    try:
        return os.fstat(handle)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> SourceError:
    return SourceError(f"cannot read {path}: {error.strerror}")


File = LocalFile | RemoteFile
"""An open file."""

FileBytes = LocalBytes | RemoteFile | Held | PacedBytes
"""The bytes of a file, by ranges; offsets and lengths in bytes.

``gap`` is the largest gap that one read should include rather than skip, ``most`` the most bytes of one read.
"""


@contextmanager
def open_regular(file: Location) -> Iterator[File]:
    """Open a regular file, without following a link or waiting for a pipe; or an object.

    Raises:
        DamageError: it does not exist, or a folder, a pipe or a device is in its place.
        SourceError: it is a link, or cannot be opened.
    """
    if isinstance(file, Remote):
        yield file.open()
        return
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        why = "it is a symbolic link, expected a regular file" if error.errno == errno.ELOOP else error.strerror
        kind = DamageError if error.errno in (errno.ENOENT, errno.ENOTDIR) else SourceError
        raise kind(f"cannot open {file}: {why}") from error
    except ValueError as error:  # a zero byte, or what is no text
        raise SourceError(f"cannot open {str(file)!r}: {error}") from error
    try:
        if not stat.S_ISREG(_status(Path(file), handle).st_mode):
            raise DamageError(f"{file}: expected a regular file, found another kind (a pipe, device or directory)")
        yield LocalFile(file, handle)
    finally:
        os.close(handle)


def read_text_file(file: Location) -> bytes:
    """Read a JSON or TOML text that describes the files beside it; raises as `open_regular`.

    Raises:
        LimitError: it is too long in proportion to those files, or has too many parts.
    """
    with open_regular(file) as opened:
        size = opened.size
        check_description(file, size)
        data = opened.read(0, size)
        with about(file):
            check_text(data)
        return data


def extent_faults(path: Location, named: Iterable[tuple[Extent, str]]) -> Iterator[SourceError]:
    """Yield the faults of files: one for all that are missing, then at most one for each that is cut.

    Args:
        path: the checkpoint's directory.
        named: extents, none of them empty, each with its name for errors; two that overlap are a fault as well.
    """
    items: defaultdict[str, list[tuple[Extent, str]]] = defaultdict(list)
    for extent, what in named:
        items[extent.file].append((extent, what))

    def is_there(name: str) -> bool:
        return (path / name).exists() or (path / name).is_symlink()

    def size_of(name: str) -> int | SourceError:
        try:
            with open_regular(path / name) as file:
                return file.size
        except SourceError as error:
            return error

    names = sorted(items)
    are_there = dict(zip(names, map_each(path, is_there, names), strict=True))
    missing = [name for name in names if not are_there[name]]
    if missing:
        yield LostFileError(
            f"expected {len(items)} files in {path}, found {len(missing)} missing: {', '.join(missing)}"
        )
    present = [name for name in names if are_there[name]]
    for name, size in zip(present, map_each(path, size_of, present), strict=True):
        if isinstance(size, SourceError):
            yield size
            continue
        extents = sorted(items[name], key=lambda item: item[0].offset)
        for (extent, what), (following, next_item) in pairwise([*extents, (Extent(name, size, 0), "")]):
            if extent.end > following.offset:
                reason = f"{next_item} begins before that" if next_item else f"the file has {size}: it was cut"
                kind = DamageError if next_item else LostFileError
                yield kind(f"{path / name}: expected {what} up to byte {extent.end}, but {reason}")
                break
