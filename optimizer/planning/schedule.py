"""Schedules: the matrices of the parameters that one set of ranks holds, their owners, stages, and exchanges.

A schedule is derived from shapes and placements alone, so every rank makes its own part of the same one.  Elements
travel on a wire, a flat buffer of bytes with one part for each rank of the group.  Both sides derive it from the same
plans, so nothing is negotiated or padded, but for alignment (at most 7 bytes between two ranks).
"""

from __future__ import annotations

import gc
import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from ...layout import TensorLayout
from ...plan import NO_COPIES, Copies
from ..newton_schulz.products import Form
from .matrices import Slot, Spec, Unit, rows_columns
from .owners import Int, Work, assign, in_stages
from .residence import Owned, RankCopies, matrix_parts, rank_copies, residence

Ranks = tuple[int, ...]

WIRE_ALIGNMENT = 8
"""Bytes that each rank's part of the wire begins at a multiple of: the size of the largest element."""

NOTE = 16
"""Bytes in front of each rank's part: a digest of the sender's intent (`step.agreement.Intent`)."""

MOST_STAGES = 4
"""The fourth hides all but a quarter of the exchange and keeps its buffers to half; a fifth adds little to that."""

STAGE_BYTES = 1 << 23
"""Bytes that a rank can exchange in the time of one more stage: 5.6 ms over gloo, with 4 ranks on 2 cores; how much
travels meanwhile, there and on GPUs, is an estimate."""


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """One rank's part of an exchange, as tables of copies in the order of the tensors' numbers.

    Attributes:
        send_counts, receive_counts: bytes to and from each rank of the group.
        sends: from tensors to the wire, whose offsets are in bytes; targets are positions of ranks.
        receives: from the wire to tensors.
        own: from a tensor to its matrix on the same rank, or back; never on a wire.
    """

    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    sends: Copies = NO_COPIES
    receives: Copies = NO_COPIES
    own: Copies = NO_COPIES

    @property
    def bytes(self) -> int:
        """The size of both buffers together."""
        return sum(self.send_counts) + sum(self.receive_counts)


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """One round: ``gather`` takes updates to the owners, ``scatter`` takes results back.

    ``owned`` are the numbers of the units that this rank orthogonalises.
    """

    gather: Route
    scatter: Route
    owned: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The size of all wires of this stage on this rank."""
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
        """Numbers of the units that this rank orthogonalises, in the order of the stages."""
        return tuple(number for stage in self.stages for number in stage.owned)


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause the cycle collector: plans have no cycles.

    A plan for thousands of ranks is many thousands of objects that stay.  While they are made, the collector would go
    through everything that the process has, models and modules included, which took half of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def make_schedule(specs: Sequence[Spec], ranks: Ranks, rank: int, stages: int | None = None) -> Schedule:
    """Plan one rank's part for parameters that ``ranks`` hold (global ranks, in the order of their process group).

    Args:
        stages: the largest number of rounds; None: `worthwhile_stages`.
    """
    same: dict[Spec, Spec] = {}
    specs = [same.setdefault(spec, spec) for spec in specs]  # from here on they are told apart by identity
    matrices = _matrices(specs, ranks)
    kinds = [matrices[id(spec)] for spec in specs]
    work = [matrix for kind in kinds for matrix, _ in kind]
    owners = assign(work, ranks)
    most = worthwhile_stages(specs, len(ranks)) if stages is None else stages
    turns = in_stages([matrix.cost for matrix in work], owners, len(ranks), most)
    places = ((number, index, *matrix) for number, kind in enumerate(kinds) for index, matrix in enumerate(kind))
    units = tuple(
        Unit(number, index, work.shape, ranks[owner], stage, work.cost, form)
        for (number, index, work, form), owner, stage in zip(places, owners, turns, strict=True)
    )
    by_stage = _stages(specs, list(map(len, kinds)), np.array(owners, np.int64), np.array(turns, np.int64), ranks, rank)
    return Schedule(ranks, units, tuple(by_stage), _digest(specs, ranks, units))


def _stages(
    specs: Sequence[Spec], counts: Sequence[int], owner: Int, turn: Int, ranks: Ranks, rank: int
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
            involved = matrix_parts(slot.layout, slot.fused).resident(rank)[index] | (owner[unit] == here)
            matrices = Owned(unit + number * len(owner), index, owner[unit]).rows(involved)
            kinds.append((slot, rank_copies(slot.layout, slot.fused, ranks, here, matrices)))
    there, back = [slot.there.itemsize for slot, _ in kinds], [slot.back.itemsize for slot, _ in kinds]
    gives = _by_stage([copies.gives for _, copies in kinds], there, turn)
    takes = _by_stage([copies.takes.turned() for _, copies in kinds], there, turn)
    own = _by_stage([copies.own for _, copies in kinds], there, turn)
    gives_back = _by_stage([copies.gives_back for _, copies in kinds], back, turn)
    takes_back = _by_stage([copies.takes_back.turned() for _, copies in kinds], back, turn)
    for stage, (mine, _) in enumerate(own):
        yield Stage(
            _route(gives[stage], takes[stage], mine, len(ranks)),
            _route(gives_back[stage], takes_back[stage], mine.turned(), len(ranks)),
            tuple(np.flatnonzero((owner == here) & (turn == stage)).tolist()),
        )


def _by_stage(tables: Sequence[Copies], itemsizes: Sequence[int], turn: Int) -> list[tuple[Copies, Int]]:
    """Return the rows of tables by stage, in the order of units and slots, with the bytes of each row's elements."""
    table = Copies.joined([NO_COPIES, *tables])
    itemsize = np.repeat(np.array(itemsizes, np.int64), np.array([len(some) for some in tables], np.int64))
    slot, unit = np.divmod(table.source, max(len(turn), 1))
    order = np.lexsort((slot, unit, turn[unit]))
    table, itemsize = table.rows(order), itemsize[order]
    cuts = np.searchsorted(turn[unit[order]], np.arange(turn.max(initial=0) + 2)).tolist()
    return [(table.rows(slice(*cut)), itemsize[slice(*cut)]) for cut in pairwise(cuts)]


