"""Live state from one mesh to another, between the ranks of one process group, without a disk.

Every rank tells all others what it has, then what it asks for.  From that each derives the same plans and stages, and
in each stage sends exactly what others ask of it.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ..algebra.box import Box, Index
from ..algebra.fingerprint import as_hex, combine
from ..algebra.overlap import IntArray
from ..algebra.plan import Plan, make_plan
from ..names.errors import AttestError, LayoutError, SourceError, TargetError, about, warn_on_rank
from ..names.resumption import Globs, LoadReport
from ..names.wording import listed
from ..store.reading.dtypes import itemsize
from .all_ranks import (
    exchange,
    gather_on_all,
    group_ranks,
    place_in,
    refuse_crossed,
    refuse_differing,
    unusable,
    wire_device,
)
from .attestation import MOST_FAULTS, SharesOfRank, TensorPrint, differing, held_together, shares_of
from .bits import share_of, unsigned
from .live_state import (
    NOBODY,
    HeldTensor,
    LiveState,
    LocalParts,
    RankBoxes,
    RankState,
    asked_layouts,
    held_layout,
)
from .matching import RankRequest, judge, match, selection
from .offers import Offer, known_jointly, stored_of
from .shared_memory import check_apart, differing_ties, tied_origins
from .template import LoadTemplate, Stored, joint_sources

DEFAULT_MEMORY = 256 << 20
"""Bytes of a rank's exchange buffers."""


@dataclass(frozen=True, slots=True)
class Redistribution:
    """The result of `redistribute`.

    Attributes:
        report: as `load` gives it.
        tensors: how many were filled.
        sent, received: bytes that this rank exchanged with others.
        stages: how many exchanges there were.
        buffers: bytes of this rank's largest exchange, both ways.
    """

    report: LoadReport
    tensors: int
    sent: int
    received: int
    stages: int
    buffers: int

    def __str__(self) -> str:
        return (
            f"{self.tensors} tensors in {self.stages} stages; this rank sent {self.sent / 1e6:.3g} MB and received "
            f"{self.received / 1e6:.3g} MB, {self.buffers / 1e6:.3g} MB at a time"
        )


@dataclass(frozen=True, slots=True)
class _Request:
    """What a rank asks for; ``tied`` are pairs of tensors of the source that would come into one memory."""

    rank: RankRequest
    state: RankState
    devices: frozenset[str]
    memory: int
    tied: frozenset[tuple[str, str]]


def redistribute(
    source_state_dict: Mapping[str, Any],
    target_state_dict: dict[str, Any],
    *,
    group: dist.ProcessGroup | None = None,
    memory: int = DEFAULT_MEMORY,
    allow_extra: bool | Iterable[str] = False,
    fresh: Iterable[str] = (),
    attest: bool = False,
) -> Redistribution:
    """Fill the tensors of one state dict from those of another, whatever meshes they are on.  Collective; no disk.

    Like `save` of the source and `load` into the target, in memory: each element that a rank asks for comes from a rank
    that holds it, if possible itself, and travels once.  A rank without a source or a target gives ``{}``.

    Args:
        source_state_dict: nested as for `save`; not changed.
        target_state_dict: the template, as for `load`; filled in place.  Its tensors lie in other memory.
        group: the ranks that take part; all of them call this.
        memory: bytes of a rank's exchange buffers, both ways together; the least that any rank gives counts.
        allow_extra, fresh: as for `load`; the same on every rank.
        attest: compare fingerprints of the source's replicas, and of what has arrived with what was sent.

    Raises:
        SourceError: source and target do not fit each other; lists what differs.
        LayoutError: nobody holds some elements of the source, boxes overlap in part, source and target share memory,
            tensors that differ would come into one memory, or elements of the target share memory otherwise.
        TargetError: one element does not fit into the memory.
        AttestError: replicas of the source differ, or what has arrived is not what was sent.
        ArgumentError: an argument is none of these, or not the same on all ranks.
        LostRankError: another rank was lost, or did not answer within the time-out of the process group.
    """
    refuse_crossed(group, "redistribute")
    expected: Mapping[str, TensorPrint] | None = {} if attest else None
    done, *_ = _redistribute(source_state_dict, target_state_dict, group, memory, allow_extra, fresh, expected)
    return done


