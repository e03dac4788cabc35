"""Newton-Schulz products in 16 bits as Triton kernels, for stacks of equal matrices on NVIDIA GPUs.

There is one kernel, ``out = alpha·A·B + beta·D + diagonal·I``, which works through a list of tiles.  Where the result
is known to be symmetric, the list has the tiles of one triangle only, which are also written mirrored: half the work.
Sums are kept in fp32 and rounded once.  Offsets are 64-bit, sizes and strides are any.

A result has the same bits whatever else is in the stack: it depends on neither the size of the stack nor the strides of
the operands, and every tile sums along the inner dim in the same order (`DEPTH`).  Why and with what figures:
``docs/design/kernels.md``.

This file needs Triton; `products` imports it when a device asks for it.
"""
# Triton's language is typed by the compiler, not by Python:
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launches import INTERPRETED, narrowed, on_device, widened
from .tiles import DEPTH, Tile, fastest, tiles

ALIGN = 16
"""Elements that both sides of a matrix are a multiple of."""

WIDTH = 64 if INTERPRETED else 1024
"""Elements of a row that are squared or scaled at a time."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """`products.Products` by kernels.

    Args:
        dtype: bf16 or fp16: of operands and results.

    Raises:
        ValueError: another dtype.
    """

    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"kernels are for bfloat16 and float16, got {self.dtype}")

    def over(self, stack: Tensor, work: Callable[[Tensor], Tensor]) -> Tensor:
        """``work`` on all together: as many launches as for one.

        Sides that are no multiple of `ALIGN` are filled up with zeros, which stay zeros: so rows begin where a GPU can
        load them 16 bytes at a time.
        """
        *_, m, n = stack.shape
        missing = -m % ALIGN, -n % ALIGN
        if not any(missing):
            return work(stack)
        return work(torch.nn.functional.pad(stack, (0, missing[1], 0, missing[0])))[:, :m, :n]

    def normal(self, x: Tensor, eps: float, scale: float) -> Tensor:
        """Each matrix divided by ``max(its Frobenius norm, eps) · scale``; all NaN if the norm is not finite.

        Args:
            x: ``[B, s, l]``, any floating dtype up to fp32 and any strides.

        Returns:
            ``[B, s, l]``, contiguous, of ``dtype``.
        """
        # The order of a sum within a program follows the strides of its operand, and whether it is aligned.
        dense = x.is_contiguous() and x.data_ptr() % 16 == 0
        exact = x if dense else torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
        result = torch.empty(x.shape, dtype=self.dtype, device=x.device)
        if exact.numel() == 0:
            return result
        batch, rows, columns = x.shape
        squares = torch.empty((batch, rows), dtype=torch.float32, device=x.device)
        norms = torch.empty(batch, dtype=torch.float32, device=x.device)
        with on_device(x):
            _row_squares[(batch * rows,)](exact, squares, columns, WIDTH)
            _norms[(batch,)](squares, norms, rows, eps, scale, WIDTH)
            _divided[(batch * rows,)](exact, norms, result, rows, columns, WIDTH)
        return result

    def gram(self, x: Tensor) -> Tensor:
        """``x·xᵀ`` of ``[B, s, s]`` for ``[B, s, l]``."""
        return self._symmetric(x, x.mT)

    def square(self, r: Tensor, b: float, c: float, a: float = 0.0) -> Tensor:
        """``a·I + b·r + c·r²`` for symmetric ``[B, s, s]``."""
        left, right = (r, r.mT) if c else (r[..., :0], r.mT[:, :0])  # a cubic step has no square
        return self._symmetric(left, right, alpha=c, addend=r, beta=b, diagonal=a)

    def commuting(self, z: Tensor, q: Tensor) -> Tensor:
        """``z·q`` for symmetric ``[B, s, s]`` that commute, so that it is symmetric."""
        return self._symmetric(z, q.mT)

    def added(self, x: Tensor, a: float, p: Tensor) -> Tensor:
        """``a·x + p·x`` for ``x`` of ``[B, s, l]`` and ``p`` of ``[B, s, s]``."""
        out = torch.empty(x.shape, dtype=self.dtype, device=x.device)
        return multiply(p, x, out, addend=x if a else None, beta=a)

    def _symmetric(
        self,
        left: Tensor,
        right: Tensor,
        *,
        alpha: float = 1.0,
        addend: Tensor | None = None,
        beta: float = 0.0,
        diagonal: float = 0.0,
    ) -> Tensor:
        out = torch.empty((*left.shape[:2], right.shape[2]), dtype=self.dtype, device=left.device)
        return multiply(left, right, out, alpha=alpha, addend=addend, beta=beta, diagonal=diagonal, symmetric=True)


def multiply(
    left: Tensor,
    right: Tensor,
    out: Tensor,
    *,
    alpha: float = 1.0,
    addend: Tensor | None = None,
    beta: float = 0.0,
    diagonal: float = 0.0,
    symmetric: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """``out = alpha·left·right + beta·addend + diagonal·I``, for every matrix of a stack.

    Args:
        left, right: ``[B, m, k]`` and ``[B, k, n]`` of one dtype, bf16 or fp16, any strides.
        out: ``[B, m, n]`` of 16 bits or fp32, any strides, no element of an operand; all of it is written.
        addend: ``[B, m, n]``, or None for none.
        symmetric: the result is known to be symmetric: what is above the diagonal is mirrored from below.
        tile: None for the fastest; see `fastest`.

    Returns:
        ``out``.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        RuntimeError: a CUDA graph is being captured and no tile has been timed for this shape: run a step before.
    """
    batch, m, k = left.shape
    n = right.shape[2]
    if right.shape != (batch, k, n) or out.shape != (batch, m, n) or (addend is not None and addend.shape != out.shape):
        shapes = [tuple(t.shape) for t in (left, right, out, addend) if t is not None]
        raise ValueError(f"left, right, out and addend do not fit together: {shapes}")
    if left.dtype != right.dtype or left.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"expected operands of one dtype of 16 bits, got {left.dtype} and {right.dtype}")
    if symmetric and m != n:
        raise ValueError(f"a result of {m} x {n} is not symmetric")
    if out.numel() == 0:
        return out

    def launch(tile: Tile, out: Tensor = out) -> None:
        listed = tiles(m, n, tile.rows, tile.columns, symmetric, left.device)
        _multiply[(batch * len(listed),)](
            *(left, right, out if addend is None else addend, out, listed, len(listed)),
            *(m, n, k, *left.stride(), *right.stride(), *(out if addend is None else addend).stride(), *out.stride()),
            *(alpha, beta, diagonal, addend is not None, symmetric),
            m % tile.rows == 0 and n % tile.columns == 0 and k % DEPTH == 0,
            *(tile.rows, tile.columns, DEPTH),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    with on_device(left):
        if tile is None:
            key = (left.device, batch, m, n, k, left.dtype, symmetric, addend is not None)
            tile = fastest(key, lambda tile: launch(tile, torch.empty_like(out)))
        launch(tile)
    return out


@triton.jit
def _multiply(
    left,
    right,
    addend,
    out,
    tiles,
    count,
    m,
    n,
    k,
    left_batch,
    left_row,
    left_column,
    right_batch,
    right_row,
    right_column,
    add_batch,
    add_row,
    add_column,
    out_batch,
    out_row,
    out_column,
    alpha,
    beta,
    diagonal,
    ADD: tl.constexpr,
    MIRROR: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    program = tl.program_id(0)
    batch = (program // count).to(tl.int64)
    at = tiles + program % count * 2
    i, j = tl.load(at), tl.load(at + 1)
    rows = (i * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = (j * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    inner = tl.arange(0, DEPTH).to(tl.int64)
    here = (rows[:, None] < m) & (columns[None, :] < n)

    a = left + batch * left_batch + rows[:, None] * left_row + inner[None, :] * left_column
    b = right + batch * right_batch + inner[:, None] * right_row + columns[None, :] * right_column
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, k, DEPTH):
        if EVEN:
            x, y = tl.load(a), tl.load(b)
        else:
            left_over = k - start
            x = tl.load(a, mask=(rows[:, None] < m) & (inner[None, :] < left_over), other=0.0)
            y = tl.load(b, mask=(inner[:, None] < left_over) & (columns[None, :] < n), other=0.0)
        total = _dot(x, y, total)
        a += DEPTH * tl.cast(left_column, tl.int64)
        b += DEPTH * tl.cast(right_row, tl.int64)

    total *= alpha
    if ADD:
        d = addend + batch * add_batch + rows[:, None] * add_row + columns[None, :] * add_column
        total += beta * widened(tl.load(d, mask=here, other=0.0))
    total += tl.where(rows[:, None] == columns[None, :], diagonal, 0.0)
    done = narrowed(total, out.dtype.element_ty)
    place = out + batch * out_batch
    if MIRROR:
        mirrored = place + columns[:, None] * out_row + rows[None, :] * out_column
        below = (rows[None, :] < m) & (columns[:, None] < rows[None, :])
        tl.store(mirrored, tl.trans(done), mask=below)
        here &= columns[None, :] <= rows[:, None]
    tl.store(place + rows[:, None] * out_row + columns[None, :] * out_column, done, mask=here)


@triton.jit
def _dot(x, y, total):
    if INTERPRETED:  # numpy has no bf16; products of 16 bits are exact in fp32
        return tl.dot(widened(x), widened(y), total, input_precision="ieee")
    else:
        return tl.dot(x, y, total)


@triton.jit
def _row_squares(x, squares, columns, WIDTH: tl.constexpr):
    """The sum of squares of one row."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for start in range(0, columns, WIDTH):
        at = start + tl.arange(0, WIDTH)
        value = widened(tl.load(x + row * columns + at, mask=at < columns, other=0.0))
        total += value * value
    tl.store(squares + row, tl.sum(total))


