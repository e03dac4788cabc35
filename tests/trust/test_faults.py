"""Every system call of what changes the disk may fail, or be the last one before a kill or a loss of power."""

from __future__ import annotations

import json
import random
import shutil
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import interposed
from support.acts import Wrong, acts, in_new_folders
from support.simulated import disk as simulated_disk
from support.simulated.disk import Disk
from support.trials import SCALE, SEED, count, tally

pytestmark = pytest.mark.skipif(interposed.NO_COMPILER is not None, reason=interposed.NO_COMPILER or "")


IN_SUITE = ("save", "series", "reshard", "to safetensors", *(act.name for act in in_new_folders(Path())))
"""`make trust` tries all acts."""


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    """The folder of the acts, and what came of the trials."""
    folder = tmp_path_factory.mktemp("faults")
    names = IN_SUITE if SCALE == 0 else ()
    lines = interposed.script("faulted.py", folder, count(1, 400), SEED, *names, timeout=24 * 3600).splitlines()
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


# --- what a disk may hold after a loss of power: recorded calls, made once more on one that forgets -------------------


@dataclass(frozen=True, slots=True)
class Call:
    """A call that changed the disk; paths are relative to the folder."""

    name: str
    path: str
    other: str
    number: int
    data: bytes


def recorded(log: bytes, folder: Path) -> list[Call]:
    """The calls of a log of `system_calls.c`."""
    calls, at = [], 0
    while at < len(log):
        end = log.index(b"\n", at)
        name, path, other, number, length = log[at:end].decode().split("\t")
        at = end + 1 + int(length)
        calls.append(Call(name, *(_below(each, folder) for each in (path, other)), int(number), log[end + 1 : at]))
        at += 1
    return calls


def _below(path: str, folder: Path) -> str:
    return path.removeprefix(str(folder)).lstrip("/").removesuffix(" (deleted)")


def make_again(disk: Disk, call: Call) -> None:
    path, other = Path(disk.root, call.path), Path(disk.root, call.other)
    node = disk.node(str(path))
    match call.name:
        case "mkdir":
            path.mkdir()
            disk.renamed(None, None, str(path))
        case "open" if node is None:
            path.touch()
            disk.renamed(None, None, str(path))
        case "unlink":
            path.rmdir() if path.is_dir() else path.unlink()
            disk.renamed(node, str(path), None)
        case "rename":
            path.rename(other)
            disk.renamed(node, str(path), str(other))
        case "link":
            other.hardlink_to(path)
            disk.renamed(node, None, str(other))
        case "write":
            disk.wrote(node, call.number, call.data)
        case "cut" | "extend":
            disk.resized(node, call.number)
        case "open":
            if call.number:  # O_TRUNC
                disk.resized(node, 0)
        case "sync":
            disk.synced(node)
        case _:
            raise ValueError(f"unknown call {call}")


def calls_that_make(folder: Path) -> Iterator[Call]:
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        yield Call("mkdir" if path.is_dir() else "open", name, "", 0, b"")
        if path.is_file():
            yield Call("write", name, "", 0, path.read_bytes())


def test_after_a_loss_of_power_there_is_the_old_checkpoint_or_the_new_one(tried, tmp_path, monkeypatch):
    """At any of its calls, or after all of them: what a caller has been told is there stays."""
    monkeypatch.setattr(simulated_disk, "PAGE", 64)
    base, _ = tried
    dice, here = random.Random(SEED), tmp_path / "here"
    for act in acts(base):
        log = base / "logs" / act.name
        if not log.exists() or not log.stat().st_size:
            continue  # of several ranks, or nothing was changed
        here.mkdir()
        act.before(here)
        before, calls = [*calls_that_make(here)], recorded(log.read_bytes(), base / "here")
        shutil.rmtree(here)
        stops = [dice.randrange(len(calls)) for _ in range(count(6, 400))]
        with tally(f"loss of power: {act.name}") as row:
            for stop in stops + [len(calls)] * count(3, 50):
                disk = Disk(str(here))
                for call in before:
                    make_again(disk, call)
                for change in disk.log:
                    change.is_synced = True
                for call in calls[:stop]:
                    make_again(disk, call)
                disk.lose_power(dice)
                row.add(f"after {stop} of {len(calls)} calls", wrong(act, here, stop == len(calls)))
                shutil.rmtree(here)


def wrong(act, here, done: bool) -> str | None:
    try:
        act.check(here, done)
    except Wrong as error:
        return str(error)
    except Exception as error:
        return f"afterwards: {type(error).__name__}: {error}"
    return None
