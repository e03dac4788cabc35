"""Newton-Schulz on the short side: several steps on one Gram matrix, then one product with the matrix itself.

A step multiplies ``X`` of ``[s, l]`` from the left by ``Z = aI + bR + cR²``, a polynomial of its Gram matrix
``R = XXᵀ``.  The next Gram matrix is ``ZRZ``, so ``X`` is not needed to go on: steps are compounded into ``Q = Z₃Z₂Z₁``
of ``[s, s]``, and ``X`` becomes ``QX`` once (Dao-AILab/gram-newton-schulz).  Rounding errors of ``R`` grow with every
step, so ``R`` is built anew from ``X`` after some of them: a restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from ...coefficients import Triple
from .products import M, Products

_LONGEST = 3
"""Steps on one Gram matrix in 16 bits.  Five without a restart, measured on a 1/k spectrum of 256 x 1024: error 0.36 in
fp16 and 8e4 in bf16, where a restart after two leaves 0.005; four steps are 20 times as bad as three."""


def spans(gram: Sequence[int], steps: int, dtype: torch.dtype) -> tuple[tuple[int, int], ...]:
    """The runs of steps ``[start, stop)`` that share a Gram matrix, when it is rebuilt after the steps ``gram``.

    Raises:
        ValueError: restarts that do not rise within 1 to ``steps - 1``, or too few of them for a dtype of 16 bits.
    """
    edges = (0, *gram, steps)
    if any(start >= stop for start, stop in pairwise(edges)):
        raise ValueError(f"gram={tuple(gram)}: want rising restarts, each between 1 and {steps - 1} for {steps} steps")
    runs = tuple(pairwise(edges))
    longest = max(stop - start for start, stop in runs)
    if dtype.itemsize == 2 and longest > _LONGEST:
        raise ValueError(
            f"gram={tuple(gram)} takes {longest} of {steps} steps on one Gram matrix; beyond {_LONGEST}, errors "
            f"grow out of hand in {dtype}. Restart after e.g. gram={tuple(range(2, steps, 3))}, or use float32"
        )
    return runs


def gram_is_cheaper(rows: int, columns: int) -> bool:
    """Whether a matrix of this shape is rectangular enough for the Gram form; the same for any restarts.

    Each step that continues on a Gram matrix saves two products with the long side (``4 s² l``) and adds three of the
    short side (``Q``, and two for the next ``R``: ``6 s³``), so it pays from ``l / s > 3/2`` on.
    """
    short, long = sorted((rows, columns))
    return 2 * long > 3 * short


def cost(rows: int, columns: int, steps: int, gram: Sequence[int] | None = None) -> int:
    """Floating-point operations of ``orthogonalize`` with these arguments; one multiply-add is two.

    With ``s`` the short and ``l`` the long side, a Gram matrix and its use are ``2 s² l`` each, and its square is
    ``2 s³``.  The plain form builds one at every step.  The Gram form builds one at the start and at each restart, and
    every other step has three more products of ``2 s³``.  A cubic step has no square, which is not counted here.
    """
    short, long = sorted((rows, columns))
    built = steps if gram is None or not gram_is_cheaper(rows, columns) else len(gram) + 1
    return 4 * short**2 * long * built + 2 * short**3 * (steps + 3 * (steps - built))


def compound(gram: M, triples: Sequence[Triple], products: Products[M]) -> M:
    """``Q`` of ``[s, s]``: what the steps ``triples`` multiply ``X`` by, from its Gram matrix ``gram``.

    All matrices here are polynomials of ``gram``, so they are symmetric and commute, but for rounding.  ``Q`` is not
    made symmetric: half of it mirrored has four times the rounding error (log-uniform 512 x 2048 in fp16, restart after
    two steps: 0.053 instead of 0.0145); the next Gram matrix takes no harm.
    """
    q: M | None = None
    for index, (a, b, c) in enumerate(triples):
        z = products.square(gram, b, c, a)
        q = z if q is None else products.added(q, 0.0, z)
        if index + 1 < len(triples):
            gram = products.commuting(products.commuting(z, gram), z)
    assert q is not None, "compound() of no step"
    return q
