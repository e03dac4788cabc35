"""Checkpoints in object stores, through fsspec: `Remote` is their counterpart of a `pathlib.Path`.

A question about a place has three answers, here and nowhere else: something is there, nothing is there, and
`UnavailableError`.  Nothing is there only if the file system or the store says so: ENOENT, or 404.

An object is read by ranges and written once, front to back.  The store's own library finds the credentials.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import unquote, urlsplit

from ...names.errors import (
    ArgumentError,
    DamageError,
    DestinationError,
    DiskError,
    MuonckptError,
    SourceError,
    UnavailableError,
    value_in_short,
)

GAP = 128 << 10
"""Largest gap, in bytes, between two parts of an object that one request reads through.  Amazon serves 5500 GETs a
second for a prefix ("Best practices design patterns: optimizing Amazon S3 performance"): at 1 GB/s a request
costs as much as 180 kB."""

REQUEST_BYTES = 4 << 20
"""Most bytes of an object in one request."""

PART = 8 << 20
"""Bytes of the parts in which an object is written.  S3 demands 5 MiB."""

_REQUEST_COPIES, _PART_COPIES = 6, 5
"""Copies of a request, and of a part being written, in a thread's memory: in the libraries (measured with s3fs 2026.9),
and in three windows of `Payloads`."""

_MAX_PARTS = 9_000

_CALLS_AT_ONCE = 16

_PAUSES = (0.1, 0.5)
"""Seconds before the second and the third request to a store."""

_LIBRARY_SECONDS = 2.0
"""Seconds after which a store is not asked again: its own library has done so.  s3fs gives up after 8 to 46 s."""

_PASSING_ERRNOS = frozenset(
    {errno.EIO, errno.EREMOTEIO, errno.EBUSY, errno.EAGAIN, errno.ECONNRESET, errno.ECONNREFUSED, errno.ETIMEDOUT}
)
"""Numbers of errors by which libraries of stores say 429 and 5xx, and that a connection was lost."""

_STATE = (
    "ETag",
    "etag",
    "generation",
    "version_id",
    "LastModified",
    "last_modified",
    "mtime",
    "updated",
    "created",
)
"""Fields of a store's description of an object that change when it is written."""


