"""What `Series.note` costs a step of the optimizer: steps with a note and steps without in turn, on two gloo ranks.

    trail.py [--quick]

Matrices of 1024 x 1024 in rows over both ranks; the step is the optimizer's alone, without forward and backward.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from checkpoint import free_port, start
from machine import describe
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import muonckpt
from muonckpt.optimizer import Muon

RANKS, SIDE = 2, 1024
ROUNDS, MATRICES = (2, 4) if "--quick" in sys.argv else (15, 24)


def rank_of(rank: int, folder: str, port: int) -> None:
    start(rank, RANKS, port)
    mesh = init_device_mesh("cpu", (RANKS,))
    named = []
    for number in range(MATRICES):
        weight = torch.nn.Parameter(distribute_tensor(torch.randn(SIDE, SIDE), mesh, [Shard(0)]))
        weight.grad = torch.randn_like(weight)
        named.append((str(number), weight))
    optimizer = Muon(named, lr=1e-3)
    steps, notes = list[float](), list[float]()
    with muonckpt.Series(folder) as series:
        for number in range(ROUNDS + 1):
            dist.barrier()
            began = time.perf_counter()
            optimizer.step()
            stepped = time.perf_counter()
            dist.barrier()
            noting = time.perf_counter()
            series.note(number, optimizer)
            noted = time.perf_counter()
            if number:  # the first one makes plans
                steps.append(stepped - began)
                notes.append(noted - noting)
    if rank == 0:
        share = statistics.median(note / step for note, step in zip(notes, steps, strict=True))
        least, most = (end(note / step for note, step in zip(notes, steps, strict=True)) for end in (min, max))
        print(f"{describe()}; {MATRICES} matrices of {SIDE} x {SIDE}, {RANKS} ranks, {ROUNDS} rounds\n")
        print("| step ms | note ms | note / step (min - max) |\n|---|---|---|")
        print(
            f"| {1e3 * statistics.median(steps):.0f} | {1e3 * statistics.median(notes):.1f} | "
            f"{share:.4f} ({least:.4f} - {most:.4f}) |"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_of, (folder, free_port()), RANKS)
