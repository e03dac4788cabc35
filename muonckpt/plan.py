"""Plans: the copies that turn one layout of a tensor into another.

A plan is the intersection of two layouts.  The same plan drives collectives (the optimizer's exchange) and file IO
(resharding, loading).  It is derived data: cheap, the same on every rank without talking, and never saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from .box import Box, Index
from .errors import LayoutError
from .layout import Buffer, Place, TensorLayout
from .overlap import overlaps


@dataclass(frozen=True, slots=True)
class Copy:
    """Move the elements of ``box`` from ``source`` to ``target`` (places of the box's first element)."""

    box: Box
    source: Place
    target: Place


@dataclass(frozen=True, slots=True)
class Plan:
    """Copies that write every fragment of the target exactly once, in the order of the target's boxes.

    Both layouts are proved tilings, so it suffices that the copies' volumes add up to what the target holds.

    Raises:
        LayoutError: they do not.
    """

    shape: Index
    copies: tuple[Copy, ...]
    target_numel: int
    """Elements that the target's buffers hold, replicas counted."""

    def __post_init__(self) -> None:
        written = sum(copy.box.numel for copy in self.copies)
        if written != self.target_numel:
            raise LayoutError(f"the plan writes {written} of the {self.target_numel} elements of the target")

    def moved(self) -> int:
        """Elements that change buffer."""
        return sum(copy.box.numel for copy in self.copies if copy.source.buffer != copy.target.buffer)


@dataclass(frozen=True, slots=True)
class Share:
    """One buffer's part of a plan: the copies that it gives and those that it takes (its own to itself are in both).

    Two buffers list the copies between them in the same order.
    """

    gives: tuple[Copy, ...]
    takes: tuple[Copy, ...]


@lru_cache(maxsize=65536)
def make_plan(source: TensorLayout, target: TensorLayout) -> Plan:
    """The copies that fill ``target`` from ``source``.

    Where replicas hold the same box, the target's own buffer is read if it is one of them.  A buffer that holds
    other boxes reads the replica with the number that it has among the holders of its own first box (so it stays in
    its own replica of a mesh); those that hold nothing take the replicas in turn.  So one buffer's copies are known
    without the rest of the plan.  Cached: tensors of the same geometry share one plan.

    Raises:
        LayoutError: the shapes differ.
    """
    _check_shapes(source, target)
    pairs = overlaps(target.starts, target.stops, source.starts, source.stops)
    copies = _copies(source, target, zip(*(index.tolist() for index in pairs), strict=True))
    return Plan(source.shape, tuple(copies), target.numel_held)


def make_share(source: TensorLayout, target: TensorLayout, buffer: Buffer) -> Share:
    """The share of ``buffer`` in ``make_plan(source, target)``, without making the whole plan.

    Raises:
        LayoutError: the shapes differ, or what the buffer takes is not all that it holds of the target.
    """
    _check_shapes(source, target)
    ours, theirs = source.boxes_of(buffer), target.boxes_of(buffer)
    t, s = overlaps(target.starts, target.stops, source.starts[ours], source.stops[ours])
    gives = _copies(source, target, zip(t.tolist(), ours[s].tolist(), strict=True))
    t, s = overlaps(target.starts[theirs], target.stops[theirs], source.starts, source.stops)
    takes = _copies(source, target, zip(theirs[t].tolist(), s.tolist(), strict=True))
    share = Share(
        tuple(copy for copy in gives if copy.source.buffer == buffer),
        tuple(copy for copy in takes if copy.target.buffer == buffer),
    )
    taken = sum(copy.box.numel for copy in share.takes)
    expected = int((target.stops - target.starts)[theirs].prod(axis=1).sum())
    if taken != expected:
        raise LayoutError(f"the plan writes {taken} of the {expected} elements that {buffer!r} holds of the target")
    return share


def _check_shapes(source: TensorLayout, target: TensorLayout) -> None:
    if source.shape != target.shape:
        raise LayoutError(f"cannot copy a tensor of shape {source.shape} into one of shape {target.shape}")


def _copies(source: TensorLayout, target: TensorLayout, pairs: Iterable[tuple[int, int]]) -> Iterator[Copy]:
    """Copies to every holder of a target box from the holder of the source box that it reads, pair by pair."""
    for t, s in pairs:
        common = target.holders[t][0].box & source.holders[s][0].box
        assert common is not None, "overlaps() returned a pair of disjoint boxes"
        for turn, receiver in enumerate(target.holders[t], t):
            giver = source.holders[s][_replica(source, s, turn, receiver.place.buffer)]
            yield Copy(common, giver.place_at(common.lo), receiver.place_at(common.lo))


def _replica(source: TensorLayout, s: int, turn: int, reader: Buffer) -> int:
    """Which holder of the source box ``s`` a buffer reads.

    Args:
        turn: tells readers apart that hold nothing.
    """
    holders = [fragment.place.buffer for fragment in source.holders[s]]
    if reader in holders:
        return holders.index(reader)
    own = source.held.get(reader)
    if own is None:
        return (s + turn) % len(holders)
    return [fragment.place.buffer for fragment in source.holders[own[0]]].index(reader) % len(holders)
