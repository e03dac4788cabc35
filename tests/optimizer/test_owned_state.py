"""State that rests at the owners of matrices: the bits of one process on every mesh, and from one mesh to another."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from pickle import PicklingError
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support import sweep
from support.random_topologies import has_part
from support.topologies import TOPOLOGIES, Home, placer, world_of
from support.workers import run
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import muonckpt
from muonckpt.layouts.tensors import declares_boxes, local_of
from muonckpt.names.errors import LayoutError
from muonckpt.optimizer import LayerWise, Muon

SHAPES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "up": ((7, 5), {"algorithm": "soap", "period": 3}),
    "experts": ((4, 4, 6), {"algorithm": "soap", "period": 3}),
    "qkv": ((8, 6), {"algorithm": "soap", "pieces": (4, 2, 2), "columns": (2, 4), "period": 3}),
    "down": ((5, 7), {"algorithm": "adamuon"}),
    "out": ((6, 6), {"algorithm": "hyperball", "pieces": (3, 3)}),
    "in": ((6, 4), {}),
    "bias": ((5,), {"algorithm": "adamw", "lr": 1e-3}),
}
STEPS, PART = 8, 4
"""PART is amid a period of the preconditioner, which is renewed after three steps."""


def parameters(place: Callable[[int, torch.Tensor], torch.Tensor], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [place(i, torch.randn(shape, generator=generator)) for i, (shape, _) in enumerate(SHAPES.values())]


class Model:
    """Parameters on some topology, their optimizer, and their state dict."""

    def __init__(self, homes: tuple[Home | None, ...], **options: Any) -> None:
        self.place = placer(homes)
        self.model = nn.Module()
        for name, value in zip(SHAPES, parameters(self.place, 0), strict=True):
            self.model.register_parameter(name, nn.Parameter(value))
        groups = [
            {"params": [param], **group}
            for param, (_, group) in zip(self.model.parameters(), SHAPES.values(), strict=True)
        ]
        group = dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
        self.opt = Muon(groups, lr=0.02, replicas=group, **options)

    def train(self, begin: int, end: int) -> None:
        for step in range(begin + 1, end + 1):
            for param, gradient in zip(self.model.parameters(), parameters(self.place, step), strict=True):
                param.grad = gradient
            self.opt.step()

    def state(self) -> dict[str, Any]:
        weights, state = get_state_dict(self.model, self.opt)
        return {"model": weights, "optimizer": state}

    def set(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.opt, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def tensors(self) -> dict[str, torch.Tensor]:
        self.opt.state_dict()  # which declares boxes
        own = {(name, ""): param.detach() for name, param in self.model.named_parameters()}
        of_slots = {(n, slot): t for n, p in self.model.named_parameters() for slot, t in self.opt.state[p].items()}
        return {" ".join(key): tensor for key, tensor in (own | of_slots).items()}

    def differing(self, expected: dict[str, torch.Tensor]) -> list[str]:
        return [key for key, tensor in self.tensors().items() if not has_part(tensor, expected[key])]


def alone(steps: int = STEPS) -> dict[str, torch.Tensor]:
    whole = Model((None,))
    whole.train(0, steps)
    return {key: tensor.clone() for key, tensor in whole.tensors().items()}


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return alone()


def snapshot(rank: int, world: int, folder: str) -> tuple[int, str]:
    """Save a deep copy after training went on; then pickle state, and have torch gather it."""
    mine = Model((Home((2,), (Shard(0),)),))
    mine.train(0, 2)
    copied = deepcopy(mine.state())
    muonckpt.save(mine.state(), f"{folder}/then")
    mine.train(2, 4)
    muonckpt.save(copied, f"{folder}/copied")
    found = muonckpt.diff(f"{folder}/then", f"{folder}/copied")
    with pytest.raises(PicklingError) as refused:
        torch.save(mine.opt.state_dict(), f"{folder}/{rank}.pt")
    with pytest.raises(LayoutError, match=r"which torch cannot gather .* save it on all ranks"):
        get_optimizer_state_dict(mine.model, mine.opt, options=StateDictOptions(full_state_dict=True))
    return found.counts["changed"], str(refused.value)


def test_a_deep_copy_is_what_state_was_and_neither_pickle_nor_torch_can_gather_it(tmp_path):
    for changed, refused in run(2, snapshot, str(tmp_path)):
        assert not changed and "save it on all ranks, by muonckpt.save" in refused


def begun(
    rank: int, world: int, homes: tuple[Home | None, ...], offload: str | None, folder: str, expected: Any
) -> list[str]:
    mine = Model(homes, offload=offload)
    mine.train(0, PART)
    muonckpt.save(mine.state(), f"{folder}/ours")
    dcp.save(mine.state(), checkpoint_id=f"{folder}/stock")
    muonckpt.attest(mine.state(), f"{folder}/ours")
    mine.train(PART, STEPS)
    return mine.differing(expected) + misreported(mine, world)


def misreported(mine: Model, world: int) -> list[str]:
    """What the report says of bytes at owners, if that is not what ranks hold.  Collective."""
    here = sum(local_of(tensor).nbytes for tensor in mine.tensors().values() if declares_boxes(tensor))
    everywhere: list[int] = [0] * world
    dist.all_gather_object(everywhere, here)
    report = mine.opt.report()
    return [] if report.owner_bytes == (min(everywhere), max(everywhere)) else [f"{report.owner_bytes}: {everywhere}"]


def resumed(
    rank: int, world: int, homes: tuple[Home | None, ...], offload: str | None, folder: str, expected: Any
) -> list[str]:
    wrong = []
    for which in ("ours", "stock"):
        mine = Model(homes, offload=offload)
        mine.train(0, 1)  # what is loaded must replace it
        state = mine.state()
        if which == "ours":
            muonckpt.load(state, f"{folder}/ours", attest=True)
        else:
            dcp.load(state, checkpoint_id=f"{folder}/stock")
        mine.set(state)
        mine.train(PART, STEPS)
        wrong += [f"{which} {key}" for key in mine.differing(expected)]
    return wrong


MOVES = [
    ("HSDP", None, "EP × FSDP2, rows", "cpu"),
    ("FSDP2, columns", "cpu", "HSDP", None),
    ("EP × FSDP2, rows", "cpu", "FSDP2, columns", None),
    ("FSDP2, rows", None, "FSDP2, columns", "cpu"),
]
"""Where a run trains and where it goes on, and the memory in which its state rests."""


@pytest.mark.parametrize(("before", "memory", "after", "other"), sweep(MOVES, MOVES[0]))
def test_training_goes_on_elsewhere_amid_a_period(before, memory, after, other, tmp_path, expected):
    first, then = TOPOLOGIES[before], TOPOLOGIES[after]
    assert run(world_of(first), begun, first, memory, str(tmp_path), expected) == [[]] * world_of(first)
    assert run(world_of(then), resumed, then, other, str(tmp_path), expected) == [[]] * world_of(then)
    assert resumed(0, 1, (None,), "cpu", str(tmp_path), expected) == []


def redistributed(rank: int, world: int, expected: Any) -> list[str]:
    source, target = Model(TOPOLOGIES["FSDP2, rows"], offload="cpu"), Model(TOPOLOGIES["HSDP"])
    source.train(0, PART)
    state = target.state()
    muonckpt.redistribute(source.state(), state, attest=True)
    target.set(state)
    target.train(PART, STEPS)
    return target.differing(expected)


def test_live_state_moves_to_other_owners(expected: dict[str, torch.Tensor]):
    assert run(4, redistributed, expected) == [[]] * 4


def owned_by_layers(rank: int, world: int, folder: str) -> list[bool]:
    """Train a model with owners of whole parameters, and one by itself; save, and load on rows of a mesh."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 6, bias=False))
    alone = [nn.Parameter(param.detach().clone()) for param in model.parameters()]
    options = {"algorithm": "soap", "period": 2, "lr": 0.1}
    opt = LayerWise(model, [{"params": [*model.parameters()], **options}])
    other = Muon([{"params": alone, **options}])
    for seed in range(4):
        torch.manual_seed(seed)
        gradients = [torch.randn_like(param) for param in alone]
        torch.stack([(p * g).sum() for p, g in zip(model.parameters(), gradients, strict=True)]).sum().backward()
        opt.step()
        for param, gradient in zip(alone, gradients, strict=True):
            param.grad = gradient
        other.step()
    muonckpt.save({"optimizer": get_state_dict(model, opt)[1]}, folder)
    elsewhere = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 6, bias=False))
    fully_shard(elsewhere)
    third = Muon([{"params": [*elsewhere.parameters()], **options}])
    state = get_state_dict(elsewhere, third)[1]
    muonckpt.load({"optimizer": state}, folder)
    return [
        *(torch.equal(mine, whole) for mine, whole in zip(model.parameters(), alone, strict=True)),
        *(
            has_part(tensor, other.state[whole][slot])
            for param, whole in zip(elsewhere.parameters(), alone, strict=True)
            for slot, tensor in third.state[param].items()
        ),
    ]


def test_owners_of_whole_parameters_keep_such_state_and_other_meshes_load_it(tmp_path: Path):
    assert run(2, owned_by_layers, str(tmp_path / "saved")) == [[True] * 16] * 2
