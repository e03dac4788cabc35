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
from ...programs.model_view import matrix_sides
from ...record.record import StateRecord
from ...store.reading.blocks import bands
from ...store.reading.dtypes import PARTS, Values64, itemsize
from ..engine.outputs import Words
from .elements import StoredSide, as_float64, has_numbers

ELEMENT_BYTES = 40
"""Memory that one element takes: its word, its number, and computed values."""


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
            norm=math.hypot(self.norm, other.norm),
            largest=max(self.largest, other.largest),
            zeros=self.zeros + other.zeros,
            nan=self.nan + other.nan,
            infinite=self.infinite + other.infinite,
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
        ranks: list[float] = []
        for spectrum in self.spectra:
            if spectrum.stable_rank is not None:
                ranks.append(spectrum.stable_rank)
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
    return has_numbers(dtype) and dtype not in PARTS


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
    max_elements = max(memory // ELEMENT_BYTES, 1)
    total = ElementFigures()
    spectra: list[Spectrum] = []
    for matrix in _matrix_boxes(record.shape):
        # The first pass measures, and keeps the rows that fit in memory for the passes of the sketch.
        rows_in_memory: list[Values64] = []
        is_kept = matrix.numel <= max_elements
        figures, columns = ElementFigures(), 0
        for rows in _row_bands(stored, matrix, max_elements):
            figures, columns = figures + _figures_of_each(rows)[0], rows.shape[-1]
            passed(rows.size * itemsize(record.dtype))
            if is_kept:
                rows_in_memory.append(rows)
        total += figures
        if sketch and len(record.shape) >= 2 and figures.finite == figures.elements:
            read_rows = partial(iter, rows_in_memory) if is_kept else partial(_row_bands, stored, matrix, max_elements)
            spectra += spectra_of(columns, read_rows, [figures])
    return TensorFigures(
        record.key, name=name, role=role, shape=record.shape, dtype=record.dtype, figures=total, spectra=tuple(spectra)
    )


def figures_of_alike(
    words: Words, records: Sequence[StateRecord], labels: Sequence[tuple[str, str]], sketch: bool
) -> Iterator[TensorFigures]:
    """Measure tensors of one shape and dtype at once.

    Args:
        words: raw elements, ``[tensors, *shape]``, not empty.
        labels: the name and the role of each tensor.
    """
    shape, dtype = records[0].shape, records[0].dtype
    sides = matrix_sides(shape)
    matrices = as_float64(words, dtype).reshape(-1, *sides)
    figures = _figures_of_each(matrices)
    # Spectra are of the matrices without infinite elements or NaN.
    finite = [number for number, of_matrix in enumerate(figures) if of_matrix.finite == of_matrix.elements]
    spectra: dict[int, Spectrum] = {}
    if sketch and len(shape) >= 2 and finite:
        stack = matrices if len(finite) == len(matrices) else matrices[finite]
        sketches = spectra_of(sides[-1], lambda: iter((stack,)), [figures[number] for number in finite])
        spectra = dict(zip(finite, sketches, strict=True))
    # The matrices of a tensor stand one after the other.
    matrices_per_tensor = len(matrices) // len(records)
    for number, (record, (name, role)) in enumerate(zip(records, labels, strict=True)):
        numbers = range(number * matrices_per_tensor, (number + 1) * matrices_per_tensor)
        total = sum((figures[matrix] for matrix in numbers), ElementFigures())
        spectra_of_tensor = tuple(spectra[matrix] for matrix in numbers if matrix in spectra)
        yield TensorFigures(
            record.key, name=name, role=role, shape=shape, dtype=dtype, figures=total, spectra=spectra_of_tensor
        )


def _matrix_boxes(shape: tuple[int, ...]) -> Iterator[Box]:
    """Yield the box of each matrix in a tensor: one for each index of the dims before the last two, or the whole."""
    if matrix_sides(shape) != shape[-2:]:
        yield Box.of(shape)
        return
    for index in np.ndindex(shape[:-2]):
        yield Box((*index, *(0 for _ in shape[-2:])), (*(i + 1 for i in index), *shape[-2:]))


def _row_bands(stored: StoredSide, matrix: Box, max_elements: int) -> Iterator[Values64]:
    """Yield the numbers of a matrix, some rows at a time, ``[1, rows, columns]``; those of a vector are one column.

    Where rows are too long for memory, the rows of its transpose, which has the same singular values.
    """
    rows, columns = matrix_sides(matrix.shape) if len(matrix.shape) > 1 else (matrix.numel, 1)
    dtype = stored.tensor.record.dtype
    # A row that does not fit is read in columns, where these are one dim.
    if columns > max(max_elements, rows) and columns == matrix.shape[-1]:
        (*lo, start), (*hi, stop), count = matrix.lo, matrix.hi, max(max_elements // rows, 1)
        for first in range(start, stop, count):
            box = Box((*lo, first), (*hi, min(first + count, stop)))
            yield as_float64(stored.words(box), dtype).reshape(rows, -1).T[np.newaxis]
        return
    for band in bands(matrix, max(max_elements, columns)):
        for box in band.boxes:
            yield as_float64(stored.words(box), dtype).reshape(-1, columns)[np.newaxis]


def _figures_of_each(stack: Values64) -> list[ElementFigures]:
    """Return the figures of each `stack[i]`."""
    flat = stack.reshape(len(stack), -1)
    finite = np.isfinite(flat)
    counts, nan = np.count_nonzero(finite, axis=1), np.count_nonzero(np.isnan(flat), axis=1)
    # Divided by their largest magnitude, squares neither overflow nor vanish.
    values = flat if finite.all() else np.where(finite, flat, 0.0)
    largest = np.abs(values).max(axis=1, initial=0.0)
    scaled = values / np.where(largest == 0, 1.0, largest)[:, np.newaxis]
    # Each row times itself is its sum of squares.
    norms = np.sqrt(scaled[:, np.newaxis, :] @ scaled[:, :, np.newaxis])[:, 0, 0] * largest
    zeros = counts - np.count_nonzero(values, axis=1)
    columns = (counts, norms, largest, zeros, nan, flat.shape[1] - counts - nan)
    return list(map(ElementFigures, *(column.tolist() for column in columns)))


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
    columns: int, read_rows: Callable[[], Iterator[Values64]], figures: Sequence[ElementFigures]
) -> tuple[Spectrum, ...]:
    """Sketch the spectra of finite matrices by subspace iteration (Halko, Martinsson & Tropp 2011, arXiv 0909.4061).

    Matrices of at most `SKETCH` columns are measured exactly.  The start is seeded, so results can be repeated.

    Args:
        read_rows: yields the rows of the matrices in order, ``[matrices, rows, columns]``, some at a time.
        figures: of each matrix; divided by their largest magnitude, squares neither overflow nor vanish.
    """
    if not columns or not any(of_matrix.largest for of_matrix in figures):
        return tuple(Spectrum((), of_matrix.norm) for of_matrix in figures)
    width = min(SKETCH, columns)
    largest = np.array([of_matrix.largest or 1.0 for of_matrix in figures])
    divisor = largest[:, np.newaxis, np.newaxis]
    # A random basis is turned towards the largest right singular vectors, one pass over the rows at a time.
    basis: Values64 = np.eye(columns)
    if width < columns:  # drawing numbers makes numpy import its generators
        basis = np.linalg.qr(np.random.default_rng(0).normal(size=(columns, SKETCH)))[0]
    for _ in range(_PASSES if width < columns else 0):
        image = np.zeros((len(figures), columns, width))
        for rows in read_rows():
            scaled = rows / divisor
            image += scaled.swapaxes(1, 2) @ (scaled @ basis)
        basis = np.linalg.qr(image)[0]
    # The last pass measures in that basis: the eigenvalues of the Gram matrix are squares of singular values.
    gram = np.zeros((len(figures), width, width))
    for rows in read_rows():
        projection = (rows / divisor) @ basis
        gram += projection.swapaxes(1, 2) @ projection
    squares = np.linalg.eigvalsh(gram)[:, ::-1]
    values = (np.sqrt(np.maximum(squares, 0)) * largest[:, np.newaxis]).tolist()
    spectra = []
    for row, of_matrix in zip(values, figures, strict=True):
        spectra.append(Spectrum(tuple(row) if of_matrix.largest else (), of_matrix.norm))
    return tuple(spectra)
