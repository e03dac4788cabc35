"""The steps of Newton-Schulz and their cost, in the plain form or the Gram form.

A step of the plain form multiplies ``X`` of ``[s, l]`` from the left by ``Z = aI + bR + cR²``, a polynomial of its Gram
matrix ``R = XXᵀ``.  The next Gram matrix is ``ZRZ``, so the Gram form compounds steps into ``Q = Z₃Z₂Z₁`` of ``[s,
s]``, and ``X`` becomes ``QX`` once (Dao-AILab/gram-newton-schulz).  Rounding errors of ``R`` grow with every step, so
``R`` is built again from ``X`` after some of them: a restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from ...names.coefficients import COEFFICIENTS, CoefficientSet, Triple
from ...names.errors import ArgumentError
from ...names.vocabulary import MAX_STEPS_ON_ONE_GRAM

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

HOLD = 4.0
"""The factor at which ``X`` is held: it moves small elements of a large matrix away from the end of fp16; no
larger power of two is safe (`docs/design/newton_schulz.md`).  Other dtypes keep their bits."""


EPS = 1e-15
"""The smallest norm that a matrix is divided by, as in `vocabulary.MUON`: where float32 stops measuring norms, as
squares have few bits or none.  With 1e-7, which is usual elsewhere, updates would fade while norms are still exact."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The steps of Newton-Schulz, and their dtype: the arguments of `iterations.orthogonalize`.

    Raises:
        ArgumentError: no step, another dtype, or restarts that are out of order or too few (:func:`spans`).
    """

    coefficients: CoefficientSet = COEFFICIENTS["quintic"]
    steps: int = 5
    dtype: torch.dtype = torch.bfloat16
    eps: float = EPS
    gram: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ArgumentError(f"Newton-Schulz runs in {', '.join(map(str, _DTYPES))}, got {self.dtype}")
        if self.steps < 1:
            raise ArgumentError(f"Newton-Schulz needs at least one step, got steps={self.steps}")
        if self.gram is not None:
            spans(self.gram, self.steps, self.dtype)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The runs of steps that share a Gram matrix; none in the plain form."""
        return () if self.gram is None else spans(self.gram, self.steps, self.dtype)

    @property
    def triples(self) -> tuple[Triple, ...]:
        """The polynomials for a matrix that is held at `HOLD` times its size."""
        triples = [(a, b / HOLD**2, c / HOLD**4) for a, b, c in self.coefficients.schedule(self.steps)]
        # The last step undoes it.
        a, b, c = triples[-1]
        return (*triples[:-1], (a / HOLD, b / HOLD, c / HOLD))

    @property
    def scale(self) -> float:
        """The divisor of a matrix besides its norm, so that it is held at that size."""
        return self.coefficients.norm_scale / HOLD


def spans(gram: Sequence[int], steps: int, dtype: torch.dtype) -> tuple[tuple[int, int], ...]:
    """Return the runs of steps ``[start, stop)`` that share a Gram matrix, when it is rebuilt after the steps ``gram``.

    Raises:
        ArgumentError: restarts that do not rise within 1 to ``steps - 1``, or too few of them for a dtype of 16 bits.
    """
    edges = (0, *gram, steps)
    if any(start >= stop for start, stop in pairwise(edges)):
        raise ArgumentError(
            f"gram={tuple(gram)}: want rising restarts, each between 1 and {steps - 1} for {steps} steps"
        )
    runs = tuple(pairwise(edges))
    longest = max(stop - start for start, stop in runs)
    if dtype.itemsize == 2 and longest > MAX_STEPS_ON_ONE_GRAM:
        raise ArgumentError(
            f"gram={tuple(gram)} takes {longest} of {steps} steps on one Gram matrix; beyond {MAX_STEPS_ON_ONE_GRAM}, "
            f"errors grow out of hand in {dtype}. Restart after e.g. gram={tuple(range(2, steps, 3))}, or use float32"
        )
    return runs


def gram_is_cheaper(rows: int, columns: int) -> bool:
    """Return whether a matrix is rectangular enough for the Gram form, with any restarts.

    A step that continues on a Gram matrix saves two products with the long side (``4 s² l``) and adds three of the
    short side (``6 s³``).
    """
    short, long = sorted((rows, columns))
    return 2 * long > 3 * short


def flops(rows: int, columns: int, steps: int, gram: Sequence[int] | None = None) -> int:
    """Return the floating-point operations of ``orthogonalize``; one multiply-add is two.

    A Gram matrix and its use are ``2 s² l`` each, of short side ``s`` and long side ``l``, and its square is ``2 s³``.
    The plain form builds one at every step; the Gram form builds one at the start and at each restart, and every other
    step has three more products of ``2 s³``.  A cubic step has no square, which is counted all the same.
    """
    short, long = sorted((rows, columns))
    num_grams = steps if gram is None or not gram_is_cheaper(rows, columns) else len(gram) + 1
    return 4 * short**2 * long * num_grams + 2 * short**3 * (steps + 3 * (steps - num_grams))