@dataclass(frozen=True, slots=True)
class Remote:
    """Names a place in an object store, with the methods of `pathlib.Path` that make sense there.

    Args:
        fs: an fsspec file system without a cache of listings.
        path: the file system's name for the place, without the protocol.
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
        """Yield the places that contain this one, the nearest first."""
        place = self
        while place.path.strip("/"):
            place = place.parent
            yield place

    def resolve(self) -> Remote:
        return self

    def absolute(self) -> Remote:
        return self

    def ask(self, question: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Return the answer of the store's library, asking again where an error may pass.

        Args:
            question: a method of ``fs`` that changes nothing.

        Raises:
            FileNotFoundError: the store says that there is no such place.
            UnavailableError: any other error.
        """
        deadline = time.monotonic() + _LIBRARY_SECONDS
        for pause in (*_PAUSES, None):
            try:
                return question(*arguments, **options)
            except Exception as error:
                failure = _cause_of(error)
                if isinstance(failure, FileNotFoundError):
                    raise FileNotFoundError(f"{self}: {error}") from error
                if pause is None or not _may_pass(failure) or time.monotonic() > deadline:
                    raise unavailable(self, failure) from error
                time.sleep(pause)
        raise AssertionError("the last try returns or raises")

    def iterdir(self) -> Iterator[Remote]:
        paths = self.ask(self.fs.ls, self.path, detail=False)
        yield from (Remote(self.fs, path.rstrip("/")) for path in paths if path.rstrip("/") != self.path)

    def listing(self) -> tuple[list[str], list[str]]:
        """Return the names of the objects in it, and of the directories in it, by one request."""
        names: dict[bool, list[str]] = {False: [], True: []}
        for info in self.ask(self.fs.ls, self.path, detail=True):
            path = info["name"].rstrip("/")
            if path != self.path:
                names[info["type"] == "directory"].append(path.rpartition("/")[2])
        return names[False], names[True]

    def below(self) -> list[Remote]:
        """Return every object in it, at any depth."""
        return [self / name for name in self.described()]

    def described(self) -> dict[str, dict[str, Any]]:
        """Return the store's descriptions of the objects in it, or of itself, by their names in this place."""
        from fsspec.asyn import AsyncFileSystem

        # Libraries that list all depths by one request do; the ``find`` of others leaves out what it cannot list.
        has_flat_listing = getattr(type(self.fs), "_find", AsyncFileSystem._find) is not AsyncFileSystem._find
        infos: dict[str, dict[str, Any]] = {}
        folders = [self.path]
        while folders:
            with suppress(FileNotFoundError):
                if has_flat_listing:
                    infos |= self.ask(self.fs.find, folders.pop(), detail=True)
                    continue
                for info in self.ask(self.fs.ls, folders.pop(), detail=True):
                    if info["type"] == "directory":
                        folders.append(info["name"])
                    else:
                        infos[info["name"]] = info
        return {path.removeprefix(self.path).lstrip("/"): info for path, info in infos.items()}

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: a directory exists as soon as it contains an object."""

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            with store_errors(self):
                self.fs.rm_file(self.path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove(self) -> None:
        with store_errors(self):
            map_each(self, self.fs.rm_file, [place.path for place in self.below()])  # rm() treats names as patterns

    def write(self, data: bytes) -> None:
        with store_errors(self):
            self.fs.pipe_file(self.path, data)

    def create(self, data: bytes) -> None:
        """Write a small object; raise `FileExistsError` if it exists."""
        try:
            with store_errors(self):
                self.fs.pipe_file(self.path, data, mode="create")
        except FileNotFoundError as error:  # there is no such bucket
            raise OSError(str(error)) from error

    def copy_to(self, other: Remote) -> None:
        """Copy an object inside the store, so that it appears whole."""
        with store_errors(other):
            self.fs.cp_file(self.path, other.path)

    def open(self) -> RemoteFile:
        """Open an object for reading; raise `DamageError` if it does not exist."""
        with _missing_as_damage():
            return RemoteFile(self, self.ask(self.fs.info, self.path))

    @contextmanager
    def upload(self, length: int) -> Iterator[Upload]:
        """Write an object of ``length`` bytes, which appears when everything has been written, or not at all."""
        with store_errors(self):
            stream = self.fs.open(self.path, "wb", block_size=part_bytes(length))
        upload = Upload(self, stream)
        try:
            yield upload
            upload.fill(length)
            with store_errors(self):
                stream.close()
        except BaseException:
            # Parts that are not completed make no object, but cost money until they are discarded.
            with suppress(OSError), store_errors(self):
                stream.discard()
            stream.forced = True  # tells fsspec that close() has nothing left to write
            stream.close()
            raise


Location = Path | Remote
"""A path or an object store's place."""

T = TypeVar("T")
R = TypeVar("R")


Kind = Literal["file", "folder", "other"]


def kind_of(place: Location) -> Kind | None:
    """Return the kind of file at a place, along links; None if there is none.

    Raises:
        UnavailableError: the file system or the store cannot say.
    """
    if isinstance(place, Remote):
        try:
            kind = place.ask(place.fs.info, place.path)["type"]
        except FileNotFoundError:
            return None
        return "folder" if kind == "directory" else "file" if kind == "file" else "other"
    status = _read_status(place, follow_symlinks=True)
    if status is None:
        return None
    return "folder" if stat.S_ISDIR(status.st_mode) else "file" if stat.S_ISREG(status.st_mode) else "other"


def is_there(place: Location) -> bool:
    """Return whether anything has this name, if only a link that leads nowhere; raises as `kind_of`."""
    return (kind_of(place) if isinstance(place, Remote) else _read_status(place, follow_symlinks=False)) is not None


def refuse_unseen(place: Location, process: str, kind: type[MuonckptError]) -> None:
    """Refuse a folder of this machine that another process has opened or made, and this one does not see."""
    if isinstance(place, Path) and not is_there(place):
        raise kind(f"{process} does not see {place}. The first one does: give a path that all nodes mount alike")


