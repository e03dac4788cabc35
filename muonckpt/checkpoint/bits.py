"""Torch tensors as the raw bits of their elements, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """``"float32"`` -> ``torch.float32``."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def integer_view(tensor: Tensor) -> Tensor:
    """A tensor as integers of its element size, signed but for single bytes, sharing its memory, with its strides.

    Elements of 16 bytes are two words of 8, on one more, last dim.
    """
    if tensor.dtype == torch.complex128:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGER[tensor.itemsize])


def bits_of(tensor: Tensor) -> NDArray[Any]:
    """A CPU tensor as unsigned words of its element size, as `integer_view` has them."""
    words: NDArray[Any] = integer_view(tensor).numpy()
    return words.view(np.dtype(f"u{words.itemsize}"))