def redistribute_attested(
    source_state_dict: Mapping[str, Any],
    target_state_dict: dict[str, Any],
    expected: Mapping[str, TensorPrint],
    *,
    group: dist.ProcessGroup | None,
    allow_extra: bool | Iterable[str],
    fresh: Iterable[str],
) -> tuple[LoadReport, LiveState, Collection[str], Mapping[str, str]]:
    """Redistribute as with ``attest=True``, after proving that the source has these fingerprints.  Collective.

    Returns:
        The report, the target, which keys of it this rank has filled, and the keys of the source of all tensors, by
        those that ranks have in common.

    Args:
        expected: by the keys of the source; tensors that nobody asks for are not looked at.

    Raises:
        AttestError: also if the source is not what the fingerprints say; before the target is touched.
    """
    done, target, filled, sources = _redistribute(
        source_state_dict, target_state_dict, group, DEFAULT_MEMORY, allow_extra, fresh, expected
    )
    return done.report, target, filled, sources


def _redistribute(
    source_state_dict: Mapping[str, Any],
    target_state_dict: dict[str, Any],
    group: dist.ProcessGroup | None,
    memory: int,
    allow_extra: bool | Iterable[str],
    fresh: Iterable[str],
    expected: Mapping[str, TensorPrint] | None,
) -> tuple[Redistribution, LiveState, Collection[str], Mapping[str, str]]:
    """Redistribute; attest, if fingerprints are given, those tensors that have one, and all that moves."""
    attest = expected is not None
    ranks = group_ranks(group)
    source: LiveState
    target: LiveState
    carrier: Carrier
    chosen: tuple[Globs, Globs]

    def offer() -> Offer:
        nonlocal source, chosen
        if memory < 1:
            raise TargetError(f"expected memory of at least 1 byte, found {memory}")
        chosen = selection(allow_extra, fresh)
        source = LiveState.of(source_state_dict, "to redistribute from")
        return Offer.of(source, {"allow_extra": chosen[0].patterns, "attest": attest})

    offers = gather_on_all(group, SourceError, offer)
    refuse_differing(group, "redistribute", [offer.arguments for offer in offers])
    offers = known_jointly(offers)
    items, stored = stored_of(ranks, offers, place_in(group))

    def ask() -> _Request:
        nonlocal source, target
        source = source.known_as(offers[place_in(group)[0]].state)
        target = LiveState.of(target_state_dict, "to redistribute into")
        return _asked(source, target, stored, *chosen, memory)

    requests = gather_on_all(group, SourceError, ask)
    matching, report = judge([request.rank for request in requests], stored, chosen[0])
    if not matching.fits:
        cure = "muonckpt.redistribute(..., {})"
        raise SourceError(f"the source does not fit the target: {matching.misfit(cure)}")
    moves = _moves(ranks, offers, requests)
    if tied := frozenset().union(*(request.tied for request in requests)):
        keys = {key for pair in tied for key in pair}
        _refuse_overwriting(ranks, tied, gather_on_all(group, LayoutError, lambda: shares_of(source, keys)))
    stages = stages_of(moves, len(ranks), min(request.memory for request in requests))
    devices = frozenset().union(*(offer.devices for offer in offers), *(request.devices for request in requests))

    def prepare() -> None:
        nonlocal carrier
        carrier = Carrier(source, target, moves, stages, group, wire_device(group, devices))

    gather_on_all(group, TargetError, prepare)
    shares: dict[tuple[str, Box], int] = {}
    if expected is not None:
        moving = {move.source for move in moves}
        held = gather_on_all(group, AttestError, lambda: shares_of(source, moving))
        state, numbers = held[carrier.place]
        boxes = [(key, box) for key, kind in state.tensors() for box in kind.boxes]
        shares = dict(zip(boxes, numbers, strict=True))
        together = held_together(ranks, held)
        faults = [
            *together.faults,
            *differing(
                {key: together.tensors[key] for key in together.tensors.keys() & expected.keys()},
                {key: expected[key] for key in moving & expected.keys()},
            ),
        ]
        if faults:
            reason = "differs from rank to rank" if together.faults else "is not what its fingerprints say"
            raise AttestError(f"the source {reason}: {listed(faults, MOST_FAULTS, '; ')}")
    carrier.run()
    mine = requests[carrier.place].rank.matching

    def finish() -> tuple[Mapping[tuple[int, int], int], Mapping[int, int]]:
        if carrier.failure is not None:
            raise carrier.failure
        target.zero(mine.zeros)
        objects = {key: pickle.loads(items[origin]) for key, origin in mine.sources.items() if origin in items}
        target.put(objects, mine.added)
        return (carrier.departed(shares), carrier.arrived()) if attest else ({}, {})

    with unusable():
        _compare(ranks, moves, gather_on_all(group, TargetError, finish))
    if mine.own_options:
        own = "; ".join(mine.own_options)
        warn_on_rank(f"the source does not say options, which stay as the running optimizer's: {own}", stacklevel=3)
    filled = len({move.target for move in moves})
    done = Redistribution(report, filled, carrier.sent, carrier.received, len(stages), carrier.largest)
    return done, target, mine.sources, joint_sources([(request.state, request.rank.matching) for request in requests])


