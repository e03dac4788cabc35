"""A rank's tensors at one step, and their element-wise parts: momentum, the updates that travel, and their application.

Two backends execute the schedule's tables of copies and give the same bits: `TorchElementwise`, by torch's operators on
equal boxes together, and `kernels` by Triton, in a few launches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor

from ...algebra.plan import Copies
from ...layouts.tensors import locals_of
from ...names.vocabulary import MOMENTUM, ParamGroup
from ..ground.tensors import cut_portions, decay, exact_dtype, interpolate_, rounded_once, stack_boxes
from ..planning.matrices import Spec
from ..planning.schedule import Schedule
from .boxes import BoxKind, EqualBoxes, Sizes, SlotCopies, View, equal_boxes, view_pairs


@dataclass(frozen=True, slots=True, eq=False)
class LocalTensors:
    """Local tensors at one step, by the number of their parameter: contiguous, as layouts say.

    Attributes:
        groups: the parameter group of each.
        gradients: None where the parameter takes no part.
        gradient_dtypes: None where the parameter takes no part.
        slots: other state by name, for its parameters.
        momenta: what updates are made of: the momentum, or the gradient of a parameter that has none.
        dense_copies: tensors that are not contiguous in their own memory, and their copies.
    """

    groups: Sequence[ParamGroup]
    weights: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    gradient_dtypes: tuple[torch.dtype | None, ...]
    slots: Mapping[str, dict[int, Tensor]]
    momenta: list[Tensor]
    dense_copies: Sequence[tuple[Tensor, Tensor]]

    @classmethod
    def of(
        cls, params: Sequence[Tensor], groups: Sequence[ParamGroup], states: Sequence[Mapping[str, Tensor]]
    ) -> LocalTensors:
        """Return the tensors of a step, given the parameters' groups and states."""
        dense_copies: list[tuple[Tensor, Tensor]] = []

        def dense(tensors: Iterable[Tensor]) -> list[Tensor]:
            locals_here = locals_of(tensors)
            for number, local in enumerate(locals_here):
                if not local.is_contiguous():
                    locals_here[number] = local.contiguous()
                    dense_copies.append((local, locals_here[number]))
            return locals_here

        # Weights and state are changed in place, so copies of them are written back at the end; gradients are not.
        weights, present = dense(params), iter(locals_of([p.grad for p in params if p.grad is not None]))
        gradients = [None if param.grad is None else next(present).contiguous() for param in params]
        # A method without momentum takes the gradient in its place; an absent gradient is never read.
        given = [weight if gradient is None else gradient for weight, gradient in zip(weights, gradients, strict=True)]
        momenta = dense([state.get(MOMENTUM, other) for state, other in zip(states, given, strict=True)])
        slots: defaultdict[str, dict[int, Tensor]] = defaultdict(dict)
        for number, state in enumerate(states):
            for name in state.keys() - {MOMENTUM}:
                [slots[name][number]] = dense([state[name]])
        dtypes = tuple([None if gradient is None else gradient.dtype for gradient in gradients])
        return cls(
            groups, weights, gradients, gradient_dtypes=dtypes, slots=slots, momenta=momenta, dense_copies=dense_copies
        )

    @property
    def is_active(self) -> list[bool]:
        """Whether each takes part."""
        return [dtype is not None for dtype in self.gradient_dtypes]

    def accumulate(self, lists: Iterable[Sequence[int]]) -> None:
        """Average gradients into momenta, of lists of parameters as `equal_momenta` returns them."""
        for numbers in lists:
            rate = 1 - self.groups[numbers[0]]["momentum"]
            momenta = [self.momenta[number] for number in numbers]
            gradients = cast("list[Tensor]", [self.gradients[number] for number in numbers])
            dtype = exact_dtype(momenta[0])
            if momenta[0].dtype == gradients[0].dtype == dtype:
                interpolate_(momenta, gradients, rate)
                continue
            # Copies in float32 are of a portion at a time.
            for portion, added in cut_portions([momenta, gradients]):
                with rounded_once(portion) as [exact]:
                    interpolate_(exact, [tensor.to(dtype) for tensor in added], rate)

    def equal_momenta(self, numbers: Iterable[int]) -> list[list[int]]:
        """Return the parameters with momentum that take part, in lists of one group, device, and dtypes."""
        lists: defaultdict[Hashable, list[int]] = defaultdict(list)
        for number in numbers:
            momentum, gradient = self.momenta[number], self.gradients[number]
            if gradient is not None and momentum is not gradient:
                lists[id(self.groups[number]), momentum.dtype, gradient.dtype, momentum.device].append(number)
        return list(lists.values())

    def end(self) -> None:
        """Write copies of tensors back."""
        for tensor, dense in self.dense_copies:
            tensor.copy_(dense)


