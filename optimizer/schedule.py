"""Everything that is fixed between steps: the matrices of some parameters, their owners, waves, and exchanges.

A schedule covers the parameters that one set of ranks holds.  It is derived from shapes and placements alone, so every
rank makes its own part of the same one; it is never saved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..layout import TensorLayout
from ..plan import Share, make_share
from .matrices import flops, rows_columns, shape_of
from .owners import Work, assign, in_waves
from .route import Item, Route, route
from .units import Spec, Unit, residence

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wave:
    """One round: ``gather`` takes what rests with the ranks to the owners, ``scatter`` takes results back.

    ``owned`` are the numbers of the units that this rank orthogonalises, ``held`` of those that it holds parts of.
    """

    gather: Route
    scatter: Route
    owned: tuple[int, ...]
    held: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Of all wires of this wave on this rank."""
        return self.gather.bytes + self.scatter.bytes


@dataclass(frozen=True, slots=True)
class Schedule:
    """What one rank does for some parameters, all of whose units it knows.  ``digest`` is the same on every rank."""

    ranks: Ranks
    units: tuple[Unit, ...]
    waves: tuple[Wave, ...]
    digest: bytes

    @property
    def owned(self) -> tuple[int, ...]:
        """Numbers of the units that this rank orthogonalises, in the order of the waves."""
        return tuple(number for wave in self.waves for number in wave.owned)


def make_schedule(specs: Sequence[Spec], ranks: Ranks, rank: int, waves: int = 4) -> Schedule:
    """Plan for parameters that ``ranks`` hold (global ranks, in the order of their process group).

    Args:
        rank: the one whose part is made.
        waves: at most so many rounds.
    """
    work, where = [], []
    for number, spec in enumerate(specs):
        update = spec.slots[0]
        for index, (holders, held) in enumerate(residence(update.layout, update.fused, ranks)):
            shape = shape_of(update.matrices[index])
            m, n = rows_columns(shape)
            work.append(Work(flops(m, n, spec.steps), m * n, shape, holders, held))
            where.append((number, index))
    owners = assign(work, ranks)
    turns = in_waves([each.cost for each in work], owners, len(ranks), waves)
    units = tuple(
        Unit(*place, each.shape, ranks[owner], wave, each.cost)
        for place, each, owner, wave in zip(where, work, owners, turns, strict=True)
    )
    at = ranks.index(rank)
    ours = [
        number
        for number, unit in enumerate(units)
        if unit.owner == rank or any(_holds(specs[unit.param], unit.index, ranks, at))
    ]
    return Schedule(
        ranks,
        units,
        tuple(
            _wave([number for number in ours if units[number].wave == wave], units, specs, ranks, rank)
            for wave in range(max(turns, default=0) + 1)
        ),
        _digest(specs, ranks, units),
    )


def _holds(spec: Spec, index: int, ranks: Ranks, at: int) -> Iterable[bool]:
    """For each slot, whether the rank at this position holds part of a matrix."""
    for slot in spec.slots:
        holders, _ = residence(slot.layout, slot.fused, ranks)[index]
        found = int(np.searchsorted(holders, at))
        yield found < len(holders) and int(holders[found]) == at


def _wave(numbers: Sequence[int], units: Sequence[Unit], specs: Sequence[Spec], ranks: Ranks, rank: int) -> Wave:
    gather, scatter = [], []
    for number in numbers:
        unit = units[number]
        for slot in specs[unit.param].slots:
            resting, whole = unit.resting(slot), unit.whole(slot)
            gather.append(Item((number, slot.name), slot.there, _share(resting, whole, rank)))
            scatter.append(Item((number, slot.name), slot.back, _share(whole, resting, rank)))
    return Wave(
        route(gather, ranks),
        route(scatter, ranks),
        tuple(number for number in numbers if units[number].owner == rank),
        tuple(numbers),
    )


@lru_cache(maxsize=65536)
def _share(source: TensorLayout, target: TensorLayout, rank: int) -> Share:
    """Cached by geometry: the layers of a model share them."""
    return make_share(source, target, rank)


def _digest(specs: Sequence[Spec], ranks: Ranks, units: Sequence[Unit]) -> bytes:
    """16 bytes that are equal on two ranks exactly when their schedules are parts of one."""
    whole = hashlib.blake2b(repr(ranks).encode(), digest_size=16)
    for spec in specs:
        for slot in spec.slots:
            whole.update(_layout_digest(slot.layout))
            whole.update(repr((slot.name, slot.fused, slot.there, slot.back)).encode())
    whole.update(np.array([(unit.param, unit.index, unit.owner, unit.wave) for unit in units], np.int64).tobytes())
    return whole.digest()


@lru_cache(maxsize=4096)
def _layout_digest(layout: TensorLayout) -> bytes:
    return layout.digest()
