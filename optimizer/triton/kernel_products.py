"""Newton-Schulz by kernels, for stacks of matrices on NVIDIA GPUs, in as many launches as one matrix takes.

Norms and padding walk through chunks of the memory of all matrices; the order of sums follows from the shape of a
matrix alone.

This file needs Triton; `newton_schulz.products` imports it when a device asks for it.
"""
# Triton's language is typed by the compiler, not by Python:
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ground.tensors import REDUCTIONS, Places, Stack
from .launches import INTERPRETED, as_fp32, launcher, narrowed, on_device
from .multiply import LOAD_MULTIPLE, multiply

CHUNK, WIDTH = (1024, 256) if INTERPRETED else (8192, 1024)
"""Elements of a program, and how many of them it does at a time."""

_, REDUCTION = REDUCTIONS[torch.float32]


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

    def run_matrix(self, matrix: Tensor, dtype: torch.dtype, work: Callable[[Stack], Stack]) -> Tensor:
        return self.run_all(matrix.reshape(-1), Places(((1, *matrix.shape),)), dtype, work).view(matrix.shape)

    def run_all(self, memory: Tensor, places: Places, dtype: torch.dtype, work: Callable[[Stack], Stack]) -> Tensor:
        """Return ``work`` done on all matrices together, padded so that kernels can load them: zeros stay zeros."""
        if not places.numel:
            return torch.empty(0, dtype=dtype, device=memory.device)
        padded_places = _padded(places)
        with on_device(memory):
            if padded_places is not None:
                memory = copy_padded(memory, places, padded_places)
            elif memory.data_ptr() % 16:
                memory = memory.clone()
            results = work(Stack(memory, padded_places or places, places.tall)).memory
            if padded_places is not None:
                results = copy_padded(results, padded_places, places)
            return results.to(dtype)

    def normalized(self, x: Stack, eps: float, scale: float) -> Stack:
        return Stack(normalized(x.memory, x.places, self.dtype, eps, scale), x.places, x.turned)

    def gram(self, x: Stack) -> Stack:
        return multiply(x, x.mT, symmetric=True)

    def polynomial(self, r: Stack, b: float, c: float, a: float = 0.0) -> Stack:
        # Without a product if `c` is 0.
        return multiply(r, r.mT, alpha=c, addend=r, beta=b, diagonal=a, symmetric=True)

    def commuting_product(self, z: Stack, q: Stack) -> Stack:
        return multiply(z, q.mT, symmetric=True)

    def multiply_add(self, x: Stack, a: float, p: Stack) -> Stack:
        if x.turned:
            return multiply(x.mT, p.mT, addend=x.mT if a else None, beta=a).mT
        return multiply(p, x, addend=x if a else None, beta=a)


