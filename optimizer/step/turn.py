"""One rank's part in a step that it takes together with others: its own work, and the notes that tell of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from .agreement import Heard, Intent
from .exchange import Wire
from .notes import Notes

R = TypeVar("R")


class Turn:
    """A step, as one rank takes part in it.

    Once some of a rank's own work has failed, it does no more of it, but it goes on exchanging, and sends zeros: its
    notes differ from then on, and where they arrive all ranks stop at the same place.

    Args:
        notes: of the ranks that take this step; None: this rank is alone, or a CUDA graph is being captured.
    """

    def __init__(self, intent: Intent, notes: Notes | None) -> None:
        self.intent, self._notes = intent, notes
        self._note = intent.note(notes.device) if notes is not None else None

    @property
    def failed(self) -> bool:
        return self.intent.error is not None

    def attempt(self, work: Callable[[], R]) -> R | None:
        """Do some work, unless some has failed."""
        if self.intent.error is None:
            try:
                return work()
            except Exception as error:
                self.fail(error)
        return None

    def fail(self, error: Exception) -> None:
        """Do no more work; the others learn why."""
        if self._notes is None:
            raise Heard(error)
        self.intent = self.intent.failed(error, dist.get_rank())
        self._note = self.intent.note(self._notes.device)

    def start(self, wire: Wire) -> None:
        """Begin an exchange."""
        if self.failed:
            wire.memory.zero_()
        wire.start(self._note)

    def check_first(self, wire: Wire) -> bool:
        """Compare the first notes of a step (`Notes.settle_first`); returns whether the step is forbidden."""
        if self._notes is not None:
            return self._notes.settle_first(self.intent, wire.differing(), wire.unfit())
        return self.intent.unfit is not None and bool(self.intent.unfit)

    def check(self, wire: Wire) -> None:
        """Compare the notes that have arrived; see `Notes.settle`."""
        if self._notes is not None:
            self._notes.settle(self.intent, wire.differing())

    def end(self) -> None:
        """Raise this rank's error, if it has one: all exchanges are done.

        Raises:
            Heard: it.
        """
        if self.intent.error is not None:
            raise Heard(self.intent.error)
