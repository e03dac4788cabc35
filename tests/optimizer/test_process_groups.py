"""The first step never hangs: process groups are used where there are some, and made under names that all agree on."""

from __future__ import annotations

from itertools import combinations
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.random_topologies import Home, Stage, Topology, differing, drawn
from support.workers import run
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from muonckpt.optimizer import Muon
from muonckpt.optimizer.planning.schedule import NOTE
from muonckpt.optimizer.step.rank_sets import group_of, groups_of_mesh

MATRIX, EXPERTS, SHARED = 0, 2, 4
"""Numbers of kinds of parameters in `support.random_topologies`."""

HUNG = {
    "dense on two axes, experts on two others": Topology(
        (Stage(tuple(range(8)), (2, 2, 2), (Home(MATRIX, (0, 1), (0, 0)), Home(EXPERTS, (1, 2), (0, 1))), False),), ()
    ),
    "FSDP and TP in pipeline stages, and a group of leaders": Topology(
        tuple(
            Stage(ranks, (2, 2), (Home(MATRIX, (0, 1), (0, 1)), Home(SHARED, (0, 1), (0, 0))), False)
            for ranks in ((0, 1, 2, 3), (4, 5, 6, 7))
        ),
        ((0, 4),),
    ),
    "replicas of which some are in one more group": Topology(
        tuple(Stage(ranks, (4,), (Home(MATRIX, (), ()),), True) for ranks in ((0, 1, 2, 3), (4, 5, 6, 7))), ((0, 1, 5),)
    ),
}
"""What used to wait for the time-out, as members were in different numbers of groups."""


def all_differing(rank: int, world: int, topologies: list[Topology]) -> list[str]:
    return [where for topology in topologies for where in differing(rank, topology)]


@pytest.mark.parametrize("name", HUNG)
def test_members_may_be_in_different_numbers_of_groups(name: str) -> None:
    assert run(8, all_differing, [HUNG[name]]) == [[]] * 8


@pytest.mark.parametrize(("world", "count"), [(2, 5), (4, 12), (6, 4), (8, 3)])
def test_random_topologies_give_the_bits_of_one_process(world: int, count: int) -> None:
    """Stages, meshes and parts of them, replicas, plain tensors, and groups of which only some ranks are members."""
    topologies = [drawn(world, seed) for seed in range(count)]
    assert run(world, all_differing, topologies) == [[]] * world


def existing() -> int:
    """How many process groups this process is a member of."""
    return len(c10d._world.pg_map)


def by_rows(*shape: int) -> nn.Parameter:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    param = nn.Parameter(distribute_tensor(torch.ones(shape), mesh, [Shard(0)], src_data_rank=None))
    param.grad = torch.ones_like(param)
    return param


def new_groups(rank: int, world: int) -> int:
    """How many groups a step makes for parameters that have a group already, by their mesh or as it is given."""
    grid = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))
    replicas = dist.new_group([0, 1])
    params = []
    for axes in ("c", ("b", "c"), ("a", "b"), ("a", "b", "c")):
        mesh = grid[axes]
        place = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
        params.append(nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh, place, src_data_rank=None)))
    opt = Muon([*params, nn.Parameter(torch.ones(8, 4))], replicas=replicas if rank < 2 else None)
    for param in opt.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    before = existing()
    opt.step()
    return existing() - before


def test_groups_that_exist_are_used() -> None:
    assert run(4, new_groups) == [0] * 4


# --- connections ----------------------------------------------------------------------------------------------------


def first_exchanges(rank: int, world: int) -> list[tuple[tuple[str, str], int]]:
    """All exchanges of the first step, but for what ranks compare: the group's name, the function, and bytes."""
    grid, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), []
    params = []
    for axes, shape in (("b", (8, 12)), ("a", (8, 12)), (("a", "b"), (64, 256)), (("a", "b"), (8, 8))):
        mesh = grid[axes]
        value = distribute_tensor(torch.ones(shape), mesh, [Shard(0)] * mesh.ndim, src_data_rank=None)
        params.append(nn.Parameter(value))
        params[-1].grad = torch.ones_like(value)

    def recorded(honest):
        def call(output, sent, *args, **kwargs):
            group = next(arg for arg in args if isinstance(arg, dist.ProcessGroup))
            if honest is not gather or sent.nbytes != NOTE:
                found.append(((group.group_name, honest.__name__), sent.nbytes))
            return honest(output, sent, *args, **kwargs)

        return call

    gather = dist.all_gather
    with (
        patch.object(dist, "all_to_all_single", recorded(dist.all_to_all_single)),
        patch.object(dist, "all_gather", recorded(gather)),
    ):
        Muon(params).step()
    return found


def test_all_connections_are_made_before_the_first_exchange_in_one_order() -> None:
    """Of the mesh, and of both of its axes."""
    orders = []
    for found in run(4, first_exchanges):
        bytes_each = [size for _, size in found]
        first = next(index for index, size in enumerate(bytes_each) if size > 4)
        connected = [what for what, _ in found[:first]]
        assert len(set(connected)) == first and set(connected) == {what for what, _ in found}
        assert min(bytes_each[first:]) > 4
        orders.append(connected)
    assert {len({name for name, _ in order}) for order in orders} == {3}
    for one, other in combinations(orders, 2):
        assert [what for what in one if what in other] == [what for what in other if what in one]


def time_out_of_our_group(rank: int, world: int) -> float:
    grid = init_device_mesh("cpu", (2, 2))
    group = group_of((0, 1, 2) if rank < 3 else (3,), *groups_of_mesh(grid))
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds() if group is not None else 0.0


def test_our_own_groups_wait_as_long_as_the_world() -> None:
    assert run(4, time_out_of_our_group, timeout=84.0) == [42.0, 42.0, 42.0, 0.0]
