"""Moving tensors between ranks: which elements move in which stages, and one rank's part in it.

Plans and stages are pure, and the same on every rank from the same descriptions.  A tensor's source is one layout.  Its
target is one as well, unless ranks ask for boxes that overlap in part; then it is several, filled from the same source.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..box import Box, Index
from ..errors import TargetError
from ..fingerprint import combine
from ..layout import Place
from ..layouts.boxed_tensor import Parts
from ..overlap import IntArray
from ..plan import Copy, Plan, make_plan
from .all_ranks import exchanged
from .bits import share_of, unsigned
from .live_state import NOBODY, LocalParts, RankBoxes, asked_layouts, held_layout


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
        """Yield the copies that a rank asks for."""
        return (copy for copy in self.plan.copies if copy.target.buffer != NOBODY)


@dataclass(frozen=True, slots=True)
class Portion:
    """The elements of a box of the tensor whose transfer has this number."""

    number: int
    box: Box


Portions = tuple[Portion, ...]
"""A stage: what is exchanged at a time.  All elements have the same size."""


def transfers_of(
    source: str, target: str, itemsize: int, shape: Index, given: tuple[RankBoxes, ...], asked: tuple[RankBoxes, ...]
) -> list[Transfer]:
    """Return the moves that fill what ranks ask for of a tensor.

    Raises:
        LayoutError: as `held_layout` and `asked_layouts`.
    """
    layout = held_layout(shape, given)
    return [Transfer(source, target, itemsize, make_plan(layout, wanted)) for wanted in asked_layouts(shape, asked)]


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
        sizes = np.minimum(self.hi, box.hi or (1,)) - np.maximum(self.lo, box.lo or (0,))
        volumes = np.maximum(sizes, 0).prod(axis=1)
        there = np.bincount(self.giver, volumes, self.ranks) + np.bincount(self.taker, volumes, self.ranks)
        return there.astype(np.int64)


def _crossing(plan: Plan, ranks: Sequence[int]) -> _Crossing:
    position = {rank: index for index, rank in enumerate(ranks)}
    sources, targets = (
        np.array([position[int(buffer)] if buffer != NOBODY else -1 for buffer in buffers], np.int64)
        for buffers in (plan.sources, plan.targets)
    )
    giver, taker = sources[plan.table.source], targets[plan.table.target]
    crosses = (taker >= 0) & (giver != taker)
    lo, sizes = plan.starts[crosses], plan.table.sizes[crosses]
    if not plan.shape:  # one element of one dim
        lo, sizes = np.zeros((len(lo), 1), np.int64), np.ones((len(lo), 1), np.int64)
    return _Crossing(lo, lo + sizes, giver[crosses], taker[crosses], len(ranks))


def _portions(crossing: _Crossing, box: Box, most: int) -> Iterator[tuple[Box, IntArray]]:
    """Halve a box, along the dim that spreads its elements best, until no rank moves more than so many at once."""
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


# --- One rank's part --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Parcel:
    """Elements of a box that this rank exchanges with another one; ``place`` is where they lie here."""

    number: int
    place: Place
    box: Box
    nbytes: int


Parcels = Mapping[int, Sequence[_Parcel]]
"""By the other rank, in the order of the group."""


class Carrier:
    """The executor of this rank's part of moves.

    Errors of this rank are kept in ``failure``, and it goes on exchanging, so that the others do not hang.

    Attributes:
        sent, received: bytes so far.
        largest: bytes of its buffers.
    """

    def __init__(
        self,
        source: Mapping[str, Parts],
        target: Mapping[str, Parts],
        moves: Sequence[Transfer],
        stages: Sequence[Portions],
        ranks: Sequence[int],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.failure: Exception | None = None
        self.sent = self.received = 0
        self._moves, self._ranks, self._group = moves, ranks, group
        self._source = [LocalParts.of(source.get(move.source, {})) for move in moves]
        self._target = [LocalParts.of(target.get(move.target, {})) for move in moves]
        self._gives = [[copy for copy in move.copies() if copy.source.buffer == self.rank] for move in moves]
        self._takes = [[copy for copy in move.copies() if copy.target.buffer == self.rank] for move in moves]
        self._stages = [
            (
                self._parcels(stage, self._gives, lambda copy: (copy.target.buffer, copy.source)),
                self._parcels(stage, self._takes, lambda copy: (copy.source.buffer, copy.target)),
            )
            for stage in stages
        ]
        self.largest = max((sum(_sizes(gives)) + sum(_sizes(takes)) for gives, takes in self._stages), default=0)
        self._wire = torch.empty(0, dtype=torch.uint8)

    def make_buffers(self, device: torch.device) -> None:
        """Have memory for the largest stage."""
        self._wire = torch.empty(self.largest, dtype=torch.uint8, device=device)

    @torch.no_grad()
    def run(self) -> None:
        """Copy what stays here, and exchange what does not.  Collective."""
        self._attempt(self._copy_own)
        for gives, takes in self._stages:
            give, take = _sizes(gives), _sizes(takes)
            send, receive = self._wire[: sum(give)], self._wire[sum(give) : sum(give) + sum(take)]
            self._attempt(self._pack, gives, send)
            exchanged(self._group, send, give, receive, take)
            self._attempt(self._unpack, takes, receive)
            self.sent, self.received = self.sent + len(send), self.received + len(receive)
        self._wire = self._wire[:0].clone()

    def departed(self) -> dict[tuple[int, int], int]:
        """Return shares of fingerprints of what this rank has given, by number of the move and rank that takes it."""
        shares: defaultdict[tuple[int, int], int] = defaultdict(int)
        for number, copies in enumerate(self._gives):
            for copy in copies:
                elements = self._source[number].view(copy.source, copy.box)
                taker = number, int(copy.target.buffer)
                shares[taker] = combine(shares[taker], _share(elements, copy.box))
        return dict(shares)

    def arrived(self) -> dict[int, int]:
        """Return shares of fingerprints of what this rank has taken, by number of the move."""
        return {
            number: combine(*map(_share, self._target[number].parts, self._target[number].boxes))
            for number, copies in enumerate(self._takes)
            if copies
        }

    def _parcels(
        self, stage: Portions, copies: Sequence[Sequence[Copy]], ends: Callable[[Copy], tuple[int | str, Place]]
    ) -> Parcels:
        """List what goes to or comes from each rank, on both in the same order: of the stage, and of the plan."""
        parcels: dict[int, list[_Parcel]] = {rank: [] for rank in self._ranks}
        for portion in stage:
            size = self._moves[portion.number].itemsize
            for copy in copies[portion.number]:
                other, place = ends(copy)
                common = copy.box & portion.box
                if common is not None and other != self.rank:
                    parcels[int(other)].append(_Parcel(portion.number, place, common, common.numel * size))
        return parcels

    def _attempt(self, work: Callable[..., None], *arguments: object) -> None:
        try:
            work(*arguments)
        except Exception as error:
            self.failure = self.failure or error

    def _copy_own(self) -> None:
        for number, copies in enumerate(self._takes):
            for copy in copies:
                if copy.source.buffer == self.rank:
                    elements = self._source[number].view(copy.source, copy.box)
                    self._target[number].view(copy.target, copy.box).copy_(elements)

    def _pack(self, gives: Parcels, wire: Tensor) -> None:
        for parcel, raw in _cut(gives, wire):
            elements = self._source[parcel.number].view(parcel.place, parcel.box)
            raw.view(elements.dtype).view(elements.shape).copy_(elements)

    def _unpack(self, takes: Parcels, wire: Tensor) -> None:
        for parcel, raw in _cut(takes, wire):
            elements = self._target[parcel.number].view(parcel.place, parcel.box)
            elements.copy_(raw.view(elements.dtype).view(elements.shape))


def _sizes(parcels: Parcels) -> list[int]:
    return [sum(parcel.nbytes for parcel in of_rank) for of_rank in parcels.values()]


def _cut(parcels: Parcels, wire: Tensor) -> list[tuple[_Parcel, Tensor]]:
    """Return each parcel with its bytes, which are aligned: all elements of a stage have one size."""
    every = [parcel for of_rank in parcels.values() for parcel in of_rank]
    return list(zip(every, torch.split(wire, [parcel.nbytes for parcel in every]), strict=True)) if every else []


def _share(elements: Tensor, box: Box) -> int:
    return unsigned(int(share_of(elements, box.lo)))
