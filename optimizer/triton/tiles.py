"""How the products of a stack are cut into tiles, and which tiles are the fastest on this device.

This file needs Triton.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch
import triton
from torch import Tensor

from ..ground.cuda_graphs import replayed, settled
from ..ground.tensors import Places
from .launches import INTERPRETED

DEPTH = 16 if INTERPRETED else 64
"""Elements of the inner dim that are loaded at a time: the same for all tiles, so that all have one order of sums."""

BAND = 8
"""Rows of tiles that are worked through together, so that neighbours in time share operands in the L2 cache."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes: ``rows x columns`` of a result, by ``warps`` warps, ``stages`` loads ahead.

    ``registers`` bounds what a thread takes of them, so that more programs run at a time; None: the compiler decides.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    registers: int | None = None


INTERPRETED_TILE = Tile(32, 32, 4, 1)
SMALL = (INTERPRETED_TILE,) if INTERPRETED else (Tile(64, 64, 4, 4), Tile(128, 64, 4, 4), Tile(128, 128, 4, 3))
LARGE = (
    (INTERPRETED_TILE,)
    if INTERPRETED
    else (Tile(128, 128, 8, 3, registers=128), Tile(128, 128, 4, 3), Tile(128, 128, 4, 4))
)
WIDE = () if INTERPRETED else (Tile(128, 256, 8, 3),)
"""For results that do not fill a GPU, that do, and that do and are not mirrored.  Few, as each is compiled and timed
once for every product; each was the fastest of its like somewhere on an H100 (`docs/design/kernels.md` has the
figures).  Two programs run at a time on a multiprocessor where a thread takes at most 128 registers."""

FILLED = 132
"""Tiles of 128 x 128 from which results fill a GPU: an H100 has as many multiprocessors."""


def suitable_tiles(out: Places, symmetric: bool) -> tuple[Tile, ...]:
    """The tiles that are worth compiling for results that lie so."""
    first = LARGE[0]
    tiles = sum(count * len(grid(rows, columns, first, symmetric)) for count, rows, columns in out.runs)
    return SMALL if tiles < FILLED else LARGE if symmetric else (*LARGE, *WIDE)


def fastest(what: object, tiles: Sequence[Tile], launch: Callable[[Tile], None]) -> Tile:
    """The fastest tile.  All of them give the same bits.

    Args:
        what: named in errors.
        launch: what is timed, alone on the device.

    Raises:
        RuntimeError: a CUDA graph is being captured, or no tile fits this GPU.
    """
    if len(tiles) == 1:
        return tiles[0]
    settled(f"no tile has been timed for {what}")
    torch.cuda.synchronize()  # what is under way, a collective say, would be timed, too
    times = {tile: time for tile in tiles if (time := _timed(tile, launch)) is not None}
    if not times:
        raise RuntimeError(f"none of the tiles {tiles} fits this GPU")
    return min(times, key=times.__getitem__)


def _timed(tile: Tile, launch: Callable[[Tile], None]) -> float | None:
    """Seconds, or None if this GPU has too little shared memory for it, or no code."""
    try:
        launch(tile)
    except (triton.runtime.errors.OutOfResources, triton.runtime.errors.PTXASError):
        return None
    return replayed(partial(launch, tile))


@dataclass(frozen=True, slots=True)
class Cut:
    """The products of a stack as what one launch walks through; tensors on the device.

    Attributes:
        tiles: int32 ``[programs, 3]``: the matrix, and the row and column of its tile.
        sizes: int64 ``[B, 6]``: rows and columns of the result and the inner dim; where left and right operand and
            result begin, in elements.
        even: whether all sides are whole numbers of tiles, and the inner dim of `DEPTH`.
    """

    tiles: Tensor
    sizes: Tensor
    even: bool

    @classmethod
    def of(
        cls,
        left: Places,
        right: Places,
        out: Places,
        inner: tuple[int, ...],
        tile: Tile,
        symmetric: bool,
        device: torch.device,
    ) -> Cut:
        """For results ``out``, each with an inner dim; of symmetric ones, only tiles that reach the diagonal."""
        settled("no list of tiles has been made for these shapes")
        shapes = np.array(list(out), np.int64).reshape(-1, 2)
        begins = [np.array(places.begins()[:-1], np.int64) for places in (left, right, out)]
        depths = np.array(inner, np.int64)
        sizes = np.stack([*shapes.T, depths, *begins], axis=1)
        placed = [
            (matrix, row, column)
            for matrix, (rows, columns) in enumerate(out)
            for row, column in grid(rows, columns, tile, symmetric)
        ]
        even = not ((shapes % (tile.rows, tile.columns)).any() or (depths % DEPTH).any())
        tiles = np.array(placed, np.int32).reshape(-1, 3)
        return cls(torch.from_numpy(tiles).to(device), torch.from_numpy(sizes).to(device), even)


@lru_cache(maxsize=256)
def grid(rows: int, columns: int, tile: Tile, symmetric: bool) -> list[tuple[int, int]]:
    """Row and column of each tile of a matrix; of a symmetric one only those that reach the diagonal."""
    high, wide = -(-rows // tile.rows), -(-columns // tile.columns)
    bands = (range(top, min(top + BAND, high)) for top in range(0, high, BAND))
    pairs = [(i, j) for band in bands for j in range(wide) for i in band]
    return [(i, j) for i, j in pairs if not symmetric or (i + 1) * tile.rows > j * tile.columns]
