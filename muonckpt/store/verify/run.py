"""The folder of a run: its checkpoints by step, of whatever program, and which are whole.

Nothing but the files says what there is, so anyone may look at any time, also while the run goes on.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, TypeVar

from ...names.errors import DamageError, SourceError, UnavailableError, warn_on_rank
from ...names.wording import enumerated, listed, shell_line
from ...programs.signs import METADATA_FILE
from ..formats.registry import SIBLINGS, format_shown
from ..io import publish
from ..io.location import (
    Location,
    Remote,
    entries_of,
    folders_with,
    is_folder,
    is_there,
    kind_of,
    map_each,
    source_errors,
)
from ..io.regular import open_regular
from ..open_checkpoint import OpenCheckpoint
from .damage import HARMLESS, Damage, damage_at, damage_by_files
from .verification import Verification, look_at_files, read_verification

T = TypeVar("T")

State = Literal["whole", "faulty", "incomplete", "removed", "unread"]

_OURS = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


class StepName(NamedTuple):
    """The name of a checkpoint of ours: its step, and the number of the attempt at this step.  Names sort by age."""

    step: int
    attempt: int = 1

    def __str__(self) -> str:
        return f"step-{self.step:08}" + (f".{self.attempt}" if self.attempt > 1 else "")

    @classmethod
    def parsed(cls, text: str) -> StepName | None:
        match = _OURS.fullmatch(text)
        name = cls(int(match[1]), int(match[2] or 1)) if match else None
        return name if str(name) == text else None


_NUMBERED = re.compile(r"(?P<stem>(?:[^.].*[^0-9])?)(?P<step>[0-9]{1,18})(?:\.ckpt)?")
"""Names of checkpoints that end with the number of a step, in whatever way a program writes it."""

_ATTEMPT = re.compile(r"(?P<first>.*[0-9])\.(?P<attempt>[2-9]|[1-9][0-9])")
"""Names of later attempts at a step: a checkpoint that was made again is beside the first one."""


class NumberedName(NamedTuple):
    """The step that the name of a checkpoint of any program tells, and the text before its number."""

    stem: str
    step: StepName

    @classmethod
    def parsed(cls, text: str) -> NumberedName | None:
        if step := StepName.parsed(text):
            return cls("step-", step)
        attempt = _ATTEMPT.fullmatch(text)
        if match := _NUMBERED.fullmatch(attempt["first"] if attempt else text):
            return cls(match["stem"], StepName(int(match["step"]), int(attempt["attempt"]) if attempt else 1))
        return None


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
        saved: when the last of its files was written, in seconds since 1970; None where a store does not say.
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
    """

    path: Location
    steps: tuple[RunStep, ...]
    pointer: Pointer | None = None
    unpublished: tuple[str, ...] = ()

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

    def replacement(self, step: RunStep) -> RunStep | None:
        """Return a later attempt at the same step that is whole, so that this one is not needed; None without one."""
        later = (each for each in self.whole if each.step == step.step and each.attempt > step.attempt)
        return next(later, None)

    def way_back(self, unread: Collection[str] = ()) -> str:
        """Say how to go on from an older step than those that cannot be read; empty if there are no such steps.

        Args:
            unread: the names of steps that cannot be read, besides those of which looking at the run has shown it.
        """
        whole = [step for step in self.whole if step.name not in unread]
        newer = self.steps[self.steps.index(whole[-1]) + 1 :] if whole else ()
        names = [step.name for step in newer if step.state == "unread" or step.name in unread]
        if not names:
            return ""
        line = f"move {enumerated(names)} out of {self.path}"
        if not isinstance(self.path, Remote):
            line = shell_line("mv", *(self.path / name for name in names), "ELSEWHERE")
        return f"To go on from {whole[-1].name} instead: {line}"


def way_back_beside(path: Location) -> str:
    """Say how the run of a step that cannot be read goes on from an older one; empty if it cannot, or has none."""
    if NumberedName.parsed(path.name):
        with suppress(SourceError, UnavailableError):
            return look_at_folder(path.parent, lambda opened: None)[0].way_back([path.name])
    return ""


