"""What saving costs a training loop: steps that save now and then, in several ways, beside steps that never save.

    async_save.py [--quick]

Two gloo ranks train (products of matrices, and an all-reduce that ends a step) and save a state of about 0.3 GB every
fifth of 20 steps; each waits for the save before, and the last one is waited for.  Rounds alternate; medians of ratios.

"In the call" is what a call takes of the training thread: its CPU time, and its time, which is that of the clock less
what it has waited for a core, as the kernel counts it, so that other programs of a busy machine count little.  "Of the
loop" is what products, calls and waits for the save before take longer than without saving, in the same time; the
all-reduces wait for the other rank, and so for cores.  "All CPU" is what all threads and processes of a rank take until
the last save has ended, more than without saving: what is lost where no core is free.

torch_checkpointing is there if it is installed.  It copies in the call, as the others do (its own default is a thread,
and a lock around the optimizer's step), and has no resharders, which need CUDA there.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from checkpoint import free_port, start
from machine import describe
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import muonckpt

RANKS, STEPS, EVERY = 2, 20, 5
ROUNDS, MATRICES = (1, 4) if "--quick" in sys.argv else (7, 32)
SIDE, WORK, PRODUCTS = 1536, 768, 6

Wait = Callable[[], object]
Tensors = dict[str, torch.Tensor]


class Spent(NamedTuple):
    """Seconds of the training thread: on a core, and by the clock less what it has waited for one."""

    cpu: float
    own: float

    @classmethod
    def now(cls) -> Spent:
        on_core, waited, _ = map(int, Path("/proc/thread-self/schedstat").read_text().split())
        return cls(on_core / 1e9, time.perf_counter() - waited / 1e9)

    def __sub__(self, subtrahend: Spent) -> Spent:
        return Spent(self.cpu - subtrahend.cpu, self.own - subtrahend.own)


class Round(NamedTuple):
    call: Spent
    loop: float
    everything: float


def all_cpu(process: int | str = "self") -> float:
    """CPU seconds of a process and of all that it has started."""
    folder = Path(f"/proc/{process}")
    ticks = sum(map(int, (folder / "stat").read_text().rpartition(")")[2].split()[11:15]))
    children: list[str] = []
    for task in (folder / "task").iterdir():
        with suppress(FileNotFoundError):  # the thread has ended since
            children += (task / "children").read_text().split()
    return ticks / os.sysconf("SC_CLK_TCK") + sum(map(all_cpu, children))


def copied(tensors: Tensors, buffers: Tensors) -> Wait:
    """The floor: this rank's elements, copied once."""
    for name, tensor in tensors.items():
        assert isinstance(tensor, DTensor)
        buffers[name].copy_(tensor.to_local())
    return lambda: None


def ways(tensors: Tensors) -> Iterator[tuple[str, Callable[[Path], Wait]]]:
    """How to save; each returns what waits for the save."""
    buffers = {name: torch.zeros_like(tensor.to_local()) for name, tensor in tensors.items()}  # type: ignore[attr-defined]
    group = dist.new_group(backend="gloo")  # dcp's collectives would meet the barriers of the loop

    def at_once(path: Path) -> Wait:
        muonckpt.save(tensors, path)
        return lambda: None

    def stock(kind: AsyncCheckpointerType) -> Callable[[Path], Wait]:
        return lambda path: (
            dcp.async_save(dict(tensors), checkpoint_id=path, process_group=group, async_checkpointer_type=kind).result
        )  # type: ignore[union-attr]

    yield "a plain copy", lambda path: copied(tensors, buffers)
    yield "muonckpt.save", at_once
    yield "muonckpt.async_save", lambda path: muonckpt.async_save(tensors, path).result
    yield "dcp.async_save", stock(AsyncCheckpointerType.THREAD)
    yield "dcp.async_save, process", stock(AsyncCheckpointerType.PROCESS)
    if find_spec("torch_checkpointing"):
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        saver = AsyncCheckpointSaverConfig(staging_config=CheckpointStagerConfig(use_async_staging=False))
        storage = LocalFileSystemStorageConfig(use_direct_io=False)  # which not every file system has
        manager = CheckpointManager(CheckpointManager.Config(save=saver, storage_config=storage))
        yield "torch_checkpointing", lambda path: manager.save(str(path), {"model": tensors}).result


