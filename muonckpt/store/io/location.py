"""Checkpoints in object stores, through fsspec: `Remote` stands where a `pathlib.Path` stands for a local place.

An object is read by ranges and written once, front to back; nothing is kept on a disk of this machine.  Credentials
come from where the store's own library looks for them, that is from the environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from ...errors import DestinationError, SourceError

GAP = 128 << 10
"""Bytes between two parts of an object that are rather read than asked for apart.  Amazon serves 5500 GETs a second
for a prefix (its guide "Best practices design patterns: optimizing Amazon S3 performance"): at 1 GB/s a request costs
as much as 180 kB."""

REQUEST_BYTES = 4 << 20
"""Bytes of an object that are asked for at a time, at most."""

PART = 8 << 20
"""Bytes of the parts in which an object is written.  S3 demands 5 MiB."""

_READ, _WRITTEN = 3, 5
"""How often a thread's memory holds what is asked for, and a part on its way, with what the libraries copy and what is
made of it (measured with s3fs 2026.9)."""

_PARTS = 9_000
"""Of an object, at most.  S3 allows 10 000."""

_ASKED_AT_ONCE = 16

_STATE = ("ETag", "etag", "generation", "version_id", "LastModified", "last_modified", "mtime", "updated", "created")
"""What stores tell of an object that changes when it is written."""


@dataclass(frozen=True, slots=True)
class Remote:
    """A place in an object store, with those of `pathlib.Path`'s methods that are of use there.

    Args:
        fs: an fsspec file system without a cache of listings.
        path: as that file system calls it, without the protocol.
    """

    fs: Any
    path: str

    def __str__(self) -> str:
        return str(self.fs.unstrip_protocol(self.path))

    def __truediv__(self, name: str) -> Remote:
        return Remote(self.fs, f"{self.path}/{name}") if name else self

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> Remote:
        return Remote(self.fs, self.path.rpartition("/")[0])

    @property
    def parents(self) -> Iterator[Remote]:
        """Every place that this one lies in, the nearest first."""
        place = self
        while place.path.strip("/"):
            place = place.parent
            yield place

    def resolve(self) -> Remote:
        """Itself: there are no links."""
        return self

    def is_symlink(self) -> bool:
        return False

    def exists(self) -> bool:
        with asking(self):
            return bool(self.fs.exists(self.path))

    def is_file(self) -> bool:
        with asking(self):
            return bool(self.fs.isfile(self.path))

    def is_dir(self) -> bool:
        with asking(self):
            return bool(self.fs.isdir(self.path))

    def iterdir(self) -> Iterator[Remote]:
        with asking(self):
            found = self.fs.ls(self.path, detail=False)
        yield from (Remote(self.fs, each.rstrip("/")) for each in found if each.rstrip("/") != self.path)

    def below(self) -> list[Remote]:
        """Every object that lies in it, however deep."""
        with asking(self):
            return [Remote(self.fs, path) for path in self.fs.find(self.path)]

    def glob(self, pattern: str) -> Iterator[Remote]:
        """What lies in it under a name that fits; nothing if it is no directory."""
        return (each for each in self.iterdir() if fnmatchcase(each.name, pattern)) if self.is_dir() else iter(())

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Nothing: a directory is there as soon as something lies in it."""

    def unlink(self, missing_ok: bool = False) -> None:
        with asking(self):
            if not missing_ok or self.fs.exists(self.path):
                self.fs.rm_file(self.path)

    def remove(self) -> None:
        """Delete it with all that lies in it, if there is anything."""
        with asking(self):
            at_each(self, self.fs.rm_file, [place.path for place in self.below()])  # rm() takes names for patterns

    def write(self, data: bytes) -> None:
        """Put a small object, whole."""
        with asking(self):
            self.fs.pipe_file(self.path, data)

    def create(self, data: bytes) -> None:
        """Put a small object where there is none.

        Raises:
            FileExistsError: there is one.
        """
        try:
            with asking(self):
                self.fs.pipe_file(self.path, data, mode="create")
        except FileNotFoundError as error:  # the bucket
            raise OSError(str(error)) from error

    def copy_to(self, other: Remote) -> None:
        """Copy an object inside the store: it appears whole, and no bytes pass through this machine."""
        with asking(other):
            self.fs.cp_file(self.path, other.path)

    def open(self) -> RemoteFile:
        """Raises:
        SourceError: there is no such object.
        """
        with reading(self):
            info = self.fs.info(self.path)
        return RemoteFile(self, info)

    @contextmanager
    def upload(self, length: int) -> Iterator[Upload]:
        """Write an object of ``length`` bytes; it is there when all has been written, or else not at all."""
        with asking(self):
            stream = self.fs.open(self.path, "wb", block_size=part_bytes(length))
        upload = Upload(self, stream)
        try:
            yield upload
            upload.fill(length)
            with asking(self):
                stream.close()
        except BaseException:
            with suppress(OSError), asking(self):
                stream.discard()
            stream.forced = True  # fsspec's word for: nothing is left to be written when it is closed
            stream.close()
            raise


Location = Path | Remote
"""Where a checkpoint is."""

