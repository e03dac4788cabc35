"""Newton-Schulz by kernels, for stacks of matrices on NVIDIA GPUs, in as many launches as one matrix takes.

This file needs Triton; `newton_schulz.products` imports it when a device asks for it.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..ground.tensors import Places, Stack
from .launches import on_device
from .multiply import LOAD_MULTIPLE, multiply
from .normalize import moved, normalized


@dataclass(frozen=True, slots=True)
class KernelProducts:
    """`products.Products` by kernels.  A matrix has the same bits alone and in any stack.

    Args:
        dtype: bf16 or fp16: of operands and results.

    Raises:
        ValueError: another dtype.
    """

    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"kernels are for bfloat16 and float16, got {self.dtype}")

    def one(self, matrix: Tensor, dtype: torch.dtype, work: Callable[[Stack], Stack]) -> Tensor:
        """``work`` on a matrix, a stack of one."""
        done = self.over(matrix.reshape(-1), Places(((1, *matrix.shape),)), dtype, work)
        return done.view(matrix.shape)

    def over(self, memory: Tensor, places: Places, dtype: torch.dtype, work: Callable[[Stack], Stack]) -> Tensor:
        """``work`` on all together.

        Sides that are not multiples of `LOAD_MULTIPLE` are filled up with zeros, which stay zeros.  Tall matrices are
        transposed as they are read.
        """
        if not places.numel:
            return torch.empty(0, dtype=dtype, device=memory.device)
        full = _padded(places)
        with on_device(memory):
            if full is not None:
                memory = moved(memory, places, full)
            elif memory.data_ptr() % 16:
                memory = memory.clone()
            done = work(Stack(memory, full or places, places.tall)).memory
            return (moved(done, full, places) if full is not None else done).to(dtype)

    def normal(self, x: Stack, eps: float, scale: float) -> Stack:
        """Each matrix divided by ``max(its Frobenius norm, eps) · scale``; all NaN if the norm is not finite."""
        return Stack(normalized(x.memory, x.places, self.dtype, eps, scale), x.places, x.turned)

    def gram(self, x: Stack) -> Stack:
        """``x·xᵀ``."""
        return multiply(x, x.mT, symmetric=True)

    def square(self, r: Stack, b: float, c: float, a: float = 0.0) -> Stack:
        """``a·I + b·r + c·r²`` for symmetric ``r``; without a product if ``c`` is 0."""
        return multiply(r, r.mT, alpha=c, addend=r, beta=b, diagonal=a, symmetric=True)

    def commuting(self, z: Stack, q: Stack) -> Stack:
        """``z·q`` for symmetric ``z`` and ``q`` that commute, so that it is symmetric."""
        return multiply(z, q.mT, symmetric=True)

    def added(self, x: Stack, a: float, p: Stack) -> Stack:
        """``a·x + p·x``, turned if ``x`` is."""
        if x.turned:
            return multiply(x.mT, p.mT, addend=x.mT if a else None, beta=a).mT
        return multiply(p, x, addend=x if a else None, beta=a)


@lru_cache(maxsize=1024)
def _padded(places: Places) -> Places | None:
    """Return places of the same matrices with sides that kernels can load; None if they are so."""
    sides = ([-(-side // LOAD_MULTIPLE) * LOAD_MULTIPLE for side in shape] for shape in places)
    full = Places.of((rows, columns) for rows, columns in sides)
    return None if full == places else full
