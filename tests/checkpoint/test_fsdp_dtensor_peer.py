"""``fsdp_dtensor`` between the real megatron-fsdp's helpers and us: they write, we rewrite, they and we load."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import sweep
from support.commands import run as command
from support.every_kind import local_of
from support.megatron_model import Net, Topology, fully_sharded, offsets, on_cpu
from support.megatron_training import TOPOLOGIES, with_the_package
from support.workers import run
from torch.distributed.tensor import DTensor

import muonckpt
from muonckpt.programs.detection import detect

EXPERTS = 3
"""On each expert-parallel rank."""


def values(name: str, slot: str, shape) -> torch.Tensor:
    """What a tensor holds: another whole number in every element."""
    size = torch.Size(shape)
    return torch.arange(size.numel(), dtype=torch.float32).reshape(size) + sum(map(ord, name + slot)) * 1024


def globally(name: str, rank: int, topology: Topology) -> str:
    """The name with the expert's number among those of all ranks, as Megatron writes it."""
    ranks_per_expert_group = topology.tensor * topology.shard // max(topology.expert, 1)
    first = EXPERTS * (rank // ranks_per_expert_group % max(topology.expert, 1))
    return re.sub(r"experts\.(\d+)", lambda match: f"experts.{int(match[1]) + first}", name)


def state_of(
    rank: int, topology: Topology, fill: bool, chained: bool = False
) -> tuple[dict, dict[str, DTensor], dict[str, tuple[int, ...]]]:
    """A state dict in Megatron-LM's keys, made ready by megatron-fsdp; its tensors by key, and where their parts begin.

    Args:
        fill: with what the tensors are to hold; else with what none of them does.
        chained: whether there are two optimizers, as #4486 has them.
    """
    from megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor

    torch.manual_seed(0)
    model = fully_sharded(Net(experts=EXPERTS if topology.expert else 0), topology)
    params = {name.removeprefix("module."): param for name, param in model.named_parameters()}
    begins = offsets(params)
    tensors, where, state, weights = {}, {}, {}, {}
    for local_name, param in params.items():
        name = globally(local_name, rank, topology)
        for slot in ("weight", "momentum_buffer"):
            local = local_of(param.detach()).clone()
            part = tuple(slice(at, at + n) for at, n in zip(begins[local_name], local.shape, strict=True))
            local.copy_(values(name, slot, param.shape)[part]) if fill else local.fill_(-1)
            made = DTensor.from_local(local, param.device_mesh, param.placements, run_check=False, shape=param.shape,
                                      stride=param.stride())  # fmt: skip
            if slot == "weight":
                weights[f"module.{name}"] = made
            else:
                state[f"module.module.module.{name}"] = {slot: made}
            tensors[f"{slot}:{name}"], where[f"{slot}:{name}"] = made, part
    groups = {name: {"lr": 0.5, "momentum": 0.95} for name in state}
    parts = {"0": {}, "1": {}} if chained else {"0": {}}
    for number, name in enumerate(sorted(state)):
        part = parts[str(number % len(parts))]
        part.setdefault("state", {})[name] = state[name]
        part.setdefault("param_to_group_meta", {})[name] = groups[name]
    whole = {"model": weights, "optimizer": parts if chained else parts["0"]}
    return preprocess_state_dict_for_uneven_dtensor(whole), tensors, where


def they_save(rank: int, world: int, topology: Topology, path: str, chained: bool) -> None:
    with on_cpu():
        dcp.save(state_of(rank, topology, True, chained)[0], checkpoint_id=path)


def stock(state: dict, path: str) -> None:
    dcp.load(state, checkpoint_id=path)


def they_load(rank: int, world: int, topology: Topology, paths: list[str], chained: bool) -> int:
    """How many elements this rank has compared, in all of these checkpoints, loaded by stock DCP and by us."""
    compared = 0
    with on_cpu():
        state, tensors, where = state_of(rank, topology, False, chained)
        for path in paths:
            for load in (stock, muonckpt.load):
                for tensor in tensors.values():
                    local_of(tensor).fill_(-1)
                load(state, path)
                for key, tensor in tensors.items():
                    slot, name = key.split(":")
                    assert torch.equal(local_of(tensor), values(name, slot, tensor.shape)[where[key]]), (path, key)
                    compared += local_of(tensor).numel()
    return compared


@with_the_package
@pytest.mark.parametrize(
    "source, target, chained",
    sweep(
        [
            ("FSDP x TP", "FSDP, 2 ranks", False),
            ("FSDP x TP", "FSDP, 2 ranks", True),
            ("FSDP and EP", "FSDP and EP, experts unsharded", False),
        ],
        ("FSDP x TP", "FSDP, 2 ranks", True),
    ),
)
def test_they_load_what_we_wrote_and_we_what_they_wrote(source, target, chained, tmp_path):
    source, target, theirs = TOPOLOGIES[source], TOPOLOGIES[target], tmp_path / "theirs"
    run(source.world, they_save, source, str(theirs), chained)
    manifest = muonckpt.open(theirs).manifest
    assert detect(manifest).dialect.name == "fsdp_dtensor"
    for tensor in manifest.tensors:
        tensor.chunk_layout()  # no hole, no overlap
    ours = [tmp_path / "rows", tmp_path / "columns"]
    assert command(["reshard", str(theirs), str(ours[0]), "--mesh", "dp=3"]) == 0
    assert command(["reshard", str(theirs), str(ours[1]), "--mesh", "dp=2,tp=2", "--shard", "*fc2.weight*=tp:1",
                    "--shard", "*=tp:0,dp:0"]) == 0  # fmt: skip
    compared = run(target.world, they_load, target, list(map(str, [theirs, *ours])), chained)
    assert all(count > 6 * 1000 for count in compared)
