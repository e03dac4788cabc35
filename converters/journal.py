"""The journal of long offline work: what is finished, so that a run that was stopped can go on."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from ..errors import DestinationError


@dataclass(frozen=True, slots=True)
class Sum:
    """What passed when an item was written: xxh3-128 and CRC-32 of its payload, its share of the fingerprint."""

    digest: str
    crc32: int
    share: int


@dataclass(frozen=True, slots=True)
class Done:
    """A finished file: the digest of each blob and the sums of each tensor item, in the order of the job."""

    blobs: tuple[str, ...]
    items: tuple[Sum, ...]


class Journal:
    """The claim on a destination while a job writes beside it, and what the job has finished.

    Two names beside the destination: ``staged``, the directory that will be renamed to it, and an append-only file
    with one synced line per finished file, which is locked as long as the job runs.  Its first line names the job; a
    journal of another job is refused.  What it claims must still be checked.

    Args:
        destination: where the finished directory will appear.
        job: digest of the job.
        resume: go on with what is there, if anything is.

    Raises:
        DestinationError: unfinished work is there and ``resume`` is not set, or it is of another job; another process
            is at it; or it cannot be written.
    """

    def __init__(self, destination: Path, job: str, resume: bool) -> None:
        self.staged = destination.parent / f".{destination.name}.reshard.tmp"
        self.done: dict[str, Done] = {}
        self._path = destination.parent / f".{destination.name}.reshard.journal"
        self._job = job
        self._resume = resume
        self._stream: BinaryIO

    def __enter__(self) -> Journal:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = self._path.open("a+b")
        except OSError as error:
            raise DestinationError(f"cannot write {self._path}: {error.strerror}") from error
        try:
            self._take()
        except BaseException as error:
            self._stream.close()
            if isinstance(error, OSError):
                raise DestinationError(f"cannot write {self.staged}: {error.strerror}") from error
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()

    def add(self, file: str, done: Done) -> None:
        """Note a finished (and synced) file."""
        items = [[item.digest, item.crc32, item.share] for item in done.items]
        self._append({"file": file, "blobs": list(done.blobs), "items": items})
        self.done[file] = done

    def discard(self) -> None:
        """Give up the place, with all that was written."""
        shutil.rmtree(self.staged, ignore_errors=True)
        self.forget()

    def forget(self) -> None:
        """There is nothing to go on with: the work has been published or given up."""
        with suppress(OSError):  # without ``staged`` it does no harm
            self._path.unlink()

    def _take(self) -> None:
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # One that has just finished may have removed the file between our opening and our locking it.
            ours = os.path.samestat(os.fstat(self._stream.fileno()), self._path.stat())
        except (BlockingIOError, FileNotFoundError):
            ours = False
        if not ours:
            raise DestinationError(f"another process is writing into {self.staged}")
        if not self.staged.exists():
            self._begin()
        elif not self._resume:
            raise DestinationError(
                f"unfinished work lies in {self.staged}; go on with --resume, or remove it to start again"
            )
        else:
            self._read()

    def _begin(self) -> None:
        try:
            self._stream.truncate(0)
            self._append({"job": self._job})
            self.staged.mkdir()
        except OSError:
            self.forget()
            raise

    def _append(self, entry: dict[str, object]) -> None:
        self._stream.write(_line(entry))
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def _read(self) -> None:
        """Take up what is finished.  A crash may have spoilt the end: the first bad line and what follows is void."""
        self._stream.seek(0)
        header = self._stream.readline()
        if not header.endswith(b"\n"):
            shutil.rmtree(self.staged)
            self._begin()
            return
        if header != _line({"job": self._job}):
            raise DestinationError(
                f"{self.staged} holds unfinished work of another job (other source, mesh or version); remove it first"
            )
        good = len(header)
        for line in self._stream:
            try:
                file, done = _parsed(line)
            except (ValueError, KeyError, TypeError):
                break
            self.done[file] = done
            good += len(line)
        self._stream.truncate(good)


def _line(entry: dict[str, object]) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def _parsed(line: bytes) -> tuple[str, Done]:
    entry = json.loads(line)
    if not line.endswith(b"\n"):
        raise ValueError("the line was cut")
    return str(entry["file"]), Done(tuple(entry["blobs"]), tuple(Sum(*item) for item in entry["items"]))