def is_folder(place: Location) -> bool:
    """Return whether a folder is there; raises as `kind_of`."""
    return kind_of(place) == "folder"


def is_file(place: Location) -> bool:
    """Return whether a file or an object is there; raises as `kind_of`."""
    return kind_of(place) == "file"


def is_link(place: Location) -> bool:
    """Return whether a link is there, which a store does not have; raises as `kind_of`."""
    status = None if isinstance(place, Remote) else _read_status(place, follow_symlinks=False)
    return status is not None and stat.S_ISLNK(status.st_mode)


def refuse_lost_link(place: Location) -> None:
    """Refuse a place where nothing is, if it or a folder above it is a link that leads nowhere.

    The volume that it leads to may not be mounted, so nothing is known of what is there.

    Raises:
        UnavailableError: it is such a link; or as `kind_of`.
    """
    for link in (place, *place.parents):
        if isinstance(link, Path) and is_link(link) and kind_of(link) is None:
            raise UnavailableError(
                f"cannot read {place}: {'' if link == place else f'{link} is '}a link to {link.readlink()}, which is "
                "not there: mount what it leads to, or remove the link"
            )


def length_of(place: Location) -> int | None:
    """Return the bytes of a file or an object; None if something else is there, or nothing; raises as `kind_of`."""
    if isinstance(place, Remote):
        try:
            info = place.ask(place.fs.info, place.path)
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None
    status = _read_status(place, follow_symlinks=False)
    return status.st_size if status is not None and stat.S_ISREG(status.st_mode) else None


def _read_status(path: Path, follow_symlinks: bool) -> os.stat_result | None:
    try:
        return path.stat(follow_symlinks=follow_symlinks)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a zero byte, which no name has
        return None
    except OSError as error:
        raise unavailable(path, error) from error


def entries_of(folder: Location) -> list[Location]:
    """Return the places in a folder.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such folder.
        UnavailableError: it cannot be listed.
    """
    if isinstance(folder, Remote):
        return list(folder.iterdir())
    with local_errors(folder):
        return list(folder.iterdir())


def names_in(folder: Location) -> list[str]:
    """Return the names of the places in a folder, in order; raises as `entries_of`."""
    return sorted(entry.name for entry in entries_of(folder))


def listing(folder: Location) -> tuple[list[str], list[str]]:
    """Return the names of the files in a folder, and of the folders in it; links count as files.

    Raises as `entries_of`.
    """
    if isinstance(folder, Remote):
        return folder.listing()
    files, folders = list[str](), list[str]()
    with local_errors(folder), os.scandir(folder) as entries:
        for entry in entries:
            (folders if entry.is_dir(follow_symlinks=False) else files).append(entry.name)
    return files, folders


def map_each(place: Location, function: Callable[[T], R], values: Iterable[T]) -> list[R]:
    """Apply a function to each value, in order; in a store, which is slow to answer, many calls run at once."""
    if not isinstance(place, Remote):
        return list(map(function, values))
    from concurrent.futures import ThreadPoolExecutor  # imports logging, which few commands need

    with ThreadPoolExecutor(_CALLS_AT_ONCE) as pool:
        return list(pool.map(function, values))


def location(name: str | os.PathLike[str] | Remote, error: type[Exception] = ValueError) -> Location:
    """Return the location of a path, in which ``~`` is expanded, or of a URL of any protocol that fsspec knows.

    Folders that have no name, such as ``"."``, become absolute, so that errors name them.

    Raises:
        ArgumentError: it is no path.
        error: the protocol is unknown, or its library is not installed; or a ``file://`` URL names another machine.
    """
    if isinstance(name, Remote):
        return name
    if not isinstance(name, str | bytes | os.PathLike):
        raise ArgumentError(f"expected a path or a URL, found {value_in_short(name)}")
    text = os.fsdecode(name)
    protocol, separator, _ = text.partition("://")
    if not separator:
        path = Path(text).expanduser()
        with suppress(OSError):  # the working directory was removed
            return path.resolve() if path.name in ("", "..") else path
        return path
    # A file URL is a path of this machine; fsspec knows the others.
    if protocol in ("file", "local"):
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise error(
                f"{text} names a machine, {parts.netloc!r}: write a path, or three slashes, as in file:///data/run"
            )
        return Path(unquote(parts.path))
    try:
        import fsspec

        fs, path = fsspec.url_to_fs(text, use_listings_cache=False)  # other programs write there too
    except (ImportError, ValueError) as reason:
        raise error(f"cannot open {text}: {reason}") from reason
    if not path.strip("/"):
        raise error(f"{text} names no place in a store; write for example s3://bucket/name")
    return Remote(fs, path.rstrip("/"))


