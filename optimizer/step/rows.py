"""Numbers that an algorithm keeps for the rows or columns of a matrix: they travel to its owner with the update, and
back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..planning.matrices import rows_columns
from ..planning.routes import Key, Route, Strip
from ..planning.schedule import Schedule
from ..planning.units import Slot, Spec
from .resting import Resting


class Rows:
    """All slots of a schedule's parameters but the momentum, on one rank.

    Args:
        specs: of the schedule's parameters.
    """

    def __init__(self, schedule: Schedule, specs: Sequence[Spec], device: torch.device) -> None:
        self._schedule, self._specs, self._device = schedule, specs, device
        self._held = [[unit for unit in stage.held if self._slots(unit)] for stage in schedule.stages]

    def send(self, resting: Resting, stage: int, wire: Tensor) -> None:
        """Write what leaves this rank in a stage."""
        for memory, strip in self._strips(resting, stage, self._schedule.stages[stage].gather.sends):
            strip.on(wire).copy_(strip.of(memory))

    def assemble(self, resting: Resting, stage: int, unit: int, wire: Tensor) -> dict[str, Tensor]:
        """Those of a matrix that this rank owns, ``[m, 1]`` or ``[1, n]`` by slot."""
        return {slot.name: self._assembled(resting, stage, unit, slot, wire) for slot in self._slots(unit)}

    def release(self, resting: Resting, stage: int, unit: int, rows: Mapping[str, Tensor], wire: Tensor) -> None:
        """Write them to the wire, and to where they rest on this rank."""
        scatter = self._schedule.stages[stage].scatter
        for slot in self._slots(unit):
            for strip in scatter.sends.get((unit, slot.name), ()):
                strip.on(wire).copy_(strip.of(rows[slot.name]))
            for source, target in scatter.own.get((unit, slot.name), ()):
                target.of(self._memory(resting, unit, slot)).copy_(source.of(rows[slot.name]))

    def apply(self, resting: Resting, stage: int, wire: Tensor) -> None:
        """Take in what has arrived in a stage."""
        for memory, strip in self._strips(resting, stage, self._schedule.stages[stage].scatter.receives):
            strip.of(memory).copy_(strip.on(wire))

    def _assembled(self, resting: Resting, stage: int, unit: int, slot: Slot, wire: Tensor) -> Tensor:
        gather: Route = self._schedule.stages[stage].gather
        rows, columns = rows_columns(slot.shapes[self._schedule.units[unit].index])
        memory = torch.empty(rows * columns, dtype=slot.there, device=self._device)
        for source, target in gather.own.get((unit, slot.name), ()):
            target.of(memory).copy_(source.of(self._memory(resting, unit, slot)))
        for strip in gather.receives.get((unit, slot.name), ()):
            strip.of(memory).copy_(strip.on(wire))
        return memory.view(rows, columns)

    def _strips(
        self, resting: Resting, stage: int, routed: Mapping[Key, Sequence[Strip]]
    ) -> Iterator[tuple[Tensor, Strip]]:
        """Of all matrices of a stage that this rank holds parts of and that take part: where they rest, and strips."""
        for unit in self._held[stage]:
            if resting.gradients[self._schedule.units[unit].param] is not None:
                for slot in self._slots(unit):
                    for strip in routed.get((unit, slot.name), ()):
                        yield self._memory(resting, unit, slot), strip

    def _slots(self, unit: int) -> Sequence[Slot]:
        return self._specs[self._schedule.units[unit].param].slots[1:]

    def _memory(self, resting: Resting, unit: int, slot: Slot) -> Tensor:
        return resting.slots[self._schedule.units[unit].param][slot.name]
