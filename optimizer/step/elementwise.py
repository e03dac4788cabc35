"""A rank's tensors at one step, and their element-wise parts: momentum, the updates that travel, and their application.

Two backends execute the schedule's tables of copies and give the same bits: `TorchElementwise`, by torch's operators on
equal boxes together, and `kernels` by Triton, in a few launches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from ...box import Index
from ...layout import TensorLayout
from ...layouts.tensors import local_of
from ...overlap import IntArray, expanded
from ...plan import Copies, dense_strides
from ...vocabulary import MOMENTUM, ParamGroup
from ..ground.rounding import noise_of, portions
from ..ground.tensors import Tensors, decay, exact_dtype, rounded_once
from ..planning.matrices import Spec
from ..planning.schedule import Schedule
from .rank_sets import State

LARGEST_BLOCK = 1 << 16
"""Elements of the largest block of several boxes: 256 KiB in float32, of which there are a few at a time."""

Sizes = Mapping[int, int]
"""Elements of matrices that lie end to end in one memory, by number."""


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
        gradients: None where the parameter takes no part.
        slots: state by name.
        momenta: what updates are made of: the momentum in these slots, or the gradient of a parameter that has none.
        layouts: with fragments on this ``rank``.
        copied: tensors that are not contiguous in their own memory, and their copies.
    """

    groups: Sequence[ParamGroup]
    weights: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    slots: Sequence[Mapping[str, Tensor]]
    momenta: Sequence[Tensor]
    copied: Sequence[tuple[Tensor, Tensor]]
    layouts: Sequence[TensorLayout]
    rank: int

    @classmethod
    def of(
        cls,
        params: Sequence[Tensor],
        groups: Sequence[ParamGroup],
        state: State,
        layouts: Sequence[TensorLayout],
        rank: int,
    ) -> LocalTensors:
        copied: list[tuple[Tensor, Tensor]] = []

        def dense(tensor: Tensor) -> Tensor:
            local = local_of(tensor)
            if local.is_contiguous():
                return local
            copied.append((local, local.contiguous()))
            return copied[-1][1]

        slots = [{name: dense(tensor) for name, tensor in state[param].items()} for param in params]
        weights = [dense(param) for param in params]
        gradients = [local_of(param.grad).contiguous() if param.grad is not None else None for param in params]
        taken = [weight if given is None else given for weight, given in zip(weights, gradients, strict=True)]
        momenta = [held.get(MOMENTUM, given) for held, given in zip(slots, taken, strict=True)]
        return cls(groups, weights, gradients, slots, momenta, copied, layouts, rank)

    def accumulate(self, lists: Iterable[Sequence[int]]) -> None:
        for numbers in lists:
            group = self.groups[numbers[0]]
            rate = 1 - group["momentum"]
            gradients = [gradient for gradient in map(self.gradients.__getitem__, numbers) if gradient is not None]
            both: list[Tensors] = [[self.momenta[number] for number in numbers], gradients]
            placed = ((self.layouts[number].shape, self.layouts[number].fragments_of(self.rank)) for number in numbers)
            for (momenta, taken), by in portions(both, noise_of(group), [MOMENTUM], placed):
                with rounded_once(momenta, by=by) as [exact]:
                    given = [gradient.to(exact[0].dtype) for gradient in taken]
                    # torch takes one number for all, or a list of tensors.
                    torch._foreach_lerp_(exact, given, [rate] * len(exact) if isinstance(rate, Tensor) else rate)

    def alike(self, numbers: Iterable[int]) -> list[list[int]]:
        """Return the parameters with momentum that take part, in lists of one group, dtype and device."""
        lists: defaultdict[Hashable, list[int]] = defaultdict(list)
        for number in numbers:
            if self.gradients[number] is not None and MOMENTUM in self.slots[number]:
                momentum = self.momenta[number]
                lists[id(self.groups[number]), momentum.dtype, momentum.device].append(number)
        return list(lists.values())

    def write_back(self) -> None:
        for own, dense in self.copied:
            own.copy_(dense)


