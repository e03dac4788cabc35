"""Buffers of weights and gradients: what this rank holds of them, and how they are reduced and gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...box import Box, flat_boxes
from ...errors import LayoutError, did_you_mean, lost_ranks
from ...layouts.buffers.buffer_layout import BufferLayout, PlacedParameter, rank_of
from ...layouts.buffers.placements import PLACEMENTS, ToPlace
from ..ground.foreach import exact_dtype
from ..step.exchange import ALL_GATHER
from .members import Members, SharingGroup


def laid_out(layout: str | Sequence[BufferLayout], model: ToPlace) -> tuple[BufferLayout, ...]:
    """Return the buffers of a model: as one of `PLACEMENTS` makes them, or as they were recorded.

    Raises:
        ValueError: there is no such placement.
        LayoutError: recorded buffers of other parameters or of other ranks, or that cut a matrix.
    """
    if isinstance(layout, str):
        if layout not in PLACEMENTS:
            close = did_you_mean(layout, [*PLACEMENTS])
            raise ValueError(f"layout={layout!r}: expected one of {', '.join(PLACEMENTS)}, or recorded buffers{close}")
        return PLACEMENTS[layout].place(model)
    recorded = {placed.parameter: buffer for buffer in layout for placed in buffer.parameters}
    if differing := {*recorded} ^ {*model.parameters}:
        names = sorted({parameter.name for parameter in differing})
        raise LayoutError(f"the recorded buffers do not fit the model: {', '.join(names[:8])}")
    for parameter, buffer in recorded.items():
        if buffer.ranks != model.sizes.of(parameter):
            raise LayoutError(f"recorded for {buffer.ranks} ranks, but {parameter.name!r} has {model.sizes}")
        if parameter.name in model.matrices and buffer.owners[parameter.name] is None:
            raise LayoutError(f"matrix {parameter.name!r} has no owner in the recorded buffers")
    return tuple(layout)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The part of a parameter that one rank holds once gradients are reduced.

    It is flat; if it is all of the parameter, it has the parameter's shape.

    Attributes:
        boxes: of the parameter, in the order of memory; none if the rank holds nothing.
        weight, gradient: views of the buffers.
        stepped: what an optimizer steps: the weight itself, or for 16 bits its float32 master.
    """

    boxes: tuple[Box, ...]
    weight: Tensor
    gradient: Tensor
    stepped: Tensor

    @property
    def mastered(self) -> bool:
        return self.stepped is not self.weight

    def follow(self) -> None:
        """Take over what others have written to the weight since it was `publish`ed, such as a loaded model."""
        if self.mastered:
            rounded = self.stepped.to(self.weight.dtype)
            self.stepped.copy_(self.stepped.where(rounded == self.weight, self.weight.to(self.stepped.dtype)))

    def publish(self) -> None:
        """Round the master to the weight."""
        if self.mastered:
            self.weight.copy_(self.stepped)


class FlatBuffer:
    """The memory of one `BufferLayout`, whose parameters become views of it.

    Args:
        params: by name; all of one dtype and device.
        rank: in the group of the layout.
        gradient_dtype: of the gradient buffer; None: the parameters'.
    """

    def __init__(
        self, layout: BufferLayout, params: Mapping[str, Tensor], rank: int, gradient_dtype: torch.dtype | None
    ) -> None:
        self.layout = layout
        some = params[layout.parameters[0].parameter.name]
        # Padding stays zero: it is never written, and collectives add up zeros.
        self.weights = torch.zeros(layout.numel, dtype=some.dtype, device=some.device)
        self.gradients = torch.zeros(layout.numel, dtype=gradient_dtype or some.dtype, device=some.device)
        self.gradient_of: dict[str, Tensor] = {}
        for placed in layout.parameters:
            name, param = placed.name, params[placed.name]
            home = _view(self.weights, placed)
            home.copy_(param.detach())
            param.data = home
            self.gradient_of[name] = _view(self.gradients, placed)
        self._rank = rank

    def parts(self) -> dict[str, Part]:
        """Return what this rank holds of each parameter; masters are made of the weights as they are now."""
        return {placed.name: self._part(placed) for placed in self.layout.parameters}

    def _part(self, placed: PlacedParameter) -> Part:
        start, stop = placed.start, placed.start
        for shard in self.layout.holding(placed):
            if rank_of(shard) == self._rank:
                if stop > start:
                    raise LayoutError(f"rank {self._rank} holds several ranges of {placed.name!r}")
                start, stop = max(placed.start, shard.start), min(placed.stop, shard.stop)
        shape = placed.parameter.shape if stop - start == placed.parameter.numel else (stop - start,)
        weight, gradient = (whole[start:stop].view(shape) for whole in (self.weights, self.gradients))
        boxes = flat_boxes(placed.parameter.shape, start - placed.start, stop - placed.start) if start < stop else ()
        return Part(tuple(boxes), weight, gradient, weight.to(exact_dtype(weight)))


