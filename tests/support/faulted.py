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


def started(act: Act, here: Path, rank: int, store: str, strike: Callable[[int], None]) -> tuple[int, int]:
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
        act.do(here, rank)
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


def prepare(act: Act, here: Path, folder: Path) -> None:
    """An empty folder for a trial, and a source of its own where others are to change that."""
    here.mkdir()
    if folder != here.parent:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(act.base / "source", folder)
        act.source = folder
    act.before(here)


def together(act: Act, here: Path, strike: Callable[[int], None]) -> tuple[list[Ended], float]:
    """Do it on all ranks, after a preparation of each.  Returns what came of it, and seconds."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        made = [started(act, here, rank, f"{scratch}/store", strike) for rank in range(act.ranks)]
        return [ended(*one, begun + HUNG) for one in made], time.monotonic() - begun


def struck(here: Path, fault: Fault) -> Path:
    """The folder whose calls count: others change the source only."""
    return here.parent / "changing" if fault.strike in (Strike.CUT, Strike.CHANGED) else here.parent


def trial(act: Act, here: Path, fault: Fault, at: int, victim: int) -> tuple[list[Ended], float]:
    """Do it, with a fault on one rank."""

    def strike(rank: int) -> None:
        if rank == victim:
            interposed.begin(struck(here, fault), fault.kinds, at, fault.strike, fault.error)

    return together(act, here, strike)


def record(act: Act, here: Path, log: Path) -> None:
    """Do it, undisturbed, and write down the calls that change the disk."""
    here.mkdir()
    act.before(here)
    with log.open("ab") as stream:
        seen, _ = together(act, here, lambda rank: interposed.begin(here, Calls.DISK, log=stream.fileno()))
    assert all(each.error == "" for each in seen), (act.name, seen)
    shutil.rmtree(here)


def counted(act: Act, here: Path, folder: Path) -> list[list[int]]:
    """How many calls of each kind each rank makes on a folder."""
    prepare(act, here, folder)
    seen, _ = together(act, here, lambda rank: interposed.begin(folder, Calls.ALL))
    shutil.rmtree(here)
    act.source = act.base / "source"
    return [each.counts or [] for each in seen]


def judge(act: Act, here: Path, fault: Fault, seen: list[Ended], victim: int) -> str | None:
    """What is wrong, if anything."""
    for rank, each in enumerate(seen):
        if each.counts is None and not (fault.strike in (Strike.KILLED, Strike.TORN) and rank == victim):
            return f"rank {rank} died"
        if each.error and not each.error.startswith("ours: "):
            return f"rank {rank}: {each.error}"
    if fault is HALF and any(each.error for each in seen):
        return f"a call that did half of it, as it may, was an error: {seen}"
    act.source = act.base / "source"
    try:
        act.check(here, all(each.error == "" for each in seen))
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
        here = base / "here"
        if act.ranks == 1:
            record(act, here, base / "logs" / act.name)
        folders = {struck(here, fault) for fault in act.faults}
        counts = {folder: counted(act, here, folder) for folder in sorted(folders)}
        every = [
            (fault, victim, at, calls)
            for fault in act.faults
            for victim in range(act.ranks)
            for calls in [interposed.total(counts[struck(here, fault)][victim], fault.kinds)]
            for at in range(1, calls + 1)
        ]
        number = max(trials // (1 if act.ranks == 1 else 10), 1)
        for fault, victim, at, calls in every if len(every) <= number else dice.sample(every, number):
            prepare(act, here, struck(here, fault))
            seen, seconds = trial(act, here, fault, at, victim)
            hung = any(each.hung for each in seen)
            wrong = None if hung else judge(act, here, fault, seen, victim)
            what = f"{fault.name} at call {at} of {calls} of rank {victim}"
            print(json.dumps([act.name, what, wrong, seconds, hung]), flush=True)
            shutil.rmtree(here)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
