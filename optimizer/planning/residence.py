"""The parts of a parameter's matrices on each rank, and one rank's copies between there and the owners.

The copies are those of `plan.make_share` from where a matrix rests to its owner, made for all matrices of a parameter
together, as there are tens of thousands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ...algebra.box import row_major
from ...algebra.layout import Buffer, TensorLayout
from ...algebra.overlap import IntArray, expanded, overlaps
from ...algebra.plan import NO_COPIES, Copies, dense_strides
from .matrices import Fused, matrices_of, shapes_of


@dataclass(frozen=True, slots=True, eq=False)
class MatrixParts:
    """All parts of a parameter's matrices, as arrays.

    A stack of experts on thousands of ranks has millions.  But experts between two cuts of the stack have like parts,
    one stride apart, so only those of the first of them are listed: it stands for them all.

    Attributes:
        pieces: of the matrices in their order: first and last corner in the parameter, the shift to the corner in the
            matrix, and the strides of the matrix; each ``[pieces, dims]``.
        first_piece: the number of each matrix's first piece, and at the end of all pieces.
        representative: for each matrix the number of the one that stands for it.
        piece, box: numbers of the piece and of the layout's box that intersect in a part, in this order.
        first: the number of each matrix's first part, and at the end of all parts.
    """

    layout: TensorLayout
    pieces: tuple[IntArray, IntArray, IntArray, IntArray]
    first_piece: IntArray
    representative: IntArray
    piece: IntArray
    box: IntArray
    first: IntArray

    def numbers(self, index: int) -> IntArray:
        """Return the numbers of the parts of a matrix, or of the one that stands for it."""
        return np.arange(*self.first[self.representative[index] :][:2])

    def volumes(self, numbers: IntArray) -> IntArray:
        """Return the number of elements of each part."""
        begin, end, _, _ = self.pieces
        i, j = self.piece[numbers], self.box[numbers]
        sizes = np.minimum(end[i], self.layout.stops[j]) - np.maximum(begin[i], self.layout.starts[j])
        volumes: IntArray = sizes.prod(axis=1)
        return volumes

    def holders(self, numbers: IntArray) -> tuple[IntArray, IntArray]:
        """Return each holder of parts, in the layout's order: the part's position in ``numbers``, and the fragment."""
        rows, first = self.layout.by_box
        part, within = expanded(first[self.box[numbers]], np.diff(first)[self.box[numbers]])
        return part, rows[within]

    def holding(self, rank: int) -> tuple[IntArray, IntArray]:
        """Return the numbers of the parts that a rank holds, and for each matrix where its own begin among them."""
        rows = np.flatnonzero(np.isin(self.box, self.layout.boxes_of(rank)))
        return rows, np.searchsorted(rows, self.first)

    def resident(self, rank: int) -> NDArray[np.bool_]:
        _, first = self.holding(rank)
        resident: NDArray[np.bool_] = (np.diff(first) > 0)[self.representative]
        return resident

    def places(
        self, index: IntArray, part: IntArray, fragment: IntArray
    ) -> tuple[IntArray, tuple[IntArray, IntArray], tuple[IntArray, IntArray]]:
        """Return sizes of parts, and offset and strides in the holder's tensor and in the whole matrix, which is
        row-major.

        Args:
            index: of each part's matrix.
            part: its number, or the one that stands for it.
            fragment: the fragment of the layout that holds it.
        """
        layout, j = self.layout, self.box[part]
        i = self.piece[part] + (self.first_piece[index] - self.first_piece[self.representative[index]])
        begin, end, shift, along = (array[i] for array in self.pieces)
        lo, strides = np.maximum(begin, layout.starts[j]), layout.strides[fragment]
        offset = layout.offset[fragment] + ((lo - layout.starts[j]) * strides).sum(axis=1)
        return np.minimum(end, layout.stops[j]) - lo, (offset, strides), (((lo + shift) * along).sum(axis=1), along)


@lru_cache(maxsize=256)
def matrix_parts(layout: TensorLayout, fused: Fused) -> MatrixParts:
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
def residence(layout: TensorLayout, fused: Fused, ranks: tuple[int, ...]) -> tuple[tuple[IntArray, IntArray], ...]:
    """Return for each matrix of a parameter its holders, as positions in ``ranks``, and the elements that each holds.
    Matrices that lie alike have the same two arrays.
    """
    parts = matrix_parts(layout, fused)
    numbers = np.arange(len(parts.piece))
    part, fragment = parts.holders(numbers)
    positions = _positions(layout, ranks)
    matrix = np.searchsorted(parts.first, part, side="right") - 1

    standing = np.unique(parts.representative)
    pairs, pair_of = np.unique(matrix * len(ranks) + positions[layout.buffer[fragment]], return_inverse=True)
    held = np.zeros(len(pairs), np.int64)
    np.add.at(held, pair_of, parts.volumes(numbers)[part])
    cuts = np.searchsorted(pairs, standing[1:] * len(ranks))
    alike: dict[tuple[bytes, bytes], tuple[IntArray, IntArray]] = {}
    homes = {}
    splits = zip(standing.tolist(), np.split(pairs % len(ranks), cuts), np.split(held, cuts), strict=False)
    for index, who, much in splits:
        # Not views, which would keep the arrays of all matrices.
        homes[index] = alike.setdefault((who.tobytes(), much.tobytes()), (who.copy(), much.copy()))
    return tuple(homes[index] for index in parts.representative.tolist())


@lru_cache(maxsize=4096)
def first_replicas(layout: TensorLayout, fused: Fused, index: int) -> Mapping[Buffer, int]:
    """Return for each holder of a matrix which replica of its first part it has."""
    parts = matrix_parts(layout, fused)
    if (standing := int(parts.representative[index])) != index:
        return first_replicas(layout, fused, standing)
    part, fragment = parts.holders(parts.numbers(index))
    replica = np.arange(len(part)) - np.searchsorted(part, part)
    buffers, first = np.unique(layout.buffer[fragment], return_index=True)
    return dict(zip(map(layout.buffers.__getitem__, buffers.tolist()), replica[first].tolist(), strict=True))


def first_replica(layout: TensorLayout, fused: Fused, index: int, owner: int) -> int | None:
    """Return which replica of the first part that an owner holds of a matrix it has; None if it holds none.

    Where nothing has replicas, it is the only one, whoever asks.
    """
    return first_replicas(layout, fused, index).get(owner) if _replicated(layout) else 0


def _replicated(layout: TensorLayout) -> bool:
    return len(layout.box) > len(layout.starts)


@dataclass(frozen=True, slots=True, eq=False)
class RankCopies:
    """One rank's copies between the holders of some matrices and their owners.

    Attributes:
        gives, takes_back: parts that it holds of others' matrices.
        takes, gives_back: parts of its own matrices that others hold.
        local: parts that it holds of its own matrices, from its tensor to the matrix.
    """

    gives: Copies
    takes: Copies
    local: Copies
    gives_back: Copies
    takes_back: Copies

    def one_way(self) -> RankCopies:
        """Return the copies to the owners alone."""
        return replace(self, gives_back=NO_COPIES, takes_back=NO_COPIES)


@dataclass(frozen=True, slots=True, eq=False)
class OwnedMatrices:
    """Matrices of one parameter, or of some that are alike; arrays of one length.

    Attributes:
        tensor: the number that copies give to the tensor.
        index: the matrix's number in the parameter.
        owner: a position in the list of ranks.
    """

    tensor: IntArray
    index: IntArray
    owner: IntArray

    def rows(self, chosen: NDArray[np.bool_]) -> OwnedMatrices:
        return OwnedMatrices(self.tensor[chosen], self.index[chosen], self.owner[chosen])


def rank_copies(
    layout: TensorLayout, fused: Fused, ranks: tuple[int, ...], position: int, matrices: OwnedMatrices
) -> RankCopies:
    """Return the copies of the rank at a position of ``ranks``; other ranks stand for the wire, where boxes are dense.

    An owner reads its own replica of a part; of other parts, the replica with the number of the first one that it has.
    Results go to all replicas.
    """
    parts = matrix_parts(layout, fused)
    mine = matrices.owner == position
    takes, own, gives_back = _of_owned(parts, fused, ranks, position, matrices.rows(mine))
    gives, takes_back = _of_held(parts, fused, ranks, position, matrices.rows(~mine))
    return RankCopies(gives, takes, own, gives_back, takes_back)


def _of_owned(
    parts: MatrixParts, fused: Fused, ranks: tuple[int, ...], position: int, matrices: OwnedMatrices
) -> tuple[Copies, Copies, Copies]:
    """Return a rank's copies of the matrices that it owns: it takes, has, and gives back."""
    layout, stands = parts.layout, parts.representative[matrices.index]
    matrix, part = expanded(parts.first[stands], np.diff(parts.first)[stands])
    number = part - parts.first[stands[matrix]]
    at, fragment = parts.holders(part)
    holder, tensor = _positions(layout, ranks)[layout.buffer[fragment]], matrices.tensor[matrix][at]
    sizes, near, inside = parts.places(matrices.index[matrix][at], part[at], fragment)
    here = holder == position
    back = Copies(sizes, tensor, *inside, holder, *_on_wire(sizes))
    replicas = np.bincount(at, minlength=len(part))
    first = _first_replicas(layout, fused, ranks, matrices)[matrix]
    read = np.cumsum(replicas) - replicas + _chosen(number, first, replicas)
    elsewhere = np.bincount(at[here], minlength=len(part)) == 0
    own = Copies(sizes, tensor, *near, tensor, *inside).rows(here)
    return back.rows(read[elsewhere]).inverse(), own, back.rows(~here)


