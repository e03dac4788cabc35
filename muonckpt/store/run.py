"""The folder of a run: its checkpoints by step, of whatever program, and which are whole by names and sizes of files.

Nothing but the files says what there is, so anyone may look at any time, also while the run goes on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ..errors import SourceError
from .damage import damage_of_files
from .formats.registry import SIBLINGS, shown_by
from .io.location import Location, Remote, at_each
from .open_checkpoint import OpenCheckpoint

State = Literal["whole", "damaged", "incomplete"]

_NUMBER = re.compile(r"(?:.*[^0-9])?([0-9]{1,18})(?:\.([0-9]{1,4}))?")
"""Names of folders that end with the number of a step, and perhaps that of an attempt at it."""


@dataclass(frozen=True, slots=True)
class RunStep:
    """A checkpoint in the folder of a run.

    Attributes:
        step: the number in its name.
        attempt: which attempt at this step it is, from 1.
        state: ``"whole"`` as far as names and sizes of files tell, ``"damaged"``, or ``"incomplete"`` if nothing in it
            describes a checkpoint.
        fault: one sentence about what is wrong; empty if it is whole.
        bytes: of all of its files.
        saved: when the last of its files was written, in seconds since 1970; None where a store does not say.
    """

    path: Location
    step: int
    attempt: int
    state: State
    fault: str
    bytes: int
    saved: float | None

    @property
    def name(self) -> str:
        return self.path.name


@dataclass(frozen=True)
class Run:
    """The checkpoints in a folder, sorted by step."""

    path: Location
    steps: tuple[RunStep, ...]

    @cached_property
    def newest_whole(self) -> RunStep | None:
        return next((one for one in reversed(self.steps) if one.state == "whole"), None)

    def before(self, path: Location) -> RunStep | None:
        """Return the newest whole checkpoint besides this one, preferably of an earlier step."""
        (own,) = [one.step for one in self.steps if one.name == path.name] or [None]
        others = [one for one in self.steps if one.state == "whole" and one.name != path.name]
        earlier = [one for one in others if own is None or one.step <= own]
        return (earlier or others or [None])[-1]


def run_of(path: Location) -> Run | None:
    """Look at the folder of a run; None if it is a checkpoint itself, or holds none in folders that end with a number.

    Reads the metadata of each checkpoint, and no elements.

    Raises:
        SourceError: the folder cannot be read.
    """
    try:
        if not path.is_dir():
            return None
        if (format := shown_by(path)) is not None and format is not SIBLINGS:
            return None
        entries = sorted(path.iterdir(), key=lambda entry: entry.name)
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror or error}") from error
    numbers = {entry: match for entry in entries if (match := _NUMBER.fullmatch(entry.name))}
    places = [entry for entry in numbers if entry.is_dir()]
    steps = [_step(place, int(numbers[place][1]), int(numbers[place][2] or 1)) for place in places]
    if all(one.state == "incomplete" for one in steps):
        return None
    return Run(path, tuple(sorted(steps, key=lambda one: (one.step, one.attempt))))


def run_around(checkpoint: Location) -> Run | None:
    """Look at the run that a checkpoint is of; None if it lies alone, or its folder cannot be read."""
    try:
        return run_of(checkpoint.parent)
    except SourceError:
        return None


def _step(place: Location, step: int, attempt: int) -> RunStep:
    bytes, saved = _written(place)
    if shown_by(place) is None:
        return RunStep(place, step, attempt, "incomplete", "nothing in it describes a checkpoint", bytes, saved)
    try:
        with OpenCheckpoint(place) as opened:
            damage = damage_of_files(opened)
            faults = [*map(str, opened.faults)] + [f"{place} has lost its manifest"] * opened.lacks_manifest
    except SourceError as error:
        return RunStep(place, step, attempt, "damaged", str(error), bytes, saved)
    if damage:
        return RunStep(place, step, attempt, "damaged", damage.sentence(), bytes, saved)
    return RunStep(place, step, attempt, "damaged" if faults else "whole", "; ".join(faults), bytes, saved)


def _written(place: Location) -> tuple[int, float | None]:
    """Return the bytes of all files below a folder, and when the last was written."""
    sizes, times = [0], []
    for size, time in at_each(place, _stat, list(_files(place))):
        sizes.append(size)
        if time is not None:
            times.append(time)
    return sum(sizes), max(times, default=None)


def _files(place: Location) -> Iterator[Location]:
    if isinstance(place, Remote):
        yield from place.below()
    else:
        yield from (file for file in place.rglob("*") if file.is_file())


def _stat(file: Location) -> tuple[int, float | None]:
    if isinstance(file, Remote):
        return file.fs.info(file.path).get("size") or 0, None
    found = file.stat()
    return found.st_size, found.st_mtime