def _asked(source: LiveState, target: LiveState, stored: Stored, extra: Globs, globs: Globs, memory: int) -> _Request:
    """Return what this rank asks for, after checking that it would overwrite nothing that it has to give."""
    template = LoadTemplate.of(target, extra.matches_all)
    matching = match(template, stored, globs)
    keys = {key: origin for key, origin in matching.sources.items() if key in target.parts}
    tied = tied_origins(target, keys, matching.zeros)
    check_apart(source.parts, {key: target.parts[key] for key in (*keys, *matching.zeros)}, keys)
    request = RankRequest(matching, template.optimizers, globs)
    return _Request(request, target.described.boxes(keys), target.devices, memory, tied)


def _refuse_overwriting(ranks: Sequence[int], pairs: Iterable[tuple[str, str]], held: Sequence[SharesOfRank]) -> None:
    """Refuse tensors that differ where the target has one memory for both: what arrives last would be left of them."""
    prints = held_together(ranks, held).tensors
    for one, other in sorted(pairs):
        if prints.get(one) != prints.get(other):
            raise LayoutError(differing_ties(one, other, "the source"))


def _moves(ranks: Sequence[int], offers: Sequence[Offer], requests: Sequence[_Request]) -> list[Transfer]:
    """Return what has to move, after proving that the source is whole."""
    kinds: dict[str, HeldTensor] = {}
    given: defaultdict[str, list[RankBoxes]] = defaultdict(list)
    asked: defaultdict[tuple[str, str], list[RankBoxes]] = defaultdict(list)
    for rank, offer, request in zip(ranks, offers, requests, strict=True):
        for key, kind in offer.state.tensors():
            kinds.setdefault(key, kind)
            given[key] += [RankBoxes(rank, kind.boxes)] if kind.boxes else []
        for key, kind in request.state.tensors():
            asked[request.rank.matching.sources[key], key] += [RankBoxes(rank, kind.boxes)] if kind.boxes else []
    moves: list[Transfer] = []
    for (origin, target), takers in sorted(asked.items()):
        kind, boxes = kinds[origin], (tuple(given[origin]), tuple(takers))
        with about(f"tensor {origin!r} of the source"):
            moves += transfers_of(origin, target, itemsize(kind.dtype), kind.shape, *boxes, tuple(ranks))
    return moves


def _compare(
    ranks: Sequence[int],
    moves: Sequence[Transfer],
    shares: Sequence[tuple[Mapping[tuple[int, int], int], Mapping[int, int]]],
) -> None:
    sent: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for departed, _ in shares:
        for taker, part in departed.items():
            sent[taker].append(part)
    for place, (_, arrived) in enumerate(shares):
        for number, actual in arrived.items():
            expected = combine(*sent[number, place])
            if actual != expected:
                raise AttestError(
                    f"tensor {moves[number].target!r}: rank {ranks[place]} holds {as_hex(actual)}, sent was "
                    f"{as_hex(expected)}"
                )


# --- Which elements move in which stages ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class AskedCopies:
    """The copies of a plan that ranks ask for, in columns.

    Attributes:
        lo, hi: corners of each copy's box in the tensor, ``[n, d]``.
        giver, taker: places of ranks in the process group, ``[n]``.
        source_offset, target_offset: where the box begins if the rank's boxes lie dense and end to end, ``[n]``.
    """

    lo: IntArray
    hi: IntArray
    giver: IntArray
    taker: IntArray
    source_offset: IntArray
    target_offset: IntArray

    def moved(self, box: Box, ranks: int) -> IntArray:
        """Return how many elements of a box each rank sends and receives together."""
        sizes = np.minimum(self.hi, np.array(box.hi, np.int64)) - np.maximum(self.lo, np.array(box.lo, np.int64))
        volumes = np.maximum(sizes, 0).prod(axis=1) * (self.giver != self.taker)
        there = np.bincount(self.giver, volumes, ranks) + np.bincount(self.taker, volumes, ranks)
        return there.astype(np.int64)


