"""Steps of a user's optimizer on parameters of many shapes, sharded in many ways, on processes of this machine."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.multiprocessing.spawn import ProcessException, start_processes
from torch.optim import Optimizer

from ...names.errors import TargetError
from ..built import maker_of

SHAPES: Mapping[str, tuple[int, ...]] = {
    "square": (24, 24),
    "fused": (48, 16),
    "wide": (8, 40),
    "uneven": (37, 16),
    "smaller than the ranks": (3, 16),
    "stack": (4, 16, 12),
}
"""The shapes of the parameters that are stepped, each in a model of its own."""

STEPS = 3
_SECONDS = 60
"""How long a rank waits for others that have failed."""

ONE_PROCESS = "one process"


@dataclass(frozen=True, slots=True)
class Sharding:
    """A way to shard a parameter: the mesh for a number of ranks, and placements, or None for `fully_shard`."""

    mesh: Callable[[int], tuple[int, ...] | None]
    axes: tuple[str, ...]
    placements: tuple[Placement, ...] | None


def _grid_of_four(ranks: int) -> tuple[int, ...] | None:
    return (2, ranks // 2) if ranks == 4 else None


SHARDINGS: Mapping[str, Sharding] = {
    "replicas": Sharding(lambda ranks: (ranks,), ("dp",), (Replicate(),)),
    "FSDP2": Sharding(lambda ranks: (ranks,), ("dp",), None),
    "columns (TP)": Sharding(lambda ranks: (ranks,), ("tp",), (Shard(1),)),
    "HSDP": Sharding(_grid_of_four, ("replicate", "shard"), None),
    "rows by columns": Sharding(_grid_of_four, ("dp", "tp"), (Shard(0), Shard(1))),
}
"""The shardings that are tried, by the name in the table."""

Make = Callable[[nn.Module, DeviceMesh], Any]
"""A user's function that makes an optimizer, or several, for a model that is sharded on a mesh."""


@dataclass
class Trial:
    """The weights and state of one parameter after each step, whole, as the first rank sees them.

    Attributes:
        slices: the rows of each rank along one axis of the mesh, and the columns; None where they are not cut.
        weights: before the first step, and after each.
        states: after each step, those tensors that are shaped like the parameter, by slot.
        failure: the optimizer's error; the other fields are then incomplete.
        has_drifted: whether replicas of the weight differ.
        has_plain_state: whether state of a sharded parameter is no DTensor, so that torch takes one rank's for all.
    """

    slices: tuple[tuple[int, ...] | None, tuple[int, ...] | None] = (None, None)
    weights: list[Tensor] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)
    failure: str = ""
    has_drifted: bool = False
    has_plain_state: bool = False