def _of_held(
    parts: MatrixParts, fused: Fused, ranks: tuple[int, ...], position: int, matrices: OwnedMatrices
) -> tuple[Copies, Copies]:
    """Return a rank's copies of others' matrices: it gives, and takes back."""
    layout, stands = parts.layout, parts.representative[matrices.index]
    held, first_held = parts.holding(ranks[position])
    matrix, at = expanded(first_held[stands], np.diff(first_held)[stands])
    part, owner = held[at], matrices.owner[matrix]
    box, buffer_at = parts.box[part], _buffers(layout, ranks)
    _, fragment = layout.find_fragments(box, np.full(len(box), buffer_at[position]))
    sizes, near, _ = parts.places(matrices.index[matrix], part, fragment)
    back = Copies(sizes, owner, *_on_wire(sizes), matrices.tensor[matrix], *near)
    if not _replicated(layout):
        return back.inverse(), back
    fragments, first_of_box = layout.by_box
    replica = np.empty_like(fragments)
    replica[fragments] = np.arange(len(fragments)) - first_of_box[layout.box[fragments]]
    number, first = part - parts.first[stands[matrix]], _first_replicas(layout, fused, ranks, matrices)[matrix]
    read = replica[fragment] == _chosen(number, first, np.diff(first_of_box)[box])
    owner_has, _ = layout.find_fragments(box, buffer_at[owner])
    return back.rows(read & ~owner_has).inverse(), back