@triton.jit
def _norms(squares, norms, rows, eps, scale, WIDTH: tl.constexpr):
    """``max(norm, eps) · scale`` of one matrix; NaN if the norm is not finite."""
    matrix = tl.program_id(0).to(tl.int64)
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for start in range(0, rows, WIDTH):
        at = start + tl.arange(0, WIDTH)
        total += tl.load(squares + matrix * rows + at, mask=at < rows, other=0.0)
    norm = tl.sqrt_rn(tl.sum(total))
    # Written so that NaN fails the first test: an infinite norm would divide finite elements to zero.
    norm = tl.where(norm < float("inf"), norm, float("nan"))
    tl.store(norms + matrix, tl.where(norm < eps, eps, norm) * scale)


@triton.jit
def _divided(x, norms, out, rows, columns, WIDTH: tl.constexpr):
    """One row over the norm of its matrix."""
    row = tl.program_id(0).to(tl.int64)
    norm = tl.load(norms + row // rows)
    for start in range(0, columns, WIDTH):
        at = start + tl.arange(0, WIDTH)
        value = widened(tl.load(x + row * columns + at, mask=at < columns, other=0.0))
        done = narrowed(tl.div_rn(value, norm), out.dtype.element_ty)
        tl.store(out + row * columns + at, done, mask=at < columns)
