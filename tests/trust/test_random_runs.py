"""Random runs of everything together: chains of rewriting, and training that is killed and goes on elsewhere."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support import workers
from support.continued import Model
from support.damages import content, tensors_of
from support.random_topologies import ALGORITHMS, differing, drawn
from support.resharded import grouped
from support.trials import SCALE, SEED, count, tally
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import muonckpt
from muonckpt.names.vocabulary import PLACEMENTS
from muonckpt.optimizer import Muon

# --- chains: a checkpoint goes through layouts and formats, hop by hop, and comes home --------------------------------

HOPS: dict[str, dict[str, Any]] = {
    "rows of 1": {"mesh": {"dp": 1}, "format": "dcp"},
    "rows of 3": {"mesh": {"dp": 3}, "format": "dcp"},
    "rows of 7": {"mesh": {"dp": 7}, "format": "dcp"},
    "torch_dist": {"mesh": {"dp": 2}, "format": "torch_dist"},
    **{name: {"mesh": {"dp": 2 + at}, "format": "buffers", "layout": name} for at, name in enumerate(PLACEMENTS)},
    "safetensors": {"mesh": {"dp": 1}, "format": "safetensors"},
    "safetensors shards": {"mesh": {"dp": 1}, "format": "safetensors", "shard_size": 400},
    "zarr": {"mesh": {"dp": 1}, "format": "zarr"},
    "zarr shards": {"mesh": {"dp": 1}, "format": "zarr", "shard_size": 300},
}


TENSORS_ONLY = {name for name, how in HOPS.items() if how["format"] in ("safetensors", "zarr")}
"""Formats that leave what is no tensor in a file for people beside them (docs/formats/safetensors.md)."""


def came_home_otherwise(source: Path, folder: Path, seed: str, with_items: bool, length: int = 20) -> str | None:
    """Take a checkpoint through a random chain that visits every hop, and home: what differs there, if anything.

    Args:
        with_items: through formats only that keep what is no tensor, and compare that as well.
    """
    dice = random.Random(seed)
    allowed = [name for name in HOPS if not (with_items and name in TENSORS_ONLY)]
    hops = [*allowed, *dice.choices(allowed, k=max(length - len(allowed), 0))]
    dice.shuffle(hops)
    at = source
    for number, name in enumerate([*hops, "rows of 1"]):
        to = folder / str(number) / "checkpoint"
        to.parent.mkdir(parents=True)
        muonckpt.reshard(at, to, **grouped(**HOPS[name]))
        at = to
    held, home = (content(place) if with_items else tensors_of(content(place)) for place in (source, at))
    home.pop("common.pt", None)  # Megatron's own, which torch_dist needs
    shutil.rmtree(folder)
    differing = [key for key in held.keys() | home.keys() if held.get(key) != home.get(key)]
    return f"{sorted(differing)} after {hops}" if differing else None


def test_a_chain_through_every_layout_and_format_comes_home_bit_for_bit(tiny_checkpoint, tmp_path):
    with tally("chains of 20 hops") as row:
        for number in range(count(2, 60)):
            begun = time.monotonic()
            fault = came_home_otherwise(tiny_checkpoint, tmp_path / str(number), f"{SEED} {number}", number % 2 == 0)
            row.add(f"chain {number}", fault, time.monotonic() - begun)


# --- training whose ranks are killed, and that goes on with any number of ranks ---------------------------------------

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


def kill_drawn(dice: random.Random, world: int, step: int) -> Kill:
    """Any kill that comes after a step."""
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
        kill = kill_drawn(dice, world, latest.step if latest else 0)
        told.append(f"{world} ranks, {kill}")
        try:
            workers.run(world, trained, str(folder), kill)
        except workers.WorkersFailed as failed:
            if "no answer in time" in str(failed):
                raise
    world = dice.randint(1, 4)
    return workers.run(world, trained, str(folder), None)[0], [*told, f"{world} ranks"]


def test_training_that_is_killed_and_goes_on_with_other_ranks_gives_the_same_bits(tmp_path):
    whole = workers.run(1, trained, str(tmp_path / "whole"), None)[0]
    with tally("elastic training, kills") as row:
        for number in range(count(1, 40)):
            seed, begun = f"{SEED} {number}", time.monotonic()
            found, told = with_kills(tmp_path / str(number), seed, kills=1 if SCALE == 0 else 5)
            same = len(found) == len(whole) and all(map(torch.equal, found, whole))
            row.add(seed, None if same else f"another run after {told}", time.monotonic() - begun)


# --- topologies -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(SCALE == 0, reason="tests/optimizer/test_process_groups.py has some in the suite")
@pytest.mark.parametrize("algorithms", [ALGORITHMS, ("adamuon",), ("hyperball",)])
def test_random_topologies_give_the_bits_of_one_process_at_length(algorithms):
    with tally("random topologies" if algorithms == ALGORITHMS else f"random topologies, {algorithms[0]}") as row:
        for number in range(count(0, 40)):
            world = 2 + number % 7
            topologies = [drawn(world, f"{SEED} {number} {each}", algorithms) for each in range(5)]
            for ranks in zip(*workers.run(world, all_differing, topologies), strict=True):
                row.add(f"{world} ranks, {number}", next((where for each in ranks for where in each), None))


def all_differing(rank, world, topologies):
    return [differing(rank, topology) for topology in topologies]