class Elementwise(Protocol):
    """A backend for one schedule on one rank.  Wires are bytes, laid out as the schedule's routes say."""

    def begin(self, local: LocalTensors) -> None:
        """Begin a step; momenta are as they were."""

    def send(self, local: LocalTensors, stage: int, wire: Tensor) -> None:
        """Average gradients into the momenta that a stage is the first to need, and write updates that leave this rank
        in it.
        """

    def assemble(self, local: LocalTensors, stage: int, sizes: Sizes, wire: Tensor) -> Tensor:
        """Return the updates of whole matrices, from the wire and from this rank, in a fresh buffer: aligned alike on
        every topology, as the bits of a product may depend on it."""

    def release(self, local: LocalTensors, stage: int, sizes: Sizes, results: Tensor, wire: Tensor) -> None:
        """Write results to the wire, and apply those that rest on this rank."""

    def apply(self, local: LocalTensors, stage: int, wire: Tensor) -> None:
        """Apply the results of a stage that have arrived."""


def params_by_first_stage(schedule: Schedule, count: int) -> list[list[int]]:
    """Return, by stage, the parameters whose momentum it is the first to need; those that none needs come with
    the first.
    """
    of_unit, first = np.array([unit.param for unit in schedule.units], np.int64), np.zeros(count, np.int64)
    for number, stage in reversed(list(enumerate(schedule.stages))):
        tensors = stage.gather.sends.source, stage.gather.local.source, stage.scatter.receives.target, stage.owned
        units = np.concatenate(tensors).astype(np.int64) % max(1, len(of_unit))
        first[of_unit[units]] = number
    return [np.flatnonzero(first == number).tolist() for number in range(len(schedule.stages))]


@dataclass(frozen=True, slots=True)
class StackCopies:
    """Copies to a memory in which a batch's units lie end to end, from this rank's tensors and the wire, and back."""

    numel: int
    sent_dtype: torch.dtype
    local: list[EqualBoxes]
    local_back: list[EqualBoxes]
    receives: list[tuple[View, View]]
    sends: list[tuple[View, View]]


