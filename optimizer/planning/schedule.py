"""Schedules: the matrices of the parameters that one set of ranks holds, their owners, stages, and exchanges.

A schedule follows from shapes and placements, so every rank makes its own part of the same one.  Elements travel on a
wire, a flat buffer of bytes with one part for each rank of the group, which both sides derive without negotiation.
"""

from __future__ import annotations

import gc
import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapify, heappop, heapreplace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ...algebra.layout import TensorLayout
from ...algebra.overlap import IntArray
from ...algebra.plan import NO_COPIES, Copies
from ..newton_schulz.products import Form
from .matrices import SHAPES, Slot, Spec, Unit, rows_columns
from .residence import OwnedMatrices, RankCopies, matrix_parts, rank_copies, residence

Ranks = tuple[int, ...]

WIRE_ALIGNMENT = 8
"""Bytes that each rank's part of the wire begins at a multiple of: the size of the largest element."""

NOTE = 16
"""Bytes in front of each rank's part: a digest of the sender's intent (`step.agreement.Intent`)."""

MAX_STAGES = 4
"""The fourth hides all but a quarter of the exchange and keeps its buffers to half; a fifth adds little to that."""

STAGE_BYTES = 1 << 23
"""Bytes that a rank can exchange in the time of one more stage: 5.6 ms over gloo, with 4 ranks on 2 cores; the bytes
are an estimate."""

SLACK = 1.05
"""A matrix leaves its holders only where that saves more than a twentieth of the makespan: moving it costs bytes."""

Candidate = tuple[int, int, bool, bool, int]
"""Load, minus elements held, new to the shape, far from the matrix, position: the smallest is the best."""


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """One rank's part of an exchange, as tables of copies in the order of the tensors' numbers.

    Attributes:
        send_counts, receive_counts: bytes to and from each rank of the group.
        sends, receives: between tensors and the wire, with offsets in bytes and positions of ranks.
        local: from a tensor to its matrix on the same rank, or back.
    """

    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    sends: Copies = NO_COPIES
    receives: Copies = NO_COPIES
    local: Copies = NO_COPIES

    @property
    def bytes(self) -> int:
        return sum(self.send_counts) + sum(self.receive_counts)


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """One round: ``gather`` takes updates to the owners, ``scatter`` results back; ``owned`` are this rank's units."""

    gather: Route
    scatter: Route
    owned: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return self.gather.bytes + self.scatter.bytes


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """One rank's part of a plan, with the units of all ranks.  ``digest`` is the same on every rank.

    Copies number the tensors that travel: slot ``k`` of unit ``u`` is ``k * len(units) + u``, and slot 0 the update.
    """

    ranks: Ranks
    units: tuple[Unit, ...]
    stages: tuple[Stage, ...]
    digest: bytes

    @property
    def owned(self) -> tuple[int, ...]:
        return tuple(number for stage in self.stages for number in stage.owned)

    def params(self) -> list[list[int]]:
        """Return, by stage, the parameters of which this rank holds or owns something that the stage needs."""
        of_unit = np.array([unit.param for unit in self.units], np.int64)
        numbers = (
            (stage.gather.sends.source, stage.gather.local.source, stage.scatter.receives.target, stage.owned)
            for stage in self.stages
        )
        return [
            np.unique(of_unit[np.concatenate(some).astype(np.int64) % max(1, len(of_unit))]).tolist()
            for some in numbers
        ]


