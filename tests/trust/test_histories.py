"""Histories of a run, each from one seed: kills at any call, power losses, failing calls, damage; and defects."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.forked import alone
from support.simulated import world
from support.simulated.histories import ROOT, drawn, fault_of, history, shrunk
from support.trials import SEED, count, tally

from muonckpt.checkpoint.async_saving import AsyncSave
from muonckpt.names.errors import UnavailableError
from muonckpt.names.version import VERSION
from muonckpt.runs import run_audit, step_folder
from muonckpt.runs.step_folder import DESCRIPTIONS, StepFolder
from muonckpt.store.io import new_file, publish
from muonckpt.store.verify.run import StepName
from muonckpt.store.verify.verification import Verification, look_at_files, record_verification

MOST = 2000
"""Histories within which a planted defect is found."""

PORTION = 300
"""Histories of one process."""


@contextmanager
def simulation() -> Iterator[None]:
    """Calls of the system go to the simulation: in a process without other threads, whose calls would go there, too."""
    with world.intercepted():
        yield
    shutil.rmtree(ROOT)


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
    seeds = [str(number) for number in range(10)]
    assert alone(digests, seeds, timeout=600) == alone(digests, seeds, timeout=600)


# --- defects put in on purpose ----------------------------------------------------------------------------------------


def unsynced_folders(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(publish, "sync_directory", lambda path: None)


def rename_before_the_data(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(new_file.Output, "__exit__", lambda output, *error: os.close(output._handle))


def removal_before_the_rename(patch: pytest.MonkeyPatch) -> None:
    new_name = StepFolder.new_name

    def removing(folder: StepFolder, step: int, replaceable: Callable[[StepName], bool]) -> StepName:
        name = new_name(folder, step, replaceable)
        for path in Path(str(folder.place)).glob("step-*"):
            publish.remove(path, DESCRIPTIONS)
        return name

    patch.setattr(StepFolder, "new_name", removing)


def record_before_the_check(patch: pytest.MonkeyPatch) -> None:
    verify_recorded = run_audit.verify_recorded

    def recording(path: Any, auditor: Any, folder: Any = None) -> Any:
        place = path if folder is None else folder
        files = look_at_files(place).digest
        record_verification(place, Verification(0.0, "whole", "", False, VERSION, files))
        return verify_recorded(path, auditor, folder)

    patch.setattr(run_audit, "verify_recorded", recording)


def existence_that_swallows_errors(patch: pytest.MonkeyPatch) -> None:
    entries_of = step_folder.entries_of

    def swallowing(folder: Any) -> Any:
        try:
            return entries_of(folder)
        except UnavailableError:
            return []

    patch.setattr(step_folder, "entries_of", swallowing)


def lock_left(patch: pytest.MonkeyPatch) -> None:
    end = publish.Staging.__exit__
    patch.setattr(
        publish.Staging, "__exit__", lambda staging, *args: end(staging, *args) if staging._has_moved else None
    )


def step_number_used_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepFolder, "new_name", lambda folder, step, replaceable: StepName(step))


def retention_of_the_only_whole_step(patch: pytest.MonkeyPatch) -> None:
    superfluous = step_folder.superfluous

    def oldest(names: Any, saved: StepName, *limits: Any) -> Any:
        return superfluous(names, saved, *limits) if len(list(names)) != 3 else [saved]

    patch.setattr(step_folder, "superfluous", oldest)


def async_error_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AsyncSave, "settle", lambda saving: saving.future.exception())


def temporary_folder_taken_for_a_step(patch: pytest.MonkeyPatch) -> None:
    begin = publish.Staging.__init__

    def visible(staging: Any, destination: Any, file: str = "") -> None:
        begin(staging, destination, file)
        if isinstance(staging.place, Path):
            staging.place = staging.place.rename(destination.with_name(f"{destination.name.partition('.')[0]}.99"))

    patch.setattr(publish.Staging, "__init__", visible)


@pytest.mark.parametrize(
    ("plant", "known"),
    [
        (unsynced_folders, 2),
        (rename_before_the_data, 2),
        (removal_before_the_rename, 3),
        (record_before_the_check, 187),
        (existence_that_swallows_errors, 1173),
        (lock_left, 276),
        (step_number_used_twice, 10),
        (retention_of_the_only_whole_step, 3),
        (async_error_dropped, 8),
        (temporary_folder_taken_for_a_step, 12),
    ],
)
def test_a_planted_defect_is_found(plant, known):
    """Within `MOST` histories; the first that has shown it is tried first, and all where it does not any more."""
    assert alone(found, plant, known, timeout=1800), f"{plant.__name__} is not found within {MOST} histories"


def found(plant: Callable[[pytest.MonkeyPatch], None], known: int) -> str | None:
    """The fault of a history that shows a defect."""
    with simulation(), pytest.MonkeyPatch.context() as patch:
        plant(patch)
        seeds = [f"planted {number}" for number in (known, *range(MOST))]
        return next(filter(None, (fault_of(seed, drawn(seed)) for seed in seeds)), None)
