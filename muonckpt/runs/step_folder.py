"""A folder of checkpoints by step: which are whole, which may be removed, and what killed runs have left.

There is no record besides its files, so any process may look at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path

from ..names.collector import gc_paused
from ..names.errors import DestinationError, SourceError, UnavailableError
from ..programs.signs import METADATA_FILE
from ..record.record import MANIFEST_FILE
from ..store.io import publish
from ..store.io.location import Location, entries_of, is_link, is_there, kind_of, map_each, refuse_lost_link
from ..store.io.publish import CLAIM
from ..store.open_checkpoint import OpenCheckpoint
from ..store.verify.damage import rank_in_name, step_saved
from ..store.verify.diagnosis import diagnosis_at, open_to_load, way_back
from ..store.verify.run import Run, RunStep, look_at_step, strays_among
from ..store.verify.step_names import StepName
from ..store.verify.verification import look_at_files
from .resumes import ResumeRecord, resumes_of
from .run_verdict import missing_steps

DESCRIPTIONS = (MANIFEST_FILE, METADATA_FILE)
"""Files without which readers see no checkpoint."""


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest checkpoint without losses, or None, and the newer ones, each with its fault.

    Attributes:
        doubt: what is odd in it nevertheless, and what to do about that; empty if nothing.
        missing: a sentence about each newer step that the run had, and how it gets its name back if it is there.
        saved_as: the step that it was saved as, whatever its name is now; None if it does not say.
    """

    name: StepName | None
    faults: Mapping[StepName, str]
    doubt: str = ""
    missing: tuple[str, ...] = ()
    saved_as: int | None = None


