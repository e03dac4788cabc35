"""Helpers of all kernels: conversions that also hold in Triton's interpreter, and where they run.

This file needs Triton.
"""
# Triton's language is typed by the compiler, not by Python:
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether kernels run on the CPU, statement by statement (``TRITON_INTERPRET=1`` before Triton is imported)."""


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device the current one, on which Triton launches."""
    device: AbstractContextManager[object] = torch.cuda.device_of(tensor)
    return device


def launcher(kernel: Any, programs: int, **options: Any) -> Callable[..., None]:
    """Return a function that launches so many programs of a kernel, on the current device.

    Triton looks at every argument of every launch, which takes longer than a small matrix does.  Here it looks once:
    only floats and addresses, at multiples of 16 bytes if the first ones were, may differ later.  It serves one device.
    """
    if INTERPRETED:
        return lambda *arguments: kernel[(programs,)](*arguments, **options)
    compiled: Any = None

    def launch(*arguments: Any) -> None:
        nonlocal compiled
        if compiled is None:
            compiled = kernel[(programs,)](*arguments, **options)[(programs, 1, 1)]
        else:  # take an address itself; for a tensor the driver would be asked
            compiled(*[value.data_ptr() if isinstance(value, Tensor) else value for value in arguments])

    return launch


@triton.jit
def as_fp32(x):
    """Convert to fp32, exactly."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def narrowed(x, dtype: tl.constexpr):
    """Round fp32 to ``dtype``, to the nearest, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:  # the interpreter cuts the low bits off
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet = (bits >> 16) | 0x40
        return tl.where(x == x, rounded, quiet).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def fused(x, y, z):
    """``x·y + z``, rounded once."""
    if INTERPRETED:  # numpy has no such operation; the product is exact in fp64
        return (x.to(tl.float64) * y.to(tl.float64) + z.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(x, y, z)