def run_trials(source: str | Make, ranks: int) -> dict[tuple[str, str], Trial]:
    """Step every shape in every sharding that this number of ranks has; by sharding and shape.

    Raises:
        TargetError: a process died.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            processes: Callable[..., Any] = start_processes
            processes(_run_rank, (ranks, source, folder), nprocs=ranks, start_method="spawn")
        except ProcessException as error:
            raise TargetError(f"a process of {ranks} died: {str(error).strip().splitlines()[-1]}") from error
        trials: dict[tuple[str, str], Trial] = torch.load(Path(folder) / "trials", weights_only=False)
        return trials


def _run_rank(rank: int, ranks: int, source: str | Make, folder: str) -> None:
    """Run all trials as one rank of its own process, which it ends; rank 0 writes them to a file in ``folder``."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    make: Make = cast(Make, maker_of(source)) if isinstance(source, str) else source
    trials: dict[tuple[str, str], Trial] = {}
    # One process is the reference; more have each sharding that there is for so many.
    shardings: dict[str, Sharding | None] = {ONE_PROCESS: None}
    if ranks > 1:
        shardings = {name: sharding for name, sharding in SHARDINGS.items() if sharding.mesh(ranks) is not None}
    for (name, sharding), shape in product(shardings.items(), SHAPES):
        # Each case has a process group of its own, as one that failed has left ranks in the middle of a collective.
        store = FileStore(str(Path(folder) / f"{name} {shape}"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=_SECONDS))
        trial = trials[name, shape] = Trial()
        try:
            with torch.compiler.set_stance("force_eager"):
                _step(trial, make, SHAPES[shape], sharding, ranks)
        except Exception as error:  # in the code of the user's optimizer
            trial.failure = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        finally:
            dist.destroy_process_group()
    if rank == 0:
        torch.save(trials, Path(folder) / "trials")
    # Threads of torch's process groups would return into an interpreter that has ended, and abort.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _step(trial: Trial, make: Make, shape: tuple[int, ...], sharding: Sharding | None, ranks: int) -> None:
    """Make a parameter, shard it, and step it with the same global gradients everywhere."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(shape, generator=generator) / 8)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    if sharding is not None:
        sizes = sharding.mesh(ranks)
        assert sizes is not None, "other numbers of ranks have no such case"
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=sharding.axes)
        if sharding.placements is None:
            fully_shard(model, mesh=mesh)
        elif sharding.placements != (Replicate(),):  # replicas are plain tensors, as DDP has them
            model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, sharding.placements))
    # The sizes that torch cuts the last two dims into, without empty ones.
    sizes_by_dim: dict[int, tuple[int, ...]] = {}
    for axis, placement in enumerate(model.weight.placements if isinstance(model.weight, DTensor) else ()):
        if isinstance(placement, Shard):
            parts = torch.chunk(torch.empty(shape[placement.dim]), mesh.size(axis))
            sizes_by_dim[placement.dim - len(shape)] = tuple(map(len, parts))
    trial.slices = sizes_by_dim.get(-2), sizes_by_dim.get(-1)
    optimizers = make(model, mesh)
    optimizers = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
    trial.weights.append(_gather_whole(model.weight))
    for _ in range(STEPS):
        gradient = torch.randn(shape, generator=generator)
        weight = model.weight
        weight.grad = gradient
        if isinstance(weight, DTensor):
            weight.grad = distribute_tensor(gradient, weight.device_mesh, weight.placements)
        for optimizer in optimizers:
            optimizer.step()
        trial.weights.append(_gather_whole(model.weight))
        trial.states.append(_state(trial, optimizers, model.weight))
    trial.has_drifted = ranks > 1 and _has_drifted(model.weight)


def _gather_whole(tensor: Tensor) -> Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def _state(trial: Trial, optimizers: list[Optimizer], weight: Tensor) -> dict[str, Tensor]:
    """Return the state that is shaped like the parameter, whole."""
    state: dict[str, Tensor] = {}
    for optimizer in optimizers:
        for slot, value in optimizer.state.get(weight, {}).items():
            if isinstance(value, Tensor) and value.shape == weight.shape:
                state[slot] = _gather_whole(value)
            elif isinstance(value, Tensor) and value.ndim > 1 and isinstance(weight, DTensor):
                trial.has_plain_state |= not isinstance(value, DTensor)
    return state


def _has_drifted(weight: Tensor) -> bool:
    """Return whether ranks that hold the same elements of a parameter hold other values."""
    local = weight.to_local() if isinstance(weight, DTensor) else weight.detach()
    pairs: list[Any] = [None] * dist.get_world_size()
    places = weight.placements if isinstance(weight, DTensor) else ()
    coordinate = weight.device_mesh.get_coordinate() if isinstance(weight, DTensor) else ()
    shard = tuple(index for index, place in zip(coordinate or (), places, strict=True) if not place.is_replicate())
    dist.all_gather_object(pairs, (shard, local.detach().cpu()))
    first: dict[tuple[int, ...], Tensor] = {}
    return any(not torch.equal(first.setdefault(place, values), values) for place, values in pairs)
