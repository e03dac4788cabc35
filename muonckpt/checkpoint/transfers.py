"""Which elements move between ranks, and in which stages: pure, and the same on every rank from the same descriptions.

A tensor's source is one layout.  Its target is one as well, unless ranks ask for boxes that overlap in part, as two
inference engines do that cut tensors otherwise; then it is several, filled from the same source.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..box import Box, Index
from ..errors import TargetError
from ..layout import Buffer, Fragment, TensorLayout, dense, holes_in
from ..overlap import IntArray, overlaps
from ..plan import Copy, Plan, make_plan

NOBODY = "nobody"
"""The buffer of elements that no rank asks for."""


class RankBoxes(NamedTuple):
    """The boxes of a tensor that a rank holds, or asks for."""

    rank: int
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """A tensor that moves, and the copies that fill its target.

    Attributes:
        source, target: keys on both sides.
        itemsize: bytes of an element.
        plan: the places are in each rank's boxes, as if these lay dense and end to end.
    """

    source: str
    target: str
    itemsize: int
    plan: Plan

    def copies(self) -> Iterator[Copy]:
        """Those that a rank asks for."""
        return (copy for copy in self.plan.copies if copy.target.buffer != NOBODY)


@dataclass(frozen=True, slots=True)
class Portion:
    """The elements of a box of the tensor whose transfer has this number."""

    number: int
    box: Box


Portions = tuple[Portion, ...]
"""A stage: what is exchanged at a time.  All elements have the same size."""


@lru_cache(maxsize=65536)
def source_layout(shape: Index, held: tuple[RankBoxes, ...]) -> TensorLayout:
    """Where the source has a tensor.

    Raises:
        LayoutError: nobody holds some elements, or boxes overlap in part.
    """
    return TensorLayout.of(shape, tuple(_fragments(held)))


@lru_cache(maxsize=65536)
def target_layouts(shape: Index, held: tuple[RankBoxes, ...]) -> tuple[TensorLayout, ...]:
    """Where ranks want a tensor: each rank is in one of the layouts, with all its boxes.

    Raises:
        LayoutError: the boxes of one rank overlap, or reach outside the tensor.
    """
    layouts = []
    for together in _apart(held):
        fragments = list(_fragments(together))
        rest = holes_in(Box.of(shape), list(dict.fromkeys(fragment.box for fragment in fragments)))
        start = 0
        for box in rest:
            fragments.append(dense(box, NOBODY, start))
            start += box.numel
        layouts.append(TensorLayout.of(shape, tuple(fragments)))
    return tuple(layouts)


def transfers_of(
    source: str, target: str, itemsize: int, shape: Index, given: tuple[RankBoxes, ...], asked: tuple[RankBoxes, ...]
) -> list[Transfer]:
    """The moves that fill what ranks ask for of a tensor.

    Raises:
        LayoutError: as `source_layout` and `target_layouts`.
    """
    layout = source_layout(shape, given)
    return [Transfer(source, target, itemsize, make_plan(layout, wanted)) for wanted in target_layouts(shape, asked)]


def stages_of(moves: Sequence[Transfer], ranks: Sequence[int], memory: int) -> list[Portions]:
    """Cut the moves into stages in which no rank sends and receives more than so many bytes together.

    Raises:
        TargetError: one element does not fit.
    """
    crossings: dict[int, _Crossing] = {}  # many tensors share one plan
    stages: list[Portions] = []
    stage: list[Portion] = []
    filled, size = np.zeros(len(ranks), np.int64), 0
    for number in sorted(range(len(moves)), key=lambda number: -moves[number].itemsize):
        move = moves[number]
        if id(move.plan) not in crossings:
            crossings[id(move.plan)] = _crossing(move.plan, ranks)
        crossing = crossings[id(move.plan)]
        for box, elements in _portions(crossing, Box.of(move.plan.shape), memory // move.itemsize):
            cost = elements * move.itemsize
            if stage and (size != move.itemsize or int((filled + cost).max()) > memory):
                stages.append(tuple(stage))
                stage, filled = [], np.zeros(len(ranks), np.int64)
            size = move.itemsize
            stage.append(Portion(number, box))
            filled = filled + cost
    return [*stages, tuple(stage)] if stage else stages


@dataclass(frozen=True, slots=True)
class _Crossing:
    """The copies of a plan between different ranks, as arrays: corners ``[n, max(ndim, 1)]``, and positions ``[n]``."""

    lo: IntArray
    hi: IntArray
    giver: IntArray
    taker: IntArray
    ranks: int

    def elements(self, box: Box) -> IntArray:
        """How many elements of a box each rank sends and receives."""
        sizes = np.minimum(self.hi, box.hi or (1,)) - np.maximum(self.lo, box.lo or (0,))
        volumes = np.maximum(sizes, 0).prod(axis=1)
        there = np.bincount(self.giver, volumes, self.ranks) + np.bincount(self.taker, volumes, self.ranks)
        return there.astype(np.int64)


def _crossing(plan: Plan, ranks: Sequence[int]) -> _Crossing:
    position = {rank: index for index, rank in enumerate(ranks)}
    copies = [copy for copy in plan.copies if copy.target.buffer not in (NOBODY, copy.source.buffer)]
    width = max(len(plan.shape), 1)

    def corners(values: list[Index]) -> IntArray:
        return np.array(values, np.int64).reshape(-1, width)

    def positions(buffers: Iterable[Buffer]) -> IntArray:
        return np.array([position[int(buffer)] for buffer in buffers], np.int64)

    return _Crossing(
        corners([copy.box.lo or (0,) for copy in copies]),
        corners([copy.box.hi or (1,) for copy in copies]),
        positions(copy.source.buffer for copy in copies),
        positions(copy.target.buffer for copy in copies),
        len(ranks),
    )


def _portions(crossing: _Crossing, box: Box, most: int) -> Iterator[tuple[Box, IntArray]]:
    """Halve a box, along the dim that spreads its elements best, until no rank moves more than so many at once.

    Raises:
        TargetError: a single element is too much.
    """
    elements = crossing.elements(box)
    peak = int(elements.max(initial=0))
    if peak == 0:
        return
    if peak <= most:
        yield box, elements
        return
    if box.numel == 1:
        raise TargetError(
            f"the memory has {most} places for elements of a tensor, and one of them needs {peak}: give more"
        )
    halves = min(
        (_halved(box, dim) for dim in range(box.ndim) if box.shape[dim] > 1),
        key=lambda pair: max(int(crossing.elements(half).max()) for half in pair),
    )
    for half in halves:
        yield from _portions(crossing, half, most)


def _halved(box: Box, dim: int) -> tuple[Box, Box]:
    middle = (box.lo[dim] + box.hi[dim]) // 2
    return (
        Box(box.lo, (*box.hi[:dim], middle, *box.hi[dim + 1 :])),
        Box((*box.lo[:dim], middle, *box.lo[dim + 1 :]), box.hi),
    )


def _fragments(held: Sequence[RankBoxes]) -> Iterator[Fragment]:
    for rank, boxes in held:
        start = 0
        for box in boxes:
            yield dense(box, rank, start)
            start += box.numel


def _apart(held: tuple[RankBoxes, ...]) -> list[list[RankBoxes]]:
    """Ranks in as few lists as come about, so that in each list boxes are equal or disjoint."""
    numbers: dict[Box, int] = {}
    for _, boxes in held:
        for box in boxes:
            numbers.setdefault(box, len(numbers))
    lo = np.array([box.lo or (0,) for box in numbers], np.int64)
    hi = np.array([box.hi or (1,) for box in numbers], np.int64)
    against: defaultdict[int, set[int]] = defaultdict(set)
    for i, j in zip(*overlaps(lo, hi, lo, hi), strict=True):
        if i != j:
            against[int(i)].add(int(j))
    lists: list[tuple[list[RankBoxes], set[int]]] = []
    for each in held:
        mine = {numbers[box] for box in each.boxes}
        barred = set().union(*(against[number] for number in mine)) - mine if against else set()
        for members, taken in lists:
            if not barred & taken:
                members.append(each)
                taken |= mine
                break
        else:
            lists.append(([each], mine))
    return [members for members, _ in lists]
