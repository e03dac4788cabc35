"""A sketch of a matrix's largest singular values, from a few passes over its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ..compare.numeric import F64

SKETCH = 12
"""Columns of the sketch."""

_PASSES = 3
"""Passes that turn the sketch towards the largest singular vectors, before the last one that measures."""


@dataclass(frozen=True, slots=True)
class Spectrum:
    """The largest singular values of a matrix in falling order, at most `SKETCH`, each at most its true value; and the
    matrix's ``norm`` (Frobenius)."""

    values: tuple[float, ...]
    norm: float

    @property
    def stable_rank(self) -> float | None:
        """``(norm / largest singular value)²``, between 1 and the rank; None of a zero matrix."""
        return (self.norm / self.values[0]) ** 2 if self.values and self.values[0] > 0 else None


def spectrum_of(columns: int, bands: Callable[[], Iterator[F64]], norm: float, largest: float) -> Spectrum:
    """Sketch the spectrum of a finite matrix by subspace iteration (Halko, Martinsson & Tropp 2011, arXiv 0909.4061).

    A matrix of at most `SKETCH` columns is measured exactly.  The start is seeded, so results can be repeated.

    Args:
        bands: gives the rows of the matrix from the first to the last, some at a time, as often as it is called.
        norm: its Frobenius norm.
        largest: its largest magnitude, by which it is divided so that squares neither overflow nor vanish.
    """
    if largest == 0 or not columns:
        return Spectrum((), norm)
    width = min(SKETCH, columns)
    basis = np.eye(columns) if width == columns else _orthonormal(_start(columns))
    for _ in range(_PASSES if width < columns else 0):
        turned = np.zeros_like(basis)
        for rows in bands():
            scaled = rows / largest
            turned += scaled.T @ (scaled @ basis)
        basis = _orthonormal(turned)
    gram = np.zeros((width, width))
    for rows in bands():
        image = (rows / largest) @ basis
        gram += image.T @ image
    squares = np.linalg.eigvalsh(gram)[::-1]
    return Spectrum(tuple((np.sqrt(np.maximum(squares, 0)) * largest).tolist()), norm)


def _start(columns: int) -> F64:
    """Where the iteration begins: seeded numbers.  Drawing them makes numpy import its generators."""
    return np.random.default_rng(0).normal(size=(columns, SKETCH))


def _orthonormal(columns: F64) -> F64:
    basis: F64 = np.linalg.qr(columns)[0]
    return basis