@dataclass(frozen=True, slots=True)
class Work:
    """One matrix to give away: ``cost`` in any unit, the same for all; ``holders`` are positions, ascending, of the
    ranks that hold ``held`` elements of it; ``owner`` is the position of the rank that has it already.
    """

    cost: int
    numel: int
    shape: tuple[int, ...]
    holders: IntArray
    held: IntArray
    owner: int | None = None


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause the cycle collector, which took half of the time of a large plan: its objects stay and have no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def make_schedule(
    specs: Sequence[Spec], ranks: Ranks, rank: int, stages: int | None = None, most_state: float = math.inf
) -> Schedule:
    """Plan one rank's part for parameters that ``ranks`` hold (global ranks, in the order of their process group).

    Args:
        stages: the largest number of rounds; None: `worthwhile_stages`, or so many that the state of one is about
            ``most_state`` bytes a rank.
    """
    same: dict[Spec, Spec] = {}
    specs = [same.setdefault(spec, spec) for spec in specs]  # from here on they are told apart by identity
    matrices = _matrices(specs, ranks)
    kinds = [matrices[id(spec)] for spec in specs]
    work = [matrix for kind in kinds for matrix, _ in kind]
    owners = assign(work, ranks)
    small = math.ceil(state_bytes(specs) / len(ranks) / most_state)
    most = stages or max(worthwhile_stages(specs, len(ranks)), small)
    turns = in_stages([matrix.cost for matrix in work], owners, len(ranks), most, small)
    places = ((number, index, *matrix) for number, kind in enumerate(kinds) for index, matrix in enumerate(kind))
    units = tuple(
        Unit(number, index, work.shape, ranks[owner], stage, work.cost, form)
        for (number, index, work, form), owner, stage in zip(places, owners, turns, strict=True)
    )
    by_stage = _stages(specs, list(map(len, kinds)), np.array(owners, np.int64), np.array(turns, np.int64), ranks, rank)
    return Schedule(ranks, units, tuple(by_stage), _digest(specs, ranks, units))


def choose_owners(specs: Sequence[Spec], ranks: Ranks) -> list[tuple[int, ...]]:
    """Return the owners, as global ranks, of each parameter's matrices, as `make_schedule` chooses them."""
    matrices = _matrices(specs, ranks)
    kinds = [matrices[id(spec)] for spec in specs]
    owners = iter(assign([work for kind in kinds for work, _ in kind], ranks))
    return [tuple(ranks[next(owners)] for _ in kind) for kind in kinds]


def _stages(
    specs: Sequence[Spec], counts: Sequence[int], owner: IntArray, turn: IntArray, ranks: Ranks, rank: int
) -> Iterator[Stage]:
    """Yield the stages of a rank.

    Args:
        counts: of each spec's units.
        owner, turn: each unit's owner, as a position, and its stage.
    """
    here = ranks.index(rank)
    begins = np.cumsum([0, *counts])
    alike: defaultdict[int, list[int]] = defaultdict(list)
    for number, spec in enumerate(specs):
        alike[id(spec)].append(number)
    kinds: list[tuple[Slot, RankCopies]] = []
    for numbers in alike.values():
        index = np.tile(np.arange(counts[numbers[0]]), len(numbers))
        unit = index + np.repeat(begins[numbers], counts[numbers[0]])
        for number, slot in enumerate(specs[numbers[0]].slots):
            involved = matrix_parts(slot.layout, slot.fused).has_parts(rank)[index] | (owner[unit] == here)
            matrices = OwnedMatrices(unit + number * len(owner), index, owner[unit]).rows(involved)
            copies = rank_copies(slot.layout, slot.fused, ranks, here, matrices)
            kinds.append((slot, copies if slot.returns else copies.one_way()))
    there, back = [slot.there.itemsize for slot, _ in kinds], [slot.back.itemsize for slot, _ in kinds]
    gives = _by_stage([copies.gives for _, copies in kinds], there, turn)
    takes = _by_stage([copies.takes.inverse() for _, copies in kinds], there, turn)
    own = _by_stage([copies.local for _, copies in kinds], there, turn)
    gives_back = _by_stage([copies.gives_back for _, copies in kinds], back, turn)
    takes_back = _by_stage([copies.takes_back.inverse() for _, copies in kinds], back, turn)
    for stage, (mine, _) in enumerate(own):
        yield Stage(
            _route(gives[stage], takes[stage], mine, len(ranks)),
            _route(gives_back[stage], takes_back[stage], mine.inverse(), len(ranks)),
            tuple(np.flatnonzero((owner == here) & (turn == stage)).tolist()),
        )


