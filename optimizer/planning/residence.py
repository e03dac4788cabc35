"""Which parts of a parameter's matrices lie with which rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from ...box import Index, row_major
from ...layout import Buffer, TensorLayout
from ...overlap import overlaps
from .matrices import Fused, matrices_of, shapes_of
from .owners import Int


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """What a matrix and a box of its parameter's layout have in common.

    Attributes:
        number: of this part in the matrix.
        sizes: of the part, in the parameter's rank.
        inside: where it begins in the whole matrix, which is row-major.
        holders: who has it, where it begins there and with which strides; the order is the layout's.
    """

    number: int
    numel: int
    sizes: Index
    inside: int
    holders: tuple[tuple[Buffer, int, Index], ...]


@dataclass(frozen=True, slots=True, eq=False)
class MatrixParts:
    """All parts of a parameter's matrices, as arrays: a stack of experts on many ranks has hundreds of thousands.

    Attributes:
        pieces: of the matrices in their order: first and last corner in the parameter, what to add for the corner in
            the matrix, and the strides of the matrix; each ``[pieces, dims]``.
        piece, box: numbers of the piece and of the layout's box that have a part in common, in this order.
        first: for each matrix the number of its first part, and at the end the number of all parts.
    """

    layout: TensorLayout
    pieces: tuple[Int, Int, Int, Int]
    piece: Int
    box: Int
    first: Int

    def of_matrix(self, index: int) -> list[MatrixPart]:
        return self._parts(index, np.arange(self.first[index], self.first[index + 1]))

    def of_rank(self, rank: int) -> Mapping[int, list[MatrixPart]]:
        """What a rank has, by matrix."""
        rows = np.flatnonzero(np.isin(self.box, self.layout.held.get(rank, ())))
        matrices = np.searchsorted(self.first, rows, side="right") - 1
        present, begin = np.unique(matrices, return_index=True)
        cuts = [*begin.tolist(), len(rows)]
        return {
            index: self._parts(index, rows[start:stop])
            for index, (start, stop) in zip(present.tolist(), pairwise(cuts), strict=True)
        }

    def _parts(self, index: int, rows: Int) -> list[MatrixPart]:
        """Some parts of a matrix."""
        i, j = self.piece[rows], self.box[rows]
        begin, end, shift, strides = (array[i] for array in self.pieces)
        lo, corner = np.maximum(begin, self.layout.starts[j]), self.layout.starts[j]
        sizes = np.minimum(end, self.layout.stops[j]) - lo
        columns = (
            rows - self.first[index],
            sizes.prod(axis=1),
            sizes,
            ((lo + shift) * strides).sum(axis=1),
            lo - corner,
        )
        listed = zip(*(column.tolist() for column in columns), j.tolist(), strict=True)
        return [
            MatrixPart(number, numel, tuple(shape), inside, self._holders(box, offset))
            for number, numel, shape, inside, offset, box in listed
        ]

    def _holders(self, box: int, corner: Sequence[int]) -> tuple[tuple[Buffer, int, Index], ...]:
        """Who has the part of a box that begins at this corner of it, and where."""
        places = [fragment.place for fragment in self.layout.holders[box]]
        return tuple(
            (place.buffer, place.offset + sum(map(int.__mul__, corner, place.strides)), place.strides)
            for place in places
        )


@lru_cache(maxsize=256)
def matrix_parts(layout: TensorLayout, fused: Fused) -> MatrixParts:
    """The parts of a parameter's matrices."""
    matrices, shapes = matrices_of(layout.shape, fused), shapes_of(layout.shape, fused)
    pieces = [(piece, row_major(shape)) for matrix, shape in zip(matrices, shapes, strict=True) for piece in matrix]
    width = len(layout.shape)
    lo, hi, origin, strides = (
        np.array(column, np.int64).reshape(-1, width)
        for column in (
            [piece.box.lo for piece, _ in pieces],
            [piece.box.hi for piece, _ in pieces],
            [piece.origin for piece, _ in pieces],
            [along for _, along in pieces],
        )
    )
    i, j = overlaps(lo, hi, layout.starts, layout.stops)
    ends = np.cumsum([0, *map(len, matrices)])  # of the matrices, in pieces
    return MatrixParts(layout, (lo, hi, origin - lo, strides), i, j, np.searchsorted(i, ends))


@lru_cache(maxsize=4096)
def residence(layout: TensorLayout, fused: Fused, ranks: tuple[int, ...]) -> tuple[tuple[Int, Int], ...]:
    """For each matrix of a parameter, who holds how much of it: positions in ``ranks``, ascending, and elements.

    Matrices that lie alike have the same two arrays.
    """
    parts = matrix_parts(layout, fused)
    count = len(parts.first) - 1
    if not count:
        return ()
    i, j = parts.piece, parts.box
    lo, hi, _, _ = parts.pieces
    volume = (np.minimum(hi[i], layout.stops[j]) - np.maximum(lo[i], layout.starts[j])).prod(axis=1)
    matrix = np.repeat(np.arange(count), np.diff(parts.first))

    position = {rank: index for index, rank in enumerate(ranks)}
    replicas = np.array([len(holders) for holders in layout.holders], np.int64)
    holders = np.array([position[f.place.buffer] for all_ in layout.holders for f in all_], np.int64)  # type: ignore[index]
    begin = np.cumsum(replicas) - replicas
    copies = replicas[j]
    within = np.arange(copies.sum()) - np.repeat(np.cumsum(copies) - copies, copies)
    holder = holders[np.repeat(begin[j], copies) + within]

    pairs, pair_of = np.unique(np.repeat(matrix, copies) * len(ranks) + holder, return_inverse=True)
    held = np.zeros(len(pairs), np.int64)
    np.add.at(held, pair_of, np.repeat(volume, copies))
    cuts = np.searchsorted(pairs, np.arange(1, count) * len(ranks))
    alike: dict[tuple[bytes, bytes], tuple[Int, Int]] = {}
    homes = []
    for who, much in zip(np.split(pairs % len(ranks), cuts), np.split(held, cuts), strict=True):
        key = who.tobytes(), much.tobytes()
        if key not in alike:
            alike[key] = who.copy(), much.copy()  # not views, which would keep the arrays of all matrices
        homes.append(alike[key])
    return tuple(homes)


@lru_cache(maxsize=4096)
def resident(layout: TensorLayout, fused: Fused, rank: int) -> frozenset[int]:
    """The numbers of a parameter's matrices of which a rank holds part."""
    return frozenset(held(layout, fused, rank))


@lru_cache(maxsize=4096)
def held(layout: TensorLayout, fused: Fused, rank: int) -> Mapping[int, list[MatrixPart]]:
    """The parts that a rank has, by matrix."""
    return matrix_parts(layout, fused).of_rank(rank)


@lru_cache(maxsize=4096)
def first_replicas(layout: TensorLayout, fused: Fused, index: int) -> Mapping[Buffer, int]:
    """For each rank that holds anything of a matrix, which replica of its first part that is."""
    firsts: dict[Buffer, int] = {}
    for part in matrix_parts(layout, fused).of_matrix(index):
        for replica, (holder, _, _) in enumerate(part.holders):
            firsts.setdefault(holder, replica)
    return firsts
