"""Which boxes of two lists have elements in common, without comparing every pair.

Boxes are rows of two integer arrays, ``lo`` and ``hi``, both of shape ``[n, d]`` (``d >= 1``).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

_AT_ONCE = 1 << 16
"""Candidates that are filtered together: a few arrays of this length stay in a cache, those of a large grid do not."""


def expanded(first: IntArray, count: IntArray) -> tuple[IntArray, IntArray]:
    """Ranges of numbers, end to end: for each number that of its range, and itself.

    Range ``k`` is ``first[k]`` and the ``count[k] - 1`` numbers after it.
    """
    which = np.repeat(np.arange(len(count)), count)
    return which, np.arange(len(which)) + (first - np.cumsum(count) + count)[which]


def _candidates(a_lo: IntArray, a_hi: IntArray, b_lo: IntArray, b_hi: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Along one dim: the order that sorts ``b`` by start, and for each ``a`` the range of it that may overlap.

    Ends are not sorted when intervals of ``b`` nest, so the first candidate is found in their running maximum:
    nothing before it can overlap, some after it may not.
    """
    order = np.argsort(b_lo, kind="stable")
    first = np.searchsorted(np.maximum.accumulate(b_hi[order]), a_lo, side="right")
    last = np.searchsorted(b_lo[order], a_hi, side="left")
    return order, first, np.maximum(last, first)


def overlaps(a_lo: IntArray, a_hi: IntArray, b_lo: IntArray, b_hi: IntArray) -> tuple[IntArray, IntArray]:
    """Index pairs ``(i, j)`` with ``a[i]`` and ``b[j]`` overlapping, sorted by ``i`` and then ``j``.

    Sorts along every dim, joins along the one with the fewest candidates and filters by the others.  For tilings
    cut along one dim that is linear in the output; for an ``n``-box grid cut evenly along two, ``O(n ** 1.5)``.
    """
    if not len(a_lo) or not len(b_lo):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    joins = [_candidates(a_lo[:, d], a_hi[:, d], b_lo[:, d], b_hi[:, d]) for d in range(a_lo.shape[1])]
    order, first, last = min(joins, key=lambda join: int((join[2] - join[1]).sum()))
    count = last - first
    ends = np.cumsum(count)
    pairs = []
    for rows in np.split(np.arange(len(a_lo)), np.searchsorted(ends, np.arange(_AT_ONCE, ends[-1], _AT_ONCE))):
        which, number = expanded(first[rows], count[rows])
        i, j = rows[which], order[number]
        common = (np.maximum(a_lo[i], b_lo[j]) < np.minimum(a_hi[i], b_hi[j])).all(axis=1)
        pairs.append((i[common], j[common]))
    i, j = map(np.concatenate, zip(*pairs, strict=True))
    by_pair = np.lexsort((j, i))
    return i[by_pair], j[by_pair]
