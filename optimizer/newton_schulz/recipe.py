"""What Newton-Schulz does to every matrix of a group, whatever its shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...coefficients import COEFFICIENTS, CoefficientSet, Triple
from .gram import spans

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

HOLD = 4.0
"""``X`` is held at four times its size, which moves the small elements of a large matrix away from the end of fp16.

Elements of a normalised ``m x n`` have an rms of ``1 / √(mn)``: 2^-13 at 4096 x 16384, and 2^-16 at 65536 x 65536,
where fp16 at this size is still normal; absolute rounding errors below it, 2^-27 each, are no more than bf16 makes of
singular values of 1e-3, and no set lifts smaller ones in five steps.  No larger power of two is safe: products hold
``HOLD⁴ σ⁴``, sets overshoot to ``σ = 2``, and a GPU may keep partial sums of fp16 products in fp16, which ends at 2^16.
Powers of two are exact, so bf16 and fp32 give the bits that they would give without.  The last step takes it back."""


EPS = 1e-15
"""The default of the smallest norm that a matrix is divided by, that of `vocabulary.MUON`.

It is where float32 stops measuring norms: the squares of smaller matrices' elements have few bits or none there, so the
norm of 512 x 512 elements that is 1e-21 is found too small, and the result is NaN.  Below it updates fade with their
momentum.  At 1e-7, which is usual elsewhere, they begin to fade while float32 measures their norms well."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The steps of Newton-Schulz, and the dtype in which they are computed.

    Attributes:
        coefficients: the polynomial of each step.
        steps: how many, at least 1; see :meth:`CoefficientSet.schedule` for more steps than the set has.
        dtype: bf16, fp16, fp32 or fp64: every operand of a product is rounded to it, and so is the result.
        eps: a lower bound on the Frobenius norm, in the units of the matrix.
        gram: None for the plain form; else the steps after which the Gram form rebuilds its Gram matrix.

    Raises:
        ValueError: no step, another dtype, or restarts that are out of order or too few (:func:`.gram.spans`).
    """

    coefficients: CoefficientSet = COEFFICIENTS["quintic"]
    steps: int = 5
    dtype: torch.dtype = torch.bfloat16
    eps: float = EPS
    gram: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"Newton-Schulz runs in {', '.join(map(str, _DTYPES))}, got {self.dtype}")
        if self.steps < 1:
            raise ValueError(f"Newton-Schulz needs at least one step, got steps={self.steps}")
        if self.gram is not None:
            spans(self.gram, self.steps, self.dtype)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The runs of steps that share a Gram matrix; none in the plain form."""
        return () if self.gram is None else spans(self.gram, self.steps, self.dtype)

    @property
    def triples(self) -> tuple[Triple, ...]:
        """The polynomials for a matrix that is held at `HOLD` times its size."""
        held = [(a, b / HOLD**2, c / HOLD**4) for a, b, c in self.coefficients.schedule(self.steps)]
        a, b, c = held[-1]
        return (*held[:-1], (a / HOLD, b / HOLD, c / HOLD))

    @property
    def scale(self) -> float:
        """What a matrix is divided by for that, besides its norm."""
        return self.coefficients.norm_scale / HOLD
