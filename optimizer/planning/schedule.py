"""Everything that is fixed between steps: the matrices of some parameters, their owners, stages, and exchanges.

A schedule covers the parameters that one set of ranks holds.  It is derived from shapes and placements alone, so every
rank makes its own part of the same one; it is never saved.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ...layout import TensorLayout
from ...plan import Copy, Share, make_share
from ..newton_schulz.forms import Form
from .matrices import rows_columns
from .owners import Work, assign, in_stages
from .routes import Message, Route, route
from .units import Slot, Spec, Unit, given, replicated, residence, resident

Ranks = tuple[int, ...]

OVERSIZE = 1.3
"""A matrix that costs more than this many times a rank's share of all work is split, if it may be."""


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


def make_schedule(specs: Sequence[Spec], ranks: Ranks, rank: int, stages: int = 4) -> Schedule:
    """Plan for parameters that ``ranks`` hold (global ranks, in the order of their process group).

    Args:
        rank: the one whose part is made.
        stages: the largest number of rounds.
    """
    where = [(number, index) for number, spec in enumerate(specs) for index in range(len(spec.slots[0].shapes))]
    work = _work(specs, ranks)
    owners = assign(work, ranks)
    turns = in_stages([matrix.cost for matrix in work], owners, len(ranks), stages)
    units = tuple(
        Unit(
            *place,
            matrix.shape,
            tuple(ranks[index] for index in sharers),
            specs[place[0]].blocks,
            stage,
            matrix.cost,
            form,
        )
        for place, matrix, sharers, stage, form in zip(where, work, owners, turns, _forms(specs), strict=True)
    )
    here = [
        frozenset[int]().union(*(resident(slot.layout, slot.fused, ranks, rank) for slot in spec.slots))
        for spec in specs
    ]
    ours = [n for n, unit in enumerate(units) if unit.index in here[unit.param] or rank in unit.owners]
    return Schedule(
        ranks,
        units,
        tuple(
            _stage([number for number in ours if units[number].stage == stage], units, specs, ranks, rank)
            for stage in range(max(turns, default=0) + 1)
        ),
        _digest(specs, ranks, units),
    )


def _forms(specs: Sequence[Spec]) -> list[Form]:
    """Of all matrices.  What decides is how many of a shape a *parameter* has: that is the same under any sharding, and
    on ranks that do not hold the same parameters."""
    forms = []
    for spec in specs:
        shapes = [rows_columns(shape) for shape in spec.slots[0].shapes]
        form = {shape: spec.form(*shape, copies) for shape, copies in Counter(shapes).items()}
        forms += [form[shape] for shape in shapes]
    return forms


def _work(specs: Sequence[Spec], ranks: Ranks) -> list[Work]:
    """All matrices; one that is much more than a rank's share of all work is shared by as many ranks as it takes."""
    costs = [[spec.cost(*rows_columns(shape), 1) for shape in spec.slots[0].shapes] for spec in specs]
    share = sum(map(sum, costs)) / len(ranks)
    work = []
    for spec, alone in zip(specs, costs, strict=True):
        update = spec.slots[0]
        homes = residence(update.layout, update.fused, ranks)
        for shape, cost, (holders, held) in zip(update.shapes, alone, homes, strict=True):
            parts = 1
            while cost > OVERSIZE * share and 2 * parts <= min(spec.blocks, len(ranks)):
                parts *= 2
                cost = spec.cost(*rows_columns(shape), parts)
            work.append(Work(cost, math.prod(shape), shape, holders, held, parts))
    return work


def _stage(numbers: Sequence[int], units: Sequence[Unit], specs: Sequence[Spec], ranks: Ranks, rank: int) -> Stage:
    gather, scatter = [], []
    for number in numbers:
        unit = units[number]
        for slot in specs[unit.param].slots:
            there, back = _shares(unit, slot, rank)
            gather.append(Message((number, slot.name), slot.there, unit.owners[0], there))
            scatter.append(Message((number, slot.name), slot.back, unit.owners[0], back))
    return Stage(
        route(gather, ranks, rank),
        route(scatter, ranks, rank),
        tuple(number for number in numbers if rank in units[number].owners),
        tuple(numbers),
    )


def _shares(unit: Unit, slot: Slot, rank: int) -> tuple[Share, Share]:
    """What a rank does to bring a matrix of a slot to its owners, and to take the result back."""
    if rank not in unit.owners and unit.blocks == 1 and not replicated(slot.layout):
        copies = given(slot.layout, slot.fused, rank).get(unit.index, ())
        return Share(copies, ()), Share((), tuple(Copy(copy.box, copy.target, copy.source) for copy in copies))
    resting, whole = unit.resting(slot), unit.whole(slot)
    return _share(resting, whole, rank), _share(whole, resting, rank)


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
    plan = [
        (u.param, u.index, u.owners[0], len(u.owners), u.blocks, u.stage, u.form.kernels, u.form.gram) for u in units
    ]
    whole.update(np.array(plan, np.int64).tobytes())
    return whole.digest()


@lru_cache(maxsize=4096)
def _layout_digest(layout: TensorLayout) -> bytes:
    return layout.digest()
