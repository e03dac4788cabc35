"""The steps of all sets of ranks that this rank is in: planned, connected, and taken in one order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from ...vocabulary import ParamGroup
from ..ground.cuda_graphs import capturing
from ..planning.schedule import Ranks
from .agreement import AgreedError, Facts
from .local_tensors import State
from .planner import Planner
from .rank_sets import RankSet, crossing, rank_sets
from .step import PendingStep, Step


class Steps:
    """One `Step` for each `RankSet` of an optimizer.

    Attributes:
        planned: by ranks; made by the first step, and anew after `plan_anew`.
    """

    def __init__(self) -> None:
        self.planned: dict[Ranks, Step] = {}
        self._outdated: dict[Ranks, Step] = {}
        self._sets: list[RankSet] | None = None

    def plan_anew(self) -> None:
        """The next step makes new plans, once ranks have seen that all of them do."""
        self._outdated |= self.planned
        self.planned, self._sets = {}, None

    @property
    def widest(self) -> dist.ProcessGroup | None:
        """Of the ranks that decide together whether a step is taken."""
        held = [held for held in self._sets or () if held.members and held.ranks in self.planned]
        return self.planned[held[-1].ranks].group if held else None

    def take(
        self,
        groups: Sequence[ParamGroup],
        state: State,
        planner: Planner,
        doubt: Callable[[RankSet], None],
        failure: Exception | None,
        unfit: Tensor | None,
        constants: Callable[[Ranks], Facts],
    ) -> bool:
        """Update all matrices that have a gradient, or none if some rank forbids it.  Collective.

        A set of ranks comes before those that contain it.  If the step may be forbidden, the first notes of all sets
        are read before anything is changed, and all that a rank shares parameters with are in its last set: the ranks
        of that set decide alike.

        Args:
            groups, state: of the optimizer.
            planner: for sets of ranks that have no plan.
            doubt: looks at a set before it is planned.
            failure: what keeps this rank from its part; the others learn of it.
            unfit: whether something on this rank forbids the step.  None: nothing can.
            constants: what else must be the same on all ranks of a set.

        Returns:
            Whether the step is taken.

        Raises:
            Exception: on all ranks, if one of them fails; at once, without the other sets, if it is not `AgreedError`.
        """
        if self._sets is None:
            self._sets = rank_sets(groups, planner.replicas, state)
        if unfit is not None:
            failure = failure or crossing([held.ranks for held in self._sets if held.members and not held.alone])
        begun: list[tuple[Step, PendingStep]] = []

        def plan(held: RankSet) -> None:
            if held.ranks not in self.planned:
                if held.ranks in self._outdated:
                    self._outdated[held.ranks].retire(failure)
                doubt(held)
                self.planned[held.ranks] = planner.plan(held, groups, state, failure)
                self._outdated.pop(held.ranks, None)

        def begin(held: RankSet) -> None:
            if held.members and held.ranks in self.planned:
                step = self.planned[held.ranks]
                started = step.begin(held, groups, state, failure, unfit, constants(held.ranks))
                if unfit is None:
                    step.finish(started, state)
                else:
                    begun.append((step, started))

        missing = {held.ranks for held in self._sets} - self.planned.keys()
        # All plans before the first exchange: then all connections are made.
        for work in (plan, begin) if missing else (begin,):
            for held in self._sets:
                if held.alone and (failure or not held.matrices):
                    continue
                try:
                    work(held)
                except AgreedError as agreed:
                    if capturing():
                        raise agreed.error from None
                    failure = failure or agreed.error
        forbidden = unfit is not None and (begun[-1][1].forbidden if begun else bool(unfit))
        if failure is None and not forbidden:
            failure = _finish(begun, state)
        else:
            for _, started in begun:
                started.leave()
        if failure is not None:
            raise failure
        return not forbidden


def _finish(begun: Sequence[tuple[Step, PendingStep]], state: State) -> Exception | None:
    """Finish steps, one set of ranks after the other: what fails in one is told in the next."""
    failure: Exception | None = None
    for step, started in begun:
        try:
            step.finish(started, state, failure)
        except AgreedError as agreed:
            failure = failure or agreed.error
    return failure