def trained(save: Callable[[Path], Wait] | None, folder: Path) -> Round:
    weights = torch.randn(WORK, WORK) / WORK**0.5
    x = torch.randn(WORK, WORK)
    wait: Wait = lambda: None  # noqa: E731
    called = []
    dist.barrier()
    everything, loop = all_cpu(), 0.0
    for step in range(STEPS):
        begin = Spent.now()
        for _ in range(PRODUCTS):
            x = (x @ weights).relu_()
        norm = x.norm()
        loop += (Spent.now() - begin).own
        dist.all_reduce(norm)
        begin = Spent.now()
        x = x / norm.clamp(min=1e-6)
        if save is not None and step % EVERY == 0:
            wait()
            entered = Spent.now()
            wait = save(folder / f"step-{step}")
            called.append(Spent.now() - entered)
        loop += (Spent.now() - begin).own
    wait()
    dist.barrier()
    call = Spent(sum(spent.cpu for spent in called), sum(spent.own for spent in called))
    return Round(call, loop, all_cpu() - everything)


def rank_of(rank: int, folder: str, port: int) -> None:
    start(rank, RANKS, port)
    mesh = init_device_mesh("cpu", (RANKS,))
    generator = torch.Generator().manual_seed(0)
    tensors: Tensors = {
        str(number): distribute_tensor(
            torch.randn(SIDE, SIDE, generator=generator), mesh, [Shard(0)], src_data_rank=None
        )
        for number in range(MATRICES)
    }
    saved: dict[str, Callable[[Path], Wait] | None] = {"nothing": None, **dict(ways(tensors))}
    rounds: defaultdict[str, list[Round]] = defaultdict(list)
    for number in range(ROUNDS + 1):
        for name in list(saved)[:: 1 if number % 2 else -1]:
            place = Path(folder) / "round"
            took = trained(saved[name], place)
            if rank == 0:
                shutil.rmtree(place, ignore_errors=True)
            dist.barrier()
            if number:
                rounds[name].append(took)
    if rank == 0:
        show(rounds, sum(tensor.nbytes for tensor in tensors.values()))
    dist.destroy_process_group()


def show(rounds: dict[str, list[Round]], size: int) -> None:
    load = os.getloadavg()[1]
    print(f"{describe()}; {size / 1e9:.2f} GB, {RANKS} ranks, {ROUNDS} alternating rounds; load {load:.0f}\n")
    print(
        "| way | in the call, ms: CPU | time | beside a plain copy: CPU | time | of the loop, ms a save "
        "| all CPU, ms a save | beside dcp.async_save: of the loop | all CPU |"
    )
    print(f"{'|---' * 9}|")
    saves = len(range(0, STEPS, EVERY))
    nothing, floor, stock = rounds.pop("nothing"), rounds["a plain copy"], rounds["dcp.async_save"]

    def lost(took: list[Round]) -> list[list[float]]:
        pairs = list(zip(took, nothing, strict=True))
        return [[a.loop - b.loop for a, b in pairs], [a.everything - b.everything for a, b in pairs]]

    def milliseconds(values: Iterable[float]) -> str:
        return f"{statistics.median(values) / saves * 1e3:.0f}"

    for name, took in rounds.items():
        calls = [milliseconds(each.call[kind] for each in took) for kind in (0, 1)]
        beside = [
            f"{statistics.median(a.call[kind] / b.call[kind] for a, b in zip(took, floor, strict=True)):.2f}"
            for kind in (0, 1)
        ]
        losses = lost(took)
        ratios = [
            f"{statistics.median(our_loss) / statistics.median(stock_loss):.2f}"
            for our_loss, stock_loss in zip(losses, lost(stock), strict=True)
        ]
        print(f"| {' | '.join([name, *calls, *beside, *map(milliseconds, losses), *ratios])} |")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=os.environ.get("MUONCKPT_BENCH_DIR")) as folder:
        mp.spawn(rank_of, (folder, free_port()), nprocs=RANKS)
