"""Saving and loading about 1 GB on gloo ranks: muonckpt against plain DCP, alternating in one run.

    checkpoint.py [--quick]

First one process loads 1 GiB.  Then 4 ranks save and load what they saved; then 8 ranks load that, and 4 ranks of which
pairs are replicas (HSDP).  Both sides sync their files.  A ratio is taken for every pair of neighbouring runs; tables
show medians, with the smallest and largest ratio seen, and CPU seconds of all ranks.  Loads are warm (the page cache
holds what was just written), and cold (the system was asked to drop it).  "Bytes" are those that read calls of all
ranks return in a load, as the system counts them, over those of the checkpoint.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from machine import at_least, bytes_read, describe
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import muonckpt

RANKS = 4
LOADS = (((8,), 0.45, 0.60), ((2, 2), 0.70, 0.80))
"""Meshes that load what `RANKS` saved, with what the ratio should be at most, warm and cold; on the first of two axes
are replicas."""

ROUNDS, LAYERS = (2, 1) if "--quick" in sys.argv else (9, 8)
HIDDEN = 1536
SHAPES = ((3 * HIDDEN + 3, HIDDEN), (HIDDEN + 2, HIDDEN), (2 * 5123, HIDDEN), (HIDDEN + 2, 5123))
"""A layer's matrices; no row count divides by 4."""

SAVERS: dict[str, Callable[[dict[str, torch.Tensor], Path], object]] = {
    "dcp": lambda tensors, path: dcp.save(dict(tensors), checkpoint_id=path),
    "ours": lambda tensors, path: muonckpt.save(tensors, path),
}
LOADERS: dict[str, Callable[[dict[str, torch.Tensor], Path], object]] = {
    "dcp": lambda tensors, path: dcp.load(tensors, checkpoint_id=path),
    "ours": lambda tensors, path: muonckpt.load(tensors, path),
}


def state(*mesh_shape: int) -> dict[str, torch.Tensor]:
    """Momentum of `LAYERS` layers, sharded by rows along the last axis of a mesh: about 1 GB of float32 in all."""
    mesh = init_device_mesh("cpu", mesh_shape)
    placements = [*[Replicate()] * (len(mesh_shape) - 1), Shard(0)]
    generator = torch.Generator().manual_seed(0)

    def place(shape: tuple[int, int]) -> torch.Tensor:
        value = torch.randn(shape, generator=generator)
        return distribute_tensor(value, mesh, placements, src_data_rank=None)

    return {f"{layer}.{index}": place(shape) for layer in range(LAYERS) for index, shape in enumerate(SHAPES)}


Seconds = tuple[float, float]
"""By the clock, and of the processors for all ranks."""


def timed(action: Callable[[dict[str, torch.Tensor], Path], object], tensors, path: Path) -> Seconds:
    """Seconds from all ranks ready to all ranks done."""
    dist.barrier()
    begin, cpu_begin = time.perf_counter(), time.process_time()
    action(tensors, path)
    cpu = torch.tensor(time.process_time() - cpu_begin)
    dist.barrier()
    seconds = time.perf_counter() - begin
    dist.all_reduce(cpu)
    return seconds, float(cpu)


def drop(path: Path) -> None:
    """Ask the system to drop the files of a folder from its cache, on one rank, while the others wait."""
    dist.barrier()
    for file in path.iterdir() if dist.get_rank() == 0 else ():
        handle = os.open(file, os.O_RDONLY)
        os.fdatasync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def alone(_: int, folder: str) -> None:
    """One process loads 1 GiB that it has saved, in alternating order, for its CPU seconds."""
    torch.set_num_threads(1)
    tensors = {f"w{number}": torch.randn(2048, 4096) for number in range(4 if "--quick" in sys.argv else 32)}
    muonckpt.save(tensors, Path(folder) / "alone")
    loaders = {
        "dcp": lambda: dcp.load(dict(tensors), checkpoint_id=Path(folder) / "alone", no_dist=True),
        "ours": lambda: muonckpt.load(tensors, Path(folder) / "alone"),
    }
    seconds: defaultdict[str, list[Seconds]] = defaultdict(list)
    for number in range(ROUNDS + 1):
        for program in alternating(number):
            begin, cpu_begin = time.perf_counter(), time.process_time()
            loaders[program]()
            seconds[program].append((time.perf_counter() - begin, time.process_time() - cpu_begin))
    print(HEADING)
    report("load 1 GiB, one process", seconds["dcp"], seconds["ours"], 0.45)
    shutil.rmtree(Path(folder) / "alone")


