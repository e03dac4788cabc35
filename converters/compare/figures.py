"""The figures of one tensor, read in bounded memory: norms, zeros, and a sketch of its spectrum."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from ...algebra.box import Box
from ...record.record import StateRecord
from ...store.reading.blocks import bands
from ...store.reading.dtypes import DTYPES, PARTS, itemsize
from ..engine.outputs import Words
from .elements import F64, StoredSide, as_float64

ELEMENT_BYTES = 40
"""Memory that one element takes: its word, its number, and what is computed of it."""


@dataclass(frozen=True, slots=True)
class ElementFigures:
    """Figures of elements; ``norm`` (2-norm), ``largest`` magnitude and ``zeros`` count the ``finite`` ones only."""

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
        return self.norm / math.sqrt(self.finite) if self.finite else 0.0


@dataclass(frozen=True, slots=True)
class TensorFigures:
    """The figures of a tensor.

    Attributes:
        name, role: its parameter, and what it is for: weights, momentum, masters or moments.
        spectra: of its matrices, one for each index of the dims before the last two; empty if it has none or an element
            is not finite.
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
        """Return the median of its matrices' stable ranks; None if there is none."""
        ranks = [rank for spectrum in self.spectra if (rank := spectrum.stable_rank) is not None]
        return median(ranks) if ranks else None

    @property
    def spectrum(self) -> tuple[float, ...]:
        """Return the largest singular values of the matrix whose largest is the greatest."""
        return max((spectrum.values for spectrum in self.spectra if spectrum.values), default=())

    def to_json(self) -> dict[str, Any]:
        f = self.figures
        return {"key": self.key, "name": self.name, "role": self.role, "shape": self.shape, "dtype": self.dtype,
                "elements": f.elements, "norm": f.norm, "rms": f.rms, "largest": f.largest,
                "zeros": f.zeros / f.elements if f.elements else 0.0, "nan": f.nan, "infinite": f.infinite,
                "stable_rank": self.stable_rank, "spectrum": self.spectrum}  # fmt: skip


def is_numeric(dtype: str) -> bool:
    return dtype not in PARTS and as_float64(np.empty(0, DTYPES[dtype].bits), dtype) is not None


