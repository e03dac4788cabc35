"""Files of the ranks of runs of FSDP2 with our Muon, as verl, accelerate and torch_checkpointing save them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from muonckpt.optimizer import Muon


class Block(nn.Module):
    """Matrices whose rows two ranks do not share evenly, one of them under two names, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in {"up": (9, 6), "down": (7, 10), "gate": (9, 6)}.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator)))
        self.tied = self.up
        self.register_buffer("table", torch.arange(3.0))


def muon(model: nn.Module) -> Muon:
    """One group of all parameters in the model's order, as verl makes an optimizer."""
    return Muon(model.parameters(), lr=0.01, ns_dtype="float32")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps with the gradients of their numbers, whatever the mesh."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for param in model.parameters():
            gradient = torch.randn(param.shape, generator=generator)
            if isinstance(param, DTensor):
                gradient = distribute_tensor(gradient, param.device_mesh, param.placements, src_data_rank=None)
            param.grad = gradient
        optimizer.step()


def whole(tensors: dict) -> dict[str, torch.Tensor]:
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in tensors.items()}


def save_as_verl(rank: int, world: int, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """``FSDPCheckpointManager.save_checkpoint``."""
    folder.mkdir(exist_ok=True)
    extra = {"lr_scheduler": {"last_epoch": 3}, "rng": torch.get_rng_state()}
    for kind, content in {"model": model.state_dict(), "optim": optimizer.state_dict(), "extra_state": extra}.items():
        torch.save(content, folder / f"{kind}_world_size_{world}_rank_{rank}.pt")


def runs(rank: int, world: int, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Save a run of hybrid shards in three ways, and a model of tensor parallelism.

    Returns what was in them, and the weights after two more steps.
    """
    model = Block()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("ddp", "fsdp")))
    optimizer = muon(model)
    train(model, optimizer, range(3))
    save_as_verl(rank, world, model, optimizer, folder / "verl")
    (folder / "accelerate").mkdir(exist_ok=True)
    torch.save(get_model_state_dict(model), folder / "accelerate" / f"pytorch_model_fsdp_0_rank{rank}.bin")
    torch.save(get_optimizer_state_dict(model, optimizer), folder / "accelerate" / f"optimizer_0_rank{rank}.bin")
    keyed = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer), "step": 3}
    (folder / "torch_checkpointing").mkdir(exist_ok=True)
    for key, content in keyed.items():
        torch.save(content, folder / "torch_checkpointing" / f"{key}_{rank}.pt")
    momenta = {name: optimizer.state[param]["momentum_buffer"] for name, param in model.named_parameters()}
    results = {"weights": whole(model.state_dict()), "momenta": whole(momenta)}
    train(model, optimizer, range(3, 5))
    results["later"] = whole(dict(model.named_parameters()))

    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    parallel = nn.Linear(6, 8, bias=False)
    weight = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    parallel.weight = nn.Parameter(distribute_tensor(weight, mesh["tp"], [Shard(0)], src_data_rank=None))
    fully_shard(parallel, mesh=mesh["dp"])
    (folder / "parallel").mkdir(exist_ok=True)
    torch.save(parallel.state_dict(), folder / "parallel" / f"model_world_size_{world}_rank_{rank}.pt")
    return results | {"parallel": {"weight": weight}}