def saver(rank: int, folder: str, port: int) -> None:
    """4 ranks save and load, in alternating order; what was saved last stays."""
    start(rank, RANKS, port)
    tensors = state(RANKS)
    blank = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    seconds: defaultdict[str, list[Seconds]] = defaultdict(list)
    for number in range(ROUNDS + 1):
        for program in alternating(number):
            if rank == 0:
                shutil.rmtree(Path(folder) / program, ignore_errors=True)
            seconds[f"save {program}"].append(timed(SAVERS[program], tensors, Path(folder) / program))
        for program in alternating(number):
            seconds[f"load {program}"].append(timed(LOADERS[program], blank, Path(folder) / program))
        for program in alternating(number):
            drop(Path(folder) / program)
            seconds[f"load, cold {program}"].append(timed(LOADERS[program], blank, Path(folder) / program))
    if rank == 0:
        gigabytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()) / 1e9
        print(f"{describe()}; {gigabytes:.2f} GB, {RANKS} ranks, {ROUNDS} alternating rounds\n")
        print(HEADING)
        for operation, aim in (("save", 0.60), ("load", 0.50), ("load, cold", 0.80)):
            report(operation, seconds[f"{operation} dcp"], seconds[f"{operation} ours"], aim)
    dist.destroy_process_group()


def loader(rank: int, folder: str, port: int, mesh_shape: tuple[int, ...], *aims: float) -> None:
    """The ranks of another mesh load what 4 saved, in alternating order."""
    start(rank, math.prod(mesh_shape), port)
    tensors = state(*mesh_shape)
    blank = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    size = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    seconds: defaultdict[str, list[Seconds]] = defaultdict(list)
    for number in range(ROUNDS + 1):
        for program in alternating(number):
            seconds[program].append(timed(LOADERS[program], blank, Path(folder) / program))
        for program in alternating(number):
            drop(Path(folder) / program)
            seconds[f"{program}, cold"].append(timed(LOADERS[program], blank, Path(folder) / program))
    assert all(torch.equal(blank[name].to_local(), tensor.to_local()) for name, tensor in tensors.items())
    read = torch.tensor(
        [bytes_read(partial(load, blank, Path(folder) / program), 0) for program, load in LOADERS.items()]
    )
    dist.all_reduce(read)
    if rank == 0:
        name = f"load {RANKS} -> {' x '.join(map(str, mesh_shape))}"
        report(name, seconds["dcp"], seconds["ours"], aims[0])
        report(f"{name}, cold", seconds["dcp, cold"], seconds["ours, cold"], aims[1])
        dcp_share, our_share = (at_least(size, num_bytes, "bytes read") / size for num_bytes in read.tolist())
        shares = f"DCP {dcp_share:.3f}, muonckpt {our_share:.4f}"
        print(f"\nBytes read / bytes of the checkpoint, {name}: {shares}\n", flush=True)
    dist.destroy_process_group()


def start(rank: int, ranks: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)


def alternating(number: int) -> list[str]:
    return list(SAVERS) if number % 2 else list(reversed(SAVERS))


HEADING = """\
| | DCP s | muonckpt s | ratio | ratios (min - max) | aim | DCP CPU s | muonckpt CPU s | ratio of CPU |
|---|---|---|---|---|---|---|---|---|"""


def report(operation: str, of_dcp: list[Seconds], ours: list[Seconds], aim: float) -> None:
    """One row of medians; the first round warms up.  The aim is that of time, or of CPU for one process."""
    (dcp_values, dcp_cpu), (our_values, our_cpu) = (zip(*values[1:], strict=True) for values in (of_dcp, ours))
    ratios = [our_value / dcp_value for our_value, dcp_value in zip(our_values, dcp_values, strict=True)]
    cpu_ratios = [our_value / dcp_value for our_value, dcp_value in zip(our_cpu, dcp_cpu, strict=True)]
    print(
        f"| {operation} | {statistics.median(dcp_values):.2f} | {statistics.median(our_values):.2f} | "
        f"{statistics.median(ratios):.2f} | {min(ratios):.2f} - {max(ratios):.2f} | {aim:.2f} | "
        f"{statistics.median(dcp_cpu):.2f} | {statistics.median(our_cpu):.2f} | {statistics.median(cpu_ratios):.2f} |",
        flush=True,
    )


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=os.environ.get("MUONCKPT_BENCH_DIR")) as folder:
        mp.spawn(alone, (folder,))
        mp.spawn(saver, (folder, free_port()), nprocs=RANKS)
        for mesh_shape, *aims in LOADS:
            mp.spawn(loader, (folder, free_port(), mesh_shape, *aims), nprocs=math.prod(mesh_shape))
