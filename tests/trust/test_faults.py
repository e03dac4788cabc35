"""Every system call of what changes the disk may fail, or be the last one before a kill or a loss of power."""

from __future__ import annotations

import json
import random
import shutil
from collections import defaultdict

import pytest
from support import interposed
from support.acts import Wrong, acts
from support.crash_states import History, laid_out, recorded, tree_of
from support.trials import SCALE, SEED, count, tally

pytestmark = pytest.mark.skipif(interposed.NO_COMPILER is not None, reason=interposed.NO_COMPILER or "")


IN_SUITE = ("save", "series", "reshard", "to safetensors")
"""`make trust` tries all acts."""


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    """The folder of the acts, and what came of the trials."""
    folder = tmp_path_factory.mktemp("faults")
    names = IN_SUITE if SCALE == 0 else ()
    lines = interposed.script("faulted.py", folder, count(5, 400), SEED, *names, timeout=24 * 3600).splitlines()
    return folder / "base", [json.loads(line) for line in lines]


def test_a_system_call_that_fails_or_is_the_last_one_loses_nothing(tried):
    by_act = defaultdict(list)
    for act, *trial in tried[1]:
        by_act[act].append(trial)
    for act, trials in by_act.items():
        with tally(f"system calls: {act}") as row:
            for what, fault, seconds, hung in trials:
                row.add(what, fault, seconds, hung)
    assert len(by_act) == (len(IN_SUITE) if SCALE == 0 else len(acts(tried[0])))


def test_after_a_loss_of_power_there_is_the_old_checkpoint_or_the_new_one(tried, tmp_path):
    base, _ = tried
    dice = random.Random(SEED)
    for act in acts(base):
        log = base / "logs" / act.name
        if not log.exists() or not log.stat().st_size:
            continue  # of several ranks, or nothing was changed
        here = tmp_path / "here"
        here.mkdir()
        act.before(here)
        before = tree_of(here)
        shutil.rmtree(here)
        history = History.of(before, recorded(log.read_bytes(), base / "here"))
        states = list(history.states(dice))
        chosen = dice.sample(states[1:], min(count(6, 400), len(states) - 1))
        with tally(f"loss of power: {act.name}") as row:
            for what, tree, done in [states[0], *chosen]:
                laid_out(tree, here)
                row.add(what, wrong(act, here, done))
                shutil.rmtree(here)


def wrong(act, here, done: bool) -> str | None:
    try:
        act.check(here, done)
    except Wrong as error:
        return str(error)
    except Exception as error:
        return f"afterwards: {type(error).__name__}: {error}"
    return None
