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
