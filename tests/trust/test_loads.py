"""Reads fail, bytes change and memory ends on one rank of a load: nothing wrong is loaded."""

from __future__ import annotations

import errno
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count as numbers
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support import trials, workers
from support.placed import numbered
from support.sharded import as_stock
from support.trials import count
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import muonckpt

SHAPES = {"w": (600, 400), "odd": (123, 51), "cube": (4, 60, 30), "bias": (77,), "big": (700, 700)}

PLACEMENTS = [(Shard(0), Shard(1)), (Replicate(), Shard(0)), (Replicate(), Replicate()), (Shard(1), Shard(1))]

ARGUMENTS = [{}, {"check": "while"}, {"memory": 1 << 20}, {"memory": 1 << 20, "check": "while"}]


def state(placements: tuple, factor: float) -> dict[str, object]:
    """Return tensors on a mesh of 2 × 2 ranks; a tensor with one dim is on all of them."""
    mesh = init_device_mesh("cpu", (2, 2))
    values: dict[str, object] = {"item": [factor, "a"]}
    for name, shape in SHAPES.items():
        fitting = [Replicate() if len(shape) == 1 else placement for placement in placements]
        values[name] = distribute_tensor(numbered(shape) * factor, mesh, fitting, src_data_rank=None)
    return values


def save_all(rank: int, world: int, folder: str) -> None:
    """Save with a manifest, as stock DCP does it, by columns, and as torch.save does it with one storage for all."""
    saved = state(PLACEMENTS[1], 1.0)
    for name in ("manifest", "stock"):
        muonckpt.save(saved, f"{folder}/{name}")
    turned = {name: numbered(shape).t().contiguous().t() for name, shape in SHAPES.items() if len(shape) == 2}
    values = {name: numbered(shape) for name, shape in SHAPES.items()} | turned | {"item": [1.0, "a"]}
    dcp.save(values, checkpoint_id=f"{folder}/columns")
    if rank == 0:
        as_stock(Path(folder) / "stock")
        parts = torch.cat([numbered(shape).reshape(-1) for shape in SHAPES.values()]).split(
            [numbered(shape).numel() for shape in SHAPES.values()]
        )
        views = {name: part.view(SHAPES[name]) for name, part in zip(SHAPES, parts, strict=True)}
        torch.save({**views, "item": [1.0, "a"]}, f"{folder}/storage")


KINDS = ("manifest", "stock", "columns", "storage")


@contextmanager
def harmed(harm: str, at: int, dice: random.Random) -> Iterator[list[Path]]:
    """Have a read, or a piece of memory, of this process come to harm at a call; yield the files that it changes."""
    honest, calls, changed = os.preadv, numbers(), list[Path]()

    def read(handle: int, buffers: tuple[memoryview, ...], offset: int) -> int:
        if next(calls) != at:
            return honest(handle, buffers, offset)
        if harm == "EIO":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if harm == "cut":
            return 0
        if harm == "half":
            return honest(handle, (buffers[0][: len(buffers[0]) // 2 + 1],), offset)
        if harm == "changed":  # by another program, from here on
            path = Path(f"/proc/self/fd/{handle}").readlink()
            changed.append(path)
            place = dice.randrange(path.stat().st_size)
            with path.open("r+b") as file:
                file.seek(place)
                file.write(os.urandom(64)[: path.stat().st_size - place])
        filled = honest(handle, buffers, offset)
        if harm == "flipped" and filled:
            buffers[0][dice.randrange(filled)] ^= 1 << dice.randrange(8)
        return filled

    def without_memory(take: Callable) -> Callable:
        def take_or_fail(*args, **kwargs):
            module = sys._getframe(1).f_globals["__name__"]
            is_ours = module.startswith("muonckpt.") and not module.endswith(".all_ranks")  # which tells the others
            if is_ours and next(calls) == at:
                raise MemoryError
            return take(*args, **kwargs)

        return take_or_fail

    with pytest.MonkeyPatch.context() as patch:
        if harm == "no memory":
            for module, name in ((torch, "empty"), (torch, "frombuffer"), (torch, "tensor"), (np, "empty")):
                patch.setattr(module, name, without_memory(getattr(module, name)))
        elif harm:
            patch.setattr(os, "preadv", read)
        yield changed


HARMS = ("EIO", "cut", "half", "changed", "flipped", "no memory")


def load_with_harm(rank: int, world: int, folder: str, seeds: list[str]) -> list[tuple[str, str, str | None]]:
    """Load once for each seed; return what was done, the error, and what is wrong on this rank."""
    outcomes = []
    pairs = [(state(placements, 0.0), state(placements, 1.0)) for placements in PLACEMENTS]
    for seed in seeds:
        # All ranks draw the same, and one of them comes to harm.
        dice = random.Random(seed)
        kind, arguments, harm = dice.choice(KINDS), dice.choice(ARGUMENTS), dice.choice(HARMS)
        number, victim, at = dice.randrange(len(pairs)), dice.randrange(world), int(dice.expovariate(0.4))
        template, expected = pairs[number]
        template = dict(template)
        for name in SHAPES:
            template[name].to_local().zero_()
        place, error = f"{folder}/{kind}", ""
        with harmed(harm if rank == victim else "", at, dice) as changed:
            try:
                muonckpt.load(template, place, **arguments)
            except muonckpt.MuonckptError as raised:
                error = f"{type(raised).__name__}: {raised}"
        dist.barrier()
        for path in changed:
            shutil.copyfile(f"{folder}/whole/{path.relative_to(folder)}", path)
        dist.barrier()
        values = [(template[name].to_local(), expected[name].to_local()) for name in SHAPES]
        is_right = all(map(torch.equal, *zip(*values, strict=True))) and template["item"] == expected["item"]
        is_untouched = not any(value.any() for value, _ in values)
        fault = None
        if not error and not is_right:
            fault = "wrong values, and no error"
        if error and not is_untouched and ("UNUSABLE" not in error or not arguments):
            fault = f"tensors were touched, and the error does not say so: {error}"
        outcomes.append((f"{harm} at call {at} of rank {victim}: {kind}, {number}, {arguments}", error, fault))
    return outcomes


def test_whatever_happens_to_one_rank_of_a_load_is_one_error_and_nothing_wrong(tmp_path):
    workers.run(4, save_all, str(tmp_path))
    for kind in KINDS:
        copy = shutil.copytree if (tmp_path / kind).is_dir() else shutil.copyfile
        (tmp_path / "whole").mkdir(exist_ok=True)
        copy(tmp_path / kind, tmp_path / "whole" / kind)
    num_errors = 0
    with trials.tally("loads: reads, bytes and memory") as row:
        for number in range(count(1, 30)):
            seeds = [f"{trials.SEED} {number} {each}" for each in range(40)]
            for ranks in zip(*workers.run(4, load_with_harm, str(tmp_path), seeds, timeout=200), strict=True):
                faults = [fault for _, _, fault in ranks if fault]
                errors = {error for _, error, _ in ranks}
                num_errors += errors != {""}
                row.add(ranks[0][0], faults[0] if faults else f"ranks differ: {errors}" if len(errors) > 1 else None)
    assert row.tried > num_errors > 0.15 * row.tried
