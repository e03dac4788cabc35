"""The folder of a run: which steps it has, of whatever program, which are whole, and which to resume from."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

import pytest
import torch
from support.golden import golden
from support.resharded import reshard
from torch.distributed.checkpoint.state_dict import get_state_dict

import muonckpt
from muonckpt import SourceError
from muonckpt.converters.look.run_history import history_of, look_at_run, overview_of_run
from muonckpt.store.io.location import location
from muonckpt.store.verify.run import run_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TITAN = "titan_fsdp4/ckpt"


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Path:
    """Three steps of a series, each another learning rate.  Do not change."""
    path = tmp_path_factory.mktemp("series") / "run"
    series = muonckpt.Series(path)
    for step in (10, 20, 30):
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1 / step)
        (model(torch.full((4,), float(step))).sum() * step).backward()
        optimizer.step()
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        series.save(step, state)
    return path


@pytest.fixture
def run(ours, tmp_path) -> Path:
    shutil.copytree(ours, tmp_path / "run")
    return tmp_path / "run"


def states(path) -> dict[str, str]:
    return {step.name: step.state for step in look_at_run(path).steps}


@pytest.mark.parametrize(
    "names",
    [
        ("step-5", "step-10", "step-100"),
        ("checkpoint-5", "checkpoint-10", "checkpoint-100"),
        ("iter_0000005", "iter_0000010", "iter_0000100"),
        ("global_step5", "global_step10", "global_step100"),
        ("epoch=0-step=5.ckpt", "epoch=0-step=10.ckpt", "epoch=1-step=100.ckpt"),
        ("5", "10", "100"),
    ],
)
def test_steps_of_any_program_are_sorted_by_their_number(names, tmp_path):
    for name in names:
        shutil.copytree(golden(TITAN), tmp_path / name)
    (tmp_path / "runs").mkdir()
    (tmp_path / "config.json").write_text("{}")
    run = run_of(tmp_path)
    assert [(step.name, step.step, step.state) for step in run.steps] == [
        (name, number, "whole") for name, number in zip(names, (5, 10, 100), strict=True)
    ]
    assert run.newest_whole.name == names[-1]


def test_a_checkpoint_is_no_run_and_neither_is_an_empty_folder(ours, tmp_path):
    assert run_of(ours / "step-00000010") is None
    assert run_of(golden(TITAN)) is None
    assert run_of(tmp_path) is None
    (tmp_path / "step-3").mkdir()
    assert run_of(tmp_path) is None


def test_folders_of_one_checkpoint_side_by_side_are_no_steps(tmp_path):
    """As accelerate saves them."""
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        shutil.copytree(golden(TITAN), tmp_path / name)
    assert run_of(tmp_path) is None


def test_second_attempts_at_several_steps_are_of_one_run(ours, tmp_path):
    """Their names end with the same number, and what stands before it differs."""
    names = ("step-00000010", "step-00000010.2", "step-00000020.2", "step-00000030.2")
    for name in names:
        shutil.copytree(ours / name[:13], tmp_path / name)
    found = run_of(location(tmp_path, SourceError))
    assert found is not None and [(step.name, step.state) for step in found.steps] == [
        (name, "whole") for name in names
    ]


def test_a_folder_that_holds_no_checkpoint_says_so(tmp_path):
    with pytest.raises(SourceError, match="folders that end with the number of a step"):
        look_at_run(tmp_path)


def test_damage_and_half_written_steps_are_told_from_whole_ones(run):
    (run / "step-00000030" / "__0_0.distcp").unlink()
    for half in (run / ".step-00000040.0123456789ab.tmp", run / "step-00000050"):
        half.mkdir()
        (half / "__0_0.distcp").write_bytes(b"half")
    (run / "logs-2026").mkdir()  # no step: nothing in this run is called so
    history = look_at_run(run)
    assert {step.name: step.state for step in history.steps} == {
        "step-00000010": "whole",
        "step-00000020": "whole",
        "step-00000030": "faulty",
        "step-00000050": "faulty",  # what has its last name was published whole
    }
    assert history.steps[3].fault == "it cannot be opened: expected .metadata beside __0_0.distcp, found none"
    assert "rank 0's file __0_0.distcp is missing" in history.steps[2].fault
    assert history.newest_whole.name == "step-00000020"


def test_a_format_that_is_not_read_is_not_called_damaged(tmp_path):
    """As DeepSpeed saves tensor-parallel models."""
    step = tmp_path / "global_step100"
    step.mkdir()
    (step / "mp_rank_01_model_states.pt").write_bytes(b"x")
    (tmp_path / "latest").write_text("global_step100")
    history = look_at_run(tmp_path)
    assert [(one.state, one.name) for one in history.steps] == [("unread", "global_step100")]
    assert "ds_to_universal.py" in history.steps[0].fault


def test_a_step_whose_checkpoint_lies_one_folder_below_is_found(tmp_path):
    """As verl saves."""
    for step in (10, 20):
        shutil.copytree(golden(TITAN), tmp_path / f"global_step_{step}" / "actor")
    newest = run_of(tmp_path).newest_whole
    assert (newest.step, newest.path) == (20, tmp_path / "global_step_20" / "actor")


@pytest.mark.parametrize(("file", "text"), [("latest", "step-00000030"), ("latest_checkpointed_iteration.txt", "30\n")])
def test_what_the_program_would_resume_from_is_compared_with_what_is_whole(file, text, run):
    (run / file).write_text(text)
    assert dict(overview_of_run(look_at_run(run)))["latest"] == f"the file {file} says {text.strip()}"
    (run / "step-00000030" / "__0_0.distcp").unlink()
    assert "which is faulty" in dict(overview_of_run(look_at_run(run)))["latest"]
    shutil.rmtree(run / "step-00000030")
    assert "which is not here" in dict(overview_of_run(look_at_run(run)))["latest"]


def test_changes_between_steps_are_named(run):
    [first, second] = look_at_run(run).changes
    assert (first.since, first.name) == ("step-00000010", "step-00000020")
    assert first.options == (("lr", 0.1, 0.05, 2),)
    assert second.lines == ("lr 0.05 -> 0.0333333 (2 parameters)",)
    assert first.moved["weights"] == (2, 0, 0)
    assert not (first.added or first.removed or first.reshaped)


def test_other_shapes_and_worlds_are_named(run, tiny_checkpoint, tmp_path):
    reshard(tiny_checkpoint, run / "step-00000040", 3)
    change = look_at_run(run).changes[-1]
    assert change.ranks == (1, 3)
    assert "ranks 1 -> 3" in change.lines
    assert change.added and change.removed


def test_tensors_that_stayed_the_same_are_named(run):
    shutil.copytree(run / "step-00000030", run / "step-00000040")
    change = look_at_run(run).changes[-1]
    assert change.moved["weights"] == (0, 2, 0)
    assert "2 of 2 tensors of weights did not change: frozen, without gradients, or stale" in change.lines


def test_a_run_in_a_store_is_looked_at_alike(run):
    place = location(f"memory://{uuid.uuid4().hex}/run")
    place.fs.put(str(run), place.path, recursive=True)
    assert states(str(place)) == states(run)
    place.fs.rm_file(f"{place.path}/step-00000030/__0_0.distcp")
    history = history_of(place)
    assert [step.state for step in history.steps] == ["whole", "whole", "faulty"]
    assert all(step.saved is not None and step.bytes for step in history.steps)
