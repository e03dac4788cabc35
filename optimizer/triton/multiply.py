"""The products of Newton-Schulz in 16 bits as one Triton kernel, for stacks of matrices on NVIDIA GPUs.

``out = alpha·A·B + beta·D + diagonal·I`` for matrices of any shapes in one launch, which walks through a list of tiles.
Symmetric results have the tiles of one triangle, which are also written mirrored.  Every tile sums in the same order in
fp32 and rounds once, so bits do not depend on the stack.  Why it is done so: ``docs/design/newton_schulz.md``.

This file needs Triton.
"""
# Triton's language is typed by the compiler, not by Python:
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ground.devices import time_replays
from ..ground.tensors import Places, Stack
from .launches import INTERPRETED, as_fp32, launcher, narrowed

LOAD_MULTIPLE = 16
"""Elements that all sides are a multiple of, so that a GPU loads 16 bytes at a time."""

MAX_SIDE = 1 << 22
"""Elements of a side, so that those of a tile are counted in 32 bits; where it begins, in 64."""

DEPTH = 16 if INTERPRETED else 64
"""Elements of the inner dim that all tiles load at a time: so all have one order of sums."""

BAND_ROWS = 8
"""Rows of tiles that are done together, so that neighbours in time share operands in the L2 cache."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The work of one program: ``rows x columns`` of a result, by ``warps`` warps, ``stages`` loads ahead.

    At most ``registers`` a thread let more programs run at a time; None: the compiler decides.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    registers: int | None = None


INTERPRETED_TILE = Tile(32, 32, 4, 1)
SMALL_TILES = (INTERPRETED_TILE,) if INTERPRETED else (Tile(64, 64, 4, 4), Tile(128, 64, 4, 4), Tile(128, 128, 4, 3))
LARGE_TILES = (
    (INTERPRETED_TILE,)
    if INTERPRETED
    else (Tile(128, 128, 8, 3, registers=128), Tile(128, 128, 4, 3), Tile(128, 128, 4, 4))
)
WIDE_TILES = () if INTERPRETED else (Tile(128, 256, 8, 3),)
"""For results that do not fill a GPU, that do, and that do and are not mirrored; each was the fastest somewhere on an
H100.  Few, as each is compiled and timed once for every product."""

MIN_FILLING_TILES = 132
"""Tiles of 128 x 128 from which results fill a GPU: an H100 has as many multiprocessors."""


class Kind(NamedTuple):
    """The common properties of products of two stacks that are launched alike.

    Attributes:
        multiplied: whether there is a product; without one, the result is the addend.
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
    """Return ``alpha·left·right + beta·addend + diagonal·I`` of every matrix of a stack, on the current device.

    Args:
        left, right: ``m x k`` and ``k x n`` each, of one dtype, bf16 or fp16, turned or not.
        addend: ``m x n`` each, not turned.
        symmetric: results are known to be symmetric: elements above the diagonal are mirrored from below.
        out: the memory of the results, none of an operand's.
        tile: None for the fastest.

    Raises:
        ValueError: shapes or dtypes that do not fit; sides that are not multiples of `LOAD_MULTIPLE`, or beyond
            `MAX_SIDE`; memories that do not begin at a multiple of 16 bytes.
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
        raise ValueError("the addend of the results is turned")
    if (memory.data_ptr() | right.memory.data_ptr() | added.data_ptr() | out.data_ptr()) % 16:
        raise ValueError("expected memories that begin at multiples of 16 bytes")
    if products.numel:
        products.launch(tile, (memory, right.memory, added, out), (alpha, beta, diagonal))
    return Stack(out, products.places)


class _Products:
    """Products of one kind, at ``places`` with ``numel`` elements, and their launches by tile.

    Raises:
        ValueError: shapes or a dtype that do not fit.
    """

    def __init__(self, kind: Kind) -> None:
        if kind.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"expected operands of one dtype of 16 bits, got {kind.dtype}")
        first = [shape[::-1] if kind.left_turned else shape for shape in kind.left]
        second = [shape[::-1] if kind.right_turned else shape for shape in kind.right]
        if len(first) != len(second) or any(a[1] != b[0] for a, b in zip(first, second, strict=True)):
            raise ValueError(f"{first} and {second} cannot be multiplied")
        sides = {*chain(*first, *second)}
        if any(side % LOAD_MULTIPLE or side > MAX_SIDE for side in sides):
            raise ValueError(
                f"expected sides that are multiples of {LOAD_MULTIPLE}, up to {MAX_SIDE}, got {sorted(sides)}"
            )
        shapes = [(m, n) for (m, _), (_, n) in zip(first, second, strict=True)]
        if kind.symmetric and any(m != n for m, n in shapes):
            raise ValueError(f"results of {shapes} are not symmetric")
        self.places = Places.of(shapes)
        if kind.addend not in (None, self.places):
            raise ValueError(f"results are {self.places.runs}, their addend is {kind.addend}")
        self.numel = self.places.numel
        self._inner = [k for _, k in first] if kind.multiplied else [0] * len(first)
        self._kind = kind
        self._launches: dict[Tile, Callable[..., None]] = {}
        self._fastest: Callable[..., None] | None = None

    def launch(self, tile: Tile | None, memories: tuple[Tensor, ...], factors: tuple[float, ...]) -> None:
        """Multiply left, right, addend and out with alpha, beta and diagonal, by the fastest tile if none is given."""
        if tile is not None:
            self._by(tile)(*memories, *factors)
            return
        if self._fastest is None:
            num_tiles = 0
            for count, rows, columns in self.places.runs:
                num_tiles += count * len(grid(rows, columns, LARGE_TILES[0], self._kind.symmetric))
            tiles = SMALL_TILES
            if num_tiles >= MIN_FILLING_TILES:
                tiles = LARGE_TILES if self._kind.symmetric else (*LARGE_TILES, *WIDE_TILES)
            self._fastest = self._by(fastest(self._kind, tiles, lambda tile: self._by(tile)(*memories, *factors)))
        self._fastest(*memories, *factors)

    def _by(self, tile: Tile) -> Callable[..., None]:
        """Return the launch of all products in tiles of this size, made once."""
        if tile in self._launches:
            return self._launches[tile]
        kind = self._kind
        # For each program the matrix, and the row and column of its tile.
        tiles: list[tuple[int, int, int]] = []
        for matrix, (rows, columns) in enumerate(self.places):
            tiles += [(matrix, row, column) for row, column in grid(rows, columns, tile, kind.symmetric)]
        # For each matrix rows, columns and inner dim, and where operands and result begin, in elements.
        shapes, depths = np.array(list(self.places), np.int64).reshape(-1, 2), np.array(self._inner, np.int64)
        begins = [np.array(places.begins()[:-1], np.int64) for places in (kind.left, kind.right, self.places)]
        sizes = torch.from_numpy(np.stack([*shapes.T, depths, *begins], axis=1)).to(kind.device)
        programs = torch.from_numpy(np.array(tiles, np.int32).reshape(-1, 3)).to(kind.device)
        # Tiles that fit need no masks.
        is_even = not ((shapes % (tile.rows, tile.columns)).any() or (depths % DEPTH).any())
        launch = launcher(
            *(_multiply, len(tiles)),
            num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
        )  # fmt: skip
        flags = (kind.addend is not None, kind.symmetric, kind.left_turned, kind.right_turned, is_even)
        constants = (*flags, tile.rows, tile.columns, DEPTH)

        def launch_all(left: Tensor, right: Tensor, addend: Tensor, out: Tensor, *factors: float) -> None:
            launch(left, right, addend, out, programs, sizes, *factors, *constants)

        self._launches[tile] = launch_all
        return launch_all


_products = cache(_Products)


def fastest(kind: object, tiles: Sequence[Tile], launch: Callable[[Tile], None]) -> Tile:
    """Return the fastest tile to ``launch`` products of a kind.  All of them give the same bits.

    Raises:
        RuntimeError: no tile fits this GPU.
    """
    if len(tiles) == 1:
        return tiles[0]
    torch.cuda.synchronize()  # running work, such as a collective, would be timed, too
    times = {}
    for tile in tiles:
        try:
            launch(tile)
        except (triton.runtime.errors.OutOfResources, triton.runtime.errors.PTXASError):
            continue  # too little shared memory for it, or no code
        times[tile] = time_replays(partial(launch, tile))
    if not times:
        raise RuntimeError(f"none of the tiles {tiles} fits this GPU")
    return min(times, key=times.__getitem__)


@lru_cache(maxsize=256)
def grid(rows: int, columns: int, tile: Tile, symmetric: bool) -> list[tuple[int, int]]:
    """Return row and column of each tile of a matrix; of a symmetric one only those that reach the diagonal."""
    num_rows, num_columns = -(-rows // tile.rows), -(-columns // tile.columns)
    tiles: list[tuple[int, int]] = []
    for top in range(0, num_rows, BAND_ROWS):
        band = range(top, min(top + BAND_ROWS, num_rows))
        for j in range(num_columns):
            tiles += [(i, j) for i in band if not symmetric or (i + 1) * tile.rows > j * tile.columns]
    return tiles


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
    """Compute one tile of one product; ``tiles`` and ``sizes`` are as `_by` makes them."""
    tile = tiles + tl.program_id(0).to(tl.int64) * 3
    matrix = sizes + tl.load(tile).to(tl.int64) * 6
    top, first = tl.load(tile + 1) * ROWS, tl.load(tile + 2) * COLUMNS
    m, n, k = _aligned(matrix).to(tl.int32), _aligned(matrix + 1).to(tl.int32), _aligned(matrix + 2).to(tl.int32)
    left += _aligned(matrix + 3)
    right += _aligned(matrix + 4)
    begin = _aligned(matrix + 5)
    rows, columns, inner = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    high, wide = m - top, n - first  # the remainder of the matrix from here on

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
    # Sums in fp32, in the same order for every tile size.
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

    # The result, rounded once, and its mirror image.
    total *= alpha
    place = begin + top.to(tl.int64) * n + first
    cells = rows[:, None] * n + columns[None, :]
    mask = (rows[:, None] < high) & (columns[None, :] < wide)
    if ADD:
        total += beta * as_fp32(tl.load(addend + place + cells, mask=mask, other=0.0))
    below = top - first + rows[:, None] - columns[None, :]  # how far below the diagonal
    total += tl.where(below == 0, diagonal, 0.0)
    result = narrowed(total, out.dtype.element_ty)
    if MIRROR:
        mirrored = out + begin + first.to(tl.int64) * n + top + (columns[:, None] * n + rows[None, :])
        mirrored_mask = (columns[:, None] < wide) & (rows[None, :] < high)
        # Masks that differ from element to element cost as many stores: only tiles on the diagonal have such.
        if top >= first + COLUMNS:
            tl.store(mirrored, tl.trans(result), mask=mirrored_mask)
            tl.store(out + place + cells, result, mask=mask)
        elif ROWS == COLUMNS:
            tl.store(out + place + cells, tl.where(below >= 0, result, tl.trans(result)), mask=mask)
        else:
            tl.store(mirrored, tl.trans(result), mask=mirrored_mask & (top + rows[None, :] > first + columns[:, None]))
            tl.store(out + place + cells, result, mask=mask & (below >= 0))
    else:
        tl.store(out + place + cells, result, mask=mask)


@triton.jit
def _aligned(at):
    return tl.multiple_of(tl.load(at), 16)


@triton.jit
def _dot(x, y, total):
    if INTERPRETED:  # numpy has no bf16; products of 16 bits are exact in fp32
        return tl.dot(as_fp32(x), as_fp32(y), total, input_precision="ieee")
    else:
        return tl.dot(x, y, total)
