"""Files that others made: opened only if regular, without following a link or waiting for a pipe; lengths checked."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress, pairwise
from pathlib import Path
from threading import Lock

import numpy as np

from ...names.errors import DamageError, DiskError, LostFileError, SourceError, about
from ...names.wording import listed
from ...record.record import Extent
from .limits import bytes_on_disk, check_description, check_text
from .location import Location, Remote, RemoteFile, is_there, kind_of, map_each, unavailable

READ_BYTES = 8 << 20
"""Most bytes of a local file in one read from which boxes are gathered: they stay in cache meanwhile."""

_MAX_GAP = 64 << 10
"""Largest gap, in bytes, between two pieces of a local file that one read includes."""

_PACED_BYTES = 1 << 20
"""Most bytes of a local file that are read without asking again, so that no burst exceeds the rate by much."""


class LocalFile:
    """Reads an open local file range by range; it is closed when its block ends, or when the last reference is gone.

    It is not mapped: if another program cuts a mapped file, touching its pages ends the process (SIGBUS).

    Args:
        handle: a file descriptor, which this object closes.
    """

    gap, max_bytes = _MAX_GAP, READ_BYTES

    def __init__(self, path: Path, handle: int) -> None:
        self._path = path
        self._handle = handle

    def __enter__(self) -> LocalFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)
        self._handle = -1

    def __del__(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)

    @property
    def place(self) -> Path:
        return self._path

    def status(self) -> os.stat_result:
        try:
            return os.fstat(self._handle)
        except OSError as error:
            raise unavailable(self._path, error) from error

    @property
    def size(self) -> int:
        return self.status().st_size

    @property
    def on_disk(self) -> int:
        """The bytes that it has on the disk: fewer than its size if it has holes."""
        return bytes_on_disk(self.status())

    @property
    def state(self) -> tuple[object, ...]:
        """A value that changes when the file is written."""
        status = self.status()
        return status.st_ino, status.st_size, status.st_mtime_ns

    def read(self, offset: int, length: int) -> bytes:
        """Read a range; fewer bytes where the file ends."""
        parts = []
        try:
            while length and (part := os.pread(self._handle, length, offset)):  # at most 2 GiB at a time
                parts.append(part)
                offset, length = offset + len(part), length - len(part)
        except OSError as error:
            raise unavailable(self._path, error) from error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def view(self, offset: int, length: int) -> memoryview:
        buffer = np.empty(length, np.uint8).data
        self.fill(buffer, offset)
        return buffer

    def views(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        return [self.view(offset, length) for offset, length in ranges]

    def fill(self, buffer: memoryview, offset: int) -> None:
        """Read as many bytes as the buffer has; raise `DamageError` if the file ends before."""
        filled = 0
        while filled < len(buffer):
            try:
                count = os.preadv(self._handle, (buffer[filled:],), offset + filled)
            except OSError as error:
                raise unavailable(self._path, error) from error
            if not count:
                raise DamageError(
                    f"{self._path}: expected {len(buffer)} bytes at byte {offset}, found {filled}: it was cut"
                )
            filled += count


class BytesInMemory:
    """Reads bytes in memory as a file."""

    gap, max_bytes = _MAX_GAP, READ_BYTES

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)
        self.size = len(data)

    def view(self, offset: int, length: int) -> memoryview:
        return self._data[offset : offset + length]

    def views(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        return [self.view(offset, length) for offset, length in ranges]

    def fill(self, buffer: memoryview, offset: int) -> None:
        buffer[:] = self.view(offset, len(buffer))


class Pace:
    """Holds the threads that read back to a rate; called with the bytes of each read, before it.

    Args:
        rate: bytes a second.
        clock, sleep: of this process; others are for tests.
    """

    def __init__(
        self, rate: float, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        if not rate > 0:
            raise ValueError(f"a rate of {rate} bytes a second reads nothing")
        self._rate, self._clock, self._sleep = rate, clock, sleep
        self._busy_until = clock()
        self._lock = Lock()

    def __call__(self, count: int) -> None:
        """Wait until all earlier reads have had their time."""
        with self._lock:
            now = self._clock()
            start = max(self._busy_until, now)
            self._busy_until = start + count / self._rate
        if start > now:
            self._sleep(start - now)


class PacedFile:
    """Reads an open file at a pace."""

    def __init__(self, file: File, pace: Pace) -> None:
        self._file, self._pace = file, pace
        self.gap, self.max_bytes = file.gap, file.max_bytes

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
        for start in range(0, len(buffer), _PACED_BYTES):
            part = buffer[start : start + _PACED_BYTES]
            self._pace(len(part))
            self._file.fill(part, offset + start)


File = LocalFile | RemoteFile
"""An open file."""

FileBytes = File | BytesInMemory | PacedFile
"""The bytes of a file, by ranges; offsets and lengths in bytes.

