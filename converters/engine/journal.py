"""The journals of long offline work: what each worker has finished, so that a run that was stopped can go on.

A worker has one journal, a :mod:`.log` that nobody else writes.  The first line says whose it is; one line follows for
each finished file and for each step.  All journals of one destination lie in a folder, named by the number of the run
and the worker's rank.  How others read them: :mod:`.peer`.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cache
from pathlib import Path

from ...store.io.location import Location
from .log import create, remove


@dataclass(frozen=True, slots=True)
class Sum:
    """What passed when an item was written: xxh3-128 and the frame's checksum of its payload, its share of the
    fingerprint."""

    digest: str
    checksum: int
    share: int


@dataclass(frozen=True, slots=True)
class Done:
    """A finished file: the digest of each blob and the sums of each tensor item, in the order of the job."""

    blobs: tuple[str, ...]
    items: tuple[Sum, ...]


class Step(Enum):
    """What a worker says of itself."""

    BEGUN = "begun"
    """All is prepared, others may join (the leader's word)."""
    FINISHED = "finished"
    """Its part is done."""
    ENDED = "ended"
    """It leaves; its last word, with an error if it could not do its part."""


@dataclass(frozen=True, slots=True)
class Header:
    """Whose journal it is: the digest of the job, how many workers share it, and the machine.

    ``locked``: the log is under a lock that ends with its process; not every file system has them, and no store.
    """

    job: str
    world: int
    host: str
    locked: bool


@dataclass(frozen=True, slots=True)
class Folder:
    """The journals of all runs for one destination."""

    place: Location

    def journal(self, run: int, rank: int) -> Location:
        return self.place / f"{run}.{rank}"

    def found(self) -> dict[tuple[int, int], Location]:
        """Those that are there, by run and rank, in this order."""
        try:
            names = [(re.fullmatch(r"(\d+)\.(\d+)", place.name), place) for place in self.place.iterdir()]
        except FileNotFoundError:
            return {}
        return dict(sorted(((int(name[1]), int(name[2])), place) for name, place in names if name))

    def clear(self, last: int) -> None:
        """Remove those of the runs up to this one, and what became none.  If that fails it does no harm."""
        with suppress(OSError):
            later = {place for (run, _), place in self.found().items() if run > last}
            every: set[Location] = set(self.place.iterdir())
            for place in every - later:
                remove(place)
            if isinstance(self.place, Path):
                self.place.rmdir()


class Journal:
    """The journal of this worker.

    Raises:
        FileExistsError: another process has it.
    """

    def __init__(self, place: Location, job: str, world: int) -> None:
        self.place = place
        self._log = create(place, lambda locked: _line(asdict(Header(job, world, this_host(), locked))))
        self.beat, self.close = self._log.beat, self._log.close

    def add(self, file: str, done: Done) -> None:
        """Note a finished (and synced) file."""
        items = [[item.digest, item.checksum, item.share] for item in done.items]
        self._log.add(_line({"file": file, "blobs": list(done.blobs), "items": items}))

    def say(self, step: Step, error: tuple[str, str] | None = None) -> None:
        """Note a step; at the end perhaps with the family and the text of an error."""
        self._log.add(_line({"step": step.value, "error": error}))


def _line(entry: dict[str, object]) -> bytes:
    return json.dumps(entry).encode() + b"\n"


@cache
def this_host() -> str:
    """Two processes with the same answer run under one kernel, so that a lock of one is seen by the other.

    Machines that were copied while they ran may share the kernel's number, but not the name; containers on one machine
    that differ in name are taken for two, which is only slower.
    """
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.uname().nodename}"
