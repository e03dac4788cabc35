"""The journal of finished files, from which an interrupted run can continue.

Each worker writes a journal of its own, with a line for each file that it has finished.  The checksum of a line
includes the digest of the job, so damaged lines and those of other jobs are ignored.  Journals are read only when a run
begins.
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
    """Sums of the elements of a chunk, computed while they were written: xxh3-128, the checksum that the frame stores,
    and the share of the tensor's fingerprint."""

    digest: str
    checksum: int
    share: int


class FinishedFile(NamedTuple):
    """A finished file: the digest of each item and the sums of each chunk, in the order of the job."""

    items: tuple[str, ...]
    chunks: tuple[ChunkSums, ...]

    @classmethod
    def of(cls, items: Iterable[str], chunks: Iterable[Iterable[Any]]) -> FinishedFile:
        """A finished file from JSON data."""
        return cls(tuple(items), tuple(ChunkSums(*sums) for sums in chunks))


class Journal:
    """The journal of one worker, written at this place; safe to use from several threads."""

    def __init__(self, place: Location, job: str) -> None:
        self._lines, self._job = new_lines(place), job
        self._adding = Lock()
        self.close = self._lines.close

    def add(self, file: str, finished_file: FinishedFile) -> None:
        """Record a file that is finished and synced."""
        line = sealed(self._job, {"file": file, "blobs": finished_file.items, "items": finished_file.chunks})
        with self._adding:
            self._lines.add(line)


def finished(lines: Iterable[bytes], job: str) -> dict[str, FinishedFile]:
    """The finished files that journal lines name; of several lines about one file the last counts."""
    entries = (unsealed(job, line) for line in lines)
    return {entry["file"]: FinishedFile.of(entry["blobs"], entry["items"]) for entry in entries if entry is not None}


def sealed(seal: str, entry: Any) -> bytes:
    """JSON data as one line with a checksum of the data and the seal."""
    text = json.dumps(entry).encode()
    return xxh3_128([seal.encode(), text]).encode() + b" " + text


def unsealed(seal: str, line: bytes) -> Any:
    """The data of a sealed line; None if it is damaged or has another seal."""
    digest, _, text = line.partition(b" ")
    return json.loads(text) if digest == xxh3_128([seal.encode(), text]).encode() else None
