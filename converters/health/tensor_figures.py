"""The figures of one tensor, read in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from ...box import Box
from ...store.reading.bands import bands
from ...store.reading.dtypes import DTYPES, itemsize
from ..compare.numeric import F64, as_float64
from ..compare.pair import StoredSide
from .spectrum import Spectrum, spectrum_of

_ELEMENT_BYTES = 40
"""The most memory that one element takes: its word, its number, and what is computed of it."""


@dataclass(frozen=True, slots=True)
class ElementFigures:
    """Of the finite elements of a tensor: their number, 2-norm, largest magnitude and zeros; and how many are not
    finite."""

    finite: int = 0
    norm: float = 0.0
    largest: float = 0.0
    zeros: int = 0
    nan: int = 0
    infinite: int = 0

    def __add__(self, other: ElementFigures) -> ElementFigures:
        return ElementFigures(
            self.finite + other.finite,
            math.hypot(self.norm, other.norm),
            max(self.largest, other.largest),
            self.zeros + other.zeros,
            self.nan + other.nan,
            self.infinite + other.infinite,
        )

    @property
    def elements(self) -> int:
        return self.finite + self.nan + self.infinite

    @property
    def rms(self) -> float:
        """The root mean square."""
        return self.norm / math.sqrt(self.finite) if self.finite else 0.0


@dataclass(frozen=True, slots=True)
class TensorFigures:
    """A tensor.

    Attributes:
        key, name, role: its key, its parameter, and what it is for: weights, momentum, masters or moments.
        figures: of its elements.
        spectra: of its matrices, one for each index of the dims before the last two; none if it has no matrix or an
            element is not finite.
    """

    key: str
    name: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    figures: ElementFigures
    spectra: tuple[Spectrum, ...]

    @property
    def stable_rank(self) -> float | None:
        """The median of its matrices' stable ranks; None if there is none."""
        ranks = [rank for spectrum in self.spectra if (rank := spectrum.stable_rank) is not None]
        return median(ranks) if ranks else None

    @property
    def spectrum(self) -> tuple[float, ...]:
        """The largest singular values of the matrix whose largest is the greatest."""
        return max((spectrum.values for spectrum in self.spectra if spectrum.values), default=())

    def to_json(self) -> dict[str, Any]:
        """JSON data."""
        f = self.figures
        return {"key": self.key, "name": self.name, "role": self.role, "shape": self.shape, "dtype": self.dtype,
                "elements": f.elements, "norm": f.norm, "rms": f.rms, "largest": f.largest,
                "zeros": f.zeros / f.elements if f.elements else 0.0, "nan": f.nan, "infinite": f.infinite,
                "stable_rank": self.stable_rank, "spectrum": self.spectrum}  # fmt: skip


def figures_of(
    stored: StoredSide, name: str, role: str, memory: int, sketch: bool, passed: Callable[[int], None]
) -> TensorFigures | None:
    """Read a tensor; None if its elements are not numbers.

    Args:
        memory: the most bytes to use.
        sketch: whether to sketch spectra, which reads matrices that are larger than ``memory`` several times.
        passed: receives bytes that have been read for the first time.

    Raises:
        SourceError: a chunk is damaged.
    """
    record = stored.tensor.record
    no_words = np.empty(0, DTYPES[record.dtype].bits)
    if as_float64(no_words, record.dtype) is None or record.dtype.startswith("complex"):
        return None
    stored.check()
    most = max(memory // _ELEMENT_BYTES, 1)
    total, spectra = ElementFigures(), []
    for matrix in _matrices(record.shape):
        kept: list[F64] = []
        fits = matrix.numel <= most
        own = ElementFigures()
        for rows in _rows(stored, matrix, most):
            own += _of(rows)
            passed(rows.size * itemsize(record.dtype))
            if fits:
                kept.append(rows)
        total += own
        if sketch and len(record.shape) >= 2 and own.finite == own.elements:
            again = partial(iter, kept) if fits else partial(_rows, stored, matrix, most)
            spectra.append(spectrum_of(record.shape[-1], again, own.norm, own.largest))
    return TensorFigures(record.key, name, role, record.shape, record.dtype, total, tuple(spectra))


def _matrices(shape: tuple[int, ...]) -> Iterator[Box]:
    """The matrices of a tensor; all of it if it has fewer than three dims."""
    for index in np.ndindex(shape[:-2]):
        yield Box((*index, *(0 for _ in shape[-2:])), (*(i + 1 for i in index), *shape[-2:]))


def _rows(stored: StoredSide, matrix: Box, most: int) -> Iterator[F64]:
    """The numbers of a matrix, some whole rows at a time if a row is not too long; those of a vector as one row."""
    columns = matrix.shape[-1] if matrix.shape else 1
    for band in bands(matrix, max(most, columns)):
        for box in band.boxes:
            numbers = as_float64(stored.words(box), stored.tensor.record.dtype)
            assert numbers is not None, "types that are not numbers are left out"
            yield numbers.reshape(-1, columns)


def _of(numbers: F64) -> ElementFigures:
    finite = np.isfinite(numbers)
    count, nan = int(np.count_nonzero(finite)), int(np.count_nonzero(np.isnan(numbers)))
    values = numbers if count == numbers.size else numbers[finite]
    largest = float(np.abs(values).max(initial=0.0))
    norm = float(np.linalg.norm(values / largest)) * largest if largest else 0.0
    return ElementFigures(count, norm, largest, count - int(np.count_nonzero(values)), nan, numbers.size - count - nan)
