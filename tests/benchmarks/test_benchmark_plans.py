"""The plans that `benchmarks/step_plan.py` prints, against all ranks' wires and the lower bounds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from models import Model, Weight
from peers import lower_bound, undivided_bound
from plans import Case, leaving, plan, plan_of, sent_by

from muonckpt.lab.forecasting.topologies import most_wires
from muonckpt.optimizer.planning.schedule import NOTE, Route, Stage

# Rows that do not divide, fused rows, experts that ranks hold whole (4 on 2 or 4 ranks) and experts that they cut.
ODD = Model(
    "odd",
    2
    * (
        (
            Weight("qkv", (40, 24), (24, 8, 8)),
            Weight("o", (10, 36)),
            Weight("two rows", (2, 24)),
            Weight("experts", (4, 20, 12)),
        ),
    ),
)


@pytest.mark.parametrize(("ranks", "ep"), [(2, 1), (2, 2), (4, 2), (8, 1), (8, 2), (8, 4)])
def test_what_is_on_the_wires_is_what_the_plan_says(ranks, ep):
    case = Case(ODD, ranks, ep)
    parts = [plan(case, rank) for rank in range(ranks)]
    schedule, specs, *_ = parts[0]
    sent = sent_by(schedule, specs)
    assert len({part.digest for part, *_ in parts}) == 1
    for rank, (part, *_) in enumerate(parts):
        found = leaving(part.stages, rank)
        assert 0 <= found - sent[rank] < 8 * 2 * len(part.stages) * ranks  # each rank's part ends at a multiple of 8
    for route in ("gather", "scatter"):
        for number in range(len(schedule.stages)):
            table = [getattr(part.stages[number], route) for part, *_ in parts]
            assert [[row.send_counts[to] for row in table] for to in range(ranks)] == [
                list(row.receive_counts) for row in table
            ]


@pytest.mark.parametrize(("ranks", "ep"), [(2, 1), (4, 2), (8, 1), (8, 4)])
def test_no_plan_is_below_the_bounds(ranks, ep):
    numbers = plan_of(Case(ODD, ranks, ep))
    bound = lower_bound(ODD.matrices, ranks, ep)
    notes = 2 * numbers.stages * NOTE * (ranks - 1)
    assert numbers.units == 2 * (3 + 1 + 1 + 4)
    assert sum(numbers.sent) / ranks - notes >= bound.sent
    assert max(numbers.flops) >= undivided_bound(ODD.matrices, ranks) >= bound.flops
    assert numbers.serial >= max(numbers.flops)
    assert sum(numbers.flops) == sum(m.copies * m.flops for layer in ODD.matrices for m in layer)
    assert numbers.peak > 0


def test_even_rows_are_sent_at_the_bound():
    """Whatever the owners: each gets all but its own share of a matrix, and returns it."""
    model = Model("even", (tuple(Weight(f"{n}", (16, 8)) for n in range(5)),))
    numbers = plan_of(Case(model, 4, 1))
    assert sum(numbers.sent) / 4 - 2 * numbers.stages * NOTE * 3 == lower_bound(model.matrices, 4).sent


def stage(*counts: int) -> Stage:
    """Sends and receives of the gather, then of the scatter, in bytes."""
    there, arrived, results, back = counts
    return Stage(Route((there,), (arrived,)), Route((results,), (back,)), ())


def test_peak_of_one_stage_is_its_fullest_exchange():
    assert most_wires([stage(10, 20, 40, 30)]) == 70
    assert most_wires([stage(30, 50, 10, 10)]) == 80
    assert most_wires([stage(1, 50, 60, 1)]) == 110  # what has arrived stays until the results are ready


def test_peak_of_stages_counts_the_next_gather_and_the_last_scatter():
    even = stage(1, 1, 1, 1)
    assert [most_wires([even] * count) for count in (1, 2, 3, 9)] == [2, 4, 6, 6]
