"""The journal of long offline work: what is finished, so that a run that was stopped can go on."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TextIO

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
    """An append-only file in the staging directory, one line per finished file, synced line by line.

    Its first line names the job; a journal of another job is refused.  It is locked while it is open, so two runs
    cannot write into one staging directory.

    Args:
        staged: the staging directory; made if it is not there.
        job: digest of the job.
        resume: go on with what is there, if anything is.

    Raises:
        DestinationError: unfinished work is there and ``resume`` is not set, or it is of another job, or in use.
    """

    NAME = "journal.jsonl"

    def __init__(self, staged: Path, job: str, resume: bool) -> None:
        self.staged = staged
        self.done: dict[str, Done] = {}
        self._job = job
        self._resume = resume
        self._stream: TextIO | None = None

    def __enter__(self) -> Journal:
        if self.staged.exists() and not self._resume:
            raise DestinationError(
                f"unfinished work lies in {self.staged}; go on with --resume, or remove it to start again"
            )
        try:
            self.staged.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DestinationError(f"cannot create {self.staged}: {error}") from error
        self._stream = (self.staged / self.NAME).open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._stream.close()
            raise DestinationError(f"another process is writing into {self.staged}") from None
        self._stream.seek(0)
        self._read(self._stream.read())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._stream is not None
        self._stream.close()

    def add(self, file: str, done: Done) -> None:
        """Note a finished (and synced) file."""
        items = [[item.digest, item.crc32, item.share] for item in done.items]
        self._append({"file": file, "blobs": list(done.blobs), "items": items})
        self.done[file] = done

    def _append(self, entry: dict[str, object]) -> None:
        assert self._stream is not None
        self._stream.write(json.dumps(entry) + "\n")
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def _read(self, text: str) -> None:
        lines = text.splitlines(keepends=True)
        if not lines:
            self._append({"job": self._job})
            return
        if json.loads(lines[0]).get("job") != self._job:
            raise DestinationError(
                f"{self.staged} holds unfinished work of another job (other source, mesh or version); remove it first"
            )
        for line in lines[1:]:
            if line.endswith("\n"):  # the last line may have been cut by a crash; its file is written again
                entry = json.loads(line)
                self.done[entry["file"]] = Done(
                    tuple(entry["blobs"]), tuple(Sum(*item) for item in entry["items"])
                )


def discard(staged: Path) -> None:
    """Remove a staging directory and all that is in it."""
    shutil.rmtree(staged, ignore_errors=True)