def _by_stage(tables: Sequence[Copies], itemsizes: Sequence[int], turn: IntArray) -> list[tuple[Copies, IntArray]]:
    """Return the rows of tables by stage, in the order of units and slots, with the bytes of each row's elements."""
    table = Copies.joined([NO_COPIES, *tables])
    itemsize = np.repeat(np.array(itemsizes, np.int64), np.array([len(some) for some in tables], np.int64))
    slot, unit = np.divmod(table.source, max(len(turn), 1))
    order = np.lexsort((slot, unit, turn[unit]))
    table, itemsize = table.rows(order), itemsize[order]
    cuts = np.searchsorted(turn[unit[order]], np.arange(turn.max(initial=0) + 2)).tolist()
    return [(table.rows(slice(*cut)), itemsize[slice(*cut)]) for cut in pairwise(cuts)]


def _route(sends: tuple[Copies, IntArray], receives: tuple[Copies, IntArray], own: Copies, ranks: int) -> Route:
    (sent, send_counts), (received, receive_counts) = (_laid_out(*some, ranks) for some in (sends, receives))
    return Route(send_counts, receive_counts, sent, received.inverse(), own)


def _laid_out(copies: Copies, itemsize: IntArray, ranks: int) -> tuple[Copies, tuple[int, ...]]:
    """Place copies on the wire, by the other side's rank and then in the order of the rows, each at a multiple of its
    elements' size, and count the bytes of each rank's part.
    """
    order = np.argsort(copies.target, kind="stable")
    present, first = np.unique(copies.target[order], return_index=True)
    rows = list(zip((copies.numel * itemsize)[order].tolist(), itemsize[order].tolist(), strict=True))
    empty = _up(NOTE, WIRE_ALIGNMENT)
    counts, more = [empty] * ranks, 0
    begins: list[int] = []
    for peer, (low, high) in zip(present.tolist(), pairwise([*first.tolist(), len(order)]), strict=True):
        start = peer * empty + more
        end = start + NOTE
        for nbytes, item in rows[low:high]:
            begin = -(-end // item) * item
            begins.append(begin)
            end = begin + nbytes
        counts[peer] = _up(end, WIRE_ALIGNMENT) - start
        more += counts[peer] - empty
    offsets = np.empty(len(order), np.int64)
    offsets[order] = begins
    return replace(copies, target_offset=offsets), tuple(counts)


def _up(offset: int, to: int) -> int:
    return -(-offset // to) * to


def assign(work: Sequence[Work], ranks: Sequence[int], node: int = 8) -> list[int]:
    """Return the position of each matrix's owner, by longest processing time first (Graham 1969) over all shapes.

    A matrix goes to the least loaded of its holders, while that rank's load stays within ``SLACK`` of the best possible
    makespan, ``max(sum / ranks, largest)``; after that, to the least loaded rank of all.  Among equally loaded ranks
    comes the one that holds the most of it, then one that has matrices of its shape, then one on the node (``node``
    consecutive ranks) of its first holder, then the first.  No rank receives more elements than the mean and one
    largest matrix: the one that has received the least is always below the mean.  Matrices that have an owner keep it,
    which may be more, and count as its load.
    """
    if not work:
        return []
    total = sum(matrix.cost for matrix in work)
    best = max(-(-total // len(ranks)), max(matrix.cost for matrix in work))
    cap = -(-sum(matrix.numel for matrix in work) // len(ranks)) + max(matrix.numel for matrix in work)
    books = _Books(cap, np.asarray(ranks, np.int64) // node)
    kinds: dict[Hashable, int] = {}
    known: dict[int, int] = {}  # layers that repeat give the same object again
    alike: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    owners = [0] * len(work)
    for index, matrix in enumerate(work):
        if matrix.owner is not None:
            books.give(matrix.owner, matrix, int(matrix.held[matrix.holders == matrix.owner].sum()))
            owners[index] = matrix.owner
            continue
        kind = known.get(id(matrix))
        if kind is None:
            # Work that differs in its cost at most; `residence` caches the arrays.
            same = matrix.shape, id(matrix.holders), id(matrix.held)
            kind = known[id(matrix)] = kinds.setdefault(same, len(kinds))
        alike[-matrix.cost, kind].append(index)
    for numbers in (alike[key] for key in sorted(alike)):
        matrix = work[numbers[0]]
        home, rest = books.queue(matrix), books.least_loaded(matrix)
        held = dict(zip(matrix.holders.tolist(), matrix.held.tolist(), strict=True))
        for index in numbers:
            owner = books.first(home, matrix)
            if owner is None or books.load[owner] + matrix.cost > SLACK * best:
                least = next(rest)
                owner = least if owner is None or books.load[least] < books.load[owner] else owner
            books.give(owner, matrix, held.get(owner, 0))
            owners[index] = owner
    return owners


class _Books:
    def __init__(self, cap: int, nodes: IntArray) -> None:
        self.cap, self.nodes = cap, nodes
        self.load, self.received = np.zeros(len(nodes), np.int64), np.zeros(len(nodes), np.int64)
        self.shapes: defaultdict[tuple[int, ...], NDArray[np.bool_]] = defaultdict(lambda: np.zeros(len(nodes), bool))

    def queue(self, matrix: Work) -> list[Candidate]:
        """Return the holders of a matrix as a heap, the best first."""
        ranks = matrix.holders
        new, far = ~self.shapes[matrix.shape][ranks], self.nodes[ranks] != self._node(matrix)
        columns = (self.load[ranks], -matrix.held, new, far, ranks)
        candidates = list(zip(*(column.tolist() for column in columns), strict=True))
        heapify(candidates)
        return candidates

    def first(self, queue: list[Candidate], matrix: Work) -> int | None:
        """Return the first of a queue that may receive the matrix, if any; outdated candidates are renewed."""
        while queue:
            load, minus_held, _, _, rank = queue[0]
            if self.received[rank] + matrix.numel + minus_held > self.cap:
                heappop(queue)
            elif load != self.load[rank]:
                new, far = not self.shapes[matrix.shape][rank], bool(self.nodes[rank] != self._node(matrix))
                heapreplace(queue, (int(self.load[rank]), minus_held, new, far, rank))
            else:
                return rank
        return None

    def least_loaded(self, matrix: Work) -> Iterator[int]:
        """Yield, without end, the least loaded rank that may receive all of a matrix at that time; loads never sink."""
        while True:
            loads = np.where(self.received + matrix.numel <= self.cap, self.load, np.iinfo(np.int64).max)
            least = loads.min()
            equal = np.flatnonzero(loads == least)
            far, new = self.nodes[equal] != self._node(matrix), ~self.shapes[matrix.shape][equal]
            for rank in equal[np.lexsort((far, new))].tolist():
                while self.load[rank] == least and self.received[rank] + matrix.numel <= self.cap:
                    yield rank

    def give(self, rank: int, matrix: Work, held: int) -> None:
        self.load[rank] += matrix.cost
        self.received[rank] += matrix.numel - held
        self.shapes[matrix.shape][rank] = True

    def _node(self, matrix: Work) -> int:
        return int(self.nodes[matrix.holders[0]])


def in_stages(costs: Sequence[int], owners: Sequence[int], ranks: int, most: int, small: int = 1) -> list[int]:
    """Return the stage of each matrix: at most ``most`` stages, of at least as many matrices as ranks on average.

    Each owner's matrices, largest first, are cut where its work passes equal parts of the greatest load, so that work
    hides the exchange of the next stage.  No stage is shorter than the largest matrix takes, as some ranks would wait,
    unless it takes ``small`` stages to have as little state in one as there should be.
    """
    load = [0] * ranks
    for cost, owner in zip(costs, owners, strict=True):
        load[owner] += cost
    longest = max(*load, 1)
    count = max(1, min(most, len(costs) // ranks, max(small, longest // max(costs, default=1))))
    done = [0] * ranks
    stages = [0] * len(costs)
    for index in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):  # stable
        owner, cost = owners[index], costs[index]
        stages[index] = min(count * (2 * done[owner] + cost) // (2 * longest), count - 1)
        done[owner] += cost
    used = {stage: number for number, stage in enumerate(sorted(set(stages)))}
    return [used[stage] for stage in stages]


def worthwhile_stages(specs: Sequence[Spec], ranks: int) -> int:
    """Return the number of stages that takes the least time: ``n`` of them leave an ``n``-th of the exchange uncovered,
    and take ``n`` times `STAGE_BYTES`.
    """
    sent = sum(
        math.prod(slot.layout.shape) * (slot.there.itemsize + slot.returns * slot.back.itemsize)
        for spec in specs
        for slot in spec.slots
    )
    per_rank = sent * (ranks - 1) // ranks**2
    return min(max(math.isqrt(per_rank // STAGE_BYTES), 1), MAX_STAGES)


def state_bytes(specs: Sequence[Spec]) -> int:
    """Return the bytes of state on all ranks, with an update's element for one of momentum, in float32."""
    known: dict[int, int] = {}
    for spec in specs:
        if id(spec) not in known:
            kept = [4, *(slot.returns * slot.there.itemsize for slot in spec.slots[1:])]
            shapes = list(map(rows_columns, spec.slots[0].shapes))
            known[id(spec)] = sum(
                size * slot.layout.total_numel for slot, size in zip(spec.slots, kept, strict=True)
            ) + sum(4 * math.prod(SHAPES[kind].of_matrix(*shape)) for _, kind in spec.staying for shape in shapes)
    return sum(known[id(spec)] for spec in specs)


def _matrices(specs: Sequence[Spec], ranks: Ranks) -> dict[int, list[tuple[Work, Form]]]:
    """Return the matrices of each kind of parameter, by the identity of its spec: layers that repeat are planned once.

    The form follows from how many matrices of a shape a *parameter* has, which is the same under any sharding.
    """
    matrices = {}
    for kind, spec in {id(spec): spec for spec in specs}.items():
        update = spec.slots[0]
        homes = residence(update.layout, update.fused, ranks)
        copies = Counter(map(rows_columns, update.shapes))
        forms = {shape: spec.form(*shape, count) for shape, count in copies.items()}
        owners = [None] * len(homes) if spec.owners is None else list(map(ranks.index, spec.owners))
        matrices[kind] = [
            (Work(spec.cost(*rows_columns(shape)), math.prod(shape), shape, *home, owner), forms[rows_columns(shape)])
            for shape, home, owner in zip(update.shapes, homes, owners, strict=True)
        ]
    return matrices


def _digest(specs: Sequence[Spec], ranks: Ranks, units: Sequence[Unit]) -> bytes:
    """Return 16 bytes that are equal on two ranks exactly when their schedules are parts of one."""
    whole = hashlib.blake2b(repr(ranks).encode(), digest_size=16)
    known: dict[int, bytes] = {}
    for spec in specs:
        if id(spec) not in known:
            known[id(spec)] = b"".join(
                _layout_digest(slot.layout)
                + repr((slot.name, slot.fused, slot.there, slot.back, slot.returns)).encode()
                for slot in spec.slots
            )
        whole.update(known[id(spec)])
    plan = [(u.param, u.index, u.owner, u.stage, u.form.kernels, u.form.gram) for u in units]
    whole.update(np.array(plan, np.int64).tobytes())
    return whole.digest()


@lru_cache(maxsize=4096)
def _layout_digest(layout: TensorLayout) -> bytes:
    return layout.digest()
