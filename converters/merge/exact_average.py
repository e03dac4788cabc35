"""Weighted averages that are rounded once.

A sum is carried in two float64 numbers, the second of which holds what the first lacks (T. J. Dekker, "A floating-point
technique for extending the available precision", 1971; Ogita, Rump and Oishi, "Accurate sum and dot product", 2005).
Weights are integers over a common divisor where float64 can hold these, so that the sum of a few numbers of 16 or 32
bits is exact.  It is rounded to odd in float64, and from there to the nearest number of the type, ties to even: as if
computed exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from ...errors import SourceError
from ..compare.elements import F64
from ..engine.arithmetic import Words, bfloat16_words

SIGNIFICAND = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
"""The types that are averaged, with the bits of their significands."""

_EXACT = 53
_SPLITTER = float(2**27 + 1)


@dataclass(frozen=True, slots=True)
class AverageWeights:
    """Factors of elements, as two float64 numbers each, and the divisor of their sum."""

    factors: tuple[tuple[float, float], ...]
    divisor: float

    @classmethod
    def of(cls, weights: Sequence[Fraction]) -> AverageWeights:
        """Return the coefficients of weights: exact if float64 can hold their numerators, else to 106 bits."""
        divisor = math.lcm(*(weight.denominator for weight in weights))
        numerators = [int(weight * divisor) for weight in weights]
        if max(divisor, *numerators) < 2**_EXACT:
            return cls(tuple((float(numerator), 0.0) for numerator in numerators), float(divisor))
        return cls(tuple((float(weight), float(weight - Fraction(float(weight)))) for weight in weights), 1.0)


def averaged(terms: Iterable[F64], coefficients: AverageWeights, dtype: str, significand: int | None = None) -> Words:
    """Return the average of numbers as words of a dtype of `SIGNIFICAND`.

    Infinite numbers and NaNs go through it as through any sum.

    Args:
        terms: a flat array for each coefficient, of numbers of ``dtype``; they are read once, in order.
        significand: the most bits that the significands of the numbers have, if they are of other types.

    Raises:
        SourceError: finite numbers of float64 are too large to be added.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        finite: NDArray[np.bool_] = np.asarray(True)

        def watched() -> Iterator[F64]:
            nonlocal finite
            for numbers in terms:
                finite = finite & np.isfinite(numbers)
                yield numbers

        wide = dtype == "float64"
        total, rest = _sum(watched() if wide else terms, coefficients.factors, significand or SIGNIFICAND[dtype])
        if wide and (finite & ~np.isfinite(total)).any():
            raise SourceError("numbers of float64 near the largest one cannot be averaged: their sum overflows")
        if rest is not None:
            total, rest = _two_sum(total, np.where(np.isfinite(total) & np.isfinite(rest), rest, 0))
        if rest is None and not wide and coefficients.divisor < 2 ** (_EXACT - 1 - SIGNIFICAND[dtype]):
            near = np.ascontiguousarray(total / coefficients.divisor)
            if _is_power_of_two(coefficients.divisor) or not _may_be_middle(near, total, coefficients.divisor, dtype):
                return _words(near, dtype)
        total, rest = _quotient(total, rest, coefficients.divisor)
        if wide:
            return np.ascontiguousarray(total, "<f8").view("<u8")
        return _words(_to_odd(total, rest), dtype)


def _words(values: F64, dtype: str) -> Words:
    """Round to the nearest numbers of a dtype, ties to even."""
    if dtype == "bfloat16":
        return bfloat16_words(values)
    kind = f"<f{4 if dtype == 'float32' else 2}"
    return values.astype(kind).view(kind.replace("f", "u"))


def _may_be_middle(near: F64, total: F64, divisor: float, dtype: str) -> bool:
    """Return whether a rounded quotient may be the middle of two numbers of the dtype while the exact one is not.

    Everywhere else the rounded quotient is on the same side of every middle as the exact one, because rounding keeps
    the order; so both round to the same number.  A middle has one bit more than the numbers, so its product with the
    divisor is exact, and is the total if the quotient is.
    """
    spare = _EXACT - 1 - SIGNIFICAND[dtype]
    like_middles = (near.view(np.int64) & ((1 << spare) - 1)) == 0
    return bool((near[like_middles] * divisor != total[like_middles]).any())


def _is_power_of_two(number: float) -> bool:
    return math.frexp(number)[0] == 0.5


def _sum(terms: Iterable[F64], factors: Sequence[tuple[float, float]], significand: int) -> tuple[F64, F64 | None]:
    """Sum products in two numbers, of which the second is not always small; None if it is zero everywhere."""
    total: F64 | None = None
    rest: F64 | None = None
    for numbers, (factor, correction) in zip(terms, factors, strict=True):
        product = numbers if factor == 1 else numbers * factor
        if not (factor.is_integer() and abs(factor) < 2 ** (_EXACT - significand)):
            rest = _plus(rest, _product_error(numbers, factor, product) + correction * numbers)
        if total is None:
            total = product
            continue
        added = total + product
        virtual = added - total
        rest = _plus(rest, (total - (added - virtual)) + (product - virtual))
        total = added
    assert total is not None, "there is at least one term"
    return total, rest


def _plus(rest: F64 | None, more: F64) -> F64 | None:
    if rest is None:
        return more if more.any() else None
    return rest + more


def _two_sum(large: F64, small: F64) -> tuple[F64, F64]:
    """Return a sum in two numbers that do not overlap; ``small`` is not larger than ``large``, or that is zero."""
    total = large + small
    virtual = total - large
    return total, (large - (total - virtual)) + (small - virtual)


def _product_error(numbers: F64, factor: float, product: F64) -> F64:
    """Return the exact product minus the rounded one."""
    high, low = _halves(numbers)
    factor_high, factor_low = (float(half) for half in _halves(np.float64(factor)))
    error: F64 = ((high * factor_high - product) + high * factor_low + low * factor_high) + low * factor_low
    return error


def _halves(number: F64 | np.float64) -> tuple[F64, F64]:
    """Split numbers into sums of two with half the digits each."""
    scaled_up = _SPLITTER * number
    high = scaled_up - (scaled_up - number)
    return np.asarray(high), np.asarray(number - high)


def _quotient(total: F64, rest: F64 | None, divisor: float) -> tuple[F64, F64 | None]:
    if divisor == 1:
        return total, rest
    if _is_power_of_two(divisor):
        return total / divisor, None if rest is None else rest / divisor
    quotient = total / divisor
    product = quotient * divisor
    remainder = (total - product) - _product_error(quotient, divisor, product)
    return _two_sum(quotient, (remainder if rest is None else remainder + rest) / divisor)


def _to_odd(total: F64, rest: F64 | None) -> F64:
    """Round to odd: where there is a rest, take the neighbour of the sum whose last bit is 1."""
    inexact = np.False_ if rest is None else (rest != 0) & np.isfinite(total) & np.isfinite(rest)
    if rest is None or not inexact.any():
        return np.ascontiguousarray(total)
    towards_zero = inexact & (np.signbit(rest) != np.signbit(total))
    bits = np.ascontiguousarray(total).view(np.int64) - towards_zero
    odd: F64 = (bits | inexact).view(np.float64)
    return odd
