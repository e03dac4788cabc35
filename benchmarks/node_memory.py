"""What a copy in the memory of two nodes costs, beside a save to disk: bytes, seconds, and what the call takes.

    node_memory.py [--quick]

Four gloo ranks on two "nodes" (folders in /dev/shm) hold a sharded state.  "Call" is what training waits for;
"until it is there" includes the thread, all ranks together.  CPU is that of the calling thread, and of all threads of
all ranks, which a busy machine changes little.  "Sent" is what ranks send for a copy, and "bound" the bytes of the
elements, each once.  Restores go back into the same ranks.  Rounds alternate; medians of ratios.
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
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from checkpoint import free_port, start
from machine import at_least, describe
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from muonckpt import Series

RANKS, SIDE = 4, 1536
ROUNDS, MATRICES = (1, 4) if "--quick" in sys.argv else (5, 32)


class Seconds(NamedTuple):
    """What a call takes, and what it takes until what it has begun has ended on all ranks: CPU, and by the clock."""

    call_cpu: float
    call: float
    cpu: float
    whole: float


def timed(begin: Callable[[], Callable[[], object]]) -> Seconds:
    dist.barrier()
    entered, on_core, all_threads = time.perf_counter(), time.thread_time(), time.process_time()
    wait = begin()
    called = time.thread_time() - on_core, time.perf_counter() - entered
    wait()
    cpu = torch.tensor(time.process_time() - all_threads, dtype=torch.float64)
    dist.all_reduce(cpu)
    return Seconds(*called, float(cpu), time.perf_counter() - entered)


def rank_of(rank: int, folder: str, memory: str, port: int) -> None:
    start(rank, RANKS, port)
    mesh = init_device_mesh("cpu", (RANKS,))
    generator = torch.Generator().manual_seed(0)
    state = {
        str(number): distribute_tensor(
            torch.randn(SIDE, SIDE, generator=generator), mesh, [Shard(0)], src_data_rank=None
        )
        for number in range(MATRICES)
    }
    size = sum(tensor.nbytes for tensor in state.values())
    disk = Series(Path(folder) / "disk", keep_last=1)
    series_in_memory = Series(Path(folder) / "both", keep_last=1, memory=Path(memory) / f"node{rank // 2}")
    sent, honest = [0], dist.all_to_all_single

    def counted(receive: torch.Tensor, send: torch.Tensor, *args: object, **kwargs: object) -> object:
        sent[0] += send.nbytes
        return honest(receive, send, *args, **kwargs)

    def copied(step: int) -> Callable[[], object]:
        copy = series_in_memory.async_copy(step, state)
        assert copy is not None, "the one before has ended"
        return copy.result

    def restored(series: Series) -> Callable[[], object]:
        series.restore(state)
        return lambda: None

    ways: dict[str, Callable[[int], Callable[[], object]]] = {
        "async_copy": copied,
        "async_save": lambda step: disk.async_save(step, state).result,
        "restore, memory": lambda step: restored(series_in_memory),
        "restore, disk": lambda step: restored(disk),
        "restore, disk, attested": lambda step: (disk.restore(state, attest=True), lambda: None)[1],
    }
    took: defaultdict[str, list[Seconds]] = defaultdict(list)
    for number in range(ROUNDS + 1):
        names = list(ways)
        for name in (names[1::-1] + names[:1:-1]) if number % 2 else names:
            if name == "async_copy":
                dist.all_to_all_single, sent[0] = counted, 0
            seconds = timed(lambda name=name, number=number: ways[name](number))  # type: ignore[misc]
            dist.all_to_all_single = honest
            if number:
                took[name].append(seconds)
            if name == "async_copy":
                total = torch.tensor(sent[0])
                dist.all_reduce(total)
    if rank == 0:
        show(took, size, at_least(size, int(total), "bytes sent"))
    dist.barrier()
    dist.destroy_process_group()


def show(took: dict[str, list[Seconds]], size: int, sent: int) -> None:
    print(
        f"{describe()}; {size / 1e9:.2f} GB, {RANKS} ranks on 2 nodes, {ROUNDS} alternating rounds; load "
        f"{os.getloadavg()[1]:.0f}\n"
    )
    print(f"A copy sends {sent} bytes; the bound is {size}: {sent / size:.4f} of it.\n")
    print("| way | call, ms: CPU | time | until it is there, ms: CPU | time | beside disk: CPU | time |")
    print(f"{'|---' * 7}|")
    floors = {"async_copy": "async_save", "async_save": "async_save"}
    for name, seconds in took.items():
        floor = took[floors.get(name, "restore, disk")]
        ratios = (
            statistics.median(
                our_seconds[kind] / floor_seconds[kind]
                for our_seconds, floor_seconds in zip(seconds, floor, strict=True)
            )
            for kind in (2, 3)
        )
        columns = [f"{statistics.median(column) * 1e3:.0f}" for column in zip(*seconds, strict=True)]
        print(f"| {' | '.join([name, *columns, *map('{:.2f}'.format, ratios)])} |")


if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory(dir=os.environ.get("MUONCKPT_BENCH_DIR")) as folder,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
    ):
        mp.spawn(rank_of, (folder, memory, free_port()), nprocs=RANKS)
        shutil.rmtree(memory, ignore_errors=True)
        Path(memory).mkdir()
