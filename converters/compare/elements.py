"""Compares two tensors element by element, in bounded memory: raw bits, or the numbers that they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any

import numpy as np

from ...algebra.box import Box
from ...store.reading.blocks import bands
from ...store.reading.dtypes import DTYPES, PARTS, Values64, itemsize
from ...store.reading.payloads import Payloads, check_chunk
from ..engine.outputs import OutputTensor, Words

_NATIVE = {"float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"}

# Exponent bits, mantissa bits, exponent bias; whether the largest magnitude is NaN (OCP's "fn"), or a negative zero is
# (arXiv:2206.02915's "fnuz").
_FLOAT8_FORMATS = {
    "float8_e4m3fn": (4, 3, 7, "fn"),
    "float8_e4m3fnuz": (4, 3, 8, "fnuz"),
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e5m2fnuz": (5, 2, 16, "fnuz"),
}


_NUMERIC = {*_NATIVE, *_FLOAT8_FORMATS, *PARTS, "bool", "bfloat16", "float8_e8m0fnu"}


def has_numbers(dtype: str) -> bool:
    """Return whether `as_float64` takes this dtype; some types are only bits."""
    return dtype in _NUMERIC


def as_float64(words: Words, dtype: str) -> Values64:
    """Convert raw words to numbers, flat; complex ones to two.  Integers above 2**53 are rounded."""
    flat = np.ascontiguousarray(words).reshape(-1)
    if dtype == "bool":
        return flat.astype(np.float64)
    # numpy has these; bfloat16 is the upper half of float32, and a table has the numbers of a byte.
    if dtype in _NATIVE:
        return flat.view(np.dtype(dtype).newbyteorder("<")).astype(np.float64)
    if dtype == "bfloat16":
        return (flat.astype("<u4") << 16).view("<f4").astype(np.float64)
    if dtype in PARTS:
        return as_float64(flat.view(DTYPES[PARTS[dtype]].bits), PARTS[dtype])
    if dtype == "float8_e8m0fnu":
        return np.where(flat == 255, np.nan, np.exp2(flat.astype(np.float64) - 127))
    numbers: Values64 = _float8_values(dtype)[flat]
    return numbers


@cache
def _float8_values(dtype: str) -> Values64:
    """Return the values of all 256 words of an 8-bit float."""
    # Numbers without an exponent are subnormal; the largest words, or a negative zero, may be no numbers.
    exponent_bits, mantissa_bits, bias, kind = _FLOAT8_FORMATS[dtype]
    words = np.arange(256)
    exponent = words >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = (words & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
    normal = (1 + mantissa) * np.exp2((exponent - bias).astype(np.float64))
    values: Values64 = np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), normal)
    if kind == "ieee":
        largest = exponent == (1 << exponent_bits) - 1
        values = np.where(largest, np.where(mantissa == 0, np.inf, np.nan), values)
    if kind == "fn":
        values = np.where(words & 0x7F == 0x7F, np.nan, values)
    values = np.where(words & 0x80, -values, values)
    return np.where(words == 0x80, np.nan, values) if kind == "fnuz" else values


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Two numbers are close if they differ by at most ``atol + rtol * max(|a|, |b|)``; None asks for equal bits."""

    rtol: float | None = None
    atol: float | None = None

    @property
    def exact(self) -> bool:
        return self.rtol is None and self.atol is None

    def far(self, a: Values64, b: Values64) -> int:
        """Count the pairs that are not close; a NaN is close to a NaN only."""
        if self.exact:
            return 0
        limits = (self.atol or 0) + (self.rtol or 0) * np.maximum(np.abs(a), np.abs(b))
        with np.errstate(invalid="ignore"):
            close = (np.abs(a - b) <= limits) | (a == b) | (np.isnan(a) & np.isnan(b))
        return int(close.size - np.count_nonzero(close))


