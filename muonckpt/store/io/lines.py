"""Lines that one process appends, and that survive a crash of the machine.

In a file system they are a file, synced line by line.  Objects cannot grow, so in a store they are a folder with one
object for each line.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from .location import Location, Remote, asking, at_each


class Lines(Protocol):
    """A place for lines; one thread at a time adds to it."""

    def add(self, line: bytes) -> None:
        """Add a line, given without its end, and wait until it is on the disk or in the store."""
        ...

    def close(self) -> None:
        """Add no more."""
        ...


def new_lines(place: Location) -> Lines:
    """A new place for lines, where nothing exists yet."""
    return _Objects(place) if isinstance(place, Remote) else _File(place)


def read_lines(place: Location) -> list[bytes]:
    """All lines of a place, without their ends.  The last may have been cut off by a crash."""
    if isinstance(place, Path):
        return place.read_bytes().splitlines()
    objects = sorted(place.iterdir(), key=lambda line: line.name)
    return at_each(place, content, objects)


def content(place: Remote) -> bytes:
    """A small object, whole."""
    with asking(place):
        return bytes(place.fs.cat_file(place.path))


class _File:
    def __init__(self, path: Path) -> None:
        self._stream = path.open("xb")

    def add(self, line: bytes) -> None:
        self._stream.write(line + b"\n")
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        self._stream.close()


class _Objects:
    def __init__(self, place: Remote) -> None:
        self._place = place
        self._count = 0

    def add(self, line: bytes) -> None:
        (self._place / f"{self._count:08}").write(line)
        self._count += 1

    def close(self) -> None:
        """Every line is an object of its own."""
