"""The names of the checkpoints of a run: which step each tells, in whatever way a program writes it."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import NamedTuple

from ..io.location import Location, entries_of

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


def free_name(run: Location, step: int) -> StepName:
    """Return the name of a further attempt at a step of ours in the folder of a run, or of the first one."""
    attempts = [name.attempt for _, name in siblings_of(run / str(StepName(step))) if name.step == step]
    return StepName(step, max(attempts, default=0) + 1)


def new_attempt(checkpoint: Location) -> str | None:
    """Return a free name by which the same step is found beside a checkpoint; None if its name tells no step.

    The last attempt at a step that is whole counts.
    """
    numbered = NumberedName.parsed(checkpoint.name)
    if numbered is None:
        return None
    # Ours have their numbers in one form, those of other programs get a suffix.
    if name := StepName.parsed(checkpoint.name):
        return str(free_name(checkpoint.parent, name.step))
    attempts = [step.attempt for _, step in siblings_of(checkpoint) if step.step == numbered.step.step]
    attempt = max(attempts, default=numbered.step.attempt)
    later = _ATTEMPT.fullmatch(checkpoint.name)
    return f"{(later['first'] if later else checkpoint.name).removesuffix('.ckpt')}.{attempt + 1}"


def siblings_of(checkpoint: Location) -> list[tuple[str, StepName]]:
    """Return the names in the folder of a checkpoint that tell steps of its run, or of any if its own tells none."""
    numbered = NumberedName.parsed(checkpoint.name)
    siblings = []
    with suppress(FileNotFoundError):
        for entry in entries_of(checkpoint.parent):
            sibling = NumberedName.parsed(entry.name)
            if sibling and (numbered is None or sibling.stem == numbered.stem):
                siblings.append((entry.name, sibling.step))
    return siblings
