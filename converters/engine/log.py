"""A log: lines that one process adds and others read at once, in a file or in an object store.

In a file system it is one file, synced line by line.  Objects cannot grow, so in a store it is a folder with one object
for each line, and one more that is written again and again as a sign of life.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from ...store.io.location import Location, Remote, asking

First = Callable[[bool], bytes]
"""Makes the first line of a log.  It is told whether the log is under a lock that ends with its process."""


class Log(Protocol):
    """What its writer does with a log."""

    def add(self, line: bytes) -> None:
        """Put a line behind the others, which stays even if the machine fails."""
        ...

    def beat(self) -> None:
        """Give a sign of life.  Raises `OSError` if the log has been removed."""
        ...

    def close(self) -> None:
        """Nothing more is added; the lock ends."""
        ...


@dataclass(frozen=True, slots=True)
class Look:
    """What is seen of a log: the lines that are new, a stamp that changes as long as its writer lives, and whether it
    is under no lock now."""

    lines: tuple[bytes, ...]
    stamp: object
    free: bool


class Reader(Protocol):
    def look(self) -> Look | None:
        """None if there is no such log."""
        ...


def create(place: Location, first: First) -> Log:
    """A new log, which appears with its first line.

    Raises:
        FileExistsError: another process has made it.
    """
    return ObjectLog(place, first) if isinstance(place, Remote) else FileLog(place, first)


def reader(place: Location) -> Reader:
    return ObjectReader(place) if isinstance(place, Remote) else FileReader(place)


def remove(place: Location) -> None:
    if isinstance(place, Remote):
        place.remove()
    else:
        place.unlink(missing_ok=True)


class FileLog:
    """Written under another name and linked to its own: that makes it appear whole, and only one process have it."""

    def __init__(self, path: Path, first: First) -> None:
        self._path = path
        draft = path.with_name(f".{uuid.uuid4().hex}")
        self._stream = draft.open("xb")
        try:
            self.add(first(_locked(self._stream, fcntl.LOCK_EX)))
            os.link(draft, path)
        except BaseException:
            self._stream.close()
            raise
        finally:
            with suppress(OSError):  # it does no harm
                draft.unlink()

    def add(self, line: bytes) -> None:
        self._stream.write(line)
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def beat(self) -> None:
        os.utime(self._stream.fileno())
        if not os.fstat(self._stream.fileno()).st_nlink:
            raise FileNotFoundError(f"{self._path} was removed")

    def close(self) -> None:
        self._stream.close()


class FileReader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def look(self) -> Look | None:
        try:
            stream = self._path.open("rb")  # anew each time: only then NFS asks the server
        except FileNotFoundError:
            return None
        with stream:
            free = _locked(stream, fcntl.LOCK_SH)
            stream.seek(self._at)  # after the lock: what was written before it was given up must be seen
            lines = tuple(line for line in stream if line.endswith(b"\n"))  # the last may be on its way, or cut
            self._at += sum(map(len, lines))
            state = os.fstat(stream.fileno())
            return Look(lines, (state.st_mtime_ns, state.st_size), free)


class ObjectLog:
    """The store must be able to write an object only if there is none of that name, as S3 and its like are."""

    def __init__(self, place: Remote, first: First) -> None:
        self._place = place
        self._count = 1
        _line(place, 0).create(first(False))

    def add(self, line: bytes) -> None:
        _line(self._place, self._count).write(line)
        self._count += 1

    def beat(self) -> None:
        (self._place / _BEAT).write(uuid.uuid4().bytes)
        if not _line(self._place, 0).exists():
            (self._place / _BEAT).unlink(missing_ok=True)
            raise FileNotFoundError(f"{self._place} was removed")

    def close(self) -> None:
        """There is no lock."""


class ObjectReader:
    def __init__(self, place: Remote) -> None:
        self._place = place
        self._count = 0

    def look(self) -> Look | None:
        try:
            names = {each.name for each in self._place.iterdir()}
            lines = []
            while _line(self._place, self._count).name in names:
                lines.append(_content(_line(self._place, self._count)))
                self._count += 1
            beat = _content(self._place / _BEAT) if _BEAT in names else b""
        except FileNotFoundError:  # also when it is being removed
            return None
        return Look(tuple(lines), (self._count, beat), free=True) if names else None


_BEAT = "beat"


def _line(place: Remote, number: int) -> Remote:
    return place / f"{number:08}"


def _content(place: Remote) -> bytes:
    with asking(place):
        return bytes(place.fs.cat_file(place.path))


def _locked(stream: BinaryIO, kind: int) -> bool:
    """Whether the lock could be had: some file systems have none."""
    try:
        fcntl.flock(stream, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
