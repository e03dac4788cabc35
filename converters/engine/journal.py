"""The journal of finished files, so that work that was stopped can go on.

Each worker writes lines of its own, one for each file that it has finished.  A line carries a checksum, made with the
digest of the job, so a damaged line or one of another job is not taken for anything.  Nobody waits for what is
written here: it is read when a run begins.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from threading import Lock
from typing import Any, NamedTuple

from ...store.io.checksums import xxh3_128
from ...store.io.lines import new_lines
from ...store.io.location import Location


class ChunkSums(NamedTuple):
    """What passed when an item was written: xxh3-128 and the frame's checksum of its payload, its share of the
    fingerprint."""

    digest: str
    checksum: int
    share: int


class FinishedFile(NamedTuple):
    """A finished file: the digest of each blob and the sums of each tensor item, in the order of the job."""

    blobs: tuple[str, ...]
    items: tuple[ChunkSums, ...]

    @classmethod
    def of(cls, blobs: Iterable[str], items: Iterable[Iterable[Any]]) -> FinishedFile:
        """From JSON data."""
        return cls(tuple(blobs), tuple(ChunkSums(*item) for item in items))


class Journal:
    """The lines of one worker at this place; safe to use from several threads."""

    def __init__(self, place: Location, job: str) -> None:
        self._lines, self._job = new_lines(place), job
        self._adding = Lock()
        self.close = self._lines.close

    def add(self, file: str, done: FinishedFile) -> None:
        """Note a finished (and synced) file."""
        line = sealed(self._job, {"file": file, "blobs": done.blobs, "items": done.items})
        with self._adding:
            self._lines.add(line)


def finished(lines: Iterable[bytes], job: str) -> dict[str, FinishedFile]:
    """What lines say is finished, by file; of several about one file the last."""
    entries = (unsealed(job, line) for line in lines)
    return {entry["file"]: FinishedFile.of(entry["blobs"], entry["items"]) for entry in entries if entry is not None}


def sealed(seal: str, entry: Any) -> bytes:
    """JSON data as one line with a checksum, which is not that of the same data with another seal."""
    text = json.dumps(entry).encode()
    return xxh3_128([seal.encode(), text]).encode() + b" " + text


def unsealed(seal: str, line: bytes) -> Any:
    """The data of such a line; None if it is damaged, or has another seal."""
    digest, _, text = line.partition(b" ")
    return json.loads(text) if digest == xxh3_128([seal.encode(), text]).encode() else None
