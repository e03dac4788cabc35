"""Schedules: the matrices of the parameters that one set of ranks holds, their owners, stages, and exchanges.

A schedule follows from shapes and placements, so every rank makes its own part of the same one.  Elements travel on a
wire, a flat buffer of bytes with one part for each rank of the group, which both sides derive without negotiation.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapify, heappop, heapreplace
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from ...algebra.layout import TensorLayout
from ...algebra.overlap import IntArray
from ...algebra.plan import NO_COPIES, Copies
from ..newton_schulz.products import Form
from .matrices import Slot, Spec, Unit
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


@dataclass(frozen=True, slots=True)
class Work:
    """One matrix to give away: ``cost`` in any unit, the same for all; ``holders`` are positions, ascending, of the
    ranks that hold so many ``elements`` of it.
    """

    cost: int
    numel: int
    shape: tuple[int, int]
    holders: IntArray
    elements: IntArray


def make_schedule(specs: Sequence[Spec], ranks: Ranks, rank: int, stages: int | None = None) -> Schedule:
    """Plan one rank's part for parameters that ``ranks`` hold (global ranks, in the order of their process group).

    Args:
        stages: the largest number of rounds; None: `worthwhile_stages`.
    """
    # Layers that repeat give equal specs; from here on they are distinguished by identity.
    unique_specs: dict[Spec, Spec] = {}
    specs = [unique_specs.setdefault(spec, spec) for spec in specs]

    # All matrices of all parameters, each with its cost and its holders.
    kinds = _describe_matrices(specs, ranks)
    work = [matrix for matrix, _ in chain.from_iterable(kinds)]

    # Who orthogonalises which, and when: in so many stages that the exchange overlaps with the work.
    owners = assign_owners(work, ranks)
    max_stages = stages or worthwhile_stages(specs, len(ranks))
    turns = cut_stages([matrix.cost for matrix in work], owners, len(ranks), max_stages)
    units = []
    decisions = zip(owners, turns, strict=True)
    for number, kind in enumerate(kinds):
        for index, (matrix, form) in enumerate(kind):
            owner, stage = next(decisions)
            units.append(
                Unit(
                    param=number,
                    index=index,
                    rows_columns=matrix.shape,
                    owner=ranks[owner],
                    stage=stage,
                    cost=matrix.cost,
                    form=form,
                )
            )

    # This rank's copies; and a digest, which is the same on every rank that has planned alike.
    counts = list(map(len, kinds))
    by_stage = _make_stages(specs, counts, np.array(owners, np.int64), np.array(turns, np.int64), ranks, rank)
    return Schedule(ranks, units=tuple(units), stages=tuple(by_stage), digest=_digest_schedule(specs, ranks, units))


def _make_stages(
    specs: Sequence[Spec], counts: Sequence[int], owner: IntArray, turn: IntArray, ranks: Ranks, rank: int
) -> Iterator[Stage]:
    """Yield the stages of a rank: what it exchanges in each, and which units it owns.

    Args:
        counts: the number of units of each spec.
        owner, turn: each unit's owner, as a position, and its stage.
    """
    position = ranks.index(rank)
    first_unit = np.cumsum([0, *counts])
    params_of_spec: defaultdict[int, list[int]] = defaultdict(list)
    for number, spec in enumerate(specs):
        params_of_spec[id(spec)].append(number)

    # Copies by slot, for all parameters of one spec at once, as arrays: only the matrices that this rank has parts of
    # or owns.
    slots: list[tuple[Slot, RankCopies]] = []
    for params in params_of_spec.values():
        index = np.tile(np.arange(counts[params[0]]), len(params))
        unit = index + np.repeat(first_unit[params], counts[params[0]])
        for number, slot in enumerate(specs[params[0]].slots):
            has_part = matrix_parts(slot.layout, slot.fused).has_parts(rank)[index]
            tensor = number * len(owner) + unit  # as `Schedule` numbers the tensors that travel
            matrices = OwnedMatrices(tensor, index, owner[unit]).rows(has_part | (owner[unit] == position))
            copies = rank_copies(slot.layout, slot.fused, ranks, position, matrices)
            if not slot.returns:
                copies = replace(copies, gives_back=NO_COPIES, takes_back=NO_COPIES)
            slots.append((slot, copies))

    # Copies are sorted by stage, and in each by unit and slot, so that both sides of a wire derive the same order.  The
    # source gives the unit, so copies that come from the wire are sorted inverted; `_make_route` turns them back.
    sent_sizes = [slot.sent_dtype.itemsize for slot, _ in slots]
    returned_sizes = [slot.returned_dtype.itemsize for slot, _ in slots]
    gives = _by_stage([copies.gives for _, copies in slots], sent_sizes, turn)
    takes = _by_stage([copies.takes.inverse() for _, copies in slots], sent_sizes, turn)
    local = _by_stage([copies.local for _, copies in slots], sent_sizes, turn)
    gives_back = _by_stage([copies.gives_back for _, copies in slots], returned_sizes, turn)
    takes_back = _by_stage([copies.takes_back.inverse() for _, copies in slots], returned_sizes, turn)
    for stage, (local_copies, _) in enumerate(local):
        yield Stage(
            _make_route(gives[stage], takes[stage], local_copies, len(ranks)),
            _make_route(gives_back[stage], takes_back[stage], local_copies.inverse(), len(ranks)),
            tuple(np.flatnonzero((owner == position) & (turn == stage)).tolist()),
        )


def _by_stage(tables: Sequence[Copies], itemsizes: Sequence[int], turn: IntArray) -> list[tuple[Copies, IntArray]]:
    """Return the rows of tables by stage, in the order of units and slots, with the bytes of each row's elements."""
    table = Copies.joined([NO_COPIES, *tables])
    itemsize = np.repeat(np.array(itemsizes, np.int64), np.array(list(map(len, tables)), np.int64))
    slot, unit = np.divmod(table.source, max(len(turn), 1))
    order = np.lexsort((slot, unit, turn[unit]))
    table, itemsize = table.rows(order), itemsize[order]
    cuts = np.searchsorted(turn[unit[order]], np.arange(turn.max(initial=0) + 2)).tolist()
    return [(table.rows(slice(*cut)), itemsize[slice(*cut)]) for cut in pairwise(cuts)]


