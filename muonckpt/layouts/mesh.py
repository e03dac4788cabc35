"""Turns meshes of ranks, with one placement per mesh axis (the vocabulary of torch's DTensor), into layouts.

Placements apply from the first mesh axis to the last.  Along each tensor dim a rank's share is a list of *runs*,
``(start, stop)`` ranges of global indices in local order; a placement cuts the runs that the axes before it
left.  So strided shards, uneven splits and any number of axes on one dim need no special case: the local tensor is
the row-major product of its runs.  The shares of all ranks are computed together, as arrays.

A strided shard may also describe a contiguous cut that was made after the cuts of later axes.  Where that is the same,
placements are read as above; where it is not, they are refused: see `order_of_cuts`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np

from ..algebra.box import Box, Index, row_major
from ..algebra.layout import Fragment, Place, TensorLayout
from ..algebra.overlap import IntArray, expanded
from ..names.errors import LayoutError


@dataclass(frozen=True)
class DimShares:
    """The shares of one dim, as runs of indices.

    Attributes:
        count: the number of shares.
        share: the number of each run's share, ascending; within a share runs are in local order.
        start, stop: of each run; none is empty.
    """

    count: int
    share: IntArray
    start: IntArray
    stop: IntArray

    @cached_property
    def first(self) -> IntArray:
        """The number of each share's first run; the last entry is the number of runs."""
        return np.searchsorted(self.share, np.arange(self.count + 1))

    @cached_property
    def before(self) -> IntArray:
        """The number of indices before each run in its share."""
        sums = np.append(0, np.cumsum(self.stop - self.start))
        before: IntArray = sums[:-1] - sums[self.first[self.share]]
        return before

    @cached_property
    def length(self) -> IntArray:
        length: IntArray = np.diff(np.append(0, np.cumsum(self.stop - self.start))[self.first])
        return length

    def cut(self, parts: int) -> DimShares:
        """Cut each share into parts of ``ceil(length / parts)`` indices; the last ones may be short or empty.

        Part ``k`` of share ``n`` becomes share ``n * parts + k``.
        """
        before, length = self.before, self.stop - self.start
        size = -(-self.length // parts)[self.share]
        # A run crosses several parts: make one new run for each.
        first_part = before // size
        run, part = expanded(first_part, (before + length - 1) // size - first_part + 1)
        lo, hi = np.maximum(part * size[run], before[run]), np.minimum((part + 1) * size[run], (before + length)[run])
        shift = (self.start - before)[run]
        return DimShares(self.count * parts, self.share[run] * parts + part, start=lo + shift, stop=hi + shift)

    def cut_strided(self, split: int, parts: int) -> DimShares:
        """Cut each share into ``split`` parts, and these as `cut` does; a share has part ``k`` of all of them."""
        fine = self.cut(split).cut(parts)
        return fine.regroup(self.count * parts, fine.share // (split * parts) * parts + fine.share % parts)

    def regroup(self, count: int, share: IntArray) -> DimShares:
        """Return the runs in other shares, with a share for each run."""
        order = np.argsort(share, kind="stable")
        return DimShares(count, share[order], self.start[order], self.stop[order])

    def holders(self) -> IntArray:
        """Return the starts and the shares of runs, in the order of the dim; joined shares are equal if these are."""
        order = np.argsort(self.start)
        return np.stack([self.start[order], self.share[order]])

    def join(self) -> DimShares:
        """Merge adjacent runs, so that a contiguous share is one box."""
        is_head = np.ones(len(self.share), np.bool_)
        is_head[1:] = (self.share[1:] != self.share[:-1]) | (self.start[1:] != self.stop[:-1])
        return DimShares(self.count, self.share[is_head], self.start[is_head], self.stop[np.roll(is_head, -1)])


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks on a grid: ``ranks`` in row-major order of ``shape`` (one size per axis, the first axis outermost)."""

    shape: Index
    ranks: tuple[int, ...]
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.shape, self.ranks)))
        if math.prod(self.shape) != len(self.ranks) or len(set(self.ranks)) != len(self.ranks):
            raise LayoutError(f"a mesh of shape {self.shape} needs that many distinct ranks, got {self.ranks}")

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the ranks of a regular grid as its first rank and its strides; equal ones become one object again."""
        # The rank one further along an axis; the first has number 0.
        steps = row_major(self.shape)
        strides = tuple(
            self.ranks[step] - self.ranks[0] if n > 1 else 0 for step, n in zip(steps, self.shape, strict=True)
        )
        is_regular = 0 not in self.shape and self.ranks == _grid_ranks(self.shape, self.ranks[0], strides)
        return (_grid, (self.shape, self.ranks[0], strides)) if is_regular else (Mesh, (self.shape, self.ranks))

    @classmethod
    def of(cls, *shape: int) -> Mesh:
        """Put ranks 0, 1, 2, … on a grid of this shape."""
        return cls(shape, tuple(range(math.prod(shape))))


def _grid_ranks(shape: Index, first: int, strides: Index) -> tuple[int, ...]:
    ranks = np.full(shape, first)
    for dim, (stride, n) in enumerate(zip(strides, shape, strict=True)):
        ranks += (stride * np.arange(n)).reshape(-1, *[1] * (len(shape) - dim - 1))
    return tuple(ranks.reshape(-1).tolist())


@lru_cache(maxsize=4096)
def _grid(shape: Index, first: int, strides: Index) -> Mesh:
    return Mesh(shape, _grid_ranks(shape, first, strides))


@dataclass(frozen=True, slots=True)
class Shard:
    """Contiguous parts of ``ceil(n / parts)`` elements; the last ones may be short or empty (``torch.chunk``)."""

    dim: int

    def __str__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True, slots=True)
class StridedShard:
    """Parts of ``split`` parts: each part is cut over the axis, and the rank keeps its share of every one.

    Torch writes so that an axis *later* in the mesh cut the dim first (FSDP2 over tensor parallel).
    """

    dim: int
    split: int

    def __str__(self) -> str:
        return f"StridedShard({self.dim}, split={self.split})"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the axis holds the same."""

    dim: None = None

    def __str__(self) -> str:
        return "Replicate"


AxisPlacement = Shard | StridedShard | Replicate


@dataclass(frozen=True, slots=True)
class MeshPlacement:
    """A mesh, the names of its axes if they have any, and a placement for each of them."""

    mesh: Mesh
    axes: tuple[str | None, ...] | None
    placements: tuple[AxisPlacement, ...]

    def holders(self, shape: Index) -> tuple[int, ...]:
        """Return the ranks that hold elements of a tensor of this shape."""
        return tuple(map(int, mesh_layout(shape, self.mesh, self.placements).buffers))

    def to_json(self) -> Mapping[str, Any]:
        """Return the manifest's form of this; shared, so callers must not change it."""
        return _placement_json(self)


@lru_cache(maxsize=4096)
def _placement_json(placement: MeshPlacement) -> Mapping[str, Any]:
    return {
        "algorithm": "mesh",
        "version": 1,
        "mesh": list(placement.mesh.shape),
        "axes": list(placement.axes) if placement.axes else None,
        "ranks": list(placement.mesh.ranks),
        "placements": [*map(str, placement.placements)],
    }


DimCuts = tuple[tuple[Shard | StridedShard, int], ...]
"""The placements that shard one dim, in the order of their mesh axes, each with its number of ranks."""


def order_of_cuts(cuts: DimCuts) -> list[tuple[int, int]]:
    """Return the order in which a dim was cut: the number of each cut, and its split, which is 1 if it is contiguous.

    A strided shard has two meanings.  FSDP2 cuts what earlier cuts have left into contiguous parts, and writes by its
    split how many parts those have made; torch writes any other order of contiguous cuts in the same way.  In the
    terms of XTuner's Expert-TP, or of ``distribute_tensor``, the split is a number of stripes, and each stripe is cut.
    Both are the same after contiguous cuts into just so many equal parts; after stripes they are not, and
    ``fully_shard`` over stripes writes what ``distribute_tensor`` would for other elements.

    Raises:
        LayoutError: a strided shard can have both meanings, and they differ.
    """
    order: list[tuple[int, int]] = []
    for number in reversed(range(len(cuts))):  # the axes of later cuts were cut first, if splits say so
        placement, parts = cuts[number]
        split = placement.split if isinstance(placement, StridedShard) else 1
        # The first place before which the cuts have made as many parts as the split says.
        counts = accumulate((cuts[earlier][1] for earlier, _ in order), mul, initial=1)
        place = next((place for place, count in enumerate(counts) if count == split), None)
        if parts == 1 or place is None:  # nothing is cut, or no order of cuts has such a split
            order.insert(0, (number, split))
        elif all(stripes == 1 or cuts[earlier][1] == 1 for earlier, stripes in order[:place]):
            order.insert(place, (number, 1))
        else:
            raise _unordered_error(cuts)
    return order


def _unordered_error(cuts: DimCuts) -> LayoutError:
    shown = ", ".join(f"{placement} over {parts} ranks" for placement, parts in cuts)
    return LayoutError(
        "placements do not say in which order a dim was cut, and so which elements are here: fully_shard and "
        f"distribute_tensor write {shown} for different parts. To train the parameter, have fully_shard cut another "
        "dim of it (shard_placement_fn); to save it unchanged, give the boxes of each rank as a muonckpt.BoxedTensor"
    )


@lru_cache(maxsize=65536)
def mesh_layout(shape: Index, mesh: Mesh, placements: tuple[AxisPlacement, ...]) -> TensorLayout:
    """Lay a tensor of global ``shape`` out on ``mesh``: dense row-major local tensors, one buffer per rank.

    Raises:
        LayoutError: not one placement per mesh axis, or a placement of a dim that the tensor does not have.
    """
    _check_placements(shape, mesh, placements)
    corners, position, offset, strides = _fragment_rows(shape, mesh, placements, np.arange(len(mesh.ranks)))
    holding, buffer = np.unique(position, return_inverse=True)
    buffers = tuple(mesh.ranks[rank] for rank in holding.tolist())
    return TensorLayout.of_columns(shape, corners, buffers, buffer, offset, strides)


@lru_cache(maxsize=65536)
def fragments_on(shape: Index, mesh: Mesh, placements: tuple[AxisPlacement, ...], rank: int) -> tuple[Fragment, ...]:
    """Return the fragments of one rank in `mesh_layout`, without making it; nothing if the rank is not on the mesh."""
    _check_placements(shape, mesh, placements)
    if rank not in mesh.ranks:
        return ()
    corners, _, offset, strides = _fragment_rows(shape, mesh, placements, np.array([mesh.ranks.index(rank)]))
    boxes = map(Box, *(map(tuple, corner[:, : len(shape)].tolist()) for corner in corners))
    places = (Place(rank, start, tuple(along)) for start, along in zip(offset.tolist(), strides.tolist(), strict=True))
    return tuple(map(Fragment, boxes, places))


def local_shape(shape: Index, mesh: Mesh, placements: tuple[AxisPlacement, ...], rank: int) -> Index:
    """Return the shape of the local tensor on ``rank``, if the layout describes it."""
    position = np.array([mesh.ranks.index(rank)])
    along = (_shares_of_ranks(dim, shape, mesh, placements, position) for dim in range(len(shape)))
    return tuple(int(shares.length[number[0]]) for shares, number in along)


def _check_placements(shape: Index, mesh: Mesh, placements: tuple[AxisPlacement, ...]) -> None:
    if len(placements) != len(mesh.shape):
        raise LayoutError(f"mesh of shape {mesh.shape} needs {len(mesh.shape)} placements, got {placements}")
    for placement in placements:
        if placement.dim is not None and not 0 <= placement.dim < len(shape):
            raise LayoutError(f"{placement} does not fit a tensor of shape {shape}")


def _fragment_rows(
    shape: Index, mesh: Mesh, placements: tuple[AxisPlacement, ...], positions: IntArray
) -> tuple[tuple[IntArray, IntArray], IntArray, IntArray, IntArray]:
    """Return corners, positions, offsets and strides of the fragments of the ranks at ``positions`` of the mesh.

    A rank holds the product of its runs along each dim, the last dim's changing fastest.
    """
    # One row for each combination of a rank's runs.
    along = [_shares_of_ranks(dim, shape, mesh, placements, positions) for dim in range(len(shape))]
    runs = [np.diff(shares.first)[number] for shares, number in along]
    count = np.prod(runs, axis=0, dtype=np.int64) if runs else np.ones(len(positions), np.int64)
    holder, within = expanded(np.zeros_like(count), count)
    # From the last dim to the first, the row's number within its rank tells the run, and local lengths make strides.
    lo, hi = np.zeros((2, len(holder), max(len(shape), 1)), np.int64)
    hi[:, len(shape) :] = 1
    offset, strides = np.zeros(len(holder), np.int64), np.zeros((len(holder), len(shape)), np.int64)
    step = np.ones(len(holder), np.int64)
    for dim in reversed(range(len(shape))):
        shares, number = along[dim][0], along[dim][1][holder]
        run = shares.first[number] + within % runs[dim][holder]
        within //= runs[dim][holder]
        lo[:, dim], hi[:, dim], strides[:, dim] = shares.start[run], shares.stop[run], step
        offset += shares.before[run] * step
        step = step * shares.length[number]
    return (lo, hi), positions[holder], offset, strides


def _shares_of_ranks(
    dim: int, shape: Index, mesh: Mesh, placements: tuple[AxisPlacement, ...], positions: IntArray
) -> tuple[DimShares, IntArray]:
    """Return the shares of one dim, and the number of the share of each rank at ``positions`` of the mesh."""
    cuts: list[tuple[Shard | StridedShard, int]] = []
    number = np.zeros(len(positions), np.int64)
    for placement, parts, step in zip(placements, mesh.shape, row_major(mesh.shape), strict=True):
        # A rank's coordinates on the axes that cut this dim, in their order, number its share.
        if not isinstance(placement, Replicate) and placement.dim == dim:
            cuts.append((placement, parts))
            number = number * parts + positions // step % parts
    return _cut_dim(shape[dim], tuple(cuts)), number


@lru_cache(maxsize=256)
def _cut_dim(size: int, cuts: DimCuts) -> DimShares:
    """Cut a dim by placements over so many ranks each.  Cached: many tensors have equal dims.

    Raises:
        LayoutError: as `order_of_cuts`; or parts are unequal, and cut in another order are other parts of equal sizes.
    """
    order = order_of_cuts(cuts)
    splits = [placement.split if isinstance(placement, StridedShard) else 1 for placement, _ in cuts]
    shares = _cut_in_order(size, cuts, list(enumerate(splits)))
    # Where parts are unequal, the order of cuts that the splits describe may give other elements.
    if size % math.prod(parts for _, parts in cuts) and [number for number, _ in order] != [*range(len(cuts))]:
        reordered = _cut_in_order(size, cuts, order)
        if not np.array_equal(shares.holders(), reordered.holders()) and np.array_equal(
            shares.length, reordered.length
        ):
            raise _unordered_error(cuts)
    return shares


def _cut_in_order(size: int, cuts: DimCuts, order: Sequence[tuple[int, int]]) -> DimShares:
    """Cut a dim; shares are numbered by the coordinates on the axes in the order of the mesh, whatever the order is."""
    zero = np.arange(min(size, 1))  # no run if the dim is empty
    shares = DimShares(count=1, share=zero, start=zero, stop=zero + size)
    for number, split in order:
        parts = cuts[number][1]
        shares = shares.cut(parts) if split == 1 else shares.cut_strided(split, parts)
    numbers = np.arange(shares.count).reshape([cuts[number][1] for number, _ in order])
    present_numbers = numbers.transpose(np.argsort([number for number, _ in order])).reshape(-1)
    return shares.regroup(shares.count, np.argsort(present_numbers)[shares.share]).join()
