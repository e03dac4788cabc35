"""A run whose parameters change: what one model and optimizer have saved is resumed by others."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from muonckpt.optimizer import Muon

CHANGES = {
    "head.w*": "moved from 'muon' to 'adamw': head.weight",
    "qkv.1.weight": "pieces=(4, 4, 4) in the checkpoint, (6, 6) now: qkv.1.weight",
    "norm.*": "new, without state in the checkpoint: norm.*",
    "old.*": "only in the checkpoint: old.weight",
}
"""What `after` has changed, by the glob that lets it go."""

FRESH = list(CHANGES)


class Net(nn.Module):
    """Rows that do not divide among ranks, and parts that only one version of the model has."""

    def __init__(self, changed: bool) -> None:
        super().__init__()
        torch.manual_seed(1 if changed else 0)
        self.qkv = nn.ModuleList(nn.Linear(8, 12, bias=False) for _ in range(3))
        self.head = nn.Linear(8, 5)
        if changed:
            self.norm = nn.LayerNorm(8)
        else:
            self.old = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for qkv in self.qkv:
            x = x + qkv(x)[:, 4:]
        last = self.norm if hasattr(self, "norm") else self.old
        return self.head(last(x)).square().mean()


def before(net: Net) -> list[dict[str, Any]]:
    return [
        {"params": [qkv.weight for qkv in net.qkv], "algorithm": "normuon", "pieces": (4, 4, 4), "lr": 0.01},
        {"params": [net.head.weight, net.old.weight], "lr": 0.02},
        {"params": [net.head.bias], "algorithm": "adamw", "lr": 1e-3},
    ]


def after(net: Net) -> list[dict[str, Any]]:
    return [
        {"params": [net.head.weight, net.norm.weight], "algorithm": "adamw", "lr": 5e-4},
        {"params": [net.norm.bias, net.head.bias], "algorithm": "adamw", "lr": 7e-4},
        {"params": [net.qkv[1].weight], "algorithm": "normuon", "pieces": (6, 6), "lr": 0.03},
        {"params": [net.qkv[0].weight, net.qkv[2].weight], "algorithm": "normuon", "pieces": (4, 4, 4), "lr": 0.04},
    ]


RATES = [5e-4, 1e-3, 0.03, 0.01]
"""Of the groups of `after`, resumed: those that are fresh as a whole keep theirs."""

LOADED = ("head.bias", "qkv.0.weight", "qkv.2.weight")
"""Whose state is loaded."""


def build(changed: bool, named: bool = False) -> tuple[Net, Muon]:
    net, world = Net(changed), dist.get_world_size() if dist.is_initialized() else 1
    if world > 1:
        fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
    groups = after(net) if changed else before(net)
    if named:
        names = {parameter: name for name, parameter in net.named_parameters()}
        groups = [{**group, "params": [(names[p], p) for p in group["params"]]} for group in groups]
    return net, Muon(groups, ns_dtype="float32")


def steps(net: Net, opt: Muon, first: int, last: int) -> None:
    for step in range(first, last):
        opt.zero_grad()
        net(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).backward()
        opt.step()


def set_by_hand(
    net: Net, opt: Muon, weights: dict[str, torch.Tensor], state: dict[str, dict[str, torch.Tensor]]
) -> None:
    """Make a new model and optimizer what a resumed one shall be, from whole tensors."""
    for name, parameter in net.named_parameters():
        for target, source in [(parameter.data, weights[name])] + [
            (opt.state[parameter][slot], value) for slot, value in state.get(name, {}).items()
        ]:
            target.copy_(placed_as(source, target))
    for group, options_in_code, rate in zip(opt.param_groups, opt.code_options, RATES, strict=True):
        group["lr"] = options_in_code["lr"] = rate


def placed_as(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def weights_of(net: Net) -> dict[str, torch.Tensor]:
    return {name: whole(parameter) for name, parameter in net.named_parameters()}


def state_of(net: Net, opt: Muon) -> dict[str, dict[str, torch.Tensor]]:
    return {
        name: {slot: whole(value) for slot, value in opt.state[parameter].items()}
        for name, parameter in net.named_parameters()
    }
