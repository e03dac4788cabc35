"""What planning must know of parameters, as plain data, and what it makes of them: matrices with owners."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from ..box import Index
from ..layout import Piece, TensorLayout, through
from ..layouts.owned import owned_layout
from ..overlap import overlaps
from .matrices import Fused, matrices_of, rows_columns, shape_of
from .owners import Int


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor of a parameter that travels to the owners and back: where it rests, and its dtypes on the wire."""

    name: str
    layout: TensorLayout
    fused: Fused
    there: torch.dtype
    back: torch.dtype

    @property
    def matrices(self) -> tuple[tuple[Piece, ...], ...]:
        return matrices_of(self.layout.shape, self.fused)


@dataclass(frozen=True, slots=True)
class Spec:
    """A parameter: its slots, the update first, and what each of its matrices costs (by shape, in FLOPs)."""

    slots: tuple[Slot, ...]
    steps: int


@dataclass(frozen=True, slots=True)
class Unit:
    """One matrix of a parameter.

    Attributes:
        param: number of the parameter in its schedule.
        index: number of the matrix in the parameter.
        shape: in the parameter's rank.
        owner: global rank that orthogonalises it.
        wave: when.
        cost: of orthogonalising it.
    """

    param: int
    index: int
    shape: Index
    owner: int
    wave: int
    cost: int

    @property
    def rows_columns(self) -> tuple[int, int]:
        return rows_columns(self.shape)

    def resting(self, slot: Slot) -> TensorLayout:
        """Where this matrix of a slot rests."""
        return through(slot.matrices[self.index], slot.layout)

    def whole(self, slot: Slot) -> TensorLayout:
        """Where it is orthogonalised."""
        return owned_layout(shape_of(slot.matrices[self.index]), self.owner)


@lru_cache(maxsize=4096)
def residence(layout: TensorLayout, fused: Fused, ranks: tuple[int, ...]) -> tuple[tuple[Int, Int], ...]:
    """For each matrix of a parameter, who holds how much of it: positions in ``ranks``, ascending, and elements."""
    matrices = matrices_of(layout.shape, fused)
    if not matrices:
        return ()
    boxes = [piece.box for matrix in matrices for piece in matrix]
    matrix_of = np.repeat(np.arange(len(matrices)), [len(matrix) for matrix in matrices])
    lo, hi = np.array([box.lo for box in boxes], np.int64), np.array([box.hi for box in boxes], np.int64)
    i, j = overlaps(lo, hi, layout.starts, layout.stops)
    volume = (np.minimum(hi[i], layout.stops[j]) - np.maximum(lo[i], layout.starts[j])).prod(axis=1)

    position = {rank: index for index, rank in enumerate(ranks)}
    replicas = np.array([len(holders) for holders in layout.holders], np.int64)
    holders = np.array([position[f.place.buffer] for all_ in layout.holders for f in all_], np.int64)  # type: ignore[index]
    first = np.cumsum(replicas) - replicas
    count = replicas[j]
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    holder = holders[np.repeat(first[j], count) + within]

    pairs, pair_of = np.unique(np.repeat(matrix_of[i], count) * len(ranks) + holder, return_inverse=True)
    held = np.zeros(len(pairs), np.int64)
    np.add.at(held, pair_of, np.repeat(volume, count))
    cuts = np.searchsorted(pairs, np.arange(1, len(matrices)) * len(ranks))
    return tuple(zip(np.split(pairs % len(ranks), cuts), np.split(held, cuts), strict=True))
