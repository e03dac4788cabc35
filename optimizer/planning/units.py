"""What planning must know of parameters, as plain data, and what it makes of them: matrices with owners."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from ...box import Index, row_major
from ...layout import Piece, Place, TensorLayout, through
from ...layouts.owned import blocks_layout, blocks_of
from ...overlap import overlaps
from ...plan import Copy
from ..newton_schulz.forms import Form
from ..newton_schulz.gram import gram_is_cheaper
from .matrices import Fused, matrices_of, rows_columns, shapes_of
from .owners import Int


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor of a parameter that travels to the owners and back: where it rests, and in which dtype it travels."""

    name: str
    layout: TensorLayout
    fused: Fused
    there: torch.dtype
    back: torch.dtype

    @property
    def matrices(self) -> tuple[tuple[Piece, ...], ...]:
        return matrices_of(self.layout.shape, self.fused)

    @property
    def shapes(self) -> tuple[Index, ...]:
        """Of the matrices, in the parameter's rank."""
        return shapes_of(self.layout.shape, self.fused)


@dataclass(frozen=True, slots=True)
class Spec:
    """A parameter.

    Attributes:
        slots: what travels of it, the update first.
        cost: of orthogonalising an ``m x n`` matrix on one of ``parts`` ranks that share it, in any unit.
        blocks: into how many blocks its matrices are cut along their long side, so that as many ranks can share one;
            a power of two.  1: they are not cut.
        form: how an ``m x n`` matrix is orthogonalised, of which the parameter has ``copies``.
        scale: the learning-rate factor of an ``m x n`` matrix.
    """

    slots: tuple[Slot, ...]
    cost: Callable[[int, int, int], int]
    blocks: int = 1
    form: Callable[[int, int, int], Form] = lambda m, n, copies: Form(kernels=False, gram=gram_is_cheaper(m, n))
    scale: Callable[[int, int], float] = lambda m, n: 1.0


@dataclass(frozen=True, slots=True)
class Unit:
    """One matrix of a parameter.

    Attributes:
        param: number of the parameter in its schedule.
        index: number of the matrix in the parameter.
        shape: in the parameter's rank.
        owners: global ranks that orthogonalise it; each has as many consecutive blocks of it.
        blocks: into how many it is cut (`Spec.blocks`).
        stage: when.
        cost: of orthogonalising it.
        form: how.
    """

    param: int
    index: int
    shape: Index
    owners: tuple[int, ...]
    blocks: int
    stage: int
    cost: int
    form: Form

    @property
    def rows_columns(self) -> tuple[int, int]:
        return rows_columns(self.shape)

    def resting(self, slot: Slot) -> TensorLayout:
        """Where this matrix of a slot rests."""
        return through(slot.matrices[self.index], slot.layout)

    def whole(self, slot: Slot) -> TensorLayout:
        """Where it is orthogonalised."""
        return blocks_layout(slot.shapes[self.index], self.owners, self.blocks)

    def parts(self, slot: Slot, rank: int) -> list[tuple[int, int]]:
        """``(m, n)`` of the blocks that an owner has of a slot, in the order of its memory; some may be empty."""
        count = self.blocks // len(self.owners)
        first = self.owners.index(rank) * count
        return [
            rows_columns(box.shape) for box in blocks_of(slot.shapes[self.index], self.blocks)[first : first + count]
        ]


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


@lru_cache(maxsize=4096)
def resident(layout: TensorLayout, fused: Fused, ranks: tuple[int, ...], rank: int) -> frozenset[int]:
    """The numbers of a parameter's matrices of which a rank holds part."""
    position = ranks.index(rank)
    return frozenset(
        number for number, (holders, _) in enumerate(residence(layout, fused, ranks)) if position in holders
    )


OWNER = "owner"
"""Stands for the one owner of a matrix, whoever that is."""


def replicated(layout: TensorLayout) -> bool:
    """Whether any box has several holders, so that who gives it depends on who takes it."""
    return len(layout.fragments) > len(layout.holders)


@lru_cache(maxsize=4096)
def given(layout: TensorLayout, fused: Fused, rank: int) -> Mapping[int, tuple[Copy, ...]]:
    """What a rank gives of each matrix of a parameter to an owner that is another rank.  Nothing may be replicated.

    The same as `plan.make_share` for every matrix and owner, made once for all of them.
    """
    matrices, shapes = matrices_of(layout.shape, fused), shapes_of(layout.shape, fused)
    pieces = [(number, piece) for number, matrix in enumerate(matrices) for piece in matrix]
    held = [layout.holders[box][0] for box in layout.held.get(rank, ())]
    if not pieces or not held:
        return {}
    corners = [np.array([getattr(piece.box, end) for _, piece in pieces], np.int64) for end in ("lo", "hi")]
    ours = [np.array([getattr(fragment.box, end) for fragment in held], np.int64) for end in ("lo", "hi")]
    copies_of: defaultdict[int, list[Copy]] = defaultdict(list)
    for i, j in zip(*(index.tolist() for index in overlaps(*corners, *ours)), strict=True):
        number, piece = pieces[i]
        common = piece.box & held[j].box
        assert common is not None, "overlaps() returned a pair of disjoint boxes"
        moved = common.shift([new - old for new, old in zip(piece.origin, piece.box.lo, strict=True)])
        strides = row_major(shapes[number])
        offset = sum(lo * stride for lo, stride in zip(moved.lo, strides, strict=True))
        copies_of[number].append(Copy(moved, held[j].place_at(common.lo), Place(OWNER, offset, strides)))
    return {number: tuple(copies) for number, copies in copies_of.items()}
