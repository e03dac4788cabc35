"""Hands an owner what it needs besides the matrix: state, which travels there and back, and the weight."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...algebra.plan import Copies
from ..ground.tensors import aligned_stack, spacing, stack_boxes, stack_memory
from ..planning.matrices import WEIGHT, Spec
from ..planning.schedule import Schedule
from .boxes import BoxKind, EqualBoxes, SlotCopies, Tensors, View, equal_boxes, view_pairs
from .elementwise import LocalTensors


@dataclass(frozen=True, slots=True, eq=False)
class StackedSlot:
    """One slot of equal matrices: together in the memory of an `aligned_stack`, in the order of their units.

    Attributes:
        shape: ``[B, rows, columns]``.
        local: from where it rests on this rank to the memory; and back, if it ``returns``.
        receives, sends: pairs of views of the memory and of the wire, there and back.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, int, int]
    local: Sequence[EqualBoxes]
    receives: Sequence[tuple[View, View]]
    sends: Sequence[tuple[View, View]]
    returns: bool


class MatrixState:
    """The tensors that travel with the update of whole matrices, by slot; the weight is under `WEIGHT`."""

    def __init__(self, schedule: Schedule, specs: Sequence[Spec], device: torch.device) -> None:
        self._units, self._specs, self._device = schedule.units, specs, device
        self._params = np.array([unit.param for unit in schedule.units], np.int64)
        # Slot 0 is the update, which a backend of the element-wise parts copies.
        numbers = range(1, max((len(spec.slots) for spec in specs), default=0))
        self._copies = {number: SlotCopies(schedule, number) for number in numbers}
        self._blocks: dict[Hashable, list[EqualBoxes]] = {}
        self._stacked_slots: dict[tuple[int, ...], list[StackedSlot]] = {}

    def forget_blocks(self) -> None:
        """Forget which copies go together: other parameters have gradients."""
        self._blocks, self._stacked_slots = {}, {}

    def send(self, local: LocalTensors, stage: int, wire: Tensor) -> None:
        for number, copies in self._copies.items():
            for block in self._wire_blocks(local, number, stage, copies.update_sends[stage], back=False):
                block.write(
                    wire.view(block.kind.wire_dtype), stack_boxes(block.boxes(_tensors_of_slot(local, block.kind.tag)))
                )

    def assemble(self, local: LocalTensors, stage: int, units: tuple[int, ...], wire: Tensor) -> dict[str, Tensor]:
        """Return the state of equal matrices that this rank owns, an `aligned_stack` of each slot."""
        if units not in self._stacked_slots:
            # The update, slot 0, comes from the element-wise backend.
            numbers = range(1, len(self._specs[self._units[units[0]].param].slots))
            self._stacked_slots[units] = [self._stacked_slot(local, stage, units, number) for number in numbers]
        state = {}
        for slot in self._stacked_slots[units]:
            state[slot.name] = aligned_stack(slot.shape, slot.dtype, self._device)
            memory = stack_memory(state[slot.name])
            # From this rank's tensors, and from the wire.
            for block in slot.local:
                block.write(memory, stack_boxes(block.boxes(_tensors_of_slot(local, slot.name))))
            for memory_view, wire_view in slot.receives:
                memory_view.of(memory).copy_(wire_view.of(wire.view(slot.dtype)))
        return state

    def release(self, local: LocalTensors, units: tuple[int, ...], state: Mapping[str, Tensor], wire: Tensor) -> None:
        """Write the state of equal matrices to the wire, and to where it rests on this rank."""
        for slot in self._stacked_slots[units]:
            if not slot.returns:
                continue
            memory = stack_memory(state[slot.name])
            for memory_view, wire_view in slot.sends:
                wire_view.of(wire.view(memory.dtype)).copy_(memory_view.of(memory))
            for block in slot.local:
                _write_back(block, _tensors_of_slot(local, slot.name), memory)

    def apply(self, local: LocalTensors, stage: int, wire: Tensor) -> None:
        for number, copies in self._copies.items():
            for block in self._wire_blocks(local, number, stage, copies.result_receives[stage], back=True):
                _write_back(block, _tensors_of_slot(local, block.kind.tag), wire.view(block.kind.wire_dtype))

    def _wire_blocks(
        self, local: LocalTensors, number: int, stage: int, copies: Copies, *, back: bool
    ) -> list[EqualBoxes]:
        """Return a stage's copies of a slot, by its number in specs, between the wire and tensors."""
        key = number, stage, back

        def kind_of(unit: int) -> BoxKind:
            slot = self._specs[self._params[unit]].slots[number]
            return BoxKind(slot.returned_dtype if back else slot.sent_dtype, tag=slot.name)

        def shape_of(param: int) -> Sequence[int]:
            return _tensors_of_slot(local, self._specs[param].slots[number].name)[param].shape

        if key not in self._blocks:
            self._blocks[key] = equal_boxes(copies, self._params, local.is_active, kind_of, shape_of)
        return self._blocks[key]

    def _stacked_slot(self, local: LocalTensors, stage: int, units: Sequence[int], number: int) -> StackedSlot:
        """Return the copies of a slot of equal matrices, by its number in specs."""
        unit, copies = self._units[units[0]], self._copies[number]
        slot = self._specs[unit.param].slots[number]
        (rows, columns), kind = slot.sides[unit.index], BoxKind(slot.sent_dtype)
        sizes, tensors = (
            dict.fromkeys(units, spacing(rows * columns, slot.sent_dtype)),
            _tensors_of_slot(local, slot.name),
        )
        return StackedSlot(
            name=slot.name,
            dtype=slot.sent_dtype,
            shape=(len(units), rows, columns),
            local=equal_boxes(
                copies.local(stage, sizes, slot.sent_dtype.itemsize),
                self._params,
                local.is_active,
                lambda unit: kind,
                lambda param: tensors[param].shape,
            ),
            receives=view_pairs(copies.update_receives(stage, sizes), slot.sent_dtype.itemsize),
            sends=view_pairs(copies.result_sends(stage, sizes), slot.returned_dtype.itemsize),
            returns=slot.returns,
        )


def _tensors_of_slot(local: LocalTensors, slot: Hashable) -> Tensors:
    return local.weights if slot == WEIGHT else local.slots[str(slot)]


def _write_back(block: EqualBoxes, tensors: Tensors, memory: Tensor) -> None:
    torch._foreach_copy_(block.boxes(tensors), list(block.read(memory).unbind()))
