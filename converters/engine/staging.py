"""The staging directory of a job: where its files are written until they are published.

It lies beside the destination, or in an object store where the files belong.  Until they are published it also holds:

    .journal/lock         the job, and a line for each run that has worked on it; the coordinator keeps it locked
    .journal/RUN/0, 1 …   the journal of each worker of a run
    .journal/RUN.drafts/  files on their way; a finished one is moved to its name

Who makes the lock begins the job; later runs must be told to go on with it.  If two runs of a job live at once, as only
a store or a file system without locks lets happen, they do each other no harm: files appear whole, those of both are
the same bytes, one run publishes them, and the other finds that the lock is no longer its own.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from ...errors import DestinationError, Interrupted, MuonckptError
from ...store.io import lock, publish
from ...store.io.lines import read_lines
from ...store.io.location import Location, Remote
from .journal import FinishedFile, finished, sealed, unsealed

_SEAL = "lock"
_DRAFTS = ".drafts"


@dataclass(frozen=True, slots=True)
class Staging:
    """The staging directory ``place``, as every worker of a run sees it."""

    place: Location
    run: str

    @property
    def journals(self) -> Location:
        """Where the journals of this run are, by rank."""
        return publish.journal(self.place) / self.run

    @property
    def drafts(self) -> Location:
        """Where files are until they are finished."""
        return publish.journal(self.place) / f"{self.run}{_DRAFTS}"


def is_unfinished(place: Location) -> bool:
    """Whether there is something to go on with in a staging directory."""
    return publish.journal(place).exists()


def how_to_resume(place: Location) -> str:
    """What can be done when work was stopped."""
    return f"run the same command with --resume to go on, or remove {place}"


class Coordinator:
    """The coordinator's hold on a staging directory: it begins the work there, and ends it.

    Args:
        place: where files are staged for this destination.
        job: digest of the job; equal digests mean equal files.
        resume: go on with what an earlier run left, if anything.

    Attributes:
        history: what earlier runs have finished, by file; whether it is still so must be checked.

    Raises:
        DestinationError: unfinished work is there and ``resume`` is not set, or it is of another job; or another run
            is at it.
    """

    def __init__(self, destination: Location, place: Location, job: str, resume: bool) -> None:
        self.staging = Staging(place, uuid.uuid4().hex[:12])
        self.history: dict[str, FinishedFile] = {}
        self._destination = destination
        existed = place.exists()
        try:
            place.mkdir(parents=True, exist_ok=True)
            self._lock = lock.open_lock(place, f"{publish.JOURNAL}/lock")
            try:
                if existed or self._lock.earlier is not None:
                    self._take_over(job, resume)
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
        """Give the finished directory, or the one file ``root`` of it, its name.  Nothing else of it is left.

        Raises:
            DestinationError: the destination has appeared in the meantime, or it cannot be written.
            Interrupted: another run goes on with the work.
        """
        place = self.staging.place
        if not self._lock.is_mine():
            raise Interrupted(f"another run goes on with the work in {place}; nothing was published by this one")
        try:
            _remove(publish.journal(place))
            publish.publish(place / root, self._destination)
        finally:
            if place != self._destination:
                publish.discard(place)

    def remove_strays(self, names: Collection[str]) -> None:
        """Remove what is in the directory but no file of the job: it is of a run that was killed."""
        place = self.staging.place
        journal = publish.journal(place).name
        for name, file in list(_files(place)):
            if name not in names and not name.startswith(f"{journal}/"):
                file.unlink()

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After a failure remove everything, or if another run goes on with it what this one has noted there."""
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
            raise DestinationError(f"unfinished work lies in {place}; go on with --resume, or remove it to start again")
        runs = [entry for line in self._lock.earlier or () if (entry := unsealed(_SEAL, line))]
        if {run["job"] for run in runs} - {job}:
            raise DestinationError(
                f"{place} holds unfinished work of another job (other source, mesh or version); remove it first"
            )
        for entry in publish.journal(place).iterdir():
            if entry.name.endswith(_DRAFTS):
                _remove(entry)
            elif entry.is_dir():
                for journal in entry.iterdir():
                    self.history |= finished(read_lines(journal), job)


def _remove(place: Location) -> None:
    if isinstance(place, Remote):
        place.remove()
    else:
        shutil.rmtree(place)


def _files(place: Location) -> Iterator[tuple[str, Location]]:
    """All files below a directory, with their names in it."""
    if isinstance(place, Path):
        yield from ((file.relative_to(place).as_posix(), file) for file in place.rglob("*") if not file.is_dir())
    else:
        yield from ((str(file).removeprefix(f"{place}/"), file) for file in place.below())
