"""Hands an owner what it needs besides the matrix: state that travels there and back, state that stays, the weight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from ...algebra.plan import Copies
from ..ground.tensors import aligned_stack, spacing, stack_boxes, stack_memory
from ..planning.matrices import SHAPES, WEIGHT, Slot, Spec, rows_columns
from ..planning.schedule import Schedule
from .boxes import BoxKind, EqualBoxes, SlotCopies, Tensors, View, blocks, carries
from .elementwise import LocalTensors


@dataclass(frozen=True, slots=True, eq=False)
class StateOfEqual:
    """One slot of equal matrices: together in the memory of an `aligned_stack`, in the order of their units.

    Attributes:
        shape: ``[B, rows, columns]``.
        own: from where it rests on this rank to the memory; and back, if it ``returns``.
        arriving, released: pairs of views of the memory and of the wire, there and back.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, int, int]
    own: Sequence[EqualBoxes]
    arriving: Sequence[tuple[View, View]] = ()
    released: Sequence[tuple[View, View]] = ()
    returns: bool = True


class MatrixState:
    """The tensors of whole matrices besides the update, by slot; the weight is under `WEIGHT`.

    What travels goes with the update.  What stays lies in the owner's local tensor, matrix after matrix.
    """

    def __init__(self, schedule: Schedule, specs: Sequence[Spec], rank: int, device: torch.device) -> None:
        self._units, self._specs, self._device = schedule.units, specs, device
        self._params = np.array([unit.param for unit in schedule.units], np.int64)
        numbers = range(1, max((len(spec.slots) for spec in specs), default=0))
        self._copies = {number: SlotCopies(schedule, number) for number in numbers}
        self._begins: dict[tuple[int, str], int] = {}  # where staying state lies, by unit
        ends: defaultdict[tuple[int, str], int] = defaultdict(int)
        for number, unit in enumerate(schedule.units):
            for slot, shape in specs[unit.param].staying if unit.owner == rank else ():
                rows, columns = SHAPES[shape].of_matrix(*unit.rows_columns)
                self._begins[number, slot] = ends[unit.param, slot]
                ends[unit.param, slot] += rows * columns
        self._blocks: dict[Hashable, list[EqualBoxes]] = {}
        self._equal: dict[tuple[int, ...], list[StateOfEqual]] = {}

    def forget(self) -> None:
        """Forget which copies go together: other parameters have gradients."""
        self._blocks, self._equal = {}, {}

    def send(self, local: LocalTensors, stage: int, wire: Tensor) -> None:
        for number, copies in self._copies.items():
            for block in self._together(local, number, stage, copies.leaving[stage], back=False):
                block.put(wire, stack_boxes(block.boxes(_tensors(local, block.kind.others))))

    def assemble(self, local: LocalTensors, stage: int, units: tuple[int, ...], wire: Tensor) -> dict[str, Tensor]:
        """Return the state of equal matrices that this rank owns, an `aligned_stack` of each slot."""
        if units not in self._equal:
            self._equal[units] = list(chain(self._travelling(local, stage, units), self._staying(local, units)))
        state = {}
        for slot in self._equal[units]:
            state[slot.name] = aligned_stack(slot.shape, slot.dtype, self._device)
            memory = stack_memory(state[slot.name])
            for block in slot.own:
                block.put(memory.view(torch.uint8), stack_boxes(block.boxes(_tensors(local, slot.name))))
            for here, there in slot.arriving:
                here.of(memory).copy_(there.of(wire.view(slot.dtype)))
        return state

    def release(self, local: LocalTensors, units: tuple[int, ...], state: Mapping[str, Tensor], wire: Tensor) -> None:
        """Write the state of equal matrices to the wire, and to where it rests on this rank."""
        for slot in self._equal[units]:
            if not slot.returns:
                continue
            memory = stack_memory(state[slot.name])
            for here, there in slot.released:
                there.of(wire.view(memory.dtype)).copy_(here.of(memory))
            for block in slot.own:
                _put_back(block, _tensors(local, slot.name), memory.view(torch.uint8))

    def apply(self, local: LocalTensors, stage: int, wire: Tensor) -> None:
        for number, copies in self._copies.items():
            for block in self._together(local, number, stage, copies.returning[stage], back=True):
                _put_back(block, _tensors(local, block.kind.others), wire)

    def _together(
        self, local: LocalTensors, number: int, stage: int, copies: Copies, *, back: bool
    ) -> list[EqualBoxes]:
        """Return a stage's copies of a slot, by its number in specs, between the wire and tensors."""
        key = number, stage, back
        if key not in self._blocks:
            active = np.array([gradient is not None for gradient in local.gradients], bool)
            table = replace(copies, source=self._params[copies.source])
            table = table.rows(active[table.source])
            params, at = np.unique(table.source, return_inverse=True)
            kinds: dict[BoxKind, int] = {}
            kind = [kinds.setdefault(self._kind(param, number, back=back), len(kinds)) for param in params.tolist()]
            shape_of = lambda param: _tensors(local, self._slot(param, number).name)[param].shape  # noqa: E731
            self._blocks[key] = list(blocks(table, np.array(kind, np.int64)[at], list(kinds), shape_of))
        return self._blocks[key]

    def _slot(self, param: int, number: int) -> Slot:
        return self._specs[param].slots[number]

    def _kind(self, param: int, number: int, *, back: bool) -> BoxKind:
        slot = self._slot(param, number)
        return BoxKind(slot.back if back else slot.there, others=slot.name)

    def _travelling(self, local: LocalTensors, stage: int, units: Sequence[int]) -> Iterable[StateOfEqual]:
        unit = self._units[units[0]]
        for number, slot in enumerate(self._specs[unit.param].slots):
            if number:
                rows, columns = rows_columns(slot.shapes[unit.index])
                sizes, copies = dict.fromkeys(units, spacing(rows * columns, slot.there)), self._copies[number]
                own = copies.own(stage, sizes, slot.there.itemsize)
                yield StateOfEqual(
                    slot.name,
                    slot.there,
                    (len(units), rows, columns),
                    self._own(local, slot.name, replace(own, source=self._params[own.source]), slot.there),
                    list(carries(copies.arriving(stage, sizes), slot.there.itemsize)),
                    list(carries(copies.released(stage, sizes), slot.back.itemsize)),
                    slot.returns,
                )

    def _staying(self, local: LocalTensors, units: Sequence[int]) -> Iterable[StateOfEqual]:
        unit = self._units[units[0]]
        for name, shape in self._specs[unit.param].staying:
            rows, columns = SHAPES[shape].of_matrix(*unit.rows_columns)
            dtype = local.slots[name][unit.param].dtype
            count = len(units)
            sizes, strides = np.tile((1, rows, columns), (count, 1)), np.tile((rows * columns, columns, 1), (count, 1))
            begins = np.array([self._begins[number, name] for number in units], np.int64)
            places = np.arange(count) * (spacing(rows * columns, dtype) * dtype.itemsize)
            params = self._params[list(units)]
            own = Copies(sizes, params, begins, strides, params, places, strides)
            yield StateOfEqual(name, dtype, (count, rows, columns), self._own(local, name, own, dtype))

    def _own(self, local: LocalTensors, name: str, copies: Copies, dtype: torch.dtype) -> list[EqualBoxes]:
        tensors = _tensors(local, name)
        kind = np.zeros(len(copies), np.int64)
        return list(blocks(copies, kind, [BoxKind(dtype)], lambda param: tensors[param].shape))


def _tensors(local: LocalTensors, slot: Hashable) -> Tensors:
    return local.weights if slot == WEIGHT else local.slots[str(slot)]


def _put_back(block: EqualBoxes, tensors: Tensors, buffer: Tensor) -> None:
    torch._foreach_copy_(block.boxes(tensors), list(block.taken(buffer).unbind()))
