"""The parts of a parameter's matrices on each rank, and one rank's copies between there and the owners.

`rank_copies` makes a rank's part of `plan.make_plan` from the layout by which a matrix rests to one in which its owner
has all of it, and back: the same intersections of boxes, the same choice among replicas, the same order on both sides
(`test_owners` compares the two).  It is done here once more because

- a model has tens of thousands of matrices, and a plan of each would need two layouts and some calls of its own.
  Here the matrices of a parameter are rows of a few arrays;
- experts between two cuts of their stack have like parts, which are listed once, whatever the owners;
- owners are chosen (`schedule.assign_owners`) from what each rank holds, so the parts are needed before there is any
  layout to go to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ...algebra.box import row_major
from ...algebra.layout import Buffer, TensorLayout
from ...algebra.overlap import IntArray, expanded, overlaps
from ...algebra.plan import Copies, dense_strides
from .matrices import Fused, matrices_of, shapes_of


@dataclass(frozen=True, slots=True, eq=False)
class MatrixParts:
    """All parts of a parameter's matrices, as arrays.

    A stack of experts on thousands of ranks has millions.  But experts between two cuts of the stack have like parts,
    one stride apart, so only the parts of the first are listed, for all of them.

    Attributes:
        pieces: of the matrices in their order: first and last corner in the parameter, the shift to the corner in the
            matrix, and the strides of the matrix; each ``[pieces, dims]``.
        first_piece: the number of each matrix's first piece, and at the end of all pieces.
        representative: for each matrix the number of its representative.
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
        """Return the numbers of the parts of a matrix, or of its representative."""
        return np.arange(*self.first[self.representative[index] :][:2])

    def volumes(self, numbers: IntArray) -> IntArray:
        """Return the number of elements of each part."""
        starts, stops, _, _ = self.pieces
        i, j = self.piece[numbers], self.box[numbers]
        sizes = np.minimum(stops[i], self.layout.stops[j]) - np.maximum(starts[i], self.layout.starts[j])
        volumes: IntArray = sizes.prod(axis=1)
        return volumes

    def find_replicas(self, numbers: IntArray) -> tuple[IntArray, IntArray]:
        """Return the fragments that hold parts, in the order of the parts.

        Returns:
            Two arrays: the part's position in ``numbers``, and the fragment.
        """
        # A part lies in one box, and each fragment of that box holds a replica of the part.
        fragments_by_box, first = self.layout.by_box
        box = self.box[numbers]
        position, row = expanded(first[box], first[box + 1] - first[box])
        return position, fragments_by_box[row]

    def parts_of_rank(self, rank: int) -> tuple[IntArray, IntArray]:
        """Return the numbers of the parts that a rank holds, and where each matrix's begin among them."""
        numbers = np.flatnonzero(np.isin(self.box, self.layout.boxes_of(rank)))
        return numbers, np.searchsorted(numbers, self.first)

    def has_parts(self, rank: int) -> NDArray[np.bool_]:
        """Return whether a rank holds a part of each matrix."""
        _, first = self.parts_of_rank(rank)
        has_parts: NDArray[np.bool_] = (np.diff(first) > 0)[self.representative]
        return has_parts

    def places(
        self, index: IntArray, part: IntArray, fragment: IntArray
    ) -> tuple[IntArray, tuple[IntArray, IntArray], tuple[IntArray, IntArray]]:
        """Return sizes of parts, and offset and strides in the holder's tensor and in the whole matrix, which is
        row-major.

        Args:
            index: of each part's matrix.
            part: its number, or its representative's.
            fragment: the fragment of the layout that holds it.
        """
        layout, j = self.layout, self.box[part]
        # A part of the representative is a part of the matrix, as many pieces further on.
        i = self.piece[part] + (self.first_piece[index] - self.first_piece[self.representative[index]])
        starts, stops, shift, matrix_strides = (array[i] for array in self.pieces)
        lo, strides = np.maximum(starts, layout.starts[j]), layout.strides[fragment]
        offset = layout.offset[fragment] + ((lo - layout.starts[j]) * strides).sum(axis=1)
        matrix_offset = ((lo + shift) * matrix_strides).sum(axis=1)
        return np.minimum(stops, layout.stops[j]) - lo, (offset, strides), (matrix_offset, matrix_strides)


