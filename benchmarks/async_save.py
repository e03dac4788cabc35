"""What saving costs a training loop: steps that save now and then, by four ways in turn, beside steps that never save.

    async_save.py [--quick]

Two gloo ranks train (products of matrices that take some 100 ms a step) and save a state of about 0.3 GB every fifth of
20 steps.  "In the call" is the time that the training thread spends in the calls that save, waiting for the save before
included; "of the loop" is what 20 steps take longer than without saving.  Saves run on while training does; after the
last step the clock stops, and the last save is waited for.  Rounds alternate; medians of ratios.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from checkpoint import free_port, start
from machine import describe
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import muonckpt

RANKS, STEPS, EVERY = 2, 20, 5
ROUNDS, MATRICES = (1, 4) if "--quick" in sys.argv else (5, 32)
SIDE, WORK, PRODUCTS = 1536, 768, 6

Wait = Callable[[], object]


def copied(tensors: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor]) -> Wait:
    """The floor: this rank's elements, copied once."""
    for name, tensor in tensors.items():
        buffers[name].copy_(tensor.to_local())  # type: ignore[attr-defined]
    return lambda: None


def ways(tensors: dict[str, torch.Tensor]) -> dict[str, Callable[[Path], Wait]]:
    """How to save; each returns what waits for the save."""
    buffers = {name: torch.empty_like(tensor.to_local()) for name, tensor in tensors.items()}  # type: ignore[attr-defined]

    group = dist.new_group(backend="gloo")  # dcp's collectives would meet the barriers of the loop

    def at_once(path: Path) -> Wait:
        muonckpt.save(tensors, path)
        return lambda: None

    return {
        "a plain copy": lambda path: copied(tensors, buffers),
        "muonckpt.save": at_once,
        "muonckpt.async_save": lambda path: muonckpt.async_save(tensors, path).result,
        "dcp.async_save": lambda path: dcp.async_save(dict(tensors), checkpoint_id=path, process_group=group).result,
    }


def trained(save: Callable[[Path], Wait] | None, folder: Path) -> tuple[float, float]:
    """Seconds of the loop, and of these in calls that save."""
    weights = torch.randn(WORK, WORK) / WORK**0.5
    x = torch.randn(WORK, WORK)
    wait: Wait = lambda: None  # noqa: E731
    called = 0.0
    dist.barrier()
    begin = time.perf_counter()
    for step in range(STEPS):
        for _ in range(PRODUCTS):
            x = (x @ weights).relu_()
        x = x / x.norm().clamp(min=1e-6)
        if save is not None and step % EVERY == 0:
            entered = time.perf_counter()
            wait()
            wait = save(folder / f"step-{step}")
            called += time.perf_counter() - entered
    dist.barrier()
    took = time.perf_counter() - begin
    wait()
    dist.barrier()
    return took, called


def rank_of(rank: int, folder: str, port: int) -> None:
    start(rank, RANKS, port)
    mesh = init_device_mesh("cpu", (RANKS,))
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {
        str(number): distribute_tensor(
            torch.randn(SIDE, SIDE, generator=generator), mesh, [Shard(0)], src_data_rank=None
        )
        for number in range(MATRICES)
    }
    saved: dict[str, Callable[[Path], Wait] | None] = {"nothing": None, **ways(tensors)}
    loops: defaultdict[str, list[float]] = defaultdict(list)
    calls: defaultdict[str, list[float]] = defaultdict(list)
    for number in range(ROUNDS + 1):
        for name in list(saved)[:: 1 if number % 2 else -1]:
            place = Path(folder) / "round"
            took, called = trained(saved[name], place)
            if rank == 0:
                shutil.rmtree(place, ignore_errors=True)
            dist.barrier()
            if number:
                loops[name].append(took)
                calls[name].append(called)
    if rank == 0:
        show(loops, calls, sum(tensor.nbytes for tensor in tensors.values()))
    dist.destroy_process_group()


def show(loops: dict[str, list[float]], calls: dict[str, list[float]], size: int) -> None:
    print(f"{describe()}; {size / 1e9:.2f} GB, {RANKS} ranks, {ROUNDS} alternating rounds\n")
    print("| way | in the call, ms a save | beside a plain copy | of the loop, ms a save | loop beside no saves |")
    print("|---|---|---|---|---|")
    saves = len(range(0, STEPS, EVERY))

    def median(values: Any) -> float:
        return statistics.median(values)

    for name, took in loops.items():
        if name == "nothing":
            continue
        beside = median(mine / floor for mine, floor in zip(calls[name], calls["a plain copy"], strict=True))
        more = median(mine - other for mine, other in zip(took, loops["nothing"], strict=True))
        ratio = median(mine / other for mine, other in zip(took, loops["nothing"], strict=True))
        called = median(calls[name]) / saves * 1e3
        print(f"| {name} | {called:.0f} | {beside:.2f} | {more / saves * 1e3:.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=os.environ.get("MUONCKPT_BENCH_DIR")) as folder:
        mp.spawn(rank_of, (folder, free_port()), nprocs=RANKS)
