"""The exit code of every command on every state of a checkpoint and of a run, as the table of the guide has it."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.commands import called
from support.damages import flip_last_bit

from muonckpt import Series
from muonckpt.store.io import publish

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "reshard.md"

MAKER = """
import torch
from muonckpt.optimizer import Muon

def make():
    model = torch.nn.Linear(8, 4)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "algorithm": "adamw", "lr": 3e-4}]
    return model, Muon(groups, lr=0.02)
"""


def table() -> Iterator[tuple[str, str, int]]:
    """Yield each command of the table with a state and the code."""
    [rows] = re.findall(r"^\| command \| (.*?)\n\n", GUIDE.read_text(), re.M | re.S)
    header, _, *lines = rows.split("\n")
    states = [state.strip() for state in header.strip("| ").split("|")]
    for line in lines:
        commands, *codes = (cell.strip() for cell in line.strip("| ").split("|"))
        for command in re.findall("`(.*?)`", commands):
            yield from ((command, state, int(code)) for state, code in zip(states, codes, strict=True))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A run of three steps with one state, and what preflight asks.  Do not change."""
    place = tmp_path_factory.mktemp("saved")
    namespace: dict = {}
    exec(MAKER, namespace)
    model, optimizer = namespace["make"]()
    model.weight.grad, model.bias.grad = torch.ones(4, 8), torch.ones(4)
    optimizer.step()
    for step in (1, 2, 3):
        Series(place / "run", keep_last=3).save(step, {"model": model, "optimizer": optimizer})
    (place / "train.py").write_text(MAKER)
    return place


def make(state: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bring the newest step of a run into a state."""
    newest, opened = run / "step-00000003", os.open

    def meanwhile(path: object, *arguments: int, **options: int) -> int:
        handle = opened(path, *arguments, **options)
        if str(path).endswith(f"{newest.name}/muonckpt.json") and newest.exists():
            publish.remove(newest, ("muonckpt.json", ".metadata"))
        return handle

    def refused(path: object, *arguments: int, **options: int) -> int:
        if str(path).endswith(f"{newest.name}/__0_0.distcp"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *arguments, **options)

    if state == "damaged":
        os.truncate(newest / "__0_0.distcp", 100)
    elif state == "recorded as damaged":
        flip_last_bit(newest)
        assert called("verify", newest).returncode == 1
    elif state == "no checkpoint":
        for step in run.iterdir():
            shutil.rmtree(step)
        newest.with_name("notes").mkdir()
    elif state == "unreadable":
        monkeypatch.setattr(os, "open", refused)
    elif state == "removed meanwhile":
        monkeypatch.setattr(os, "open", meanwhile)


@pytest.mark.parametrize("state", sorted({state for _, state, _ in table()}))
def test_every_command_exits_as_the_table_says(state, saved, tmp_path, monkeypatch):
    wrong = []
    for number, (command, of_state, code) in enumerate(table()):
        if of_state != state:
            continue
        place = tmp_path / str(number)
        shutil.copytree(saved / "run", place / "run")
        shutil.copytree(saved / "run" / "step-00000003", place / "copy")
        places = {"STEP": place / "run" / "step-00000003", "RUN": place / "run", "COPY": place / "copy"}
        places |= {"NEW": place / "new", "PAGE": place / "page.html", "TRAIN": f"{saved / 'train.py'}:make"}
        with monkeypatch.context() as patch:
            make(state, place / "run", patch)
            done = called(*(places.get(word, word) for word in shlex.split(command)))
        if done.returncode != code:
            wrong.append(
                f"{command}: expected {code}, found {done.returncode}: {done.stdout[-300:]}{done.stderr[-300:]}"
            )
    assert not wrong, "\n".join(wrong)


def test_the_table_has_every_command_on_steps_and_runs():
    from muonckpt.cli.main import COMMANDS

    rows = {(command.split()[0], "RUN" in command) for command, _, _ in table()}
    assert rows == {(name, of_run) for name in COMMANDS if name != "lab" for of_run in (True, False)}
