"""One planner for every topology: on any mesh the update is the one of a single process, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.every_kind import make, single, values
from support.workers import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from muonckpt.layouts.tensors import local_of
from muonckpt.optimizer import Muon

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "train.md"
NAMES = "xyz"
"""Of mesh axes: nothing depends on them."""


@dataclass(frozen=True)
class Home:
    """Where parameters live: on a mesh, or on some axes of it, and what each of these does to them."""

    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]
    axes: str = ""

    def opened(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """What puts a tensor there.  A dim that the tensor does not have is its last one."""
        mesh = init_device_mesh("cpu", self.mesh, mesh_dim_names=tuple(NAMES[: len(self.mesh)]))
        mesh = mesh[tuple(self.axes)] if self.axes else mesh

        def place(tensor: torch.Tensor) -> torch.Tensor:
            fit = [Shard(min(p.dim, tensor.ndim - 1)) if type(p) is Shard else p for p in self.placements]
            return distribute_tensor(tensor, mesh, fit, src_data_rank=None)

        return place

    def __str__(self) -> str:
        what = {axis: str(p) for axis, p in zip(self.axes or NAMES, self.placements, strict=False)}
        named = ", ".join(f"{size}: {what.get(axis, '–')}" for axis, size in zip(NAMES, self.mesh, strict=False))
        return named.replace("_StridedShard(dim=0, sf=2)", "_StridedShard(0, 2)")


S, R, STRIDED = Shard, Replicate(), _StridedShard(0, split_factor=2)
PLAIN = None
"""A tensor of this process alone, or of DDP."""

TOPOLOGIES: dict[str, tuple[Home | None, ...]] = {
    "FSDP2, rows": (Home((4,), (S(0),)),),
    "FSDP2, rows, 3 ranks": (Home((3,), (S(0),)),),
    "FSDP2, columns": (Home((3,), (S(1),)),),
    "HSDP": (Home((2, 2), (R, S(0))),),
    "HSDP, replicas inside": (Home((2, 2), (S(0), R)),),
    "tensor parallel, columns or rows": (Home((4,), (S(1),)), Home((4,), (S(0),))),
    "FSDP2 × TP": (Home((2, 2), (STRIDED, S(0))),),
    "FSDP2 × TP, crosswise": (Home((2, 2), (S(0), S(1))),),
    "FSDP2 × TP on 8 ranks": (Home((4, 2), (STRIDED, S(0))), Home((4, 2), (S(0), S(1)))),
    "HSDP × TP": (Home((2, 2, 2), (R, STRIDED, S(0))),),
    "EP, and dense parameters in replicas": (Home((4,), (S(0),)), Home((4,), (R,))),
    "EP × FSDP2, experts again": (Home((2, 2), (S(0), S(0))),),
    "EP × FSDP2, rows": (Home((2, 2), (S(0), S(1))),),
    "EP × FSDP2, columns, 6 ranks": (Home((3, 2), (S(0), S(2))),),
    "EP × HSDP": (Home((2, 2, 2), (S(0), R, S(1))),),
    "replicas on both axes": (Home((2, 2), (R, R)),),
    "parts on different meshes": (
        Home((4,), (S(0),)),
        Home((2, 2), (S(1), S(0))),
        Home((2, 2), (S(0),), axes="y"),
        Home((2, 2), (S(0),), axes="x"),
    ),
    "DDP": (PLAIN,),
    "plain and sharded in one group": (PLAIN, Home((2, 2), (S(0), S(1)))),
}


def world_of(homes: tuple[Home | None, ...]) -> int:
    return max((math.prod(home.mesh) for home in homes if home), default=3)


def differing(rank: int, world: int, homes: tuple[Home | None, ...], expected: list[torch.Tensor]) -> list[str]:
    """Train, and compare what this rank holds with its part of what a single process has, as torch cuts it."""
    places = [home.opened() if home else lambda tensor: tensor for home in homes]

    def place(index: int, tensor: torch.Tensor) -> torch.Tensor:
        return places[index % len(places)](tensor)

    params = [nn.Parameter(place(index, v)) for index, v in enumerate(values(0, torch.float32))]
    opt = make(params, replicas=dist.group.WORLD)
    for step in range(1, 6):
        for index, (p, g) in enumerate(zip(params, values(step, torch.float32), strict=True)):
            p.grad = place(index, g)
        opt.step()
    found = [tensor for p in params for tensor in (p, *(opt.state[p][slot] for slot in sorted(opt.state[p])))]
    return [
        f"{tuple(have.shape)}: {have.sub(part).abs().max()}"
        for have, part in zip(map(local_of, found), map(part_of, expected, found), strict=True)
        if have.dtype != part.dtype or not torch.equal(have, part)
    ]


def part_of(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()


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


def hsdp_owners(rank: int, world: int) -> list[tuple[int, ...]]:
    mesh = init_device_mesh("cpu", (2, 2))
    place = [Replicate(), Shard(0)]
    params = [nn.Parameter(distribute_tensor(torch.randn(8, 8), mesh, place, src_data_rank=None)) for _ in range(8)]
    opt = Muon(params)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    [pipeline] = opt._pipelines()
    return [unit.owners for unit in pipeline.schedule.units]


def test_replicas_share_the_work():
    for owners in run(4, hsdp_owners):
        assert sorted(owners) == [(0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,)]
