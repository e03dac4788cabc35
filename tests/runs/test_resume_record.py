"""A run keeps a record of each resume, in a folder or a store; a damaged or refused one costs no restore."""

from __future__ import annotations

import os
import uuid
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.commands import called
from support.trees import tree

import muonckpt
from muonckpt.runs.resumes import add_resume

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_restores_at_one_moment_keep_a_record_and_a_proof_each(tmp_path):
    """One goes on from something else, which no proof of another one hides."""
    muonckpt.Series(tmp_path).save(1, {"x": torch.ones(2)})
    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(lambda number: add_resume(tmp_path, 1, str(number), 1, number), range(40)))
    states = [{"x": torch.zeros(2)} for _ in range(2)]
    both = [muonckpt.Series(tmp_path).restore(state) for state in states]
    states[1]["x"][0] = 7.0
    for restored, state in zip(both, states, strict=True):
        restored.compare(state)
    history = muonckpt.look_at_run(tmp_path)
    assert len({*names}) == 40 and len(history.resume_times) == len(history.resumes) == 42
    assert {resume.ranks for resume in history.resumes[:40]} == {*range(40)}
    assert [resume.proof["equal"] for resume in history.resumes[40:]] == [True, False]
    shown = called("inspect", str(tmp_path)).stdout
    assert "42 times; the last 10:" in shown and shown.count("from step 1") == 10


def link_elsewhere(path: Path) -> None:
    (path.parent / "elsewhere").mkdir()
    path.symlink_to(path.parent / "elsewhere")


def link_to_nothing(path: Path) -> None:
    path.symlink_to(path.parent / "elsewhere")


@pytest.mark.parametrize("make", [os.mkfifo, Path.touch, link_elsewhere, link_to_nothing])
def test_a_record_that_is_no_folder_is_told_in_a_sentence_and_costs_no_restore(make, tmp_path):
    muonckpt.Series(tmp_path / "run").save(1, {"x": torch.ones(2)})
    make(tmp_path / "run" / "resumes")
    before = tree(tmp_path)
    x = torch.zeros(2)
    with pytest.warns(RuntimeWarning, match="the resume cannot be recorded in"):
        restored = muonckpt.Series(tmp_path / "run").restore({"x": x})
    assert restored.step == 1 and torch.equal(x, torch.ones(2)) and tree(tmp_path) == before
    shown = called("inspect", str(tmp_path / "run"))
    assert shown.returncode == 0 and "resumes cannot be read: " in shown.stdout
    assert muonckpt.look_at_run(tmp_path / "run").resumes == ()


def test_a_record_that_is_damaged_is_told_and_goes_on(tmp_path):
    """What a killed process has torn does not take another resume with it; no file breaks the commands."""
    muonckpt.Series(tmp_path).save(1, {"x": torch.ones(2)})
    muonckpt.Series(tmp_path).restore({"x": torch.zeros(2)})
    [record] = (tmp_path / "resumes").iterdir()
    whole = record.read_bytes()
    bad = [b"", whole[:-9], whole.replace(b'"step": 1', b'"step": 1e999'), b"\xff\x00\n", b"[" * 9999]
    for number, content in enumerate(bad):
        (tmp_path / "resumes" / f"1.{number:06}-{number:012x}.json").write_bytes(content)
    os.truncate(tmp_path / "resumes" / "1.000000-000000000000.json", 1 << 40)
    (tmp_path / "resumes" / "1.900000-000000000009.json").symlink_to(record)
    (tmp_path / "resumes" / "notes.json").write_text("{}")
    restored = muonckpt.Series(tmp_path).restore({"x": torch.zeros(2)})
    restored.compare({"x": torch.ones(2)})
    history = muonckpt.look_at_run(tmp_path)
    assert [(one.attempt, one.verdict) for one in history.resumes] == [
        (len(bad) + 2, "not checked"),
        (len(bad) + 3, "proved: 1 tensor as they were saved"),
    ]
    assert len(history.resume_times) == len(bad) + 3
    assert history.unread_resumes == f"{len(bad) + 1} records in resumes cannot be read"
    assert called("inspect", str(tmp_path)).returncode == 0


def test_a_run_in_a_store_keeps_its_resumes_and_one_that_cannot_goes_on(tmp_path, monkeypatch):
    url = f"memory://{uuid.uuid4().hex}"
    saved_state = {"x": torch.arange(4.0)}
    muonckpt.Series(url).save(1, saved_state)
    for _ in range(2):
        restored = muonckpt.Series(url).restore({"x": torch.zeros(4)})
        assert restored.compare(saved_state).equal
    assert [one.verdict.partition(":")[0] for one in muonckpt.look_at_run(url).resumes] == ["proved", "proved"]
    muonckpt.Series(tmp_path).save(1, saved_state)
    (tmp_path / "resumes").touch()
    with pytest.warns(RuntimeWarning, match="the resume cannot be recorded in .*; training goes on"):
        restored = muonckpt.Series(tmp_path).restore({"x": torch.zeros(4)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert restored.compare(saved_state).equal
