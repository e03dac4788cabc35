"""What the element-wise parts of a step do, and the backend that does it by torch's operators, equal boxes together.

Gradients are taken into momenta; updates go from where they rest to their owners, on a wire or within this rank, and
lie end to end there; results go back along the same copies, and are applied where the parameters rest.  Backends give
the same bits: `TorchElementwise` here, and `kernels` by Triton, in a few launches.  Both execute the schedule's tables
of copies, cut up in their own ways.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from ...box import Index
from ...overlap import expanded
from ...plan import Copies, dense_strides
from ..ground.foreach import exact_dtype, rounded_once
from ..methods.scalar import decay
from ..planning.matrices import Spec
from ..planning.owners import Int
from ..planning.schedule import Schedule
from .local_tensors import LocalTensors, View

LARGEST_BLOCK = 1 << 16
"""Elements of the largest block of more than one box: 256 KiB in float32, of which there are a few at a time."""

Sizes = Mapping[int, int]
"""Numbers of matrices that lie end to end in one memory, and how many elements each has there."""


class Elementwise(Protocol):
    """A backend, made for one schedule on one rank.  Wires are bytes, laid out as the schedule's routes say."""

    def begin(self, local: LocalTensors) -> None:
        """Begin a step; momenta are as they were."""
        ...

    def send_ahead(self, local: LocalTensors, stage: int, wire: Tensor) -> None:
        """Write updates that leave this rank in a stage, as if momenta had taken the gradients in already."""
        ...

    def take_in(self, local: LocalTensors) -> None:
        """Take the gradients that there are into momenta, or see to it that what comes after does."""
        ...

    def send(self, local: LocalTensors, stage: int, wire: Tensor) -> None:
        """Write updates that leave this rank in a stage."""
        ...

    def assemble(self, local: LocalTensors, stage: int, sizes: Sizes, wire: Tensor) -> Tensor:
        """Return updates of matrices that this rank owns: those that have arrived, and its own.

        A fresh buffer: dense and aligned alike on every topology, as the bits of a product may depend on it.
        """
        ...

    def release(self, local: LocalTensors, stage: int, sizes: Sizes, results: Tensor, wire: Tensor) -> None:
        """Write results to the wire, and apply what of them rests on this rank."""
        ...

    def apply(self, local: LocalTensors, stage: int, wire: Tensor) -> None:
        """Apply the results of a stage that have arrived."""
        ...


class UpdateCopies:
    """The copies of updates that a rank makes in the stages of a schedule, as backends execute them.

    Sources are units in a rank's tensors (or in a memory where they lie end to end), targets are buffers, with offsets
    in bytes; what goes back is listed as it went.
    """

    def __init__(self, schedule: Schedule) -> None:
        def updates(copies: Copies) -> Copies:
            chosen = copies.source < len(schedule.units)
            return copies if chosen.all() else copies.rows(chosen)

        self._units = len(schedule.units)
        self._leaving = [updates(stage.gather.sends) for stage in schedule.stages]
        self._arriving = [updates(stage.gather.receives.turned()) for stage in schedule.stages]
        self._own = [updates(stage.gather.own) for stage in schedule.stages]
        self._released = [updates(stage.scatter.sends) for stage in schedule.stages]
        self._returning = [updates(stage.scatter.receives.turned()) for stage in schedule.stages]

    def leaving(self, stage: int) -> Copies:
        """Return the copies from tensors to the wire."""
        return self._leaving[stage]

    def returning(self, stage: int) -> Copies:
        """Return the copies of results from the wire to tensors, turned."""
        return self._returning[stage]

    def own(self, stage: int, sizes: Sizes, itemsize: int) -> Copies:
        """Return the copies from tensors to a memory in which units lie end to end."""
        copies, begin = _of_units(self._own[stage], sizes)
        return replace(copies, target_offset=(copies.target_offset + begin) * itemsize)

    def arriving(self, stage: int, sizes: Sizes) -> Copies:
        """Return the copies from the wire to a memory in which units lie end to end, turned."""
        copies, begin = _of_units(self._arriving[stage], sizes)
        return replace(copies, source_offset=copies.source_offset + begin)

    def released(self, stage: int, sizes: Sizes) -> Copies:
        """Return the copies of results from a memory in which units lie end to end to the wire."""
        copies, begin = _of_units(self._released[stage], sizes)
        return replace(copies, source_offset=copies.source_offset + begin)

    def sent(self) -> Int:
        """Return how many elements of each unit's update this rank sends to owners, or has for itself."""
        sent = np.zeros(self._units, np.int64)
        for copies in (*self._leaving, *self._own):
            np.add.at(sent, copies.source, copies.numel)
        return sent


def _of_units(copies: Copies, sizes: Sizes) -> tuple[Copies, Int]:
    """Return the rows of units that lie end to end, and at which element of all each row's unit begins."""
    units = np.array(list(sizes), np.int64)
    first = np.searchsorted(copies.source, units)
    unit, rows = expanded(first, np.searchsorted(copies.source, units, side="right") - first)
    return copies.rows(rows), np.cumsum([0, *sizes.values()])[unit]


class BoxKind(NamedTuple):
    """What boxes of one block have in common: their parameters' group (its identity), dtypes, device and scale."""

    group: int
    momentum: torch.dtype
    weight: torch.dtype
    wire: torch.dtype
    device: torch.device
    scale: float