def absolute_name(name: str | os.PathLike[str]) -> str:
    """Return a path as text that names the same place after `os.chdir`; a URL unchanged."""
    text = os.fsdecode(name)
    with suppress(OSError, RuntimeError):  # there is no working directory, or no home: whoever goes there will say so
        return text if "://" in text else str(Path(text).expanduser().absolute())
    return text


def folders_with(path: Location, name: str) -> list[str]:
    """Return the names of the folders in a folder that have an entry of this name, or cannot be entered, in order."""

    def may_have(entry: Location) -> bool:
        try:
            return is_there(entry / name)
        except UnavailableError:  # its reader gets the error
            return True

    return sorted(entry.name for entry in entries_of(path) if may_have(entry))


def items_beside(checkpoint: Location) -> Location:
    """Return the place of the file of items of a checkpoint that holds tensors only: docs/formats/safetensors.md."""
    return checkpoint.parent / f"{checkpoint.name}.items.json"


class RemoteFile:
    """Reads an object by ranges."""

    gap, max_bytes = GAP, REQUEST_BYTES

    def __init__(self, place: Remote, info: dict[str, Any]) -> None:
        self.place = place
        self.size = int(info["size"])
        self.state: tuple[object, ...] = (self.size, *(str(info[name]) for name in _STATE if name in info))
        if info["type"] != "file":
            raise SourceError(f"{place}: expected an object, found a directory")

    def __enter__(self) -> RemoteFile:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: there is no connection to close."""

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self.views([(offset, min(length, max(self.size - offset, 0)))])[0])

    def view(self, offset: int, length: int) -> memoryview:
        return self.views([(offset, length)])[0]

    def views(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        # Stores refuse requests for no bytes.
        requests = [(start, start + length) for start, length in ranges if length]
        starts, stops = [start for start, _ in requests], [stop for _, stop in requests]
        place, paths = self.place, [self.place.path] * len(requests)
        with _missing_as_damage():
            parts = iter(place.ask(place.fs.cat_ranges, paths, starts, stops, on_error="raise"))
        views = [memoryview(next(parts) if length else b"") for _, length in ranges]
        for view, (start, length) in zip(views, ranges, strict=True):
            if len(view) > length:
                raise UnavailableError(
                    f"cannot read {self.place}: expected {length} bytes at byte {start}, found {len(view)}: its server "
                    "does not serve parts of a file: copy it to a disk, and read it there"
                )
            if len(view) < length:
                raise DamageError(
                    f"{self.place}: expected {length} bytes at byte {start}, found {len(view)}: it was cut"
                )
        return views

    @property
    def on_disk(self) -> int:
        """Return its size: objects have no holes."""
        return self.size

    def fill(self, buffer: memoryview, offset: int) -> None:
        for start in range(0, len(buffer), self.max_bytes):
            part = buffer[start : start + self.max_bytes]
            part[:] = self.view(offset + start, len(part))


class Upload:
    """Writes an object."""

    rewinds = False

    def __init__(self, place: Remote, stream: Any) -> None:
        self._place = place
        self._stream = stream
        self._end = 0

    def write(self, data: bytes | memoryview, offset: int) -> int:
        """Write at byte ``offset``, not before the end of what has been written; return the new end."""
        self.fill(offset)
        with store_errors(self._place):
            self._stream.write(data)
        self._end += len(data)
        return self._end

    def fill(self, offset: int) -> None:
        if offset < self._end:
            raise ValueError(f"an object is written front to back, and byte {offset} lies before {self._end}")
        with store_errors(self._place):
            while self._end < offset:
                self._end += self._stream.write(bytes(min(offset - self._end, 1 << 20)))


def part_bytes(length: int) -> int:
    """Return the bytes of a part, a multiple of 1 MiB, for an object of ``length`` bytes."""
    return max(PART, -(-length // _MAX_PARTS >> 20) + 1 << 20)


def check_memory(source: Location, destination: Location, longest: int, threads: int, memory: int) -> None:
    """Raise `DestinationError` if a budget of memory is too small for objects of at most ``longest`` bytes."""
    reads = _REQUEST_COPIES * REQUEST_BYTES if isinstance(source, Remote) else 0
    writes = _PART_COPIES * part_bytes(longest) if isinstance(destination, Remote) else 0
    buffers = threads * (reads + writes)
    if buffers > memory:
        raise DestinationError(
            f"object stores need {buffers >> 20} MiB of buffers for {threads} threads and files of {longest} bytes, "
            f"but the budget is {memory} bytes: raise `memory=`, or lower `jobs=`"
        )


@contextmanager
def store_errors(place: Remote) -> Iterator[None]:
    """Turn what a store's library raises while it writes into an `OSError` that names the place."""
    try:
        yield
    except (FileNotFoundError, FileExistsError) as error:
        raise type(error)(f"{place}: {error}") from error
    except Exception as error:
        raise OSError(f"{place}: {type(error).__name__}: {error}") from error


