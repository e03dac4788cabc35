"""Random histories of runs that are killed and go on elsewhere, against an oracle that knows their branches."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import branches, sweep
from support.workers import run


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory, where there is such: copies are there, and disks that sync take most of the time."""
    shared = Path("/dev/shm")
    place = tempfile.mkdtemp(prefix="branches-", dir=shared if os.access(shared, os.W_OK) else None)
    yield Path(place)
    shutil.rmtree(place, ignore_errors=True)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("part", sweep(range(32), 1))
def test_one_process_restores_the_newest_whole_state_of_its_branch_and_tells_each_step_back(part, folder):
    outcomes = branches.play(0, 1, folder, range(60 * part, 60 * (part + 1)), nodes=1 + part % 3)
    assert min(outcomes[kind] for kind in ("memory", "disk", "None", "no whole one")) > 0, "all of it was tried"


RANKS = [(2, range(8)), (2, range(8, 300)), (3, range(300, 500))]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("world", "seeds"), sweep(RANKS, RANKS[0]))
def test_ranks_on_several_nodes_do_so_together(world, seeds, folder):
    """Some of them see other nodes than those that have made a copy, and files are damaged on one node of two."""
    ranks = run(world, branches.play, folder, seeds, 3)
    assert all(outcomes == ranks[0] for outcomes in ranks) and ranks[0]["memory"] > 2
