"""Ranks that do not see what the first one sees, or are slower than the process group waits, are told apart."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.failing import raised
from support.workers import run
from torch import nn
from torch.distributed.fsdp import fully_shard

import muonckpt

HERE = "/proc/self/cwd"
"""A path that is the working directory of whoever asks: ranks see two folders under one name, as local disks are."""


def sharded() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False)
    fully_shard(model)
    return {"model": model.state_dict()}


CALLS: dict[str, Callable[[dict[str, Any]], object]] = {
    "save": lambda state: muonckpt.save(state, f"{HERE}/new"),
    "async_save": lambda state: muonckpt.async_save(state, f"{HERE}/later").result(),
    "load": lambda state: muonckpt.load(state, f"{HERE}/run/step-00000002"),
    "restore": lambda state: muonckpt.Series(f"{HERE}/run").restore(state),
    "Series.save": lambda state: muonckpt.Series(f"{HERE}/run").save(3, state),
    "Series.export": lambda state: muonckpt.Series(f"{HERE}/run").export(2),
}


def apart(rank: int, world: int, root: str, lost: str) -> dict[str, str]:
    """Save two steps where both ranks see them, then call where the second rank sees other files."""
    former, state = Path.cwd(), sharded()
    os.chdir(f"{root}/0")
    try:
        with muonckpt.Series(f"{HERE}/run") as series:
            series.save(1, state)
            series.save(2, state)
        if rank == 1 and lost == "its folder":
            os.chdir(Path(root, "1"))
        elif rank == 1:
            shutil.copytree(f"{root}/0/run", f"{root}/1/run")
            for step in (1, 2):
                Path(root, "1", "run", f"step-0000000{step}", "__1_0.distcp").unlink()
            os.chdir(Path(root, "1"))
        dist.barrier()
        names = CALLS if lost == "its folder" else ("load", "restore")
        told = {name: raised(lambda call=CALLS[name]: call(sharded())) for name in names}
        dist.barrier()
        return told
    finally:
        os.chdir(former)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lost", ["its folder", "its file"])
def test_a_rank_that_does_not_see_a_folder_or_a_file_is_named_and_no_step_is_given_up(lost, tmp_path):
    for rank in "01":
        (tmp_path / rank).mkdir()
    first, second = run(2, apart, str(tmp_path), lost)
    assert first == second
    for name, told in first.items():
        kind, _, text = told.partition(": ")
        assert text.startswith("rank 1 does not see ") and "give a path that all nodes mount alike" in text, name
        assert kind in ("SourceError", "UnseenError", "DestinationError") and "Errno" not in text
    names = sorted(path.name for path in (tmp_path / "0").rglob("*") if "tmp" in path.name or path.name == "new")
    assert names == []


def lose(rank: int, world: int, folder: str) -> tuple[str, int]:
    with muonckpt.Series(folder) as series:
        state = sharded()
        series.save(1, state)
        series.save(2, state)
        if rank == 0:
            Path(folder, "step-00000002", "__1_0.distcp").unlink()
        dist.barrier()
        return raised(lambda: muonckpt.load(state, f"{folder}/step-00000002")), series.restore(state).step


@pytest.mark.filterwarnings("ignore")
def test_a_file_that_no_rank_sees_is_lost(tmp_path):
    for told, step in run(2, lose, str(tmp_path / "run")):
        assert told.startswith("DamageError: ") and step == 1


SHORT = timedelta(seconds=0.3)


def slow(rank: int, world: int, path: str) -> tuple[str, str]:
    real, given_up = os.fsync, Path(path, "given up")

    def fsync(handle: int) -> None:
        if pauses:
            pauses.pop()()
        real(handle)

    def wait_until_given_up() -> None:
        while not given_up.exists():
            time.sleep(0.01)

    pauses: list[Callable[[], None]] = []
    os.fsync = fsync
    try:
        group = dist.new_group()
        dist.barrier(group)  # they meet before the time counts
        group._get_backend(torch.device("cpu")).set_timeout(SHORT)
        pauses += [wait_until_given_up] * rank
        told = raised(lambda: muonckpt.save(sharded(), f"{path}/short", process_group=group))
        given_up.touch()
        dist.barrier()
        pauses += [lambda: time.sleep(2 * SHORT.total_seconds())] * rank
        group = dist.new_group(timeout=timedelta(seconds=60))
        return told, raised(lambda: muonckpt.save(sharded(), f"{path}/long", process_group=group))
    finally:
        os.fsync = real


def test_a_time_out_names_the_argument_with_which_slow_ranks_are_waited_for(tmp_path):
    for told, then in run(2, slow, str(tmp_path)):
        assert told.startswith("LostRankError: ") and "process_group=dist.new_group(timeout=...)" in told
        assert then == "no error"
    muonckpt.load({"model": {"weight": torch.zeros(64, 64)}}, tmp_path / "long")