@contextmanager
def local_errors(place: object) -> Iterator[None]:
    """Turn what a file system raises into `UnavailableError`, but for its answer that there is no such place."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise unavailable(error.filename or place, error) from error


@contextmanager
def source_errors(place: object) -> Iterator[None]:
    """Raise a `SourceError` that names the place where nothing is there, else as `local_errors`."""
    try:
        with local_errors(place):
            yield
    except OSError as error:
        raise SourceError(f"cannot read {place}: {error.strerror or error}") from error


def raise_error(error: OSError) -> None:
    """Raise an error of `os.walk`, which goes on without one unless it is given a function."""
    raise error


def unavailable(place: object, error: Exception) -> UnavailableError:
    """Return the error that says that a place cannot be looked at or read, and why."""
    reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    if getattr(error, "errno", None) == errno.EIO and not isinstance(place, Remote):
        return DiskError(f"cannot read {place}: {reason}; a disk fails: copy the checkpoint, or move it away")
    if getattr(error, "errno", None) == errno.ELOOP:
        return UnavailableError(f"cannot read {place}: {reason}: links lead in a circle, so remove the wrong one")
    return UnavailableError(f"cannot read {place}: {reason}; this is no damage, so try again when it can be read")


@contextmanager
def _missing_as_damage() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise DamageError(f"cannot read {error}") from error


def _cause_of(error: Exception) -> Exception:
    """Return the failure for which a library says that nothing is there, as fsspec's of the web does for any."""
    cause = error.__cause__
    if not isinstance(error, FileNotFoundError) or not isinstance(cause, Exception):
        return error
    number = cause.errno if isinstance(cause, OSError) else None
    is_other = (_status_code(cause) or 404) not in (404, 410) or number not in (None, errno.ENOENT, errno.ENOTDIR)
    return cause if is_other or isinstance(cause, TimeoutError | ConnectionError | PermissionError) else error


def _status_code(error: Exception) -> int | None:
    """Return the status of the web's protocol that an error of a store's library has; None if it has none."""
    values = (getattr(error, name, None) for name in ("status", "code", "status_code"))
    return next((value for value in values if isinstance(value, int) and value), None)


def _may_pass(error: Exception) -> bool:
    """Return whether an error of a store's library may be gone when it is asked again: time-outs, 429, 5xx."""
    if status := _status_code(error):
        return status in (408, 429) or status >= 500
    number = error.errno if isinstance(error, OSError) else None
    return isinstance(error, TimeoutError | ConnectionError) or number in _PASSING_ERRNOS
