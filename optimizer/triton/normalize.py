"""What Newton-Schulz begins and ends with, for stacks of matrices, as Triton kernels: norms, and sides filled up.

A launch walks through chunks of the memory of all matrices, whatever their shapes.  Sums are in an order that follows
from the shape of a matrix alone.

This file needs Triton.
"""
# Triton's language is typed by the compiler, not by Python:
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ground.cuda_graphs import settled
from ..ground.tensors import REDUCTIONS, Places
from .launches import INTERPRETED, as_fp32, launcher, narrowed

CHUNK, WIDTH = (1024, 256) if INTERPRETED else (8192, 1024)
"""Elements of a program, and how many of them it does at a time."""

_, REDUCTION = REDUCTIONS[torch.float32]


def normalized(memory: Tensor, places: Places, dtype: torch.dtype, eps: float, scale: float) -> Tensor:
    """Each matrix divided by ``max(its Frobenius norm, eps) · scale``; all NaN if an element is not finite.

    Args:
        memory: ``[places.numel]``, any floating dtype up to fp32, at an address that is a multiple of 16.
        places: sides are multiples of 16.

    Returns:
        As ``memory``, of ``dtype``, bf16 or fp16.
    """
    result = torch.empty(len(memory), dtype=dtype, device=memory.device)
    if len(result):
        _normalize(places, memory.dtype, dtype, memory.device)(memory, result, eps, scale)
    return result


@cache
def _normalize(places: Places, given: torch.dtype, dtype: torch.dtype, device: torch.device) -> Callable[..., None]:
    """What normalises matrices that lie so, of a dtype to another."""
    parts, firsts = _parts(places, device)
    squares, norms, divided = (
        launcher(kernel, len(each)) for kernel, each in ((_squares, parts), (_norms, firsts[1:]), (_divided, parts))
    )

    def normalize(memory: Tensor, result: Tensor, eps: float, scale: float) -> None:
        sums = torch.empty((2, _rounded_up(len(parts))), dtype=torch.float32, device=device)
        found = torch.empty((2, _rounded_up(len(firsts))), dtype=torch.float32, device=device)
        squares(memory, parts, *sums, REDUCTION, CHUNK, WIDTH)
        norms(*sums, firsts, *found, eps, scale, REDUCTION, WIDTH)
        divided(memory, parts, *found, result, CHUNK, WIDTH)

    return normalize


