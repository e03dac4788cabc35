"""Kernels on the GPU where there is one, else through Triton's interpreter."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
on_gpu = pytest.mark.skipif(
    DEVICE.type != "cuda", reason="needs an NVIDIA GPU; the interpreter has run the same kernels"
)


def kernels(name: str) -> ModuleType:
    """A module of ``muonckpt.optimizer`` that needs Triton; skips the test's module where that is not installed.

    Without a GPU, `conftest` has set ``TRITON_INTERPRET`` before anything could import Triton.
    """
    pytest.importorskip("triton", reason="Triton is not installed")
    return importlib.import_module(f"muonckpt.optimizer.{name}")


def poisoned(tensor: torch.Tensor, order: str) -> torch.Tensor:
    """The same values as a view of larger memory that is NaN elsewhere: rows, columns or neither of them dense."""
    *batch, m, n = tensor.shape
    memory = torch.full((*batch, m + 3, n + 5), torch.nan, dtype=tensor.dtype, device=DEVICE)
    view = memory[..., 1 : m + 1, 2 : n + 2]
    if order == "columns":
        memory = torch.full((*batch, n + 5, m + 3), torch.nan, dtype=tensor.dtype, device=DEVICE)
        view = memory[..., 2 : n + 2, 1 : m + 1].mT
    if order == "gaps":
        memory = torch.full((*batch, 2 * m, 3 * n), torch.nan, dtype=tensor.dtype, device=DEVICE)
        view = memory[..., ::2, 1::3]
    view.copy_(tensor)
    return view
