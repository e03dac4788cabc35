"""The plan of an exchange: elements that move between ranks, in stages of bounded memory.

The elements may be in live tensors or in buffers that were read from files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..algebra.box import Box, Index
from ..algebra.layout import TensorLayout
from ..algebra.overlap import IntArray
from ..algebra.plan import Plan, make_plan
from ..names.errors import TargetError
from .joint_state import NO_RANK, RankBoxes, request_layouts


@dataclass(frozen=True, slots=True, eq=False)
class CopyTable:
    """Copies between ranks, in columns.

    Attributes:
        lo, hi: corners of each copy's box in the tensor, ``[n, d]``.
        source, target: places of the ranks in the process group, ``[n]``.
        source_offset, target_offset: where the box begins if the rank's boxes lie dense and end to end, in elements,
            ``[n]``.
        num_sent: how many elements leave their rank.
    """

    lo: IntArray
    hi: IntArray
    source: IntArray
    target: IntArray
    source_offset: IntArray
    target_offset: IntArray
    num_sent: int

    @classmethod
    def of(cls, plan: Plan) -> CopyTable:
        """Return the copies of a plan whose buffers are places; those from or to `NO_RANK` are left out."""
        sources, targets = (
            np.array([-1 if buffer == NO_RANK else buffer for buffer in buffers], np.int64)
            for buffers in (plan.sources, plan.targets)
        )
        table, lo = plan.table, plan.starts
        source, target = sources[table.source], targets[table.target]
        rows = (source >= 0) & (target >= 0)
        num_sent = int((table.numel * (source != target))[rows].sum())
        offsets = table.source_offset[rows], table.target_offset[rows]
        return cls(lo[rows], (lo + table.sizes)[rows], source[rows], target[rows], *offsets, num_sent)

    def between_ranks(self) -> CopyTable:
        """Return the copies from one rank to another."""
        rows = self.source != self.target
        offsets = self.source_offset[rows], self.target_offset[rows]
        return CopyTable(self.lo[rows], self.hi[rows], self.source[rows], self.target[rows], *offsets, self.num_sent)

    def elements_moved(self, box: Box, num_ranks: int) -> IntArray:
        """Return how many elements of a box each rank sends and receives together, ``[ranks]``."""
        sizes = np.minimum(self.hi, np.array(box.hi, np.int64)) - np.maximum(self.lo, np.array(box.lo, np.int64))
        volumes = np.maximum(sizes, 0).prod(axis=1) * (self.source != self.target)
        sent, received = (np.bincount(places, volumes, num_ranks) for places in (self.source, self.target))
        return (sent + received).astype(np.int64)


def make_copies(source: TensorLayout, asked: tuple[RankBoxes, ...]) -> list[CopyTable]:
    """Return the copies that give ranks the boxes that they ask for: several tables, if these overlap in part.

    Args:
        source: the layout of the elements on the ranks that have them; ranks are known by their places.

    Raises:
        LayoutError: as `request_layouts`.
    """
    return [CopyTable.of(make_plan(source, layout)) for layout in request_layouts(source.shape, asked)]


class Move(NamedTuple):
    """A tensor that moves: its keys on both sides, and the copies that fill the target."""

    source: str
    target: str
    itemsize: int
    shape: Index
    copies: CopyTable


class Portion(NamedTuple):
    """The elements of a box of the tensor whose move has this number."""

    move: int
    box: Box


Stage = tuple[Portion, ...]
"""Portions that are exchanged at once.  All elements have the same size."""


def divide_in_stages(moves: Sequence[Move], num_ranks: int, memory: int) -> list[Stage]:
    """Cut moves into stages in which no rank sends and receives more than ``memory`` bytes together.

    Raises:
        TargetError: one element does not fit.
    """
    stages: list[Stage] = []
    stage: list[Portion] = []
    filled, size = np.zeros(num_ranks, np.int64), 0
    numbers = [number for number, move in enumerate(moves) if move.copies.num_sent]
    for number in sorted(numbers, key=lambda number: -moves[number].itemsize):
        move = moves[number]
        for box, elements in _portions(move.copies, Box.of(move.shape), num_ranks, memory // move.itemsize):
            portion_bytes = elements * move.itemsize
            if stage and (size != move.itemsize or int((filled + portion_bytes).max()) > memory):
                stages.append(tuple(stage))
                stage, filled = [], np.zeros(num_ranks, np.int64)
            size = move.itemsize
            stage.append(Portion(number, box))
            filled = filled + portion_bytes
    return [*stages, tuple(stage)] if stage else stages


@lru_cache(maxsize=4096)
def _portions(copies: CopyTable, box: Box, num_ranks: int, max_elements: int) -> tuple[tuple[Box, IntArray], ...]:
    """Halve a box, along the dim that spreads its elements best, until no rank moves more than ``max_elements``.

    Cached: layers repeat.
    """

    def halves(dim: int) -> tuple[Box, Box]:
        middle = (box.lo[dim] + box.hi[dim]) // 2
        hi, lo = ((*corner[:dim], middle, *corner[dim + 1 :]) for corner in (box.hi, box.lo))
        return Box(box.lo, hi), Box(lo, box.hi)

    def peak(pair: tuple[Box, Box]) -> int:
        return max(int(copies.elements_moved(half, num_ranks).max()) for half in pair)

    elements = copies.elements_moved(box, num_ranks)
    if not elements.any():
        return ()
    if int(elements.max()) <= max_elements:
        return ((box, elements),)
    if box.numel == 1:
        raise TargetError(
            f"the memory has {max_elements} places for elements of a tensor, and one of them needs "
            f"{int(elements.max())}: give more"
        )
    first, second = min((halves(dim) for dim in range(box.ndim) if box.shape[dim] > 1), key=peak)
    return (
        *_portions(copies, first, num_ranks, max_elements),
        *_portions(copies, second, num_ranks, max_elements),
    )


class CopySide(NamedTuple):
    """One side of a move's copies on one rank, in columns; ``other`` is the place of the rank at the other side."""

    lo: IntArray
    hi: IntArray
    offset: IntArray
    other: IntArray

    def rows(self, numbers: IntArray | NDArray[np.bool_]) -> CopySide:
        return CopySide(*(column[numbers] for column in self))

    def within(self, box: Box) -> CopySide:
        """Cut the copies to the parts inside a box."""
        lo, hi = np.maximum(self.lo, np.array(box.lo, np.int64)), np.minimum(self.hi, np.array(box.hi, np.int64))
        return self._replace(lo=lo, hi=hi).rows(np.flatnonzero((lo < hi).all(axis=1)))


class RankSides(NamedTuple):
    """The copies of a move that concern one rank: elements that it sends, receives, and copies to itself.

    The last are given from both sides, row by row.
    """

    outgoing: CopySide
    incoming: CopySide
    local_source: CopySide
    local_target: CopySide


@lru_cache(maxsize=4096)
def sides_of(copies: CopyTable, place: int) -> RankSides:
    """Return the copies that concern the rank at a place.  Cached: layers repeat."""
    from_here, to_here = copies.source == place, copies.target == place
    source = CopySide(copies.lo, copies.hi, copies.source_offset, copies.target)
    target = CopySide(copies.lo, copies.hi, copies.target_offset, copies.source)
    local = from_here & to_here
    return RankSides(
        source.rows(from_here & ~to_here), target.rows(to_here & ~from_here), source.rows(local), target.rows(local)
    )
