"""Apply layouts and plans one element at a time, with no algebra at all, as the oracle that tests compare with."""

from __future__ import annotations

from itertools import product

import numpy as np

from muonckpt.algebra.layout import Place, TensorLayout
from muonckpt.algebra.plan import Plan


def addresses(place: Place, sizes: tuple[int, ...]):
    """Yield (index within the box, element offset in the buffer) for every element of a box of these sizes."""
    for index in product(*map(range, sizes)):
        yield index, place.offset + sum(k * stride for k, stride in zip(index, place.strides, strict=True))


def scatter(values: np.ndarray, layout: TensorLayout) -> dict[object, dict[int, int]]:
    """Return the values of each buffer by their offset; fail where two elements share an address."""
    buffers: dict[object, dict[int, int]] = {}
    for fragment in layout.fragments:
        elements = buffers.setdefault(fragment.place.buffer, {})
        for index, address in addresses(fragment.place, fragment.box.shape):
            assert address not in elements, f"two elements at {address} of buffer {fragment.place.buffer}"
            elements[address] = values[tuple(lo + k for lo, k in zip(fragment.box.lo, index, strict=True))]
    return buffers


def execute(plan: Plan, source: dict[object, dict[int, int]]) -> dict[object, dict[int, int]]:
    """Run a plan, and fail where it reads an element that no buffer has or writes an address twice."""
    target: dict[object, dict[int, int]] = {}
    for copy in plan.copies:
        reads = addresses(copy.source, copy.box.shape)
        writes = addresses(copy.target, copy.box.shape)
        for (_, read), (_, write) in zip(reads, writes, strict=True):
            elements = target.setdefault(copy.target.buffer, {})
            assert write not in elements, f"written twice: {write} of buffer {copy.target.buffer}"
            elements[write] = source[copy.source.buffer][read]
    return target


def arange(shape: tuple[int, ...]) -> np.ndarray:
    """Return a tensor whose every element is its own flat index."""
    return np.arange(int(np.prod(shape, dtype=np.int64)), dtype=np.int64).reshape(shape)
