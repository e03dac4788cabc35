"""Signals: one to any rank is a checkpoint of all at the same step, and the program goes on or stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from signal import SIGTERM, SIGUSR2
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.workers import WorkersFailed, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile

import muonckpt
from muonckpt.checkpoint.signals import STOPPED
from muonckpt.optimizer import Muon

RANKS, LAST = 4, 5

BEGIN, BACKWARD, STEPPED, SAVING = "before the first step", "before it", "after it", "amid its save"

Plan = list[tuple[int, int, str, signal.Signals]]
"""Which rank gets which signal, at which step and where in it."""

EVERYWHERE = range(RANKS)

# What is sent; the steps at which all ranks save, and whether they stop then.
CASES: dict[str, tuple[Plan, list[int], bool]] = {
    "none": ([], [], False),
    "on one rank": ([(2, 2, BACKWARD, SIGUSR2)], [2], False),
    "after the step": ([(2, 2, STEPPED, SIGUSR2)], [2], False),
    "on all ranks": ([(rank, 2, BACKWARD, SIGUSR2) for rank in EVERYWHERE], [2], False),
    "early and late": ([(0, 2, BACKWARD, SIGUSR2), (3, 2, STEPPED, SIGUSR2)], [2], False),
    "twice on one rank": ([(1, 2, BACKWARD, SIGTERM), (1, 2, STEPPED, SIGTERM)], [2], True),
    "before the first step": ([(3, 0, BEGIN, SIGTERM)], [0], True),
    "two kinds at once": ([(1, 2, BACKWARD, SIGUSR2), (3, 2, BACKWARD, SIGTERM)], [2], True),
    "two kinds in turn": ([(1, 1, BACKWARD, SIGUSR2), (0, 3, BACKWARD, SIGTERM)], [1, 3], True),
    "amid an asynchronous save": ([(1, 1, BACKWARD, SIGUSR2), (2, 1, SAVING, SIGTERM)], [1, 2], True),
}


class Slow:
    """Takes its time when it is written."""

    def __deepcopy__(self, memo: Any) -> Slow:
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        threading.Event().wait(0.2)
        return OrderedDict, ()


def sharded(rank: int) -> tuple[Muon, Any]:
    """A matrix in rows over all ranks, and another on two of them, whose notes are exchanged apart."""
    world, pairs = init_device_mesh("cpu", (RANKS,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    weights = [
        nn.Parameter(distribute_tensor(torch.ones(8, 6), mesh, [Shard(0)], src_data_rank=None))
        for mesh in (pairs["b"], world)
    ]
    optimizer = Muon(weights, lr=0.1)

    def backward(step: int) -> None:
        for weight in weights:
            weight.grad = torch.ones_like(weight) * (step + 1)

    return optimizer, backward


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """The collectives that this thread calls inside: an asynchronous save has its own."""
    calls, thread = Counter[str](), threading.get_ident()

    def recorded(name, honest):
        def call(*args, **kwargs):
            calls[name] += threading.get_ident() == thread
            return honest(*args, **kwargs)

        return call

    names = ("all_to_all_single", "all_gather", "all_reduce", "broadcast", "gather", "barrier")
    patches = [patch.object(dist, name, recorded(name, getattr(dist, name))) for name in names]
    for patcher in patches:
        patcher.start()
    try:
        yield calls
    finally:
        for patcher in patches:
            patcher.stop()


def trained(rank: int, world: int, folder: str) -> list[tuple[Any, ...]]:
    """For each case: the steps that were due and how the program ended, and collectives of `due` with nothing to do."""
    found = []
    optimizer, backward = sharded(rank)
    mesh = init_device_mesh("cpu", (world,))
    for name, (plan, *_) in CASES.items():
        due, code, calls = [], 0, 0

        def arrive(step: int, where: str, plan: Plan = plan) -> None:
            for number in [number for *place, number in plan if place == [rank, step, where]]:
                signal.raise_signal(number)

        before = signal.getsignal(SIGTERM)
        try:
            with muonckpt.Series(f"{folder}/{name}", keep_last=LAST, on=(SIGTERM, SIGUSR2)) as series:
                arrive(0, BEGIN)
                for step in range(LAST):
                    backward(step)
                    arrive(step, BACKWARD)
                    optimizer.step()
                    optimizer.zero_grad()
                    arrive(step, STEPPED)
                    with counted() as made:
                        then = series.due(step)
                    calls = max(calls, made.total())
                    if then:
                        due.append(step)
                        w = distribute_tensor(torch.full((RANKS,), float(step)), mesh, [Shard(0)], src_data_rank=None)
                        slow = {f"slow {rank}": Slow()} if name.startswith("amid") else {}
                        series.async_save(step, {"w": w} | slow)
                    arrive(step, SAVING)
        except SystemExit as ended:
            code = ended.code
        assert signal.getsignal(SIGTERM) is before
        found.append((due, code, calls))
    return found


def test_all_ranks_save_at_one_step_whichever_rank_hears_a_signal_and_when(tmp_path):
    """With one gather after each step."""
    expected = [(steps, STOPPED if stops else 0, 1) for _, steps, stops in CASES.values()]
    assert run(RANKS, trained, str(tmp_path)) == [expected] * RANKS
    for name, (steps, *_) in zip(CASES, expected, strict=True):
        kept = sorted((tmp_path / name).iterdir()) if steps else []
        assert [path.name for path in kept] == [f"step-{step:08}" for step in steps]
        for path, step in zip(kept, steps, strict=True):
            assert muonckpt.verify(path).verdict == "whole"
            with muonckpt.open(path) as checkpoint:
                assert checkpoint.tensors["w"].numpy().tolist() == [float(step)] * RANKS


def bereft(rank: int, world: int, folder: str) -> None:
    """A signal asks for a checkpoint, and a rank is killed before the next step."""
    optimizer, backward = sharded(rank)
    series = muonckpt.Series(folder, on=(SIGTERM,))
    for step in range(3):
        backward(step)
        if rank == 1 and step == 2:
            signal.raise_signal(SIGTERM)
        if rank == 3 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        if series.due(step) or step == 1:
            series.save(step, {"step": torch.tensor(step)})


def test_a_rank_that_dies_meanwhile_ends_the_others_and_leaves_the_last_checkpoint(tmp_path):
    with pytest.raises(WorkersFailed) as failed:
        run(RANKS, bereft, str(tmp_path))
    assert str(failed.value).count("LostRankError") >= 3 and "rank 3 of 4: died, exit code -9" in str(failed.value)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert muonckpt.verify(tmp_path / "step-00000001").verdict == "whole"


def cadence(rank: int, world: int, folder: str) -> list[Any]:
    """A program that never asks what is due: the next save serves the signal; ranks that are not at one step."""
    found: list[Any] = []
    with muonckpt.Series(folder, on={SIGUSR2: "stop"}) as series:
        if rank == 2:
            signal.raise_signal(SIGUSR2)
        try:
            series.save(9, {"step": torch.tensor(9)})
        except SystemExit as ended:
            found.append(ended.code)
        found.append(series.due(10))
        try:
            series.due(rank == 1)
        except muonckpt.ArgumentError as error:
            found.append(str(error))
    return found


def test_a_signal_that_nobody_asks_for_is_served_by_the_next_save(tmp_path):
    for code, then, error in run(RANKS, cadence, str(tmp_path)):
        assert code == STOPPED and then is None
        assert "rank 0 called Series.due(False), and rank 1 called Series.due(True)" in error
    assert muonckpt.Series(tmp_path).latest().step == 9


def exchanges(rank: int, world: int, folder: str) -> list[int]:
    """Count the collectives of three calls, where no rank listens and where one does."""
    found: list[int] = []
    for on in ((), (SIGUSR2,) if rank == 1 else ()):
        with muonckpt.Series(folder, on=on) as series:
            series.due(0)
            for step in range(1, 4):
                with profile(activities=[ProfilerActivity.CPU]) as seen:
                    series.due(step)
                found.append(sum("gather" in event.key for event in seen.key_averages()))
    return found


def test_where_no_rank_listens_later_questions_cost_nothing(tmp_path):
    for counts in run(RANKS, exchanges, str(tmp_path)):
        assert counts[:3] == [0, 0, 0] and all(counts[3:])


def test_former_handlers_are_called_and_put_back(tmp_path, capsys):
    heard: list[int] = []

    def former(number: int, frame: object) -> None:
        heard.append(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, SIGUSR2, signal.SIGINT)}
    try:
        signal.signal(signal.SIGUSR1, former)
        series = muonckpt.Series(tmp_path, on=(signal.SIGUSR1, signal.SIGINT))
        signal.raise_signal(signal.SIGUSR1)
        assert series.due(0) == "go on" and heard == [signal.SIGUSR1]
        assert series.due(1) == "go on"  # until it is saved
        series.save(1, {"w": torch.ones(2)})
        assert series.due(2) is None
        signal.raise_signal(signal.SIGINT)  # no KeyboardInterrupt
        assert series.due(3) == "stop"
        with pytest.raises(SystemExit) as ended:
            series.save(3, {"w": torch.ones(2)})
        assert ended.value.code == STOPPED and "exit code 75" in capsys.readouterr().err
        later = lambda number, frame: None  # noqa: E731
        signal.signal(signal.SIGINT, later)
        series.close()
        assert signal.getsignal(signal.SIGUSR1) is former and signal.getsignal(signal.SIGINT) is later
        with pytest.raises(ZeroDivisionError), muonckpt.Series(tmp_path, on=(SIGUSR2,)):
            raise ZeroDivisionError
        assert signal.getsignal(SIGUSR2) is before[SIGUSR2]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_series_that_listens_to_nothing_leaves_a_signal_to_the_one_that_does(tmp_path):
    """As for the best weights so far, from which a run does not go on."""
    weights = {"w": torch.ones(2)}
    best = muonckpt.Series(tmp_path / "best")
    with muonckpt.Series(tmp_path / "run", on={"SIGUSR2": "stop"}) as series:
        signal.raise_signal(SIGUSR2)
        best.save(1, weights)
        best.async_save(2, weights).result()
        assert series.due(2) == "stop"
        with pytest.raises(SystemExit):
            series.save(2, weights)
        assert series.due(3) is None


def test_series_that_are_closed_in_any_order_leave_no_handler_that_hears_nothing(tmp_path):
    heard: list[int] = []
    before = signal.signal(SIGUSR2, lambda number, frame: heard.append(number))
    try:
        first, second = (muonckpt.Series(tmp_path / name, on="SIGUSR2") for name in ("first", "second"))
        first.close()
        signal.raise_signal(SIGUSR2)
        assert second.due(0) == "go on" and len(heard) == 1
        second.save(0, {"w": torch.ones(2)})
        second.close()
        signal.raise_signal(SIGUSR2)
        assert len(heard) == 2 and muonckpt.Series(tmp_path / "second").due(1) is None
    finally:
        signal.signal(SIGUSR2, before)


WITH_CHILDREN = """
import os, signal, subprocess, sys, time
from multiprocessing import get_context
from torch.utils.data import DataLoader
from muonckpt.checkpoint.signals import Signals

