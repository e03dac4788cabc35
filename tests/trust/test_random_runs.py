"""Random runs of everything together: chains of rewriting, and training that is killed and goes on elsewhere."""

from __future__ import annotations

import time

import pytest
import torch
from support import workers
from support.chains import came_home_otherwise
from support.elastic import trained, with_kills
from support.random_topologies import differing, drawn
from support.trials import SCALE, SEED, count, tally


def test_a_chain_through_every_layout_and_format_comes_home_bit_for_bit(tiny_checkpoint, tmp_path):
    with tally("chains of 20 hops") as row:
        for number in range(count(2, 60)):
            begun = time.monotonic()
            fault = came_home_otherwise(tiny_checkpoint, tmp_path / str(number), f"{SEED} {number}", number % 2 == 0)
            row.add(f"chain {number}", fault, time.monotonic() - begun)


def test_training_that_is_killed_and_goes_on_with_other_ranks_gives_the_same_bits(tmp_path):
    whole = workers.run(1, trained, str(tmp_path / "whole"), None)[0]
    with tally("elastic training, kills") as row:
        for number in range(count(1, 40)):
            seed, begun = f"{SEED} {number}", time.monotonic()
            found, told = with_kills(tmp_path / str(number), seed, kills=1 if SCALE == 0 else 5)
            same = len(found) == len(whole) and all(map(torch.equal, found, whole))
            row.add(seed, None if same else f"another run after {told}", time.monotonic() - begun)


@pytest.mark.skipif(SCALE == 0, reason="tests/optimizer/test_process_groups.py has some in the suite")
def test_random_topologies_give_the_bits_of_one_process_at_length():
    with tally("random topologies") as row:
        for number in range(count(0, 40)):
            world = 2 + number % 7
            topologies = [drawn(world, f"{SEED} {number} {each}") for each in range(5)]
            for ranks in zip(*workers.run(world, all_differing, topologies), strict=True):
                row.add(f"{world} ranks, {number}", next((where for each in ranks for where in each), None))


def all_differing(rank, world, topologies):
    return [differing(rank, topology) for topology in topologies]
