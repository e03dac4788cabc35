"""A small model, fully sharded where there are several ranks, with Muon and AdamW as its optimizer."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from muonckpt.optimizer import Muon


class Net(nn.Module):
    """An FSDP2 model with rows that do not divide, an empty shard, and a layer that never sees a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(16, 37)
        self.b = nn.Linear(37, 16)
        self.router = nn.Linear(16, 3)
        self.unused = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.b(self.a(x).relu())
        return (x * self.router(x).sum(-1, keepdim=True)).square().mean()


def build(mesh: DeviceMesh | None = None) -> tuple[Net, Muon]:
    """On a mesh; else on all ranks."""
    net = Net()
    if mesh is not None or dist.get_world_size() > 1:
        fully_shard(net, mesh=mesh or init_device_mesh("cpu", (dist.get_world_size(),)))
    matrices = [p for p in net.parameters() if p.ndim == 2]
    vectors = [p for p in net.parameters() if p.ndim == 1]
    return net, Muon([{"params": matrices, "lr": 0.02}, {"params": vectors, "lr": 1e-3, "algorithm": "adamw"}])


def steps(net: Net, opt: Muon, first: int, last: int) -> None:
    for step in range(first, last):
        opt.zero_grad()
        net(torch.randn(4, 16, generator=torch.Generator().manual_seed(step))).backward()
        opt.step()
