"""The folder of a run: its checkpoints by step, of whatever program, and which are whole.

Nothing but the files says what there is, so anyone may look at any time, also while the run goes on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeVar

from ...names.errors import DamageError, SourceError, UnavailableError, warn_on_rank
from ...names.wording import listed
from ...programs.signs import METADATA_FILE
from ...record.record import MANIFEST_FILE
from ..formats.registry import SIBLINGS, format_shown
from ..io import publish
from ..io.location import (
    Location,
    Remote,
    entries_of,
    folders_with,
    is_file,
    is_folder,
    is_there,
    kind_of,
    map_each,
    refuse_lost_link,
    source_errors,
)
from ..io.regular import open_regular
from ..open_checkpoint import OpenCheckpoint
from .damage import HARMLESS, Damage, damage_at, damage_by_files, step_saved
from .step_names import NumberedName, StepName, siblings_of
from .verification import Verification, look_at_files, read_verification

T = TypeVar("T")

State = Literal["whole", "faulty", "incomplete", "removed", "unread"]

_POINTERS = ("latest_checkpointed_iteration.txt", "latest")
"""Files in which programs name the step to resume from: Megatron and verl, DeepSpeed."""

_MAX_POINTER_BYTES = 4096


@dataclass(frozen=True, slots=True)
class RunStep:
    """A checkpoint in the folder of a run.

    Attributes:
        name: of its folder in that of the run.
        path: of the checkpoint: that folder, or the only folder in it that holds a checkpoint.
        step: the number in its name.
        attempt: which attempt at this step it is, from 1.
        state: ``"whole"`` as far as names and sizes of files and the last verification tell, ``"faulty"``,
            ``"incomplete"`` if nothing in it describes a checkpoint, or it is being written; ``"removed"`` if it was
            removed meanwhile; or ``"unread"`` if this package does not read it, or it cannot be read now: then nothing
            is known of it.
        fault: one sentence; empty if it is whole.
        bytes: of all of its files; None if they cannot be listed.
        saved: when its description was written, or else its last file, in seconds since 1970; None if not known.
        is_complete: whether its manifest and the sizes of its files are right, whatever else is damaged.
        verified: its last verification, if that was of the same files.
    """

    name: str
    path: Location
    step: int
    attempt: int
    state: State
    fault: str
    bytes: int | None
    saved: float | None
    is_complete: bool = False
    verified: Verification | None = None

    @property
    def has_loss(self) -> bool:
        """True if something of it is lost, as far as is known; else it can be loaded, whatever looks odd in it."""
        return not self.is_complete or (self.verified is not None and self.verified.has_loss)

    @property
    def is_published(self) -> bool:
        """False for a save that goes on, or was stopped, and after a removal."""
        return self.state not in ("incomplete", "removed")

    @property
    def standing(self) -> str:
        """How far a step without known losses has been checked: a phrase that follows its name."""
        if self.fault:
            return "which has lost nothing"
        if self.verified is None:
            return "not verified yet"
        return "verified" if self.verified.verdict == "whole" else f"verified ({self.verified.verdict})"

    @property
    def folder(self) -> Location:
        """The folder in that of the run."""
        return self.path if self.path.name == self.name else self.path.parent


@dataclass(frozen=True, slots=True)
class Pointer:
    """A file in which a program names the step to resume from; ``name`` is that step's, None if there is no such."""

    file: str
    text: str
    name: str | None


@dataclass(frozen=True)
class Run:
    """The checkpoints in a folder, sorted by step.

    Attributes:
        pointer: what the run's program says is the latest checkpoint, if it does.
        unpublished: the names of directories of saves that go on, or were stopped.
        strays: checkpoints of ours with names that tell no step; ``step`` is the one that each was saved as.
    """

    path: Location
    steps: tuple[RunStep, ...]
    pointer: Pointer | None = None
    unpublished: tuple[str, ...] = ()
    strays: tuple[RunStep, ...] = ()

    @cached_property
    def whole(self) -> tuple[RunStep, ...]:
        """The steps without losses, even if they have odd facts."""
        return tuple(step for step in self.steps if not step.has_loss)

    @cached_property
    def unread(self) -> tuple[RunStep, ...]:
        """The steps after the newest whole one that cannot be read: any of them may be whole."""
        after = self.steps.index(self.whole[-1]) + 1 if self.whole else 0
        return tuple(step for step in self.steps[after:] if step.state == "unread")

    @property
    def newest_whole(self) -> RunStep | None:
        """The newest whole step; None if there is none, or if it is not known which it is."""
        return self.whole[-1] if self.whole and not self.unread else None

    def replacement(self, name: str) -> RunStep | None:
        """Return a later attempt at the step of this name that is whole, so that this is not needed."""
        if (numbered := NumberedName.parsed(name)) is None:
            return None
        step, attempt = numbered.step
        return next((each for each in self.whole if each.step == step and each.attempt > attempt), None)


