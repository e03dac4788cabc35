"""Fingerprints that do not depend on how a tensor is sharded.

The fingerprint of a tensor is ``sum(word * weight) mod 2**64`` over its elements.  An element is read as its raw bits:
one unsigned word, or two of 32 bits for 8-byte types (four for 16-byte ones).  The weight is the product of one odd
64-bit number per dim, a fixed pseudo-random function of the dim and of the *global* index along it.  Therefore

- it is additive over disjoint boxes: every layout of the same tensor gives the same number;
- changing any single element changes it: the difference is a non-zero number below 2**32 times an odd one;
- words have at most 32 bits, so no bit of an element (the sign, above all) meets a weight only modulo 2;
- weights factorise into rows and columns, so a box costs one integer matrix-vector product.

It detects accidents, not adversaries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache, reduce

import numpy as np
from numpy.typing import NDArray

from .box import Index

U64 = NDArray[np.uint64]
_MASK = 2**64 - 1

# Increment and multipliers of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators",
# OOPSLA 2014), used as a hash of (dim, index).
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
DIM_STRIDE = 2**56
"""Indices of one dim are below this, so no two (dim, index) pairs share a counter."""

_COLUMNS = 1 << 16
"""Trailing dims are merged into the columns of the matrix-vector product up to this many elements."""


def fingerprint(values: NDArray[np.unsignedinteger], origin: Index) -> int:
    """Return the share of one box in its tensor's fingerprint, in ``0 … 2**64 - 1``.

    Args:
        values: raw bits of the box's elements, one unsigned integer each of 1, 2, 4 or 8 bytes, in the box's shape.
            (16-byte elements: two integers of 8 bytes each, on one more, last dim.)
        origin: global index of the box's first element, one per dim (a last dim of halves starts at 0).

    Shares of disjoint boxes add up modulo 2**64 (:func:`combine`).
    """
    if values.size == 0:
        return 0
    if values.ndim == 0:
        values, origin = values.reshape(1), (0,)
    if values.itemsize == 8:
        values = np.ascontiguousarray(values)[..., np.newaxis].view(np.uint32)
        origin = (*origin, 0)
    # The weights of rows and columns factorise: one matrix-vector product for each block.
    total = 0
    for block, block_origin in _blocks(values, origin):
        split = _split(block.shape)
        columns = _outer(split, block.shape, block_origin)
        rows = _outer(0, block.shape[:split], block_origin)
        matrix = block.reshape(len(rows), len(columns))
        total += int(rows @ np.einsum("ij,j->i", matrix, columns))
    return total & _MASK


def box_shares(values: NDArray[np.unsignedinteger], origin: Index) -> list[int]:
    """Return shares of boxes of one shape and origin, of different tensors; each of ``values`` as for `fingerprint`.

    Faster than a call for each if boxes are small.
    """
    if values[:1].size > _COLUMNS:
        return [fingerprint(box_values, origin) for box_values in values]
    if values.ndim == 1:
        values, origin = values[:, np.newaxis], (0,)
    if values.itemsize == 8:
        values = np.ascontiguousarray(values)[..., np.newaxis].view(np.uint32)
        origin = (*origin, 0)
    # All boxes share the weights of their elements.
    weights = _outer(0, values.shape[1:], origin)
    shares: list[int] = np.einsum("ij,j->i", values.reshape(len(values), -1), weights).tolist()
    return shares


def combine(*shares: int) -> int:
    """Return the fingerprint of the union of disjoint boxes, from their shares."""
    return sum(shares) & _MASK


def as_hex(value: int) -> str:
    """Return a fingerprint as the 16 hex digits that manifests and tools show."""
    return f"{value:016x}"


def _blocks(values: NDArray[np.unsignedinteger], origin: Index) -> Iterator[tuple[NDArray[np.unsignedinteger], Index]]:
    """Yield pieces of the last dim, so that its weights stay in cache however long it is."""
    for start in range(0, values.shape[-1], _COLUMNS):
        yield values[..., start : start + _COLUMNS], (*origin[:-1], origin[-1] + start)


def _split(shape: Index) -> int:
    """Return the first of the trailing dims that together have at most `_COLUMNS` elements."""
    split = len(shape) - 1
    while split > 0 and math.prod(shape[split - 1 :]) <= _COLUMNS:
        split -= 1
    return split


def _outer(first_dim: int, shape: Index, origin: Index) -> U64:
    """Return products of the weights of the dims from ``first_dim`` on, flattened; one 1 where there is none."""
    factors = [_weights(dim, origin[dim], origin[dim] + shape[dim]) for dim in range(first_dim, len(shape))]
    return reduce(_flat_products, factors) if factors else np.ones(1, np.uint64)


def _flat_products(left: U64, right: U64) -> U64:
    return np.multiply.outer(left, right).reshape(-1)


@lru_cache(maxsize=16)
def _weights(dim: int, start: int, stop: int) -> U64:
    """Return odd weights of global indices ``start:stop`` along ``dim``.  Cached: 512 KiB at most in the last dim."""
    with np.errstate(over="ignore"):
        x = (np.arange(start, stop, dtype=np.uint64) + np.uint64(dim * DIM_STRIDE + 1)) * GOLDEN
        x = (x ^ (x >> np.uint64(30))) * MIX[0]
        x = (x ^ (x >> np.uint64(27))) * MIX[1]
        x = (x ^ (x >> np.uint64(31))) | np.uint64(1)
    x.flags.writeable = False
    return x
