"""The crew: one or several workers at one job, on one machine or many, that share a file system or an object store.

The leader claims the destination, looks after what an earlier run left, and says that it has begun.  The others join:
the run whose leader lives, does the same job and expects as many workers is theirs, so that nothing else needs to be
agreed upon.  Everybody writes a part and journals it.  The leader watches all, the others watch the leader; who sees
another fail or vanish stops.  When all have finished the leader publishes, the others leave, and it clears up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType

from ...errors import DestinationError, Interrupted, LayoutError, MuonckptError, SourceError
from ...store.io import publish
from ...store.io.location import Location
from .journal import Done, Folder, Journal, Step
from .log import remove
from .peer import Peer, Sight
from .workers import Worker

PATIENCE = 120.0
"""Seconds without a sign of life after which a worker counts as lost.  NFS may hide for 60 what happens elsewhere."""

_BEAT = 1.0
"""Seconds between two signs of life, and between two looks at the others; a tenth of the patience if that is less."""

_PAUSE = 0.1
"""Seconds between two looks when there is nothing else to do."""

_TELL = 10.0
"""Seconds of waiting after which it is said what for."""

_FAMILIES = {family.__name__: family for family in (SourceError, LayoutError, DestinationError, Interrupted)}
"""Errors that keep their kind, and with it their exit code, on all workers."""

_log = logging.getLogger(__name__)


class Crew:
    """A worker's place among those that do a job.

    Beside the destination lie the directory ``staged``, where files are written until they are published, and a folder
    of journals, named by the number of the run and the worker's rank.  In an object store, which cannot rename, files
    may be staged where they belong.  The journals of earlier runs are the ``history``: finished files, the same for all
    workers; what it claims must still be checked.

    Args:
        destination, staged: where the finished checkpoint will appear, and where it is written.
        job: digest of the job; equal digests mean equal files.
        resume: go on with what an earlier run left, if anything.  The leader's word counts.
        patience: seconds without a sign of life after which another worker counts as lost.
        stop: set when another worker is in trouble; whoever works should then raise `Interrupted`.

    Raises:
        DestinationError: unfinished work is there and ``resume`` is not set, or it is of another job; another run is
            at it; nobody leads; or it cannot be written.
    """

    def __init__(
        self,
        destination: Location,
        staged: Location,
        job: str,
        worker: Worker,
        resume: bool,
        patience: float,
        stop: threading.Event,
    ) -> None:
        self.staged = staged
        self.history: dict[str, Done] = {}
        self._destination = destination
        self._folder = Folder(publish.journals(destination))
        self._job, self._worker, self._resume, self._patience = job, worker, resume, patience
        self._run = 0  # none joined yet
        self._mine: Journal
        self._next: Peer
        self._others: Mapping[Worker, Peer] = {}
        self._done: dict[str, Done] = {}
        self._prepared = False
        self._trouble: MuonckptError | None = None
        self._stop, self._over = stop, threading.Event()
        self._watch = threading.Thread(target=self._keep_watch, daemon=True)

    def __enter__(self) -> Crew:
        try:
            if self._worker.leads:
                self._lead()
            else:
                self._follow()
        except BaseException as error:
            self._leave(error)
            if isinstance(error, OSError):
                raise DestinationError(f"cannot write {self.staged}: {error.strerror or error}") from error
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._trouble is not None and isinstance(error, Interrupted):  # that is why it was stopped
            error = self._trouble
        self._leave(error)
        if self._trouble is not None and error is self._trouble:
            raise self._trouble

    @property
    def known(self) -> int:
        """How many files are finished, as far as this worker has seen."""
        return len(self.history.keys() | self.gathered().keys())

    @property
    def way_out(self) -> str:
        """What can be done when work was stopped."""
        return f"run the same command with --resume to go on, or remove {self.staged}"

    def add(self, file: str, done: Done) -> None:
        """Note a finished (and synced) file, or one of the history that has been checked."""
        self._mine.add(file, done)
        self._done[file] = done

    def gathered(self) -> dict[str, Done]:
        """What the workers of this run have finished, as far as this one has seen."""
        every = [self._done, *(peer.done for peer in self._others.values())]
        return {file: done for each in every for file, done in each.items()}

    def finish(self) -> None:
        """This worker's part is done.  The leader waits until all have finished, the others until it has published.

        Raises:
            MuonckptError: another worker has failed or is lost.
        """
        self._mine.say(Step.FINISHED)
        aim = Step.FINISHED if self._worker.leads else Step.ENDED

        def missing() -> list[Worker]:
            self._look_round()
            if self._trouble:
                raise self._trouble
            return [other for other, peer in self._others.items() if aim not in peer.steps]

        _wait(lambda: self._is_published() or not missing(), lambda: ", ".join(map(str, missing())))

    # --- coming ------------------------------------------------------------------------------------------------------

    def _lead(self) -> None:
        """Claim the destination, and see that there is something to go on with, or a new beginning."""
        self._folder.place.mkdir(parents=True, exist_ok=True)
        try:
            self._claim(1 + max((run for run, _ in self._folder.found()), default=0))
        except (FileExistsError, FileNotFoundError):  # another claimed it now, or has just cleared up
            raise self._taken() from None
        mine = (self._run, self._worker.rank)
        earlier = [Peer(path, self._patience) for name, path in self._folder.found().items() if name != mine]
        _wait(lambda: self._are_gone(earlier), lambda: f"a sign of life of an earlier run at {self.staged}")
        self._prepare(earlier)
        self._remember()
        rest = [Worker(rank, self._worker.world) for rank in range(1, self._worker.world)]
        self._others = {other: Peer(self._folder.journal(self._run, other.rank), self._patience) for other in rest}
        self._mine.say(Step.BEGUN)

    def _are_gone(self, earlier: list[Peer]) -> bool:
        seen = [peer.look() for peer in earlier]
        if Sight.ALIVE in seen:
            raise self._taken()
        return Sight.UNSURE not in seen

    def _prepare(self, earlier: list[Peer]) -> None:
        """Take up what earlier runs left, or begin anew."""
        exists = self.staged.exists()
        jobs = {peer.header.job for peer in earlier if peer.header}
        if exists and not self._resume:
            raise DestinationError(
                f"unfinished work lies in {self.staged}; go on with --resume, or remove it to start again"
            )
        if exists and jobs - {self._job}:
            raise DestinationError(
                f"{self.staged} holds unfinished work of another job (other source, mesh or version); remove it first"
            )
        if exists and self.staged == self._destination and (not jobs or any(peer.ended_well for peer in earlier)):
            raise DestinationError(f"{self.staged} has been published just now")
        self._prepared = True
        if exists and jobs:
            return
        if exists:  # nobody knows what it is
            publish.discard(self.staged)
        self._folder.clear(self._run - 1)
        self.staged.mkdir()

    def _follow(self) -> None:
        """Join the leader, when there is one."""
        leaders: dict[int, Peer] = {}
        since = time.monotonic()

        def joined() -> bool:
            for (run, rank), path in self._folder.found().items():
                if rank == 0:
                    leaders.setdefault(run, Peer(path, self._patience))
            for run, leader in leaders.items():
                if leader.look() is Sight.ALIVE and Step.BEGUN in leader.steps:
                    self._join(run, leader)
            if not self._run and time.monotonic() - since > self._patience:
                raise DestinationError(
                    f"{self._worker} has waited {self._patience:g} s for worker 0 to begin; see what that said, and "
                    f"that {self._folder.place.parent} is the same directory on all machines"
                )
            return self._run > 0

        _wait(joined, lambda: f"worker 0 to begin in {self._folder.place}")
        self._remember()

    def _join(self, run: int, leader: Peer) -> None:
        assert leader.header is not None, "it has spoken"
        if (leader.header.job, leader.header.world) != (self._job, self._worker.world):
            raise DestinationError(
                f"{self._worker} cannot join worker 0 of {leader.header.world} at {self.staged}, which does another "
                "job: expected the same command, version and source for all workers"
            )
        try:
            self._claim(run)
        except FileExistsError:
            raise DestinationError(f"there is a {self._worker} at {self.staged} already") from None
        self._others = {Worker(0, self._worker.world): leader}

    def _claim(self, run: int) -> None:
        self._mine = Journal(self._folder.journal(run, self._worker.rank), self._job, self._worker.world)
        self._next = Peer(self._folder.journal(run + 1, 0), self._patience)
        self._run = run
        self._watch.start()

    def _remember(self) -> None:
        """Read what earlier runs have finished."""
        for (run, _), path in self._folder.found().items():
            if run < self._run:
                peer = Peer(path, self._patience)
                peer.look()
                self.history.update(peer.done)

    # --- watching ----------------------------------------------------------------------------------------------------

    def _keep_watch(self) -> None:
        """Show that this worker lives, and see whether the others do."""
        while not self._over.wait(min(_BEAT, self._patience / 10)):
            try:
                self._mine.beat()
                self._look_round()
            except OSError as error:
                self._alarm(Interrupted(f"{self._worker} lost sight of the others: {error}; {self.way_out}"))

    def _look_round(self) -> None:
        self._next.look()
        if Step.BEGUN in self._next.steps:
            self._alarm(Interrupted(f"{self._worker} seemed lost, and another run goes on with its work"))
        for other, peer in self._others.items():
            sight = peer.look()
            if peer.error:
                family, text = peer.error
                self._alarm(_FAMILIES.get(family, MuonckptError)(text))
            elif _is_lost(peer, sight) and not self._is_published():
                absent = f"has not come in {self._patience:g} s (RANK, WORLD_SIZE or the like say that there is one)"
                how = "gives no sign of life any more" if peer.header else absent
                self._alarm(Interrupted(f"{other} {how}; nothing was published; {self.way_out}"))

    def _alarm(self, trouble: MuonckptError) -> None:
        self._trouble = self._trouble or trouble
        self._stop.set()

    def _is_published(self) -> bool:
        renamed = self.staged != self._destination
        return renamed and not self._worker.leads and self._destination.exists()

    # --- leaving -----------------------------------------------------------------------------------------------------

    def _leave(self, error: BaseException | None) -> None:
        """Say the last word.  The leader sees all others off, and clears up; only what can be gone on with stays."""
        self._over.set()
        if not self._run:
            return
        self._watch.join()
        with suppress(OSError):  # that this worker is gone is seen all the same
            self._mine.say(Step.ENDED, self._last_word(error))
        failed = isinstance(error, OSError | MuonckptError) and not isinstance(error, Interrupted)
        if self._worker.leads and not self._prepared:  # it was refused: nothing here is its own but its claim
            remove(self._mine.place)
        elif self._worker.leads and (failed or error is None):
            _wait(self._are_off, lambda: "the other workers to leave")
            if failed:
                publish.discard(self.staged)
            self._mine.close()  # before: NFS keeps the name of a removed file that is open
            self._folder.clear(self._run)
        self._mine.close()

    def _are_off(self) -> bool:
        return not any(peer.look() in (Sight.ALIVE, Sight.UNSURE) for peer in self._others.values())

    def _last_word(self, error: BaseException | None) -> tuple[str, str] | None:
        if error is None:
            return None
        if error is self._trouble:
            return type(error).__name__, str(error)
        if isinstance(error, KeyboardInterrupt):
            return Interrupted.__name__, f"{self._worker} was stopped; nothing was published; {self.way_out}"
        family = next((name for name, family in _FAMILIES.items() if isinstance(error, family)), type(error).__name__)
        return family, f"{self._worker} failed: {error}"

    def _taken(self) -> DestinationError:
        return DestinationError(f"another process is writing into {self.staged}")


def _is_lost(peer: Peer, sight: Sight) -> bool:
    gone = peer.header is not None or peer.is_silent
    return sight is Sight.LOST or (sight is Sight.ABSENT and gone)


def _wait(ready: Callable[[], bool], what: Callable[[], str]) -> None:
    """Look again and again, and after a while say, ever more seldom, what is waited for."""
    since, tell = time.monotonic(), _TELL
    while not ready():
        time.sleep(_PAUSE)
        if time.monotonic() - since > tell:
            _log.warning("%.0f s now waiting for %s", time.monotonic() - since, what())
            tell *= 2
