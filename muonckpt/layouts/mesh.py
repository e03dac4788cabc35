"""Meshes of ranks, with one placement per mesh axis (the vocabulary of torch's DTensor), to layouts.

Placements apply from the first mesh axis to the last.  Along each tensor dim a rank's share is a list of *runs*,
``(start, stop)`` ranges of global indices in local order; a placement selects from the runs that the axes before it
left.  So strided shards, uneven splits and any number of axes on one dim need no special case: the local tensor is
the row-major product of its runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import accumulate, product
from operator import mul
from typing import Protocol

from ..box import Box, Index, row_major
from ..errors import LayoutError
from ..layout import Fragment, Place, TensorLayout

Runs = tuple[tuple[int, int], ...]


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

    @classmethod
    def of(cls, *shape: int) -> Mesh:
        """Ranks 0, 1, 2, … on a grid of this shape."""
        return cls(shape, tuple(range(math.prod(shape))))


class AxisPlacement(Protocol):
    """How one mesh axis cuts a tensor: the runs of ``dim`` that the rank at ``index`` of ``parts`` keeps."""

    @property
    def dim(self) -> int | None: ...

    def take(self, runs: Runs, parts: int, index: int) -> Runs: ...


@dataclass(frozen=True, slots=True)
class Shard:
    """Contiguous parts of ``ceil(n / parts)`` elements; the last ones may be short or empty (``torch.chunk``)."""

    dim: int

    def __str__(self) -> str:
        return f"Shard({self.dim})"

    def take(self, runs: Runs, parts: int, index: int) -> Runs:
        numel = sum([stop - start for start, stop in runs])
        size = -(-numel // parts)
        return _slice(runs, min(size * index, numel), min(size * (index + 1), numel))


@dataclass(frozen=True, slots=True)
class StridedShard:
    """Cut into ``split`` parts first, then each of them over the axis; the rank keeps its share of every part.

    This is how torch says that an axis *later* in the mesh cut the dim first (FSDP2 over tensor parallel).
    """

    dim: int
    split: int

    def __str__(self) -> str:
        return f"StridedShard({self.dim}, split={self.split})"

    def take(self, runs: Runs, parts: int, index: int) -> Runs:
        inner = Shard(self.dim)
        return tuple(
            run for part in range(self.split) for run in inner.take(inner.take(runs, self.split, part), parts, index)
        )


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the axis holds the same."""

    dim: None = None

    def __str__(self) -> str:
        return "Replicate"

    def take(self, runs: Runs, parts: int, index: int) -> Runs:
        return runs


@lru_cache(maxsize=65536)
def mesh_layout(shape: Index, mesh: Mesh, placements: tuple[AxisPlacement, ...]) -> TensorLayout:
    """The layout of a tensor of global ``shape`` on ``mesh``: dense row-major local tensors, one buffer per rank.

    Raises:
        LayoutError: not one placement per mesh axis, or a placement of a dim that the tensor does not have.
    """
    _check_placements(shape, mesh, placements)
    runs_of = [_runs_along(dim, shape, mesh, placements) for dim in range(len(shape))]
    fragments = (
        fragment
        for rank, coordinate in zip(mesh.ranks, product(*map(range, mesh.shape)), strict=True)
        for fragment in _local_fragments(rank, [along(coordinate) for along in runs_of])
    )
    return TensorLayout(shape, tuple(fragments))


@lru_cache(maxsize=65536)
def fragments_on(shape: Index, mesh: Mesh, placements: tuple[AxisPlacement, ...], rank: int) -> tuple[Fragment, ...]:
    """What `mesh_layout` gives to one rank, without what it gives to the others; nothing if it is not on the mesh.

    Raises:
        LayoutError: as `mesh_layout`.
    """
    _check_placements(shape, mesh, placements)
    if rank not in mesh.ranks:
        return ()
    return tuple(_local_fragments(rank, _runs_on(shape, mesh, placements, rank)))


def local_shape(shape: Index, mesh: Mesh, placements: tuple[AxisPlacement, ...], rank: int) -> Index:
    """Shape of the local tensor on ``rank``, if the layout describes it."""
    return tuple(share.length for share in _runs_on(shape, mesh, placements, rank))


def _check_placements(shape: Index, mesh: Mesh, placements: tuple[AxisPlacement, ...]) -> None:
    if len(placements) != len(mesh.shape):
        raise LayoutError(f"mesh of shape {mesh.shape} needs {len(mesh.shape)} placements, got {placements}")
    for placement in placements:
        if placement.dim is not None and not 0 <= placement.dim < len(shape):
            raise LayoutError(f"{placement} does not fit a tensor of shape {shape}")


def _runs_on(shape: Index, mesh: Mesh, placements: tuple[AxisPlacement, ...], rank: int) -> tuple[_Share, ...]:
    """What a rank of the mesh holds of each dim."""
    position = mesh.ranks.index(rank)
    coordinate = tuple(position // step % size for size, step in zip(mesh.shape, row_major(mesh.shape), strict=True))
    return tuple(_runs_along(dim, shape, mesh, placements)(coordinate) for dim in range(len(shape)))


@dataclass(frozen=True, slots=True)
class _Share:
    """Runs of one dim, each with the number of indices before it in local order, and how many they are together."""

    runs: tuple[tuple[int, int, int], ...]
    length: int

    @classmethod
    def of(cls, runs: Runs) -> _Share:
        lengths = [stop - start for start, stop in runs]
        before = accumulate(lengths, initial=0)
        return cls(tuple([(start, stop, n) for (start, stop), n in zip(runs, before, strict=False)]), sum(lengths))


def _runs_along(
    dim: int, shape: Index, mesh: Mesh, placements: tuple[AxisPlacement, ...]
) -> Callable[[tuple[int, ...]], _Share]:
    """The share of one dim by mesh coordinate.  Only the axes that cut the dim matter; each share is computed once."""
    axes = [axis for axis, placement in enumerate(placements) if placement.dim == dim]

    @cache
    def share(*indices: int) -> _Share:
        runs: Runs = ((0, shape[dim]),) if shape[dim] else ()
        for axis, index in zip(axes, indices, strict=True):
            runs = placements[axis].take(runs, mesh.shape[axis], index)
        return _Share.of(_joined(runs))

    return lambda coordinate: share(*[coordinate[axis] for axis in axes])


def _local_fragments(rank: int, shares: Sequence[_Share]) -> Iterator[Fragment]:
    """The boxes of a rank that holds the product of these shares."""
    strides = _row_major(tuple([share.length for share in shares]))
    for corner in product(*[share.runs for share in shares]):
        lo, hi, before = zip(*corner, strict=True) if corner else ((), (), ())
        yield Fragment(Box(lo, hi), Place(rank, sum(map(mul, before, strides)), strides))


_row_major = lru_cache(maxsize=4096)(row_major)
"""Of all ranks whose local tensors have one shape."""


def _slice(runs: Runs, lo: int, hi: int) -> Runs:
    """Local indices ``lo:hi`` of the concatenated runs."""
    kept = []
    for start, stop in runs:
        begin, end = start + max(lo, 0), min(stop, start + hi)
        if begin < end:
            kept.append((begin, end))
        lo, hi = lo - (stop - start), hi - (stop - start)
    return tuple(kept)


def _joined(runs: Runs) -> Runs:
    """Merge adjacent runs, so that a contiguous share is one box."""
    joined: list[tuple[int, int]] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)
