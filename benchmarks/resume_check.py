"""What `restored.check` costs beside the restore that it proves, on gloo ranks that resume in turn.

    resume_check.py [--quick]

Matrices in rows over two ranks, which also saved them.  A restore checks each stored byte, and reads it into the
tensors, from a cached disk.
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

RANKS = 2
ROUNDS, MATRICES, SIDE = (2, 4, 256) if "--quick" in sys.argv else (9, 64, 1024)


def rank_of(rank: int, folder: str, port: int) -> None:
    start(rank, RANKS, port)
    mesh = init_device_mesh("cpu", (RANKS,))
    weights = {
        str(number): torch.nn.Parameter(distribute_tensor(torch.randn(SIDE, SIDE), mesh, [Shard(0)]))
        for number in range(MATRICES)
    }
    model = torch.nn.ParameterDict(weights)
    optimizer = Muon(model.named_parameters(), lr=1e-3)
    for weight in model.values():
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    state = {"model": dict(model.named_parameters()), "optimizer": optimizer}
    series = muonckpt.Series(folder)
    series.save(1, state)
    restores, checks = list[float](), list[float]()
    for _ in range(ROUNDS):
        dist.barrier()
        began = time.perf_counter()
        restored = series.restore(state)
        dist.barrier()
        checking = time.perf_counter()
        proof = restored.check(model, optimizer)
        dist.barrier()
        restores.append(checking - began)
        checks.append(time.perf_counter() - checking)
        assert proof.equal, str(proof)
    if rank == 0:
        ratios = [check / restore for check, restore in zip(checks, restores, strict=True)]
        nbytes = 2 * 4 * MATRICES * SIDE**2
        print(f"{describe()}; {nbytes / 1e9:.2f} GB of weights and momentum, {RANKS} ranks, {ROUNDS} rounds\n")
        print("| restore ms | check ms | check / restore (min - max) |\n|---|---|---|")
        print(
            f"| {1e3 * statistics.median(restores):.0f} | {1e3 * statistics.median(checks):.0f} | "
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f} - {max(ratios):.3f}) |"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_of, (folder, free_port()), RANKS)
