"""Elements that are infinite or NaN, in every floating type that torch can save."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .dtypes import dtype

# (mask, value): an element is infinite or NaN if bits & mask == value.  IEEE 754 and bfloat16; the OCP 8-bit formats;
# the "fnuz" ones, whose only NaN is a negative zero (arXiv:2206.02915); the OCP MX scale.
_NONFINITE = {"float16": (0x7C00, 0x7C00), "bfloat16": (0x7F80, 0x7F80), "float8_e5m2": (0x7C, 0x7C)}
_NONFINITE |= {"float8_e4m3fn": (0x7F, 0x7F), "float8_e8m0fnu": (0xFF, 0xFF)}
_NONFINITE |= {"float8_e4m3fnuz": (0xFF, 0x80), "float8_e5m2fnuz": (0xFF, 0x80)}
_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def nonfinite(words: NDArray[Any], name: str) -> int:
    """The number of elements, given as raw bits, that are infinite or NaN; 0 for types that have neither."""
    parts = _PARTS.get(name, name)
    flat = words.reshape(-1).view(dtype(parts).bits)
    if parts in ("float32", "float64"):  # numpy's own test is vectorised, but lacks the other types
        return int(flat.size - np.count_nonzero(np.isfinite(flat.view(parts))))
    if parts not in _NONFINITE:
        return 0
    mask, value = map(flat.dtype.type, _NONFINITE[parts])
    return int(np.count_nonzero((flat & mask) == value))