def _rounded_up(count: int) -> int:
    """So many fp32 numbers that a second row of them begins at a multiple of 16 bytes."""
    return -(-count // 4) * 4


def moved(memory: Tensor, places: Places, there: Places) -> Tensor:
    """The matrices in a new memory, where they are higher and wider, filled up with zeros, or cut off.

    Args:
        memory: ``[places.numel]``, of fp32, bf16 or fp16.
        there: as many matrices.
    """
    result = torch.empty(there.numel, dtype=memory.dtype, device=memory.device)
    if there.numel:
        parts, _ = _parts(there, memory.device)
        # Not by `launcher`: results of what is moved back begin anywhere.
        _moved[(len(parts),)](memory, result, parts, _pairs(places, there, memory.device), CHUNK, WIDTH)
    return result


@cache
def _parts(places: Places, device: torch.device) -> tuple[Tensor, Tensor]:
    """The chunks of all matrices, int64 ``[chunks, 3]``: where one begins, how many elements it has, of which matrix;
    and the first chunk of each matrix, with the end, ``[B + 1]``."""
    settled("matrices of these shapes have not been cut into chunks")
    begins = np.array(places.begins(), np.int64)
    counts = -(-np.diff(begins) // CHUNK)
    firsts = np.concatenate([[0], counts.cumsum()])
    matrix = np.repeat(np.arange(len(counts)), counts)
    begin = begins[matrix] + (np.arange(len(matrix)) - firsts[matrix]) * CHUNK
    chunks = np.stack([begin, np.minimum(CHUNK, begins[matrix + 1] - begin), matrix], axis=1)
    return torch.from_numpy(chunks).to(device), torch.from_numpy(firsts).to(device)


@cache
def _pairs(here: Places, there: Places, device: torch.device) -> Tensor:
    """Of each matrix, int64 ``[B, 5]``: where it begins here, its rows and columns; and there, and its columns."""
    settled("matrices of these shapes have not been filled up")
    rows = [
        (begin, *shape, target, columns)
        for shape, begin, (_, columns), target in zip(here, here.begins(), there, there.begins(), strict=False)
    ]
    return torch.tensor(rows, dtype=torch.int64).to(device)


@triton.jit
def _squares(x, parts, sums, reduced, REDUCTION: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """The sum of squares of a chunk, as it is and divided by the reduction."""
    part = parts + tl.program_id(0).to(tl.int64) * 3
    begin, count = tl.multiple_of(tl.load(part), 16), tl.multiple_of(tl.load(part + 1).to(tl.int32), 16)
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    total_reduced = tl.zeros((WIDTH,), dtype=tl.float32)
    for start in range(0, CHUNK, WIDTH):
        at = start + tl.arange(0, WIDTH)
        value = as_fp32(tl.load(x + begin + at, mask=at < count, other=0.0))
        total += value * value
        value *= 1.0 / REDUCTION
        total_reduced += value * value
    tl.store(sums + tl.program_id(0), tl.sum(total))
    tl.store(reduced + tl.program_id(0), tl.sum(total_reduced))


@triton.jit
def _norms(sums, reduced, firsts, norms, factors, eps, scale, REDUCTION: tl.constexpr, WIDTH: tl.constexpr):
    """Of one matrix, what it is multiplied by, 1 or a power of two if its squares overflow; and ``max(norm, eps) ·
    scale`` of that, NaN if an element is not finite."""
    matrix = tl.program_id(0)
    first, end = tl.load(firsts + matrix), tl.load(firsts + matrix + 1)
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    total_reduced = tl.zeros((WIDTH,), dtype=tl.float32)
    for start in range(first, end, WIDTH):
        at = start + tl.arange(0, WIDTH)
        total += tl.load(sums + at, mask=at < end, other=0.0)
        total_reduced += tl.load(reduced + at, mask=at < end, other=0.0)
    norm = tl.sqrt_rn(tl.sum(total))
    overflows = norm == float("inf")
    factor = tl.where(overflows, 1.0 / REDUCTION, 1.0)
    norm = tl.where(overflows, tl.sqrt_rn(tl.sum(total_reduced)), norm)
    # Written so that NaN fails the first test: an infinite norm would divide finite elements to zero.
    norm = tl.where(norm < float("inf"), norm, float("nan"))
    tl.store(factors + matrix, factor)
    tl.store(norms + matrix, tl.where(norm < eps * factor, eps * factor, norm) * scale)


@triton.jit
def _divided(x, parts, norms, factors, out, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """A chunk over the norm of its matrix."""
    part = parts + tl.program_id(0).to(tl.int64) * 3
    begin, count = tl.multiple_of(tl.load(part), 16), tl.multiple_of(tl.load(part + 1).to(tl.int32), 16)
    norm, factor = tl.load(norms + tl.load(part + 2)), tl.load(factors + tl.load(part + 2))
    for start in range(0, CHUNK, WIDTH):
        at = start + tl.arange(0, WIDTH)
        value = as_fp32(tl.load(x + begin + at, mask=at < count, other=0.0)) * factor
        done = narrowed(tl.div_rn(value, norm), out.dtype.element_ty)
        tl.store(out + begin + at, done, mask=at < count)


@triton.jit
def _moved(x, out, parts, pairs, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """A chunk of what is written, from wherever its elements come; zeros where they come from nowhere."""
    part = parts + tl.program_id(0).to(tl.int64) * 3
    begin, count = tl.load(part), tl.load(part + 1)
    pair = pairs + tl.load(part + 2) * 5
    rows, columns = tl.load(pair + 1), tl.load(pair + 2)
    there, wide = tl.load(pair + 3), tl.load(pair + 4)
    for start in range(0, CHUNK, WIDTH):
        at = start + tl.arange(0, WIDTH)
        row, column = (begin - there + at) // wide, (begin - there + at) % wide
        known = (at < count) & (row < rows) & (column < columns)
        value = tl.load(x + tl.load(pair) + row * columns + column, mask=known, other=0.0)
        tl.store(out + begin + at, value, mask=at < count)
