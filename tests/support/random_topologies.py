"""Random ways in which ranks hold parameters: pipeline stages, meshes and parts of them, replicas, extra groups."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from muonckpt.layouts.boxed_tensor import parts_of
from muonckpt.optimizer import Muon, StepExecution

NAMES = "abc"
"""Of mesh axes: nothing depends on them."""

MATRICES = (
    ((6, 4), {}),
    ((4, 10), {"algorithm": "normuon"}),
    ((3, 4, 6), {}),
    ((12, 5), {"pieces": (8, 4)}),
    ((16, 40), {}),
    ((5,), {"algorithm": "adamw"}),
    ((7, 3), {"algorithm": "lion"}),
    ((6, 9), {"algorithm": "adamuon"}),
    ((3, 6, 4), {"algorithm": "hyperball", "columns": (1, 3)}),
    ((5, 4), {"algorithm": "adamuon"}),
    ((2, 9, 3), {"algorithm": "adamuon", "pieces": (2, 1), "interleaved": 3}),
)
"""Shapes, and options of their groups."""

_ALGORITHM_OF = [options.get("algorithm", "muon") for _, options in MATRICES]
ALGORITHMS = tuple(dict.fromkeys(_ALGORITHM_OF))

Place = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Home:
    """Where a parameter is: on some axes of its stage's mesh (the dims that they shard), or on every rank of it.

    Attributes:
        kind: number in `MATRICES`.
        axes: of the mesh; none: a plain tensor.
        dims: what each axis shards; None: it replicates.
    """

    kind: int
    axes: tuple[int, ...]
    dims: tuple[int | None, ...]

    def opened(self, mesh: DeviceMesh) -> Place:
        """What puts a tensor there, on a rank of the mesh."""
        if not self.axes:
            return torch.Tensor.clone
        used = mesh[tuple(NAMES[axis] for axis in self.axes)]
        count = len(MATRICES[self.kind][0])
        fit: list[Placement] = [Replicate() if dim is None else Shard(min(dim, count - 1)) for dim in self.dims]
        return partial(distribute_tensor, device_mesh=used, placements=fit, src_data_rank=None)


@dataclass(frozen=True)
class Stage:
    """Ranks that train the same parameters.  ``share``: they share the plain ones out."""

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    homes: tuple[Home, ...]
    share: bool


@dataclass(frozen=True)
class Topology:
    """Pipeline stages, and process groups that belong to somebody else."""

    stages: tuple[Stage, ...]
    extra: tuple[tuple[int, ...], ...]


def drawn(world: int, seed: int, algorithms: Sequence[str] = ALGORITHMS) -> Topology:
    """Any topology of so many ranks, with groups of some algorithms; some ranks may have no stage."""
    dice = random.Random(f"{world} {seed}")
    ranks = list(range(world))
    if dice.random() < 0.3:
        dice.shuffle(ranks)
    stages, begin = [], 0
    while begin < world:
        size = dice.randint(1, world - begin)
        shape = dice.choice(_shapes(size))
        homes = tuple(_home(dice, len(shape), algorithms) for _ in range(dice.randint(1, 5)))
        stages.append(Stage(tuple(ranks[begin : begin + size]), shape, homes, dice.random() < 0.6))
        begin += size
    if len(stages) > 1 and dice.random() < 0.3:
        stages.pop()
    sizes = [dice.randint(1, world) for _ in range(dice.randint(0, 4))]
    return Topology(tuple(stages), tuple(tuple(sorted(dice.sample(range(world), size))) for size in sizes))


def _shapes(size: int) -> list[tuple[int, ...]]:
    """Meshes of up to three axes."""
    cuts = [(a, b, size // (a * b)) for a in range(1, size + 1) for b in range(1, size + 1) if size % (a * b) == 0]
    return sorted({shape for cut in cuts for shape in (cut, tuple(n for n in cut if n > 1) or (1,))})


def _home(dice: random.Random, axes: int, algorithms: Sequence[str]) -> Home:
    kinds = [kind for kind, algorithm in enumerate(_ALGORITHM_OF) if algorithm in algorithms]
    used = dice.choice([axes_of_cuts for count in range(axes + 1) for axes_of_cuts in combinations(range(axes), count)])
    return Home(dice.choice(kinds), used, tuple(dice.choice([0, 0, 1, 2, None]) for _ in used))


def values(home: Home, seed: int) -> torch.Tensor:
    return torch.randn(MATRICES[home.kind][0], generator=torch.Generator().manual_seed(seed))


def make(homes: Sequence[Home], places: Sequence[Place], replicas: dist.ProcessGroup | None) -> Muon:
    groups = [
        {"params": [nn.Parameter(place(values(home, index)))], "lr": 0.02, **MATRICES[home.kind][1]}
        for index, (home, place) in enumerate(zip(homes, places, strict=True))
    ]
    return Muon(groups, replicas=replicas, execution=StepExecution(stages=3))


def trained(opt: Muon, homes: Sequence[Home], places: Sequence[Place], steps: int = 4) -> list[torch.Tensor]:
    """Parameters and their state after some steps."""
    params = [group["params"][0] for group in opt.param_groups]
    for step in range(1, steps + 1):
        for index, (param, home, place) in enumerate(zip(params, homes, places, strict=True)):
            param.grad = place(values(home, 100 * step + index))
        opt.step()
    return [t for param in params for t in (param, *(opt.state[param][s] for s in sorted(opt.state[param])))]


def differing(rank: int, topology: Topology) -> list[str]:
    """Train on a topology, and say where this rank holds other bits than one process has.  Collective."""
    extra = [dist.new_group(list(ranks)) for ranks in topology.extra]
    meshes = [
        DeviceMesh("cpu", torch.tensor(s.ranks).view(s.shape), mesh_dim_names=tuple(NAMES[: len(s.shape)]))
        for s in topology.stages
    ]
    groups = [dist.new_group(list(stage.ranks)) if stage.share else None for stage in topology.stages]
    assert len(extra) == len(topology.extra)
    for stage, mesh, group in zip(topology.stages, meshes, groups, strict=True):
        if rank in stage.ranks:
            places = [home.opened(mesh) for home in stage.homes]
            results = trained(make(stage.homes, places, group), stage.homes, places)
            gathers = [torch.Tensor.clone] * len(places)
            expected = trained(make(stage.homes, gathers, None), stage.homes, gathers)
            return [
                f"{stage}: {tuple(tensor.shape)}"
                for tensor, whole in zip(results, expected, strict=True)
                if not has_part(tensor, whole)
            ]
    return []


def has_part(tensor: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether what a rank holds of a tensor, wherever it lies, has the bits of the whole one."""
    return all(
        torch.equal(part, whole[tuple(slice(a, a + n) for a, n in zip(lo, part.shape, strict=True))])
        for lo, part in parts_of(tensor).items()
    )
