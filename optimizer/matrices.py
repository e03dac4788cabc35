"""Which matrices a parameter holds, and what orthogonalising one costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise, product

from ..box import Box, Index
from ..errors import LayoutError
from ..layout import Piece, stacked


@lru_cache(maxsize=4096)
def matrices_of(shape: Index, pieces: tuple[int, ...] | None = None) -> tuple[tuple[Piece, ...], ...]:
    """The matrices in a parameter of this shape, each as pieces of it.

    The last two dims are rows and columns; every index of a dim before them (experts) is a matrix of its own.  A
    parameter without elements holds no matrices.
    ``pieces`` are the row counts of what is fused along the rows: ``(q, k, v)``, ``(gate, up)``, one per head, or one
    per expert of a stacked 2-D parameter.  A matrix keeps the parameter's rank here; it is flattened to two dims only
    when it lies whole in its owner's memory.

    Raises:
        LayoutError: not two or three dims, or the pieces do not add up to the rows.
    """
    if len(shape) < 2:
        raise LayoutError(f"Muon needs a matrix, got shape {shape}; put this parameter in an 'adamw' group")
    if len(shape) > 3:
        raise LayoutError(f"which dims of shape {shape} are rows and columns is not clear; put it in an 'adamw' group")
    if 0 in shape:
        return ()
    *stack, rows, columns = shape
    heights = pieces or (rows,)
    if sum(heights) != rows or min(heights) < 1:
        raise LayoutError(f"pieces {heights} must be positive and add up to the {rows} rows of shape {shape}")
    return tuple(
        stacked([Box((*index, lo, 0), (*(i + 1 for i in index), hi, columns))], dim=len(shape) - 2)
        for index in product(*map(range, stack))
        for lo, hi in pairwise(accumulate(heights, initial=0))
    )


def rows_columns(shape: Sequence[int]) -> tuple[int, int]:
    """``(m, n)`` of a matrix whose leading dims are all 1."""
    return math.prod(shape[:-1]), shape[-1]


def flops(rows: int, columns: int, steps: int) -> int:
    """Floating-point operations of ``steps`` Newton-Schulz iterations.

    With ``s`` the short and ``l`` the long side, one iteration is the Gram product (``2 s² l``), its square
    (``2 s³``) and the product with the matrix (``2 s² l``).
    """
    short, long = sorted((rows, columns))
    return steps * (4 * short * short * long + 2 * short**3)
