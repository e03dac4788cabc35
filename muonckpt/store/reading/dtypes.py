"""The table of element types, by torch's name without the prefix (``"float32"``).

It lacks the quantised and sub-byte types that torch cannot save as a plain tensor.

Source: ``_dtype_to_storage_type_map`` and ``_new_dtypes`` in ``torch/storage.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...names.errors import SourceError


@dataclass(frozen=True, slots=True)
class DType:
    """Describes an element type.

    Attributes:
        itemsize: in bytes.
        storage: the class that ``torch.save`` names; None for newer types, which it saves as untyped bytes.
    """

    itemsize: int
    storage: str | None = None

    @property
    def bits(self) -> str:
        """The numpy dtype of the little-endian bits as unsigned words: one an element, two of 8 bytes if it has 16."""
        return f"<u{min(self.itemsize, 8)}"


DTYPES: Mapping[str, DType] = MappingProxyType(
    {
        "float64": DType(8, "DoubleStorage"),
        "float32": DType(4, "FloatStorage"),
        "float16": DType(2, "HalfStorage"),
        "bfloat16": DType(2, "BFloat16Storage"),
        "int64": DType(8, "LongStorage"),
        "int32": DType(4, "IntStorage"),
        "int16": DType(2, "ShortStorage"),
        "int8": DType(1, "CharStorage"),
        "uint8": DType(1, "ByteStorage"),
        "bool": DType(1, "BoolStorage"),
        "complex128": DType(16, "ComplexDoubleStorage"),
        "complex64": DType(8, "ComplexFloatStorage"),
        "complex32": DType(4),
        "uint64": DType(8),
        "uint32": DType(4),
        "uint16": DType(2),
        "float8_e4m3fn": DType(1),
        "float8_e4m3fnuz": DType(1),
        "float8_e5m2": DType(1),
        "float8_e5m2fnuz": DType(1),
        "float8_e8m0fnu": DType(1),
        "float4_e2m1fn_x2": DType(1),
        "bits16": DType(2),
        "bits8": DType(1),
        "bits4x2": DType(1),
        "bits2x4": DType(1),
        "bits1x8": DType(1),
        "bcomplex32": DType(4),
    }
)

PARTS: Mapping[str, str] = MappingProxyType(
    {"complex128": "float64", "complex64": "float32", "complex32": "float16", "bcomplex32": "bfloat16"}
)
"""The type of each of the two parts of a complex element."""


def dtype(name: str) -> DType:
    """Return the element type of this name; raise `SourceError` if it is unknown."""
    try:
        return DTYPES[name]
    except KeyError:
        raise SourceError(f"expected one of the dtypes {', '.join(DTYPES)}, found {name!r}") from None


def itemsize(name: str) -> int:
    """Return the bytes of one element; raise `SourceError` if the dtype is unknown."""
    return dtype(name).itemsize


# --- Rounding ---------------------------------------------------------------------------------------------------------

Values64 = NDArray[np.float64]

NATIVE_FLOATS: Mapping[str, str] = MappingProxyType({"float64": "<f8", "float32": "<f4", "float16": "<f2"})
"""The floating-point dtypes that numpy has, by torch's names."""

FLOATS = (*NATIVE_FLOATS, "bfloat16")
"""The dtypes whose elements are computed with."""


def bfloat16_words(values: Values64) -> NDArray[Any]:
    """Return the bits of the nearest numbers of bfloat16, ties to even."""
    floats = values.astype("<f4")
    bits = floats.view("<u4")
    # Where the first rounding gives the middle of two numbers of bfloat16, and the value is not it, the second one
    # would go by even bits: there the float32 number beside it, on the value's side, is rounded.
    is_middle = (bits & 0xFFFF) == 0x8000
    if is_middle.any():
        doubles = floats.astype(np.float64)
        is_inexact = is_middle & (doubles != values)
        if is_inexact.any():
            is_above = np.abs(values) > np.abs(doubles)
            bits = bits + (is_inexact & is_above).astype("<u4") - (is_inexact & ~is_above).astype("<u4")
    words: NDArray[Any] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    # The addition could carry a NaN into infinity; this keeps it, and makes it quiet.
    nans = np.isnan(values)
    if nans.any():
        words[nans] = floats.view("<u4")[nans] >> 16 | 0x40
    return words


def rounded(values: Values64, to: str) -> NDArray[Any]:
    """Return the bits of the nearest numbers of a dtype of `FLOATS`, ties to even."""
    if to == "bfloat16":
        return bfloat16_words(values)
    numbers = values.astype(NATIVE_FLOATS[to])
    return numbers.view(f"<u{numbers.itemsize}")