@contextmanager
def naming_way_back(place: Location) -> Iterator[None]:
    """Add to the error of a step that cannot be read how its run goes on without it."""
    try:
        yield
    except UnavailableError as error:
        advice = ". ".join(filter(None, (error.advice, way_back_beside(place))))
        raise error.with_text(error.fault, advice) from error


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

    def look(entry: Location) -> tuple[str, RunStep, T | None] | None:
        name = NumberedName.parsed(entry.name)
        if name is None:
            return None
        try:
            kind = kind_of(entry)
            if kind == "folder" or (kind == "file" and entry.name.endswith(".ckpt")):
                return name.stem, *look_at_step(entry, name.step, view)
        except UnavailableError as error:
            return name.stem, RunStep(entry.name, entry, *name.step, "unread", str(error), None, None), None
        return None

    looks = [result for result in map_each(path, look, entries) if result is not None]
    # Other folders may end with a number, too: the run's are named as what holds checkpoints.
    stems = {stem for stem, step, _ in looks if step.is_published}
    steps = [step for stem, step, _ in looks if not stems or stem in stems]
    steps.sort(key=lambda step: (step.step, step.attempt, step.name))
    views = {step.name: value for _, step, value in looks if value is not None}
    names = [entry.name for entry in entries]
    unpublished = tuple(name for name in names if NumberedName.parsed(publish.staged_name(name) or ""))
    return Run(path, tuple(steps), _pointer(path, {*names}, steps), unpublished), views


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


def new_attempt(checkpoint: Location) -> str | None:
    """Return a free name by which the same step is found beside a checkpoint; None if its name tells no step.

    The last attempt at a step that is whole counts.
    """
    numbered = NumberedName.parsed(checkpoint.name)
    if numbered is None:
        return None
    attempt = numbered.step.attempt
    for _, step in _siblings(checkpoint):
        if step.step == numbered.step.step:
            attempt = max(attempt, step.attempt)
    # Ours have their numbers in one form, those of other programs get a suffix.
    if name := StepName.parsed(checkpoint.name):
        return str(StepName(name.step, attempt + 1))
    later = _ATTEMPT.fullmatch(checkpoint.name)
    return f"{(later['first'] if later else checkpoint.name).removesuffix('.ckpt')}.{attempt + 1}"


def _siblings(checkpoint: Location) -> list[tuple[str, StepName]]:
    """Return the names in the folder of a checkpoint that tell steps of its run, or of any if its own tells none."""
    numbered = NumberedName.parsed(checkpoint.name)
    siblings = []
    with suppress(FileNotFoundError):
        for entry in entries_of(checkpoint.parent):
            sibling = NumberedName.parsed(entry.name)
            if sibling and (numbered is None or sibling.stem == numbered.stem):
                siblings.append((entry.name, sibling.step))
    return siblings


def whole_before(checkpoint: Location, besides: Collection[str] = ()) -> RunStep | None:
    """Return the newest whole checkpoint of the same run, preferably of no later step; None if none is beside it.

    Args:
        besides: the names of others that are known to be damaged.
    """
    run, numbered = checkpoint.parent, NumberedName.parsed(checkpoint.name)

    def preference(sibling: tuple[str, StepName]) -> tuple[object, ...]:
        name, step = sibling
        return numbered is not None and step.step > numbered.step.step, -step.step, -step.attempt, name

    siblings: list[tuple[str, StepName]] = []
    with suppress(OSError, SourceError, UnavailableError):  # of no use as advice
        siblings = [] if _is_checkpoint(run) else sorted(_siblings(checkpoint), key=preference)
    # Look at the best ones first, and no further than to one that is whole; pass over those that cannot be read.
    for name, step in siblings:
        with suppress(OSError, SourceError, UnavailableError):
            if name not in (checkpoint.name, *besides):
                candidate, _ = look_at_step(run / name, step, lambda opened: None)
                if not candidate.has_loss:
                    return candidate
    return None


def look_at_step(place: Location, name: StepName, view: Callable[[OpenCheckpoint], T]) -> tuple[RunStep, T | None]:
    """Say how whole the checkpoint of a step is, without reading data.

    Args:
        place: its folder or file in that of the run.
        view: called with the open checkpoint; its value is returned, or None if the metadata cannot be read.

    Raises:
        UnavailableError: it cannot be looked at, so it is not known whether it is whole.
    """
    files, last = look_at_files(place), read_verification(place)
    # The last verification counts only if the files are the same as then.
    last = last if last and last.files == files.digest else None
    step = RunStep(place.name, place, *name, "faulty", "", files.bytes, files.last_write, verified=last)
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
    except DamageError:
        step = replace(step, fault=damage_at(step.path).sentence)
    except SourceError as error:
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


def has_lost_all(path: Location) -> bool:
    """Return whether a folder has the name of a step of ours and no files: only a whole one gets its name."""
    return StepName.parsed(path.name) is not None and is_folder(path) and not entries_of(path)


_GONE = "it is gone"
_CHANGING = "its files changed while they were looked at, by a save or a removal"
_NOT_FINISHED = "nothing in it describes a checkpoint: a save that goes on, or that was stopped"
