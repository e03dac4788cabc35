"""Training whose ranks are killed, and that goes on with any number of ranks: it equals an uninterrupted run."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import muonckpt
from muonckpt.optimizer import Muon
from support import workers
from support.continued import Model

STEPS = 6


@dataclass(frozen=True)
class Kill:
    """One rank is killed while it works on a step, at an event (`sys.addaudithook`) of a file below the folder.

    Attributes:
        event: number of that event within the step; 0: before its update.
    """

    rank: int
    step: int
    event: int


def drawn(dice: random.Random, world: int, step: int) -> Kill:
    """Any kill that comes behind a step."""
    return Kill(dice.randrange(world), dice.randint(step + 1, STEPS), dice.randint(0, 25))


def trained(rank: int, world: int, folder: str, kill: Kill | None) -> list[torch.Tensor]:
    """Resume from the newest checkpoint and train to the end.  Returns parameters and state, whole."""
    mesh = init_device_mesh("cpu", (world,))
    model = Model()

    def place(value: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)

    for name, param in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(place(param.detach())))
    optimizer = Muon([{"params": model.matrices}, {"params": model.vectors, "algorithm": "adamw", "lr": 0.1}])
    series, begin = muonckpt.Series(folder, keep_last=2), 1
    weights, state = get_state_dict(model, optimizer)
    found = series.restore({"model": weights, "optimizer": state})
    if found is not None:
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        begin = found.step + 1
    watch = _watched(folder)
    for step in range(begin, STEPS + 1):
        mine = kill is not None and (kill.rank, kill.step) == (rank, step)
        watch(kill.event if kill is not None and mine else None)
        generator = torch.Generator().manual_seed(1000 + step)
        for param in model.parameters():
            param.grad = place(torch.randn(param.shape, generator=generator))
        optimizer.step()
        weights, state = get_state_dict(model, optimizer)
        series.save(step, {"model": weights, "optimizer": state})
        if mine:  # there were fewer events
            os.kill(os.getpid(), signal.SIGKILL)
    tensors = [tensor for param in model.parameters() for tensor in (param, *optimizer.state[param].values())]
    return [_whole(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)]


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def _watched(folder: str) -> Callable[[int | None], None]:
    """What sets after how many events this process is killed; None: never."""
    left: list[int] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if left and arguments and str(arguments[0]).startswith(folder):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def kill_after(events: int | None) -> None:
        left[:] = [] if events is None else [events]
        if events == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return kill_after


def with_kills(folder: Path, seed: str, kills: int) -> tuple[list[torch.Tensor], list[str]]:
    """What a run gives that is killed so often, with another number of ranks each time; and what happened."""
    dice, told = random.Random(seed), []
    for _ in range(kills):
        world, latest = dice.randint(1, 4), muonckpt.Series(folder).latest()
        if latest is not None and latest.step == STEPS:
            break
        kill = drawn(dice, world, latest.step if latest else 0)
        told.append(f"{world} ranks, {kill}")
        try:
            workers.run(world, trained, str(folder), kill, timeout=60)
        except workers.WorkersFailed as failed:
            if "no answer in time" in str(failed):
                raise
    world = dice.randint(1, 4)
    return workers.run(world, trained, str(folder), None)[0], [*told, f"{world} ranks"]
