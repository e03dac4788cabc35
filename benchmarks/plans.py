"""Our plan of a step at any number of ranks, from one process: parameters on the meta device over a fake process group.

Nothing is computed or sent.  Dense weights are sharded by rows over all ranks.  The routed experts of a layer are
shared out over EP groups and, within one, by whole experts if they come out even, else by the rows of every expert.
"""

from __future__ import annotations

import math
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from models import STEPS, Matrix, Model, Weight
from peers import HALF, rest_whole
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from muonckpt.lab.forecasting.topologies import most_wires
from muonckpt.layouts.tensors import layout_of
from muonckpt.names.collector import gc_paused
from muonckpt.optimizer.newton_schulz.recipe import flops
from muonckpt.optimizer.planning.matrices import PRECISIONS, Fused, Slot, Spec
from muonckpt.optimizer.planning.residence import residence
from muonckpt.optimizer.planning.schedule import NOTE, Schedule, Stage, make_schedule


@dataclass(frozen=True, slots=True)
class Case:
    """Weights on ``ranks`` ranks, the experts in ``ep`` groups."""

    model: Model
    ranks: int
    ep: int


@dataclass(frozen=True, slots=True)
class Numbers:
    """What there is to know of a plan.

    Attributes:
        units: matrices.
        sent: bytes that each rank sends to others.
        flops: Newton-Schulz of each rank.
        serial: the same on the critical path, if every stage waits for its slowest rank.
        stages: rounds, each of two collectives.
        peak: most bytes of wires that one of the ranks looked at has at once.
        share: the same over two stages of what it sends to and receives from others, if all were of one size.
        planning: CPU seconds from parameters to wires, for one rank.
        building: CPU seconds to make the parameters.
    """

    units: int
    sent: tuple[int, ...]
    flops: tuple[int, ...]
    serial: int
    stages: int
    peak: int
    share: float
    planning: float
    building: float


@contextmanager
def fake_world(ranks: int, rank: int) -> Iterator[None]:
    """A process group of which this process is one rank; the others are not there, and it waits for none."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def parameters(case: Case) -> list[DTensor]:
    """The weights as one rank of the fake world has them, on the meta device."""
    rank, group = dist.get_rank(), case.ranks // case.ep
    flat = DeviceMesh("cpu", list(range(case.ranks)))
    grid = DeviceMesh("cpu", torch.arange(case.ranks).view(group, case.ep))

    def place(weight: Weight) -> DTensor:
        *stack, rows, columns = weight.shape
        if not stack:
            return _on_meta(weight.shape, (_part(rows, case.ranks, rank), columns), flat, [Shard(0)])
        [experts] = stack
        if rest_whole(experts, case.ranks, case.ep):
            local = (experts // case.ranks, rows, columns)
            return _on_meta(weight.shape, local, grid, [_StridedShard(0, split_factor=case.ep), Shard(0)])
        local = (experts // case.ep, _part(rows, group, rank // case.ep), columns)
        return _on_meta(weight.shape, local, grid, [Shard(1), Shard(0)])

    return [place(weight) for weight in case.model.weights]


def _part(rows: int, parts: int, index: int) -> int:
    """Rows of one part as torch cuts them: equal ones, until there are none left."""
    size = math.ceil(rows / parts)
    return max(0, min(size, rows - index * size))


def _on_meta(shape: Sequence[int], local: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    strides = torch.empty(shape, device="meta").stride()
    part = torch.empty(local, dtype=torch.bfloat16, device="meta")
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides)


def plan(case: Case, rank: int) -> tuple[Schedule, list[Spec], float, float]:
    """One rank's part of the schedule, the parameters as planning sees them; CPU seconds to plan and to build these."""
    with fake_world(case.ranks, rank):
        begin = time.process_time()
        params = parameters(case)
        built = time.process_time()
        with gc_paused():
            specs = [_spec(param, weight) for param, weight in zip(params, case.model.weights, strict=True)]
            schedule = make_schedule(specs, tuple(range(case.ranks)), rank)
        return schedule, specs, time.process_time() - built, built - begin


