"""One planner for every topology: on any mesh the update is the one of a single process, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from test_muon import assert_same_bits, make, single, snapshot, train, values
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from workers import run


@dataclass(frozen=True)
class Topology:
    """A mesh, and what each of its axes does to a parameter; dims beyond a parameter's last are its last."""

    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]

    @property
    def world(self) -> int:
        return torch.Size(self.mesh).numel()


S, R = Shard, Replicate()
TOPOLOGIES = {
    "FSDP": Topology((4,), (S(0),)),
    "FSDP, columns": Topology((3,), (S(1),)),
    "HSDP": Topology((2, 2), (R, S(0))),
    "HSDP, replicas inside": Topology((2, 2), (S(0), R)),
    "TP, columns or rows": Topology((4,), (S(1),)),
    "FSDP x TP": Topology((2, 2), (_StridedShard(0, split_factor=2), S(0))),
    "FSDP x TP, crosswise": Topology((2, 2), (S(0), S(1))),
    "EP x FSDP, same dim": Topology((2, 2), (S(0), S(0))),
    "EP x FSDP, next dim": Topology((2, 2), (S(0), S(1))),
    "EP x HSDP": Topology((2, 2, 2), (S(0), R, S(1))),
    "replicas on both axes": Topology((2, 2), (R, R)),
}


def on_mesh(rank: int, world: int, topology: Topology) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", topology.mesh, mesh_dim_names=tuple("xyz"[: len(topology.mesh)]))

    def place(tensor: torch.Tensor) -> torch.Tensor:
        def fit(placement: Placement) -> Placement:
            if isinstance(placement, _StridedShard):
                return placement
            return Shard(min(placement.dim, tensor.ndim - 1)) if isinstance(placement, Shard) else placement

        return distribute_tensor(tensor, mesh, [fit(p) for p in topology.placements], src_data_rank=None)

    params = [nn.Parameter(place(v)) for v in values(0, torch.float32)]
    opt = make(params)
    train(params, opt, place, torch.float32)
    return snapshot(params, opt)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_the_update_is_the_one_of_a_single_process(name):
    topology = TOPOLOGIES[name]
    expected = single(torch.float32)
    for found in run(topology.world, on_mesh, topology):
        assert_same_bits(found, expected)


def several_meshes(rank: int, world: int) -> tuple[list[torch.Tensor], int]:
    """Every parameter on another mesh: all ranks in a row, a grid, this rank's half, and plain."""
    row, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    homes = [(row, [Shard(0)]), (grid, [Shard(1), Shard(0)]), (grid["b"], [Shard(0)]), (grid["a"], [Shard(0)]), None]

    def place(index: int, tensor: torch.Tensor) -> torch.Tensor:
        home = homes[index % len(homes)]
        if home is None:
            return tensor
        dims = [Shard(min(placement.dim, tensor.ndim - 1)) for placement in home[1]]
        return distribute_tensor(tensor, home[0], dims, src_data_rank=None)

    params = [nn.Parameter(place(index, v)) for index, v in enumerate(values(0, torch.float32))]
    opt = make(params)
    for step in range(1, 6):
        for index, (p, g) in enumerate(zip(params, values(step, torch.float32), strict=True)):
            p.grad = place(index, g)
        opt.step()
    return snapshot(params, opt), len(opt._pipelines())


def test_parameters_may_live_on_different_meshes():
    expected = single(torch.float32)
    for found, schedules in run(4, several_meshes):
        assert_same_bits(found, expected)
        assert schedules == 4  # row and grid have the same ranks; the halves and the plain tensors their own


def hsdp_owners(rank: int, world: int) -> list[int]:
    mesh = init_device_mesh("cpu", (2, 2))
    place = [Replicate(), Shard(0)]
    params = [nn.Parameter(distribute_tensor(torch.randn(8, 8), mesh, place, src_data_rank=None)) for _ in range(8)]
    opt = make_plain(params)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    return [unit.owners[0] for unit in opt._pipelines()[0].schedule.units]


def make_plain(params: list[torch.Tensor]):
    from muonckpt.optimizer import Muon

    return Muon(params)


def test_replicas_share_the_work():
    for owners in run(4, hsdp_owners):
        assert sorted(owners) == [0, 0, 1, 1, 2, 2, 3, 3]
