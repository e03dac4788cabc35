"""A run whose parameters change: what is saved by one model and optimizer is resumed by another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from muonckpt.optimizer import Muon

FRESH = ["head.*", "qkv.1.*", "norm.*", "old.*"]
"""Of `after`: `head` moved, `qkv.1` is cut otherwise, `norm` is new, `old` is gone."""


class Net(nn.Module):
    """Rows that do not divide among ranks, and parts that only one version of the model has."""

    def __init__(self, changed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.ModuleList(nn.Linear(8, 12, bias=False) for _ in range(3))
        self.head = nn.Linear(8, 5)
        if changed:
            torch.manual_seed(1)
            self.norm = nn.LayerNorm(8)
        else:
            self.old = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for qkv in self.qkv:
            x = x + qkv(x)[:, 4:]
        last = self.norm if hasattr(self, "norm") else self.old
        return self.head(last(x)).square().mean()


def sharded(changed: bool) -> Net:
    net = Net(changed)
    if dist.get_world_size() > 1:
        fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return net


def before(net: Net) -> list[dict[str, Any]]:
    return [
        {"params": [qkv.weight for qkv in net.qkv], "pieces": (4, 4, 4), "lr": 0.01},
        {"params": [net.head.weight, net.old.weight], "lr": 0.02},
        {"params": [net.head.bias], "algorithm": "adamw", "lr": 1e-3},
    ]


def after(net: Net) -> list[dict[str, Any]]:
    return [
        {"params": [net.head.weight, net.norm.weight, net.norm.bias], "algorithm": "adamw", "lr": 5e-4},
        {"params": [net.head.bias], "algorithm": "adamw", "lr": 7e-4},
        {"params": [net.qkv[1].weight], "pieces": (6, 6), "lr": 0.03},
        {"params": [net.qkv[0].weight, net.qkv[2].weight], "pieces": (4, 4, 4), "lr": 0.04},
    ]


Grouping = Callable[[Net], list[dict[str, Any]]]


def build(changed: bool, grouping: Grouping) -> tuple[Net, Muon]:
    net = sharded(changed)
    return net, Muon(grouping(net), ns_dtype="float32")


def steps(net: Net, opt: Muon, first: int, last: int) -> None:
    for step in range(first, last):
        opt.zero_grad()
        net(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).backward()
        opt.step()