@lru_cache(maxsize=256)
def matrix_parts(layout: TensorLayout, fused: Fused) -> MatrixParts:
    """Intersect a parameter's matrices with its layout."""
    matrices, shapes = matrices_of(layout.shape, fused), shapes_of(layout.shape, fused)
    corners = []
    for matrix, shape in zip(matrices, shapes, strict=True):
        strides = row_major(shape)
        corners += [(piece.box.lo, piece.box.hi, piece.origin, strides) for piece in matrix]
    lo, hi, origin, strides_of_pieces = np.array(corners, np.int64).reshape(-1, 4, len(layout.shape)).swapaxes(0, 1)
    first_piece = np.cumsum([0, *map(len, matrices)])

    # Experts between two cuts of their stack have equal parts, so the first of them represents all.  In a tiling, a box
    # ends only where others begin.  Without a stack the only expert is before the second cut.
    experts = max(math.prod(layout.shape[: fused.row_dim(layout.shape)]), 1)
    expert, number = np.divmod(np.arange(len(matrices)), max(len(matrices) // experts, 1))
    cut = np.searchsorted(np.unique(layout.starts[:, 0]), expert, side="right")
    _, first_matrix, kind = np.unique(cut * len(matrices) + number, return_index=True, return_inverse=True)

    # Their pieces meet the boxes of the layout in parts.
    _, pieces = expanded(first_piece[first_matrix], np.diff(first_piece)[first_matrix])
    i, j = overlaps(lo[pieces], hi[pieces], layout.starts, layout.stops)
    first_part = np.searchsorted(pieces[i], first_piece)
    arrays = lo, hi, origin - lo, strides_of_pieces
    return MatrixParts(
        layout,
        pieces=arrays,
        first_piece=first_piece,
        representative=first_matrix[kind],
        piece=pieces[i],
        box=j,
        first=first_part,
    )


@lru_cache(maxsize=4096)
def residence(layout: TensorLayout, fused: Fused, ranks: tuple[int, ...]) -> tuple[tuple[IntArray, IntArray], ...]:
    """Return for each matrix of a parameter its holders, as positions in ``ranks``, and the elements that each holds.
    Matrices that lie alike have the same two arrays.
    """
    parts = matrix_parts(layout, fused)
    numbers = np.arange(len(parts.piece))
    part, fragment = parts.find_replicas(numbers)
    position = _positions(layout, ranks)[layout.buffer[fragment]]
    matrix = np.searchsorted(parts.first, part, side="right") - 1

    # The elements of all parts that a rank holds of a matrix.
    pairs, pair_of_part = np.unique(matrix * len(ranks) + position, return_inverse=True)
    elements = np.zeros(len(pairs), np.int64)
    np.add.at(elements, pair_of_part, parts.volumes(numbers)[part])

    # Cut by matrix; those that lie alike share arrays, by whose identity `schedule.assign_owners` knows them.
    representatives = np.unique(parts.representative)
    cuts = np.searchsorted(pairs, representatives[1:] * len(ranks))
    arrays: dict[tuple[bytes, bytes], tuple[IntArray, IntArray]] = {}
    homes = {}
    splits = np.split(pairs % len(ranks), cuts), np.split(elements, cuts)
    for index, holders, held_elements in zip(representatives.tolist(), *splits, strict=False):
        # Not views, which would keep the arrays of all matrices.
        key = holders.tobytes(), held_elements.tobytes()
        homes[index] = arrays.setdefault(key, (holders.copy(), held_elements.copy()))
    return tuple(homes[index] for index in parts.representative.tolist())


@lru_cache(maxsize=4096)
def first_replicas(layout: TensorLayout, fused: Fused, index: int) -> Mapping[Buffer, int]:
    """Return for each holder of a matrix which replica of its first part it has."""
    parts = matrix_parts(layout, fused)
    if (representative := int(parts.representative[index])) != index:
        return first_replicas(layout, fused, representative)
    part, fragment = parts.find_replicas(parts.numbers(index))
    replica = np.arange(len(part)) - np.searchsorted(part, part)
    buffers, first = np.unique(layout.buffer[fragment], return_index=True)
    return dict(zip(map(layout.buffers.__getitem__, buffers.tolist()), replica[first].tolist(), strict=True))


def first_replica(layout: TensorLayout, fused: Fused, index: int, owner: int) -> int | None:
    """Return which replica of the first part that an owner holds of a matrix it has; None if it holds none.

    Where nothing has replicas, it is the only one, whoever asks.
    """
    return first_replicas(layout, fused, index).get(owner) if _is_replicated(layout) else 0


def _is_replicated(layout: TensorLayout) -> bool:
    return len(layout.box) > len(layout.starts)


@dataclass(frozen=True, slots=True, eq=False)
class RankCopies:
    """One rank's copies between the holders of some matrices and their owners.

    Attributes:
        gives, takes_back: parts that it holds of others' matrices.
        takes, gives_back: parts of the matrices that it owns, held by others.
        local: parts that it holds of the matrices that it owns, from its tensor to the matrix.
    """

    gives: Copies
    takes: Copies
    local: Copies
    gives_back: Copies
    takes_back: Copies


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

    def rows(self, mask: NDArray[np.bool_]) -> OwnedMatrices:
        return OwnedMatrices(self.tensor[mask], self.index[mask], self.owner[mask])


def rank_copies(
    layout: TensorLayout, fused: Fused, ranks: tuple[int, ...], position: int, matrices: OwnedMatrices
) -> RankCopies:
    """Return the copies of the rank at a position of ``ranks``; other ranks mean the wire, where boxes are dense.

    An owner reads its own replica of a part; of other parts, the replica with the number of the first one that it has.
    Results go to all replicas.
    """
    parts = matrix_parts(layout, fused)
    is_owner = matrices.owner == position
    takes, local, gives_back = _copies_of_owner(parts, fused, ranks, position, matrices.rows(is_owner))
    gives, takes_back = _copies_of_holder(parts, fused, ranks, position, matrices.rows(~is_owner))
    return RankCopies(gives, takes, local, gives_back, takes_back)


def _copies_of_owner(
    parts: MatrixParts, fused: Fused, ranks: tuple[int, ...], position: int, matrices: OwnedMatrices
) -> tuple[Copies, Copies, Copies]:
    """Return a rank's copies of the matrices that it owns: it takes, has, and gives back."""
    # All holders of all parts, replicas too, as copies from the matrix to each. ``matrix`` and ``part`` have an entry a
    # part of each matrix; ``row``, ``fragment``, ``holder`` and ``tensor`` one a replica, whose part is ``row``.
    layout, representative = parts.layout, parts.representative[matrices.index]
    matrix, part = expanded(parts.first[representative], np.diff(parts.first)[representative])
    row, fragment = parts.find_replicas(part)
    holder, tensor = _positions(layout, ranks)[layout.buffer[fragment]], matrices.tensor[matrix][row]
    sizes, place, matrix_place = parts.places(matrices.index[matrix][row], part[row], fragment)
    back = Copies(sizes, tensor, *matrix_place, holder, *_on_wire(sizes))

    # Results go to all others.  The owner reads one replica of each part that it does not hold itself.
    is_local = holder == position
    local = Copies(sizes, tensor, *place, tensor, *matrix_place).rows(is_local)
    replicas = np.bincount(row, minlength=len(part))
    number = part - parts.first[representative[matrix]]
    first = _first_replicas_of_owners(layout, fused, ranks, matrices)[matrix]
    source = np.cumsum(replicas) - replicas + _replica_to_read(number, first, replicas)
    is_elsewhere = np.bincount(row[is_local], minlength=len(part)) == 0
    return back.rows(source[is_elsewhere]).inverse(), local, back.rows(~is_local)


def _copies_of_holder(
    parts: MatrixParts, fused: Fused, ranks: tuple[int, ...], position: int, matrices: OwnedMatrices
) -> tuple[Copies, Copies]:
    """Return a rank's copies of others' matrices: it gives, and takes back."""
    # All parts that this rank holds, as copies back from each owner: each array has an entry a part of each matrix.
    layout, representative = parts.layout, parts.representative[matrices.index]
    numbers, first_number = parts.parts_of_rank(ranks[position])
    matrix, row = expanded(first_number[representative], np.diff(first_number)[representative])
    part, owner = numbers[row], matrices.owner[matrix]
    box, buffer_of = parts.box[part], _buffers(layout, ranks)
    _, fragment = layout.find_fragments(box, np.full(len(box), buffer_of[position]))
    sizes, place, _ = parts.places(matrices.index[matrix], part, fragment)
    back = Copies(sizes, owner, *_on_wire(sizes), matrices.tensor[matrix], *place)
    if not _is_replicated(layout):
        return back.inverse(), back

    # It gives the parts that the owner lacks, and reads this rank's replica. ``replica``: a fragment's number among the
    # replicas of its box; ``number``: a part's number in its matrix.
    fragments, first_of_box = layout.by_box
    replica = np.empty_like(fragments)
    replica[fragments] = np.arange(len(fragments)) - first_of_box[layout.box[fragments]]
    number = part - parts.first[representative[matrix]]
    first = _first_replicas_of_owners(layout, fused, ranks, matrices)[matrix]
    is_read = replica[fragment] == _replica_to_read(number, first, np.diff(first_of_box)[box])
    owner_has, _ = layout.find_fragments(box, buffer_of[owner])
    return back.rows(is_read & ~owner_has).inverse(), back


def _first_replicas_of_owners(
    layout: TensorLayout, fused: Fused, ranks: tuple[int, ...], matrices: OwnedMatrices
) -> IntArray:
    """Return the `first_replica` of each matrix's owner, -1 for none."""
    if not _is_replicated(layout):
        return np.zeros(len(matrices.index), np.int64)
    pairs = zip(matrices.index.tolist(), matrices.owner.tolist(), strict=True)
    firsts = (first_replicas(layout, fused, index).get(ranks[owner], -1) for index, owner in pairs)
    return np.fromiter(firsts, np.int64, len(matrices.index))


def _replica_to_read(number: IntArray, first: IntArray, replicas: IntArray) -> IntArray:
    """Return the replica of each part that an owner reads who holds none of it: the one with the number of the first
    that it has of the matrix, or replicas in turn.
    """
    replica: IntArray = np.where(first < 0, number, first) % replicas
    return replica


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
