"""Who orthogonalises which matrix: balanced, deterministic, and the same on every rank without talking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..layout import TensorLayout


@dataclass(frozen=True, slots=True)
class Work:
    """One matrix to give away: where its elements rest and what it costs (any unit, the same for all)."""

    layout: TensorLayout
    cost: int


def assign(work: Sequence[Work], ranks: Sequence[int]) -> list[int]:
    """The owner of each matrix, by longest processing time first (Graham 1969: at most 4/3 of the best makespan).

    Costs of all shapes are balanced together.  Among equally loaded ranks the one that already holds the most of the
    matrix takes it, so that a matrix that is whole somewhere moves nowhere if the balance allows; then the first.
    """
    column = {rank: index for index, rank in enumerate(ranks)}
    load = np.zeros(len(ranks), np.int64)
    owners = [ranks[0]] * len(work)
    for index in sorted(range(len(work)), key=lambda i: (-work[i].cost, i)):
        resident = np.zeros(len(ranks), np.int64)
        for fragment in work[index].layout.fragments:
            held = fragment.place.buffer
            if held in column:
                resident[column[held]] += fragment.box.numel
        chosen = np.lexsort((-resident, load))[0]
        load[chosen] += work[index].cost
        owners[index] = ranks[chosen]
    return owners
