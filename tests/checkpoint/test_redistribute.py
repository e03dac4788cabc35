"""muonckpt.redistribute: live tensors from any mesh to any other, each element written once and sent once, no disk."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.every_kind import assert_same_bits
from support.fsdp_model import build, steps
from support.leaves import leaves
from support.placed import numbered, placed, strided
from support.random_layouts import READERS, random_shape
from support.workers import run
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import muonckpt
from muonckpt import BoxedTensor
from muonckpt.box import Box
from muonckpt.checkpoint.move_stages import NOBODY, Held, moves_of, stages_of
from muonckpt.errors import AttestError, LayoutError, SourceError, TargetError
from muonckpt.layouts.boxed_tensor import parts_of

S, R = Shard, Replicate()

VALUES = {
    "matrix": numbered((13, 6)),
    "half": numbered((9, 4)).bfloat16(),
    "cube": numbered((3, 5, 4)).double(),
    "count": torch.arange(11),
    "flags": torch.arange(10).reshape(5, 2) % 3 == 0,
    "tiny": numbered((6, 3)).to(torch.float8_e4m3fn),
    "wide": torch.complex(numbered((4, 3)).double(), -numbered((4, 3)).double()),
    "none": torch.empty(0, 4),
    "scalar": torch.tensor(3.5),
}


MESHES: dict[str, DeviceMesh] = {}
"""Of the job that is running: they make process groups."""


def on(ranks, *placements):
    """On a mesh of ranks; plain if it has no dim."""

    def made(whole, rank):
        if not whole.ndim:
            return whole.clone() if rank in np.ravel(ranks) else None
        if str(ranks) not in MESHES:
            MESHES[str(ranks)] = DeviceMesh("cpu", ranks)
        return placed(whole, MESHES[str(ranks)], tuple(_fit(p, whole.ndim) for p in placements))

    return made


def _fit(placement, ndim):
    if placement.is_replicate():
        return R
    dim = min(placement.dim, ndim - 1)
    return strided(dim, placement.split_factor) if hasattr(placement, "split_factor") else S(dim)


def plain(*ranks):
    """Whole on some ranks."""
    return lambda whole, rank: whole.clone() if rank in ranks else None


def flat(*cuts):
    """Cut anywhere, in sixteenths of the flattened tensor."""

    def made(whole, rank):
        start, stop = (whole.numel() * cut // 16 for cut in cuts[rank : rank + 2])
        return BoxedTensor.of_flat(whole.shape, start, whole.flatten()[start:stop].clone())

    return made


def engines(whole, rank):
    """Two that cut otherwise: all of it on rank 0, rows on 1 and columns on 2 of which it wants the first only."""
    if rank == 3 or not whole.ndim or not whole.numel():
        return whole.clone() if rank == 0 else None
    half = -(-whole.shape[0] // 2)
    part = {0: whole, 1: whole[:half], 2: whole[..., :1]}[rank]
    return BoxedTensor(whole.shape, {(0,) * whole.ndim: part.clone()})


HOMES = {
    "rows": on([0, 1, 2, 3], S(0)),
    "rows on three": on([3, 0, 2], S(0)),
    "columns": on([1, 0], S(9)),
    "EP 2 x 2": on([[0, 1], [2, 3]], S(0), S(1)),
    "EP 1 x 4": on([[3, 2, 1, 0]], S(1), S(0)),
    "HSDP": on([[0, 1], [2, 3]], R, S(0)),
    "interleaved": on([[0, 2], [1, 3]], strided(0, 2), strided(1, 2)),
    "trainers": on([0, 1], S(0)),
    "others": on([2, 3], S(1)),
    "DDP": plain(0, 1, 2, 3),
    "one": plain(2),
    "two": plain(1, 3),
    "flat": flat(0, 3, 3, 11, 16),
    "engines": engines,
}
SOURCES = [name for name in HOMES if name != "engines"]


def state(home: str, rank: int, fill: bool) -> dict[str, Tensor]:
    made = {name: HOMES[home](value, rank) for name, value in VALUES.items()}
    made = {name: value for name, value in made.items() if value is not None}
    if not fill:
        for value in made.values():
            for part in parts_of(value).values():
                part.view(torch.uint8 if part.ndim else part.dtype).zero_() if part.is_contiguous() else part.fill_(0)
    return made


def elements(tensor: Tensor) -> set[tuple[int, ...]]:
    boxes = [(lo, part.shape) for lo, part in parts_of(tensor).items()]
    return {index for lo, size in boxes for index in product(*(range(a, a + n) for a, n in zip(lo, size, strict=True)))}


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def moved_everywhere(rank: int, world: int, pairs, memory: int) -> list[tuple[int, int, int]]:
    """For each pair of homes: bytes that this rank had to receive, those that it received, and those that it sent."""
    counted = []
    MESHES.clear()
    for source_home, target_home in pairs:
        source, target, expected = (state(home, rank, fill) for home, fill in
                                    ((source_home, True), (target_home, False), (target_home, True)))  # fmt: skip
        before = {name: [raw(part) for part in parts_of(value).values()] for name, value in source.items()}
        done = muonckpt.redistribute({"t": source}, {"t": target}, memory=memory, attest=True)
        assert done.buffers <= memory
        for name, value in expected.items():
            found = [raw(part) for part in parts_of(target[name]).values()]
            assert found == [raw(part) for part in parts_of(value).values()], (source_home, target_home, name)
        for name, value in source.items():
            assert before[name] == [raw(part) for part in parts_of(value).values()]
        needed = sum(len(elements(value) - (elements(source[name]) if name in source else set())) * value.itemsize
                     for name, value in target.items())  # fmt: skip
        counted.append((needed, done.received, done.sent))
    return counted


def test_any_home_to_any_other_exactly_with_as_few_bytes_as_possible_in_little_memory():
    """Every home is a source and a target; small memory makes many stages."""
    pairs = [(source, name) for source in SOURCES for name in HOMES if (SOURCES.index(source) + len(name)) % 3 == 0]
    pairs += [("trainers", "others"), ("others", "trainers"), ("rows", "rows on three"), ("EP 2 x 2", "EP 1 x 4")]
    assert {source for source, _ in pairs} == {*SOURCES} and {target for _, target in pairs} == {*HOMES}
    for memory in (130, 1 << 20):
        counted = run(4, moved_everywhere, pairs if memory > 130 else pairs[::4], memory)
        for of_pair in zip(*counted, strict=True):
            assert all(needed == received for needed, received, _ in of_pair)
            assert sum(received for _, received, _ in of_pair) == sum(sent for _, _, sent in of_pair)
