"""The owner and the stage of each matrix: balanced, deterministic, and the same on every rank without talking."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]

SLACK = 1.05
"""A matrix leaves its holders only where that saves more than a twentieth of the makespan: moving it costs bytes."""

Candidate = tuple[int, int, bool, bool, int]
"""Load, minus elements held, new to the shape, far from the matrix, position: the smallest is the best."""


@dataclass(frozen=True, slots=True)
class Work:
    """One matrix to give away.

    Attributes:
        cost: of orthogonalising it, in any unit, the same for all.
        shape: matrices of one shape are worth having on one rank.
        holders: positions (in the list of ranks, ascending) of the ranks that hold parts of it.
        held: the number of elements that each of them holds.
    """

    cost: int
    numel: int
    shape: tuple[int, ...]
    holders: Int
    held: Int


def assign(work: Sequence[Work], ranks: Sequence[int], node: int = 8) -> list[int]:
    """Return the position of each matrix's owner, by longest processing time first (Graham 1969) over all shapes.

    A matrix goes to the least loaded of its holders, so that it moves no further than it must, while that rank's load
    stays within ``SLACK`` of the best possible makespan, ``max(sum / ranks, largest)``; after that, to the least loaded
    rank of all.  Among equally loaded ranks comes the one that holds the most of it, then one that has matrices of its
    shape, then one on the node (``node`` consecutive ranks) of its first holder, then the first.  No rank receives more
    elements than the mean and one largest matrix; the one that has received the least is always below the mean, so that
    can always be kept.
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
    for index, matrix in enumerate(work):
        kind = known.get(id(matrix))
        if kind is None:
            # Work that differs in its cost at most; `residence` caches the arrays.
            same = matrix.shape, id(matrix.holders), id(matrix.held)
            kind = known[id(matrix)] = kinds.setdefault(same, len(kinds))
        alike[-matrix.cost, kind].append(index)
    owners = [0] * len(work)
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
    """The loads that each rank has been given so far."""

    def __init__(self, cap: int, nodes: Int) -> None:
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
        """Yield, without end, the least loaded rank that may receive all of a matrix at that time.

        Ranks are sorted only once all of the same load have been given more: loads never sink.
        """
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


def in_stages(costs: Sequence[int], owners: Sequence[int], ranks: int, most: int) -> list[int]:
    """Return the stage of each matrix: at most ``most`` stages, of at least as many matrices as ranks on average.

    Each owner's matrices, largest first, are cut where its work passes equal parts of the greatest load.  So every rank
    has about as much to do in each stage, which hides the exchange of the next.  No stage is shorter than the largest
    matrix takes: all ranks but its owner would wait.
    """
    load = [0] * ranks
    for cost, owner in zip(costs, owners, strict=True):
        load[owner] += cost
    longest = max(*load, 1)
    count = max(1, min(most, len(costs) // ranks, longest // max(costs, default=1)))
    done = [0] * ranks
    stages = [0] * len(costs)
    for index in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):  # stable
        owner, cost = owners[index], costs[index]
        stages[index] = min(count * (2 * done[owner] + cost) // (2 * longest), count - 1)
        done[owner] += cost
    used = {stage: number for number, stage in enumerate(sorted(set(stages)))}
    return [used[stage] for stage in stages]
