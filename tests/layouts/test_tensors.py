"""The door from live tensors: what each rank really holds is what the layout says it holds."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from support.oracle import scatter
from support.workers import run
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from muonckpt import LayoutError
from muonckpt.layouts.tensors import layout_of, local_of, mesh_placement_of


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def assert_held(tensor: torch.Tensor, rank: int, layout=None) -> None:
    """The local tensor of ``numbered(shape)`` against the element-wise oracle."""
    held = scatter(numbered(tuple(tensor.shape)).numpy(), layout or layout_of(tensor)).get(rank, {})
    local = local_of(tensor).contiguous().flatten().tolist()
    assert held == dict(enumerate(local))


PLACEMENTS = [
    ((4,), [Shard(0)]),
    ((4,), [Shard(-1)]),
    ((4,), [Replicate()]),
    ((2, 2), [Replicate(), Shard(0)]),
    ((2, 2), [Shard(0), Shard(0)]),
    ((2, 2), [Shard(1), Shard(0)]),
    ((2, 2), [Shard(1), Replicate()]),
]


def distributed(rank: int, world: int) -> None:
    for mesh_shape, placements in PLACEMENTS:
        mesh = init_device_mesh("cpu", mesh_shape)
        for shape in [(8, 8), (7, 5), (3, 16), (5,), (2, 3, 5)]:
            fit = [p if not isinstance(p, Shard) else Shard(min(p.dim, len(shape) - 1)) for p in placements]
            assert_held(distribute_tensor(numbered(shape), mesh, fit, src_data_rank=None), rank)


def test_distributed_tensors_lie_where_the_layout_says():
    run(4, distributed)


def other_rank_orders(rank: int, world: int) -> None:
    for ranks in ([3, 1, 0, 2], [[1, 3], [0, 2]]):
        mesh = DeviceMesh("cpu", ranks)
        placements = [Shard(0)] if mesh.ndim == 1 else [Shard(1), Shard(0)]
        assert_held(distribute_tensor(numbered((7, 5)), mesh, placements, src_data_rank=None), rank)


def test_a_mesh_may_list_its_ranks_in_any_order():
    run(4, other_rank_orders)


def fsdp_over_tp(rank: int, world: int, rows: int) -> list[str]:
    """torch describes the inner split by `_StridedShard`; the data must follow it, or the door must refuse."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    net = nn.Sequential(nn.Linear(6, rows, bias=False), nn.Linear(rows, 6, bias=False))
    with torch.no_grad():
        for layer in net:
            layer.weight.copy_(numbered(tuple(layer.weight.shape)))
    parallelize_module(net, mesh["model"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(net, mesh=mesh["data"])
    refused = []
    for name, parameter in net.named_parameters():
        try:
            layout = layout_of(parameter)
        except LayoutError as error:
            refused.append(str(error))
        else:
            assert_held(parameter, rank, layout)
            assert "StridedShard" in str(mesh_placement_of(parameter)) or name == "1.weight"
    return refused


@pytest.mark.parametrize("rows", [8, 7, 10])
def test_fsdp_over_tensor_parallel(rows):
    assert run(4, fsdp_over_tp, rows) == [[]] * 4


def partial(rank: int, world: int) -> str:
    mesh = init_device_mesh("cpu", (world,))
    try:
        layout_of(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()]))
    except LayoutError as error:
        return str(error)
    return "no error"


def test_a_partial_tensor_is_no_layout():
    for message in run(2, partial):
        assert "terms of a sum" in message and "redistribute" in message


def uneven_by_hand(rank: int, world: int) -> str:
    """Rows 1 + 3, which no torch.chunk makes."""
    mesh = init_device_mesh("cpu", (world,))
    local = torch.ones(1 if rank == 0 else 3, 5)
    tensor = DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size((4, 5)), stride=(5, 1), run_check=False)
    try:
        layout_of(tensor)
    except LayoutError as error:
        return str(error)
    return "no error"


def test_a_local_tensor_that_contradicts_its_placements_is_refused():
    for rank, message in enumerate(run(2, uneven_by_hand)):
        assert f"rank {rank} holds a local tensor of shape" in message


def lacks_a_placement(rank: int, world: int) -> None:
    """As Megatron-FSDP makes tensors where it has replicas and shards nothing."""
    mesh = init_device_mesh("cpu", (1, world))
    spec = DTensorSpec(mesh, (Replicate(),), TensorMeta(torch.Size((3, 4)), (4, 1), torch.float32))
    with pytest.raises(LayoutError, match=r"expected a placement for each axis of mesh \(1, 2\), found \(Replicate"):
        layout_of(DTensor(torch.ones(3, 4), spec, requires_grad=False))


def test_a_tensor_that_lacks_a_placement_is_refused():
    run(2, lacks_a_placement)


def test_a_plain_tensor_lies_whole_on_each_replica():
    tensor = numbered((4, 3))
    assert [f.place.buffer for f in layout_of(tensor).fragments] == [0]
    assert [f.place.buffer for f in layout_of(tensor, replicas=(0, 2, 5)).fragments] == [0, 2, 5]
    assert mesh_placement_of(tensor) is None


def let_go(rank: int, world: int) -> bool:
    mesh = init_device_mesh("cpu", (world,))
    tensor = DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)], run_check=False)
    assert layout_of(tensor).shape == (2 * world, 3) and mesh_placement_of(tensor)
    alive = weakref.ref(mesh)
    del mesh, tensor
    gc.collect()
    return alive() is None


def test_no_mesh_is_kept_alive():
    """With it would be its process groups, and their threads."""
    assert all(run(2, let_go))
