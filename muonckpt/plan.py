"""Plans: the copies that turn one layout of a tensor into another.

A plan is the intersection of two layouts.  The same plan drives collectives (the optimizer's exchange) and file IO
(resharding, loading).  It is derived data: cheap, the same on every rank without talking, and never saved.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from operator import itemgetter

from .box import Box, Index
from .errors import LayoutError, about
from .layout import Buffer, Fragment, Place, TensorLayout
from .overlap import overlaps


@dataclass(frozen=True, slots=True)
class Copy:
    """Move the elements of ``box`` from ``source`` to ``target`` (places of the box's first element)."""

    box: Box
    source: Place
    target: Place


@dataclass(frozen=True, slots=True)
class Plan:
    """Copies that write every fragment of the target exactly once, in the order of the target's fragments.

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


@lru_cache(maxsize=65536)
def make_plan(source: TensorLayout, target: TensorLayout) -> Plan:
    """The copies that fill ``target`` from ``source``.

    Where replicas hold the same box, the target's own buffer is read if it is one of them; otherwise the one that has
    given least in this plan so far, then the first.  The result depends on
    the arguments only.  Cached: tensors of the same geometry share one plan.

    Raises:
        LayoutError: the shapes differ.
    """
    if source.shape != target.shape:
        raise LayoutError(f"cannot copy a tensor of shape {source.shape} into one of shape {target.shape}")
    load: defaultdict[Buffer, int] = defaultdict(int)
    copies = []
    found = overlaps(target.starts, target.stops, source.starts, source.stops)
    pairs = zip(*(index.tolist() for index in found), strict=True)
    for t, group in groupby(pairs, key=itemgetter(0)):
        wanted = target.fragments[t]
        to = wanted.place.buffer
        for holders in _replicas(source.fragments[s] for _, s in group):
            chosen = holders[0]
            if len(holders) > 1:
                chosen = min(holders, key=lambda f: (f.place.buffer != to, load[f.place.buffer]))
            common = chosen.box & wanted.box
            assert common is not None, "overlaps() returned a pair of disjoint boxes"
            load[chosen.place.buffer] += common.numel
            copies.append(Copy(common, chosen.at(common.lo), wanted.at(common.lo)))
    return Plan(source.shape, tuple(copies), sum(f.box.numel for f in target.fragments))


def make_plans(sources: Mapping[str, TensorLayout], targets: Mapping[str, TensorLayout]) -> dict[str, Plan]:
    """One plan per tensor, in the order of ``targets``.

    Raises:
        LayoutError: names the tensors that only one side has, or the tensor whose shapes differ.
    """
    missing, extra = targets.keys() - sources.keys(), sources.keys() - targets.keys()
    if missing or extra:
        raise LayoutError(f"source lacks {sorted(missing)}, target lacks {sorted(extra)}")
    plans = {}
    for name, target in targets.items():
        with about(name):
            plans[name] = make_plan(sources[name], target)
    return plans


def _replicas(fragments: Iterable[Fragment]) -> Iterable[list[Fragment]]:
    """Fragments grouped by equal boxes, in order of first appearance."""
    found: defaultdict[Box, list[Fragment]] = defaultdict(list)
    for fragment in fragments:
        found[fragment.box].append(fragment)
    return found.values()


def digest(plans: Iterable[Plan]) -> bytes:
    """16 bytes that are equal on two ranks exactly when their plans are (compared once, before the first exchange)."""
    one: dict[int, bytes] = {}  # plans are shared between tensors of one geometry: hash each object once
    whole = hashlib.blake2b(digest_size=16)
    for plan in plans:
        if id(plan) not in one:
            one[id(plan)] = hashlib.blake2b(repr(plan).encode(), digest_size=16).digest()
        whole.update(one[id(plan)])
    return whole.digest()
