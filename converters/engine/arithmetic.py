"""Arithmetic on raw elements: products in float64, rounded once to the dtype that is written."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...names.errors import SourceError

Words = NDArray[Any]
"""Raw elements as unsigned words of their size; elements of 16 bytes as two words each, in a last dim of 2."""

Values64 = NDArray[np.float64]

NATIVE_FLOATS: Mapping[str, str] = MappingProxyType({"float64": "<f8", "float32": "<f4", "float16": "<f2"})
"""The floating-point dtypes that numpy has, by torch's names."""

FLOATS = (*NATIVE_FLOATS, "bfloat16")
"""The dtypes whose elements are computed with."""


def bfloat16_words(values: Values64) -> Words:
    """Return the bits of the nearest numbers of bfloat16, ties to even.

    Rounds to float32 first.  That changes the second rounding only where it gives the middle of two numbers of
    bfloat16, and the value is not it: there the float32 number beside it, on the value's side, is taken.
    """
    near = values.astype("<f4")
    bits = near.view("<u4")
    middle = (bits & 0xFFFF) == 0x8000
    if middle.any():
        back = near.astype(np.float64)
        inexact = middle & (back != values)
        if inexact.any():
            above = np.abs(values) > np.abs(back)
            bits = bits + (inexact & above).astype("<u4") - (inexact & ~above).astype("<u4")
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    words: Words = rounded.astype("<u2")
    nans = np.isnan(values)
    if nans.any():
        words[nans] = near.view("<u4")[nans] >> 16 | 0x40
    return words


def rounded(values: Values64, to: str) -> Words:
    """Return the bits of the nearest numbers of a dtype of `FLOATS`, ties to even."""
    if to == "bfloat16":
        return bfloat16_words(values)
    numbers = values.astype(NATIVE_FLOATS[to])
    return numbers.view(f"<u{numbers.itemsize}")


def scaled(words: Words, dtype: str, by: float, to: str | None = None) -> Words:
    """Return elements multiplied by a factor, each rounded once (to nearest, ties to even).

    Args:
        words: the raw elements, of any shape.
        dtype: torch's name of their dtype.
        to: that of the result; None: the same.

    Raises:
        SourceError: elements of these dtypes cannot be computed.
    """
    to = to or dtype
    for name in (dtype, to):
        if name not in FLOATS:
            raise SourceError(f"state of dtype {name} cannot be scaled or cast; expected one of {', '.join(FLOATS)}")
    values = (words.astype("<u4") << 16).view("<f4") if dtype == "bfloat16" else words.view(NATIVE_FLOATS[dtype])
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return rounded(values.astype(np.float64) * by, to)
