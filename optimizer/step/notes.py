"""How ranks stop together: notes that travel in front of what a step exchanges anyway, and are compared on arrival.

`Notes` are those of one process group, `StepExchange` is one rank's part in a step of such a group, and
`GroupAgreement` compares in several groups where nothing else is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..ground.cuda_graphs import capturable
from .agreement import AgreedError, Intent
from .exchange import Wire, differ, disagreement
from .rank_sets import crossing, in_order, members, one_of_each

R = TypeVar("R")


class Notes:
    """The notes of a process group: whether they differed, read at once or later.

    On a GPU, reading keeps the host waiting until all work before it is done; so only the first notes of a step are
    read at once there, and the others when the next step begins.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self._unread: list[Tensor] = []

    def settle(self, intent: Intent, differing: Tensor, at_once: bool = False) -> None:
        """Take in whether notes have differed from this rank's.

        Args:
            at_once: wait for the device.

        Raises:
            AgreedError: on every rank, if they have, where that is read.
        """
        if not at_once and capturable(self.device):
            self._unread.append(differing)
        elif differing:
            raise AgreedError(disagreement(intent, self.group))

    def settle_first(self, intent: Intent, differing: Tensor, unfit: Tensor) -> bool:
        """Take in the first notes of a step, at once; returns whether the step is forbidden.

        Raises:
            Exception: as `settle`.
        """
        differ, forbidden = torch.stack([differing, unfit]).tolist()  # one wait for the device
        if differ:
            raise AgreedError(disagreement(intent, self.group))
        return bool(forbidden)

    def compare(self, intent: Intent, at_once: bool = False) -> None:
        """Send notes and settle them.  Collective; the same exceptions."""
        self.settle(intent, differ(intent, self.group, self.device), at_once)

    def read(self) -> None:
        """Read what has not been read.

        Raises:
            AgreedError: some rank failed in the last step.
        """
        unread, self._unread = self._unread, []
        if unread and torch.stack(unread).any():
            raise AgreedError(
                RuntimeError(
                    "another rank failed during the last optimizer step (its own error says why), so that step is "
                    "incomplete: go on from a checkpoint"
                )
            )


class StepExchange:
    """One rank's part in a step: its own work, and the notes that tell the others of it.

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
            raise AgreedError(error)
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
            return self._notes.settle_first(self.intent, wire.differing(), wire.flagged())
        return self.intent.unfit is not None and bool(self.intent.unfit)

    def check(self, wire: Wire) -> None:
        """Compare the notes that have arrived; see `Notes.settle`."""
        if self._notes is not None:
            self._notes.settle(self.intent, wire.differing())

    def end(self) -> None:
        """Raise this rank's error, if it has one: all exchanges are done.

        Raises:
            AgreedError: it.
        """
        if self.intent.error is not None:
            raise AgreedError(self.intent.error)


class GroupAgreement:
    """The notes of several process groups, compared one group after the other: what fails in one is told in the next.

    Args:
        groups: which this rank is a member of; None is left out.
    """

    def __init__(self, groups: Iterable[dist.ProcessGroup | None], device: torch.device) -> None:
        some = {group: None for group in one_of_each(*groups) if group is not None}
        self._notes = [Notes(group, device) for group in sorted(some, key=lambda group: in_order(members(group)))]

    @property
    def widest(self) -> dist.ProcessGroup | None:
        """The last group, whose ranks know what all that are in it have told."""
        return self._notes[-1].group if self._notes else None

    def refuse_crossing(self) -> None:
        """Refuse groups of which none has all ranks.

        Raises:
            ValueError: as `rank_sets.crossing` says.
        """
        if reason := crossing([members(notes.group) for notes in self._notes]):
            raise reason

    def agree(self, intent: Intent, compare: Callable[[Notes, Intent], None]) -> None:
        """Compare what the ranks intend.  Collective.

        Args:
            compare: with one group.

        Raises:
            Exception: on every rank, if any differ or one has failed, where that is read.
        """
        failure: Exception | None = None
        for notes in self._notes:
            try:
                compare(notes, intent)
            except AgreedError as agreed:
                failure = failure or agreed.error
                intent = intent if intent.error is not None else intent.failed(agreed.error, dist.get_rank())
        if failure is not None:
            raise failure

    def read(self) -> None:
        """Read what no group has read yet.

        Raises:
            RuntimeError: some rank failed in the last step.
        """
        try:
            for notes in self._notes:
                notes.read()
        except AgreedError as agreed:
            raise agreed.error from None
