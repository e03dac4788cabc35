"""One planner for every topology: on any mesh the update is the one of a single process, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.every_kind import STEPS, make, single, values
from support.topologies import TOPOLOGIES, Home, part_of, placer, world_of
from support.workers import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from muonckpt.layouts.tensors import local_of
from muonckpt.optimizer import Muon

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "train.md"


def differing(rank: int, world: int, homes: tuple[Home | None, ...], expected: list[torch.Tensor]) -> list[str]:
    """Train, and compare what this rank holds with its part of what a single process has, as torch cuts it."""
    place = placer(homes)
    params = [nn.Parameter(place(index, v)) for index, v in enumerate(values(0, torch.float32))]
    opt = make(params, replicas=dist.group.WORLD)
    for step in range(1, STEPS + 1):
        for index, (p, g) in enumerate(zip(params, values(step, torch.float32), strict=True)):
            p.grad = place(index, g)
        opt.step()
    found = [tensor for p in params for tensor in (p, *(opt.state[p][slot] for slot in sorted(opt.state[p])))]
    return [
        f"{tuple(have.shape)}: {have.sub(part).abs().max()}"
        for have, part in zip(map(local_of, found), map(part_of, expected, found), strict=True)
        if have.dtype != part.dtype or not torch.equal(have, part)
    ]


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_the_update_is_the_one_of_a_single_process(name):
    homes = TOPOLOGIES[name]
    assert run(world_of(homes), differing, homes, single(torch.float32)) == [[]] * world_of(homes)


def test_the_guide_shows_what_is_tested():
    lines = ["| topology | ranks | mesh axes: what they do to a parameter |", "|---|---|---|"]
    for name, homes in TOPOLOGIES.items():
        where = "; ".join(str(home) if home else "not distributed" for home in homes)
        lines.append(f"| {name} | {world_of(homes)} | {where} |")
    assert "\n".join(lines) in GUIDE.read_text(), "put this into docs/guide/train.md:\n" + "\n".join(lines)


def hsdp_owners(rank: int, world: int) -> list[int]:
    mesh = init_device_mesh("cpu", (2, 2))
    place = [Replicate(), Shard(0)]
    params = [nn.Parameter(distribute_tensor(torch.randn(8, 8), mesh, place, src_data_rank=None)) for _ in range(8)]
    opt = Muon(params, stages=3)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    [schedule] = opt.schedules.values()
    return [unit.owner for unit in schedule.units]


def test_replicas_share_the_work():
    for owners in run(4, hsdp_owners):
        assert sorted(owners) == [0, 0, 1, 1, 2, 2, 3, 3]