def planning_of(case: Case) -> tuple[int, float, int]:
    """The matrices, CPU seconds to plan the first rank's part, and the most bytes that Python had for it at once."""
    schedule, _, seconds, _ = plan(case, 0)
    with fake_world(case.ranks, 0):
        params = parameters(case)
        tracemalloc.start()
        with gc_paused():
            specs = [_spec(param, weight) for param, weight in zip(params, case.model.weights, strict=True)]
            make_schedule(specs, tuple(range(case.ranks)), 0)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return len(schedule.units), seconds, peak


def _spec(param: DTensor, weight: Weight) -> Spec:
    half = PRECISIONS["bfloat16"]
    slot = Slot("momentum_buffer", layout_of(param), Fused(weight.pieces or None), half.sent_dtype, half.returned_dtype)
    return Spec((slot,), _cost)


def _cost(m: int, n: int) -> int:
    return flops(m, n, STEPS)


def plan_of(case: Case) -> Numbers:
    """Our plan: owners, stages and bytes of all ranks; wires of the first, the middle and the last.

    Raises:
        RuntimeError: those ranks plan differently, or their wires carry other bytes than the owners say.
    """
    schedule, specs, planning, building = plan(case, 0)
    other_ranks = sorted({case.ranks // 2, case.ranks - 1} - {0})
    parts = {0: schedule, **{rank: plan(case, rank)[0] for rank in other_ranks}}
    sent = sent_by(schedule, specs)
    for rank, part in parts.items():
        leaving_count, slack = leaving(part.stages, rank), 2 * len(part.stages) * NOTE * case.ranks
        if part.digest != schedule.digest or not 0 <= leaving_count - sent[rank] <= slack:
            raise RuntimeError(
                f"rank {rank} of {case} sends {leaving_count} bytes, the plan of rank 0 says {sent[rank]}"
            )
    work: Counter[tuple[int, int]] = Counter()
    for unit in schedule.units:
        work[unit.stage, unit.owner] += Matrix(*unit.rows_columns, 1, 0, 0).flops
    by_stage = np.zeros((len(schedule.stages), case.ranks), np.int64)
    by_stage[tuple(zip(*work, strict=True))] = list(work.values())
    fullest = max(parts, key=lambda rank: most_wires(parts[rank].stages))
    peak, stages = most_wires(parts[fullest].stages), parts[fullest].stages
    return Numbers(
        units=len(schedule.units),
        sent=tuple(sent),
        flops=tuple(by_stage.sum(axis=0).tolist()),
        serial=int(by_stage.max(axis=1).sum()),
        stages=len(schedule.stages),
        peak=peak,
        share=peak / (2 * (leaving(stages, fullest) + entering(stages, fullest)) / len(stages)),
        planning=planning,
        building=building,
    )


def sent_by(schedule: Schedule, specs: Sequence[Spec]) -> list[int]:
    """Bytes that each rank sends to others: what it holds of others' matrices, what of its own goes back, and notes."""
    ranks = len(schedule.ranks)
    sent = np.full(ranks, 2 * len(schedule.stages) * NOTE * (ranks - 1))
    for unit in schedule.units:
        [slot], owner = specs[unit.param].slots, unit.owner
        holders, resting_numel = residence(slot.layout, slot.fused, schedule.ranks)[unit.index]
        away = np.where(holders == owner, 0, resting_numel * HALF)
        sent[holders] += away
        sent[owner] += away.sum()
    return sent.tolist()


def leaving(stages: Sequence[Stage], at: int) -> int:
    """Bytes on all wires that the rank at this position sends to others; what it sends to itself is not among them."""
    routes = (route for stage in stages for route in (stage.gather, stage.scatter))
    return sum(sum(route.send_counts) - route.send_counts[at] for route in routes)


def entering(stages: Sequence[Stage], at: int) -> int:
    """Bytes that it receives from others."""
    routes = (route for stage in stages for route in (stage.gather, stage.scatter))
    return sum(sum(route.receive_counts) - route.receive_counts[at] for route in routes)