def _make_route(sends: tuple[Copies, IntArray], receives: tuple[Copies, IntArray], local: Copies, ranks: int) -> Route:
    sends_on_wire, send_counts = _lay_out(*sends, ranks)
    receives_on_wire, receive_counts = _lay_out(*receives, ranks)
    return Route(send_counts, receive_counts, sends=sends_on_wire, receives=receives_on_wire.inverse(), local=local)


def _lay_out(copies: Copies, itemsize: IntArray, ranks: int) -> tuple[Copies, tuple[int, ...]]:
    """Place copies on the wire, by the other side's rank and then in the order of the rows, each at a multiple of its
    elements' size, and count the bytes of each rank's part.
    """
    order = np.argsort(copies.target, kind="stable")
    peers, first = np.unique(copies.target[order], return_index=True)
    rows = list(zip((copies.numel * itemsize)[order].tolist(), itemsize[order].tolist(), strict=True))
    # Every rank's part begins with a note, whether or not anything follows.
    empty_part = _round_up(NOTE, WIRE_ALIGNMENT)
    counts, extra = [empty_part] * ranks, 0
    offsets: list[int] = []
    for peer, (low, high) in zip(peers.tolist(), pairwise([*first.tolist(), len(order)]), strict=True):
        start = peer * empty_part + extra
        end = start + NOTE
        for length, size in rows[low:high]:
            offset = _round_up(end, size)
            offsets.append(offset)
            end = offset + length
        counts[peer] = _round_up(end, WIRE_ALIGNMENT) - start
        extra += counts[peer] - empty_part
    target_offset = np.empty(len(order), np.int64)
    target_offset[order] = offsets
    return replace(copies, target_offset=target_offset), tuple(counts)


