"""Which elements of which tensors move to or from a buffer in a step: lists that both element-wise backends cut up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ...box import Index, row_major
from ...vocabulary import MOMENTUM
from ..planning.routes import Key, Route, Strip
from .elementwise import Sizes

Routed = Mapping[Key, tuple[Strip, ...]]


@dataclass(frozen=True, slots=True)
class Move:
    """Elements of a tensor and their places in a buffer of another dtype.

    Attributes:
        tensor: its number.
        sizes: of the box that moves.
        near, near_strides: where the box begins in the tensor, and its strides; in elements.
        far, far_strides: where it begins in the buffer, in bytes; its strides there, in elements.
    """

    tensor: int
    sizes: Index
    near: int
    near_strides: Index
    far: int
    far_strides: Index

    @classmethod
    def to_wire(cls, tensor: int, strip: Strip) -> Move:
        """A strip and its place on the wire."""
        return cls(tensor, strip.sizes, strip.offset, strip.strides, strip.wire_offset, row_major(strip.sizes))

    @classmethod
    def to_memory(cls, tensor: int, strip: Strip, there: Strip, begin: int) -> Move:
        """A strip and its place in a memory that begins at a byte of the buffer: what a rank has for itself."""
        far = begin + there.offset * strip.dtype.itemsize
        return cls(tensor, strip.sizes, strip.offset, strip.strides, far, there.strides)


def on_wire(units: Iterable[int], numbers: Sequence[int], routed: Routed) -> Iterator[tuple[int, Move]]:
    """Between where updates of units rest on this rank and the wire, with the units.

    Args:
        numbers: of each unit's tensor.
        routed: strips there, or back.
    """
    for unit in units:
        for strip in routed.get((unit, MOMENTUM), ()):
            yield unit, Move.to_wire(numbers[unit], strip)


def own(route: Route, sizes: Sizes, numbers: Sequence[int], itemsize: int, *, back: bool) -> Iterator[tuple[int, Move]]:
    """Between where units rest on this rank and where they lie end to end in its memory, with the units."""
    for unit, begin in _begins(sizes):
        for source, target in route.own.get((unit, MOMENTUM), ()):
            near, far = (target, source) if back else (source, target)
            yield unit, Move.to_memory(numbers[unit], near, far, begin * itemsize)


def carried(sizes: Sizes, routed: Routed) -> Iterator[Move]:
    """Between a memory in which units lie end to end, which is tensor 0, and the wire."""
    for unit, begin in _begins(sizes):
        for strip in routed.get((unit, MOMENTUM), ()):
            yield Move.to_wire(0, replace(strip, offset=begin + strip.offset))


def _begins(sizes: Sizes) -> Iterator[tuple[int, int]]:
    """Units that lie end to end, and at which element each begins."""
    return zip(sizes, accumulate(sizes.values(), initial=0), strict=False)