T = TypeVar("T")
R = TypeVar("R")


def at_each(place: Location, function: Callable[[T], R], things: Iterable[T]) -> list[R]:
    """What a function makes of each, in this order.  A store takes its time to answer: there many are asked at once."""
    if not isinstance(place, Remote):
        return list(map(function, things))
    with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
        return list(pool.map(function, things))


def location(name: str | os.PathLike[str] | Remote, error: type[Exception] = ValueError) -> Location:
    """What a user calls a place: a path, in which ``~`` is expanded, or a URL of any protocol that fsspec knows.

    Raises:
        error: no such protocol, or the library that speaks it is not installed.
    """
    if isinstance(name, Remote):
        return name
    text = os.fspath(name)
    protocol, separator, _ = text.partition("://")
    if not separator:
        return Path(text).expanduser()
    if protocol in ("file", "local"):
        return Path(unquote(urlsplit(text).path))
    try:
        import fsspec

        fs, path = fsspec.url_to_fs(text, use_listings_cache=False)  # others write there too
    except (ImportError, ValueError) as reason:
        raise error(f"cannot open {text}: {reason}") from reason
    if not path.strip("/"):
        raise error(f"{text} names no place in a store; write for example s3://bucket/name")
    return Remote(fs, path.rstrip("/"))


class RemoteFile:
    """An object, read by ranges."""

    gap, most = GAP, REQUEST_BYTES

    def __init__(self, place: Remote, info: dict[str, Any]) -> None:
        self._place = place
        self.size = int(info["size"])
        self.state: tuple[object, ...] = (self.size, *(str(info[name]) for name in _STATE if name in info))
        if info["type"] != "file":
            raise SourceError(f"{place}: expected an object, found a directory")

    def read(self, offset: int, length: int) -> bytes:
        """That range; shorter where the object ends before."""
        return bytes(self.views([(offset, min(length, max(self.size - offset, 0)))])[0])

    def view(self, offset: int, length: int) -> memoryview:
        return self.views([(offset, length)])[0]

    def views(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Ranges, each an offset and a length, asked for all at once."""
        path, asked = self._place.path, [(at, at + length) for at, length in ranges if length]
        with reading(self._place):
            starts, stops = [start for start, _ in asked], [stop for _, stop in asked]
            found = iter(self._place.fs.cat_ranges([path] * len(asked), starts, stops, on_error="raise"))
        views = [memoryview(next(found) if length else b"") for _, length in ranges]
        for view, (at, length) in zip(views, ranges, strict=True):
            if len(view) != length:
                raise SourceError(f"{self._place}: expected {length} bytes at byte {at}, found {len(view)}: it was cut")
        return views

    def mapped(self) -> RemoteFile:
        return self

    def forget(self) -> None:
        """Nothing is kept of it."""

    def release(self, offset: int, length: int) -> None:
        """Nothing is kept of it."""


class Upload:
    """An object that is being written, front to back."""

    rewinds = False

    def __init__(self, place: Remote, stream: Any) -> None:
        self._place = place
        self._stream = stream
        self._at = 0

    def write(self, data: bytes | memoryview, at: int) -> int:
        """Write at byte ``at``, not before the end of what has been written; returns the byte behind it."""
        self.fill(at)
        with asking(self._place):
            self._stream.write(data)
        self._at += len(data)
        return self._at

    def fill(self, at: int) -> None:
        """Zeros up to byte ``at``."""
        if at < self._at:
            raise ValueError(f"an object is written front to back, and byte {at} lies before {self._at}")
        with asking(self._place):
            while self._at < at:
                self._at += self._stream.write(bytes(min(at - self._at, 1 << 20)))


def part_bytes(length: int) -> int:
    """Bytes of the parts in which an object of ``length`` bytes is written: a multiple of 1 MiB."""
    return max(PART, -(-length // _PARTS >> 20) + 1 << 20)


def check_memory(source: Location, destination: Location, longest: int, threads: int, memory: int) -> None:
    """Refuse a budget too small for threads that read and write objects of at most ``longest`` bytes; all in bytes.

    Raises:
        DestinationError: it says how much is needed.
    """
    reads = _READ * REQUEST_BYTES if isinstance(source, Remote) else 0
    writes = _WRITTEN * part_bytes(longest) if isinstance(destination, Remote) else 0
    if threads * (reads + writes) > memory:
        raise DestinationError(
            f"object stores need {threads * (reads + writes) >> 20} MiB of buffers for {threads} threads and files of "
            f"{longest} bytes, but the budget is {memory} bytes: raise --memory, or lower --jobs"
        )


@contextmanager
def asking(place: Remote) -> Iterator[None]:
    """Whatever the libraries of a store raise is an `OSError` with the place in it."""
    try:
        yield
    except (FileNotFoundError, FileExistsError) as error:
        raise type(error)(f"{place}: {error}") from error
    except Exception as error:
        raise OSError(f"{place}: {type(error).__name__}: {error}") from error


@contextmanager
def reading(place: Remote) -> Iterator[None]:
    """The same for a source."""
    try:
        with asking(place):
            yield
    except OSError as error:
        raise SourceError(f"cannot read {error}") from error
