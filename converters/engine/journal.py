"""The journal of finished files, from which an interrupted run can continue.

Each worker writes a journal of its own, with a line for each file that it has finished.  The checksum of a line
includes the digest of the job, so damaged lines and those of other jobs are ignored.  Journals are read only when a run
begins.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...store.io.checksums import xxh3_128
from ...store.io.lines import new_lines
from ...store.io.location import Location

SUMS = np.dtype([("digest", "V16"), ("checksum", "<u4"), ("share", "<u8")])
"""Sums of the elements of a chunk, computed while they were written: xxh3-128, the checksum that the frame stores, and
the share of the tensor's fingerprint."""

ChunkSums = NDArray[np.void]
"""An array of `SUMS`, one for each chunk."""


class FinishedFile(NamedTuple):
    """A finished file: digests of its items in hex, and `SUMS` of its chunks as bytes, in the order of the job."""

    items: tuple[str, ...]
    sums: bytes

    @property
    def chunks(self) -> ChunkSums:
        """The sums of each chunk."""
        return np.frombuffer(self.sums, SUMS)

    @classmethod
    def of(cls, items: Iterable[str], sums: str) -> FinishedFile:
        """A finished file from its JSON data."""
        return cls(tuple(items), b64decode(sums))

    def to_json(self) -> list[Any]:
        """JSON data: the arguments of `of`."""
        return [self.items, b64encode(self.sums).decode()]


class Journal:
    """The journal of one worker, written at this place; safe to use from several threads."""

    def __init__(self, place: Location, job: str) -> None:
        self._lines, self._job = new_lines(place), job
        self._adding = Lock()
        self.close = self._lines.close

    def add(self, file: str, finished_file: FinishedFile) -> None:
        """Record a file that is finished and synced."""
        line = sealed(self._job, {"file": file, "finished": finished_file.to_json()})
        with self._adding:
            self._lines.add(line)


def finished(lines: Iterable[bytes], job: str) -> dict[str, FinishedFile]:
    """The finished files that journal lines name; of several lines about one file the last counts."""
    entries = (unsealed(job, line) for line in lines)
    return {entry["file"]: FinishedFile.of(*entry["finished"]) for entry in entries if entry is not None}


def sealed(seal: str, entry: Any) -> bytes:
    """JSON data as one line with a checksum of the data and the seal."""
    text = json.dumps(entry).encode()
    return xxh3_128([seal.encode(), text]).encode() + b" " + text


def unsealed(seal: str, line: bytes) -> Any:
    """The data of a sealed line; None if it is damaged or has another seal."""
    digest, _, text = line.partition(b" ")
    return json.loads(text) if digest == xxh3_128([seal.encode(), text]).encode() else None