@dataclass(frozen=True, slots=True)
class StepFolder:
    """A folder of checkpoints, in which anything else is left alone.

    Several processes may look, but one writes and removes.
    """

    place: Location

    def path(self, name: StepName) -> Location:
        return self.place / str(name)

    def newest(self, damaged: Mapping[StepName, str]) -> tuple[Newest, OpenCheckpoint | None]:
        """Find the newest checkpoint without losses, and open it, without reading data.

        All else with the name of a step is among the faults, so that no run goes back without a message.

        Args:
            damaged: checkpoints that look whole and are known not to be, each with its fault.

        Raises:
            SourceError: a checkpoint is of a newer version of this package.
            UnavailableError: the folder, or a checkpoint in it, cannot be looked at.
        """
        while True:
            names, faults, steps = self._names(), dict[StepName, str](), list[RunStep]()
            for name in sorted(names, reverse=True):
                try:
                    if not self.has(name):
                        continue
                    if name in damaged:
                        faults[name] = damaged[name]
                        steps.insert(0, RunStep(str(name), self.path(name), *name, "faulty", damaged[name], None, None))
                        continue
                    step, checkpoint = self._look(name)
                    steps.insert(0, step)
                except (SourceError, UnavailableError) as error:
                    raise error.with_text(error.fault, way_back(self.path(name), error.fault)) from error
                if not step.has_loss:
                    doubt = f"{step.fault}. {diagnosis_at(step.path).advice}" if step.fault else ""
                    saved_as = step_saved(checkpoint) if checkpoint else None
                    return Newest(name, faults, doubt, self._missing(steps), saved_as), checkpoint
                if not self.has(name):
                    break
                faults[name] = step.fault
            else:
                if self._names() == names:
                    return Newest(None, faults, missing=self._missing(steps)), None
            # While we looked, one was removed, for which a newer one may have been published: look again.

    def _missing(self, steps: Sequence[RunStep]) -> tuple[str, ...]:
        """Say which newer steps than these, the newest of a run down to a whole one, it had."""
        resumes = ResumeRecord()
        with suppress(UnavailableError):  # a record that cannot be read stops no run
            resumes = resumes_of(self.place, max_read=1)
        # A step with the name of an older one lies among those; of them only what was written later is read.
        looked, since = {step.name for step in steps}, steps[0].saved if steps else None

        def may_be_newer(entry: Location) -> bool:
            if StepName.parsed(entry.name) is None:
                return True
            with suppress(UnavailableError):
                saved = look_at_files(entry / MANIFEST_FILE).saved
                return entry.name not in looked and since is not None and saved is not None and saved >= since
            return False

        entries = self._entries()
        may_be = map_each(self.place, may_be_newer, entries)
        strays = strays_among(compress(entries, may_be))
        sentences = []
        for text, remedy in missing_steps(Run(self.place, tuple(steps), strays=strays), resumes.resumes):
            sentences.append(f"{text}. To take that, stop and {remedy.command}" if remedy else text)
        return tuple(sentences)

    def newest_to_restore(
        self, damaged: Mapping[StepName, str], lost: Collection[StepName] | None
    ) -> tuple[tuple[Newest, object], OpenCheckpoint | None]:
        """Find the newest checkpoint as `newest` does; where none is whole, one that may be but for a part.

        Args:
            lost: checkpoints without which a load has failed; None if no part of one may be left out.

        Returns:
            The `Newest`, with the fault of its own checkpoint where that is not whole; the patterns of ``fresh`` that
            the run had followed when it saved it; and the open checkpoint.
        """
        newest, checkpoint = self.newest(damaged)
        if newest.name is None and lost is not None:
            described = (name for name in newest.faults if is_there(self.path(name) / MANIFEST_FILE))
            # All that is read is checked.
            if name := max({*described} - {*lost}, default=None):
                newest, checkpoint = replace(newest, name=name), open_to_load(self.path(name))
        return (newest, checkpoint.outline.provenance.get("fresh") if checkpoint else None), checkpoint

    def whole(self, step: int) -> StepName | None:
        """Find the last whole checkpoint of a step, without reading data.

        Raises:
            SourceError: as `newest`.
        """
        names = self._published(name for name in self._names() if name.step == step)
        return next((name for name in sorted(names, reverse=True) if self.fault(name) is None), None)

    def has(self, name: StepName) -> bool:
        """Return True if a checkpoint of this name was published, and its removal has not begun."""
        return name in self._saved_files([name])

    def fault(self, name: StepName) -> str | None:
        """Return what of a checkpoint is lost, as far as is known without reading data; None if nothing is.

        Raises:
            SourceError: it is refused, or of a newer version of this package.
            UnavailableError: it cannot be looked at.
        """
        step, _ = self._look(name)
        return step.fault if step.has_loss else None

    @gc_paused()
    def _look(self, name: StepName) -> tuple[RunStep, OpenCheckpoint | None]:
        """Return the facts about a step, and its checkpoint if it can be opened."""
        # A step without our manifest is damaged for a series, though other programs may read it.
        path = self.path(name)
        step, checkpoint = look_at_step(path, name, lambda opened: opened)
        if is_there(path / MANIFEST_FILE):
            if step.state == "unread":
                raise SourceError(step.fault)
            return step, checkpoint
        fault = step.fault if step.state == "faulty" else f"it has no {MANIFEST_FILE}; {step.fault}".rstrip("; ")
        return replace(step, state="faulty", fault=fault, is_complete=False), None

    def new_name(
        self, step: int, replace: bool, damaged: Mapping[StepName, str]
    ) -> tuple[StepName, dict[StepName, str]]:
        """Return a free name for a new checkpoint of a step, and those that it replaces: what becomes of each, and why.

        Args:
            replace: whether it may replace a whole one.
            damaged: as for `newest`.

        Raises:
            DestinationError: a whole one may not.
            UnavailableError: one of them cannot be looked at.
        """
        names = {name for name in self._names() if name.step == step}
        # A whole checkpoint is replaced only by those who say so.
        reasons: dict[StepName, str] = {}
        for name in sorted(self._published(names)):
            reason = "replace=True" if replace else damaged.get(name) or self.fault(name)
            if reason is None:
                raise DestinationError(
                    f"{self.path(name)} exists already, and is whole; a run that is resumed goes on after it, "
                    "from the step that resume returns; if this run went back to an earlier step and the checkpoint is "
                    "to be superseded, save with replace=True"
                )
            other_step = self._other_step(name)
            stays = f"which stays, as it was saved as step {other_step}"
            reasons[name] = f"which is removed afterwards: {reason}" if other_step is None else stays
        for name in sorted(names - reasons.keys()):
            if self.has(name) and not is_there(self.path(name) / MANIFEST_FILE):
                reasons[name] = f"which stays, as it has no {MANIFEST_FILE}: remove it when you do not need it"
        return StepName(step, max((name.attempt for name in names), default=0) + 1), reasons

    def prune(
        self, saved: StepName, keep_last: int | None, keep_every: int | None, is_whole: Callable[[StepName], bool]
    ) -> list[StepName]:
        """Remove the `superfluous` checkpoints, now that ``saved`` has been published.

        Returns:
            The checkpoints that are newer than ``saved``, sorted.

        Raises:
            DestinationError: the folder does not show what was saved, so nothing is removed.
            OSError: something cannot be removed.
        """
        # A folder that does not show what was just saved may hide others, too.
        published = self._published(self._names())
        if saved not in published:
            raise DestinationError(f"expected {self.path(saved)}, which was just saved, found it missing")
        for name in superfluous(published, saved, keep_last, keep_every, is_whole):
            # One that was saved as another step may be the newest state of the run.
            if self._other_step(name) is None:
                publish.remove(self.path(name), DESCRIPTIONS)
        return sorted(name for name in published if name > saved)

    def _other_step(self, name: StepName) -> int | None:
        """Return the step that a checkpoint was saved as, if its name tells another; None if not, or if it is damaged.

        Raises:
            UnavailableError: it cannot be looked at.
        """
        with suppress(SourceError), OpenCheckpoint(self.path(name)) as checkpoint:
            saved_as = step_saved(checkpoint)
            return None if saved_as == name.step else saved_as
        return None

    def clean(self) -> None:
        """Remove half-removed checkpoints and files of abandoned saves, which killed runs have left.

        Raises:
            OSError: something cannot be removed.
        """
        for entry in self._entries():
            if isinstance(entry, Path):
                if _is_of_series(publish.removed_name(entry.name)):
                    publish.finish_removal(entry, DESCRIPTIONS)
                elif _is_of_series(publish.staged_name(entry.name)):
                    publish.discard_abandoned(entry)
                continue
            # A folder in a store keeps its name, and has a mark instead.
            files = _files(entry) if _is_of_series(entry.name) else set()
            if publish.MARK in files:
                publish.finish_removal(entry, DESCRIPTIONS)
            elif CLAIM in files and not files >= set(DESCRIPTIONS) and publish.is_stale(entry, self.place):
                publish.remove(entry, DESCRIPTIONS)

    def _entries(self) -> list[Location]:
        try:
            return entries_of(self.place)
        except FileNotFoundError:
            refuse_lost_link(self.place)
            return []

    def _names(self) -> set[StepName]:
        names = {StepName.parsed(entry.name) for entry in self._entries()}
        return {name for name in names if name is not None}

    def _published(self, names: Iterable[StepName]) -> set[StepName]:
        """Return the steps of this folder with our manifest; one that a link leads to is read, and left alone."""
        saved_files = self._saved_files(names).items()
        return {name for name, files in saved_files if MANIFEST_FILE in files and not is_link(self.path(name))}

    def _saved_files(self, names: Iterable[StepName]) -> dict[StepName, set[str]]:
        """Return the files of steps that have a description or a rank's file, or have lost all files, by name.

        Left out are those that are being saved or removed.
        """

        def files_of(name: StepName) -> tuple[StepName, set[str] | None]:
            files = _files(self.path(name))
            unfinished = publish.MARK in files or (CLAIM in files and not files >= set(DESCRIPTIONS))
            is_saved = any(file in DESCRIPTIONS or rank_in_name(file) is not None for file in files)
            path = self.path(name)
            is_saved = is_saved or (not files and (kind_of(path) in ("folder", "file") or is_link(path)))
            return name, files if is_saved and not unfinished else None

        return {name: files for name, files in map_each(self.place, files_of, names) if files is not None}


def superfluous(
    names: Iterable[StepName],
    saved: StepName,
    keep_last: int | None,
    keep_every: int | None,
    is_whole: Callable[[StepName], bool],
) -> Iterator[StepName]:
    """Yield the checkpoints to remove, the newest first; never ``saved``.

    The newest ``keep_last`` whole ones stay, ``saved`` among them, with the damaged ones between them, and those whose
    step ``keep_every`` divides.  Later steps than ``saved`` stay, too: the run may have gone back.  If a step was saved
    again, only its last whole attempt stays.
    """
    steps: set[int] = set()
    whole = 0
    for name in sorted((name for name in names if name <= saved), reverse=True):
        if name.step in steps:
            yield name
        elif keep_last is None or whole < keep_last:
            if name == saved or is_whole(name):
                whole += 1
                steps.add(name.step)
        elif keep_every and name.step % keep_every == 0:
            steps.add(name.step)
        else:
            yield name


def _is_of_series(name: str | None) -> bool:
    return name is not None and StepName.parsed(name) is not None


def _files(folder: Location) -> set[str]:
    try:
        return {entry.name for entry in entries_of(folder)}
    except (FileNotFoundError, NotADirectoryError):
        return set()
