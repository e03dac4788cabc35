"""How a matrix is orthogonalised: by which arithmetic, and whether on its Gram matrix; by shape, or as measured."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from .gram import gram_is_cheaper
from .products import Products, by_torch


@dataclass(frozen=True, slots=True)
class Form:
    """One way to do it.  Another form gives other last bits, so all ranks must use the same one for a matrix.

    Attributes:
        kernels: by kernels of ours (`triton.kernel_products`), else by torch's products.
        gram: several steps on one Gram matrix, where restarts are given (`gram`); else the plain form.
    """

    kernels: bool
    gram: bool


Choice = Callable[[torch.device, torch.dtype, int, int, int], Form]
"""The form for ``copies`` matrices of ``m x n`` on a device, computed in a dtype: ``(device, dtype, m, n, copies)``.
It must be the same on all ranks, so it follows from these facts alone; `costs.CostTable.form` is a measured one."""


def prefer_kernels(device: torch.device, dtype: torch.dtype, rows: int, columns: int, copies: int) -> Form:
    """The form where nothing has been measured: kernels wherever they run.  On an H100 they were the fastest for every
    shape from 256 x 256 on (`docs/performance.md`), and small matrices of all shapes share their launches."""
    return Form(has_kernels(device, dtype), gram_is_cheaper(rows, columns))


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels run there: 16 bits, on NVIDIA GPUs from compute capability 8.0 on."""
    suitable = device.type == "cuda" and torch.version.cuda is not None and dtype.itemsize == 2
    return suitable and torch.cuda.get_device_capability(device) >= (8, 0)


def arithmetic(form: Form, device: torch.device, dtype: torch.dtype, rows: int, columns: int) -> Products[Any]:
    """What to orthogonalise ``rows x columns`` with.

    Warns:
        RuntimeWarning: once, if there should be kernels and Triton is missing: torch does the work, up to twice slower.

    Raises:
        ValueError: kernels, where they do not run.
    """
    kernels = _kernels(device, dtype) if form.kernels else None
    return kernels or by_torch(device, dtype, *sorted((rows, columns)))


@lru_cache(maxsize=16)
def _kernels(device: torch.device, dtype: torch.dtype) -> Products[Any] | None:
    """None if Triton is missing."""
    try:
        from ..triton.kernel_products import KernelProducts
        from ..triton.launches import INTERPRETED
    except ModuleNotFoundError as error:
        missing_triton(
            error,
            "Newton-Schulz runs on torch's matrix products, up to twice slower, and its last bits are not those of "
            "ranks that have it",
        )
        return None
    if not (INTERPRETED and device.type == "cpu") and not has_kernels(device, dtype):
        raise ValueError(f"there are no kernels for {dtype} on {device}: choose forms that were measured there")
    return KernelProducts(dtype)


def missing_triton(error: ModuleNotFoundError, consequence: str) -> None:
    """Say what follows, if it is Triton that could not be imported; raise the error again if it is not."""
    if error.name is None or error.name.split(".")[0] != "triton":
        raise error
    warnings.warn(
        f"Triton is not installed: {consequence}. Install triton, in the version that torch names",
        RuntimeWarning,
        stacklevel=4,
    )