signals = Signals((signal.SIGTERM, signal.SIGUSR1), None)
loader = DataLoader(range(40), num_workers=2, prefetch_factor=1)
signals.spare_workers(loader)
for step, _ in enumerate(loader):
    if step in (4, 8):  # a launcher is another process
        kill = f"import os; os.killpg({os.getpgid(0)}, {signal.SIGTERM if step == 8 else signal.SIGUSR1})"
        subprocess.run([sys.executable, "-c", kill], start_new_session=True)
print(step + 1, signals.due("now"))
context = get_context("fork")
begun = context.Event()
def wait():
    begun.set()
    while True:  # Python may note a signal just before a call that waits, and calls its handler after that
        time.sleep(0.1)
child = context.Process(target=wait, daemon=True)
child.start()
begun.wait()  # Python forgets what a child gets before that
child.terminate()
child.join()
print(child.exitcode)
"""


def test_workers_of_a_loader_outlive_a_signal_to_all_processes_and_other_children_can_be_ended():
    """torchrun and Slurm send signals to the children of ranks as well; a loader whose worker has ended raises."""
    command = [sys.executable, "-c", WITH_CHILDREN]
    done = subprocess.run(command, start_new_session=True, capture_output=True, text=True, timeout=600)
    assert done.stdout.split("\n")[:2] == ["40 stop", "-15"], done.stderr


@pytest.mark.parametrize("on", [(signal.SIGKILL,), (signal.SIGSEGV,), {SIGTERM: "wait"}, "TERM", 9])
def test_other_signals_are_refused_by_name(on, tmp_path):
    with pytest.raises(ValueError, match="expected some of SIGTERM, SIGINT"):
        muonckpt.Series(tmp_path, on=on)


def test_only_the_main_thread_may_listen(tmp_path):
    errors: list[str] = []

    def make() -> None:
        try:
            muonckpt.Series(tmp_path, on=(SIGTERM,))
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "main thread only" in errors[0]
