"""The exit code of every command on every state of a checkpoint and of a run, as the table of the guide has it."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import called
from support.damages import flip_last_bit

from muonckpt import Series
from muonckpt.store.io import publish

NEWEST = "step-00000003"

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


def lose(*names: str) -> Callable[[Path, pytest.MonkeyPatch], None]:
    """Return what removes files of the newest step."""

    def removed(run: Path, patch: pytest.MonkeyPatch) -> None:
        for name in names:
            (run / NEWEST / name).unlink()

    return removed


def cut(name: str) -> Callable[[Path, pytest.MonkeyPatch], None]:
    return lambda run, patch: os.truncate(run / NEWEST / name, 100)


def record_damage(run: Path, patch: pytest.MonkeyPatch) -> None:
    flip_last_bit(run / NEWEST)
    assert called("verify", run / NEWEST).returncode == 1


def refuse(below: str) -> Callable[[Path, pytest.MonkeyPatch], None]:
    """Return what forbids to open a file of the newest step, or to enter it."""

    def refused(run: Path, patch: pytest.MonkeyPatch) -> None:
        for call in ("open", "stat", "lstat", "listdir", "scandir"):
            patch.setattr(os, call, refusing(getattr(os, call), f"{run / NEWEST}{below}", call == "stat"))

    return refused


def loop(name: str) -> Callable[[Path, pytest.MonkeyPatch], None]:
    """Return what puts a link to itself in the place of a file of the newest step, or of the step."""

    def looped(run: Path, patch: pytest.MonkeyPatch) -> None:
        place = run / NEWEST / name
        place.rename(run.with_name("aside"))
        place.symlink_to(place)

    return looped


def refusing(call: Callable[..., Any], place: str, may_ask_of_itself: bool) -> Callable[..., Any]:
    def asked(path: object, *arguments: object, **options: object) -> object:
        is_itself = may_ask_of_itself and str(path) == place
        if f"{path}/".startswith(f"{place}/") and not is_itself:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return call(path, *arguments, **options)

    return asked


def remove_checkpoints(run: Path, patch: pytest.MonkeyPatch) -> None:
    for step in run.iterdir():
        shutil.rmtree(step)
    (run / "notes").mkdir()


def remove_meanwhile(run: Path, patch: pytest.MonkeyPatch) -> None:
    newest, opened = run / NEWEST, os.open

    def meanwhile(path: object, *arguments: int, **options: int) -> int:
        handle = opened(path, *arguments, **options)
        if str(path).endswith(f"{newest.name}/muonckpt.json") and newest.exists():
            publish.remove(newest, ("muonckpt.json", ".metadata"))
        return handle

    patch.setattr(os, "open", meanwhile)


MAKERS = {
    "whole": (lambda run, patch: None,),
    "`.metadata` lost or damaged": (lose(".metadata"), cut(".metadata")),
    "damaged": (cut("__0_0.distcp"), lose("__0_0.distcp"), cut("muonckpt.json"), lose("muonckpt.json", ".metadata")),
    "recorded as damaged": (record_damage,),
    "unreadable": (
        *(refuse(place) for place in ("/__0_0.distcp", "/muonckpt.json", "")),
        *(loop(name) for name in ("__0_0.distcp", "muonckpt.json", ".metadata", "")),
    ),
    "no checkpoint": (remove_checkpoints,),
    "removed meanwhile": (remove_meanwhile,),
}
"""The states of the table, each with the ways into it."""

WAYS = [(state, number) for state, makers in MAKERS.items() for number in range(len(makers))]


@pytest.mark.parametrize(("state", "way"), WAYS)
def test_every_command_exits_as_the_table_says(state, way, saved, tmp_path, monkeypatch):
    wrong = []
    for number, (command, of_state, code) in enumerate(table()):
        if of_state != state:
            continue
        place = tmp_path / str(number)
        shutil.copytree(saved / "run", place / "run")
        shutil.copytree(saved / "run" / NEWEST, place / "copy")
        places = {"STEP": place / "run" / NEWEST, "RUN": place / "run", "COPY": place / "copy"}
        places |= {"NEW": place / "new", "PAGE": place / "page.html", "TRAIN": f"{saved / 'train.py'}:make"}
        with monkeypatch.context() as patch:
            MAKERS[state][way](place / "run", patch)
            done = called(*(places.get(word, word) for word in shlex.split(command)))
        if done.returncode != code:
            wrong.append(
                f"{command}: expected {code}, found {done.returncode}: {done.stdout[-300:]}{done.stderr[-300:]}"
            )
    assert not wrong, "\n".join(wrong)


def test_the_table_has_every_state():
    assert [*MAKERS] == [*dict.fromkeys(state for _, state, _ in table())]


def test_the_table_has_every_command_on_steps_and_runs():
    from muonckpt.cli.main import COMMANDS

    rows = {(command.split()[0], "RUN" in command) for command, _, _ in table()}
    assert rows == {(name, of_run) for name in COMMANDS if name != "lab" for of_run in (True, False)}