``gap`` is the largest gap that one read should include rather than skip, ``max_bytes`` the most bytes of one read.
"""


_ANSWERS: Mapping[int | None, tuple[type[SourceError], str]] = {
    errno.ENOENT: (DamageError, ""),
    errno.ENOTDIR: (DamageError, ""),
    errno.ENXIO: (DamageError, "expected a regular file, found another kind (a socket)"),
    errno.ELOOP: (SourceError, "it is a symbolic link, expected a regular file"),
    errno.ENAMETOOLONG: (SourceError, ""),
}
"""Errors with which the system names the kind of a file, or its absence, each with our error and its reason."""


def open_regular(file: Location) -> File:
    """Open a regular file, without following a link or waiting for a pipe; or an object.

    Raises:
        DamageError: it does not exist, or a folder, a pipe or a device is in its place.
        SourceError: it is a link, or no file can have its name.
        UnavailableError: it cannot be opened.
    """
    if isinstance(file, Remote):
        return file.open()
    # Opening a pipe would wait for its writer, and a link may lead out of the checkpoint.
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            kind_of(file)  # raises where links lead to each other
        if error.errno not in _ANSWERS:
            raise unavailable(file, error) from error
        kind, reason = _ANSWERS[error.errno]
        raise kind(f"cannot open {file}: {reason or error.strerror}") from error
    except ValueError as error:  # a zero byte, or no text
        raise SourceError(f"cannot open {str(file)!r}: {error}") from error
    # Only an open file has a fixed kind: its name may come to name another file.
    opened = LocalFile(Path(file), handle)
    if not stat.S_ISREG(opened.status().st_mode):
        raise DamageError(f"{file}: expected a regular file, found another kind (a pipe, device or directory)")
    return opened


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


def extent_faults(path: Location, named_extents: Iterable[tuple[Extent, str]]) -> Iterator[SourceError | DiskError]:
    """Yield the faults of files: one for all that are missing, then at most one for each that is cut.

    Raises `UnavailableError` for a file that cannot be looked at, but yields a `DiskError`.

    Args:
        path: the checkpoint's directory.
        named_extents: extents, none of them empty, each with its name for errors; two that overlap are a fault as well.
    """

    def size_of(name: str) -> int | SourceError | DiskError:
        try:
            with open_regular(path / name) as file:
                return file.size
        except (SourceError, DiskError) as error:
            return error

    extents_in: defaultdict[str, list[tuple[Extent, str]]] = defaultdict(list)
    for extent, noun in named_extents:
        extents_in[extent.file].append((extent, noun))
    names = sorted(extents_in)

    # Report missing files together: there may be thousands.
    are_there = map_each(path, lambda name: is_there(path / name), names)
    present = list(compress(names, are_there))
    if missing := sorted({*names} - {*present}):
        yield LostFileError(f"expected {len(names)} files in {path}, found {len(missing)} missing: {listed(missing)}")

    # The end of the file counts as an extent, before which the last one has to end.
    for name, size in zip(present, map_each(path, size_of, present), strict=True):
        if not isinstance(size, int):
            yield size
            continue
        extents = sorted(extents_in[name], key=lambda item: item[0].offset)
        for (extent, noun), (following, next_noun) in pairwise([*extents, (Extent(name, size, 0), "")]):
            if extent.end > following.offset:
                reason = f"{next_noun} begins before that" if next_noun else f"the file has {size}: it was cut"
                kind = DamageError if next_noun else LostFileError
                yield kind(f"{path / name}: expected {noun} up to byte {extent.end}, but {reason}")
                break