def _route(sends: tuple[Copies, Int], receives: tuple[Copies, Int], own: Copies, ranks: int) -> Route:
    (sent, send_counts), (received, receive_counts) = (_laid_out(*some, ranks) for some in (sends, receives))
    return Route(send_counts, receive_counts, sent, received.turned(), own)


def _laid_out(copies: Copies, itemsize: Int, ranks: int) -> tuple[Copies, tuple[int, ...]]:
    """Place copies on the wire, and count the bytes of each rank's part: boxes lie end to end, by the other side's rank
    and then in the order of the rows, each at a multiple of its elements' size.
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


def worthwhile_stages(specs: Sequence[Spec], ranks: int) -> int:
    """Return the number of stages that takes the least time: ``n`` of them leave an ``n``-th of the exchange uncovered,
    and take ``n`` times `STAGE_BYTES`.  It follows from sizes, so it is the same on every rank.
    """
    sent = sum(
        math.prod(slot.layout.shape) * (slot.there.itemsize + slot.back.itemsize)
        for spec in specs
        for slot in spec.slots
    )
    per_rank = sent * (ranks - 1) // ranks**2
    return min(max(math.isqrt(per_rank // STAGE_BYTES), 1), MOST_STAGES)


def _matrices(specs: Sequence[Spec], ranks: Ranks) -> dict[int, list[tuple[Work, Form]]]:
    """Return the matrices of each kind of parameter, by the identity of its spec: layers that repeat are planned once.

    The form follows from how many matrices of a shape a *parameter* has: that is the same under any sharding, and on
    ranks that do not hold the same parameters.
    """
    matrices = {}
    for kind, spec in {id(spec): spec for spec in specs}.items():
        update = spec.slots[0]
        homes = residence(update.layout, update.fused, ranks)
        copies = Counter(map(rows_columns, update.shapes))
        forms = {shape: spec.form(*shape, count) for shape, count in copies.items()}
        matrices[kind] = [
            (Work(spec.cost(*rows_columns(shape)), math.prod(shape), shape, *home), forms[rows_columns(shape)])
            for shape, home in zip(update.shapes, homes, strict=True)
        ]
    return matrices


def _digest(specs: Sequence[Spec], ranks: Ranks, units: Sequence[Unit]) -> bytes:
    """Return 16 bytes that are equal on two ranks exactly when their schedules are parts of one."""
    whole = hashlib.blake2b(repr(ranks).encode(), digest_size=16)
    known: dict[int, bytes] = {}
    for spec in specs:
        if id(spec) not in known:
            known[id(spec)] = b"".join(
                _layout_digest(slot.layout) + repr((slot.name, slot.fused, slot.there, slot.back)).encode()
                for slot in spec.slots
            )
        whole.update(known[id(spec)])
    plan = [(u.param, u.index, u.owner, u.stage, u.form.kernels, u.form.gram) for u in units]
    whole.update(np.array(plan, np.int64).tobytes())
    return whole.digest()


@lru_cache(maxsize=4096)
def _layout_digest(layout: TensorLayout) -> bytes:
    return layout.digest()