def _round_up(offset: int, multiple: int) -> int:
    return -(-offset // multiple) * multiple


def assign_owners(work: Sequence[Work], ranks: Sequence[int], node: int = 8) -> list[int]:
    """Return the position of each matrix's owner, by longest processing time first (Graham 1969) over all shapes.

    A matrix goes to the least loaded of its holders, while that rank's load stays within ``SLACK`` of the best possible
    makespan, ``max(sum / ranks, largest)``; after that, to the least loaded rank of all.  Among equally loaded ranks
    comes the one that holds the most of it, then one that has matrices of its shape, then one on the node (``node``
    consecutive ranks) of its first holder, then the first.  No rank receives more elements than the mean and one
    largest matrix: the one that has received the least is always below the mean.
    """
    if not work:
        return []
    costs, sizes = [matrix.cost for matrix in work], [matrix.numel for matrix in work]
    makespan = max(-(-sum(costs) // len(ranks)), max(costs))
    max_received = -(-sum(sizes) // len(ranks)) + max(sizes)
    loads = _Loads(max_received, np.asarray(ranks, np.int64) // node)

    # Matrices are sorted, the costliest first; equal ones are in one queue.
    owners = [0] * len(work)
    kinds: dict[Hashable, int] = {}
    kind_by_id: dict[int, int] = {}  # layers that repeat give the same object again
    queues: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for index, matrix in enumerate(work):
        kind = kind_by_id.get(id(matrix))
        if kind is None:
            # Work that differs in its cost at most; `residence` caches the arrays.
            key = matrix.shape, id(matrix.holders), id(matrix.elements)
            kind = kind_by_id[id(matrix)] = kinds.setdefault(key, len(kinds))
        queues[-matrix.cost, kind].append(index)

    # Each goes to its best holder, unless that would make the step longer than it has to be.
    for numbers in (queues[key] for key in sorted(queues)):
        matrix = work[numbers[0]]
        candidates, least_loaded = loads.candidates(matrix), loads.least_loaded(matrix)
        elements = dict(zip(matrix.holders.tolist(), matrix.elements.tolist(), strict=True))
        for index in numbers:
            owner = loads.best_holder(candidates, matrix)
            if owner is None or loads.load[owner] + matrix.cost > SLACK * makespan:
                least = next(least_loaded)
                owner = least if owner is None or loads.load[least] < loads.load[owner] else owner
            loads.add(owner, matrix, elements.get(owner, 0))
            owners[index] = owner
    return owners


class _Loads:
    """The load of each rank while matrices are given away, and the elements that it receives for them.

    Args:
        max_received: no rank receives more.
        nodes: the node of each rank.
    """

    def __init__(self, max_received: int, nodes: IntArray) -> None:
        self.max_received, self.nodes = max_received, nodes
        self.load, self.received = np.zeros(len(nodes), np.int64), np.zeros(len(nodes), np.int64)
        self.has_shape: defaultdict[tuple[int, int], NDArray[np.bool_]] = defaultdict(
            lambda: np.zeros(len(nodes), bool)
        )

    def candidates(self, matrix: Work) -> list[Candidate]:
        """Return the holders of a matrix as a heap, the best first."""
        ranks = matrix.holders
        is_new, is_far = ~self.has_shape[matrix.shape][ranks], self.nodes[ranks] != self._node(matrix)
        columns = (self.load[ranks], -matrix.elements, is_new, is_far, ranks)
        heap = list(zip(*(column.tolist() for column in columns), strict=True))
        heapify(heap)
        return heap

    def best_holder(self, heap: list[Candidate], matrix: Work) -> int | None:
        """Return the first candidate that may receive the matrix, if any; outdated ones are renewed."""
        while heap:
            load, minus_elements, _, _, rank = heap[0]
            if self.received[rank] + matrix.numel + minus_elements > self.max_received:
                heappop(heap)
            elif load != self.load[rank]:
                is_new = not self.has_shape[matrix.shape][rank]
                is_far = bool(self.nodes[rank] != self._node(matrix))
                heapreplace(heap, (int(self.load[rank]), minus_elements, is_new, is_far, rank))
            else:
                return rank
        return None

    def least_loaded(self, matrix: Work) -> Iterator[int]:
        """Yield, without end, the least loaded rank that may receive all of a matrix at that time; loads never sink."""
        while True:
            may_receive = self.received + matrix.numel <= self.max_received
            loads = np.where(may_receive, self.load, np.iinfo(np.int64).max)
            least = loads.min()
            ranks = np.flatnonzero(loads == least)
            is_far, is_new = self.nodes[ranks] != self._node(matrix), ~self.has_shape[matrix.shape][ranks]
            for rank in ranks[np.lexsort((is_far, is_new))].tolist():
                while self.load[rank] == least and self.received[rank] + matrix.numel <= self.max_received:
                    yield rank

    def add(self, rank: int, matrix: Work, elements: int) -> None:
        """Give a matrix to a rank, which holds so many elements of it."""
        self.load[rank] += matrix.cost
        self.received[rank] += matrix.numel - elements
        self.has_shape[matrix.shape][rank] = True

    def _node(self, matrix: Work) -> int:
        return int(self.nodes[matrix.holders[0]])


def cut_stages(costs: Sequence[int], owners: Sequence[int], ranks: int, max_stages: int) -> list[int]:
    """Return the stage of each matrix: at most ``max_stages``, of at least as many matrices as ranks on average.

    Each owner's matrices, largest first, are cut where its work passes equal parts of the greatest load, so that work
    hides the exchange of the next stage.  No stage is shorter than the largest matrix takes, as some ranks would wait.
    """
    load = [0] * ranks
    for cost, owner in zip(costs, owners, strict=True):
        load[owner] += cost
    longest = max(*load, 1)
    count = max(1, min(max_stages, len(costs) // ranks, longest // max(costs, default=1)))
    work_before = [0] * ranks
    stages = [0] * len(costs)
    for index in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):  # stable
        owner, cost = owners[index], costs[index]
        stages[index] = min(count * (2 * work_before[owner] + cost) // (2 * longest), count - 1)
        work_before[owner] += cost
    # Stages without a matrix on any rank are left out.
    numbers = {stage: number for number, stage in enumerate(sorted(set(stages)))}
    return [numbers[stage] for stage in stages]


def worthwhile_stages(specs: Sequence[Spec], ranks: int) -> int:
    """Return the number of stages that takes the least time: ``n`` of them leave an ``n``-th of the exchange uncovered,
    and take ``n`` times `STAGE_BYTES`.
    """
    num_bytes = 0
    for spec in specs:
        for slot in spec.slots:
            sizes = slot.sent_dtype.itemsize + slot.returns * slot.returned_dtype.itemsize
            num_bytes += math.prod(slot.layout.shape) * sizes
    per_rank = num_bytes * (ranks - 1) // ranks**2
    return min(max(math.isqrt(per_rank // STAGE_BYTES), 1), MAX_STAGES)


def _describe_matrices(specs: Sequence[Spec], ranks: Ranks) -> list[list[tuple[Work, Form]]]:
    """Return the matrices of each parameter; those of layers that repeat, with the very same spec, are one list.

    The form follows from how many matrices of a shape a *parameter* has, which is the same under any sharding.
    """
    matrices: dict[int, list[tuple[Work, Form]]] = {}
    for spec in specs:
        if id(spec) in matrices:
            continue
        update = spec.slots[0]
        copies = Counter(update.sides)
        forms = {shape: spec.form(*shape, count) for shape, count in copies.items()}
        homes = residence(update.layout, update.fused, ranks)
        matrices[id(spec)] = []
        for shape, home in zip(update.sides, homes, strict=True):
            work = Work(spec.cost(*shape), math.prod(shape), shape, *home)
            matrices[id(spec)].append((work, forms[shape]))
    return [matrices[id(spec)] for spec in specs]


def _digest_schedule(specs: Sequence[Spec], ranks: Ranks, units: Sequence[Unit]) -> bytes:
    """Return 16 bytes that are equal on two ranks exactly when their schedules are parts of one."""
    digest = hashlib.blake2b(repr(ranks).encode(), digest_size=16)
    bytes_of_spec: dict[int, bytes] = {}
    for spec in specs:
        if id(spec) not in bytes_of_spec:
            slots = []
            for slot in spec.slots:
                words = repr((slot.name, slot.fused, slot.sent_dtype, slot.returned_dtype, slot.returns)).encode()
                slots.append(_layout_digest(slot.layout) + words)
            bytes_of_spec[id(spec)] = b"".join(slots)
        digest.update(bytes_of_spec[id(spec)])
    plan = [(u.param, u.index, u.owner, u.stage, u.form.kernels, u.form.gram) for u in units]
    digest.update(np.array(plan, np.int64).tobytes())
    return digest.digest()


@lru_cache(maxsize=4096)
def _layout_digest(layout: TensorLayout) -> bytes:
    return layout.digest()