@lru_cache(maxsize=65536)
def _asked_copies(plan: Plan, ranks: tuple[int, ...]) -> AskedCopies:
    places = {rank: place for place, rank in enumerate(ranks)}
    givers, takers = (
        np.array([-1 if buffer == NOBODY else places[int(buffer)] for buffer in buffers], np.int64)
        for buffers in (plan.sources, plan.targets)
    )
    table, lo, taker = plan.table, plan.starts, takers[plan.table.target]
    columns = lo, lo + table.sizes, givers[table.source], taker, table.source_offset, table.target_offset
    return AskedCopies(*(column[taker >= 0] for column in columns))


@dataclass(frozen=True, slots=True)
class Transfer:
    """A tensor that moves: its keys on both sides, and the copies that fill the target."""

    source: str
    target: str
    itemsize: int
    shape: Index
    copies: AskedCopies


class Portion(NamedTuple):
    """The elements of a box of the tensor whose transfer has this number."""

    number: int
    box: Box


Portions = tuple[Portion, ...]
"""A stage, which is exchanged at a time.  All elements have the same size."""


def transfers_of(
    source: str,
    target: str,
    itemsize: int,
    shape: Index,
    given: tuple[RankBoxes, ...],
    asked: tuple[RankBoxes, ...],
    ranks: tuple[int, ...],
) -> list[Transfer]:
    """Return the moves that give ranks the boxes that they ask for: several, if these overlap in part.

    Raises:
        LayoutError: as `held_layout` and `asked_layouts`.
    """
    layout = held_layout(shape, given)
    plans = [make_plan(layout, wanted) for wanted in asked_layouts(shape, asked)]
    return [Transfer(source, target, itemsize, shape, _asked_copies(plan, ranks)) for plan in plans]


