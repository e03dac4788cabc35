"""A worker as the others see it: by its journal.

One that is gone without a last word is told by the lock on its journal, where both run on one machine; elsewhere by
the journal's stamp, which changes every second as long as the worker lives, because whether a lock is seen from other
machines depends on the file system.  No clocks are compared.
"""

from __future__ import annotations

import json
import threading
import time
from enum import Enum, auto
from typing import Any

from ...store.io.location import Location
from .journal import Done, Header, Step, Sum, this_host
from .log import Look, reader


class Sight(Enum):
    """How a worker looks from here."""

    ABSENT = auto()
    """There is no journal."""
    UNSURE = auto()
    """Nothing speaks for its life yet, nor against it."""
    ALIVE = auto()
    LOST = auto()
    """It gave no sign of life for too long, or its lock is free, and there was no last word."""
    ENDED = auto()


class Peer:
    """A worker as others see it: by its journal, of which each look reads what is new.

    A crash may have spoilt the end of a journal: the first bad line and what follows is void.

    Args:
        patience: seconds without a sign of life after which it counts as lost.

    Attributes:
        header: None while there is no journal, or if that is damaged.
        done: what it has finished, by file.
        steps: what it has said; ``error`` is the family and text of its error, if it ended with one.
    """

    def __init__(self, place: Location, patience: float) -> None:
        self.header: Header | None = None
        self.done: dict[str, Done] = {}
        self.steps: set[Step] = set()
        self.error: tuple[str, str] | None = None
        self._log = reader(place)
        self._patience = patience
        self._spoilt = False
        self._stamp: object = None
        self._since = time.monotonic()
        self._moved = False
        self._looking = threading.Lock()

    def look(self) -> Sight:
        """Read what is new, and judge."""
        with self._looking:
            found = self._log.look()
            if found is None:
                return Sight.ABSENT
            for line in found.lines:
                self._take(line)
            return self._judge(found)

    @property
    def is_silent(self) -> bool:
        """Whether it gave no sign of life for too long."""
        return time.monotonic() - self._since >= self._patience

    @property
    def ended_well(self) -> bool:
        """Whether it has left after its work; of a leader, after it had published."""
        return Step.ENDED in self.steps and self.error is None

    def _judge(self, found: Look) -> Sight:
        if Step.ENDED in self.steps:
            return Sight.ENDED
        if self.header is None:  # not that of a worker: those appear with their first line
            return Sight.LOST
        if self.header.locked and self.header.host == this_host():
            return Sight.LOST if found.free else Sight.ALIVE
        if found.stamp != self._stamp:
            self._moved = self._stamp is not None
            self._stamp, self._since = found.stamp, time.monotonic()
        if self.is_silent:
            return Sight.LOST
        return Sight.ALIVE if self._moved else Sight.UNSURE

    def _take(self, line: bytes) -> None:
        if self._spoilt:
            return
        try:
            self._understand(json.loads(line))
        except (ValueError, KeyError, TypeError):
            self._spoilt = True

    def _understand(self, entry: dict[str, Any]) -> None:
        if self.header is None:
            self.header = Header(**entry)
        elif "file" in entry:
            items = tuple(Sum(*item) for item in entry["items"])
            self.done[str(entry["file"])] = Done(tuple(entry["blobs"]), items)
        else:
            self.steps.add(Step(entry["step"]))
            self.error = tuple(entry["error"]) if entry["error"] else None
