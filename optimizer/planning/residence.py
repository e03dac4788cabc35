"""Which parts of a parameter's matrices lie with which rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from ...box import Index, row_major
from ...layout import Buffer, TensorLayout
from ...overlap import expanded, overlaps
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
    """All parts of a parameter's matrices, as arrays.

    A stack of experts on thousands of ranks has millions.  But experts between two cuts of the stack have like parts,
    one stride apart, so those of the first of them are listed: it stands for them all.

    Attributes:
        pieces: of the matrices in their order: first and last corner in the parameter, what to add for the corner in
            the matrix, and the strides of the matrix; each ``[pieces, dims]``.
        first_piece: for each matrix the number of its first piece, and at the end the number of all pieces.
        stands: for each matrix the number of the one that stands for it.
        piece, box: numbers of the piece and of the layout's box that have a part in common, in this order.
        first: for each matrix the number of its first part, and at the end the number of all parts; none are listed of
            those for which another one stands.
    """

    layout: TensorLayout
    pieces: tuple[Int, Int, Int, Int]
    first_piece: Int
    stands: Int
    piece: Int
    box: Int
    first: Int

    def numbers(self, index: int) -> Int:
        """The numbers of a matrix's parts, or of those of the one that stands for it."""
        return np.arange(*self.first[self.stands[index] :][:2])

    def volumes(self, numbers: Int) -> Int:
        """Elements of each of some parts."""
        volumes: Int = self._sizes(self.piece[numbers], self.box[numbers]).prod(axis=1)
        return volumes

    def holders(self, numbers: Int) -> tuple[Int, Int]:
        """For each who holds one of some parts: the part's position among them, and the number of the fragment; the
        holders of a part are in the layout's order.
        """
        rows, first = self.layout.by_box
        part, within = expanded(first[self.box[numbers]], np.diff(first)[self.box[numbers]])
        return part, rows[within]

    def of_matrix(self, index: int) -> list[MatrixPart]:
        return self._parts(index, self.numbers(index))

    def of_rank(self, rank: int) -> Mapping[int, list[MatrixPart]]:
        """What a rank has, by matrix."""
        rows = np.flatnonzero(np.isin(self.box, self.layout.boxes_of(rank)))
        present, begin = np.unique(np.searchsorted(self.first, rows, side="right") - 1, return_index=True)
        cuts = pairwise([*begin.tolist(), len(rows)])
        rows_of = {matrix: rows[start:stop] for matrix, (start, stop) in zip(present.tolist(), cuts, strict=True)}
        indices = np.flatnonzero(np.isin(self.stands, present))
        standing = self.stands[indices].tolist()
        return {i: self._parts(i, rows_of[stands]) for i, stands in zip(indices.tolist(), standing, strict=True)}

    def _sizes(self, i: Int, j: Int) -> Int:
        """Of what pieces and boxes have in common."""
        begin, end, _, _ = self.pieces
        return np.minimum(end[i], self.layout.stops[j]) - np.maximum(begin[i], self.layout.starts[j])

    def _parts(self, index: int, numbers: Int) -> list[MatrixPart]:
        """Some parts of a matrix, by their numbers in the one that stands for it."""
        stands, layout = self.stands[index], self.layout
        i, j = self.piece[numbers] + (self.first_piece[index] - self.first_piece[stands]), self.box[numbers]
        begin, _, shift, strides = (array[i] for array in self.pieces)
        lo, sizes = np.maximum(begin, layout.starts[j]), self._sizes(i, j)
        part, row = self.holders(numbers)
        offsets = layout.offset[row] + ((lo - layout.starts[j])[part] * layout.strides[row]).sum(axis=1)
        buffers = map(layout.buffers.__getitem__, layout.buffer[row].tolist())
        places = list(zip(buffers, offsets.tolist(), map(tuple, layout.strides[row].tolist()), strict=True))
        cuts = pairwise(np.searchsorted(part, np.arange(len(numbers) + 1)).tolist())
        columns = (numbers - self.first[stands], sizes.prod(axis=1), sizes, ((lo + shift) * strides).sum(axis=1))
        return [
            MatrixPart(number, numel, tuple(shape), inside, tuple(places[start:stop]))
            for number, numel, shape, inside, (start, stop) in zip(*(c.tolist() for c in columns), cuts, strict=True)
        ]


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
    first_piece = np.cumsum([0, *map(len, matrices)])
    expert, cut = np.divmod(np.arange(len(matrices)), max(len(matrices) // max(math.prod(layout.shape[:-2]), 1), 1))
    # In a tiling, a box ends only where others begin.  In two dims the only expert is before the second cut.
    between = np.searchsorted(np.unique(layout.starts[:, 0]), expert, side="right")
    _, standing, kind = np.unique(between * len(matrices) + cut, return_index=True, return_inverse=True)
    _, chosen = expanded(first_piece[standing], np.diff(first_piece)[standing])
    i, j = overlaps(lo[chosen], hi[chosen], layout.starts, layout.stops)
    first = np.searchsorted(chosen[i], first_piece)
    return MatrixParts(layout, (lo, hi, origin - lo, strides), first_piece, standing[kind], chosen[i], j, first)


@lru_cache(maxsize=4096)
def residence(layout: TensorLayout, fused: Fused, ranks: tuple[int, ...]) -> tuple[tuple[Int, Int], ...]:
    """For each matrix of a parameter, who holds how much of it: positions in ``ranks``, ascending, and elements.

    Matrices that lie alike have the same two arrays.
    """
    parts = matrix_parts(layout, fused)
    numbers = np.arange(len(parts.piece))
    part, fragment = parts.holders(numbers)
    position = {rank: index for index, rank in enumerate(ranks)}
    positions = np.array([position[buffer] for buffer in layout.buffers], np.int64)  # type: ignore[index]
    matrix = np.searchsorted(parts.first, part, side="right") - 1

    standing = np.unique(parts.stands)
    pairs, pair_of = np.unique(matrix * len(ranks) + positions[layout.buffer[fragment]], return_inverse=True)
    held = np.zeros(len(pairs), np.int64)
    np.add.at(held, pair_of, parts.volumes(numbers)[part])
    cuts = np.searchsorted(pairs, standing[1:] * len(ranks))
    alike: dict[tuple[bytes, bytes], tuple[Int, Int]] = {}
    homes = {}
    splits = zip(standing.tolist(), np.split(pairs % len(ranks), cuts), np.split(held, cuts), strict=False)
    for index, who, much in splits:
        # Not views, which would keep the arrays of all matrices.
        homes[index] = alike.setdefault((who.tobytes(), much.tobytes()), (who.copy(), much.copy()))
    return tuple(homes[index] for index in parts.stands.tolist())


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
    parts = matrix_parts(layout, fused)
    if (standing := int(parts.stands[index])) != index:
        return first_replicas(layout, fused, standing)
    part, fragment = parts.holders(parts.numbers(index))
    replica = np.arange(len(part)) - np.searchsorted(part, part)
    buffers, first = np.unique(layout.buffer[fragment], return_index=True)
    return dict(zip(map(layout.buffers.__getitem__, buffers.tolist()), replica[first].tolist(), strict=True))
