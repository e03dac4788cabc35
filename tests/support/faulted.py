"""A script, run with `system_calls.c`: work in which one system call fails, or is the last one; prints what came of it.

    faulted.py FOLDER TRIALS SEED [ACT...]

Each act is tried in a forked process at random calls, or at each of them in turn where TRIALS suffice.  Prints JSON
lines: the act, what was done, what is wrong with what came of it (or null), seconds, and whether it hung.  The calls of
each act, when nothing disturbs it, are in ``FOLDER/base/logs``.
"""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import muonckpt
from support import interposed
from support.acts import LIMIT, Act, Wrong, acts, state
from support.interposed import HALF, Calls, Fault, Strike
from support.trials import HUNG


@dataclass(frozen=True)
class Ended:
    """How a process has ended: its counts of calls and its error (empty: none), or None where it was killed."""

    counts: list[int] | None
    error: str | None
    hung: bool = False


def started(act: Act, trial_folder: Path, rank: int, store: str, strike: Callable[[int], None]) -> tuple[int, int]:
    """A forked process that does the work.  Returns its id, and where it tells what came of it."""
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        return child, read
    os.close(read)
    error = ""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        if act.ranks > 1:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            limit = timedelta(seconds=LIMIT)
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=act.ranks, timeout=limit
            )
        strike(rank)
        act.do(trial_folder, rank)
    except muonckpt.MuonckptError as ours:
        error = f"ours: {type(ours).__name__}: {ours}"
    except KeyboardInterrupt:
        error = "ours: interrupted"
    except BaseException:
        error = traceback.format_exc()
    os.write(write, json.dumps([interposed.end(), error[-3000:]]).encode())
    os._exit(0)


def ended(child: int, read: int, deadline: float) -> Ended:
    ready, _, _ = select.select([read], [], [], max(deadline - time.monotonic(), 0.01))
    if not ready:
        os.kill(child, signal.SIGKILL)
    data = os.read(read, 1 << 16) if ready else b""
    os.close(read)
    os.waitpid(child, 0)
    return Ended(*json.loads(data)) if data else Ended(None, None, hung=not ready)


def prepare(act: Act, trial_folder: Path, folder: Path) -> None:
    """An empty folder for a trial, and a source of its own where others are to change that."""
    trial_folder.mkdir()
    if folder != trial_folder.parent:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(act.base / "source", folder)
        act.source = folder
    act.before(trial_folder)


def together(act: Act, trial_folder: Path, strike: Callable[[int], None]) -> tuple[list[Ended], float]:
    """Do it on all ranks, after a preparation of each.  Returns what came of it, and seconds."""
    start_time = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        processes = [started(act, trial_folder, rank, f"{scratch}/store", strike) for rank in range(act.ranks)]
        return [ended(*process, start_time + HUNG) for process in processes], time.monotonic() - start_time


def struck(trial_folder: Path, fault: Fault) -> Path:
    """The folder whose calls count: others change the source only."""
    return trial_folder.parent / "changing" if fault.strike in (Strike.CUT, Strike.CHANGED) else trial_folder.parent


def trial(act: Act, trial_folder: Path, fault: Fault, at: int, victim: int) -> tuple[list[Ended], float]:
    """Do it, with a fault on one rank."""

    def strike(rank: int) -> None:
        if rank == victim:
            interposed.begin(struck(trial_folder, fault), fault.kinds, at, fault.strike, fault.error)

    return together(act, trial_folder, strike)


def record(act: Act, trial_folder: Path, log: Path) -> None:
    """Do it, undisturbed, and write down the calls that change the disk."""
    trial_folder.mkdir()
    act.before(trial_folder)
    with log.open("ab") as stream:
        ends, _ = together(
            act, trial_folder, lambda rank: interposed.begin(trial_folder, Calls.DISK, log=stream.fileno())
        )
    assert all(end.error == "" for end in ends), (act.name, ends)
    shutil.rmtree(trial_folder)


def counted(act: Act, trial_folder: Path, folder: Path) -> list[list[int]]:
    """How many calls of each kind each rank makes on a folder."""
    prepare(act, trial_folder, folder)
    ends, _ = together(act, trial_folder, lambda rank: interposed.begin(folder, Calls.ALL))
    shutil.rmtree(trial_folder)
    act.source = act.base / "source"
    return [end.counts or [] for end in ends]


def judge(act: Act, trial_folder: Path, fault: Fault, ends: list[Ended], victim: int) -> str | None:
    """What is wrong, if anything."""
    for rank, end in enumerate(ends):
        if end.counts is None and not (fault.strike in (Strike.KILLED, Strike.TORN) and rank == victim):
            return f"rank {rank} died"
        if end.error and not end.error.startswith("ours: "):
            return f"rank {rank}: {end.error}"
    if fault is HALF and any(end.error for end in ends):
        return f"a call that did half of it, as it may, was an error: {ends}"
    act.source = act.base / "source"
    try:
        act.check(trial_folder, all(end.error == "" for end in ends))
    except Wrong as wrong:
        return str(wrong)
    except Exception:
        return f"afterwards: {traceback.format_exc()[-3000:]}"
    return None


def main(folder: Path, trials: int, seed: str, *names: str) -> None:
    """Try each act so often, several ranks a tenth of it."""
    base = folder / "base"
    (base / "logs").mkdir(parents=True)
    muonckpt.save(state(1), base / "source")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell starts with it ignored
    dice = random.Random(seed)
    torch.set_num_threads(1)
    for act in [act for act in acts(base) if act.name in names or not names]:
        trial_folder = base / "here"
        if act.ranks == 1:
            record(act, trial_folder, base / "logs" / act.name)
        folders = {struck(trial_folder, fault) for fault in act.faults}
        counts = {folder: counted(act, trial_folder, folder) for folder in sorted(folders)}
        every = [
            (fault, victim, at, calls)
            for fault in act.faults
            for victim in range(act.ranks)
            for calls in [interposed.total(counts[struck(trial_folder, fault)][victim], fault.kinds)]
            for at in range(1, calls + 1)
        ]
        number = max(trials // (1 if act.ranks == 1 else 10), 1)
        for fault, victim, at, calls in every if len(every) <= number else dice.sample(every, number):
            prepare(act, trial_folder, struck(trial_folder, fault))
            ends, seconds = trial(act, trial_folder, fault, at, victim)
            hung = any(end.hung for end in ends)
            wrong = None if hung else judge(act, trial_folder, fault, ends, victim)
            description = f"{fault.name} at call {at} of {calls} of rank {victim}"
            print(json.dumps([act.name, description, wrong, seconds, hung]), flush=True)
            shutil.rmtree(trial_folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
