"""The order in which a dim was cut: what the door reads from placements is where elements really are, or it refuses."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from support.placed import chunks
from support.workers import run
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import muonckpt
from muonckpt import BoxedTensor, LayoutError, SourceError
from muonckpt.layouts.mesh import (
    Mesh,
    Replicate,
    Shard as OurShard,
    StridedShard,
    fragments_on,
    local_shape,
    mesh_layout,
)
from muonckpt.optimizer import Muon


class Axis(NamedTuple):
    """A mesh axis that shards a dim: how a library says it, and when and into how many stripes it really cut."""

    size: int
    split: int
    turn: float
    stripes: int = 1

    @property
    def placement(self) -> OurShard | StridedShard:
        return OurShard(0) if self.split == 1 else StridedShard(0, self.split)


def cut_by_hand(dice: random.Random, sizes: list[int]) -> list[Axis]:
    """``DTensor.from_local`` of parts that were cut from the first axis to the last, stripes in stripes."""
    splits = [dice.choice([1, 1, 2, 3, 4]) for _ in sizes]
    return [Axis(size, split, turn, split) for turn, (size, split) in enumerate(zip(sizes, splits, strict=True))]


def cut_by_parallelism(dice: random.Random, sizes: list[int]) -> list[Axis]:
    """Expert and tensor parallelism of torch, contiguous parts of parts; the last one in stripes with XTuner."""
    stripes = dice.choice([1, 1, 2, 3, 4])
    return [Axis(size, 1, turn) for turn, size in enumerate(sizes[:-1])] + [
        Axis(sizes[-1], stripes, len(sizes) - 1, stripes)
    ]


def cut_in_any_order(dice: random.Random, sizes: list[int]) -> list[Axis]:
    """Contiguous cuts in an order that torch writes by splits."""
    turns = dice.sample(range(len(sizes)), len(sizes))
    return [
        Axis(size, math.prod(sizes[later] for later in range(axis, len(sizes)) if turns[later] < turns[axis]), turn)
        for axis, (size, turn) in enumerate(zip(sizes, turns, strict=True))
    ]


def nesting(dice: random.Random, cut: Callable[[random.Random, list[int]], list[Axis]]) -> list[Axis]:
    """A nesting over two or three axes, in most cases with ``fully_shard`` over it, which cuts last."""
    axes = cut(dice, [dice.choice([1, 2, 2, 3, 4]) for _ in range(dice.choice([1, 2, 2]))])
    if len(axes) == 1 or dice.random() < 0.6:
        place = dice.choice([0, 0, 0, len(axes) - 1])  # behind other axes, if it has the whole mesh
        split = math.prod(axis.size for axis in axes[place:])
        axes.insert(place, Axis(dice.choice([1, 2, 3, 4]), split, len(axes)))
    return axes


def really_held(size: int, axes: list[Axis], coordinate: tuple[int, ...]) -> list[int]:
    indices = list(range(size))
    for axis, here in sorted(zip(axes, coordinate, strict=True), key=lambda pair: pair[0].turn):
        indices = [index for stripe in chunks(indices, axis.stripes) for index in chunks(stripe, axis.size)[here]]
    return indices


def verdict(size: int, axes: list[Axis], replicas: int) -> str:
    """How the door judges a tensor of two columns: right, refused by its placements or by a local shape, or wrong."""
    shape, sizes = (size, 2), tuple(axis.size for axis in axes)
    mesh, placements = Mesh.of(replicas, *sizes), (Replicate(), *(axis.placement for axis in axes))
    held = [really_held(size, axes, coordinate) for coordinate in product(*map(range, sizes))] * replicas
    try:
        if any(local_shape(shape, mesh, placements, rank) != (len(rows), 2) for rank, rows in enumerate(held)):
            return "refused by shape"
        for rank, rows in enumerate(held):
            boxes = [fragment.box for fragment in fragments_on(shape, mesh, placements, rank)]
            if [row for box in boxes for row in range(box.lo[0], box.hi[0])] != rows:
                return "wrong"
    except LayoutError as error:
        assert "in which order" in str(error)
        return "refused by order"
    return "right"


def test_nestings_are_read_as_each_library_cuts_them_or_refused():
    """1,000 cases over two and three axes, of equal parts and of others, some of them in replicas."""
    dice, verdicts = random.Random(37), Counter[tuple[str, str]]()
    for _ in range(1000):
        cut = dice.choice([cut_by_hand, cut_by_parallelism, cut_in_any_order])
        axes = nesting(dice, cut)
        equal = math.prod(axis.size * axis.stripes for axis in axes)
        size = dice.choice([dice.randint(1, 60), equal, equal * dice.randint(1, 3)])
        verdicts[cut.__name__, verdict(size, axes, dice.choice([1, 1, 2]))] += 1
    assert not [case for case in verdicts if case[1] == "wrong"]
    assert {case[0] for case in verdicts if case[1] == "refused by order"} >= {"cut_by_hand", "cut_by_parallelism"}
    assert sum(count for case, count in verdicts.items() if case[1] == "right") > 700


UNEQUAL = [Axis(2, 6, 2), Axis(2, 1, 0), Axis(3, 1, 1)]
"""fully_shard over expert and tensor parallelism of one dim: 26 rows have equal local shapes in both orders."""


@pytest.mark.parametrize(
    ("size", "axes", "expected"),
    [
        (16, [Axis(2, 2, 1), Axis(2, 1, 0)], "right"),  # fully_shard over tensor parallelism
        (7, [Axis(2, 2, 1), Axis(2, 1, 0)], "right"),
        (24, UNEQUAL, "right"),
        (26, UNEQUAL, "refused by order"),
        (32, [Axis(2, 1, 0), Axis(2, 4, 1, 4)], "right"),  # XTuner's experts on (ep, etp)
        (32, [Axis(2, 2, 1), Axis(2, 4, 0, 4)], "refused by order"),  # and under fully_shard
        (32, [Axis(2, 2, 2), Axis(1, 1, 0), Axis(2, 4, 1, 4)], "refused by order"),
        (32, [Axis(2, 2, 2), Axis(2, 1, 0), Axis(1, 4, 1, 4)], "right"),  # stripes over one rank are no cut
        (32, [Axis(2, 3, 0, 3), Axis(2, 4, 1, 4)], "right"),  # no cut makes three parts: these are stripes
    ],
)
def test_placements_that_libraries_write(size, axes, expected):
    assert verdict(size, axes, 1) == verdict(size, axes, 2) == expected


def test_every_reader_of_placements_asks():
    mesh, placements = Mesh.of(2, 2), (StridedShard(0, 2), StridedShard(0, 4))
    for read in (mesh_layout, lambda *placed: fragments_on(*placed, 0), lambda *placed: local_shape(*placed, 0)):
        with pytest.raises(LayoutError, match=r"StridedShard\(0, split=2\) over 2 ranks, StridedShard\(0, split=4\)"):
            read((32, 3), mesh, placements)


WHOLE = torch.arange(32.0)[:, None] * torch.ones(4)


class Striped(nn.Module):
    """A weight in four stripes over tensor parallelism."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        rows = WHOLE.view(4, 2, 4, 4)[:, mesh.get_local_rank()].reshape(16, 4).contiguous()
        self.weight = nn.Parameter(DTensor.from_local(rows, mesh, [_StridedShard(0, split_factor=4)], run_check=False))


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(LayoutError) as caught:
        act()
    return str(caught.value)


