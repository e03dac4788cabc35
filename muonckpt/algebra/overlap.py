"""Finds the boxes of two lists that overlap, and proves that boxes tile a shape, without comparing every pair.

Boxes are rows of two integer arrays, ``lo`` and ``hi``, both of shape ``[n, d]`` (``d >= 1``).
"""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

_BATCH = 1 << 16
"""Candidates that are filtered together: a few arrays of this length stay in a cache, those of a large grid do not."""

_PRIME = (1 << 31) - 1
"""Products of two numbers below it fit into 64 bits."""

_LANES = 4
"""Fields in which volumes are compared: all together have 124 bits."""


def expanded(first: IntArray, count: IntArray) -> tuple[IntArray, IntArray]:
    """Return the numbers of ranges, end to end, after the index of each number's range.

    Range ``k`` is ``first[k]`` and the ``count[k] - 1`` numbers after it.
    """
    index = np.repeat(np.arange(len(count)), count)
    return index, np.arange(len(index)) + (first - np.cumsum(count) + count)[index]


def _candidates(a_lo: IntArray, a_hi: IntArray, b_lo: IntArray, b_hi: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Return, along one dim, the order that sorts ``b`` by start, and for each ``a`` the range of it that may overlap.

    Ends are not sorted when intervals of ``b`` nest, so the first candidate is found in their running maximum.
    """
    order = np.argsort(b_lo, kind="stable")
    first = np.searchsorted(np.maximum.accumulate(b_hi[order]), a_lo, side="right")
    last = np.searchsorted(b_lo[order], a_hi, side="left")
    return order, first, np.maximum(last, first)


def overlaps(a_lo: IntArray, a_hi: IntArray, b_lo: IntArray, b_hi: IntArray) -> tuple[IntArray, IntArray]:
    """Return index pairs ``(i, j)`` with ``a[i]`` and ``b[j]`` overlapping, sorted by ``i`` and then ``j``.

    Sorts along every dim, joins along the one with the fewest candidates and filters by the others.  For tilings
    cut along one dim that is linear in the output; for an ``n``-box grid cut evenly along two, ``O(n ** 1.5)``.
    """
    if not len(a_lo) or not len(b_lo):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    # Join along the dim with the fewest candidates.
    joins = [_candidates(a_lo[:, d], a_hi[:, d], b_lo[:, d], b_hi[:, d]) for d in range(a_lo.shape[1])]
    order, first, last = min(joins, key=lambda join: int((join[2] - join[1]).sum()))
    count = last - first
    ends = np.cumsum(count)
    # Filter by the other dims, a batch of candidates at a time.
    pairs = []
    for rows in np.split(np.arange(len(a_lo)), np.searchsorted(ends, np.arange(_BATCH, ends[-1], _BATCH))):
        row, candidate = expanded(first[rows], count[rows])
        i, j = rows[row], order[candidate]
        common = (np.maximum(a_lo[i], b_lo[j]) < np.minimum(a_hi[i], b_hi[j])).all(axis=1)
        pairs.append((i[common], j[common]))
    i, j = map(np.concatenate, zip(*pairs, strict=True))
    by_pair = np.lexsort((j, i))
    return i[by_pair], j[by_pair]


def tile(shape: IntArray, lo: IntArray, hi: IntArray) -> bool:
    """Return whether boxes inside a shape hold each of its elements exactly once, in time ``O(n log n)`` for each dim.

    Volumes add up for many boxes that do not tile, but for those that do they add up whatever the distances between
    cuts are; and only for those, but for a chance of at most ``(d / 2 ** 31) ** 4`` if the distances are random.
    They are secret, too, so an attacker cannot choose boxes for which they would add up.
    """
    # The last column is the volume of the shape itself.
    volumes = np.ones((_LANES, len(lo) + 1), np.uint64)
    for d, size in enumerate(shape.tolist()):
        cuts, cut = np.unique(np.concatenate((lo[:, d], [0], hi[:, d], [size])), return_inverse=True)
        places = np.frombuffer(os.urandom(4 * _LANES * len(cuts)), np.uint32).reshape(_LANES, -1) % np.uint32(_PRIME)
        begin, end = places[:, cut.reshape(2, -1)].astype(np.uint64).transpose(1, 0, 2)
        volumes = volumes * (end + (np.uint64(_PRIME) - begin)) % np.uint64(_PRIME)
    return bool((volumes[:, :-1].sum(axis=1) % np.uint64(_PRIME) == volumes[:, -1]).all())


def first_fault(shape: IntArray, lo: IntArray, hi: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Return the corners of a box that no box holds, or several do, and the numbers of two that do, if any.

    The boxes, inside the shape and none of them empty, do not `tile` it.  Halves the searched set again and again.
    """
    begin, end, rows = np.zeros_like(shape), shape, np.arange(len(lo))
    while True:
        lo, hi = np.maximum(lo, begin), np.minimum(hi, end)
        inside = (lo < hi).all(axis=1)
        lo, hi, rows = lo[inside], hi[inside], rows[inside]
        # A box that fills the searched one, beside another, is the fault; no box at all is a hole.
        fills = ((lo == begin) & (hi == end)).all(axis=1)
        if not len(rows) or fills.any():
            filler = np.flatnonzero(fills)[:1]
            pair = np.concatenate((np.delete(np.arange(len(rows)), filler)[:1], filler))
            if len(pair):
                begin, end = lo[pair[0]], hi[pair[0]]
            return begin, end, np.sort(rows[pair])
        # Otherwise one of the halves has a fault; the cut goes through the dim with the most edges.
        cuts = np.concatenate((lo, hi))
        within = (cuts > begin) & (cuts < end)
        d = int(within.sum(axis=0).argmax())
        cut = np.sort(cuts[within[:, d], d])[within[:, d].sum() // 2]
        middle = np.where(np.arange(len(shape)) == d, cut, end)
        low, high = np.minimum(lo, middle), np.minimum(hi, middle)
        below = (low < high).all(axis=1)
        if tile(middle - begin, low[below] - begin, high[below] - begin):
            begin = np.where(np.arange(len(shape)) == d, cut, begin)
        else:
            end = middle
