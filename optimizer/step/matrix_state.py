"""Hands an owner what it needs besides the matrix: state that travels there and back, state that stays, the weight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from ...plan import Copies
from ..planning.matrices import SHAPES, WEIGHT, Slot, Spec, rows_columns
from ..planning.schedule import Route, Schedule
from .elementwise import LocalTensors, View


class MatrixState:
    """The tensors of whole matrices besides the update, by slot; the weight is under `WEIGHT`.

    What travels goes with the update.  What stays lies in the owner's local tensor, matrix after matrix.
    """

    def __init__(self, schedule: Schedule, specs: Sequence[Spec], rank: int, device: torch.device) -> None:
        self._schedule, self._specs, self._device = schedule, specs, device
        self._listed = cache(self._views)
        self._staying: defaultdict[int, dict[str, View]] = defaultdict(dict)
        ends: defaultdict[tuple[int, str], int] = defaultdict(int)
        for number, unit in enumerate(schedule.units):
            for slot, shape in specs[unit.param].staying if unit.owner == rank else ():
                rows, columns = SHAPES[shape].of_matrix(*unit.rows_columns)
                self._staying[number][slot] = View((rows, columns), (columns, 1), ends[unit.param, slot])
                ends[unit.param, slot] += rows * columns

    def send(self, local: LocalTensors, stage: int, wire: Tensor) -> None:
        for unit, slot, here, there in self._active(local, stage, back=False):
            there.of(wire.view(slot.there)).copy_(here.of(self._memory(local, unit, slot)))

    def assemble(self, local: LocalTensors, stage: int, unit: int, wire: Tensor) -> dict[str, Tensor]:
        """Return the state of a matrix that this rank owns, each slot in two dims, in fresh memory: aligned alike on
        every topology.
        """
        state = {}
        for number, slot in self._slots(unit):
            rows, columns = rows_columns(slot.shapes[self._schedule.units[unit].index])
            matrix = torch.empty(rows * columns, dtype=slot.there, device=self._device)
            for source, target in self._listed(stage, "own", False).get(number, ()):
                target.of(matrix).copy_(source.of(self._memory(local, unit, slot)))
            for here, there in self._listed(stage, "receives", False).get(number, ()):
                here.of(matrix).copy_(there.of(wire.view(slot.there)))
            state[slot.name] = matrix.view(rows, columns)
        held = local.slots[self._schedule.units[unit].param]
        return state | {name: place.of(held[name]).clone() for name, place in self._staying.get(unit, {}).items()}

    def release(self, local: LocalTensors, stage: int, unit: int, state: Mapping[str, Tensor], wire: Tensor) -> None:
        """Write the state of a matrix to the wire, and to where it rests on this rank."""
        for number, slot in self._slots(unit):
            for here, there in self._listed(stage, "sends", True).get(number, ()):
                there.of(wire.view(slot.back)).copy_(here.of(state[slot.name]))
            for source, target in self._listed(stage, "own", True).get(number, ()) if slot.returns else ():
                target.of(self._memory(local, unit, slot)).copy_(source.of(state[slot.name]))
        held = local.slots[self._schedule.units[unit].param]
        for name, place in self._staying.get(unit, {}).items():
            place.of(held[name]).copy_(state[name])

    def apply(self, local: LocalTensors, stage: int, wire: Tensor) -> None:
        for unit, slot, here, there in self._active(local, stage, back=True):
            here.of(self._memory(local, unit, slot)).copy_(there.of(wire.view(slot.back)))

    def _active(self, local: LocalTensors, stage: int, *, back: bool) -> Iterator[tuple[int, Slot, View, View]]:
        for number, pairs in self._listed(stage, "receives" if back else "sends", back).items():
            slot, unit = divmod(number, len(self._schedule.units))
            param = self._schedule.units[unit].param
            if local.gradients[param] is not None:
                yield from ((unit, self._specs[param].slots[slot], here, there) for here, there in pairs)

    def _slots(self, unit: int) -> Iterator[tuple[int, Slot]]:
        """Yield the slots besides the update, with the numbers that copies give to these tensors."""
        slots = enumerate(self._specs[self._schedule.units[unit].param].slots)
        return ((number * len(self._schedule.units) + unit, slot) for number, slot in slots if number)

    def _memory(self, local: LocalTensors, unit: int, slot: Slot) -> Tensor:
        param = self._schedule.units[unit].param
        return local.weights[param] if slot.name == WEIGHT else local.slots[param][slot.name]

    def _views(self, stage: int, way: str, back: bool) -> dict[int, list[tuple[View, View]]]:
        """Return a stage's copies of such tensors, by number: views here and on the wire, or from and to."""
        route: Route = getattr(self._schedule.stages[stage], "scatter" if back else "gather")
        copies: Copies = getattr(route, way)
        copies = copies.turned() if way == "receives" else copies
        units = len(self._schedule.units)
        copies = copies.rows(copies.source >= units)
        views: defaultdict[int, list[tuple[View, View]]] = defaultdict(list)
        sizes, number, *here, _, begin, along = (column.tolist() for column in copies.columns)
        for shape, tensor, near, strides, far, far_strides in zip(sizes, number, *here, begin, along, strict=True):
            slot = self._specs[self._schedule.units[tensor % units].param].slots[tensor // units]
            item = 1 if way == "own" else (slot.back if back else slot.there).itemsize
            views[tensor].append((View(shape, strides, near), View(shape, far_strides, far // item)))
        return dict(views)
