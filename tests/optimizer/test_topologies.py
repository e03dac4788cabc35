"""One planner for every topology: on any mesh the update is the one of a single process, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support import sweep, torch_since
from support.every_kind import STEPS, local_of, make, single, values
from support.random_layouts import random_overlapping_layout
from support.topologies import HARD, STRIDED, TOPOLOGIES, Home, part_of, placer, world_of
from support.workers import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from muonckpt.algebra.box import row_major
from muonckpt.algebra.layout import TensorLayout
from muonckpt.optimizer import Muon, StepExecution
from muonckpt.optimizer.step.exchange import LINKS

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "options.md"


def differing(rank: int, world: int, homes: tuple[Home | None, ...], expected: list[torch.Tensor]) -> list[str]:
    """Train, and compare what this rank holds with its part of what a single process has, as torch cuts it."""
    place, dtype = placer(homes), expected[0].dtype
    params = [nn.Parameter(place(index, v)) for index, v in enumerate(values(0, dtype))]
    opt = make(params, replicas=dist.group.WORLD)
    for step in range(1, STEPS + 1):
        for index, (p, g) in enumerate(zip(params, values(step, dtype), strict=True)):
            p.grad = place(index, g)
        opt.step()
    found = [tensor for p in params for tensor in (p, *(opt.state[p][slot] for slot in sorted(opt.state[p])))]
    return [
        f"{tuple(have.shape)}: {have.sub(part).abs().max()}"
        for have, part in zip(map(local_of, found), map(part_of, expected, found), strict=True)
        if have.dtype != part.dtype or not torch.equal(have, part)
    ]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[
                *([torch_since.uneven_strided] if any(h and STRIDED in h.placements for h in homes) else ()),
                *([pytest.mark.exhaustive] if name not in HARD else ()),
            ],
        )
        for name, homes in TOPOLOGIES.items()
    ],
)
def test_the_update_is_the_one_of_a_single_process(name):
    homes, dtype = TOPOLOGIES[name], (torch.float32, torch.bfloat16)[len(name) % 2]
    assert run(world_of(homes), differing, homes, single(dtype)) == [[]] * world_of(homes)


FUSED = [
    ((6, 4), {}),
    ((4, 10), {"algorithm": "normuon"}),
    ((3, 4, 6), {}),
    ((12, 5), {"pieces": (8, 4)}),
    ((8, 6), {"pieces": (3, 1), "interleaved": 2, "columns": (2, 4)}),
    ((4, 3, 2, 3), {"flatten": True}),
    ((6, 2, 2, 2, 2), {"algorithm": "normuon", "flatten": True, "pieces": (2, 4)}),
    ((9, 7), {"algorithm": "normuon", "momentum_dtype": "bfloat16"}),
    ((4, 9, 5), {"momentum_dtype": "bfloat16", "nesterov": False}),
]


def stepped(
    homes: Sequence[Callable[[torch.Tensor], torch.Tensor]], exchange: str = "all_to_all", **options: Any
) -> list[torch.Tensor]:
    """What rests here of matrices and their momenta after two steps."""
    values = [[torch.randn(shape, generator=torch.Generator().manual_seed(s)) for shape, _ in FUSED] for s in range(3)]
    params = [nn.Parameter(home(value)) for home, value in zip(homes, values[0], strict=True)]
    groups = [{"params": [param], "lr": 0.02, **group} for param, (_, group) in zip(params, FUSED, strict=True)]
    opt = Muon(groups, execution=StepExecution(stages=2, exchange=exchange), **options)
    for gradients in values[1:]:
        for param, home, gradient in zip(params, homes, gradients, strict=True):
            param.grad = home(gradient)
        opt.step()
    return [each.detach() for param in params for each in (param, opt.state[param]["momentum_buffer"])]


def held_of(whole: torch.Tensor, layout: TensorLayout, rank: int) -> torch.Tensor:
    """What a layout puts on a rank, dense, as a matrix of one column (or a stack of those)."""
    boxes = [whole[tuple(map(slice, f.box.lo, f.box.hi))].reshape(-1) for f in layout.fragments_of(rank)]
    return torch.cat(boxes or [whole.new_empty(0)]).view(-1, *(1,) * (whole.ndim - 1))


def misplaced(rank: int, world: int, exchange: str, seeds: range) -> list[tuple[int, int]]:
    """The random layouts, and the numbers of the tensors, of which this rank has other bits than a single process."""
    mesh, wrong = init_device_mesh("cpu", (world,)), []
    expected = stepped([torch.Tensor.clone] * len(FUSED))

    def placed(layout: TensorLayout, whole: torch.Tensor) -> torch.Tensor:
        size = {"shape": whole.shape, "stride": row_major(layout.shape)}
        return DTensor.from_local(held_of(whole, layout, rank), mesh, [Shard(0)], run_check=False, **size)

    for seed in seeds:
        rng = np.random.default_rng(seed)
        layouts = {shape: random_overlapping_layout(rng, shape) for shape, _ in FUSED}
        homes = [partial(placed, layouts[shape]) for shape, _ in FUSED]
        found = stepped(homes, exchange=exchange, layout=lambda param, of=layouts: of[tuple(param.shape)])
        for number, (mine, whole) in enumerate(zip(found, expected, strict=True)):
            if not torch.equal(local_of(mine), held_of(whole, layouts[tuple(whole.shape)], rank)):
                wrong.append((seed, number))
    return wrong


@pytest.mark.parametrize("seeds", sweep([range(4), range(4, 50)], range(4)), ids=str)
@pytest.mark.parametrize("exchange", LINKS)
def test_replicas_that_overlap_in_part_have_the_bits_of_a_single_process(exchange, seeds):
    assert run(4, misplaced, exchange, seeds) == [[]] * 4


def test_the_guide_lists_these_topologies():
    [table] = re.findall(r"^\| parallelism \| topologies \|\n((?:\|.*\n)+)", GUIDE.read_text(), re.MULTILINE)
    rows = re.findall(r"^\| \w+ \| (.*) \|$", table, re.MULTILINE)
    assert sorted("; ".join(rows).split("; ")) == sorted(TOPOLOGIES)


def hsdp_owners(rank: int, world: int) -> list[int]:
    mesh = init_device_mesh("cpu", (2, 2))
    place = [Replicate(), Shard(0)]
    params = [nn.Parameter(distribute_tensor(torch.randn(8, 8), mesh, place, src_data_rank=None)) for _ in range(8)]
    opt = Muon(params, execution=StepExecution(stages=3))
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    [schedule] = opt.schedules.values()
    return [unit.owner for unit in schedule.units]


def test_replicas_share_the_work():
    for owners in run(4, hsdp_owners):
        assert sorted(owners) == [0, 0, 1, 1, 2, 2, 3, 3]
