"""Histories of a run, each from one seed: kills at any call, power losses, failing calls, damage; and defects."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.forked import alone
from support.simulated.calls import simulation
from support.simulated.histories import drawn, fault_of, history, shrunk
from support.trials import SEED, count, tally

from muonckpt.checkpoint.async_saving import AsyncSave
from muonckpt.names.errors import UnavailableError
from muonckpt.names.version import VERSION
from muonckpt.runs import run_audit, step_folder
from muonckpt.runs.step_folder import DESCRIPTIONS, StepFolder
from muonckpt.store.io import new_file, publish
from muonckpt.store.verify.step_names import StepName
from muonckpt.store.verify.verification import Verification, look_at_files, record_verification

MOST = 2000
"""Histories within which a planted defect is found."""

PORTION = 300
"""Histories of one process: alone, as calls of other threads would go to the simulation, too."""


def tried(seeds: list[str]) -> list[str | None]:
    """What is wrong with each history, with the fewest events that show it."""
    faults = []
    with simulation():
        for seed in seeds:
            events = drawn(seed)
            fault = fault_of(seed, events)
            faults.append(fault and f"{fault}\n" + "\n".join(map(str, shrunk(seed, events))))
    return faults


def test_no_history_loses_or_mixes_anything():
    seeds = [f"{SEED} {number}" for number in range(count(300, 10_000))]
    with tally("histories from one seed") as row:
        for number in range(0, len(seeds), PORTION):
            portion = seeds[number : number + PORTION]
            for seed, fault in zip(portion, alone(tried, portion, timeout=1800), strict=True):
                row.add(seed, fault)


def digests(seeds: list[str]) -> list[str]:
    with simulation():
        return [history(seed, drawn(seed)) for seed in seeds]


def test_one_seed_is_one_history():
    """Whatever process runs it, after which others, and in which folder, whose name one of these cuts in a write."""
    seeds = ["0 106", *map(str, range(9))]
    assert alone(digests, seeds, timeout=600) == alone(digests, seeds[::-1], timeout=600)[::-1]


# --- defects put in on purpose ----------------------------------------------------------------------------------------

DEFECTS: dict[str, tuple[Any, str, Callable[..., Any], int]] = {}


def defect(owner: Any, name: str, known: int) -> Callable[..., Any]:
    """Have a function stand in for another, which it gets; ``known`` is the number of the first history to show it."""

    def plan(wrong: Callable[..., Any]) -> Callable[..., Any]:
        DEFECTS[wrong.__name__] = owner, name, wrong, known
        return wrong

    return plan


@defect(publish, "sync_directory", 2)
def unsynced_folders(real, path):
    pass


@defect(new_file.Output, "__exit__", 2)
def rename_before_the_data(real, output, *error):
    os.close(output._handle)


@defect(StepFolder, "new_name", 3)
def removal_before_the_rename(real, folder, *args):
    name = real(folder, *args)
    for path in Path(str(folder.place)).glob("step-*"):
        publish.remove(path, DESCRIPTIONS)
    return name


@defect(run_audit, "verify_recorded", 187)
def record_before_the_check(real, path, auditor, folder=None):
    place = path if folder is None else folder
    record_verification(place, Verification(0.0, "whole", "", False, VERSION, look_at_files(place).digest))
    return real(path, auditor, folder)


@defect(step_folder, "entries_of", 1173)
def existence_that_swallows_errors(real, folder):
    try:
        return real(folder)
    except UnavailableError:
        return []


@defect(publish.Staging, "__exit__", 276)
def lock_left(real, staging, *args):
    if staging._has_moved:
        real(staging, *args)


@defect(StepFolder, "new_name", 10)
def step_number_used_twice(real, folder, step, *args):
    return StepName(step), {}


@defect(step_folder, "superfluous", 3)
def retention_of_the_only_whole_step(real, names, saved, *limits):
    return real(names, saved, *limits) if len(list(names)) != 3 else [saved]


@defect(AsyncSave, "settle", 8)
def async_error_dropped(real, saving):
    return saving.future.exception()


@defect(publish.Staging, "__init__", 12)
def temporary_folder_taken_for_a_step(real, staging, destination, file=""):
    real(staging, destination, file)
    if isinstance(staging.place, Path):
        staging.place = staging.place.rename(destination.with_name(f"{destination.name.partition('.')[0]}.99"))


@pytest.mark.parametrize("planted", DEFECTS)
def test_a_planted_defect_is_found(planted):
    """Within `MOST` histories; the first that has shown it is tried first, and all where it does not any more."""
    assert alone(found, planted, timeout=1800), f"{planted} is not found within {MOST} histories"


def found(planted: str) -> str | None:
    """The fault of a history that shows a defect."""
    owner, name, wrong, known = DEFECTS[planted]
    with simulation(), pytest.MonkeyPatch.context() as patch:
        real = getattr(owner, name)
        patch.setattr(owner, name, lambda *args: wrong(real, *args))
        seeds = [f"planted {number}" for number in (known, *range(MOST))]
        return next(filter(None, (fault_of(seed, drawn(seed)) for seed in seeds)), None)