class BucketMemory:
    """The part of a buffer that is moved at once.

    Attributes:
        gradient_of: views by parameter name.
        weights, gradients: all of the bucket, padding included.
        even: every rank holds as much of it, in the order of ranks.
    """

    def __init__(self, buffer: FlatBuffer, number: int) -> None:
        layout = buffer.layout
        start, stop = layout.buckets[number]
        names = [placed.name for placed in layout.parameters if placed.bucket == number]
        self.gradient_of = {name: buffer.gradient_of[name] for name in names}
        self.weights, self.gradients = buffer.weights[start:stop], buffer.gradients[start:stop]
        self.even = layout.even
        self._shards = [
            (rank_of(shard), shard.start - start, shard.stop - start)
            for shard in layout.shards
            if start <= shard.start < stop
        ]

    def held(self, memory: Tensor) -> list[tuple[int, Tensor]]:
        """Return who holds what of ``weights`` or ``gradients``, in order: ranks of the group, and views."""
        return [(rank, memory[start:stop]) for rank, start, stop in self._shards]


def _view(memory: Tensor, placed: PlacedParameter) -> Tensor:
    return memory[placed.start : placed.stop].view(placed.parameter.shape)


# torch 2.13 has a new name for it, and warns of the old one.
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Bucket(BucketMemory):
    """A part of a buffer that one reduction and one gather move.

    Args:
        exact: unequal shards are reduced to their owners only, else by one all-reduce.
    """

    def __init__(self, buffer: FlatBuffer, number: int, group: SharingGroup, exact: bool) -> None:
        super().__init__(buffer, number)
        self.group, self._exact = group, exact

    def reduce(self) -> list[dist.Work]:
        """Begin to add up gradients where they are held, in place; elsewhere the memory is undefined then."""
        memory, group = self.gradients, self.group
        if group is None:
            return []
        if self.even:
            return [REDUCE_SCATTER(self.held(memory)[dist.get_rank(group)][1], memory, group=group, async_op=True)]
        if not self._exact:
            return [dist.all_reduce(memory, group=group, async_op=True)]
        return [dist.reduce(shard, group=group, group_dst=to, async_op=True) for to, shard in self.held(memory)]

    def gather(self) -> list[dist.Work]:
        """Begin to bring the weights from where they are held to every rank, in place."""
        memory, group = self.weights, self.group
        if group is None:
            return []
        if self.even:
            return [ALL_GATHER(memory, self.held(memory)[dist.get_rank(group)][1], group=group, async_op=True)]
        return [dist.broadcast(shard, group=group, group_src=of, async_op=True) for of, shard in self.held(memory)]


def filled(
    layouts: Sequence[BufferLayout], members: Members, gradient_dtype: torch.dtype | None, exact: bool
) -> tuple[dict[str, Part], list[Bucket]]:
    """Make buffers with rank 0's values; return this rank's parts by name, and buckets as backward passes fill them."""
    parts: dict[str, Part] = {}
    buckets: list[Bucket] = []
    for layout in layouts:
        group = members.group_of_buffer(layout)
        buffer = FlatBuffer(layout, members.named, dist.get_rank(group) if group else 0, gradient_dtype)
        if group is not None:
            dist.broadcast(buffer.weights, group=group, group_src=0)
        parts |= buffer.parts()
        buckets += [Bucket(buffer, number, group, exact) for number in range(len(layout.buckets))]
    order = {name: number for number, name in enumerate(members.named)}
    # A bucket is full when the first of its parameters in the forward pass has its gradient.
    buckets.sort(key=lambda bucket: min(order[name] for name in bucket.gradient_of), reverse=True)
    return parts, buckets


def warm_up(buckets: Sequence[Bucket]) -> None:
    """Make the connections of all that training moves, by the first bucket of each kind: gradients are zeros still, and
    weights the same on all ranks.  Collective.  Why: `exchange.connect`."""
    for bucket in {(bucket.group, bucket.even): bucket for bucket in reversed(buckets)}.values():
        for work in (*bucket.reduce(), *bucket.gather()):
            with lost_ranks():
                work.wait()


class Collective(Protocol):
    """A collective under way."""

    def wait(self) -> object: ...


class Reducible(Protocol):
    """A part of the gradients that one reduction moves: views by parameter name."""

    @property
    def gradient_of(self) -> Mapping[str, Tensor]: ...

    def reduce(self) -> Sequence[Collective]: ...


