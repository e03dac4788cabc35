"""A run that is watched: what is read of it, how far it has moved, and what it survives."""

from __future__ import annotations

import math
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.resharded import reshard
from torch.distributed.checkpoint.state_dict import get_state_dict

import muonckpt
from muonckpt import RunWatch, SourceError
from muonckpt.optimizer import Muon
from muonckpt.store.io.pace import Pace

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Four steps of training.  Do not change."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("watched") / "run"
    model = torch.nn.Sequential(torch.nn.Linear(96, 80, bias=False), torch.nn.Linear(80, 64, bias=False))
    optimizer = Muon(list(model.parameters()), lr=0.02)
    series = muonckpt.Series(path, keep_last=9)
    for step in (1, 2, 3, 4):
        model(torch.randn(8, 96)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        series.save(step, dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)))
    return path


@pytest.fixture
def run(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def moved_away(run: Path, step: int) -> Path:
    """Take a step out of a run, to be saved later."""
    return (run / f"step-{step:08}").rename(run.parent / f"later-{step}")


def back(run: Path, later: Path) -> None:
    later.rename(run / f"step-{int(later.name.removeprefix('later-')):08}")


def exact(before: Path, after: Path, part: str) -> float:
    """The relative change of all tensors whose keys have this part."""
    tensors = [t.statistics for t in muonckpt.diff(before, after).tensors if part in t.key]
    return math.sqrt(sum(t.norm_change**2 for t in tensors) / sum(t.norm_a**2 for t in tensors))


class Counting(Pace):
    """Counts what is read, and never waits."""

    def __init__(self) -> None:
        super().__init__(1, lambda: 0.0, lambda seconds: None)
        self.bytes = 0

    def __call__(self, count: int) -> None:
        self.bytes += count


def test_drift_is_that_of_a_comparison_of_all_elements(run):
    steps = RunWatch(run, first=None).look().steps
    assert [step.movement.drift for step in steps[:1]] == [{}]
    for before, after in pairwise(steps):
        for role, part in (("weights", "model."), ("momentum", "momentum_buffer")):
            expected = exact(before.step.path, after.step.path, part)
            assert after.movement.drift[role] == pytest.approx(expected, rel=0.15)
            assert expected > 0


def test_norms_are_exact(run):
    step = RunWatch(run).look().steps[-1]
    found = muonckpt.stats(step.step.path, spectra=False)
    norm = math.hypot(*(t.figures.norm for t in found.tensors if t.role == "momentum"))
    assert step.movement.norms["momentum"] == pytest.approx(norm, rel=1e-12)


def test_every_tensor_is_read_once_however_often_the_run_is_looked_at(run):
    later = moved_away(run, 4)
    pace = Counting()
    watch = RunWatch(run, pace=pace)
    first = watch.look()
    assert [step.movement is not None for step in first.steps] == [False, True, True]
    total = sum(step.movement.read for step in first.steps if step.movement)
    small = pace.bytes - total
    assert small >= 0
    assert watch.look().steps == first.steps
    assert pace.bytes == total + small
    back(run, later)
    own = watch.look().steps[-1]
    assert own.movement.read == total // 2
    assert own.movement.drift["weights"] > 0
    assert pace.bytes - total - small <= own.movement.read + small


def test_a_step_that_did_not_move_is_not_read(run):
    pace = Counting()
    watch = RunWatch(run, pace=pace)
    stored = watch.look().steps[-1].movement.read
    before = pace.bytes
    shutil.copytree(run / "step-00000004", run / "step-00000005")
    own = watch.look().steps[-1].movement
    assert (own.read, own.drift) == (0, {"weights": 0.0, "momentum": 0.0})
    assert pace.bytes - before < stored / 2  # hyper-parameters and counters


def test_a_step_on_another_mesh_drifts_by_what_its_elements_say(run):
    watch = RunWatch(run, first=None)
    expected = watch.look().steps[-1].movement
    shutil.move(run / "step-00000004", run.parent / "source")
    reshard(run.parent / "source", run / "step-00000004", 3)
    found = RunWatch(run, first=None).look().steps[-1].movement
    assert found.drift == pytest.approx(expected.drift, rel=1e-9)


def test_half_written_pruned_and_damaged_steps_are_survived(run):
    watch = RunWatch(run)
    later = moved_away(run, 4)
    half = run / "step-00000004"
    half.mkdir()
    shutil.copy(later / "__0_0.distcp", half)
    assert watch.look().steps[-1].step.state == "incomplete"
    shutil.copytree(later, half, dirs_exist_ok=True)
    assert watch.look().steps[-1].step.state == "whole"
    shutil.rmtree(run / "step-00000003")
    seen = watch.look()
    assert [step.step.step for step in seen.steps] == [1, 2, 4]
    assert seen.steps[-1].movement is not None


def test_reading_finds_what_names_and_sizes_do_not(run):
    step = run / "step-00000004"
    payload = next(t for t in muonckpt.open(step).outline.tensors if "momentum" in t.key).chunks[0].payload
    raw = bytearray((step / payload.file).read_bytes())
    raw[payload.offset] ^= 1
    (step / payload.file).write_bytes(raw)
    seen = RunWatch(run).look()
    assert seen.steps[-1].step.state == "damaged"
    assert "is damaged: digest" in seen.steps[-1].step.fault
    assert seen.run.newest_whole.name == "step-00000003"


def test_a_folder_that_vanishes_is_an_error_and_may_come_back(run):
    watch = RunWatch(run)
    first = watch.look()
    away = run.rename(run.parent / "away")
    with pytest.raises(SourceError, match="cannot read"):
        watch.look()
    away.rename(run)
    assert watch.look().steps == first.steps


def test_a_folder_without_a_checkpoint_yet_is_watched(tmp_path):
    seen = RunWatch(tmp_path).look()
    assert seen.steps == ()
    assert seen.free > 0


def test_columns_have_an_entry_for_each_step(run):
    (run / "step-00000005").mkdir()
    columns = muonckpt.run_columns(run)
    assert columns["step"] == [1, 2, 3, 4, 5]
    assert columns["state"] == ["whole"] * 4 + ["incomplete"]
    assert {len(column) for column in columns.values()} == {5}
    assert [drift is None for drift in columns["drift_weights"]] == [True, False, False, False, True]
    assert all(norm > 0 for norm in columns["norm_momentum"][:4])
    assert muonckpt.run_columns(run, read=False)["norm_momentum"] == [None] * 5
