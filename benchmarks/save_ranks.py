"""What a save costs its coordinator in a job of thousands of ranks: memory and CPU time, by number of ranks.

One process stands for all ranks: it makes the description that each of them sends, pickled, of tensors in rows over one
mesh.  The coordinator unpickles them all and plans the save.  Memory is the peak that `tracemalloc` sees, in a run of
its own; the exponent is that of memory between the first and the last row.
"""

from __future__ import annotations

import argparse
import math
import pickle
import time
import tracemalloc
from dataclasses import replace

import torch
import torch.distributed as dist
from machine import describe
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from muonckpt.checkpoint.live_state import LiveState, RankState
from muonckpt.checkpoint.whole_plan import WholePlan
from muonckpt.layouts.mesh import fragments_on


def offers(num_tensors: int, num_ranks: int) -> list[bytes]:
    """Return what each rank sends, pickled."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    mesh = DeviceMesh("cpu", torch.arange(num_ranks), _init_backend=False)
    tensors: dict[str, torch.Tensor] = {}
    for number in range(num_tensors):
        size, stride = torch.Size((num_ranks, 8 + number)), (8 + number, 1)
        local = torch.ones(1, 8 + number)
        tensors[f"w{number}"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=size, stride=stride)
    described = LiveState.of({"model": tensors}, "to save").described
    dist.destroy_process_group()
    return [pickle.dumps((_of_rank(described, rank), {})) for rank in range(num_ranks)]


def _of_rank(described: RankState, rank: int) -> RankState:
    kinds = []
    for kind in described.form.kinds:
        if kind is not None and kind.placement is not None:
            fragments = fragments_on(kind.shape, kind.placement.mesh, kind.placement.placements, rank)
            kind = replace(kind, boxes=tuple(fragment.box for fragment in fragments))
        kinds.append(kind)
    form = described.form
    return RankState.of(form.keys, form.numbers, kinds, form.paths, form.names, form.optimizers)


def plan(sent: list[bytes]) -> WholePlan:
    states, digests = zip(*map(pickle.loads, sent), strict=True)
    return WholePlan.of(states, digests, range(len(states)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=40)
    parser.add_argument("--ranks", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    options = parser.parse_args()
    print(f"{describe()}; {options.tensors} tensors")
    print("\n| ranks | bytes of an offer | memory of the coordinator, MiB | CPU s |")
    print("|---|---|---|---|")
    peaks = {}
    for num_ranks in options.ranks:
        sent = offers(options.tensors, num_ranks)
        begin = time.process_time()
        plan(sent)
        seconds = time.process_time() - begin
        tracemalloc.start()
        plan(sent)
        peaks[num_ranks] = tracemalloc.get_traced_memory()[1] / 2**20
        tracemalloc.stop()
        print(f"| {num_ranks} | {len(sent[-1])} | {peaks[num_ranks]:.1f} | {seconds:.2f} |")
    (first, low), (last, high) = min(peaks.items()), max(peaks.items())
    if last > first:
        print(f"\nexponent of memory: {math.log(high / low) / math.log(last / first):.2f}")


if __name__ == "__main__":
    main()
