"""Matrices with known singular values, and how far from its polar factor a result is, against a float64 SVD."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

FP64 = torch.float64


@lru_cache
def gauss(m: int, n: int, seed: int = 0) -> Tensor:
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed))


def _with_values(m: int, n: int, values: Tensor) -> Tensor:
    u, _, v = torch.linalg.svd(gauss(m, n).double(), full_matrices=False)
    matrix: Tensor = (u * values.double()) @ v
    return matrix.float()


def _steps(m: int, n: int) -> Tensor:
    return torch.arange(1, min(m, n) + 1, dtype=FP64)


@lru_cache
def matrix(spectrum: str, m: int, n: int) -> Tensor:
    """``[m, n]``, fp32, of one of the spectra of the table in docs/design/newton_schulz.md."""
    short = min(m, n)
    match spectrum:
        case "gauss":
            return gauss(m, n)
        case "log-uniform":  # equal ratios from 1 down to 1e-4
            return _with_values(m, n, torch.logspace(0, -4, short, dtype=FP64))
        case "1/k":
            return _with_values(m, n, 1 / _steps(m, n))
        case "1/sqrt k":
            return _with_values(m, n, _steps(m, n).rsqrt())
        case "low rank":  # m / 8 ones over a floor
            return _with_values(m, n, torch.where(_steps(m, n) <= short / 8, 1.0, 1e-5))
    raise ValueError(spectrum)


@lru_cache
def _factors(spectrum: str, m: int, n: int) -> tuple[Tensor, Tensor]:
    u, _, v = torch.linalg.svd(matrix(spectrum, m, n).double(), full_matrices=False)
    return u, v


def error(polar_factor: Tensor, spectrum: str) -> float:
    """Relative Frobenius distance of ``found`` from the polar factor of the matrix of its shape."""
    u, v = _factors(spectrum, *polar_factor.shape)
    return float((polar_factor.double() - u @ v).norm() / math.sqrt(min(polar_factor.shape)))


def noise(polar_factor: Tensor, spectrum: str) -> float:
    """The part of it that no change of the singular values explains: rounding."""
    u, v = _factors(spectrum, *polar_factor.shape)
    polar_factor = polar_factor.double()
    values = (u.mT @ polar_factor @ v.mT).diagonal()
    return float((polar_factor - (u * values) @ v).norm() / math.sqrt(min(polar_factor.shape)))
