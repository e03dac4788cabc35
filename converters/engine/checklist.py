"""The checklist at the end of a report: what became of each thing, and what the user still has to do.

A conversion appends a :class:`Check` for every kind of thing it met, with the values that it found.  Whoever reads the
list needs no other source to set up the run that continues.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class Action(StrEnum):
    """What a `Check` says, in the order in which a checklist has them."""

    CARRIED = "carried"
    """It is in the destination, bit for bit or with the same meaning."""
    RESCALED = "rescaled"
    """It is in the destination with other values, computed from the source's."""
    LEFT = "left"
    """It is in the source only."""
    SET = "set in code"
    """The user must set it where the optimizer of the continued run is made."""


@dataclass(frozen=True, slots=True)
class Check:
    """An entry of a checklist: ``subject`` says what it is about, ``values`` are those found, ``reason`` says why."""

    action: Action
    subject: str
    values: tuple[str, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        found = f": {', '.join(self.values)}" if self.values else ""
        return f"{self.action}: {self.subject}{found}{f' ({self.reason})' if self.reason else ''}"


@dataclass(frozen=True, slots=True)
class Findings:
    """Collects what a translation has to report: sentences, each once, and entries of the checklist."""

    notes: set[str] = field(default_factory=set)
    checks: set[Check] = field(default_factory=set)

    def add(self, note: str) -> None:
        """Add a sentence."""
        self.notes.add(note)

    def check(self, action: Action, subject: str, *values: str, reason: str = "") -> None:
        """Add an entry of the checklist."""
        self.checks.add(Check(action, subject, values, reason))


def sorted_checks(checks: Iterable[Check]) -> tuple[Check, ...]:
    """The entries by action, then by subject."""
    order = list(Action)
    return tuple(sorted(checks, key=lambda check: (order.index(check.action), check.subject, check.values)))
