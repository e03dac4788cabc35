"""How long live state takes to another mesh, beside gathering full tensors and beside DTensor.redistribute.

    python benchmarks/redistribute.py [--limit 60] [--rows 1024]

Starts processes on gloo by itself.  DTensor.redistribute changes placements on one mesh, so it stands only where both
meshes are one.  Gathering makes every tensor whole on every rank, one at a time, and cuts out what belongs there; it
needs a mesh that all ranks are on.  Ways are timed in turn; medians of the slowest rank.  Bytes are those that all
ranks received from others; of gathering, what every rank lacks of the whole tensors.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from machine import describe
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import muonckpt
from muonckpt.layouts.boxed_tensor import parts_of

ROUNDS = 7
TENSORS = 8
WORLD = 4

S, R = Shard, Replicate()


@dataclass(frozen=True)
class Case:
    """From one mesh to another: their ranks and placements, and the shape of the tensors, with rows to be filled in."""

    name: str
    source: tuple[list[int] | list[list[int]], tuple[Placement, ...]]
    target: tuple[list[int] | list[list[int]], tuple[Placement, ...]]
    experts: int = 0


CASES = (
    Case("rows of 4 to columns of 4", ([0, 1, 2, 3], (S(0),)), ([0, 1, 2, 3], (S(1),))),
    Case("rows of 4 to rows of 3", ([0, 1, 2, 3], (S(0),)), ([0, 1, 2], (S(0),))),
    Case("EP 4 x 1 to EP 2 x 2", ([[0], [1], [2], [3]], (S(0), S(1))), ([[0, 1], [2, 3]], (S(0), S(1))), experts=8),
    Case("HSDP 2 x 2 to rows of 4", ([[0, 1], [2, 3]], (R, S(0))), ([0, 1, 2, 3], (S(0),))),
    Case("trainers 0, 1 to engines 2, 3", ([0, 1], (S(0),)), ([2, 3], (S(1),))),
)


def placed(
    shape: tuple[int, ...], mesh_and_placements: tuple[list[int] | list[list[int]], tuple[Placement, ...]]
) -> list[DTensor]:
    torch.manual_seed(0)  # replicas are alike
    mesh = DeviceMesh("cpu", mesh_and_placements[0])
    return [
        distribute_tensor(torch.randn(shape), mesh, mesh_and_placements[1], src_data_rank=None) for _ in range(TENSORS)
    ]


def gathered(source: list[DTensor], target: list[DTensor]) -> None:
    for old, new in zip(source, target, strict=True):
        whole = old.full_tensor()
        for lo, part in parts_of(new).items():
            part.copy_(whole[tuple(slice(a, a + n) for a, n in zip(lo, part.shape, strict=True))])


def redistributed(source: list[DTensor], target: list[DTensor]) -> None:
    for old, new in zip(source, target, strict=True):
        new.to_local().copy_(old.redistribute(new.device_mesh, new.placements).to_local())


def slowest(work: Callable[[], object]) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    work()
    spent = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent)


def total(number: int) -> int:
    summed = torch.tensor(number)
    dist.all_reduce(summed)
    return int(summed)


def lower_bound(source: list[DTensor], target: list[DTensor]) -> int:
    """Bytes that this rank does not have and is to have."""
    missing = 0
    for old, new in zip(source, target, strict=True):
        is_local = torch.zeros(old.shape, dtype=torch.bool)
        for mark, tensor in ((True, old), (False, new)):
            for lo, part in parts_of(tensor).items():
                window = is_local[tuple(slice(a, a + n) for a, n in zip(lo, part.shape, strict=True))]
                missing += 0 if mark else int((~window).sum()) * tensor.itemsize
                window.fill_(True)
    return missing


def measure(case: Case, rows: int, memory: int, until: float) -> str:
    """One line of the table, on rank 0."""
    shape = (case.experts, rows // case.experts, 1024) if case.experts else (rows, 1024)
    source, target = placed(shape, case.source), placed(shape, case.target)
    report = muonckpt.redistribute(_state(source), _state(target), memory=memory, attest=True)
    bound = total(lower_bound(source, target))
    if total(report.received) != bound:
        raise SystemExit(f"{case.name}: {total(report.received)} bytes moved, the bound is {bound}")
    ways: dict[str, Callable[[], object]] = {
        "ours": lambda: muonckpt.redistribute(_state(source), _state(target), memory=memory)
    }
    everywhere = torch.tensor(case.source[0]).numel() == WORLD
    if everywhere:
        ways["gather"] = lambda: gathered(source, target)
    if case.source[0] == case.target[0]:
        ways["torch"] = lambda: redistributed(source, target)
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(ROUNDS + 1):
        for way, work in ways.items():
            times[way].append(slowest(work))
        if total(number > 0 and time.monotonic() > until):
            break
    spent = {way: statistics.median(seconds_of_way[1:] or seconds_of_way) for way, seconds_of_way in times.items()}
    whole = sum(tensor.numel() * tensor.itemsize for tensor in source)
    # What a rank of the mesh lacks of the whole.
    lacking_bytes = (
        total(sum((old.numel() - old.to_local().numel()) * old.itemsize for old in source)) if everywhere else 0
    )
    cells = [case.name, f"{whole / 1e6:.0f}", f"{bound / 1e6:.1f}", f"{lacking_bytes / 1e6:.1f}" if everywhere else "–"]
    cells += [f"{spent[way] * 1e3:.0f}" if way in spent else "–" for way in ("ours", "gather", "torch")]
    cells += [str(report.stages), f"{report.buffers / 1e6:.1f}", f"{whole / TENSORS / 1e6:.1f}" if everywhere else "–"]
    return f"| {' | '.join(cells)} |"


def _state(tensors: list[DTensor]) -> dict[str, Tensor]:
    return {f"layer{number}": tensor for number, tensor in enumerate(tensors)}


def work(rank: int, port: int, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    begin = time.monotonic()
    for number, case in enumerate(CASES, 1):
        line = measure(case, arguments.rows, arguments.memory, begin + arguments.limit * number / len(CASES))
        if rank == 0:
            print(line, flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of timing, about")
    parser.add_argument("--rows", type=int, default=1024, help="of each tensor")
    parser.add_argument("--memory", type=int, default=4 << 20, help="bytes of exchange buffers of a rank")
    arguments = parser.parse_args()
    print(f"{describe()}, {WORLD} processes on gloo, {TENSORS} tensors of float32\n")
    print(
        "| | MB in all | MB moved, ours = bound | MB moved, gather | ours, ms | gather, ms | DTensor.redistribute, ms "
        "| stages | buffers of a rank, MB | whole tensor, MB |\n|---|---|---|---|---|---|---|---|---|---|",
        flush=True,
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(work, (port, arguments), nprocs=WORLD)


if __name__ == "__main__":
    main()
