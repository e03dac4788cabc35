"""Errors that a test brings about on one rank, and what each rank makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.baddbmm.default)


def raised(function: Callable[..., Any], *args: Any) -> str:
    """The error of a call, in words."""
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class OutOfMemory(TorchDispatchMode):
    """The products of matrices fail on this rank, after so many."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            self.left -= 1
            if self.left < 0:
                raise MemoryError("out of memory")
        return func(*args, **(kwargs or {}))
