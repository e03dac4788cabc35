"""The first step never hangs: process groups are used where there are some, and made under names that all agree on."""

from __future__ import annotations

import copy
import warnings
from itertools import combinations
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support import sweep
from support.failing import raised
from support.least_squares import contents, same
from support.random_topologies import Home, Stage, Topology, differing, drawn
from support.workers import run
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
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


@pytest.mark.parametrize("name", sweep(HUNG, [*HUNG][2]))
def test_members_may_be_in_different_numbers_of_groups(name: str) -> None:
    assert run(8, all_differing, [HUNG[name]]) == [[]] * 8


SEEDS = [
    (4, range(4)),
    (6, range(1)),
    (8, range(1)),
    (2, range(5)),
    (4, range(4, 12)),
    (6, range(1, 4)),
    (8, range(1, 3)),
]


@pytest.mark.parametrize(("world", "seeds"), sweep(SEEDS, *SEEDS[:3]), ids=str)
def test_random_topologies_give_the_bits_of_one_process(world: int, seeds: range) -> None:
    """Stages, meshes and parts of them, replicas, plain tensors, and groups of which only some ranks are members."""
    topologies = [drawn(world, seed) for seed in seeds]
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


# --- groups that come and go ------------------------------------------------------------------------------------------


def net_and_groups() -> tuple[nn.Module, list[dict[str, Any]]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    vectors = {"params": [net[0].bias, net[2].bias], "algorithm": "adamw", "lr": 1e-3}
    return net, [{"params": [net[0].weight, net[2].weight]}, vectors]


def stepped(net: nn.Module, opt: torch.optim.Optimizer, step: int) -> None:
    """A step with the same gradients on every rank, so that it does not matter how many there are."""
    opt.zero_grad()
    net(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean().backward()
    opt.step()


def alone(steps: int) -> list[torch.Tensor]:
    net, groups = net_and_groups()
    opt = Muon(groups, lr=0.02)
    for step in range(steps):
        stepped(net, opt, step)
    return contents(net, opt)


def regrouped(rank: int, world: int, stores: list[str], expected: list[torch.Tensor]) -> tuple[int, bool]:
    """Train on all ranks, on all but the last in a new world, and on all again; the last joins with a state dict."""
    net, groups = net_and_groups()
    opt = Muon(groups, lr=0.02, replicas=dist.group.WORLD)
    sharded = by_rows(8, 4)
    shared = Muon([sharded])
    shared.step()
    stepped(net, opt, 0)
    dist.destroy_process_group()
    told = []
    for first, ranks, store in ((1, world - 1, stores[0]), (3, world, stores[1])):
        if rank < ranks:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
            told += [raised(shared.step), *([raised(opt.step)] if rank < world - 1 else [])]
            held = [copy.deepcopy((net.state_dict(), opt.state_dict()))]
            dist.broadcast_object_list(held, 0)
            opt = Muon(groups, lr=0.02, replicas=dist.group.WORLD)
            net.load_state_dict(held[0][0])
            opt.load_state_dict(held[0][1])
            for step in (first, first + 1):
                stepped(net, opt, step)
            dist.destroy_process_group()
    assert all("has been destroyed. Build another optimizer" in each for each in told), told
    return len(told), same(contents(net, opt), expected)


@pytest.mark.parametrize("world", [2, 4])
def test_a_destroyed_group_is_told_at_once_and_a_new_optimizer_goes_on_with_the_state(world, tmp_path) -> None:
    """As elastic trainers make groups anew, of fewer ranks and of more; waiting for who is gone takes the time-out."""
    found = run(world, regrouped, [str(tmp_path / "a"), str(tmp_path / "b")], alone(5), timeout=120.0)
    assert found == [(4, True)] * (world - 1) + [(1, True)]


class Reconfigured(dist.ProcessGroup):
    """A group whose ranks change while it stays the same object, as those of torchft."""

    def __init__(self, ranks: int) -> None:
        super().__init__(0, ranks)
        self.ranks = ranks

    def size(self) -> int:
        return self.ranks


def reconfigured(rank: int, world: int) -> str:
    group = Reconfigured(world)
    c10d._world.pg_group_ranks[group] = {number: number for number in range(world)}
    net, groups = net_and_groups()
    opt = Muon(groups, lr=0.02, replicas=group)
    group.ranks = 1
    return raised(stepped, net, opt, 0)


def test_a_group_of_other_ranks_than_before_is_told() -> None:
    assert all("has 1 ranks now, and was made for 2" in told for told in run(2, reconfigured))


def zero_redundancy(rank: int, world: int, first: int, last: int, state: Any, expected: Any) -> Any:
    net, groups = net_and_groups()
    opt = ZeroRedundancyOptimizer(groups, Muon, lr=0.02)
    if state is not None:
        net.load_state_dict(state[0])
        opt.load_state_dict(state[1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(first, last):
            stepped(net, opt, step)
    assert not any("no parameter of this optimizer" in str(each.message) for each in caught), "a rank may have none"
    opt.consolidate_state_dict(0)
    if expected is not None:
        assert same([param.detach() for param in net.parameters()], expected)
    return (net.state_dict(), opt.state_dict()) if rank == 0 else None


@pytest.mark.parametrize(("saved", "resumed"), [(4, 2), (2, 4)])
def test_zero_redundancy_optimizer_takes_the_same_steps_on_any_number_of_ranks(saved: int, resumed: int) -> None:
    net, groups = net_and_groups()
    opt = Muon(groups, lr=0.02)
    for step in range(4):
        stepped(net, opt, step)
    state = run(saved, zero_redundancy, 0, 2, None, None)[0]
    run(resumed, zero_redundancy, 2, 4, state, [param.detach() for param in net.parameters()])


def replicas_through_zero(rank: int, world: int) -> str:
    _, groups = net_and_groups()
    return raised(lambda: ZeroRedundancyOptimizer(groups, Muon, lr=0.02, replicas=dist.group.WORLD))


def test_options_of_the_whole_optimizer_are_refused_there() -> None:
    """It writes every argument into the groups, and has shared parameters out already."""
    assert all("replicas=" in told and "groups have no such option" in told for told in run(2, replicas_through_zero))
