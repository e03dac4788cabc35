"""A step of the matrices of one schedule: momentum, exchange, orthogonalise, exchange back, apply.

Stages overlap: while the matrices of one are orthogonalised, the next one's updates are on their way to their owners
and the previous one's results on their way back.  So at most two stages are in memory at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...vocabulary import ParamGroup
from ..ground.cuda_graphs import capturable, capturing, refuse_absent, refuse_host
from ..methods.matrix import MATRICES
from ..planning.matrices import Spec
from ..planning.schedule import Schedule
from .agreement import AGREE_ON_STEP, PLAN_FACT, Facts, Intent
from .batches import Batch, in_batches
from .elementwise import Elementwise
from .exchange import Link, Wire
from .local_tensors import LocalTensors, State, TravellingState
from .notes import Notes, StepExchange
from .rank_sets import RankSet

Thing = TypeVar("Thing")


@dataclass(frozen=True, slots=True, eq=False)
class Connection:
    """What connects the ranks of a schedule.

    Attributes:
        group: of all of them; None for this process alone.
        links: there and back, of each stage.
    """

    group: dist.ProcessGroup | None
    links: Sequence[tuple[Link, Link]]


UNDER_WAY = 2
"""Stages whose updates are under way when the first notes are read."""


@dataclass(frozen=True, slots=True, eq=False)
class PendingStep:
    """A step of which the first notes have arrived, and no update has been applied.

    Attributes:
        coming: updates on their way to their owners, stage by stage; those of the first have arrived.
        forbidden: by some rank.
    """

    turn: StepExchange
    local: LocalTensors
    coming: Iterator[Wire]
    forbidden: bool

    def leave(self) -> None:
        """Do nothing more of it, but wait for what is under way."""
        for wire in islice(self.coming, 1, UNDER_WAY):
            wire.arrive()


class Step:
    """What one set of ranks does at every step.

    Args:
        schedule: for the matrices of ``params``, described by ``specs``.
        rank: this one.
        elementwise: the backend for the element-wise parts.
        device: where ranks exchange.
        guarded: whether the step may be forbidden: then momenta change only after the first notes have arrived.
    """

    def __init__(
        self,
        schedule: Schedule,
        params: Sequence[Tensor],
        specs: Sequence[Spec],
        rank: int,
        elementwise: Elementwise,
        connection: Connection,
        device: torch.device,
        *,
        guarded: bool = False,
    ) -> None:
        self.schedule = schedule
        self._params, self._specs, self._rank, self._device = tuple(params), tuple(specs), rank, device
        self._elementwise, self._state = elementwise, TravellingState(schedule, specs, device)
        self._connection, self._guarded = connection, guarded
        self._notes = Notes(connection.group, device) if connection.group is not None else None
        self._batches: tuple[tuple[bool, ...], list[list[Batch]]] = (), []
        self._begun = 0

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Of all its ranks; None for this process alone."""
        return self._connection.group

    def begin(
        self,
        held: RankSet,
        groups: Sequence[ParamGroup],
        state: State,
        failure: Exception | None,
        unfit: Tensor | None,
        constants: Facts = MappingProxyType({}),
    ) -> PendingStep:
        """Begin to update those parameters that have a gradient, up to where the first notes have arrived.  Collective.

        Args:
            held: all parameters of these ranks, matrices or not.
            groups: all of the optimizer.
            state: by parameter and slot.
            failure: what keeps this rank from it; the others learn of it.
            unfit: whether something on this rank forbids the step to all of them.  None: nothing can, and momenta take
                gradients in at once.
            constants: what else must be the same on all ranks.

        Raises:
            AgreedError: on all ranks, if they differ in what they are about to do, or one of them fails.
        """
        if self._notes is not None:
            self._notes.read()
        intent = Intent.of(AGREE_ON_STEP, {})
        if not held.alone:
            constants = {**constants, "the number of steps by this plan": str(self._begun)}
            intent = held.step_intent(groups, constants)
        self._begun += 1
        intent = replace(intent, unfit=unfit)
        if failure is not None:
            intent = intent.failed(failure, self._rank)
        with torch.autocast(self._device.type, enabled=False):  # it would round what is meant to be exact
            return self._first([groups[member.group] for member in held.matrices], state, intent)

    def finish(self, pending: PendingStep, state: State, failure: Exception | None = None) -> None:
        """The rest of a step.  Collective.

        Args:
            failure: what keeps this rank from it.

        Raises:
            AgreedError: on all ranks, if one of them fails.
        """
        if failure is not None:
            pending.turn.fail(failure)
        with torch.autocast(self._device.type, enabled=False):
            self._rest(pending)

    def retire(self, failure: Exception | None) -> None:
        """Take part in this plan for the last time: the first exchange of a step, with notes only.  Collective.

        Raises:
            AgreedError: on all ranks, if not all of them plan anew, or one of them fails.
        """
        if self._notes is None or capturing():
            return
        self._notes.read()
        intent = Intent.of(
            AGREE_ON_STEP, {PLAN_FACT: "made anew, as options or groups have changed or a state was loaded"}
        )
        turn = StepExchange(intent if failure is None else intent.failed(failure, self._rank), self._notes)
        first, *others = [self._gather(turn, None, stage) for stage in range(min(2, len(self.schedule.stages)))]
        first.arrive()
        turn.check_first(first)
        for wire in others:
            wire.arrive()

    def _first(self, groups: Sequence[ParamGroup], state: State, intent: Intent) -> PendingStep:
        if captured := capturing():
            refuse_absent([tuple(param.shape) for param in self._params], [p.grad is not None for p in self._params])
            if not capturable(self._device):
                refuse_host("muon", self._device)
        # A graph is captured on all ranks or on none, and nothing can be read meanwhile.
        turn = StepExchange(intent, None if captured else self._notes)
        local = turn.attempt(lambda: self._begin(groups, state))
        wires = _one_ahead(self._gather(turn, local, stage) for stage in range(len(self.schedule.stages)))
        first = next(wires)
        first.arrive()
        forbidden = turn.check_first(first)
        assert local is not None, "all ranks stop at the first check if one has failed"
        return PendingStep(turn, local, _after([first], wires), forbidden)

    def _rest(self, pending: PendingStep) -> None:
        turn, local = pending.turn, pending.local
        if self._guarded:
            turn.attempt(lambda: self._elementwise.take_in(local))
        if not self.schedule.units:
            return turn.end()
        returning: Wire | None = None
        stages = range(len(self.schedule.stages))
        for stage, coming in enumerate(pending.coming):
            if stage:
                coming.arrive()
                turn.check(coming)
            back = Wire(self.schedule.stages[stage].scatter, self._connection.links[stage][1], self._device)
            self._orthogonalize(turn, local, stage, coming, back)
            del coming
            turn.start(back)
            if returning:
                self._apply(turn, local, stage - 1, returning)
            returning = back
        if returning:
            self._apply(turn, local, stages[-1], returning)
            turn.attempt(local.return_to)
        turn.end()

    def _begin(self, groups: Sequence[ParamGroup], state: State) -> LocalTensors:
        local = LocalTensors.of(self._params, groups, state)
        active = tuple(gradient is not None for gradient in local.gradients)
        if self._batches[0] != active:
            self._batches = active, self._batched(active, groups)
        self._elementwise.begin(local)
        if not self._guarded:
            self._elementwise.take_in(local)
        return local

    def _batched(self, active: Sequence[bool], groups: Sequence[ParamGroup]) -> list[list[Batch]]:
        """Of each stage, what this rank orthogonalises."""
        units = self.schedule.units
        return [
            in_batches(units, (n for n in stage.owned if active[units[n].param]), groups.__getitem__)
            for stage in self.schedule.stages
        ]

    def _gather(self, turn: StepExchange, local: LocalTensors | None, stage: int) -> Wire:
        """Send what rests here to the owners of a stage's matrices."""
        wire = Wire(self.schedule.stages[stage].gather, self._connection.links[stage][0], self._device)
        if local is not None:
            ahead = self._guarded and stage < UNDER_WAY
            send = self._elementwise.send_ahead if ahead else self._elementwise.send
            turn.attempt(partial(send, local, stage, wire.memory))
            turn.attempt(partial(self._state.send, local, stage, wire.memory))
        turn.start(wire)
        return wire

    def _orthogonalize(self, turn: StepExchange, local: LocalTensors, stage: int, coming: Wire, back: Wire) -> None:
        """Do this rank's matrices of a stage, and write the results, to be sent back."""
        for batch in self._batches[1][stage]:
            turn.attempt(partial(self._finish, batch, local, stage, coming.memory, back.memory))

    def _finish(self, batch: Batch, local: LocalTensors, stage: int, arrived: Tensor, back: Tensor) -> None:
        """Orthogonalise a batch, and do with each matrix what its algorithm does besides."""
        method = MATRICES[batch.algorithm]
        results = batch.orthogonalized(self._elementwise.assemble(local, stage, batch.sizes, arrived))
        if method.slots:
            for unit, result in zip(batch.numbers, batch.places.of_memory(results), strict=True):
                rows = self._state.assemble(local, stage, unit, arrived)
                result.copy_(method.finish(result, rows, local.groups[self.schedule.units[unit].param]))
                self._state.release(local, stage, unit, rows, back)
        self._elementwise.release(local, stage, batch.sizes, results, back)

    def _apply(self, turn: StepExchange, local: LocalTensors, stage: int, returning: Wire) -> None:
        """Apply what other owners have sent."""
        returning.arrive()
        turn.check(returning)
        turn.attempt(partial(self._elementwise.apply, local, stage, returning.memory))
        turn.attempt(partial(self._state.apply, local, stage, returning.memory))


def _one_ahead(things: Iterable[Thing]) -> Iterator[Thing]:
    """Yield each exchange after starting the next."""
    rest = iter(things)
    current = next(rest, None)
    while current is not None:
        following = next(rest, None)
        yield current
        current = following


def _after(firsts: list[Thing], rest: Iterator[Thing]) -> Iterator[Thing]:
    """Chain a list and an iterator, releasing the list's items."""
    while firsts:
        yield firsts.pop(0)
    yield from rest
