"""A rank's tensors at one step, and their element-wise parts: momentum, the updates that travel, and their application.

Two backends execute the schedule's tables of copies and give the same bits: `TorchElementwise`, by torch's operators on
equal boxes together, and `kernels` by Triton, in a few launches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor

from ...algebra.layout import TensorLayout
from ...algebra.plan import Copies
from ...layouts.tensors import local_of
from ...names.state_forms import stored_parts, stored_slot
from ...names.vocabulary import MOMENTUM, ParamGroup
from ..ground.codecs import Boxes, Codec, codec_of, cut_state_portions
from ..ground.host_memory import TURNS_AHEAD, SlotKey, StateMemory, Visits
from ..ground.tensors import Tensors, decay, exact_dtype, rounded_once, stack_boxes
from ..planning.matrices import Spec
from ..planning.schedule import Schedule
from .boxes import BoxKind, EqualBoxes, Sizes, SlotCopies, View, blocks, carries
from .rank_sets import State


@dataclass(frozen=True, slots=True, eq=False)
class LocalTensors:
    """Local tensors by the number of their parameter: contiguous, as layouts say.

    Attributes:
        groups: the parameter group of each.
        gradients: None where the parameter takes no part.
        slots: state by name, of the parameters that have it, where it is now.
        momenta: what updates are made of: the first part of what is stored of the momentum, or the gradient of a
            parameter that has none.
        layouts: with fragments on this ``rank``.
        until_computed, until_applied: visits of the state that a stage needs until then, if it rests elsewhere.
        copied: tensors that are not contiguous in their own memory, and their copies.
        kept: tensors of momenta, and copies of what they were before `keep`.
    """

    groups: Sequence[ParamGroup]
    weights: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    slots: Mapping[str, dict[int, Tensor]]
    momenta: list[Tensor]
    copied: Sequence[tuple[Tensor, Tensor]]
    layouts: Sequence[TensorLayout]
    rank: int
    until_computed: Visits
    until_applied: Visits
    kept: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        params: Sequence[Tensor],
        groups: Sequence[ParamGroup],
        state: State,
        specs: Sequence[Spec],
        rank: int,
        stages: Sequence[Sequence[int]],
        memory: StateMemory,
        device: torch.device,
    ) -> LocalTensors:
        """Begin a step on a device, given the parameters of each of its ``stages``, and where their state rests."""
        copied: list[tuple[Tensor, Tensor]] = []

        def dense(tensor: Tensor) -> Tensor:
            local = local_of(tensor)
            if local.is_contiguous():
                return local
            copied.append((local, local.contiguous()))
            return copied[-1][1]

        slots: defaultdict[str, dict[int, Tensor]] = defaultdict(dict)
        for number, param in enumerate(params):
            for name, tensor in state[param].items():
                slots[name][number] = dense(tensor)
        weights = [dense(param) for param in params]
        gradients = [local_of(param.grad).contiguous() if param.grad is not None else None for param in params]
        taken = [weight if given is None else given for weight, given in zip(weights, gradients, strict=True)]
        first: dict[int, Tensor] = {}
        for part in reversed([*stored_parts(slots, MOMENTUM).values()]):
            first |= part
        momenta = [first.get(number, given) for number, given in enumerate(taken)]

        def visits(returning: bool, ahead: int) -> Visits:
            def turn(stage: int) -> dict[SlotKey, Tensor]:
                active = [param for param in stages[stage] if gradients[param] is not None]
                return state_of(active, slots, specs, returning)

            return memory.begin_visits(device, turn, len(stages), ahead)

        computed, applied = (visits(*how) for how in VISITS)
        layouts = [spec.slots[0].layout for spec in specs]
        return cls(groups, weights, gradients, slots, momenta, copied, layouts, rank, computed, applied)

    def here(self, stage: int) -> bool:
        """Let the state of a stage be on the device, until `computed` and `applied`; false if it is always there."""
        come = {**self.until_computed.receive(stage), **self.until_applied.receive(stage)}
        self._place(come)
        return bool(come)

    def computed(self, stage: int) -> None:
        self._place(self.until_computed.release(stage))

    def applied(self, stage: int) -> None:
        self._place(self.until_applied.release(stage))

    def _place(self, tensors: Mapping[SlotKey, Tensor]) -> None:
        for (param, name), tensor in tensors.items():
            self.slots[name][param] = tensor
            if (stored := stored_slot(name)).slot == MOMENTUM and stored.is_shaped:
                self.momenta[param] = tensor

    def keep(self, params: Iterable[int]) -> None:
        """Copy the momenta of some parameters, until `restore`."""
        parts = self._parts
        tensors = (held[param] for param in params for held in parts if param in held)
        self.kept.extend((tensor, tensor.clone()) for tensor in tensors)

    def restore(self) -> None:
        """Let momenta be what they were before `keep`."""
        for tensor, before in self.kept:
            tensor.copy_(before)

    def accumulate(self, lists: Iterable[Sequence[int]]) -> None:
        for numbers in lists:
            group = self.groups[numbers[0]]
            rate = 1 - group["momentum"]
            gradients = [gradient for gradient in map(self.gradients.__getitem__, numbers) if gradient is not None]
            both: list[Tensors] = [[self.momenta[number] for number in numbers], gradients]
            placed = (
                ((layout.shape, layout.fragments_of(self.rank)), [[own for [own] in self.stored([number])[1:]]])
                for number, layout in ((number, self.layouts[number]) for number in numbers)
            )
            for (momenta, taken), codecs in cut_state_portions(both, codec_of(group), [MOMENTUM], placed):
                with rounded_once(momenta, codecs=codecs) as [exact]:
                    given = [gradient.to(exact[0].dtype) for gradient in taken]
                    # torch takes one number for all, or a list of tensors.
                    torch._foreach_lerp_(exact, given, [rate] * len(exact) if isinstance(rate, Tensor) else rate)

    def alike(self, numbers: Iterable[int]) -> list[list[int]]:
        """Return the parameters with momentum that take part, in lists of one group, dtype and device."""
        lists: defaultdict[Hashable, list[int]] = defaultdict(list)
        parts = self._parts
        for number in numbers:
            has_momentum = any(number in tensors for tensors in parts)
            if self.gradients[number] is not None and has_momentum:
                momentum = self.momenta[number]
                lists[id(self.groups[number]), momentum.dtype, momentum.device].append(number)
        return list(lists.values())

    @property
    def _parts(self) -> list[dict[int, Tensor]]:
        return [*stored_parts(self.slots, MOMENTUM).values()]

    def stored(self, params: Sequence[int]) -> list[Tensors]:
        """Return what is stored of the momenta of parameters of one group, by part."""
        others = [tensors for tensors in self._parts if params[0] in tensors][1:]
        return [
            [self.momenta[param] for param in params],
            *([tensors[param] for param in params] for tensors in others),
        ]

    def end(self) -> None:
        """Let all state be where it rests."""
        self.until_computed.finish()
        self.until_applied.finish()
        for own, dense in self.copied:
            own.copy_(dense)


VISITS = ((False, TURNS_AHEAD), (True, TURNS_AHEAD + 1))
"""Whether state returns from the owners, and how many stages ahead of its use it comes: what returns is needed until
it is applied, which is after the next stage is computed."""


def state_of(
    params: Collection[int], slots: Mapping[str, Mapping[int, Tensor]], specs: Sequence[Spec], returning: bool
) -> dict[SlotKey, Tensor]:
    """Return the state of parameters that returns from the owners, or all other."""
    return {
        (param, name): having[param]
        for name, having in slots.items()
        for param in params
        if param in having and returning is any(slot.name == name and slot.returns for slot in specs[param].slots)
    }


class Elementwise(Protocol):
    """A backend for one schedule on one rank.  Wires are bytes, laid out as the schedule's routes say."""

    def begin(self, local: LocalTensors) -> None:
        """Begin a step; momenta are as they were."""
        ...

    def locate(self, local: LocalTensors) -> None:
        """Take momenta from where they are now."""
        ...

    def send_ahead(self, local: LocalTensors, stage: int, wire: Tensor) -> None:
        """Do as `send`, as if momenta had taken the gradients in."""
        ...

    def accumulate_gradients(self, local: LocalTensors, stage: int) -> None:
        """Take the gradients into the momenta that a stage is the first to need, or see to it that `send` and
        `assemble` do."""
        ...

    def send(self, local: LocalTensors, stage: int, wire: Tensor) -> None:
        """Write updates that leave this rank in a stage."""
        ...

    def assemble(self, local: LocalTensors, stage: int, sizes: Sizes, wire: Tensor) -> Tensor:
        """Return the updates of whole matrices, from the wire and from this rank, in a fresh buffer: aligned alike on
        every topology, as the bits of a product may depend on it."""
        ...

    def release(self, local: LocalTensors, stage: int, sizes: Sizes, results: Tensor, wire: Tensor) -> None:
        """Write results to the wire, and apply those that rest on this rank."""
        ...

    def apply(self, local: LocalTensors, stage: int, wire: Tensor) -> None:
        """Apply the results of a stage that have arrived."""
        ...


