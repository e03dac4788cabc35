"""A matrix's way to its owner and back, as one rank sees it: which boxes of its memory go to whom, and come from whom.

The same as `plan.make_share` between where a matrix rests and its owner, made without a layout for each matrix: there
are tens of thousands.  Where parts have replicas, an owner reads those that `plan.make_plan` says, and results go to
all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ...box import Index, row_major
from ...layout import Buffer, TensorLayout
from .matrices import Fused, shapes_of
from .residence import first_replicas, held, matrix_parts

OWNER = "owner"
"""Stands for the one owner of a matrix, whoever that is."""


@dataclass(frozen=True, slots=True)
class End:
    """A box in a rank's memory (``offset``, ``sizes``, ``strides``, in elements) and who has the other end."""

    peer: Buffer
    numel: int
    sizes: Index
    strides: Index
    offset: int


@dataclass(frozen=True, slots=True)
class Trip:
    """One rank's part of moving a matrix; ``own`` is what it has for itself: from where, and to where."""

    gives: tuple[End, ...] = ()
    takes: tuple[End, ...] = ()
    own: tuple[tuple[End, End], ...] = ()


Trips = tuple[Trip, Trip]
"""To the owner, and back."""


@lru_cache(maxsize=1024)
def trips_of_owner(layout: TensorLayout, fused: Fused, index: int, rank: int) -> Trips:
    """Of the rank that orthogonalises a matrix of a parameter alone."""
    first = first_replica(layout, fused, index, rank)
    strides = row_major(shapes_of(layout.shape, fused)[index])
    takes, gives, own = [], [], []
    for part in matrix_parts(layout, fused).of_matrix(index):
        chosen = _chosen(part.number, len(part.holders), first)
        ends = [End(holder, part.numel, part.sizes, strides, part.inside) for holder, _, _ in part.holders]
        mine = [replica for replica, end in enumerate(ends) if end.peer == rank]
        if mine:
            _, offset, along = part.holders[mine[0]]
            own.append((End(rank, part.numel, part.sizes, along, offset), ends.pop(mine[0])))
        else:
            takes.append(ends[chosen])
        gives += ends
    return Trip((), tuple(takes), tuple(own)), Trip(tuple(gives), (), tuple((end, begin) for begin, end in own))


@lru_cache(maxsize=65536)
def trips_of_holder(layout: TensorLayout, fused: Fused, index: int, rank: int, first: int | None) -> Trips:
    """Of a rank that holds part of a matrix which another rank owns.  Cached by geometry: layers share them.

    Args:
        first: `first_replica` of the owner.
    """
    gives, takes = [], []
    for part in held(layout, fused, rank).get(index, ()):
        [(replica, offset, strides)] = [
            (replica, offset, strides)
            for replica, (holder, offset, strides) in enumerate(part.holders)
            if holder == rank
        ]
        takes.append(End(OWNER, part.numel, part.sizes, strides, offset))
        if replica == _chosen(part.number, len(part.holders), first):
            gives.append(takes[-1])
    return Trip(gives=tuple(gives)), Trip(takes=tuple(takes))


def first_replica(layout: TensorLayout, fused: Fused, index: int, owner: int) -> int | None:
    """Which replica of the first part that a rank holds of a matrix lies with it; None if it holds none.

    Where nothing has replicas, it is the only one, whoever asks.
    """
    replicated = len(layout.box) > len(layout.starts)
    return first_replicas(layout, fused, index).get(owner) if replicated else 0


def _chosen(number: int, replicas: int, first: int | None) -> int:
    """The replica of a part that is read by one who holds none of it."""
    return (number if first is None else first) % replicas