def run_of(path: Location) -> Run | None:
    """Look at the folder of a run; None if it is a checkpoint itself, or holds none in folders that end with a number.

    Reads the metadata of each checkpoint, and no elements.

    Raises:
        UnavailableError: the folder cannot be read.
    """
    viewed = viewed_run_of(path, lambda opened: None)
    return viewed and viewed[0]


def viewed_run_of(path: Location, view: Callable[[OpenCheckpoint], T]) -> tuple[Run, Mapping[str, T]] | None:
    """Look at a run as `run_of` does, and return besides what ``view`` makes of steps, as `look_at_folder` does."""
    if not is_folder(path) or _is_checkpoint(path):
        return None
    run, views = look_at_folder(path, view)
    return (run, views) if any(step.is_published for step in run.steps) else None


def _is_checkpoint(path: Location) -> bool:
    """Return True if a folder is one checkpoint rather than the folder of a run.

    Folders that DCP reads are of one checkpoint if they share a number: ``pytorch_model_fsdp_0`` and ``optimizer_0``.
    """
    format = format_shown(path)
    if format is not SIBLINGS:
        return format is not None
    stems = defaultdict(set)
    for name in folders_with(path, METADATA_FILE):
        if numbered := NumberedName.parsed(name):
            stems[numbered.step].add(numbered.stem)
    return any(len(siblings) > 1 for siblings in stems.values())


def look_at_folder(path: Location, view: Callable[[OpenCheckpoint], T]) -> tuple[Run, Mapping[str, T]]:
    """Look at the folder of a run, which may have other files; raises as `run_of`.

    Args:
        view: called with each checkpoint whose metadata can be read; in a store from several threads.

    Returns:
        The run, and the values of ``view`` by the names of steps.
    """
    with source_errors(path):
        entries = entries_of(path)
    entries.sort(key=lambda entry: entry.name)

    def look(entry: Location) -> tuple[str, RunStep | None, T | None]:
        name = NumberedName.parsed(entry.name)
        return (name.stem, *_look_at_entry(entry, name.step, view)) if name else ("", None, None)

    looks = [(stem, step, value) for stem, step, value in map_each(path, look, entries) if step]
    # Other folders may end with a number, too: the run's are named as what holds checkpoints, in a series as ours.
    stems = {stem for stem, step, _ in looks if step.is_published and step.state != "unread"}
    steps = [step for stem, step, _ in looks if not stems or stem in stems]
    ours = [step for step in steps if StepName.parsed(step.name)]
    if any(_has_manifest(step.folder) for step in ours):
        steps = ours
    steps.sort(key=lambda step: (step.step, step.attempt, step.name))
    views = {step.name: value for _, step, value in looks if value is not None and step in steps}
    names = [entry.name for entry in entries]
    unpublished = tuple(name for name in names if NumberedName.parsed(publish.staged_name(name) or ""))
    strays = strays_among([entry for entry in entries if entry.name not in {step.name for step in steps}])
    return Run(path, tuple(steps), _pointer(path, {*names}, steps), unpublished, strays), views


def strays_among(entries: Iterable[Location]) -> tuple[RunStep, ...]:
    """Return the checkpoints of ours among entries of a run that are no steps of it, as `Run` has them."""
    strays = []
    for entry in entries:
        if not entry.name.startswith(".") and _has_manifest(entry):
            with suppress(SourceError, UnavailableError):
                stray, saved_as = look_at_step(entry, StepName(0), step_saved)
                strays += [replace(stray, step=saved_as)] if saved_as is not None else []
    return tuple(strays)


def _has_manifest(entry: Location) -> bool:
    with suppress(UnavailableError):
        return is_there(entry / MANIFEST_FILE)
    return False


def _pointer(path: Location, names: set[str], steps: list[RunStep]) -> Pointer | None:
    for file in _POINTERS:
        if file in names:
            with suppress(SourceError), open_regular(path / file) as opened:
                text = opened.read(0, min(opened.size, _MAX_POINTER_BYTES)).decode(errors="replace").strip()
                targets = [step.name for step in steps if text in (step.name, str(step.step))]
                return Pointer(file, text, targets[-1] if targets else None)
    return None


def last_verification(checkpoint: Location) -> Verification | None:
    """Return the last verification of a checkpoint as it is now; None if it is not recorded, or cannot be read."""
    place = checkpoint.absolute()
    # The checkpoint of a step may be inside the step's folder.
    recorded_places = [place, *([place.parent] if NumberedName.parsed(place.parent.name) else [])]
    try:
        for recorded in recorded_places:
            entry = read_verification(recorded)
            if entry and entry.files == look_at_files(recorded).digest:
                return entry
    except UnavailableError as error:  # a reader of one checkpoint need not be allowed to see the folder around it
        warn_on_rank(f"whether {checkpoint} was verified is not known: {error}")
    return None