class Elementwise(Protocol):
    """A backend for one schedule on one rank.  Wires are bytes, laid out as the schedule's routes say."""

    def begin(self, local: LocalTensors) -> None:
        """Begin a step; momenta are as they were."""
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


class UpdateCopies:
    """A schedule's copies of updates, as backends execute them: from units, in a rank's tensors or end to end in a
    memory, to buffers with offsets in bytes; copies back are turned.

    Attributes:
        leaving: from tensors to the wire, by stage.
        returning: from the wire to tensors, turned.
    """

    def __init__(self, schedule: Schedule) -> None:
        def updates(copies: Copies) -> Copies:
            chosen = copies.source < len(schedule.units)
            return copies if chosen.all() else copies.rows(chosen)

        self._units = len(schedule.units)
        self.leaving = [updates(stage.gather.sends) for stage in schedule.stages]
        self.returning = [updates(stage.scatter.receives.turned()) for stage in schedule.stages]
        self._arriving = [updates(stage.gather.receives.turned()) for stage in schedule.stages]
        self._own = [updates(stage.gather.own) for stage in schedule.stages]
        self._released = [updates(stage.scatter.sends) for stage in schedule.stages]

    def own(self, stage: int, sizes: Sizes, itemsize: int) -> Copies:
        """Return the copies from tensors to a memory in which units lie end to end."""
        copies, begin = _of_units(self._own[stage], sizes)
        return replace(copies, target_offset=(copies.target_offset + begin) * itemsize)

    def arriving(self, stage: int, sizes: Sizes) -> Copies:
        """Return the copies from the wire to a memory in which units lie end to end, turned."""
        return _from_memory(self._arriving[stage], sizes)

    def released(self, stage: int, sizes: Sizes) -> Copies:
        """Return the copies of results from a memory in which units lie end to end to the wire."""
        return _from_memory(self._released[stage], sizes)

    def sent(self) -> IntArray:
        """Return how many elements of each unit's update this rank sends to owners, or has for itself."""
        sent = np.zeros(self._units, np.int64)
        for copies in (*self.leaving, *self._own):
            np.add.at(sent, copies.source, copies.numel)
        return sent


def _of_units(copies: Copies, sizes: Sizes) -> tuple[Copies, IntArray]:
    """Return the rows of units that lie end to end, and the element at which each row's unit begins."""
    units = np.array(list(sizes), np.int64)
    first = np.searchsorted(copies.source, units)
    unit, rows = expanded(first, np.searchsorted(copies.source, units, side="right") - first)
    return copies.rows(rows), np.cumsum([0, *sizes.values()])[unit]


def _from_memory(copies: Copies, sizes: Sizes) -> Copies:
    copies, begin = _of_units(copies, sizes)
    return replace(copies, source_offset=copies.source_offset + begin)


class BoxKind(NamedTuple):
    """The common properties of a block's boxes; ``group`` is the identity of their parameters' group."""

    group: int
    momentum: torch.dtype
    weight: torch.dtype
    wire: torch.dtype
    device: torch.device
    scale: float


