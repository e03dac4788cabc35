"""Who orthogonalises which matrix, and when: balanced, deterministic, and the same on every rank without talking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Work:
    """One matrix to give away.

    Attributes:
        cost: of orthogonalising it, in any unit, the same for all.
        numel: its elements.
        shape: what is worth having on one rank together.
        holders: positions of the ranks that hold parts of it (in the list of ranks, ascending).
        held: how many elements each of them holds.
    """

    cost: int
    numel: int
    shape: tuple[int, ...]
    holders: Int
    held: Int


def assign(work: Sequence[Work], ranks: Sequence[int], node: int = 8) -> list[int]:
    """The position of each matrix's owner, by longest processing time first (Graham 1969) over all shapes together.

    A matrix goes to the least loaded rank that holds part of it, so that what is whole somewhere moves nowhere and
    what lies within a group of ranks stays there, as long as that rank's load stays within the best possible makespan,
    ``max(sum / ranks, largest)``; after that, to the least loaded rank of all.  Among equally loaded ranks comes the
    one that holds the most of it, then one that has matrices of its shape already, then one on the node (``node``
    consecutive ranks) of the matrix's first holder, then the first.  No rank receives more elements than the mean
    and one largest matrix; the one that has received the least is always below the mean, so that can always be kept.
    """
    owners = np.zeros(len(work), np.int64)
    if not work:
        return []
    load, received = np.zeros(len(ranks), np.int64), np.zeros(len(ranks), np.int64)
    nodes = np.asarray(ranks, np.int64) // node
    everyone, none = np.arange(len(ranks)), np.zeros(len(ranks), np.int64)
    best = max(-(-sum(each.cost for each in work) // len(ranks)), max(each.cost for each in work))
    cap = -(-sum(each.numel for each in work) // len(ranks)) + max(each.numel for each in work)
    having: dict[tuple[int, ...], NDArray[np.bool_]] = {}

    for index in sorted(range(len(work)), key=lambda i: (-work[i].cost, i)):
        each = work[index]
        same = having.setdefault(each.shape, np.zeros(len(ranks), np.bool_))

        def chosen(candidates: Int, held: Int, each: Work = each, same: NDArray[np.bool_] = same) -> int | None:
            free = received[candidates] + each.numel - held <= cap
            candidates, held = candidates[free], held[free]
            if not len(candidates):
                return None
            loads = load[candidates]
            least = np.flatnonzero(loads == loads.min())
            if len(least) > 1:
                at = candidates[least]
                near = nodes[at] == nodes[each.holders[0]]
                least = least[np.lexsort((~near, ~same[at], -held[least]))]
            return int(candidates[least[0]])

        owner = chosen(each.holders, each.held)
        if owner is None or load[owner] + each.cost > best:
            held = none
            if len(each.holders):
                held = none.copy()
                held[each.holders] = each.held
            owner = chosen(everyone, held)
            assert owner is not None, "the rank that received least is below the mean"
        mine = each.held[each.holders == owner]
        load[owner] += each.cost
        received[owner] += each.numel - int(mine.sum())
        same[owner] = True
        owners[index] = owner
    return [int(owner) for owner in owners]


def in_waves(costs: Sequence[int], owners: Sequence[int], ranks: int, most: int) -> list[int]:
    """The wave of each matrix: at most ``most`` waves, of at least as many matrices as ranks on average.

    Each owner's matrices, largest first, are cut where its work passes equal parts of the greatest load.  So every
    rank has about as much to do in each wave, and what it does in one wave hides the exchange of the next.
    """
    count = max(1, min(most, len(costs) // ranks))
    load = np.zeros(ranks, np.int64)
    np.add.at(load, np.asarray(owners, np.int64), np.asarray(costs, np.int64))
    longest = max(int(load.max()), 1)
    done = [0] * ranks
    waves = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owner = owners[index]
        waves[index] = min(count * (2 * done[owner] + costs[index]) // (2 * longest), count - 1)
        done[owner] += costs[index]
    used = {wave: number for number, wave in enumerate(sorted(set(waves)))}
    return [used[wave] for wave in waves]
