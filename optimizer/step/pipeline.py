"""A step of the matrices of one schedule: momentum, exchange, orthogonalise, exchange back, apply.

Waves overlap: while the matrices of one are orthogonalised, the next one's updates are on their way to their owners
and the previous one's results on their way back.  So at most two waves are in memory at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..cuda_graphs import capturable, capturing, refuse_absent, refuse_host
from ..newton_schulz.forms import has_kernels, missing_triton
from ..planning.schedule import Ranks, Schedule
from ..planning.units import Spec
from .agreement import PLAN_FACT, STEP, Intent, step_intent
from .batches import Group
from .exchange import Link, SharedSum, Wire
from .notes import Notes
from .rank_set import RankSet
from .round import NoSweep, Round, Scale, Sweep
from .turn import Turn


class Pipeline:
    """A schedule with its tensors, and what connects its ranks.

    Args:
        schedule: for the matrices of ``params``, described by ``specs``.
        rank: this one.
        sweep: of the schedule on this rank.
        scale: the learning-rate factor of an ``m x n`` matrix of a group.
        group: of the schedule's ranks; None for this process alone.
        links: there and back, of each wave.
        sharing: a process group for each set of ranks that shares a matrix with this one.
    """

    def __init__(
        self,
        schedule: Schedule,
        params: Sequence[Tensor],
        specs: Sequence[Spec],
        rank: int,
        sweep: Sweep,
        scale: Scale,
        group: dist.ProcessGroup | None,
        links: Sequence[tuple[Link, Link]],
        sharing: Mapping[Ranks, dist.ProcessGroup | None],
        device: torch.device,
    ) -> None:
        self.schedule, self.params, self.specs = schedule, tuple(params), tuple(specs)
        self.rank, self.sweep, self.scale, self.device = rank, sweep, scale, device
        self.links, self.sharing = links, sharing
        self._notes = Notes(group, device) if group is not None else None

    def step(
        self,
        held: RankSet,
        groups: Sequence[Group],
        state: Mapping[Tensor, Mapping[str, Tensor]],
        failure: Exception | None,
    ) -> None:
        """One update of those parameters that have a gradient.

        Args:
            held: all parameters of these ranks, matrices or not.
            groups: all of the optimizer.
            state: by parameter and slot.
            failure: what keeps this rank from it; the others learn of it.

        Raises:
            Exception: on all ranks, if they differ in what they are about to do, or one of them fails.
        """
        if self._notes is not None:
            self._notes.read()
        intent = Intent.of(STEP, {})
        if not held.alone:
            active = [member.param.grad is not None for member in held.members]
            intent = step_intent(lambda: held.labels, active, held.groups(groups), self.device)
        if failure is not None:
            intent = intent.failed(failure, self.rank)
        with torch.autocast(self.device.type, enabled=False):  # it would round what is meant to be exact
            self._step([groups[member.group] for member in held.matrices], state, intent)

    def retire(self, failure: Exception | None) -> None:
        """The last part of this rank in a plan: the first exchange of a step, with notes only.  Collective.

        Raises:
            Exception: on all ranks, if not all of them plan anew, or one of them fails.
        """
        if self._notes is None or capturing():
            return
        self._notes.read()
        intent = Intent.of(STEP, {PLAN_FACT: "made anew, as options or groups have changed or a state was loaded"})
        turn = Turn(intent if failure is None else intent.failed(failure, self.rank), self._notes)
        wires = [self._gather(turn, None, number) for number in range(min(2, len(self.links)))]
        wires[0].arrive()
        turn.check(wires[0], at_once=True)
        for wire in wires[1:]:
            wire.arrive()

    def _step(self, groups: Sequence[Group], state: Mapping[Tensor, Mapping[str, Tensor]], intent: Intent) -> None:
        active = [param.grad is not None for param in self.params]
        captured = capturing()
        if captured:
            refuse_absent([tuple(param.shape) for param in self.params], active)
            if not capturable(self.device):
                refuse_host("muon", self.device)
        # A graph is captured on all ranks or on none, and nothing can be read meanwhile.
        turn = Turn(intent, None if captured else self._notes)
        round_ = turn.attempt(lambda: Round(self, groups, state, active))
        returning: Wire | None = None
        for number, coming in enumerate(_one_ahead(self._gather(turn, round_, n) for n in range(len(self.links)))):
            coming.arrive()
            turn.check(coming, at_once=number == 0)
            assert round_ is not None, "all ranks stop at the first check if one has failed"
            if not self.schedule.units:
                return
            back = Wire(self.schedule.waves[number].scatter, self.links[number][1], self.device)
            self._orthogonalize(turn, round_, number, coming, back)
            del coming
            turn.start(back)
            if returning:
                self._apply(turn, round_, number - 1, returning)
            returning = back
        if returning and round_:
            self._apply(turn, round_, len(self.links) - 1, returning)
            turn.attempt(round_.finish)
        turn.end()

    def _gather(self, turn: Turn, round_: Round | None, number: int) -> Wire:
        wire = Wire(self.schedule.waves[number].gather, self.links[number][0], self.device)
        if round_ is not None:
            turn.attempt(partial(round_.fill, number, wire))
        turn.start(wire)
        return wire

    def _orthogonalize(self, turn: Turn, round_: Round, number: int, coming: Wire, back: Wire) -> None:
        turn.attempt(lambda: round_.orthogonalize(number, coming, back))
        for unit in round_.in_blocks(number):
            total = SharedSum(self.sharing[self.schedule.units[unit].owners], round_.sums(unit), self.device)
            turn.attempt(partial(round_.orthogonalize_blocks, unit, total, number, coming, back))
            if turn.failed:
                total.give_up()

    def _apply(self, turn: Turn, round_: Round, number: int, returning: Wire) -> None:
        returning.arrive()
        turn.check(returning)
        turn.attempt(lambda: round_.apply(number, returning))


def shared(schedule: Schedule) -> list[Ranks]:
    """Sets of ranks that share matrices with this one, in the order in which all of them first do."""
    return list(
        dict.fromkeys(unit.owners for unit in map(schedule.units.__getitem__, schedule.owned) if unit.blocks > 1)
    )


def sweep(schedule: Schedule, specs: Sequence[Spec], weights: Sequence[Tensor]) -> Sweep:
    """Kernels for the element-wise parts on NVIDIA GPUs, and nothing elsewhere: there operators are as good.

    Warns:
        RuntimeWarning: there is a GPU, and no Triton: operators do the work, in many more launches.
    """
    if not weights or not has_kernels(weights[0].device, torch.bfloat16):
        return NoSweep()
    try:
        from .fused import Fused, suits
    except ModuleNotFoundError as error:
        missing_triton(error, "the element-wise parts of a step run on torch's operators, strip by strip")
        return NoSweep()
    if not suits(weights):
        return NoSweep()
    return Fused(schedule, specs, [weight.numel() for weight in weights], weights[0].device)


def _one_ahead(things: Iterable[Wire]) -> Iterator[Wire]:
    """Each of ``things``, when the one after it has been made."""
    rest = iter(things)
    current = next(rest, None)
    while current is not None:
        following = next(rest, None)
        yield current
        current = following
