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

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ground.tensors import Places, Stack
from .launches import INTERPRETED, as_fp32, launcher, narrowed
from .tiles import DEPTH, Cut, Tile, fastest, suitable_tiles

LOAD_MULTIPLE = 16
"""Elements that all sides are a multiple of, so that a GPU can load 16 bytes at a time wherever a row begins."""

WIDEST = 1 << 22
"""Elements of a side, so that those of a tile are counted in 32 bits; where it begins, in 64."""


class Kind(NamedTuple):
    """What products of two stacks have in common that are launched alike.

    Attributes:
        left, right, addend: how the operands lie; no addend: None.
        left_turned, right_turned: as in `Stack`.
        multiplied: whether there is a product; without one, the result is what is added.
        symmetric: see :func:`multiply`.
    """

    left: Places
    left_turned: bool
    right: Places
    right_turned: bool
    addend: Places | None
    multiplied: bool
    symmetric: bool
    dtype: torch.dtype
    device: torch.device


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
    """``alpha·left·right + beta·addend + diagonal·I``, for every matrix of a stack, on the current device.

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
            `WIDEST`; memories that do not begin at a multiple of 16 bytes.
        RuntimeError: a CUDA graph is being captured and no tile has been timed for these shapes: run a step before.
    """
    memory, dtype = left.memory, left.memory.dtype
    products = _products(
        Kind(
            *(left.places, left.turned, right.places, right.turned, None if addend is None else addend.places),
            *(alpha != 0, symmetric, dtype, memory.device),
        )
    )
    if out is None:
        out = torch.empty(products.numel, dtype=dtype, device=memory.device)
    added = out if addend is None else addend.memory
    if right.memory.dtype is not dtype or added.dtype is not dtype or out.dtype is not dtype:
        raise ValueError(f"expected operands of one dtype, got {[dtype, right.memory.dtype, added.dtype, out.dtype]}")
    if addend is not None and addend.turned:
        raise ValueError("what is added to results is turned")
    if (memory.data_ptr() | right.memory.data_ptr() | added.data_ptr() | out.data_ptr()) % 16:
        raise ValueError("expected memories that begin at multiples of 16 bytes")
    if products.numel:
        products.launch(tile, (memory, right.memory, added, out), (alpha, beta, diagonal))
    return Stack(out, products.places)


class _Products:
    """Products of one kind, and what launches them, by tile.

    Attributes:
        places, numel: where the results lie, and all their elements.
    """

    def __init__(self, kind: Kind) -> None:
        self.places, self._inner = _results(kind)
        self.numel = self.places.numel
        self._kind = kind
        self._launches: dict[Tile, Callable[..., None]] = {}
        self._best: Callable[..., None] | None = None

    def launch(self, tile: Tile | None, memories: tuple[Tensor, ...], factors: tuple[float, ...]) -> None:
        """Multiply, by the fastest tile if none is given.

        Args:
            memories: left, right, addend, out.
            factors: alpha, beta, diagonal.
        """
        if tile is None:
            if self._best is None:
                tiles = suitable_tiles(self.places, self._kind.symmetric)
                self._best = self._by(fastest(self._kind, tiles, lambda tile: self._by(tile)(*memories, *factors)))
            self._best(*memories, *factors)
        else:
            self._by(tile)(*memories, *factors)

    def _by(self, tile: Tile) -> Callable[..., None]:
        if tile not in self._launches:
            self._launches[tile] = self._launch_of(tile)
        return self._launches[tile]

    def _launch_of(self, tile: Tile) -> Callable[..., None]:
        kind = self._kind
        cut = Cut.of(kind.left, kind.right, self.places, self._inner, tile, kind.symmetric, kind.device)
        launch = launcher(
            *(_multiply, len(cut.tiles)),
            num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
        )  # fmt: skip
        flags = (kind.addend is not None, kind.symmetric, kind.left_turned, kind.right_turned, cut.even)
        fixed = (*flags, tile.rows, tile.columns, DEPTH)

        def multiplied(left: Tensor, right: Tensor, addend: Tensor, out: Tensor, *factors: float) -> None:
            launch(left, right, addend, out, cut.tiles, cut.sizes, *factors, *fixed)

        return multiplied


# Not limited: a captured graph reads these lists of tiles as long as it lives.
_products = cache(_Products)


def _results(kind: Kind) -> tuple[Places, tuple[int, ...]]:
    """What the products of two stacks are, and the inner dim of each."""
    if kind.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"expected operands of one dtype of 16 bits, got {kind.dtype}")
    first = [shape[::-1] if kind.left_turned else shape for shape in kind.left]
    second = [shape[::-1] if kind.right_turned else shape for shape in kind.right]
    if len(first) != len(second) or any(a[1] != b[0] for a, b in zip(first, second, strict=True)):
        raise ValueError(f"{first} and {second} cannot be multiplied")
    sides = {side for shape in (*first, *second) for side in shape}
    if any(side % LOAD_MULTIPLE or side > WIDEST for side in sides):
        raise ValueError(f"expected sides that are multiples of {LOAD_MULTIPLE}, up to {WIDEST}, got {sorted(sides)}")
    shapes = [(m, n) for (m, _), (_, n) in zip(first, second, strict=True)]
    if kind.symmetric and any(m != n for m, n in shapes):
        raise ValueError(f"results of {shapes} are not symmetric")
    places = Places.of(shapes)
    if kind.addend not in (None, places):
        raise ValueError(f"results are {places.runs}, what is added to them is {kind.addend}")
    return places, tuple(k if kind.multiplied else 0 for _, k in first)


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
