"""The arithmetic of Newton-Schulz: by torch anywhere, or by kernels of ours on NVIDIA GPUs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor


class Products(Protocol):
    """What an orthogonalisation multiplies with; operands and results are of one dtype.

    Matrices may have a leading dim in front, the same for all arguments, if they come from :meth:`over`.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    def over(self, stack: Tensor, work: Callable[[Tensor], Tensor]) -> Tensor:
        """``work`` done on every matrix of ``[B, m, n]``, one by one or all together; stacked."""
        ...

    def normal(self, x: Tensor, eps: float, scale: float) -> Tensor:
        """A fresh ``[s, l]``: ``x`` over ``max(its Frobenius norm, eps) · scale``; all NaN if that is not finite."""
        ...

    def gram(self, x: Tensor) -> Tensor:
        """``x·xᵀ``, ``[s, s]``."""
        ...

    def square(self, r: Tensor, b: float, c: float, a: float = 0.0) -> Tensor:
        """``a·I + b·r + c·r²`` for a symmetric ``r``."""
        ...

    def commuting(self, z: Tensor, q: Tensor) -> Tensor:
        """``z·q`` for two symmetric matrices that commute."""
        ...

    def added(self, x: Tensor, a: float, p: Tensor) -> Tensor:
        """``a·x + p·x``."""
        ...


@dataclass(frozen=True, slots=True)
class TorchProducts:
    """`Products` by torch's matrix products, one matrix at a time: the bits do not depend on what is beside it.

    Args:
        dtype: that operands and results are rounded to.
        held: the dtype of the tensors, ``dtype`` or wider (`held`).
    """

    dtype: torch.dtype
    held: torch.dtype

    def over(self, stack: Tensor, work: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.stack([work(matrix) for matrix in stack]) if len(stack) else torch.empty_like(stack)

    def normal(self, x: Tensor, eps: float, scale: float) -> Tensor:
        exact = copied(x, self.dtype)
        return self._rounded(exact.div_(bounded_norm(squares(exact), eps, scale)))

    def gram(self, x: Tensor) -> Tensor:
        return self._rounded(x @ x.mT)

    def square(self, r: Tensor, b: float, c: float, a: float = 0.0) -> Tensor:
        result = self._rounded(r * b if c == 0 else torch.addmm(r, r, r, beta=b, alpha=c))
        if a:
            result.diagonal().add_(a)
            result = self._rounded(result)
        return result

    def commuting(self, z: Tensor, q: Tensor) -> Tensor:
        return self._rounded(z @ q)

    def added(self, x: Tensor, a: float, p: Tensor) -> Tensor:
        return self._rounded(torch.addmm(x, p, x, beta=a) if a else p @ x)

    def _rounded(self, x: Tensor) -> Tensor:
        # Tests cost less than conversions to what a tensor is already.
        return x if x.dtype == self.dtype == self.held else x.to(self.dtype).to(self.held)


UNITS = {torch.bfloat16: ("avx512_bf16", "amx_bf16"), torch.float16: ("avx512_fp16", "amx_fp16")}
"""What a CPU must have one of, to multiply 16 bits faster than fp32."""

WORTH = 1 << 21
"""Multiply-adds of a product from which they are used.  Measured on an AMD EPYC with avx512_bf16, one thread: a Gram
matrix of 64 x 64 takes 23 us in bf16 and 15 in rounded fp32, of 128 x 128 38 and 55, of 512 x 512 1400 and 3090."""


def held(device: torch.device, dtype: torch.dtype, multiply_adds: int = 0) -> torch.dtype:
    """In what torch's products hold values of ``dtype`` best.

    The product of two 16-bit values is exact in fp32, so an fp32 product of rounded operands, rounded once, is what a
    16-bit matrix unit computes; a CPU without one does it 10 to 100 times faster this way.
    """
    if device.type != "cpu" or dtype.itemsize > 2:
        return dtype
    return dtype if multiply_adds >= WORTH and _has_units(dtype) else torch.float32


@lru_cache(maxsize=2)
def _has_units(dtype: torch.dtype) -> bool:
    has = torch.cpu.get_capabilities()
    return any(has.get(unit, False) for unit in UNITS[dtype])


def copied(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """A fresh contiguous copy, in fp32 at least."""
    exact = torch.promote_types(torch.float32, dtype)
    return torch.empty(matrix.shape, dtype=exact, device=matrix.device).copy_(matrix)


def squares(x: Tensor) -> Tensor:
    """The sum of squares, ``[1, 1]``."""
    # Row by row: torch's CPU kernel keeps plain running fp32 sums, and over 2**27 elements they are 4 % off.
    by_row: Tensor = torch.linalg.vector_norm(x, dim=1).square_()
    return by_row.sum().view(1, 1)


def bounded_norm(squares: Tensor, eps: float, scale: float) -> Tensor:
    """``max(norm, eps) · scale`` from a sum of squares; NaN if the norm is not finite."""
    norm = squares.sqrt()
    # An infinite norm would divide finite elements to zero.
    return norm.where(norm.isfinite(), torch.nan).clamp_(min=eps).mul_(scale)


WAVE = 64
"""Tiles of 128 x 128 that keep a large GPU busy (an H200 has 132 multiprocessors; half of them is enough, as tiles can
be smaller).  Half of the work is of no use where it is not the work that takes the time: on an H800 flash-muon's
symmetric kernel loses at 1024², with 36 tiles (0.0124 ms to 0.0112), and wins at 4096², with 528 (0.1838 to 0.2955).
Not measured by us: `benchmarks/newton_schulz.py` prints where ours begins to win."""


def fills(rows: int, columns: int, copies: int = 1) -> bool:
    """Whether the triangle of a Gram matrix, for so many matrices of a shape, has a `WAVE` of tiles: from 1281² on."""
    side = -(-min(rows, columns) // 128)
    return copies * side * (side + 1) // 2 >= WAVE


def products(device: torch.device, dtype: torch.dtype, rows: int, columns: int, copies: int = 1) -> Products:
    """What to orthogonalise ``rows x columns`` with on this device.

    Kernels are for 16 bits on NVIDIA GPUs from compute capability 8.0 on, for shapes that `fills` says they are
    faster at.  The choice changes the last bits.  So it follows from facts that are the same on all ranks and under any
    sharding, never from how many matrices happen to be together:

    Args:
        copies: how many matrices of this shape the model has, if they are orthogonalised in stacks.

    Warns:
        RuntimeWarning: once, if there should be kernels and Triton is missing: torch does the work, up to twice slower.
    """
    suitable = device.type == "cuda" and torch.version.cuda is not None and dtype.itemsize == 2
    if suitable and fills(rows, columns, copies) and torch.cuda.get_device_capability(device) >= (8, 0):
        return _kernels(dtype)
    return TorchProducts(dtype, held(device, dtype, min(rows, columns) * rows * columns))


@lru_cache(maxsize=2)
def _kernels(dtype: torch.dtype) -> Products:
    try:
        from .kernels import Kernels
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "triton":
            raise
        warnings.warn(
            "Triton is not installed: Newton-Schulz runs on torch's matrix products, up to twice slower, and its last "
            "bits are not those of ranks that have it. Install triton, in the version that torch names",
            RuntimeWarning,
            stacklevel=3,
        )
        return TorchProducts(dtype, dtype)
    return Kernels(dtype)
