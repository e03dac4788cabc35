"""Reads fail, bytes change and memory ends on one rank of a load: nothing wrong is loaded."""

from __future__ import annotations

import errno
import math
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import count as numbers
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support import trials, workers
from support.machines import on_machine
from support.placed import numbered
from support.sharded import as_stock
from support.trials import count
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import muonckpt

SHAPES = {"w": (600, 400), "odd": (123, 51), "cube": (4, 60, 30), "bias": (77,), "big": (700, 700)}

PLACEMENTS = [(Shard(0), Shard(1)), (Replicate(), Shard(0)), (Replicate(), Replicate()), (Shard(1), Shard(1))]

ARGUMENTS = [{}, {"memory": 1 << 20}, {"check": "before"}, {"memory": 1 << 20, "check": "before"}]


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
        if error and not is_untouched and ("UNUSABLE" not in error):
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


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16,
    torch.uint32,
]  # fmt: skip
"""Whatever is loaded is moved as bytes."""


def whole_values(seed: str) -> dict[str, torch.Tensor]:
    """Return tensors of random shapes and dtypes, with random bytes; the same on all ranks."""
    dice, values = random.Random(seed), dict[str, torch.Tensor]()
    for number in range(7):
        shape = [dice.choice((1, 2, 3, 5, 8, 40, 130, 301)) for _ in range(dice.randrange(4))]
        dtype = dice.choice(DTYPES)
        raw = np.frombuffer(dice.randbytes(math.prod(shape) * dtype.itemsize), np.uint8).copy()
        values[f"t{number}"] = torch.from_numpy(raw & (1 if dtype is torch.bool else 255)).view(dtype).view(shape)
    return values


mesh_of = cache(partial(init_device_mesh, "cpu"))
"""The mesh of a shape; made once for all seeds."""


def on_mesh(value: torch.Tensor, dice: random.Random) -> DTensor:
    """Return a tensor on a mesh of 4 ranks."""
    mesh = mesh_of(dice.choice(((4,), (2, 2))))
    placements = [dice.choice((Replicate(), *map(Shard, range(value.ndim)))) for _ in range(mesh.ndim)]
    return distribute_tensor(value, mesh, placements, src_data_rank=None)


def blank_like(tensor: DTensor, dice: random.Random) -> DTensor:
    """Return zeros like a tensor, in memory that is dense, transposed, of every other element, or at an odd place."""
    local, form = torch.zeros_like(tensor.to_local()), dice.randrange(4)
    if form == 1 and local.ndim > 1:
        local = local.transpose(0, -1).contiguous().transpose(0, -1)
    elif form == 2 and local.ndim:
        local = torch.stack([local, local], -1)[..., 1]
    elif form == 3:
        local = torch.zeros(local.numel() + 1, dtype=local.dtype)[1:].view(local.shape)
    shape = {"shape": tensor.shape, "stride": tensor.stride()}
    return DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False, **shape)


def save_as(kind: str, values: dict[str, torch.Tensor], place: str, dice: random.Random) -> None:
    """Save in one of `KINDS`: on a mesh, or as one process does it."""
    if kind in ("manifest", "stock"):
        muonckpt.save({name: on_mesh(value, dice) for name, value in values.items()}, place)
        if kind == "stock" and dist.get_rank() == 0:
            as_stock(Path(place))
    elif kind == "columns":
        turned = {name: value.t().contiguous().t() if value.ndim == 2 else value for name, value in values.items()}
        dcp.save(turned, checkpoint_id=place)
    elif dist.get_rank() == 0:
        storage = torch.cat([value.reshape(-1).view(torch.uint8) for value in values.values()])
        torch.save({**values, "bytes": storage[: len(storage) // 2], "more": storage[len(storage) // 3 :]}, place)
    dist.barrier()


def load_elsewhere(rank: int, world: int, folder: str, seeds: list[str]) -> list[tuple[str, str | None]]:
    """Save and load once for each seed; return what was done, and what is wrong on this rank."""
    outcomes = []
    mesh_of.cache_clear()
    for number, seed in enumerate(seeds):
        dice, values = random.Random(seed), whole_values(seed)
        kind, place = dice.choice(KINDS), f"{folder}/{number}"
        save_as(kind, values, place, dice)
        expected = {name: on_mesh(value, dice) for name, value in values.items()}
        own_dice = random.Random(f"{seed} {rank}")
        template = {name: blank_like(value, own_dice) for name, value in expected.items()}
        if kind == "storage":
            storage = torch.cat([value.reshape(-1).view(torch.uint8) for value in values.values()])
            expected["bytes"] = on_mesh(storage[: len(storage) // 2], dice)
            template["bytes"] = blank_like(expected["bytes"], own_dice)
        arguments = {**dice.choice(ARGUMENTS), "allow_extra": True}
        machine = dice.choice(((0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 1, 2), (0, 1, 2, 3)))[rank]
        fault = None
        with on_machine(machine), pytest.MonkeyPatch.context() as patch:
            patch.setattr("muonckpt.checkpoint.reading_plan.MIN_SHARED_BYTES", 64)
            try:
                muonckpt.load(template, place, **arguments)
            except muonckpt.MuonckptError as error:
                fault = f"{type(error).__name__}: {error}"
        wrong = [n for n, value in expected.items() if raw(template[n].to_local()) != raw(value.to_local())]
        outcomes.append((f"{seed}: {kind}, {arguments}, machines", fault or (f"wrong: {wrong}" if wrong else None)))
    return outcomes


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy())


def test_every_element_comes_to_any_mesh_and_any_memory(tmp_path):
    with trials.tally("loads: meshes, formats, machines and memory") as row:
        for number in range(count(1, 30)):
            seeds = [f"{trials.SEED} any {number} {each}" for each in range(40)]
            folder = tmp_path / str(number)
            folder.mkdir()
            for ranks in zip(*workers.run(4, load_elsewhere, str(folder), seeds, timeout=200), strict=True):
                row.add(ranks[0][0], next((fault for _, fault in ranks if fault), None))
            shutil.rmtree(folder)


def test_elements_that_share_memory_are_refused(tmp_path):
    muonckpt.save({"w": torch.arange(12.0).reshape(3, 4)}, tmp_path / "c")
    template = {"w": torch.zeros(1, 4).expand(3, 4)}
    with pytest.raises(muonckpt.LayoutError, match="share memory with each other"):
        muonckpt.load(template, tmp_path / "c")
    assert not template["w"].any()
