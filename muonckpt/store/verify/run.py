"""The folder of a run: its checkpoints by step, of whatever program, and which are whole.

Nothing but the files says what there is, so anyone may look at any time, also while the run goes on.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from ...names.errors import DamageError, SourceError
from ...programs.signs import METADATA_FILE
from ..formats.registry import SIBLINGS, shown_by
from ..io import publish
from ..io.location import Location, at_each, folders_with
from ..io.regular import open_regular
from ..open_checkpoint import OpenCheckpoint
from .damage import damage_of_files, findings_by_files, sentence_of, unexplained
from .verification import Verification, look_at_files, read_verifications

State = Literal["whole", "damaged", "incomplete", "unread"]

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
"""Names of later attempts at a step: a checkpoint that was made anew lies beside the first one."""

_POINTERS = ("latest_checkpointed_iteration.txt", "latest")
"""Files in which programs name the step to resume from: Megatron and verl, DeepSpeed."""

_MOST_OF_POINTER = 4096


@dataclass(frozen=True, slots=True)
class RunStep:
    """A checkpoint in the folder of a run.

    Attributes:
        name: of its folder in that of the run.
        path: where the checkpoint is: that folder, or the only folder in it that holds a checkpoint.
        step: the number in its name.
        attempt: which attempt at this step it is, from 1.
        state: ``"whole"`` as far as names and sizes of files and the last verification tell, ``"damaged"``,
            ``"incomplete"`` if nothing in it describes a checkpoint, or ``"unread"`` if this package does not read it.
        is_complete: whether descriptions and sizes of files are right, whatever a verification has found in them.
        fault: one sentence about what is wrong; empty if it is whole.
        bytes: of all of its files.
        saved: when the last of its files was written, in seconds since 1970; None where a store does not say.
        verified: its last verification, if that is recorded and its files are the same.
    """

    name: str
    path: Location
    step: int
    attempt: int
    state: State
    fault: str
    bytes: int
    saved: float | None
    is_complete: bool = False
    verified: Verification | None = None

    @property
    def has_loss(self) -> bool:
        """True if something of it is lost, as far as is known; else it can be loaded, whatever looks odd in it."""
        return not self.is_complete or (self.verified is not None and self.verified.has_loss)

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
    """

    path: Location
    steps: tuple[RunStep, ...]
    pointer: Pointer | None = None

    @cached_property
    def whole(self) -> tuple[RunStep, ...]:
        return tuple(one for one in self.steps if one.state == "whole")

    @property
    def newest_whole(self) -> RunStep | None:
        return self.whole[-1] if self.whole else None


Visit = Callable[[str, OpenCheckpoint], None]
"""Called with the name of a step and its checkpoint, while that is open."""


def _only_look(name: str, opened: OpenCheckpoint) -> None:
    """Do nothing else with a step."""


def run_of(path: Location, visit: Visit = _only_look) -> Run | None:
    """Look at the folder of a run; None if it is a checkpoint itself, or holds none in folders that end with a number.

    Reads the metadata of each checkpoint, and no elements.

    Args:
        visit: called with each checkpoint whose metadata can be read; in a store from several threads.

    Raises:
        SourceError: the folder cannot be read.
    """
    try:
        if not path.is_dir() or _is_checkpoint(path):
            return None
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror or error}") from error
    run = look_at_folder(path, visit)
    return None if all(one.state == "incomplete" for one in run.steps) else run


def _is_checkpoint(path: Location) -> bool:
    """Return True if a folder is one checkpoint rather than the folder of a run.

    Of folders side by side that DCP reads, those of one checkpoint share a number: ``pytorch_model_fsdp_0`` and
    ``optimizer_0``.
    """
    format = shown_by(path)
    if format is not SIBLINGS:
        return format is not None
    stems = defaultdict(set)
    for name in folders_with(path, METADATA_FILE):
        if match := _NUMBERED.fullmatch(name):
            stems[match["step"]].add(match["stem"])
    return any(len(alike) > 1 for alike in stems.values())


def look_at_folder(path: Location, visit: Visit = _only_look) -> Run:
    """Look at a folder that is that of a run, whatever else lies in it; raises as `run_of`."""
    try:
        entries: list[Location] = list(path.iterdir())
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror or error}") from error
    record = read_verifications(path)
    entries.sort(key=lambda entry: entry.name)
    named = [(entry, *found) for entry in entries if (found := step_in_name(entry.name))]

    def look(of: tuple[Location, str, StepName]) -> tuple[str, RunStep] | None:
        entry, stem, name = of
        with suppress(OSError, FileNotFoundError):
            if entry.is_dir() or (entry.name.endswith(".ckpt") and entry.is_file()):
                return stem, look_at_step(entry, name, record.get(entry.name), visit)
        return None

    seen = [one for one in at_each(path, look, named) if one is not None]
    stems = {stem for stem, step in seen if step.state != "incomplete"}
    steps = [step for stem, step in seen if not stems or stem in stems]
    steps.sort(key=lambda one: (one.step, one.attempt, one.name))
    return Run(path, tuple(steps), _pointer(path, {entry.name for entry in entries}, steps))


def step_in_name(name: str) -> tuple[str, StepName] | None:
    """Return the step that a name tells, and what comes before its number."""
    if own := StepName.parsed(name):
        return "step-", own
    again = _ATTEMPT.fullmatch(name)
    if match := _NUMBERED.fullmatch(again["first"] if again else name):
        return match["stem"], StepName(int(match["step"]), int(again["attempt"]) if again else 1)
    return None


