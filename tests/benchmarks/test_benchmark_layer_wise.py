"""What `benchmarks/layer_wise.py` computes, against what layer-wise runs allocate and send; the promise on memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from support.workers import run

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import traffic
from layer_wise import ALL_REDUCED, LAYOUTS, UNPADDED, Case, Memory, Sent, memory, planned, step_traffic
from models import Model, Weight
from padding import busiest, padding, ranks_of

from muonckpt.layouts.buffers.algorithms import padded_nscost
from muonckpt.layouts.buffers.parameters import newton_schulz
from muonckpt.optimizer.planning.schedule import NOTE

CASE = Case(4, ((128, 128), (128, 128), (64, 128)), 4, 2 * 128 * 128)


def measured(rank: int, world: int) -> tuple[dict[str, list[Memory]], dict[str, list[Sent]]]:
    traffic.register()
    group = dist.new_group(list(range(world)), backend=traffic.BACKEND)
    return memory(CASE), step_traffic(CASE, group)


@pytest.fixture(scope="module")
def found() -> tuple[dict[str, list[Memory]], dict[str, list[Sent]]]:
    return run(CASE.world, measured)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unpadded_layouts_take_no_more_than_parameters_and_gradients(layout, found):
    """No upper bound for padded ones: gloo gives back the scratch memory of a reduce-scatter where nobody measures."""
    for each in found[0][layout]:
        assert each.allocated >= each.logical + each.padding
        assert (each.padding == 0 and each.allocated <= 1.01 * each.logical) == (layout in UNPADDED)


@pytest.mark.parametrize("layout", [*LAYOUTS, ALL_REDUCED])
def test_what_a_step_sends_is_what_follows_from_the_buffers(layout, found):
    """And which parameters have gradients, with a note and its complement; and a note when
    owners are done."""
    ranks = found[1][layout]
    flags = CASE.layers * (len(CASE.shapes) + 1) + 2 * NOTE
    told = 2 * (CASE.world - 1) / CASE.world * flags + (CASE.world - 1) * NOTE
    assert sum(each.bytes for each in ranks) / len(ranks) == pytest.approx(ranks[0].expected + told, rel=1e-12)


def test_the_tables_are_of_the_layouts_that_they_name():
    """Experts on fewer ranks, and a layer that does not come out even."""
    layer = (Weight("o", (64, 64)), Weight("up", (160, 64)), Weight("experts.up", (16, 32, 64)))
    [each] = planned([lambda: Model("small", 3 * (layer,))], [16])
    assert len(each.parameters) == 3 * (2 + 2) and {p.expert for p in each.parameters} == {True, False}
    for layout in UNPADDED:
        assert each.over_logical(layout) == 1
        assert each.busiest(layout) >= 1
    theirs = padded_nscost(each.parameters, ranks_of(16), 40_000_000)
    assert each.over_logical("padded-nscost") == 1 + padding(each.parameters, theirs) > 1
    assert each.busiest("padded-nscost") == busiest(each.parameters, ranks_of(16), theirs, newton_schulz)
