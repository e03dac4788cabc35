"""What `benchmarks/step.py` counts with, and the bound that it compares with; and the promise about bytes itself."""

from __future__ import annotations

import sys
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.workers import run
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import step
import traffic

UNEVEN = [[4, 0, 2], [1, 0, 5], [1, 3, 2]]
"""Elements that each of three ranks sends to each."""

SENT_ON_3_RANKS = {
    # what a rank gives, in bytes, by hand; rank 0 of three
    "all_reduce": (Counter(allreduce=1), 2 * 24 * 2 / 3),
    "all_gather": (Counter(allgather=1), 24 * 2),
    "all_gather_single": (Counter(all_gather_single=1), 24 * 2),
    "reduce_scatter_single": (Counter(reduce_scatter_single=1), 8 * 2),
    "equal all_to_all_single": (Counter(all_to_all_single=1), 8 * 2),
    "uneven all_to_all_single": (Counter(all_to_all_single=1), 4 * (0 + 2)),
    "nothing to send": (Counter(all_to_all_single=1), 0),
    "reduce to another": (Counter(reduce=1), 24),
    "reduce to me": (Counter(reduce=1), 0),
    "broadcast from me": (Counter(broadcast=1), 24),
    "broadcast from the next": (Counter(broadcast=1), 0),  # rank 0 is the last of the ring
    "barrier": (Counter(barrier=1), 0),
    # DTensors of 12 x 8 float32 by rows: a rank has 4 x 8
    "product of DTensors": (Counter(all_gather_single_coalesced=1), 4 * 8 * 4 * 2),
    "norm of a DTensor": (Counter(allreduce=1), 2 * 4 * 2 / 3),
}


def every_collective(rank: int, world: int) -> dict[str, tuple[Counter[str], float]]:
    seen = traffic.register()
    group = dist.new_group(list(range(world)), backend=traffic.BACKEND)
    six, two = torch.full((6,), float(rank)), torch.empty(2)
    sends, receives = UNEVEN[rank], [row[rank] for row in UNEVEN]
    rows = DTensor.from_local(torch.ones(4, 8) * rank, DeviceMesh.from_group(group, "cpu"), [Shard(0)])
    received = torch.empty(sum(receives))
    found = {}
    for name, collective in {
        "all_reduce": lambda: dist.all_reduce(six.clone(), group=group),
        "all_gather": lambda: dist.all_gather([torch.empty(6) for _ in range(world)], six, group=group),
        "all_gather_single": lambda: dist.all_gather_single(torch.empty(6 * world), six, group=group),
        "reduce_scatter_single": lambda: dist.reduce_scatter_single(two, six, group=group),
        "equal all_to_all_single": lambda: dist.all_to_all_single(torch.empty(6), six, group=group),
        "uneven all_to_all_single": lambda: dist.all_to_all_single(received, six, receives, sends, group),
        "nothing to send": lambda: dist.all_to_all_single(two[:0], six[:0], [0] * 3, [0] * 3, group),
        "reduce to another": lambda: dist.reduce(six.clone(), 1, group=group),
        "reduce to me": lambda: dist.reduce(six.clone(), 0, group=group),
        "broadcast from me": lambda: dist.broadcast(six.clone(), 0, group=group),
        "broadcast from the next": lambda: dist.broadcast(six.clone(), 1, group=group),
        "barrier": lambda: dist.barrier(group),
        "product of DTensors": lambda: rows @ rows.mT,
        "norm of a DTensor": lambda: rows.norm().full_tensor(),
    }.items():
        seen.reset()
        collective()
        found[name] = (Counter(seen.collectives), seen.sent)
    assert received.tolist() == [0.0] * receives[0] + [1.0] * receives[1] + [2.0] * receives[2]
    assert two.tolist() == [3.0, 3.0]
    with pytest.raises(RuntimeError, match="No backend"):
        dist.scatter(two, [two] * world if rank == 0 else None, 0, group=group)
    return found


def test_collectives_and_bytes_are_those_counted_by_hand():
    found = run(3, every_collective)[0]
    assert {name: counts for name, (counts, _) in found.items()} == {n: c for n, (c, _) in SENT_ON_3_RANKS.items()}
    for name, (_, sent) in SENT_ON_3_RANKS.items():
        assert found[name][1] == pytest.approx(sent), name


@pytest.mark.parametrize("sizes", [(512, 512, 512), (12, 12, 24, 48, 12), (96,), (12, 24, 36, 48, 60, 72)])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_least_is_never_above_the_best_assignment_of_whole_matrices(sizes, world):
    def busiest(owners: tuple[int, ...]) -> float:
        sent = [0.0] * world
        for size, owner in zip(sizes, owners, strict=True):
            for rank in range(world):
                share = 2 * size / world
                sent[rank] += share * (world - 1) if rank == owner else share
        return max(sent)

    best = min(busiest(owners) for owners in product(range(world), repeat=len(sizes)))
    assert step.least_bytes(sizes, world) <= best + 1e-9
    if len(set(sizes)) == 1 and (len(sizes) % world == 0 or len(sizes) < world):
        assert step.least_bytes(sizes, world) == pytest.approx(best)