@dataclass(frozen=True, slots=True)
class Statistics:
    """Differences between the elements of two tensors; sums are in float64, over pairs of finite numbers.

    Attributes:
        elements: their number (real and imaginary parts count as two).
        changed: how many differ in bits, or if the dtypes differ in value.
        far: how many of them are not close by the tolerance.
        max_abs: the largest absolute difference.
        max_rel: the largest difference, divided by the larger of the two magnitudes.
        norm_a, norm_b, norm_change: the 2-norms of both and of their difference.
        nonfinite_a, nonfinite_b: how many are infinite or NaN.
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
        return self.norm_change / math.sqrt(self.elements) if self.elements else 0.0

    @property
    def cosine(self) -> float | None:
        """Return the cosine of the angle between the two; None if one is zero."""
        norms = self.norm_a * self.norm_b
        return max(-1.0, min(1.0, self.dot / norms)) if norms else None

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(
            self.elements + other.elements,
            changed=self.changed + other.changed,
            far=self.far + other.far,
            max_abs=max(self.max_abs, other.max_abs),
            max_rel=max(self.max_rel, other.max_rel),
            norm_a=math.hypot(self.norm_a, other.norm_a),
            norm_b=math.hypot(self.norm_b, other.norm_b),
            norm_change=math.hypot(self.norm_change, other.norm_change),
            dot=self.dot + other.dot,
            nonfinite_a=self.nonfinite_a + other.nonfinite_a,
            nonfinite_b=self.nonfinite_b + other.nonfinite_b,
        )


def statistics_of(
    a: Words, a_dtype: str, b: Words, b_dtype: str, tolerance: Tolerance, are_codes: bool = False
) -> Statistics:
    """Compare two parts of the same shape.  Types that are not numbers, and codes, have only counts."""
    is_same_type = a_dtype == b_dtype
    are_numbers = has_numbers(a_dtype) and has_numbers(b_dtype) and not are_codes
    numbers = [as_float64(a, a_dtype), as_float64(b, b_dtype)] if are_numbers else []
    if not numbers or numbers[0].size != numbers[1].size:
        is_comparable = a.shape == b.shape and a.dtype == b.dtype
        changed = int(np.count_nonzero(a != b)) if is_comparable else a.size
        return Statistics(a.size, changed, changed)
    # Bits are compared where both have them; numbers are where types differ.
    values_a, values_b = numbers
    differ = (
        a.reshape(-1) != b.reshape(-1)
        if is_same_type
        else ~((values_a == values_b) | (np.isnan(values_a) & np.isnan(values_b)))
    )
    changed, far = int(np.count_nonzero(differ)), tolerance.far(values_a, values_b)
    # Sums are over pairs of finite numbers.
    finite_a, finite_b = np.isfinite(values_a), np.isfinite(values_b)
    nonfinite_a, nonfinite_b = (int(finite.size - np.count_nonzero(finite)) for finite in (finite_a, finite_b))
    if nonfinite_a or nonfinite_b:
        is_finite = finite_a & finite_b
        values_a, values_b = values_a[is_finite], values_b[is_finite]
    change = values_b - values_a
    largest = np.maximum(np.abs(values_a), np.abs(values_b))
    relative = np.divide(np.abs(change), largest, out=np.zeros_like(change), where=largest > 0)
    return Statistics(
        finite_a.size,
        changed=changed,
        far=far,
        max_abs=float(np.abs(change).max(initial=0.0)),
        max_rel=float(relative.max(initial=0.0)),
        norm_a=_norm(values_a),
        norm_b=_norm(values_b),
        norm_change=_norm(change),
        dot=float(values_a @ values_b),
        nonfinite_a=nonfinite_a,
        nonfinite_b=nonfinite_b,
    )


def _norm(values: Values64) -> float:
    """Return the 2-norm, scaled where squares of float64 would overflow or vanish."""
    # Most norms need no scaling, which costs another pass.
    largest = float(np.abs(values).max(initial=0.0))
    if largest == 0.0 or 1e-140 < largest < 1e140:
        return float(np.linalg.norm(values))
    return float(np.linalg.norm(values / largest)) * largest


BYTES_PER_ELEMENT = 80
"""Memory that the comparison of one element takes: two words, their numbers, and computed values."""

SAME, MOVED, CLOSE, CHANGED = "same", "moved", "close", "changed"
"""The same bits in the same boxes; in other boxes; other bits within the tolerance; and anything else."""

ELEMENTS, BITS = "elements", "bits"
"""Whether tensors were compared as numbers, or as codes that are none without their scales."""


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """The difference between two tensors of one key.

    Attributes:
        status: ``same``, ``moved`` (the same elements in other boxes), ``close`` (within the tolerance), ``changed``.
        by: ``fingerprint`` if no element was read, else ``elements``; ``bits`` if these are codes of quantised weights;
            ``shape`` if shapes differ.
        statistics: None if elements were not read.
    """

    key: str
    status: str
    by: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    statistics: Statistics | None = None

    def to_json(self) -> dict[str, Any]:
        """Return JSON data; statistics are null where elements were not read."""
        names = ("elements", "changed", "far", "max_abs", "max_rel", "norm_a", "norm_b", "rms_change", "cosine",
                 "nonfinite_a", "nonfinite_b")  # fmt: skip
        statistics = dict.fromkeys(names)
        if self.statistics is not None and self.by == BITS:
            statistics |= {"elements": self.statistics.elements, "changed": self.statistics.changed}
        elif self.statistics is not None:
            statistics = {name: getattr(self.statistics, name) for name in names}
        return {"key": self.key, "status": self.status, "by": self.by, "shapes": self.shapes, "dtypes": self.dtypes,
                **statistics}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredSide:
    """A tensor of a checkpoint, and the bytes of its chunks."""

    tensor: OutputTensor
    payloads: Payloads

    def check(self) -> None:
        """Compare the chunks with their checksums; raise `SourceError` if one is damaged."""
        record = replace(self.tensor.record, dtype=self.tensor.stored_dtype)
        for chunk in chain.from_iterable(self.tensor.sources):
            if chunk.box.numel:
                check_chunk(self.payloads, record, chunk)

    def words(self, box: Box) -> Words:
        return self.tensor.elements(self.payloads, self.tensor.layout.fragments, box)


def known_to_be_equal(a: OutputTensor, b: OutputTensor) -> bool:
    """Return whether fingerprints say that two tensors have the same elements."""
    record_a, record_b = a.record, b.record
    is_same_kind = (record_a.shape, record_a.dtype) == (record_b.shape, record_b.dtype)
    return is_same_kind and record_a.fingerprint is not None and record_a.fingerprint == record_b.fingerprint


def compare_elements(
    a: StoredSide,
    b: StoredSide,
    tolerance: Tolerance,
    memory: int,
    passed: Callable[[int], None],
    are_codes: bool = False,
) -> TensorDifference:
    """Compare two tensors of the same shape.

    Args:
        are_codes: one of them is quantised.
        memory: bytes to use.
        passed: receives bytes that have been compared.
    """
    record_a, record_b = a.tensor.record, b.tensor.record
    a.check()
    b.check()
    # As many elements at a time as fit in memory.
    statistics = Statistics()
    for band in bands(Box.of(record_a.shape), max(memory // BYTES_PER_ELEMENT, 1)):
        for box in band.boxes:
            words_a, words_b = a.words(box), b.words(box)
            statistics += statistics_of(words_a, record_a.dtype, words_b, record_b.dtype, tolerance, are_codes)
            passed(box.numel * (itemsize(record_a.dtype) + itemsize(record_b.dtype)))
    status = CHANGED if tolerance.exact or statistics.far else CLOSE
    if statistics.changed == 0 and record_a.dtype == record_b.dtype:
        status = SAME if a.tensor.boxes == b.tensor.boxes else MOVED
    shapes, dtypes = (record_a.shape, record_b.shape), (record_a.dtype, record_b.dtype)
    by = BITS if are_codes else ELEMENTS
    return TensorDifference(record_a.key, status, by, shapes=shapes, dtypes=dtypes, statistics=statistics)