@dataclass(frozen=True, slots=True)
class EqualBoxes:
    """Equal boxes of parameters: stacked as ``[count, *sizes]``, computed, and written back, so that a thousand take as
    few operators as one.

    Attributes:
        params: the number of each box's parameter.
        offsets: where the boxes begin in local tensors; none: each is all of its tensor.
        sizes, strides: of each box there.
        far: views of a buffer of ``kind.wire`` elements, ``[count, *sizes]`` together.
    """

    kind: BoxKind
    params: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: Index
    strides: Index
    far: tuple[View, ...]

    def boxes(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if not self.offsets:
            return [tensors[param] for param in self.params]
        return [
            tensors[param].as_strided(self.sizes, self.strides, tensors[param].storage_offset() + offset)
            for param, offset in zip(self.params, self.offsets, strict=True)
        ]

    def put(self, buffer: Tensor, boxes: Tensor) -> None:
        """Write ``[count, *sizes]`` to a buffer of bytes."""
        memory, first = buffer.view(self.kind.wire), 0
        for view in self.far:
            count = view.sizes[0]
            view.of(memory).copy_(boxes if count == len(boxes) else boxes[first : first + count])
            first += count

    def taken(self, buffer: Tensor) -> Tensor:
        views = [view.of(buffer.view(self.kind.wire)) for view in self.far]
        return views[0] if len(views) == 1 else torch.cat(views)


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
        self._copies, self._specs, self._shapes, self._device = UpdateCopies(schedule), specs, shapes, device
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

    def send_ahead(self, local: LocalTensors, stage: int, wire: Tensor) -> None:
        for block in self._leaving(local, stage):
            momenta, gradients = _as_one(block.boxes(local.momenta)), self._gradients(local, block)
            exact, rate = exact_dtype(momenta), 1 - local.groups[block.params[0]].get("momentum", 0.0)
            taken_in = torch.lerp(momenta.to(exact), gradients.to(exact), rate).to(momenta.dtype)
            block.put(wire, self._update(local, block, taken_in))

    def accumulate_gradients(self, local: LocalTensors, stage: int) -> None:
        local.accumulate(self._alike[stage])

    def send(self, local: LocalTensors, stage: int, wire: Tensor) -> None:
        for block in self._leaving(local, stage):
            block.put(wire, self._update(local, block, _as_one(block.boxes(local.momenta))))

    def assemble(self, local: LocalTensors, stage: int, sizes: Sizes, wire: Tensor) -> Tensor:
        first = next(iter(sizes))
        dtype = self._spec(first).slots[0].there
        stack = torch.empty(sum(sizes.values()), dtype=dtype, device=self._device)
        for block in self._together(
            ("own", stage, first), local, lambda: self._copies.own(stage, sizes, dtype.itemsize), back=False
        ):
            block.put(stack.view(torch.uint8), self._update(local, block, _as_one(block.boxes(local.momenta))))
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
            self._blocks[key] = list(_blocks(by_param, np.array(kind, np.int64)[number], list(kinds), self._shapes))
        return self._blocks[key]

    def _kind(self, local: LocalTensors, unit: int, *, back: bool) -> BoxKind:
        param, slot = self._units[unit].param, self._spec(unit).slots[0]
        weight = local.weights[param]
        return BoxKind(
            id(local.groups[param]),
            local.momenta[param].dtype,
            weight.dtype,
            slot.back if back else slot.there,
            weight.device,
            self._spec(unit).scale(*self._units[unit].rows_columns),
        )

    def _carried(self, key: Hashable, copies: Callable[[], Copies], dtype: torch.dtype) -> list[tuple[View, View]]:
        if key not in self._carries:
            self._carries[key] = list(_carries(copies(), dtype.itemsize))
        return self._carries[key]

    def _spec(self, unit: int) -> Spec:
        return self._specs[self._units[unit].param]

    def _gradients(self, local: LocalTensors, block: EqualBoxes) -> Tensor:
        return _as_one(block.boxes(cast("Sequence[Tensor]", local.gradients)))

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
        stack = _as_one(boxes)
        exact = stack.to(exact_dtype(stack))
        change = results.to(exact.dtype)
        decay([exact], [change], rate * group["weight_decay"], group["cautious"])
        exact.add_(change, alpha=-rate * block.kind.scale)
        if len(boxes) > 1 or exact is not stack:
            torch._foreach_copy_(boxes, exact.unbind())


def _blocks(
    copies: Copies, kind: IntArray, kinds: Sequence[BoxKind], shapes: Sequence[Sequence[int]]
) -> Iterator[EqualBoxes]:
    """Yield copies, whose sources are parameters, as blocks of equal boxes of one kind, of up to `LARGEST_BLOCK`
    elements, or of one box.

    Args:
        kind: of each row.
        shapes: of the parameters' local tensors.
    """
    if not len(copies):
        return
    width, dense = copies.sizes.shape[1], dense_strides(copies.sizes)
    filled_up = np.array([((1,) * (width - len(shape)) + tuple(shape))[-width:] for shape in shapes], np.int64)
    same = (filled_up[copies.source] == copies.sizes) & ((copies.source_strides == dense) | (copies.sizes == 1))
    whole = same.all(axis=1) & (copies.source_offset == 0)
    ndim = np.array([len(shape) for shape in shapes], np.int64)[copies.source]
    kinds_of_rows = np.column_stack((kind, np.where(whole, ndim, width), whole))
    for rows in _equal(
        np.column_stack((kinds_of_rows, copies.sizes, copies.source_strides, copies.target_strides)), copies
    ):
        kind_number, dims, all_of_it = kinds_of_rows[rows[0]].tolist()
        sizes, strides, far_strides = (
            tuple(column[rows[0], width - dims :].tolist())
            for column in (copies.sizes, copies.source_strides, copies.target_strides)
        )
        wire = kinds[kind_number].wire.itemsize
        count = max(1, LARGEST_BLOCK // max(1, int(copies.numel[rows[0]])))
        for first in range(0, len(rows), count):
            cut = rows[first : first + count]
            begin = copies.target_offset[cut] // wire
            far = (
                View((stop - start, *sizes), (apart, *far_strides), int(begin[start]))
                for start, stop, (apart,) in _evenly(begin[:, None])
            )
            offsets = () if all_of_it else tuple(copies.source_offset[cut].tolist())
            yield EqualBoxes(
                kinds[kind_number], tuple(copies.source[cut].tolist()), offsets, sizes, strides, tuple(far)
            )


def _carries(copies: Copies, itemsize: int) -> Iterator[tuple[View, View]]:
    """Yield copies between one memory and a buffer of bytes, of elements of one size, as pairs of views."""
    for rows in _equal(np.column_stack((copies.sizes, copies.source_strides, copies.target_strides)), copies):
        sizes, near, far = (
            tuple(column[rows[0]].tolist()) for column in (copies.sizes, copies.source_strides, copies.target_strides)
        )
        begin = np.column_stack((copies.source_offset[rows], copies.target_offset[rows] // itemsize))
        for start, stop, apart in _evenly(begin):
            here, there = (
                View((stop - start, *sizes), (step, *strides), offset)
                for step, strides, offset in zip(apart, (near, far), begin[start].tolist(), strict=True)
            )
            yield here, there


def _equal(keys: IntArray, copies: Copies) -> Iterator[IntArray]:
    if not len(keys):
        return
    order = np.lexsort((copies.target_offset, *keys.T[::-1]))
    ordered = keys[order]
    cuts = np.flatnonzero((ordered[1:] != ordered[:-1]).any(axis=1)) + 1
    yield from np.split(order, cuts)


def _evenly(places: IntArray) -> Iterator[tuple[int, int, list[int]]]:
    """Yield runs of places ``[n, k]``, equally far apart and none before the last: first, end, how far."""
    apart = np.diff(places, axis=0)
    changes = [*(np.flatnonzero((apart[1:] != apart[:-1]).any(axis=1)) + 2).tolist(), len(places)]
    start = 0
    while start < len(places):
        forward = start + 1 < len(places) and apart[start].min() >= 0
        stop = changes[bisect_right(changes, start + 1)] if forward else start + 1
        yield start, stop, apart[start].tolist() if forward else [0] * places.shape[1]
        start = stop


def _as_one(boxes: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(boxes)) if len(boxes) > 1 else boxes[0].unsqueeze(0)