class Gradients:
    """Takes gradients out of autograd into the buckets' memory, and reduces each bucket once it is full.

    A bucket waits for those before it, full or not: ranks whose graphs differ must not reduce in different orders.

    Args:
        params: by name; each in one bucket.
        buckets: in the order in which they are reduced.

    Attributes:
        seen: names of the parameters that have got a gradient since the last `forget`.
    """

    def __init__(self, params: Mapping[str, Tensor], buckets: Sequence[Reducible]) -> None:
        self.seen: set[str] = set()
        self._buckets = tuple(buckets)
        self._number_of = {name: number for number, bucket in enumerate(buckets) for name in bucket.gradient_of}
        self._last_pass = True
        self._begin()
        self._handles: list[RemovableHandle] = [
            param.register_post_accumulate_grad_hook(partial(self._take, name))  # type: ignore[no-untyped-call]
            for name, param in params.items()
        ]

    def _begin(self) -> None:
        self._awaited = [set(bucket.gradient_of) for bucket in self._buckets]
        self._reduced = 0
        self._works: list[Collective] = []

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backward passes inside reduce nothing."""
        before, self._last_pass = self._last_pass, False
        try:
            yield
        finally:
            self._last_pass = before

    def finish(self) -> None:
        """Reduce what is left, and wait for everything."""
        while self._reduced < len(self._buckets):
            self._reduce_next()
        self._wait()

    def forget(self) -> None:
        """Begin anew, and forget what has been reduced or accumulated."""
        self._wait()
        self.seen.clear()
        self._begin()

    def close(self) -> None:
        """Leave gradients to autograd again."""
        self._wait()
        for handle in self._handles:
            handle.remove()

    def _take(self, name: str, param: Tensor) -> None:
        """The hook: ``param`` has a gradient."""
        number = self._number_of[name]
        assert param.grad is not None
        if number < self._reduced:
            raise RuntimeError(
                f"a gradient of {name!r} after its bucket was reduced: run all backward passes of a step but the last "
                "under no_sync(), and call step() or zero_grad() before the next"
            )
        home = self._buckets[number].gradient_of[name]
        if name in self.seen:
            home.add_(param.grad)
        else:
            home.copy_(param.grad)
            self.seen.add(name)
        param.grad = None
        if self._last_pass:
            self._awaited[number].discard(name)
            while self._reduced < len(self._buckets) and not self._awaited[self._reduced]:
                self._reduce_next()

    def _reduce_next(self) -> None:
        bucket = self._buckets[self._reduced]
        for name in bucket.gradient_of.keys() - self.seen:
            bucket.gradient_of[name].zero_()  # or the last step's
        self._works += bucket.reduce()
        self._reduced += 1

    def _wait(self) -> None:
        for work in self._works:
            with lost_ranks():
                work.wait()
        self._works = []


Gather = Callable[[], Sequence[Collective]]


class Gathers:
    """Gathers that `start` has begun, by their number; `wait` for one before its parameters are used."""

    def __init__(self, gathers: Sequence[Gather]) -> None:
        self._gathers = tuple(gathers)
        self._under_way: dict[int, Sequence[Collective]] = {}

    def start(self) -> None:
        """Begin all, those of the first layers first: the last bucket of the backward pass is the first of these."""
        for number in reversed(range(len(self._gathers))):
            self._under_way[number] = self._gathers[number]()

    def wait(self, numbers: Sequence[int] | None = None) -> None:
        """Wait for some gathers, or for all."""
        for number in list(self._under_way) if numbers is None else numbers:
            for work in self._under_way.pop(number, ()):
                with lost_ranks():
                    work.wait()

    def awaited_by(
        self, model: nn.Module, name_of: Mapping[Tensor, str], buckets: Sequence[Reducible]
    ) -> list[RemovableHandle]:
        """Let every module wait for its own parameters before its forward, and the model for all before it is saved.

        Args:
            buckets: what each gather brings.
        """
        numbers = {name: number for number, bucket in enumerate(buckets) for name in bucket.gradient_of}
        handles: list[RemovableHandle] = []
        for module in model.modules():
            own = [numbers[name_of[param]] for param in module.parameters(recurse=False) if param in name_of]
            handles.append(module.register_forward_pre_hook(partial(self._before, own)))
        before_saving = model.register_state_dict_pre_hook(partial(self._before, None))  # type: ignore[no-untyped-call]
        return [*handles, before_saving]

    def _before(self, numbers: Sequence[int] | None, *_: object) -> None:
        self.wait(numbers)