def figures_of(
    stored: StoredSide, name: str, role: str, memory: int, sketch: bool, passed: Callable[[int], None]
) -> TensorFigures:
    """Measure a tensor of numbers, band by band.

    Args:
        memory: bytes to use.
        sketch: whether to sketch spectra, which reads matrices that are larger than ``memory`` several times.
        passed: receives bytes that have been read for the first time.
    """
    record = stored.tensor.record
    stored.check()
    most = max(memory // ELEMENT_BYTES, 1)
    total = ElementFigures()
    spectra: list[Spectrum] = []
    for matrix in _matrices(record.shape):
        kept: list[F64] = []
        fits = matrix.numel <= most
        own = ElementFigures()
        for rows in _rows(stored, matrix, most):
            own += _figures_of_each(rows)[0]
            passed(rows.size * itemsize(record.dtype))
            if fits:
                kept.append(rows)
        total += own
        if sketch and len(record.shape) >= 2 and own.finite == own.elements:
            again = partial(iter, kept) if fits else partial(_rows, stored, matrix, most)
            columns = next(iter(again())).shape[-1] if matrix.numel else 0
            spectra += spectra_of(columns, again, [own])
    return TensorFigures(record.key, name, role, record.shape, record.dtype, total, tuple(spectra))


def figures_of_alike(
    words: Words, records: Sequence[StateRecord], labels: Sequence[tuple[str, str]], sketch: bool
) -> Iterator[TensorFigures]:
    """Measure tensors of one shape and dtype at once.

    Args:
        words: raw elements, ``[tensors, *shape]``, not empty.
        labels: the name and the role of each tensor.
    """
    shape, dtype = records[0].shape, records[0].dtype
    numbers = as_float64(words, dtype)
    assert numbers is not None, "types that are not numbers are left out"
    matrices = numbers.reshape(-1, *shape[-2:])
    figures = _figures_of_each(matrices)
    whole = [number for number, own in enumerate(figures) if own.finite == own.elements]
    spectra: dict[int, Spectrum] = {}
    if sketch and len(shape) >= 2 and whole:
        sound = matrices if len(whole) == len(matrices) else matrices[whole]
        found = spectra_of(shape[-1], lambda: iter((sound,)), [figures[number] for number in whole])
        spectra = dict(zip(whole, found, strict=True))
    each = len(matrices) // len(records)
    for number, (record, (name, role)) in enumerate(zip(records, labels, strict=True)):
        mine = range(number * each, (number + 1) * each)
        total = sum((figures[matrix] for matrix in mine), ElementFigures())
        own = tuple(spectra[matrix] for matrix in mine if matrix in spectra)
        yield TensorFigures(record.key, name, role, shape, dtype, total, own)


def _matrices(shape: tuple[int, ...]) -> Iterator[Box]:
    for index in np.ndindex(shape[:-2]):
        yield Box((*index, *(0 for _ in shape[-2:])), (*(i + 1 for i in index), *shape[-2:]))


def _rows(stored: StoredSide, matrix: Box, most: int) -> Iterator[F64]:
    """Yield the numbers of a matrix, some rows at a time, ``[1, rows, columns]``; those of a vector are one column.

    Where rows are too long for memory, the rows of its transpose, which has the same singular values.
    """
    lengths = matrix.shape[-2:] if len(matrix.shape) > 1 else (matrix.numel, 1)
    transposed = lengths[1] > max(most, lengths[0])
    by_rows = (box for band in bands(matrix, max(most, lengths[1])) for box in band.boxes)
    for box in _columns(matrix, max(most // lengths[0], 1)) if transposed else by_rows:
        numbers = as_float64(stored.words(box), stored.tensor.record.dtype)
        assert numbers is not None, "types that are not numbers are left out"
        yield (numbers.reshape(lengths[0], -1).T if transposed else numbers.reshape(-1, lengths[1]))[np.newaxis]


def _columns(matrix: Box, count: int) -> Iterator[Box]:
    *lo, first = matrix.lo
    *hi, end = matrix.hi
    for start in range(first, end, count):
        yield Box((*lo, start), (*hi, min(start + count, end)))


def _figures_of_each(stack: F64) -> list[ElementFigures]:
    """Measure each of the equal shapes along the first dim."""
    flat = stack.reshape(len(stack), -1)
    finite = np.isfinite(flat)
    counts, nan = np.count_nonzero(finite, axis=1), np.count_nonzero(np.isnan(flat), axis=1)
    values = flat if finite.all() else np.where(finite, flat, 0.0)
    largest = np.abs(values).max(axis=1, initial=0.0)
    scaled = values / np.where(largest == 0, 1.0, largest)[:, np.newaxis]
    norms = np.sqrt(scaled[:, np.newaxis, :] @ scaled[:, :, np.newaxis])[:, 0, 0] * largest
    zeros = counts - np.count_nonzero(values, axis=1)
    columns = (counts, norms, largest, zeros, nan, flat.shape[1] - counts - nan)
    return [ElementFigures(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


SKETCH = 12
"""Columns of the sketch."""

_PASSES = 3
"""Passes that turn the sketch towards the largest singular vectors, before the one that measures."""


@dataclass(frozen=True, slots=True)
class Spectrum:
    """The largest singular values of a matrix, falling, at most `SKETCH`, none above its true value; and the norm."""

    values: tuple[float, ...]
    norm: float

    @property
    def stable_rank(self) -> float | None:
        """Return ``(norm / largest singular value)²``, between 1 and the rank; None for a zero matrix."""
        return (self.norm / self.values[0]) ** 2 if self.values and self.values[0] > 0 else None


def spectra_of(
    columns: int, bands: Callable[[], Iterator[F64]], figures: Sequence[ElementFigures]
) -> tuple[Spectrum, ...]:
    """Sketch the spectra of finite matrices by subspace iteration (Halko, Martinsson & Tropp 2011, arXiv 0909.4061).

    Matrices of at most `SKETCH` columns are measured exactly.  The start is seeded, so results can be repeated.

    Args:
        bands: yields the rows of the matrices in order, ``[matrices, rows, columns]``, some at a time, at every call.
        figures: of each matrix; divided by their largest magnitude, squares neither overflow nor vanish.
    """
    if not columns or not any(own.largest for own in figures):
        return tuple(Spectrum((), own.norm) for own in figures)
    width = min(SKETCH, columns)
    largest = np.array([own.largest or 1.0 for own in figures])
    by = largest[:, np.newaxis, np.newaxis]
    basis: F64 = np.eye(columns)
    if width < columns:  # drawing numbers makes numpy import its generators
        basis = np.linalg.qr(np.random.default_rng(0).normal(size=(columns, SKETCH)))[0]
    for _ in range(_PASSES if width < columns else 0):
        turned = np.zeros((len(figures), columns, width))
        for rows in bands():
            scaled = rows / by
            turned += scaled.swapaxes(1, 2) @ (scaled @ basis)
        basis = np.linalg.qr(turned)[0]
    gram = np.zeros((len(figures), width, width))
    for rows in bands():
        image = (rows / by) @ basis
        gram += image.swapaxes(1, 2) @ image
    squares = np.linalg.eigvalsh(gram)[:, ::-1]
    values = (np.sqrt(np.maximum(squares, 0)) * largest[:, np.newaxis]).tolist()
    return tuple(
        Spectrum(tuple(mine) if own.largest else (), own.norm) for mine, own in zip(values, figures, strict=True)
    )