def stages_of(moves: Sequence[Transfer], ranks: int, memory: int) -> list[Portions]:
    """Cut the moves into stages in which no rank sends and receives more than ``memory`` bytes together.

    Raises:
        TargetError: one element does not fit.
    """
    stages: list[Portions] = []
    stage: list[Portion] = []
    filled, size = np.zeros(ranks, np.int64), 0
    for number in sorted(range(len(moves)), key=lambda number: -moves[number].itemsize):
        move = moves[number]
        for box, elements in _portions(move.copies, Box.of(move.shape), ranks, memory // move.itemsize):
            cost = elements * move.itemsize
            if stage and (size != move.itemsize or int((filled + cost).max()) > memory):
                stages.append(tuple(stage))
                stage, filled = [], np.zeros(ranks, np.int64)
            size = move.itemsize
            stage.append(Portion(number, box))
            filled = filled + cost
    return [*stages, tuple(stage)] if stage else stages


def _portions(copies: AskedCopies, box: Box, ranks: int, most: int) -> Iterator[tuple[Box, IntArray]]:
    """Halve a box, along the dim that spreads its elements best, until no rank moves more than ``most`` of them."""
    elements = copies.moved(box, ranks)
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

    def halves(dim: int) -> tuple[Box, Box]:
        middle = (box.lo[dim] + box.hi[dim]) // 2
        hi, lo = ((*corner[:dim], middle, *corner[dim + 1 :]) for corner in (box.hi, box.lo))
        return Box(box.lo, hi), Box(lo, box.hi)

    cuts = [halves(dim) for dim in range(box.ndim) if box.shape[dim] > 1]
    for half in min(cuts, key=lambda pair: max(int(copies.moved(half, ranks).max()) for half in pair)):
        yield from _portions(copies, half, ranks, most)


# --- One rank's part --------------------------------------------------------------------------------------------------


class _Side(NamedTuple):
    """The copies of a transfer that this rank gives, or takes; ``other`` is the other rank's place."""

    parts: LocalParts
    lo: IntArray
    hi: IntArray
    offset: IntArray
    other: IntArray

    def rows(self, chosen: IntArray | NDArray[np.bool_]) -> _Side:
        return _Side(self.parts, *(column[chosen] for column in self[1:]))

    def within(self, box: Box) -> _Side:
        """Cut the copies to what lies in a box."""
        lo, hi = np.maximum(self.lo, np.array(box.lo, np.int64)), np.minimum(self.hi, np.array(box.hi, np.int64))
        return self._replace(lo=lo, hi=hi).rows(np.flatnonzero((lo < hi).all(axis=1)))

    def views(self) -> Iterator[Tensor]:
        return map(self.parts.view, self.offset.tolist(), self.lo.tolist(), self.hi.tolist())


class _Parcels(NamedTuple):
    """The elements that this rank gives or takes in a stage, by the other rank, and the bytes for each rank."""

    elements: list[Tensor]
    splits: list[int]

    def on_wire(self, wire: Tensor) -> Iterator[Tensor]:
        """Yield the elements' places on the wire: aligned, as all elements of a stage have one size."""
        start = 0
        for part in self.elements:
            yield wire[start : start + part.nbytes].view(part.dtype).view(part.shape)
            start += part.nbytes


class Carrier:
    """The executor of this rank's part of moves.

    It keeps an error in ``failure`` and goes on exchanging, so that the other ranks do not hang.

    Attributes:
        place: this rank's, in the process group.
        sent, received: bytes so far.
        largest: bytes of its buffers.
    """

    def __init__(
        self,
        source: LiveState,
        target: LiveState,
        moves: Sequence[Transfer],
        stages: Sequence[Portions],
        group: dist.ProcessGroup | None,
        wire: torch.device,
    ) -> None:
        self.place, _ = place_in(group)
        self.failure: Exception | None = None
        self.sent = self.received = 0
        self._group = group
        self._sources = [move.source for move in moves]
        self._gives, self._takes = list[_Side](), list[_Side]()
        for move in moves:
            copies = move.copies
            given, taken = np.flatnonzero(copies.giver == self.place), np.flatnonzero(copies.taker == self.place)
            here, there = source.local(move.source), target.local(move.target)
            self._gives.append(_Side(here, copies.lo, copies.hi, copies.source_offset, copies.taker).rows(given))
            self._takes.append(_Side(there, copies.lo, copies.hi, copies.target_offset, copies.giver).rows(taken))
        world = len(group_ranks(group))
        self._stages = [
            tuple(_parcels(stage, sides, self.place, world) for sides in (self._gives, self._takes)) for stage in stages
        ]
        self.largest = max((sum(gives.splits) + sum(takes.splits) for gives, takes in self._stages), default=0)
        self._wire = torch.empty(self.largest, dtype=torch.uint8, device=wire)

    @torch.no_grad()
    def run(self) -> None:
        for gives, takes in zip(self._gives, self._takes, strict=True):
            self._copy(takes.rows(takes.other == self.place).views(), gives.rows(gives.other == self.place).views())
        for given, taken in self._stages:
            sent, received = sum(given.splits), sum(taken.splits)
            send, receive = self._wire[:sent], self._wire[sent : sent + received]
            self._copy(given.on_wire(send), given.elements)
            exchange(self._group, send, given.splits, receive, taken.splits)
            self._copy(taken.elements, taken.on_wire(receive))
            self.sent, self.received = self.sent + sent, self.received + received
        self._wire = self._wire[:0].clone()

    def _copy(self, targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
        try:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
        except Exception as error:
            self.failure = self.failure or error

    def departed(self, known: dict[tuple[str, Box], int]) -> dict[tuple[int, int], int]:
        """Return the fingerprints' shares of what this rank has given, by move and taker.

        Args:
            known: shares of boxes of the source; those of others that were given are added.
        """
        shares: defaultdict[tuple[int, int], int] = defaultdict(int)
        for number, (key, side) in enumerate(zip(self._sources, self._gives, strict=True)):
            boxes = map(Box, map(tuple, side.lo.tolist()), map(tuple, side.hi.tolist()))
            for elements, box, taker in zip(side.views(), boxes, side.other.tolist(), strict=True):
                if (key, box) not in known:
                    known[key, box] = _share(elements, box)
                shares[number, taker] = combine(shares[number, taker], known[key, box])
        return dict(shares)

    def arrived(self) -> dict[int, int]:
        """Return the fingerprints' shares of what this rank has taken, by move."""
        return {
            number: combine(*map(_share, side.parts.parts, side.parts.boxes))
            for number, side in enumerate(self._takes)
            if len(side.other)
        }


def _parcels(stage: Portions, sides: Sequence[_Side], place: int, world: int) -> _Parcels:
    """List what is exchanged with each rank, on both sides in the order of the stage and of the plan."""
    elements, others = list[Tensor](), list[int]()
    for number, box in stage:
        part = sides[number].rows(sides[number].other != place).within(box)
        elements += part.views()
        others += part.other.tolist()
    order = np.argsort(np.array(others, np.int64), kind="stable").tolist()
    splits = np.zeros(world, np.int64)
    np.add.at(splits, np.array(others, np.int64), [part.nbytes for part in elements])
    return _Parcels([elements[row] for row in order], splits.tolist())


def _share(elements: Tensor, box: Box) -> int:
    return unsigned(int(share_of(elements, box.lo)))
