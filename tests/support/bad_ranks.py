"""A script: one of four ranks raises, is killed or stopped amid a collective call; prints what came of it.

    bad_ranks.py FOLDER TRIALS SEED [CALL...]

Prints JSON lines: the call, what was done, what is wrong with what came of it (or null), the seconds in which all other
ranks had ended, and whether one did not.  The moment is that of a random call of a function of this package, or of
`torch.distributed`.  Ranks that have got an error end, as a program does that does not catch it.
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
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import muonckpt
import muonckpt.optimizer
from muonckpt.optimizer import Muon, StepExecution

warnings.filterwarnings("ignore")

RANKS = 4

PROMPTLY = 60.0
"""Seconds in which all have ended after a rank that has; most take less than one, but the machine may be busy."""

SHORT, LONG = 4.0, 200.0
"""Time-outs of process groups, in seconds: where it is the time-out that ends ranks, and where it must not be."""

OURS = tuple(str(Path(module.__file__).parent) for module in (muonckpt, muonckpt.optimizer))
TORCHS = (*OURS, str(Path(dist.distributed_c10d.__file__)))


def grid_of_all() -> DeviceMesh:
    """2 x 2 ranks.  Torch gives groups of axes its default of 30 minutes; here they wait as long as the world."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    host = torch.device("cpu")
    for group in grid.get_all_groups():
        group._get_backend(host).set_timeout(dist.group.WORLD._get_backend(host).options._timeout)
    return grid


def tensors(columns: bool = False) -> dict[str, Any]:
    """On a grid: sharded on both axes, on one, on none, and what is not a tensor."""
    grid = grid_of_all()
    whole = torch.arange(96.0).reshape(8, 12)
    placements = {"both": [Shard(0), Shard(1)], "one": [Replicate(), Shard(int(columns))]}
    rows = {key: distribute_tensor(whole, grid, cuts, src_data_rank=None) for key, cuts in placements.items()}
    return {"part": distribute_tensor(whole, grid["b"], [Shard(0)], src_data_rank=None), **rows, "same": whole, "n": 7}


def empty(columns: bool = False) -> dict[str, Any]:
    return {key: torch.zeros_like(value) if key != "n" else 0 for key, value in tensors(columns).items()}