@dataclass(frozen=True, slots=True)
class EqualBoxes:
    """Equal boxes of parameters that are done together: what is done to a thousand takes as few operators as to one.

    They are stacked into one dense tensor ``[count, *sizes]``, computed there, and written back.

    Attributes:
        params: the number of each box's parameter.
        offsets: where the boxes begin in its local tensor; none: each is all of it.
        sizes, strides: of each box there.
        far: where they lie in a buffer of elements of ``kind.wire``, ``[count, *sizes]`` together.
    """

    kind: BoxKind
    params: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: Index
    strides: Index
    far: tuple[View, ...]

    def boxes(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return views of local tensors."""
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
        """Return the boxes that lie in a buffer of bytes, ``[count, *sizes]``; perhaps a view."""
        views = [view.of(buffer.view(self.kind.wire)) for view in self.far]
        return views[0] if len(views) == 1 else torch.cat(views)


class TorchElementwise:
    """The element-wise backend that runs everywhere.

    Which boxes are done together is found once for a set of parameters with gradients.

    Args:
        specs: of the schedule's parameters.
        shapes: of each one's local tensor on this rank.
    """

    def __init__(
        self, schedule: Schedule, specs: Sequence[Spec], shapes: Sequence[Sequence[int]], device: torch.device
    ) -> None:
        self._copies, self._specs, self._shapes, self._device = UpdateCopies(schedule), specs, shapes, device
        self._units = schedule.units
        self._params = np.array([unit.param for unit in schedule.units], np.int64)
        self._active: tuple[bool, ...] = ()
        self._blocks: dict[Hashable, list[EqualBoxes]] = {}
        self._alike: list[list[int]] = []
        self._carries: dict[Hashable, list[tuple[View, View]]] = {}

    def begin(self, local: LocalTensors) -> None:
        active = tuple(gradient is not None for gradient in local.gradients)
        if active != self._active:
            self._active, self._blocks, self._carries = active, {}, {}
            self._alike = local.alike(range(len(self._specs)))

    def send_ahead(self, local: LocalTensors, stage: int, wire: Tensor) -> None:
        for block in self._leaving(local, stage):
            momenta, gradients = _as_one(block.boxes(local.momenta)), self._gradients(local, block)
            exact, rate = exact_dtype(momenta), 1 - local.groups[block.params[0]]["momentum"]
            taken_in = torch.lerp(momenta.to(exact), gradients.to(exact), rate).to(momenta.dtype)
            block.put(wire, self._update(local, block, taken_in))

    def take_in(self, local: LocalTensors) -> None:
        local.accumulate(self._alike)

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
        returning = self._together(("returning", stage), local, lambda: self._copies.returning(stage), back=True)
        for block in returning:
            self._apply(local, block, block.taken(wire))

    def _leaving(self, local: LocalTensors, stage: int) -> Sequence[EqualBoxes]:
        return self._together(("leaving", stage), local, lambda: self._copies.leaving(stage), back=False)

    def _together(
        self, key: Hashable, local: LocalTensors, copies: Callable[[], Copies], *, back: bool
    ) -> Sequence[EqualBoxes]:
        """Return the copies of those parameters that take part, as blocks."""
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
        """Return the views of a memory in which units lie end to end, and those of the wire."""
        if key not in self._carries:
            self._carries[key] = list(_carries(copies(), dtype.itemsize))
        return self._carries[key]

    def _spec(self, unit: int) -> Spec:
        return self._specs[self._units[unit].param]

    def _gradients(self, local: LocalTensors, block: EqualBoxes) -> Tensor:
        return _as_one(block.boxes(cast("Sequence[Tensor]", local.gradients)))

    def _update(self, local: LocalTensors, block: EqualBoxes, momenta: Tensor) -> Tensor:
        """Return the updates of a block's momenta; with Nesterov's look ahead."""
        group = local.groups[block.params[0]]
        if not group["nesterov"]:
            return momenta
        exact = exact_dtype(momenta)
        return torch.lerp(self._gradients(local, block).to(exact), momenta.to(exact), group["momentum"])

    def _apply(self, local: LocalTensors, block: EqualBoxes, results: Tensor) -> None:
        """Decay, scale and subtract where a block rests."""
        group = local.groups[block.params[0]]
        rate = float(group["lr"])
        with _lent(block.boxes(local.weights)) as exact:
            change = results.to(exact.dtype)
            decay([exact], [change], rate * group["weight_decay"], group["cautious"])
            exact.add_(change, alpha=-rate * block.kind.scale)


def _blocks(
    copies: Copies, kind: Int, kinds: Sequence[BoxKind], shapes: Sequence[Sequence[int]]
) -> Iterator[EqualBoxes]:
    """Yield copies as blocks of equal boxes of one kind, of up to `LARGEST_BLOCK` elements, or of one box.

    Args:
        copies: whose sources are parameters.
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


def _equal(keys: Int, copies: Copies) -> Iterator[Int]:
    """Yield the numbers of rows with equal keys, by where they begin in the buffer."""
    if not len(keys):
        return
    order = np.lexsort((copies.target_offset, *keys.T[::-1]))
    ordered = keys[order]
    cuts = np.flatnonzero((ordered[1:] != ordered[:-1]).any(axis=1)) + 1
    yield from np.split(order, cuts)


def _evenly(places: Int) -> Iterator[tuple[int, int, list[int]]]:
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
    """Return equal boxes as one tensor, ``[count, *sizes]``; a view of a single one."""
    return torch.stack(list(boxes)) if len(boxes) > 1 else boxes[0].unsqueeze(0)


@contextmanager
def _lent(boxes: Sequence[Tensor]) -> Iterator[Tensor]:
    """Change equal boxes in place: lends ``[count, *sizes]``, float32 at least, which is rounded into them once."""
    if len(boxes) == 1:
        with rounded_once([boxes[0].unsqueeze(0)]) as [[exact]]:
            yield exact
        return
    stack = torch.stack(list(boxes))
    exact = stack.to(exact_dtype(stack))
    yield exact
    torch._foreach_copy_(list(boxes), exact.unbind())
