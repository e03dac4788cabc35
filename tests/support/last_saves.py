"""A script: two ranks save along with training, and the program ends; prints what came of it, for every way to end.

    last_saves.py FOLDER TRIALS SEED [WAY...]

Prints JSON lines: the way, what was done, what is wrong with what came of it (or null), seconds, and whether it hung.
Each rank is a forked interpreter that ends as programs do.  The checkpoint is there and whole, or a line on standard
error says that it is not, and the exit code is not 0.  What a program does not outlive leaves nothing torn.
"""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import muonckpt
from support.trials import HUNG

RANKS = 2


class Slow:
    """Takes its time when it is written."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __deepcopy__(self, memo: Any) -> Slow:
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        time.sleep(self.seconds)
        return OrderedDict, ()


def state(rank: int, seconds: float) -> dict[str, Any]:
    rows = torch.arange(6.0).reshape(2, 3) + 6 * rank
    return {"w": muonckpt.BoxedTensor((4, 3), {(2 * rank, 0): rows}), f"slow {rank}": Slow(seconds)}


def destroyed(rank: int) -> None:
    dist.destroy_process_group()


def destroyed_late(rank: int) -> None:
    time.sleep(0.2 * rank)
    dist.destroy_process_group()


def raised(rank: int) -> None:
    raise RuntimeError("an error of the program")


def raised_on_one(rank: int) -> None:
    if rank:
        raise RuntimeError("an error of the program")


def destroyed_and_raised(rank: int) -> None:
    try:
        raise RuntimeError("an error of the program")
    finally:
        dist.destroy_process_group()


def destroyed_at_exit(rank: int) -> None:
    import atexit

    atexit.register(dist.destroy_process_group)


def in_thread(rank: int) -> None:
    thread = threading.Thread(target=dist.destroy_process_group)
    thread.start()
    thread.join()


def signalled(number: signal.Signals) -> Callable[[int], None]:
    return lambda rank: signal.raise_signal(number)


def terminated_one(rank: int) -> None:
    if rank:
        signal.raise_signal(signal.SIGTERM)


def twice(rank: int) -> None:
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.raise_signal(signal.SIGTERM)


TERMINATED = {128 + signal.SIGTERM, -signal.SIGTERM}
"""In order, while something is saved; else at once."""

WAYS: dict[str, tuple[Callable[[int], None], set[int]]] = {
    "end": (lambda rank: None, {0}),
    "sys.exit": (lambda rank: sys.exit(), {0}),
    "sys.exit(3)": (lambda rank: sys.exit(3), {3}),
    "destroy_process_group": (destroyed, {0}),
    "destroy_process_group, one rank late": (destroyed_late, {0}),
    "destroy_process_group in a thread": (in_thread, {0}),
    "destroy_process_group at exit": (destroyed_at_exit, {0}),
    "an error": (raised, {1}),
    "an error of one rank": (raised_on_one, {1}),
    "an error, then destroy_process_group": (destroyed_and_raised, {1}),
    "Ctrl-C": (signalled(signal.SIGINT), {1, -signal.SIGINT}),
    "SIGTERM": (signalled(signal.SIGTERM), TERMINATED),
    "SIGTERM to one rank": (terminated_one, TERMINATED),
    "SIGTERM twice": (twice, TERMINATED),
    "os._exit": (lambda rank: os._exit(3), {3}),
    "SIGKILL": (signalled(signal.SIGKILL), {-signal.SIGKILL}),
}
"""How the program ends after its last call, and its exit codes on the last rank if nothing is lost."""

AT_ONCE = ("os._exit", "SIGKILL")
"""Nothing can be waited for."""


def saved(rank: int, store: str, place: Path, kind: str, seconds: float, way: str) -> None:
    """Save, and end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.excepthook = lambda *error: print("raised:", error[1], file=sys.stderr)
    limit = timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=limit)
    torch.set_num_threads(1)
    live = state(rank, seconds)
    dist.barrier()  # gloo connects ranks that meet first, and one may end at once
    match kind:
        case "async_save":
            muonckpt.async_save(live, place)
        case "of a subgroup":
            both_ranks = dist.new_group(range(RANKS), timeout=limit)
            muonckpt.async_save(live, place, process_group=both_ranks)
        case "second":
            muonckpt.async_save(live, place.with_name("first"))
            muonckpt.async_save(live, place)
        case "series":
            muonckpt.Series(place.parent, keep_last=1).async_save(1, live)
        case "exists":
            muonckpt.async_save(live, place)
        case "with" | "with, differing":
            if kind != "with":
                live["same"] = torch.tensor(rank)
            with muonckpt.Series(place.parent, keep_last=1, on=(signal.SIGTERM,)) as series:
                series.async_save(1, live)
                return WAYS[way][0](rank)
    WAYS[way][0](rank)