def full(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value


def untouched(state: dict[str, Any]) -> bool:
    return not any(bool(torch.as_tensor(full(value)).any()) for value in state.values())


def optimizer() -> Muon:
    """Matrices on both axes, on one axis, and on one axis only a vector: two sets of ranks, one without matrices."""
    grid = grid_of_all()
    params = []
    for mesh, shape in ((grid, (8, 12)), (grid, (16, 4)), (grid["a"], (6, 8)), (grid["b"], (12,))):
        value = distribute_tensor(torch.ones(shape), mesh, [Shard(0)] * mesh.ndim, src_data_rank=None)
        params.append(nn.Parameter(value))
        params[-1].grad = torch.ones_like(value)
    adamw = {"params": params[3:], "algorithm": "adamw", "lr": 0.1}
    return Muon([{"params": params[:3]}, adamw], execution=StepExecution(stages=2))


def step(steps: int) -> Callable[[Path], Callable[[], None]]:
    def prepared(trial_folder: Path) -> Callable[[], None]:
        opt = optimizer()
        for _ in range(steps):
            opt.step()
        return opt.step

    return prepared


def save(trial_folder: Path) -> Callable[[], None]:
    state = tensors()
    return lambda: muonckpt.save(state, trial_folder / "out")


def async_save(trial_folder: Path) -> Callable[[], None]:
    state = tensors()
    return lambda: muonckpt.async_save(state, trial_folder / "out").result()


def load(trial_folder: Path) -> Callable[[], None]:
    state = empty()
    return told_if_touched(state, lambda: muonckpt.load(state, trial_folder / "source", attest=True))


def redistribute(trial_folder: Path) -> Callable[[], None]:
    source, state = tensors(), empty(columns=True)
    return told_if_touched(state, lambda: muonckpt.redistribute(source, state, memory=64))


def told_if_touched(state: dict[str, Any], call: Callable[[], object]) -> Callable[[], None]:
    """The call; an error after which tensors are not what they were has to say so."""

    def called() -> None:
        try:
            call()
        except muonckpt.MuonckptError as error:
            warned = "UNUSABLE" in str(error) or "not to be trained on" in str(error)
            if not warned and not untouched(state):
                raise AssertionError(f"tensors were overwritten, and this does not say it: {error}") from error
            raise

    return called


CALLS: dict[str, Callable[[Path], Callable[[], None]]] = {
    "step": step(steps=1),
    "first step": step(steps=0),
    "save": save,
    "async_save": async_save,
    "load": load,
    "redistribute": redistribute,
}


@dataclass(frozen=True)
class Manner:
    """How a rank behaves badly: what it does, amid functions of which files, and how long all may take then."""

    name: str
    act: Callable[[], None]
    amid: tuple[str, ...]
    time_out: float
    limit: float


def fail() -> None:
    raise MemoryError("out of memory")


MANNERS = (
    Manner("raises", fail, OURS, LONG, PROMPTLY),
    Manner("is killed", lambda: os.kill(os.getpid(), signal.SIGKILL), TORCHS, LONG, PROMPTLY),
    Manner("is stopped", lambda: os.kill(os.getpid(), signal.SIGSTOP), TORCHS, SHORT, 2 * SHORT + PROMPTLY),
)


class Profile:
    """Counts calls of functions that are defined in some files, and acts at one of them."""

    def __init__(self, files: tuple[str, ...], at: int = 0, act: Callable[[], None] = lambda: None) -> None:
        self.files, self.at, self.act, self.calls = files, at, act, 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(self.files):
            self.calls += 1
            if self.calls == self.at:
                self.act()

    def begin(self) -> None:
        threading.setprofile(self)
        sys.setprofile(self)

    def end(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Ended:
    """How a rank has ended: calls that it counted, its error (empty: none), and when, on the clock that all share."""

    calls: int
    error: str
    when: float


def started(
    call: str, trial_folder: Path, rank: int, store: str, time_out: float, profile: Profile | None
) -> tuple[int, int]:
    """A forked rank that calls.  Returns its id, and where it tells what came of it."""
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        return child, read
    os.close(read)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    error = ""
    try:
        limit = timedelta(seconds=time_out)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=limit)
        do = CALLS[call](trial_folder)
        dist.barrier()
        if profile:
            profile.begin()
        do()
    except muonckpt.MuonckptError as ours:
        error = f"{type(ours).__name__}: {ours}"
    except (MemoryError, RuntimeError) as agreed_error:
        error = f"{type(agreed_error).__name__}: {agreed_error}"
        if isinstance(agreed_error, RuntimeError) and "raised" not in error:
            error = traceback.format_exc()
    except BaseException:
        error = traceback.format_exc()
    if profile:
        profile.end()
    os.write(write, json.dumps([profile.calls if profile else 0, error[-3000:], time.monotonic()]).encode())
    if dist.is_initialized():
        dist.destroy_process_group()  # waits for what is under way, as the end of a program does
    os._exit(0)


def trial(
    call: str, trial_folder: Path, victim: int, profile: Profile, time_out: float, limit: float
) -> tuple[list[Ended | None], float]:
    """What each rank told (None: nothing), and the seconds until the last one of the others did."""
    with tempfile.TemporaryDirectory() as scratch:
        ranks = [
            started(call, trial_folder, rank, f"{scratch}/store", time_out, profile if rank == victim else None)
            for rank in range(RANKS)
        ]
        start_time = time.monotonic()
        deadline, ends = start_time + limit + 5, dict[int, Ended | None]()
        for rank in sorted(range(RANKS), key=lambda rank: rank == victim):
            child, read = ranks[rank]
            ready, _, _ = select.select([read], [], [], max(deadline - time.monotonic(), 0.1))
            data = os.read(read, 1 << 16) if ready else b""
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(read)
            ends[rank] = Ended(*json.loads(data)) if data else None
            if len(ends) == RANKS - 1:  # the victim may be stopped
                deadline = min(deadline, time.monotonic() + 1)
        survivor_ends = [ends[rank] for rank in range(RANKS)]
        return survivor_ends, max(
            (end.when for rank, end in enumerate(survivor_ends) if end and rank != victim), default=start_time
        ) - start_time


CLEAR = ("LostRankError: ", "SourceError: MemoryError", "DestinationError: MemoryError", "TargetError: MemoryError",
         "AttestError: MemoryError", "MemoryError: ", "LayoutError: MemoryError")  # fmt: skip


def judged(call: str, trial_folder: Path, manner: Manner, ends: list[Ended | None], victim: int) -> str | None:
    """What is wrong, if anything."""
    survivors = [end for rank, end in enumerate(ends) if rank != victim]
    for rank, end in enumerate(ends):
        if end is None and rank != victim:
            return f"rank {rank} did not end"
        named = end is not None and f"rank {victim}: raised MemoryError" in end.error
        is_lost = end is not None and "raised LostRankError" in end.error
        if end is not None and end.error and not (end.error.startswith(CLEAR) or named or is_lost):
            return f"rank {rank}: {end.error}"
    if manner.name == "raises" and ends[victim] is None:
        return "the rank that raised did not end"
    out = trial_folder / "out"
    if out.exists():
        if muonckpt.verify(out, jobs=1).verdict != "whole":
            return "what was published is damaged"
    elif call in ("save", "async_save") and any(end and not end.error for end in survivors):
        return "a rank succeeded, and there is nothing"
    return None


def main(folder: Path, trials: int, seed: str, *names: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dice = random.Random(seed)
    folder.mkdir(exist_ok=True)
    state = {key: torch.arange(96.0).reshape(8, 12) for key in ("part", "both", "one", "same")}
    muonckpt.save({**state, "n": 7}, folder / "source")
    for call in names or CALLS:
        trial_folder = folder / "here"
        counts: dict[tuple[tuple[str, ...], int], int] = {}
        for _ in range(trials):
            manner, victim = dice.choice(MANNERS), dice.randrange(RANKS)
            if (manner.amid, victim) not in counts:
                trial_folder.mkdir()
                (trial_folder / "source").symlink_to(folder / "source")
                ends, _ = trial(call, trial_folder, victim, Profile(manner.amid), LONG, 2 * LONG)
                assert all(end is not None and not end.error for end in ends), (call, ends)
                counts[manner.amid, victim] = ends[victim].calls  # type: ignore[union-attr]
                shutil.rmtree(trial_folder)
            calls = counts[manner.amid, victim]
            at = dice.randint(1, calls)
            trial_folder.mkdir()
            (trial_folder / "source").symlink_to(folder / "source")
            ends, seconds = trial(
                call, trial_folder, victim, Profile(manner.amid, at, manner.act), manner.time_out, manner.limit
            )
            hung = any(end is None for rank, end in enumerate(ends) if rank != victim) or seconds > manner.limit
            wrong = None if hung else judged(call, trial_folder, manner, ends, victim)
            description = f"rank {victim} {manner.name} at call {at} of {calls}"
            print(json.dumps([call, description, wrong, seconds, hung]), flush=True)
            shutil.rmtree(trial_folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
