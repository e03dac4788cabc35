"""Saving and loading about 1 GB on 4 gloo ranks: muonckpt against plain DCP, alternating in one run.

Both sides sync their files.  A ratio is taken for every pair of neighbouring runs; the table shows medians, with the
smallest and largest ratio seen.  Loads are warm (the page cache holds what was just written).
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from machine import describe
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import muonckpt

RANKS = 4
ROUNDS = 9
LAYERS = 8
HIDDEN = 1536
SHAPES = ((3 * HIDDEN + 3, HIDDEN), (HIDDEN + 2, HIDDEN), (2 * 5123, HIDDEN), (HIDDEN + 2, 5123))
"""A layer's matrices; no row count divides by 4."""


def state() -> dict[str, torch.Tensor]:
    """Momentum of `LAYERS` layers, sharded by rows: about 1 GB of float32 in all."""
    mesh = init_device_mesh("cpu", (RANKS,))
    generator = torch.Generator().manual_seed(0)

    def place(shape: tuple[int, int]) -> torch.Tensor:
        value = torch.randn(shape, generator=generator)
        return distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)

    return {f"{layer}.{index}": place(shape) for layer in range(LAYERS) for index, shape in enumerate(SHAPES)}


def timed(action: Callable[[Path], object], path: Path) -> float:
    """Seconds from all ranks ready to all ranks done."""
    dist.barrier()
    begin = time.perf_counter()
    action(path)
    dist.barrier()
    return time.perf_counter() - begin


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=os.environ["BENCH_PORT"])
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    tensors = state()
    gigabytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()) / 1e9
    savers = {"dcp": lambda path: dcp.save(dict(tensors), checkpoint_id=path),
              "ours": lambda path: muonckpt.save(tensors, path)}  # fmt: skip
    blank = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    loaders = {"dcp": lambda path: dcp.load(blank, checkpoint_id=path),
               "ours": lambda path: muonckpt.load(blank, path)}  # fmt: skip
    seconds: dict[str, list[float]] = {f"{what} {who}": [] for what in ("save", "load") for who in savers}
    for number in range(ROUNDS + 1):
        order = list(savers) if number % 2 else list(reversed(savers))
        paths = {who: Path(folder) / f"{who}{number}" for who in order}
        for who in order:
            seconds[f"save {who}"].append(timed(savers[who], paths[who]))
        for who in order:
            seconds[f"load {who}"].append(timed(loaders[who], paths[who]))
        if rank == 0:
            for path in paths.values():
                shutil.rmtree(path)
    if rank == 0:
        report(gigabytes, {name: values[1:] for name, values in seconds.items()})  # the first round warms up
    dist.destroy_process_group()


def report(gigabytes: float, seconds: dict[str, list[float]]) -> None:
    print(f"{describe()}; {gigabytes:.2f} GB, {RANKS} ranks, {ROUNDS} alternating rounds\n")
    print("| | DCP s (median) | muonckpt s (median) | ratio (median) | ratios (min - max) | aim |")
    print("|---|---|---|---|---|---|")
    for what, aim in (("save", 1.10), ("load", 1.25)):
        theirs, ours = seconds[f"{what} dcp"], seconds[f"{what} ours"]
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        print(
            f"| {what} | {statistics.median(theirs):.2f} | {statistics.median(ours):.2f} | "
            f"{statistics.median(ratios):.2f} | {min(ratios):.2f} - {max(ratios):.2f} | {aim:.2f} |"
        )


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    os.environ["BENCH_PORT"] = str(free_port())
    with tempfile.TemporaryDirectory(dir=os.environ.get("MUONCKPT_BENCH_DIR")) as folder:
        mp.spawn(worker, (folder,), nprocs=RANKS)
