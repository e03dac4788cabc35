"""Raw elements of any dtype as float64, exactly where float64 can hold them."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from ..translate.conventions import Words

F64 = NDArray[np.float64]

_NATIVE = {"float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"}
_COMPLEX = {"complex128": "<f8", "complex64": "<f4", "complex32": "<f2"}

# Exponent bits, mantissa bits, exponent bias; whether the largest magnitude is NaN (OCP's "fn"), or a negative zero is
# (arXiv:2206.02915's "fnuz").
_SMALL = {
    "float8_e4m3fn": (4, 3, 7, "fn"),
    "float8_e4m3fnuz": (4, 3, 8, "fnuz"),
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e5m2fnuz": (5, 2, 16, "fnuz"),
}


def as_float64(words: Words, dtype: str) -> F64 | None:
    """The numbers that raw words stand for, flat; complex ones as two.  None for types that are not numbers.

    Integers above 2**53 are rounded.
    """
    flat = np.ascontiguousarray(words).reshape(-1)
    if dtype == "bool":
        return flat.astype(np.float64)
    if dtype in _NATIVE:
        return flat.view(np.dtype(dtype).newbyteorder("<")).astype(np.float64)
    if dtype == "bfloat16":
        return (flat.astype("<u4") << 16).view("<f4").astype(np.float64)
    if dtype in _COMPLEX:
        return flat.view(_COMPLEX[dtype]).astype(np.float64)
    if dtype in _SMALL:
        numbers: F64 = _table(dtype)[flat]
        return numbers
    if dtype == "float8_e8m0fnu":
        return np.where(flat == 255, np.nan, np.exp2(flat.astype(np.float64) - 127))
    return None


@cache
def _table(dtype: str) -> F64:
    """The values of all 256 words of an 8-bit float."""
    exponent_bits, mantissa_bits, bias, kind = _SMALL[dtype]
    words = np.arange(256)
    exponent = words >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = (words & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
    normal = (1 + mantissa) * np.exp2((exponent - bias).astype(np.float64))
    values: F64 = np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), normal)
    if kind == "ieee":
        largest = exponent == (1 << exponent_bits) - 1
        values = np.where(largest, np.where(mantissa == 0, np.inf, np.nan), values)
    if kind == "fn":
        values = np.where(words & 0x7F == 0x7F, np.nan, values)
    values = np.where(words & 0x80, -values, values)
    return np.where(words == 0x80, np.nan, values) if kind == "fnuz" else values
