"""Who orthogonalises which matrix, and when: balanced, deterministic, and the same on every rank without talking."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]

SLACK = 1.05
"""A matrix leaves its holders only where that saves more than a twentieth of the makespan: moving it costs bytes."""

Entry = tuple[int, int, bool, bool, int]
"""Load, minus elements held, new to the shape, far from the matrix, position: the smallest is the best."""


@dataclass(frozen=True, slots=True)
class Work:
    """One matrix to give away.

    Attributes:
        cost: of orthogonalising it, in any unit, the same for all; for each of the ranks that share it.
        numel: its elements.
        shape: what is worth having on one rank together.
        holders: positions of the ranks that hold parts of it (in the list of ranks, ascending).
        held: how many elements each of them holds.
        parts: how many ranks share it, a power of two.
    """

    cost: int
    numel: int
    shape: tuple[int, ...]
    holders: Int
    held: Int
    parts: int = 1


def assign(work: Sequence[Work], ranks: Sequence[int], node: int = 8) -> list[tuple[int, ...]]:
    """The positions of each matrix's owners, by longest processing time first (Graham 1969) over all shapes together.

    A matrix goes to the least loaded rank that holds part of it, so that what is whole somewhere moves nowhere and
    what lies within a group of ranks stays there, as long as that rank's load stays within ``SLACK`` of the best
    possible makespan, ``max(sum / ranks, largest)``; after that, to the least loaded rank of all.  Among equally loaded
    ranks comes the one that holds the most of it, then one that has matrices of its shape already, then one on the node
    (``node`` consecutive ranks) of the matrix's first holder, then the first.  No rank receives more elements than the
    mean and one largest matrix; the one that has received the least is always below the mean, so that can always be
    kept.

    A matrix that ranks share goes to the least loaded of the runs of so many ranks that begin at a multiple of it:
    such runs lie inside or outside of each other, so ranks can take their shared matrices in one order without waiting
    in a circle.
    """
    if not work:
        return []
    best = max(-(-sum(each.cost * each.parts for each in work) // len(ranks)), max(each.cost for each in work))
    cap = -(-sum(each.numel for each in work) // len(ranks)) + max(each.numel for each in work)
    books = _Books(cap, np.asarray(ranks, np.int64) // node)
    kinds = {key: number for number, key in enumerate(dict.fromkeys(map(_kind, work)))}
    owners: list[tuple[int, ...]] = [()] * len(work)
    order = sorted(range(len(work)), key=lambda i: (-work[i].cost, kinds[_kind(work[i])], i))
    for _, alike in groupby(order, key=lambda i: (work[i].cost, kinds[_kind(work[i])])):
        numbers = list(alike)
        each = work[numbers[0]]
        home = books.queue(each)
        for index in numbers:
            if each.parts > 1:
                owners[index] = books.share(each)
                continue
            owner = books.first(home, each)
            if owner is None or books.load[owner] + each.cost > SLACK * best:
                least = books.least(each)
                owner = least if owner is None or books.load[least] < books.load[owner] else owner
            books.give(owner, each)
            owners[index] = (owner,)
    return owners


def _kind(each: Work) -> tuple[tuple[int, ...], int, int, int]:
    """Work that cannot be told apart but by its cost.  The arrays are cached by geometry (`units.residence`)."""
    return each.shape, each.parts, id(each.holders), id(each.held)


class _Books:
    """What each rank has been given so far."""

    def __init__(self, cap: int, nodes: Int) -> None:
        self.cap, self.nodes = cap, nodes
        self.load, self.received = np.zeros(len(nodes), np.int64), np.zeros(len(nodes), np.int64)
        self.shapes: defaultdict[tuple[int, ...], NDArray[np.bool_]] = defaultdict(lambda: np.zeros(len(nodes), bool))

    def queue(self, each: Work) -> list[Entry]:
        """The holders of a matrix, by load and then by what makes one better than another; a heap."""
        entries = [
            self._entry(rank, held, each) for rank, held in zip(each.holders.tolist(), each.held.tolist(), strict=True)
        ]
        heapify(entries)
        return entries

    def _entry(self, rank: int, held: int, each: Work) -> Entry:
        new, far = not self.shapes[each.shape][rank], bool(self.nodes[rank] != self._node(each))
        return int(self.load[rank]), -held, new, far, rank

    def first(self, queue: list[Entry], each: Work) -> int | None:
        """The first of a queue that may receive the matrix, if any; entries that are out of date are mended."""
        while queue:
            load, minus_held, _, _, rank = queue[0]
            if self.received[rank] + each.numel + minus_held > self.cap:
                heappop(queue)
            elif load != self.load[rank]:
                heapreplace(queue, self._entry(rank, -minus_held, each))
            else:
                return rank
        return None

    def least(self, each: Work) -> int:
        """The least loaded of all ranks that may receive all of a matrix."""
        loads = np.where(self.received + each.numel <= self.cap, self.load, np.iinfo(np.int64).max)
        equal = np.flatnonzero(loads == loads.min())
        far, new = self.nodes[equal] != self._node(each), ~self.shapes[each.shape][equal]
        return int(equal[np.lexsort((far, new))[0]])

    def share(self, each: Work) -> tuple[int, ...]:
        """Give a matrix to the least loaded run of ranks."""
        runs = len(self.load) // each.parts
        start = int(self.load[: runs * each.parts].reshape(runs, -1).max(axis=1).argmin()) * each.parts
        for rank in range(start, start + each.parts):
            self.give(rank, each)
        return tuple(range(start, start + each.parts))

    def give(self, rank: int, each: Work) -> None:
        self.load[rank] += each.cost
        self.received[rank] += (each.numel - int(each.held[each.holders == rank].sum())) // each.parts
        self.shapes[each.shape][rank] = True

    def _node(self, each: Work) -> int:
        return int(self.nodes[each.holders[0]])


def in_stages(costs: Sequence[int], owners: Sequence[tuple[int, ...]], ranks: int, most: int) -> list[int]:
    """The stage of each matrix: at most ``most`` stages, of at least as many matrices as ranks on average.

    Each owner's matrices, largest first, are cut where its work passes equal parts of the greatest load.  So every
    rank has about as much to do in each stage, and what it does in one stage hides the exchange of the next.  A stage
    shorter than the largest matrix would leave all but its owner waiting, so there are no more than such stages.
    """
    load = [0] * ranks
    for cost, sharers in zip(costs, owners, strict=True):
        for owner in sharers:
            load[owner] += cost
    longest = max(*load, 1)
    count = max(1, min(most, len(costs) // ranks, longest // max(costs, default=1)))
    done = [0] * ranks
    stages = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        before = max(done[owner] for owner in owners[index])
        stages[index] = min(count * (2 * before + costs[index]) // (2 * longest), count - 1)
        for owner in owners[index]:
            done[owner] += costs[index]
    used = {stage: number for number, stage in enumerate(sorted(set(stages)))}
    return [used[stage] for stage in stages]
