"""What a rank has of the matrices of a schedule at one step: local tensors, their strided views, and the state that
travels with the updates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ...box import Index
from ...layouts.tensors import local_of
from ...plan import Copies
from ...vocabulary import MOMENTUM, ParamGroup
from ..ground.foreach import in_portions, rounded_once
from ..planning.matrices import Slot, Spec, rows_columns
from ..planning.schedule import Route, Schedule

State = Mapping[Tensor, Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class View:
    """A strided view of a contiguous memory, in elements."""

    sizes: Index
    strides: Index
    offset: int

    def of(self, memory: Tensor) -> Tensor:
        return memory.as_strided(self.sizes, self.strides, memory.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True, eq=False)
class LocalTensors:
    """Local tensors by the number of their parameter: contiguous, as layouts say.

    Attributes:
        groups: the parameter group of each.
        weights, gradients: no gradient: the parameter takes no part.
        slots: state by name.
        momenta: of the slots.
        copied: of what is not contiguous in its own memory, that and its copy.
    """

    groups: Sequence[ParamGroup]
    weights: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    slots: Sequence[Mapping[str, Tensor]]
    momenta: Sequence[Tensor]
    copied: Sequence[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, params: Sequence[Tensor], groups: Sequence[ParamGroup], state: State) -> LocalTensors:
        """Return the tensors of parameters, with the gradients that they have now."""
        copied: list[tuple[Tensor, Tensor]] = []

        def dense(tensor: Tensor) -> Tensor:
            local = local_of(tensor)
            if local.is_contiguous():
                return local
            copied.append((local, local.contiguous()))
            return copied[-1][1]

        slots = [{name: dense(tensor) for name, tensor in state[param].items()} for param in params]
        return cls(
            groups,
            [dense(param) for param in params],
            [local_of(param.grad).contiguous() if param.grad is not None else None for param in params],
            slots,
            [held[MOMENTUM] for held in slots],
            copied,
        )

    def accumulate(self, lists: Iterable[Sequence[int]]) -> None:
        """Take the gradients of these parameters into their momenta, exponential moving averages.

        Args:
            lists: as `alike` gives them.
        """
        for numbers in lists:
            rate = 1 - self.groups[numbers[0]]["momentum"]
            gradients = [gradient for gradient in map(self.gradients.__getitem__, numbers) if gradient is not None]
            for momenta, taken in in_portions([[self.momenta[number] for number in numbers], gradients]):
                with rounded_once(momenta) as [exact]:
                    given = [gradient.to(exact[0].dtype) for gradient in taken]
                    # torch takes one number for all, or a list of tensors.
                    torch._foreach_lerp_(exact, given, [rate] * len(exact) if isinstance(rate, Tensor) else rate)

    def alike(self, numbers: Iterable[int]) -> list[list[int]]:
        """Return some parameters, if they take part, in lists of one group, dtype and device."""
        lists: defaultdict[Hashable, list[int]] = defaultdict(list)
        for number in numbers:
            if self.gradients[number] is not None:
                momentum = self.momenta[number]
                lists[id(self.groups[number]), momentum.dtype, momentum.device].append(number)
        return list(lists.values())

    def return_to(self) -> None:
        """Copy back what is not contiguous in its own memory."""
        for own, dense in self.copied:
            own.copy_(dense)


class TravellingState:
    """All slots of a schedule's parameters but the momentum, on one rank: numbers that an algorithm keeps for the rows
    or columns of a matrix.  They travel to its owner with the update, and back.

    Args:
        specs: of the schedule's parameters.
    """

    def __init__(self, schedule: Schedule, specs: Sequence[Spec], device: torch.device) -> None:
        self._schedule, self._specs, self._device = schedule, specs, device
        self._listed = cache(self._views)

    def send(self, local: LocalTensors, stage: int, wire: Tensor) -> None:
        """Write what leaves this rank in a stage."""
        for unit, slot, here, there in self._active(local, stage, back=False):
            there.of(wire.view(slot.there)).copy_(here.of(self._memory(local, unit, slot)))

    def assemble(self, local: LocalTensors, stage: int, unit: int, wire: Tensor) -> dict[str, Tensor]:
        """Return the state of a matrix that this rank owns, ``[m, 1]`` or ``[1, n]`` by slot."""
        state = {}
        for number, slot in self._slots(unit):
            rows, columns = rows_columns(slot.shapes[self._schedule.units[unit].index])
            matrix = torch.empty(rows * columns, dtype=slot.there, device=self._device)
            for source, target in self._listed(stage, "own", False).get(number, ()):
                target.of(matrix).copy_(source.of(self._memory(local, unit, slot)))
            for here, there in self._listed(stage, "receives", False).get(number, ()):
                here.of(matrix).copy_(there.of(wire.view(slot.there)))
            state[slot.name] = matrix.view(rows, columns)
        return state

    def release(self, local: LocalTensors, stage: int, unit: int, state: Mapping[str, Tensor], wire: Tensor) -> None:
        """Write the state of a matrix to the wire, and to where it rests on this rank."""
        for number, slot in self._slots(unit):
            for here, there in self._listed(stage, "sends", True).get(number, ()):
                there.of(wire.view(slot.back)).copy_(here.of(state[slot.name]))
            for source, target in self._listed(stage, "own", True).get(number, ()):
                target.of(self._memory(local, unit, slot)).copy_(source.of(state[slot.name]))

    def apply(self, local: LocalTensors, stage: int, wire: Tensor) -> None:
        """Take in what has arrived in a stage."""
        for unit, slot, here, there in self._active(local, stage, back=True):
            here.of(self._memory(local, unit, slot)).copy_(there.of(wire.view(slot.back)))

    def _active(self, local: LocalTensors, stage: int, *, back: bool) -> Iterator[tuple[int, Slot, View, View]]:
        """Yield the views of what this rank holds of others' matrices that take part, and those of the wire."""
        for number, pairs in self._listed(stage, "receives" if back else "sends", back).items():
            slot, unit = divmod(number, len(self._schedule.units))
            param = self._schedule.units[unit].param
            if local.gradients[param] is not None:
                yield from ((unit, self._specs[param].slots[slot], here, there) for here, there in pairs)

    def _slots(self, unit: int) -> Iterator[tuple[int, Slot]]:
        """Yield the slots that travel besides the update, with the numbers that copies give to these tensors."""
        slots = enumerate(self._specs[self._schedule.units[unit].param].slots)
        return ((number * len(self._schedule.units) + unit, slot) for number, slot in slots if number)

    def _memory(self, local: LocalTensors, unit: int, slot: Slot) -> Tensor:
        return local.slots[self._schedule.units[unit].param][slot.name]

    def _views(self, stage: int, way: str, back: bool) -> dict[int, list[tuple[View, View]]]:
        """Return the copies of such tensors in a stage: views here and on the wire, or from and to; by number."""
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
