"""A model's parameters and gradients in flat buffers, and what one rank holds of each.  Nothing here communicates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...box import Box, flat_boxes
from ...errors import LayoutError
from ...layouts.buffers.buffer_layout import BufferLayout, rank_of
from ...layouts.buffers.placements import PLACEMENTS, ToPlace
from ...layouts.buffers.ranges import PlacedParameter
from ..rounding import exact_dtype


def laid_out(layout: str | Sequence[BufferLayout], model: ToPlace) -> tuple[BufferLayout, ...]:
    """The buffers of a model: as one of `PLACEMENTS` makes them, or as they were recorded.

    Raises:
        ValueError: there is no such placement.
        LayoutError: recorded buffers of other parameters or of other ranks, or that cut a matrix.
    """
    if isinstance(layout, str):
        if layout not in PLACEMENTS:
            raise ValueError(f"layout={layout!r}: expected one of {', '.join(PLACEMENTS)}, or recorded buffers")
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
    """What one rank holds of a parameter once gradients are reduced.

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
        """What this rank holds of each parameter; masters are made of the weights as they are now."""
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
        """Who holds what of ``weights`` or ``gradients``, in order: ranks of the group, and views."""
        return [(rank, memory[start:stop]) for rank, start, stop in self._shards]


def _view(memory: Tensor, placed: PlacedParameter) -> Tensor:
    return memory[placed.start : placed.stop].view(placed.parameter.shape)