def beginning(schedule: Schedule, count: int) -> list[list[int]]:
    """Return, by stage, the parameters of which it is the first to need the momentum; those that none needs come with
    the first.
    """
    stages = schedule.params()
    first = {param: stage for stage in reversed(range(len(stages))) for param in stages[stage]}
    lists: list[list[int]] = [[] for _ in stages]
    for param in range(count):
        lists[first.get(param, 0)].append(param)
    return lists


class TorchElementwise:
    """The element-wise backend that runs everywhere.  Blocks are found once for a set of parameters with gradients.

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
        self._active: tuple[bool, ...] = ()
        self._blocks: dict[Hashable, list[EqualBoxes]] = {}
        self._beginning = beginning(schedule, len(specs))
        self._alike: list[list[list[int]]] = [[] for _ in schedule.stages]
        self._carries: dict[Hashable, list[tuple[View, View]]] = {}

    def begin(self, local: LocalTensors) -> None:
        active = tuple(gradient is not None for gradient in local.gradients)
        if active != self._active:
            self._active, self._blocks, self._carries = active, {}, {}
            self._alike = [local.alike(params) for params in self._beginning]

    def locate(self, local: LocalTensors) -> None:
        return None  # every use does so

    def send_ahead(self, local: LocalTensors, stage: int, wire: Tensor) -> None:
        for block in self._leaving(local, stage):
            rate = 1 - local.groups[block.params[0]].get("momentum", 0.0)
            codec, stored, boxes = _stored_boxes(local, block)
            gradients = [cast("Tensor", local.gradients[param]) for param in block.params]
            block.put(wire, self._update(local, block, codec.decode_ahead(stored, boxes, gradients, rate)))

    def accumulate_gradients(self, local: LocalTensors, stage: int) -> None:
        local.accumulate(self._alike[stage])

    def send(self, local: LocalTensors, stage: int, wire: Tensor) -> None:
        for block in self._leaving(local, stage):
            block.put(wire, self._update(local, block, _momenta(local, block)))

    def assemble(self, local: LocalTensors, stage: int, sizes: Sizes, wire: Tensor) -> Tensor:
        first = next(iter(sizes))
        dtype = self._spec(first).slots[0].there
        stack = torch.empty(sum(sizes.values()), dtype=dtype, device=self._device)
        for block in self._together(
            ("own", stage, first), local, lambda: self._copies.own(stage, sizes, dtype.itemsize), back=False
        ):
            block.put(stack.view(torch.uint8), self._update(local, block, _momenta(local, block)))
        arriving = self._carried(("arriving", stage, first), lambda: self._copies.arriving(stage, sizes), dtype)
        for here, there in arriving:
            here.of(stack).copy_(there.of(wire.view(dtype)))
        return stack

    def release(self, local: LocalTensors, stage: int, sizes: Sizes, results: Tensor, wire: Tensor) -> None:
        first = next(iter(sizes))
        dtype = self._spec(first).slots[0].back
        released = self._carried(("released", stage, first), lambda: self._copies.released(stage, sizes), dtype)
        for here, there in released:
            there.of(wire.view(dtype)).copy_(here.of(results))
        for block in self._together(
            ("own back", stage, first), local, lambda: self._copies.own(stage, sizes, dtype.itemsize), back=True
        ):
            self._apply(local, block, block.taken(results.view(torch.uint8)))

    def apply(self, local: LocalTensors, stage: int, wire: Tensor) -> None:
        returning = self._together(("returning", stage), local, lambda: self._copies.returning[stage], back=True)
        for block in returning:
            self._apply(local, block, block.taken(wire))

    def _leaving(self, local: LocalTensors, stage: int) -> Sequence[EqualBoxes]:
        return self._together(("leaving", stage), local, lambda: self._copies.leaving[stage], back=False)

    def _together(
        self, key: Hashable, local: LocalTensors, copies: Callable[[], Copies], *, back: bool
    ) -> Sequence[EqualBoxes]:
        if key not in self._blocks:
            table = copies()
            table = table.rows(np.array(self._active, bool)[self._params[table.source]])
            units, number = np.unique(table.source, return_inverse=True)
            kinds: dict[BoxKind, int] = {}
            kind = [kinds.setdefault(self._kind(local, unit, back=back), len(kinds)) for unit in units.tolist()]
            by_param = replace(table, source=self._params[table.source])
            self._blocks[key] = list(
                blocks(by_param, np.array(kind, np.int64)[number], list(kinds), self._shapes.__getitem__)
            )
        return self._blocks[key]

    def _kind(self, local: LocalTensors, unit: int, *, back: bool) -> BoxKind:
        param, slot = self._units[unit].param, self._spec(unit).slots[0]
        weight = local.weights[param]
        return BoxKind(
            slot.back if back else slot.there,
            self._spec(unit).scale(*self._units[unit].rows_columns),
            (id(local.groups[param]), local.momenta[param].dtype, weight.dtype, weight.device),
        )

    def _carried(self, key: Hashable, copies: Callable[[], Copies], dtype: torch.dtype) -> list[tuple[View, View]]:
        if key not in self._carries:
            self._carries[key] = list(carries(copies(), dtype.itemsize))
        return self._carries[key]

    def _spec(self, unit: int) -> Spec:
        return self._specs[self._units[unit].param]

    def _gradients(self, local: LocalTensors, block: EqualBoxes) -> Tensor:
        return stack_boxes(block.boxes(cast("Sequence[Tensor]", local.gradients)))

    def _update(self, local: LocalTensors, block: EqualBoxes, momenta: Tensor) -> Tensor:
        """Return the updates of a block's momenta, with Nesterov's look ahead."""
        group = local.groups[block.params[0]]
        if not group.get("nesterov"):
            return momenta
        exact = exact_dtype(momenta)
        return torch.lerp(self._gradients(local, block).to(exact), momenta.to(exact), group["momentum"])

    def _apply(self, local: LocalTensors, block: EqualBoxes, results: Tensor) -> None:
        """Decay, scale and subtract where a block rests."""
        group = local.groups[block.params[0]]
        rate = float(group["lr"])
        boxes = block.boxes(local.weights)
        stack = stack_boxes(boxes)
        exact = stack.to(exact_dtype(stack))
        change = results.to(exact.dtype)
        decay([exact], [change], rate * group["weight_decay"], group["cautious"])
        exact.add_(change, alpha=-rate * block.kind.scale)
        if len(boxes) > 1 or exact is not stack:
            torch._foreach_copy_(boxes, exact.unbind())


def _stored_boxes(local: LocalTensors, block: EqualBoxes) -> tuple[Codec, list[Tensors], Boxes]:
    """Return how the momenta of a block are stored: their codec, what is stored of them by part, and their boxes."""
    boxes = block.sizes, block.strides, block.offsets
    return codec_of(local.groups[block.params[0]]), local.stored(block.params), boxes


def _momenta(local: LocalTensors, block: EqualBoxes) -> Tensor:
    """Return the momenta of a block as numbers."""
    codec, stored, boxes = _stored_boxes(local, block)
    return codec.decode(stored, boxes)