KINDS = ("async_save", "exists", "with", "of a subgroup", "with, differing", "second", "series")
"""What is saved last: in the world, where something exists, in a `with` block, in a process group, replicas that differ
in a block, after another, in a series."""


def judged(kind: str, place: Path, way: str, exits: list[tuple[int, str]]) -> str | None:
    """Return what is wrong, if anything.  torch puts the rank before what `sys.excepthook` prints."""
    messages = [[line for line in text.splitlines() if "raised: " not in f"{line} "] for _, text in exits]
    out = place.with_name("step-00000001") if kind in ("series", "with", "with, differing") else place
    is_published = kind != "exists" and out.exists() and muonckpt.verify(out, jobs=1).verdict == "whole"
    if way in AT_ONCE:
        torn = out.exists() and not is_published and kind != "exists"
        return f"it is torn: {exits}" if torn or exits[-1][0] not in WAYS[way][1] else None
    if kind == "with, differing":
        fine = all(code and text.count("hold different data") == 1 for code, text in exits)
        return None if fine and not out.exists() else f"it was lost, and this was said: {exits}"
    if kind == "exists":
        if any(code == 0 or [line for line in lines if "failed" in line and "exists already" in line] != lines
               for (code, _), lines in zip(exits, messages, strict=True)):  # fmt: skip
            return f"it was lost, and this was said: {exits}"
        return None if all(len(lines) == 1 for lines in messages) else f"expected one line, found {messages}"
    expected = {0} if kind == "with" and "SIGTERM" in way else WAYS[way][1]  # there it sets a flag
    if any(messages) or exits[-1][0] not in expected:
        return f"expected exit code {expected} and silence, found {exits}"
    if not is_published:
        return f"the checkpoint is not there, or not whole: {[*place.parent.iterdir()]}"
    return None


def main(folder: Path, trials: int, seed: str, *names: str) -> None:
    dice = random.Random(seed)
    folder.mkdir(exist_ok=True)
    muonckpt.save({"w": torch.ones(2)}, folder / "first")  # imports what the forked ranks need
    for first, way in enumerate(names or WAYS):
        for number in range(first, first + trials):
            kind, seconds = KINDS[number % len(KINDS)], dice.choice((0.0, 0.3))
            trial_folder = folder / "here"
            trial_folder.mkdir()
            if kind == "exists":
                (trial_folder / "out").mkdir()
            start_time, children, store = time.monotonic(), [], folder / "store"
            for rank in range(RANKS):
                read, write = os.pipe()
                child = os.fork()
                if not child:
                    os.dup2(write, 2)
                    os.close(read)
                    os.close(write)
                    return saved(rank, str(store), trial_folder / "out", kind, seconds, way)
                os.close(write)
                children.append((child, read))
            exits, hung = [], False
            for child, read in children:
                text = b""
                while ready := select.select([read], [], [], max(start_time + HUNG - time.monotonic(), 0.01))[0]:
                    if not (part := os.read(read, 1 << 16)):
                        break
                    text += part
                hung = hung or not ready
                if not ready:
                    os.kill(child, signal.SIGKILL)
                os.close(read)
                exits.append((os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text.decode()))
            wrong = None if hung else judged(kind, trial_folder / "out", way, exits)
            print(json.dumps([way, f"{kind}, {seconds} s", wrong, time.monotonic() - start_time, hung]), flush=True)
            shutil.rmtree(trial_folder)
            store.unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