def _first_replicas(layout: TensorLayout, fused: Fused, ranks: tuple[int, ...], matrices: OwnedMatrices) -> IntArray:
    """Return the `first_replica` of each matrix's owner, -1 for none."""
    if not _replicated(layout):
        return np.zeros(len(matrices.index), np.int64)
    pairs = zip(matrices.index.tolist(), matrices.owner.tolist(), strict=True)
    firsts = (first_replicas(layout, fused, index).get(ranks[owner], -1) for index, owner in pairs)
    return np.fromiter(firsts, np.int64, len(matrices.index))


def _chosen(number: IntArray, first: IntArray, replicas: IntArray) -> IntArray:
    """Return the replica of each part that is read by one who holds none of it."""
    chosen: IntArray = np.where(first < 0, number, first) % replicas
    return chosen


def _on_wire(sizes: IntArray) -> tuple[IntArray, IntArray]:
    return np.zeros(len(sizes), np.int64), dense_strides(sizes)


@lru_cache(maxsize=256)
def _positions(layout: TensorLayout, ranks: tuple[int, ...]) -> IntArray:
    """Return the position in ``ranks`` of each of a layout's buffers."""
    position = {rank: index for index, rank in enumerate(ranks)}
    return np.array([position[buffer] for buffer in layout.buffers], np.int64)  # type: ignore[index]


def _buffers(layout: TensorLayout, ranks: tuple[int, ...]) -> IntArray:
    """Return the number of the buffer of each rank; -1 for none."""
    buffers = np.full(len(ranks), -1)
    positions = _positions(layout, ranks)
    buffers[positions] = np.arange(len(positions))
    return buffers
