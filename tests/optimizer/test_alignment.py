"""The bits of a method do not depend on where its matrices lie, which depends on how many their owner has."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import sweep
from support.workers import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from muonckpt.optimizer import MatrixMethod, MethodSlot, Muon, Option, WholeMatrix, of_each

Place = Callable[[torch.Tensor], torch.Tensor]


def whitened(whole: WholeMatrix) -> torch.Tensor:
    """Products of the matrix with itself and with state: the bits of both depend on addresses."""
    whole.state["mean"].lerp_(whole.matrix @ whole.matrix.mT @ whole.matrix, 0.1)
    return whole.state["mean"] @ whole.matrix.mT @ whole.matrix


def by_rows(whole: WholeMatrix) -> torch.Tensor:
    """A product with state that travels, and one with the weight."""
    assert whole.weight is not None
    whole.state["rows"].lerp_(whole.matrix.float() @ whole.weight.mT.float() @ whole.state["rows"] + 1, 0.1)
    return whole.matrix.float() * whole.state["rows"].sigmoid()


def one_by_one(whole: WholeMatrix) -> torch.Tensor:
    """Products of each matrix of a stack and of its state, as the library's own stacked methods make their sums."""
    doubled = whole.matrix.float() * 2
    whole.state["mean"].lerp_(of_each(lambda matrix: matrix @ matrix.T @ matrix, doubled), 0.1)
    sizes = of_each(lambda mean: (mean @ mean.T).norm(), whole.state["mean"])
    return of_each(lambda matrix: matrix @ matrix.T @ matrix, doubled) * sizes


KEPT = {"mean": MethodSlot()}
FREE = {"adjust_lr_fn": Option("none")}
METHODS = {
    "adamuon": "adamuon",
    "gradient": MatrixMethod("gradient", whitened, slots=KEPT, options=FREE, takes="gradient"),
    "orthogonal": MatrixMethod("orthogonal", by_rows, slots={"rows": MethodSlot("[m, 1]")}, options=FREE, weight=True),
    "stacked": MatrixMethod("stacked", one_by_one, slots=KEPT, options=FREE, takes="momentum", stacked=True),
    "muon": "muon",
    "normuon": "normuon",
    "hyperball": "hyperball",
}


def shapes(seed: int) -> Iterator[tuple[int, ...]]:
    """Five matrices or stacks of them, few of which have elements in number a multiple of four."""
    dice = random.Random(seed)
    for _ in range(5):
        matrix = dice.randint(1, 40), dice.randint(1, 40)
        yield matrix if dice.random() < 0.8 else (dice.randint(2, 4), *matrix)


def trained(seed: int, place: Place, algorithm: Any, **options: Any) -> list[torch.Tensor]:
    """Return the parameters after three steps: each shape three times, and all together in two groups."""
    generator = torch.Generator().manual_seed(seed)
    of_shapes = [shape for shape in shapes(seed) for _ in range(3)]
    params = [nn.Parameter(place(torch.randn(shape, generator=generator))) for shape in of_shapes]
    groups = [{"params": some, "algorithm": algorithm} for some in (params[:9], params[9:])]
    opt = Muon(groups, lr=0.01, ns_dtype="float32" if seed % 2 else "bfloat16", **options)
    for _ in range(3):
        for param, shape in zip(params, of_shapes, strict=True):
            param.grad = place(torch.randn(shape, generator=generator))
        opt.step()
    return [param.detach() for param in params]


def differing(rank: int, world: int, name: str, seeds: range) -> list[str]:
    """Say of which shapes some mesh has other bits than one process."""
    meshes = {
        "rows": (init_device_mesh("cpu", (world,)), [Shard(0)]),
        "columns and replicas": (init_device_mesh("cpu", (2, world // 2)), [Replicate(), Shard(1)]),
    }
    wrong = []
    for seed in seeds:
        alone = trained(seed, torch.Tensor.clone, METHODS[name])
        for mesh, placements in meshes.values():
            place = partial(distribute_tensor, device_mesh=mesh, placements=placements, src_data_rank=None)
            held = trained(seed, place, METHODS[name])
            wholes = [tensor.full_tensor() for tensor in held if isinstance(tensor, DTensor)]
            wrong += [f"{seed}: {tuple(a.shape)}" for a, b in zip(alone, wholes, strict=True) if not torch.equal(a, b)]
        shared = trained(seed, torch.Tensor.clone, METHODS[name], replicas=dist.group.WORLD)
        wrong += [f"{seed}: {tuple(a.shape)}, DDP" for a, b in zip(alone, shared, strict=True) if not torch.equal(a, b)]
    return wrong


@pytest.mark.parametrize("seeds", sweep([range(1), range(1, 40)], range(1)), ids=str)
@pytest.mark.parametrize("name", sweep(METHODS, "gradient", "orthogonal", "stacked"))
def test_matrices_of_any_size_have_the_bits_of_one_process(name, seeds):
    assert run(4, differing, name, seeds) == [[]] * 4


@pytest.mark.parametrize("side", [5, 16])
def test_the_update_may_be_a_view_of_the_matrix(side):
    turned = MatrixMethod("turned", lambda whole: whole.matrix.T, options=FREE, takes="gradient")
    params = [nn.Parameter(torch.zeros(side, side)) for _ in range(2)]
    for number, param in enumerate(params):
        param.grad = torch.arange(side * side, dtype=torch.float32).view(side, side) + number
    Muon([{"params": params, "algorithm": turned}], lr=1.0, weight_decay=0.0).step()
    for param in params:
        assert torch.equal(param, -param.grad.T)
