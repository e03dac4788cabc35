"""The products of Newton-Schulz in 16 bits as one Triton kernel, for stacks of matrices on NVIDIA GPUs.

``out = alpha·A·B + beta·D + diagonal·I`` for matrices of any shapes in one launch, which walks through a list of tiles;
each names its matrix (`tiles`).  Where results are known to be symmetric, the list has the tiles of one triangle only,
which are also written mirrored: half the work.  Sums are kept in fp32 and rounded once.

A result has the same bits whatever else is in the stack, as every tile sums along the inner dim in the same order
(`DEPTH`).  Why and with what figures: ``docs/design/kernels.md``.

This file needs Triton.
"""
# Triton's language is typed by the compiler, not by Python:
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from functools import cache, lru_cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..newton_schulz.places import Places, Stack
from .launches import INTERPRETED, as_fp32, narrowed, on_device
from .tiles import DEPTH, Cut, Tile, fastest

LOAD_MULTIPLE = 16
"""Elements that all sides are a multiple of, so that a GPU can load 16 bytes at a time wherever a row begins."""

WIDEST = 1 << 22
"""Elements of a side, so that those of a tile are counted in 32 bits; where it begins, in 64."""


def multiply(
    left: Stack,
    right: Stack,
    *,
    alpha: float = 1.0,
    addend: Stack | None = None,
    beta: float = 0.0,
    diagonal: float = 0.0,
    symmetric: bool = False,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Stack:
    """``alpha·left·right + beta·addend + diagonal·I``, for every matrix of a stack.

    Args:
        left, right: ``m x k`` and ``k x n`` each, of one dtype, bf16 or fp16, turned or not.
        addend: ``m x n`` each, not turned; None for none.
        symmetric: the results are known to be symmetric: what is above the diagonal is mirrored from below.
        out: the memory of the results, no element of an operand, all of it is written; None for a new one.
        tile: None for the fastest; see `fastest`.

    Returns:
        The results, not turned, of the same dtype.

    Raises:
        ValueError: shapes or dtypes that do not fit; sides that are not multiples of `LOAD_MULTIPLE`, or beyond
            `WIDEST`.
        RuntimeError: a CUDA graph is being captured and no tile has been timed for these shapes: run a step before.
    """
    places, inner = _fitting(left.places, left.turned, right.places, right.turned, symmetric)
    dtypes = {stack.memory.dtype for stack in (left, right, addend) if stack is not None}
    if len(dtypes) > 1 or not dtypes <= {torch.bfloat16, torch.float16}:
        raise ValueError(f"expected operands of one dtype of 16 bits, got {sorted(map(str, dtypes))}")
    if addend is not None and (addend.places != places or addend.turned):
        raise ValueError(f"results are {places.runs}, what is added to them is {addend.places.runs}")
    if out is None:
        out = torch.empty(places.numel, dtype=left.memory.dtype, device=left.memory.device)
    if not alpha:
        inner = (0,) * len(inner)
    form = left.turned, right.turned, symmetric, addend is not None

    def launch(tile: Tile, out: Tensor) -> None:
        cut = _cut(left.places, right.places, places, inner, tile, symmetric, out.device)
        _multiply[(len(cut.tiles),)](
            *(left.memory, right.memory, out if addend is None else addend.memory, out, cut.tiles, cut.sizes),
            *(alpha, beta, diagonal, addend is not None, symmetric, left.turned, right.turned, cut.even),
            *(tile.rows, tile.columns, DEPTH),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    if places.numel:
        with on_device(out):
            if tile is None:
                key = (out.device, out.dtype, left.places, right.places, inner, form)
                tile = fastest(key, lambda: partial(launch, out=torch.empty_like(out)))
            launch(tile, out)
    return Stack(out, places)


@lru_cache(maxsize=1024)
def _fitting(
    left: Places, left_turned: bool, right: Places, right_turned: bool, symmetric: bool
) -> tuple[Places, tuple[int, ...]]:
    """What the products of two stacks are, and the inner dim of each."""
    first = [shape[::-1] if left_turned else shape for shape in left]
    second = [shape[::-1] if right_turned else shape for shape in right]
    if len(first) != len(second) or any(a[1] != b[0] for a, b in zip(first, second, strict=True)):
        raise ValueError(f"{first} and {second} cannot be multiplied")
    sides = {side for shape in (*first, *second) for side in shape}
    if any(side % LOAD_MULTIPLE or side > WIDEST for side in sides):
        raise ValueError(f"expected sides that are multiples of {LOAD_MULTIPLE}, up to {WIDEST}, got {sorted(sides)}")
    shapes = [(m, n) for (m, _), (_, n) in zip(first, second, strict=True)]
    if symmetric and any(m != n for m, n in shapes):
        raise ValueError(f"results of {shapes} are not symmetric")
    return Places.of(shapes), tuple(k for _, k in first)


# Not limited: a captured graph reads these lists as long as it lives.
_cut = cache(Cut.of)


@triton.jit
def _multiply(
    left,
    right,
    addend,
    out,
    tiles,
    sizes,
    alpha,
    beta,
    diagonal,
    ADD: tl.constexpr,
    MIRROR: tl.constexpr,
    LEFT_TURNED: tl.constexpr,
    RIGHT_TURNED: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    tile = tiles + tl.program_id(0).to(tl.int64) * 3
    matrix = sizes + tl.load(tile).to(tl.int64) * 6
    top, first = tl.load(tile + 1) * ROWS, tl.load(tile + 2) * COLUMNS
    m, n, k = _aligned(matrix).to(tl.int32), _aligned(matrix + 1).to(tl.int32), _aligned(matrix + 2).to(tl.int32)
    left += _aligned(matrix + 3)
    right += _aligned(matrix + 4)
    begin = _aligned(matrix + 5)
    rows, columns, inner = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    high, wide = m - top, n - first  # what is left of the matrix from here on

    if LEFT_TURNED:
        a = left + top + (rows[:, None] + inner[None, :] * m)
        left_step = DEPTH * m.to(tl.int64)
    else:
        a = left + top.to(tl.int64) * k + (rows[:, None] * k + inner[None, :])
        left_step = DEPTH
    if RIGHT_TURNED:
        b = right + first.to(tl.int64) * k + (inner[:, None] + columns[None, :] * k)
        right_step = DEPTH
    else:
        b = right + first + (inner[:, None] * n + columns[None, :])
        right_step = DEPTH * n.to(tl.int64)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, k, DEPTH):
        if EVEN:
            x, y = tl.load(a), tl.load(b)
        else:
            x = tl.load(a, mask=(rows[:, None] < high) & (inner[None, :] < k - start), other=0.0)
            y = tl.load(b, mask=(inner[:, None] < k - start) & (columns[None, :] < wide), other=0.0)
        total = _dot(x, y, total)
        a += left_step
        b += right_step

    total *= alpha
    place = begin + top.to(tl.int64) * n + first
    cells = rows[:, None] * n + columns[None, :]
    here = (rows[:, None] < high) & (columns[None, :] < wide)
    if ADD:
        total += beta * as_fp32(tl.load(addend + place + cells, mask=here, other=0.0))
    below = top - first + rows[:, None] - columns[None, :]  # how far below the diagonal
    total += tl.where(below == 0, diagonal, 0.0)
    done = narrowed(total, out.dtype.element_ty)
    if MIRROR:
        mirrored = out + begin + first.to(tl.int64) * n + top + (columns[:, None] * n + rows[None, :])
        there = (columns[:, None] < wide) & (rows[None, :] < high)
        # Masks that differ from element to element cost as many stores: only tiles on the diagonal have such.
        if top >= first + COLUMNS:
            tl.store(mirrored, tl.trans(done), mask=there)
            tl.store(out + place + cells, done, mask=here)
        elif ROWS == COLUMNS:
            tl.store(out + place + cells, tl.where(below >= 0, done, tl.trans(done)), mask=here)
        else:
            tl.store(mirrored, tl.trans(done), mask=there & (top + rows[None, :] > first + columns[:, None]))
            tl.store(out + place + cells, done, mask=here & (below >= 0))
    else:
        tl.store(out + place + cells, done, mask=here)


@triton.jit
def _aligned(at):
    """A number that is a multiple of 16, which the compiler is told."""
    return tl.multiple_of(tl.load(at), 16)


@triton.jit
def _dot(x, y, total):
    if INTERPRETED:  # numpy has no bf16; products of 16 bits are exact in fp32
        return tl.dot(as_fp32(x), as_fp32(y), total, input_precision="ieee")
    else:
        return tl.dot(x, y, total)
