"""Small models sharded by the real Megatron-FSDP over many topologies, with Muon as their optimizer."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import nn

from muonckpt.optimizer import Muon, StepExecution
from muonckpt.optimizer.megatron_fsdp import layouts
from support.megatron_model import Net, Topology, fully_sharded, last_microbatch

with_the_package = pytest.mark.skipif(not find_spec("megatron_fsdp"), reason="pip install megatron-fsdp==0.6.1")

TOPOLOGIES = {
    "FSDP, 2 ranks": Topology(shard=2),
    "FSDP": Topology(shard=4),
    "ZeRO-2": Topology(shard=4, zero=2),
    "ZeRO-1": Topology(shard=4, zero=1),
    "HSDP": Topology(outer=2, shard=2),
    "HSDP, outer sharded": Topology(outer=2, shard=2, outer_sharded=True),
    "HSDP, nothing sharded": Topology(outer=2, shard=2, zero=0),
    "FSDP x TP": Topology(shard=2, tensor=2),
    "HSDP x TP, outer sharded": Topology(outer=2, shard=2, tensor=2, outer_sharded=True),
    "FSDP and EP": Topology(shard=4, expert=2),
    "FSDP and EP, experts unsharded": Topology(shard=2, expert=2),
    "HSDP and EP": Topology(outer=2, shard=2, expert=2),
    "version 2, 1 rank": Topology(shard=1, version=2),
    "version 2, 2 ranks": Topology(shard=2, version=2),
    "version 2, 3 ranks": Topology(shard=3, version=2),
    "version 2, 4 ranks": Topology(shard=4, version=2),
    "version 2, HSDP": Topology(outer=2, shard=2, version=2),
}


def groups(params: dict[str, torch.Tensor], algorithm: str = "muon") -> list[dict]:
    """Every parameter in a group of its own; names are as in `megatron.Net`."""

    def options(name: str) -> dict:
        if "embedding" in name or "router" in name or params[name].ndim == 1:
            return {"algorithm": "adamw", "lr": 1e-2}
        return {"algorithm": algorithm, **({"pieces": (8, 8, 8)} if "qkv" in name else {})}

    return [{"params": [param], "lr": 0.02, **options(name)} for name, param in params.items()]


def build(rank: int, topology: Topology, algorithm: str = "muon", dtype=torch.float32, **options):
    """A model, of which only the experts differ between ranks, its parameters, and their optimizer."""
    torch.manual_seed(0)
    net = Net(experts=3 if topology.expert else 0)
    torch.manual_seed(1 + rank // topology.tensor % topology.shard * topology.expert // topology.shard)
    for layer in net.layers:
        layer.proj.requires_grad_(False)
        for expert in layer.experts:
            expert.reset_parameters()
    model = fully_sharded(net.to(dtype), topology, **options)
    params = {name.removeprefix("module."): param for name, param in model.named_parameters()}
    return model, params, Muon(groups(params, algorithm), layout=layouts(model), execution=StepExecution(stages=3))


def backward(model: nn.Module, rank: int, step: int, topology: Topology) -> None:
    """Two micro-batches.  Expert 0 sees every token, expert 1 a few on some ranks, expert 2 none ever."""
    replica = rank // topology.tensor
    for micro in range(2):
        tokens = torch.randint(37, (5,), generator=torch.Generator().manual_seed(100 * step + 10 * micro + replica))
        routed = (0, 1) if (step + replica) % 3 == 0 else (0,)
        with last_microbatch(model, is_last=micro == 1):
            model(tokens, routed if topology.expert else ()).backward()


def slots(params: dict[str, torch.Tensor], optimizer: Muon, slot: str) -> dict[str, torch.Tensor]:
    """A slot of the optimizer's state, by name of the parameter, where there is one."""
    states = {name: optimizer.state.get(param, {}) for name, param in params.items()}
    return {name: state[slot] for name, state in states.items() if slot in state}