class TorchElementwise:
    """The element-wise backend that runs everywhere.  Blocks are sorted out once for a set of gradients.

    Args:
        specs: of the schedule's parameters.
        shapes: of their local tensors on this rank.
    """

    def __init__(
        self, schedule: Schedule, specs: Sequence[Spec], shapes: Sequence[Sequence[int]], device: torch.device
    ) -> None:
        self._copies, self._specs, self._shapes, self._device = SlotCopies(schedule), specs, shapes, device
        self._units = schedule.units
        self._params = np.array([unit.param for unit in schedule.units], np.int64)
        self._params_of_stages = params_by_first_stage(schedule, len(specs))
        self._gradient_dtypes: tuple[torch.dtype | None, ...] | None = None
        self._equal_momenta: list[list[list[int]]] = []
        self._update_blocks: list[list[EqualBoxes]] = []
        self._result_blocks: list[list[EqualBoxes]] = []
        self._stacks: dict[tuple[int, int], StackCopies] = {}

    def begin(self, local: LocalTensors) -> None:
        if local.gradient_dtypes != self._gradient_dtypes:
            self._gradient_dtypes = local.gradient_dtypes
            self._equal_momenta = [local.equal_momenta(params) for params in self._params_of_stages]
            self._update_blocks = [self._plan_blocks(local, table, back=False) for table in self._copies.update_sends]
            self._result_blocks = [self._plan_blocks(local, table, back=True) for table in self._copies.result_receives]
            self._stacks = {}

    def send(self, local: LocalTensors, stage: int, wire: Tensor) -> None:
        local.accumulate(self._equal_momenta[stage])
        for block in self._update_blocks[stage]:
            block.write(wire.view(block.kind.wire_dtype), self._updates(local, block))

    def assemble(self, local: LocalTensors, stage: int, sizes: Sizes, wire: Tensor) -> Tensor:
        key = stage, next(iter(sizes))
        copies = self._stacks.get(key)
        if copies is None:
            slot = self._spec(next(iter(sizes))).slots[0]
            sent_size, returned_size = slot.sent_dtype.itemsize, slot.returned_dtype.itemsize
            copies = self._stacks[key] = StackCopies(
                numel=sum(sizes.values()),
                sent_dtype=slot.sent_dtype,
                local=self._plan_blocks(local, self._copies.local(stage, sizes, sent_size), back=False),
                local_back=self._plan_blocks(local, self._copies.local(stage, sizes, returned_size), back=True),
                receives=view_pairs(self._copies.update_receives(stage, sizes), sent_size),
                sends=view_pairs(self._copies.result_sends(stage, sizes), returned_size),
            )
        stack = torch.empty(copies.numel, dtype=copies.sent_dtype, device=self._device)
        # Parts that rest on this rank do not travel; all others have arrived on the wire.
        for block in copies.local:
            block.write(stack, self._updates(local, block))
        for stack_view, wire_view in copies.receives:
            stack_view.of(stack).copy_(wire_view.of(wire.view(stack.dtype)))
        return stack

    def release(self, local: LocalTensors, stage: int, sizes: Sizes, results: Tensor, wire: Tensor) -> None:
        copies = self._stacks[stage, next(iter(sizes))]
        for stack_view, wire_view in copies.sends:
            wire_view.of(wire.view(results.dtype)).copy_(stack_view.of(results))
        for block in copies.local_back:
            self._apply(local, block, results)

    def apply(self, local: LocalTensors, stage: int, wire: Tensor) -> None:
        for block in self._result_blocks[stage]:
            self._apply(local, block, wire.view(block.kind.wire_dtype))

    def _plan_blocks(self, local: LocalTensors, copies: Copies, *, back: bool) -> list[EqualBoxes]:
        kind_of = lambda unit: self._kind(local, unit, back=back)  # noqa: E731
        return equal_boxes(copies, self._params, local.is_active, kind_of, self._shapes.__getitem__)

    def _kind(self, local: LocalTensors, unit: int, *, back: bool) -> BoxKind:
        """Return the kind of a unit's boxes: those of one kind have one rate, and are computed in one dtype."""
        param, slot, weight = self._units[unit].param, self._spec(unit).slots[0], local.weights[self._units[unit].param]
        return BoxKind(
            slot.returned_dtype if back else slot.sent_dtype,
            self._spec(unit).scale(*self._units[unit].rows_columns),
            (id(local.groups[param]), local.momenta[param].dtype, weight.dtype, weight.device),
        )

    def _spec(self, unit: int) -> Spec:
        return self._specs[self._units[unit].param]

    def _updates(self, local: LocalTensors, block: EqualBoxes) -> Tensor:
        """Return the updates of a block's momenta, with Nesterov's look ahead."""
        group, momenta = local.groups[block.params[0]], stack_boxes(block.boxes(local.momenta))
        if not group.get("nesterov"):
            return momenta
        exact, gradients = exact_dtype(momenta), stack_boxes(block.boxes(cast("Sequence[Tensor]", local.gradients)))
        return torch.lerp(gradients.to(exact), momenta.to(exact), group["momentum"])

    def _apply(self, local: LocalTensors, block: EqualBoxes, memory: Tensor) -> None:
        """Decay weights, and subtract the scaled results, where a block rests."""
        group = local.groups[block.params[0]]
        rate = float(group["lr"])
        # Computed in float32 at least, and rounded once.
        boxes = block.boxes(local.weights)
        stack = stack_boxes(boxes)
        exact = stack if stack.dtype.itemsize >= 4 else stack.float()
        change = block.read(memory)
        decay([exact], [change], group)
        exact.add_(change, alpha=-rate * block.kind.scale)
        # A box that was neither stacked nor cast has been changed in place.
        if len(boxes) > 1 or exact is not stack:
            torch._foreach_copy_(boxes, exact.unbind())