def same_step(name: str, other: str) -> bool:
    """Return whether two names of one run tell the same step."""
    steps = step_in_name(name), step_in_name(other)
    return None not in steps and len({(one[0], one[1].step) for one in steps if one}) == 1


def new_attempt(checkpoint: Location) -> str | None:
    """Return a free name by which the same step is found beside a checkpoint; None if its name tells no step.

    Whoever looks for the newest step, as `Series.restore` does, takes the last attempt at it that is whole.
    """
    if step_in_name(checkpoint.name) is None:
        return None
    names = [checkpoint.name]
    with suppress(OSError):
        names += [entry.name for entry in checkpoint.parent.iterdir() if same_step(checkpoint.name, entry.name)]
    attempt = max(step[1].attempt for name in names if (step := step_in_name(name))) + 1
    if own := StepName.parsed(checkpoint.name):
        return str(StepName(own.step, attempt))
    again = _ATTEMPT.fullmatch(checkpoint.name)
    return f"{(again['first'] if again else checkpoint.name).removesuffix('.ckpt')}.{attempt}"


def newer_steps(checkpoint: Location) -> list[RunStep]:
    """Look at the checkpoints beside one that are of later steps of the same run, or later attempts; newest first."""
    own = step_in_name(checkpoint.name)
    newer: list[tuple[StepName, str]] = []
    with suppress(OSError):
        for entry in checkpoint.parent.iterdir() if own else ():
            other = step_in_name(entry.name)
            if own and other and other[0] == own[0] and other[1] > own[1]:
                newer.append((other[1], entry.name))
    return [look_at_step(checkpoint.parent / name, step, None) for step, name in sorted(newer, reverse=True)]


def whole_before(checkpoint: Location, besides: Collection[str] = ()) -> RunStep | None:
    """Return the newest whole checkpoint of the same run, preferably of an earlier step; None if none is beside it.

    Opens no more of the others than it takes to find one.

    Args:
        besides: the names of others that are known to be damaged.
    """
    run = checkpoint.parent
    with suppress(OSError, SourceError):
        if _is_checkpoint(run):
            return None
        record = read_verifications(run)
        found = step_in_name(checkpoint.name)
        names = sorted(
            (found is not None and step > found[1], -step.step, -step.attempt, entry.name, stem, step)
            for entry in run.iterdir()
            if entry.name not in (checkpoint.name, *besides) and (numbered := step_in_name(entry.name))
            for stem, step in [numbered]
        )
        for *_, name, stem, step in names:
            if found is None or stem == found[0]:
                one = look_at_step(run / name, step, record.get(name))
                if one.state == "whole":
                    return one
    return None


def look_at_step(place: Location, name: StepName, last: Verification | None, visit: Visit = _only_look) -> RunStep:
    """Say how whole the checkpoint of a step is: here, and nowhere else, that is decided without reading data.

    Args:
        place: its folder or file in that of the run.
        last: its last verification in the record of the run, which counts if the files are the same.
        visit: as for `run_of`.

    Raises:
        OSError: its files cannot be listed.
    """
    try:
        return _look(place, name, last, visit)
    except FileNotFoundError:  # it is removed while we look
        if place.exists():
            raise
        return RunStep(place.name, place, *name, "incomplete", _GONE, 0, None)


def _look(place: Location, name: StepName, last: Verification | None, visit: Visit) -> RunStep:
    files = look_at_files(place)
    last = last if last and last.files == files.digest else None
    step = RunStep(place.name, place, *name, "damaged", "", files.bytes, files.last_write, verified=last)
    try:
        path = _checkpoint_in(place)
        if path is None:
            why = "it is being removed" if (place / publish.MARK).exists() else _NOT_FINISHED
            return replace(step, state="incomplete", fault=why)
        step = replace(step, path=path)
        with OpenCheckpoint(path) as opened:
            damage = damage_of_files(opened)
            findings = unexplained(damage, findings_by_files(opened))
            fault = sentence_of(damage, findings) if damage or findings else ""
            visit(place.name, opened)
    except DamageError as error:
        return replace(step, fault=str(error))
    except SourceError as error:
        gone = not place.exists()
        return replace(step, state="incomplete" if gone else "unread", fault=_GONE if gone else str(error))
    if fault:
        return replace(step, fault=fault)
    if last and not last.is_whole:
        return replace(step, fault=last.sentence, is_complete=True)
    return replace(step, state="whole", is_complete=True)


_GONE = "it is gone"
_NOT_FINISHED = "nothing in it describes a checkpoint: a save that goes on, or that was stopped"


def _checkpoint_in(place: Location) -> Location | None:
    """Return the checkpoint of a step: its folder, or the only one in it that shows a format (verl's ``actor``).

    Raises:
        SourceError: it cannot be listed, or there are several.
    """
    if place.is_file() or shown_by(place) is not None:
        return place
    inner = [entry for entry in place.iterdir() if entry.is_dir() and shown_by(entry) is not None]
    if len(inner) > 1:
        names = ", ".join(sorted(entry.name for entry in inner))
        raise SourceError(f"{place} holds several checkpoints, {names}: look at each by itself")
    return inner[0] if inner else None


def _pointer(path: Location, names: set[str], steps: list[RunStep]) -> Pointer | None:
    for file in _POINTERS:
        if file in names:
            with suppress(SourceError), open_regular(path / file) as opened:
                text = opened.read(0, min(opened.size, _MOST_OF_POINTER)).decode(errors="replace").strip()
                named = [one.name for one in steps if text in (one.name, str(one.step))]
                return Pointer(file, text, named[-1] if named else None)
    return None
