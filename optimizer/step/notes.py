"""Notes that ranks have received of each other: compared, and read at once or when no rank waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from ..cuda_graphs import capturable
from .agreement import Heard, Intent
from .exchange import differ, disagreement
from .process_groups import in_order, members


class Notes:
    """Those of a process group.  On a GPU, reading them keeps the host waiting until all work before them is done; so
    only the first ones of a step are read at once there, and the others when the next step begins.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self._unread: list[Tensor] = []

    def settle(self, intent: Intent, differing: Tensor, at_once: bool = False) -> None:
        """Take in whether notes have differed from this rank's.

        Args:
            at_once: wait for the device.

        Raises:
            Heard: on every rank, if they have, where that is read.
        """
        if not at_once and capturable(self.device):
            self._unread.append(differing)
        elif differing:
            raise Heard(disagreement(intent, self.group))

    def settle_first(self, intent: Intent, differing: Tensor, unfit: Tensor) -> bool:
        """Take in the first notes of a step, at once; returns whether the step is forbidden.

        Raises:
            Exception: as `settle`.
        """
        differ, forbidden = torch.stack([differing, unfit]).tolist()  # one wait for the device
        if differ:
            raise Heard(disagreement(intent, self.group))
        return bool(forbidden)

    def compare(self, intent: Intent, at_once: bool = False) -> None:
        """Send notes and settle them.  Collective; the same exceptions."""
        self.settle(intent, differ(intent, self.group, self.device), at_once)

    def read(self) -> None:
        """Read what has not been read.

        Raises:
            Heard: some rank failed in the last step.
        """
        unread, self._unread = self._unread, []
        if unread and torch.stack(unread).any():
            raise Heard(
                RuntimeError(
                    "another rank failed during the last optimizer step (its own error says why), so that step is "
                    "incomplete: go on from a checkpoint"
                )
            )


class Accord:
    """The notes of several process groups, compared one group after the other: what fails in one is told in the next.

    Args:
        groups: which this rank is a member of; None is left out.
    """

    def __init__(self, groups: Iterable[dist.ProcessGroup | None], device: torch.device) -> None:
        by_ranks = {members(group): group for group in groups if group is not None}
        self._notes = [Notes(by_ranks[ranks], device) for ranks in sorted(by_ranks, key=in_order)]

    @property
    def widest(self) -> dist.ProcessGroup | None:
        """The last group, whose ranks know what all that are in it have told."""
        return self._notes[-1].group if self._notes else None

    def refuse_crossing(self) -> None:
        """Refuse groups of which none has all ranks: what one of them finds would not reach the others.

        Raises:
            ValueError: the last group does not contain the others.
        """
        for notes in self._notes:
            if not {*members(notes.group)} <= {*members(self.widest)}:
                raise ValueError(
                    f"nonfinite: ranks {members(notes.group)} are not all in {members(self.widest)}, so what one finds "
                    "would not reach the others: give nonfinite=None, and look at the norm of clip_grad_norm_"
                )

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
            except Heard as heard:
                failure = failure or heard.error
                intent = intent if intent.error is not None else intent.failed(heard.error, dist.get_rank())
        if failure is not None:
            raise failure

    def read(self) -> None:
        """As `Notes.read`.

        Raises:
            RuntimeError: some rank failed in the last step.
        """
        try:
            for notes in self._notes:
                notes.read()
        except Heard as heard:
            raise heard.error from None
