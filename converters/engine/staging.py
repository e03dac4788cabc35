"""The staging directory of a job: where its files are written until they are published.

It lies beside the destination; in an object store it is the destination itself.  Until the files are published it
holds besides them:

    .journal/lock         the job, and a line for each run that has worked on it; the coordinator keeps it locked
    .journal/RUN/0, 1 …   the journal of each worker of a run
    .journal/RUN.drafts/  unfinished files; a finished one is moved to its name

The run that creates the lock begins the job; later runs need ``resume``.  Where there are no locks, as in an object
store, two runs can be alive at once.  They do no harm: files appear whole, both write the same bytes, one run publishes
them, and the other finds that it has lost the lock.
"""

from __future__ import annotations

import json
import shutil
import uuid
from base64 import b64decode, b64encode
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...names.errors import DestinationError, Interrupted, MuonckptError
from ...store.io import lock, publish
from ...store.io.checksums import xxh3_128
from ...store.io.location import Location, Remote, entries_of, is_folder, is_there
from ...store.io.new_file import open_lines, read_lines

SUMS = np.dtype([("digest", "V16"), ("checksum", "<u4"), ("share", "<u8")])
"""Sums of the elements of a chunk, computed while they are written: xxh3-128, the checksum that the frame stores, and
the share of the tensor's fingerprint."""

ChunkSums = NDArray[np.void]
"""`SUMS` of each of some chunks."""


class FinishedFile(NamedTuple):
    """A finished file: the digests of its items in hex, and the `SUMS` of its chunks as bytes, in the job's order."""

    items: tuple[str, ...]
    sums: bytes

    @property
    def chunks(self) -> ChunkSums:
        return np.frombuffer(self.sums, SUMS)

    @classmethod
    def of(cls, items: Iterable[str], sums: str) -> FinishedFile:
        """Return the finished file that `to_json` describes."""
        return cls(tuple(items), b64decode(sums))

    def to_json(self) -> list[Any]:
        return [self.items, b64encode(self.sums).decode()]


class Journal:
    """Writes the journal of one worker; safe to use from several threads."""

    def __init__(self, place: Location, job: str) -> None:
        self._lines, self._job = open_lines(place), job
        self._adding = Lock()
        self.close = self._lines.close

    def add(self, file: str, finished_file: FinishedFile) -> None:
        line = sealed(self._job, {"file": file, "finished": finished_file.to_json()})
        with self._adding:
            self._lines.add(line)


def finished(lines: Iterable[bytes], job: str) -> dict[str, FinishedFile]:
    """Return the finished files of a journal by name; of several lines about one file the last counts."""
    files = {}
    for entry in (unsealed(job, line) for line in lines):
        if entry is not None:
            files[entry["file"]] = FinishedFile.of(*entry["finished"])
    return files


def sealed(seal: str, entry: Any) -> bytes:
    """Return JSON data as one line with a checksum of the data and the seal."""
    text = json.dumps(entry).encode()
    return xxh3_128([seal.encode(), text]).encode() + b" " + text


def unsealed(seal: str, line: bytes) -> Any:
    """Return the data of a sealed line; None if it is damaged or has another seal."""
    digest, _, text = line.partition(b" ")
    return json.loads(text) if digest == xxh3_128([seal.encode(), text]).encode() else None


_SEAL = "lock"
_DRAFTS = ".drafts"


@dataclass(frozen=True, slots=True)
class Staging:
    """The staging directory of a run, with the run's journals (one for each rank) and unfinished files."""

    place: Location
    run: str

    @property
    def journals(self) -> Location:
        return publish.journal(self.place) / self.run

    @property
    def drafts(self) -> Location:
        return publish.journal(self.place) / f"{self.run}{_DRAFTS}"


class Coordinator:
    """The coordinator's hold on a staging directory (``place``), from the beginning of the work to its end.

    Args:
        job: digest of the job; equal digests mean equal files.
        resume: continue the work of an earlier run, if there is any.

    Attributes:
        history: the files that earlier runs have finished, by name; they may have been damaged since.

    Raises:
        DestinationError: there is unfinished work and ``resume`` is not set, or it belongs to another job; or another
            run is still working there.
    """

    def __init__(self, destination: Location, place: Location, job: str, resume: bool) -> None:
        self.staging = Staging(place, uuid.uuid4().hex[:12])
        self.history: dict[str, FinishedFile] = {}
        self._destination = destination
        existed = is_there(place)
        try:
            publish.make_parents(place)
            place.mkdir(exist_ok=True)
            self._lock = lock.open_lock(place, f"{publish.JOURNAL}/lock")
            try:
                if existed or self._lock.earlier is not None:
                    self._take_over(job, resume)
                # From this line on the work is this run's.
                self._lock.sign(sealed(_SEAL, {"job": job, "run": self.staging.run}))
                self.staging.journals.mkdir()
                self.staging.drafts.mkdir()
            except BaseException:
                self._lock.close()
                raise
        except lock.InUse:
            raise DestinationError(f"another process is writing into {place}") from None
        except BaseException:
            if not existed:
                publish.discard(place)
            raise

    def publish(self, root: str) -> None:
        """Publish the finished directory, or the one file ``root`` of it, and remove everything else of it.

        Raises:
            DestinationError: the destination has appeared in the meantime, or cannot be written.
            Interrupted: another run has taken over the work.
        """
        place = self.staging.place
        if not self._lock.is_mine():
            raise Interrupted(f"another run has taken over the work in {place}; this one published nothing")
        try:
            _remove(publish.journal(place))
            publish.publish(place / root, self._destination)
        finally:
            if place != self._destination:
                publish.discard(place)

    def remove_strays(self, names: Collection[str]) -> None:
        """Remove files that are not the job's: they were left by a run that was killed."""
        place, journal = self.staging.place, publish.journal(self.staging.place)
        if isinstance(place, Path):
            files: list[Location] = [file for file in place.rglob("*") if not file.is_dir()]
        else:
            files = list(place.below())
        for file in files:
            name = str(file).removeprefix(f"{place}/")
            if name not in names and not name.startswith(f"{journal.name}/"):
                file.unlink()

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After a failure remove everything; if another run has taken over, only the journals of this one."""
        failed = isinstance(error, OSError | MuonckptError)
        try:
            if failed and not self._lock.is_mine():
                publish.discard(self.staging.journals)
            elif failed and not isinstance(error, Interrupted):
                publish.discard(self.staging.place)
        finally:
            self._lock.close()

    def _take_over(self, job: str, resume: bool) -> None:
        place = self.staging.place
        if not resume:
            raise DestinationError(f"{place} holds unfinished work; continue with `resume=True`, or remove it first")
        entries = filter(None, (unsealed(_SEAL, line) for line in self._lock.earlier or ()))
        if any(entry["job"] != job for entry in entries):
            raise DestinationError(
                f"{place} holds unfinished work of another job (other source, mesh or version); remove it first"
            )
        # Unfinished files are written anew; finished ones are in the journals of all runs.
        for entry in entries_of(publish.journal(place)):
            if entry.name.endswith(_DRAFTS):
                _remove(entry)
            elif is_folder(entry):
                for journal in entries_of(entry):
                    self.history |= finished(read_lines(journal), job)


def _remove(place: Location) -> None:
    if isinstance(place, Remote):
        place.remove()
    else:
        shutil.rmtree(place)
