"""The element-wise oracle: layouts and plans applied one element at a time, with no algebra at all."""

from __future__ import annotations

from itertools import product

import numpy as np

from muonckpt.algebra.layout import Place, TensorLayout
from muonckpt.algebra.plan import Plan

HOLE = -1


def addresses(place: Place, sizes: tuple[int, ...]):
    """(index within the box, element offset in the buffer), for every element of a box of these sizes."""
    for index in product(*map(range, sizes)):
        yield index, place.offset + sum(k * stride for k, stride in zip(index, place.strides, strict=True))


def scatter(values: np.ndarray, layout: TensorLayout) -> dict[object, dict[int, int]]:
    """What each buffer holds: offset -> value.  Fails where two elements share an address."""
    buffers: dict[object, dict[int, int]] = {}
    for fragment in layout.fragments:
        held = buffers.setdefault(fragment.place.buffer, {})
        for index, at in addresses(fragment.place, fragment.box.shape):
            assert at not in held, f"two elements at {at} of buffer {fragment.place.buffer}"
            held[at] = values[tuple(lo + k for lo, k in zip(fragment.box.lo, index, strict=True))]
    return buffers


def execute(plan: Plan, source: dict[object, dict[int, int]]) -> dict[object, dict[int, int]]:
    """Run a plan.  Fails where it reads what is not there or writes a place twice."""
    target: dict[object, dict[int, int]] = {}
    for copy in plan.copies:
        reads = addresses(copy.source, copy.box.shape)
        writes = addresses(copy.target, copy.box.shape)
        for (_, read), (_, write) in zip(reads, writes, strict=True):
            held = target.setdefault(copy.target.buffer, {})
            assert write not in held, f"written twice: {write} of buffer {copy.target.buffer}"
            held[write] = source[copy.source.buffer][read]
    return target


def arange(shape: tuple[int, ...]) -> np.ndarray:
    """A tensor whose every element is its own flat index."""
    return np.arange(int(np.prod(shape, dtype=np.int64)), dtype=np.int64).reshape(shape)
