"""The element-wise parts of a step by torch's operators, equal strips together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ..planning.schedule import Schedule
from ..planning.units import Slot, Spec
from ..rounding import exact_dtype
from ..scalar import decay
from .blocks import Carry, EqualBoxes, as_one, blocks_of, carries_of, lent
from .elementwise import Sizes
from .moves import Move, Routed, carried, on_wire, own
from .resting import Resting


class BoxKind(NamedTuple):
    """What boxes of one block have in common: their parameters' group (its identity), dtypes, device and scale."""

    group: int
    momentum: torch.dtype
    weight: torch.dtype
    device: torch.device
    scale: float


Blocks = Sequence[tuple[BoxKind, EqualBoxes]]


class TorchElementwise:
    """The element-wise backend that runs everywhere (`elementwise.Elementwise`).

    Which strips are done together is found once for a set of parameters with gradients.

    Args:
        specs: of the schedule's parameters.
        shapes: of what rests of each on this rank.
    """

    def __init__(
        self, schedule: Schedule, specs: Sequence[Spec], shapes: Sequence[Sequence[int]], device: torch.device
    ) -> None:
        self._schedule, self._specs, self._shapes, self._device = schedule, specs, shapes, device
        self._scales = [specs[unit.param].scale(*unit.rows_columns) for unit in schedule.units]
        self._params = [unit.param for unit in schedule.units]
        self._active: tuple[bool, ...] = ()
        self._blocks: dict[Hashable, Blocks] = {}
        self._alike: list[list[int]] = []
        self._carries: dict[Hashable, list[Carry]] = {}

    def begin(self, resting: Resting) -> None:
        active = tuple(gradient is not None for gradient in resting.gradients)
        if active != self._active:
            self._active, self._blocks, self._carries = active, {}, {}
            self._alike = resting.alike(range(len(self._specs)))

    def send_ahead(self, resting: Resting, stage: int, wire: Tensor) -> None:
        for _, block in self._leaving(resting, stage):
            momenta, gradients = as_one(block.of(resting.momenta)), self._gradients(resting, block)
            exact, rate = exact_dtype(momenta), 1 - resting.groups[block.tensors[0]]["momentum"]
            taken_in = torch.lerp(momenta.to(exact), gradients.to(exact), rate).to(momenta.dtype)
            block.put(wire, self._update(resting, block, taken_in))

    def take_in(self, resting: Resting) -> None:
        resting.accumulate(self._alike)

    def send(self, resting: Resting, stage: int, wire: Tensor) -> None:
        for _, block in self._leaving(resting, stage):
            block.put(wire, self._update(resting, block, as_one(block.of(resting.momenta))))

    def assemble(self, resting: Resting, stage: int, sizes: Sizes, wire: Tensor) -> Tensor:
        gather, first = self._schedule.stages[stage].gather, next(iter(sizes))
        dtype = self._travelling(first).there
        stack = torch.empty(sum(sizes.values()), dtype=dtype, device=self._device)
        mine = partial(own, gather, sizes, self._params, dtype.itemsize, back=False)
        for _, block in self._together(("own", stage, first), resting, mine, back=False):
            block.put(stack.view(torch.uint8), self._update(resting, block, as_one(block.of(resting.momenta))))
        for here, there in self._carried(("arrived", stage, first), sizes, gather.receives, dtype):
            here.of(stack).copy_(there.of(wire.view(dtype)))
        return stack

    def release(self, resting: Resting, stage: int, sizes: Sizes, results: Tensor, wire: Tensor) -> None:
        scatter, first = self._schedule.stages[stage].scatter, next(iter(sizes))
        dtype = self._travelling(first).back
        mine = partial(own, scatter, sizes, self._params, dtype.itemsize, back=True)
        for here, there in self._carried(("back", stage, first), sizes, scatter.sends, dtype):
            there.of(wire.view(dtype)).copy_(here.of(results))
        for kind, block in self._together(("mine", stage, first), resting, mine, back=True):
            self._apply(resting, kind, block, block.taken(results.view(torch.uint8)))

    def apply(self, resting: Resting, stage: int, wire: Tensor) -> None:
        here = self._schedule.stages[stage]
        arrived = partial(on_wire, here.held, self._params, here.scatter.receives)
        for kind, block in self._together(("apply", stage), resting, arrived, back=True):
            self._apply(resting, kind, block, block.taken(wire))

    def _leaving(self, resting: Resting, stage: int) -> Blocks:
        here = self._schedule.stages[stage]
        leaving = partial(on_wire, here.held, self._params, here.gather.sends)
        return self._together(("send", stage), resting, leaving, back=False)

    def _together(
        self, key: Hashable, resting: Resting, moves: Callable[[], Iterable[tuple[int, Move]]], *, back: bool
    ) -> Blocks:
        """Moves of units as blocks, of those parameters that take part."""
        if key not in self._blocks:
            active = [(self._travelling(unit), unit, move) for unit, move in moves() if self._active[move.tensor]]
            self._blocks[key] = blocks_of(
                (
                    (slot.back if back else slot.there, self._kind(resting, move.tensor, unit), move)
                    for slot, unit, move in active
                ),
                self._shapes,
            )
        return self._blocks[key]

    def _kind(self, resting: Resting, param: int, unit: int) -> BoxKind:
        weight = resting.weights[param]
        group = id(resting.groups[param])
        return BoxKind(group, resting.momenta[param].dtype, weight.dtype, weight.device, self._scales[unit])

    def _carried(self, key: Hashable, sizes: Sizes, routed: Routed, dtype: torch.dtype) -> list[Carry]:
        """Between memory in which units lie end to end and the wire."""
        if key not in self._carries:
            self._carries[key] = carries_of(carried(sizes, routed), dtype)
        return self._carries[key]

    def _travelling(self, unit: int) -> Slot:
        """What travels of a unit."""
        return self._specs[self._params[unit]].slots[0]

    def _gradients(self, resting: Resting, block: EqualBoxes) -> Tensor:
        return as_one(block.of(cast("Sequence[Tensor]", resting.gradients)))

    def _update(self, resting: Resting, block: EqualBoxes, momenta: Tensor) -> Tensor:
        """Of the momenta of a block; with Nesterov's look ahead."""
        group = resting.groups[block.tensors[0]]
        if not group["nesterov"]:
            return momenta
        exact = exact_dtype(momenta)
        return torch.lerp(self._gradients(resting, block).to(exact), momenta.to(exact), group["momentum"])

    def _apply(self, resting: Resting, kind: BoxKind, block: EqualBoxes, results: Tensor) -> None:
        """Decay, scale and subtract where a block rests."""
        group = resting.groups[block.tensors[0]]
        rate = float(group["lr"])
        with lent(block.of(resting.weights)) as exact:
            change = results.to(exact.dtype)
            decay([exact], [change], rate * group["weight_decay"], group["cautious"])
            exact.add_(change, alpha=-rate * kind.scale)
