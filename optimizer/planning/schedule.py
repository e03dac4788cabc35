"""Everything that is fixed between steps: the matrices of some parameters, their owners, stages, and exchanges.

A schedule covers the parameters that one set of ranks holds.  It is derived from shapes and placements alone, so every
rank makes its own part of the same one; it is never saved.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ...layout import TensorLayout
from ..newton_schulz.forms import Form
from .matrices import rows_columns
from .owners import Work, assign, in_stages
from .residence import residence, resident
from .routes import Key, Message, Route, route
from .trips import Trips, first_replica, trips_of_holder, trips_of_owner
from .units import Slot, Spec, Unit

Ranks = tuple[int, ...]

MOST_STAGES = 4
"""The fourth hides all but a quarter of the exchange and keeps its buffers to half; a fifth adds little to that."""

STAGE_BYTES = 1 << 23
"""What a rank can exchange in the time that one more stage takes of it.  That was 5.6 ms over gloo, with 4 ranks on 2
cores; how much travels meanwhile, there and on GPUs, is an estimate."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One round: ``gather`` takes what rests with the ranks to the owners, ``scatter`` takes results back.

    ``owned`` are the numbers of the units that this rank orthogonalises, ``held`` of those that it holds parts of.
    """

    gather: Route
    scatter: Route
    owned: tuple[int, ...]
    held: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Of all wires of this stage on this rank."""
        return self.gather.bytes + self.scatter.bytes


@dataclass(frozen=True, slots=True)
class Schedule:
    """What one rank does for some parameters, all of whose units it knows.  ``digest`` is the same on every rank."""

    ranks: Ranks
    units: tuple[Unit, ...]
    stages: tuple[Stage, ...]
    digest: bytes

    @property
    def owned(self) -> tuple[int, ...]:
        """Numbers of the units that this rank orthogonalises, in the order of the stages."""
        return tuple(number for stage in self.stages for number in stage.owned)


def make_schedule(specs: Sequence[Spec], ranks: Ranks, rank: int, stages: int | None = None) -> Schedule:
    """Plan for parameters that ``ranks`` hold (global ranks, in the order of their process group).

    Args:
        rank: the one whose part is made.
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
    resting = {
        id(spec): frozenset[int]().union(*(resident(slot.layout, slot.fused, rank) for slot in spec.slots))
        for spec in same
    }
    here = [resting[id(spec)] for spec in specs]
    by_stage: list[list[int]] = [[] for _ in range(max(turns, default=0) + 1)]
    for number, unit in enumerate(units):
        if unit.index in here[unit.param] or unit.owner == rank:
            by_stage[unit.stage].append(number)
    positions = {peer: position for position, peer in enumerate(ranks)}
    known: dict[Hashable, tuple[Message, Message]] = {}
    return Schedule(
        ranks,
        units,
        tuple(_stage(numbers, units, specs, positions, rank, known) for numbers in by_stage),
        _digest(specs, ranks, units),
    )


def worthwhile_stages(specs: Sequence[Spec], ranks: int) -> int:
    """How many stages take the least time: ``n`` of them leave an ``n``-th of the exchange uncovered, and take ``n``
    times `STAGE_BYTES`.  From sizes alone, so it is the same on every rank.
    """
    sent = sum(
        math.prod(slot.layout.shape) * (slot.there.itemsize + slot.back.itemsize)
        for spec in specs
        for slot in spec.slots
    )
    per_rank = sent * (ranks - 1) // ranks**2
    return min(max(math.isqrt(per_rank // STAGE_BYTES), 1), MOST_STAGES)


def _matrices(specs: Sequence[Spec], ranks: Ranks) -> dict[int, list[tuple[Work, Form]]]:
    """The matrices of every kind of parameter, by the identity of its spec: layers that repeat are planned once.

    What decides on the form is how many matrices of a shape a *parameter* has: that is the same under any sharding, and
    on ranks that do not hold the same parameters.
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


def _stage(
    numbers: Sequence[int],
    units: Sequence[Unit],
    specs: Sequence[Spec],
    positions: Mapping[int, int],
    rank: int,
    known: dict[Hashable, tuple[Message, Message]],
) -> Stage:
    """One stage, of the units that this rank has to do with.

    Args:
        known: messages there and back, by what they depend on.
    """  # fmt: skip
    gather: list[Message] = []
    scatter: list[Message] = []
    keys: dict[Key, int] = {}
    for number in numbers:
        unit = units[number]
        for slot in specs[unit.param].slots:
            kind = id(slot), unit.index, unit.owner
            if kind not in known:
                there, back = _trips(unit, slot, rank)
                known[kind] = Message(slot.there, unit.owner, there), Message(slot.back, unit.owner, back)
            there_message, back_message = known[kind]
            keys[number, slot.name] = len(gather)
            gather.append(there_message)
            scatter.append(back_message)
    return Stage(
        route(keys, gather, positions),
        route(keys, scatter, positions),
        tuple(number for number in numbers if units[number].owner == rank),
        tuple(numbers),
    )


def _trips(unit: Unit, slot: Slot, rank: int) -> Trips:
    """What a rank does to bring a matrix of a slot to its owner, and to take the result back."""
    where = slot.layout, slot.fused, unit.index
    if unit.owner == rank:
        return trips_of_owner(*where, rank)
    return trips_of_holder(*where, rank, first_replica(*where, unit.owner))


def _digest(specs: Sequence[Spec], ranks: Ranks, units: Sequence[Unit]) -> bytes:
    """16 bytes that are equal on two ranks exactly when their schedules are parts of one."""
    whole = hashlib.blake2b(repr(ranks).encode(), digest_size=16)
    known: dict[int, bytes] = {}
    for spec in specs:
        if id(spec) not in known:
            known[id(spec)] = b"".join(map(_slot_digest, spec.slots))
        whole.update(known[id(spec)])
    plan = [(u.param, u.index, u.owner, u.stage, u.form.kernels, u.form.gram) for u in units]
    whole.update(np.array(plan, np.int64).tobytes())
    return whole.digest()


def _slot_digest(slot: Slot) -> bytes:
    return _layout_digest(slot.layout) + repr((slot.name, slot.fused, slot.there, slot.back)).encode()


@lru_cache(maxsize=4096)
def _layout_digest(layout: TensorLayout) -> bytes:
    return layout.digest()
