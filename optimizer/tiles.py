"""How a product is cut into tiles, and which tiles are the fastest on this device.

This file needs Triton.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch
import triton
from torch import Tensor

from .capture import settled
from .launches import INTERPRETED

DEPTH = 16 if INTERPRETED else 64
"""Elements of the inner dim that are loaded at a time: the same for all tiles, so that all have one order of sums."""

BAND = 8
"""Rows of tiles that are worked through together, so that neighbours in time share operands in the L2 cache."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes: ``rows x columns`` of the result, by ``warps`` warps, ``stages`` loads ahead."""

    rows: int
    columns: int
    warps: int
    stages: int


TILES = (
    (Tile(32, 32, 4, 1),)
    if INTERPRETED
    else (Tile(128, 128, 8, 3), Tile(128, 256, 8, 3), Tile(128, 128, 4, 4), Tile(64, 256, 4, 4), Tile(64, 64, 4, 4))
)
"""A small set, as each is compiled and timed once for every shape.  Compiled for Hopper, all have their loads in flight
and spill less than 100 bytes of registers; 256 x 256 does not compile."""


_fastest: dict[tuple[object, ...], Tile] = {}


def fastest(key: tuple[object, ...], launch: Callable[[Tile], None]) -> Tile:
    """The fastest of `TILES`, timed at the first call with this key.  All of them give the same bits.

    Raises:
        RuntimeError: a CUDA graph is being captured, or no tile fits this GPU.
    """
    if len(TILES) == 1:
        return TILES[0]
    if key not in _fastest:
        settled(f"no tile has been timed for {key}")
        times = {tile: time for tile in TILES if (time := _timed(tile, launch)) is not None}
        if not times:
            raise RuntimeError(f"none of the tiles {TILES} fits this GPU")
        _fastest[key] = min(times, key=times.__getitem__)
    return _fastest[key]


def _timed(tile: Tile, launch: Callable[[Tile], None]) -> float | None:
    """Milliseconds, or None if this GPU has too little shared memory for it."""
    try:
        time: float = triton.testing.do_bench(lambda: launch(tile), warmup=5, rep=20, return_mode="median")
    except triton.runtime.errors.OutOfResources:
        return None
    return time


@lru_cache(maxsize=256)
def tiles(m: int, n: int, rows: int, columns: int, symmetric: bool, device: torch.device) -> Tensor:
    """Row and column of each tile, int32 ``[tiles, 2]``; of a symmetric result only those that reach the diagonal."""
    settled("no list of tiles has been made for this shape")
    high, wide = -(-m // rows), -(-n // columns)
    bands = (range(top, min(top + BAND, high)) for top in range(0, high, BAND))
    found = [(i, j) for band in bands for j, i in product(range(wide), band)]
    if symmetric:
        found = [(i, j) for i, j in found if (i + 1) * rows > j * columns]
    return torch.tensor(found, dtype=torch.int32).to(device)