@lru_cache(maxsize=1024)
def _padded(places: Places) -> Places | None:
    """Return places of the same matrices with sides that kernels can load; None if they are so."""
    up = lambda side: -(-side // LOAD_MULTIPLE) * LOAD_MULTIPLE  # noqa: E731
    padded = Places.of((up(rows), up(columns)) for rows, columns in places)
    return None if padded == places else padded


def normalized(memory: Tensor, places: Places, dtype: torch.dtype, eps: float, scale: float) -> Tensor:
    """Return each matrix over ``max(its Frobenius norm, eps) · scale``; all NaN if an element is not finite.

    Args:
        memory: ``[places.numel]``, any floating dtype up to fp32, at an address that is a multiple of 16.
        places: sides are multiples of 16.
        dtype: of the result, bf16 or fp16.
    """
    result = torch.empty(len(memory), dtype=dtype, device=memory.device)
    if len(result):
        _normalizer(places, memory.dtype, dtype, memory.device)(memory, result, eps, scale)
    return result


@cache
def _normalizer(places: Places, source: torch.dtype, dtype: torch.dtype, device: torch.device) -> Callable[..., None]:
    """Return a function that normalizes matrices at these places: in three launches, planned once for both dtypes."""
    chunks, first_chunks = _chunks(places, device)
    add_squares, make_norms, divide = (
        launcher(_squares, len(chunks)),
        launcher(_norms, len(first_chunks) - 1),
        launcher(_divided, len(chunks)),
    )
    # So many fp32 numbers that a second row of them begins at a multiple of 16 bytes.
    num_sums, num_norms = (-(-len(numbers) // 4) * 4 for numbers in (chunks, first_chunks))

    def normalize(memory: Tensor, result: Tensor, eps: float, scale: float) -> None:
        sums = torch.empty((2, num_sums), dtype=torch.float32, device=device)
        norms = torch.empty((2, num_norms), dtype=torch.float32, device=device)
        add_squares(memory, chunks, *sums, REDUCTION, CHUNK, WIDTH)
        make_norms(*sums, first_chunks, *norms, eps, scale, REDUCTION, WIDTH)
        divide(memory, chunks, *norms, result, CHUNK, WIDTH)

    return normalize


def copy_padded(memory: Tensor, places: Places, target_places: Places) -> Tensor:
    """Return the matrices of ``memory`` in a new one, padded with zeros or cut off."""
    result = torch.empty(target_places.numel, dtype=memory.dtype, device=memory.device)
    if target_places.numel:
        chunks, _ = _chunks(target_places, memory.device)
        # Not by `launcher`: results that are copied back begin anywhere.
        _moved[(len(chunks),)](memory, result, chunks, _pairs(places, target_places, memory.device), CHUNK, WIDTH)
    return result


@cache
def _chunks(places: Places, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the chunks of all matrices, int64 ``[chunks, 3]``: begin, elements, matrix; and the first chunk of each
    matrix, with the end, ``[B + 1]``."""
    begins = np.array(places.begins(), np.int64)
    counts = -(-np.diff(begins) // CHUNK)
    first_chunks = np.concatenate([[0], counts.cumsum()])
    matrix = np.repeat(np.arange(len(counts)), counts)
    start = begins[matrix] + (np.arange(len(matrix)) - first_chunks[matrix]) * CHUNK
    chunks = np.stack([start, np.minimum(CHUNK, begins[matrix + 1] - start), matrix], axis=1)
    return torch.from_numpy(chunks).to(device), torch.from_numpy(first_chunks).to(device)


@cache
def _pairs(source: Places, target: Places, device: torch.device) -> Tensor:
    """Return where each matrix begins, its rows and columns, and begin and columns in the target: int64 ``[B, 5]``."""
    sides = zip(source, source.begins(), target, target.begins(), strict=False)
    rows = [(start, *shape, target_start, columns) for shape, start, (_, columns), target_start in sides]
    return torch.tensor(rows, dtype=torch.int64).to(device)


@triton.jit
def _squares(x, parts, sums, reduced, REDUCTION: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """Add up the squares of a chunk, both plain and divided by the reduction."""
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
    """Store the factor of one matrix, 1 or a power of two if its squares overflow, and ``max(norm, eps) · scale`` of it
    times the factor, NaN if an element is not finite."""
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
    """Divide a chunk by the norm of its matrix."""
    part = parts + tl.program_id(0).to(tl.int64) * 3
    begin, count = tl.multiple_of(tl.load(part), 16), tl.multiple_of(tl.load(part + 1).to(tl.int32), 16)
    norm, factor = tl.load(norms + tl.load(part + 2)), tl.load(factors + tl.load(part + 2))
    for start in range(0, CHUNK, WIDTH):
        at = start + tl.arange(0, WIDTH)
        value = as_fp32(tl.load(x + begin + at, mask=at < count, other=0.0)) * factor
        result = narrowed(tl.div_rn(value, norm), out.dtype.element_ty)
        tl.store(out + begin + at, result, mask=at < count)


@triton.jit
def _moved(x, out, parts, pairs, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """Write a chunk of the result, from wherever its elements come; zeros where they come from nowhere."""
    part = parts + tl.program_id(0).to(tl.int64) * 3
    begin, count = tl.load(part), tl.load(part + 1)
    pair = pairs + tl.load(part + 2) * 5
    rows, columns = tl.load(pair + 1), tl.load(pair + 2)
    target, wide = tl.load(pair + 3), tl.load(pair + 4)
    for start in range(0, CHUNK, WIDTH):
        at = start + tl.arange(0, WIDTH)
        row, column = (begin - target + at) // wide, (begin - target + at) % wide
        is_inside = (at < count) & (row < rows) & (column < columns)
        value = tl.load(x + tl.load(pair) + row * columns + column, mask=is_inside, other=0.0)
        tl.store(out + begin + at, value, mask=at < count)