def sharded_stripes(rank: int, world: int, folder: Path) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    model = fully_shard(Striped(mesh["tp"]), mesh=mesh["fsdp"])
    weight = model.weight.detach()
    state = {"weight": weight}
    messages = [
        refusal(lambda: muonckpt.save(state, folder / "refused")),
        refusal(lambda: muonckpt.async_save(state, folder / "refused").result()),
        refusal(lambda: muonckpt.fingerprints(state)),
        refusal(lambda: muonckpt.redistribute(state, {"weight": torch.zeros(32, 4)})),
        refusal(lambda: muonckpt.redistribute({"weight": WHOLE.clone()}, state)),
        refusal(lambda: Muon([{"params": [("weight", model.weight)], "pieces": (16, 16)}]).step()),
    ]
    (folder / "files").mkdir(exist_ok=True)
    torch.save(model.state_dict(), folder / "files" / f"model_world_size_{world}_rank_{rank}.pt")
    # The cures: the boxes that this rank holds, and FSDP of another dim.
    local, parts = weight.to_local(), dict[tuple[int, int], Tensor]()
    for first in range(0, 8, 4):
        parts[int(local[first, 0]), 0] = local[first : first + 4]
    muonckpt.save({"weight": BoxedTensor((32, 4), parts)}, folder / "boxes")
    model = fully_shard(Striped(mesh["tp"]), mesh=mesh["fsdp"], shard_placement_fn=lambda _: Shard(1))
    muonckpt.save({"weight": model.weight.detach()}, folder / "columns")
    for name in ("boxes", "columns"):
        target = {"weight": torch.zeros_like(model.weight)}
        muonckpt.load(target, folder / name, attest=True)
        assert torch.equal(target["weight"].to_local(), model.weight.to_local())
    messages.append(refusal(lambda: muonckpt.load(state, folder / "boxes")))
    messages.append(refusal(lambda: muonckpt.attest(state, folder / "boxes")))
    return messages


def test_fsdp_over_stripes_is_refused_by_name_everywhere_and_the_cures_work(tmp_path):
    for messages in run(4, sharded_stripes, tmp_path):
        for message in messages:
            assert "weight" in message and "do not say in which order" in message, message
    assert not (tmp_path / "refused").exists()
    for name in ("boxes", "columns"):
        with muonckpt.open(tmp_path / name) as opened:
            assert torch.equal(torch.from_numpy(opened.tensors["weight"].numpy()), WHOLE)
    with pytest.raises(SourceError, match=r"weight'.* do not say in which order"):
        muonckpt.open(tmp_path / "files")
