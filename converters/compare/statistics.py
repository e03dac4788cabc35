"""The differences of one tensor, accumulated part by part."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..translate.conventions import Words
from .numeric import F64, as_float64


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Two numbers are close if they differ by at most ``atol + rtol * max(|a|, |b|)``; None asks for equal bits."""

    rtol: float | None = None
    atol: float | None = None

    @property
    def exact(self) -> bool:
        return self.rtol is None and self.atol is None

    def far(self, a: F64, b: F64) -> int:
        """The number of pairs that are not close; a NaN is close to a NaN only."""
        if self.exact:
            return 0
        allowed = (self.atol or 0) + (self.rtol or 0) * np.maximum(np.abs(a), np.abs(b))
        with np.errstate(invalid="ignore"):
            close = (np.abs(a - b) <= allowed) | (a == b) | (np.isnan(a) & np.isnan(b))
        return int(close.size - np.count_nonzero(close))


@dataclass(frozen=True, slots=True)
class Statistics:
    """How the elements of a tensor differ; sums are in float64, over pairs of finite numbers.

    Attributes:
        elements: the number of elements (real and imaginary parts count as two).
        changed: the number of elements whose bits, or if the dtypes differ whose values, differ.
        far: the number of those that are not close by the tolerance.
        max_abs: the largest absolute difference.
        max_rel: the largest difference in terms of the larger of two magnitudes.
        norm_a, norm_b, norm_change: the 2-norms of both and of their difference.
        dot: their scalar product.
        nonfinite_a, nonfinite_b: the numbers of infinite or NaN elements.
    """

    elements: int = 0
    changed: int = 0
    far: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    norm_a: float = 0.0
    norm_b: float = 0.0
    norm_change: float = 0.0
    dot: float = 0.0
    nonfinite_a: int = 0
    nonfinite_b: int = 0

    @property
    def rms_change(self) -> float:
        """The root mean square of the difference."""
        return self.norm_change / math.sqrt(self.elements) if self.elements else 0.0

    @property
    def cosine(self) -> float | None:
        """The cosine of the angle between the two; None if one is zero."""
        norms = self.norm_a * self.norm_b
        return max(-1.0, min(1.0, self.dot / norms)) if norms else None

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(
            self.elements + other.elements,
            self.changed + other.changed,
            self.far + other.far,
            max(self.max_abs, other.max_abs),
            max(self.max_rel, other.max_rel),
            math.hypot(self.norm_a, other.norm_a),
            math.hypot(self.norm_b, other.norm_b),
            math.hypot(self.norm_change, other.norm_change),
            self.dot + other.dot,
            self.nonfinite_a + other.nonfinite_a,
            self.nonfinite_b + other.nonfinite_b,
        )


def statistics_of(a: Words, a_dtype: str, b: Words, b_dtype: str, tolerance: Tolerance) -> Statistics:
    """The statistics of two parts of the same shape.  Types that are not numbers have only counts."""
    left, right = as_float64(a, a_dtype), as_float64(b, b_dtype)
    if left is None or right is None or left.size != right.size:
        if a.shape != b.shape or a.dtype != b.dtype:
            return Statistics(a.size, a.size, a.size)
        changed = int(np.count_nonzero(a != b))
        return Statistics(a.size, changed, changed)
    same_type = a_dtype == b_dtype
    differ = a.reshape(-1) != b.reshape(-1) if same_type else ~((left == right) | (np.isnan(left) & np.isnan(right)))
    changed, far = int(np.count_nonzero(differ)), tolerance.far(left, right)
    finite_a, finite_b = np.isfinite(left), np.isfinite(right)
    bad = [int(left.size - np.count_nonzero(finite)) for finite in (finite_a, finite_b)]
    if any(bad):
        both = finite_a & finite_b
        left, right = left[both], right[both]
    change = right - left
    largest = np.maximum(np.abs(left), np.abs(right))
    relative = np.divide(np.abs(change), largest, out=np.zeros_like(change), where=largest > 0)
    return Statistics(
        finite_a.size,
        changed,
        far,
        float(np.abs(change).max(initial=0.0)),
        float(relative.max(initial=0.0)),
        _norm(left),
        _norm(right),
        _norm(change),
        float(left @ right),
        *bad,
    )


def _norm(values: F64) -> float:
    """The 2-norm; scaled where squares of float64 would overflow or vanish."""
    largest = float(np.abs(values).max(initial=0.0))
    if largest == 0.0 or 1e-140 < largest < 1e140:
        return float(np.linalg.norm(values))
    return float(np.linalg.norm(values / largest)) * largest