def newest_steps(checkpoint: Location) -> Run:
    """Look at the steps beside a checkpoint, the newest first, and no further than to a whole one besides itself.

    A folder that cannot be listed, or that is a checkpoint, has no steps: this is for advice.
    """
    run, steps = checkpoint.parent, list[RunStep]()
    siblings: list[tuple[str, StepName]] = []
    with suppress(SourceError, UnavailableError):
        siblings = [] if _is_checkpoint(run) else siblings_of(checkpoint)
    for name, step in sorted(siblings, key=lambda sibling: (sibling[1], sibling[0]), reverse=True):
        looked, _ = _look_at_entry(run / name, step, lambda opened: None)
        steps += filter(None, [looked])
        if looked and name != checkpoint.name and not looked.has_loss:
            break
    return Run(run, tuple(reversed(steps)))


def _look_at_entry(
    entry: Location, name: StepName, view: Callable[[OpenCheckpoint], T]
) -> tuple[RunStep | None, T | None]:
    """Look at what has the name of a step in the folder of a run; None if that is no folder, and no checkpoint."""
    try:
        kind = kind_of(entry)
        if kind is None:
            refuse_lost_link(entry)
        is_file = kind == "file" and (entry.name.endswith(".ckpt") or StepName.parsed(entry.name) is not None)
        return look_at_step(entry, name, view) if kind == "folder" or is_file else (None, None)
    except UnavailableError as error:
        return RunStep(entry.name, entry, *name, "unread", str(error), None, None), None


def look_at_step(place: Location, name: StepName, view: Callable[[OpenCheckpoint], T]) -> tuple[RunStep, T | None]:
    """Say how whole the checkpoint of a step is, without reading data.

    Args:
        place: its folder or file in that of the run.
        view: called with the open checkpoint; its value is returned, or None if the metadata cannot be read.

    Raises:
        UnavailableError: it cannot be looked at, so it is not known whether it is whole.
    """
    refuse_lost_link(place)
    files, last = look_at_files(place), read_verification(place)
    # The last verification counts only if the files are the same as then.
    last = last if last and last.files == files.digest else None
    step = RunStep(place.name, place, *name, "faulty", "", files.bytes, files.saved, verified=last)
    # In a store, a removal leaves a mark until the last file is gone; what is there until then is no step any more.
    if isinstance(place, Remote) and is_there(place / publish.MARK):
        return replace(step, state="removed", fault="it is being removed"), None
    value = None
    try:
        # The checkpoint is the step's folder, or the only one in it that shows a format (verl's ``actor``).
        folders = [place]
        if kind_of(place) != "file" and format_shown(place) is None:
            folders = [entry for entry in entries_of(place) if is_folder(entry) and format_shown(entry) is not None]
        if len(folders) > 1:
            names = listed(sorted(entry.name for entry in folders))
            raise SourceError(f"{place} holds several checkpoints, {names}: look at each by itself")
        if folders:
            step = replace(step, path=folders[0])
            with OpenCheckpoint(step.path) as checkpoint:
                damage, value = damage_by_files(checkpoint), view(checkpoint)
            step = judged(replace(step, is_complete=damage.kinds <= HARMLESS - {"manifest"}), damage)
        # Nothing shows a format: a step of ours is damaged, as only a whole one gets its name.
        elif StepName.parsed(place.name) is not None and not is_there(place / publish.CLAIM):
            step = replace(step, fault=damage_at(place).sentence)
        else:
            step = replace(step, state="incomplete", fault=_NOT_FINISHED)
    except SourceError as error:
        if is_damaged(step.path, error):
            step = replace(step, fault=damage_at(step.path).sentence)
        else:
            step = replace(step, state="unread", fault=str(error))
    except OSError as error:  # a file was gone that had been listed
        step = replace(step, fault=str(error))
    # Files that come or go meanwhile are of a save or a removal.
    if step.state == "whole" or look_at_files(place) == files:
        return step, value
    state: State = "incomplete" if is_there(place) else "removed"
    return replace(step, state=state, fault=_CHANGING if is_there(place) else _GONE, is_complete=False), None


def judged(step: RunStep, damage: Damage) -> RunStep:
    """Return a step with the verdict on it: here, and nowhere else, that is decided, whoever has looked or read.

    Args:
        damage: what is known of it besides its last verification, which has read all bytes.
    """
    last = step.verified
    fault = last.sentence if last and not last.is_whole else damage.sentence
    return replace(step, state="faulty" if fault else "whole", fault=fault, is_complete=step.is_complete and not damage)


def is_damaged(path: Location, error: SourceError) -> bool:
    """Return whether an error is of damage: also where the name of a step of ours has a file or no files at all.

    Only a whole step gets its name.
    """
    if isinstance(error, DamageError):
        return True
    return StepName.parsed(path.name) is not None and (is_file(path) or (is_folder(path) and not entries_of(path)))


_GONE = "it is gone"
_CHANGING = "its files changed while they were looked at, by a save or a removal"
_NOT_FINISHED = "nothing in it describes a checkpoint: a save that goes on, or that was stopped"
