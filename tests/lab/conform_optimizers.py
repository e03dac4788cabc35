"""Optimizers of a test, which other processes import: right ones, and some with a fault that the loss does not show."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from muonckpt.optimizer import Muon


def ours(model: nn.Module, mesh: DeviceMesh) -> Muon:
    return Muon(model.named_parameters(), lr=0.02, ns_dtype="float32")


def _orthogonal(matrix: Tensor) -> Tensor:
    x = matrix.mT if matrix.shape[-2] > matrix.shape[-1] else matrix
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if matrix.shape[-2] > matrix.shape[-1] else x


class Plain(torch.optim.Optimizer):
    """Momentum, orthogonalised as it is given."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.02})

    def local(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            momentum = self.local(state["momentum_buffer"])
            momentum.mul_(0.95).add_(self.gradient(parameter))
            if momentum.numel():
                self.local(parameter.detach()).add_(_orthogonal(momentum), alpha=-0.02)

    def gradient(self, parameter: Tensor) -> Tensor:
        assert parameter.grad is not None
        return self.local(parameter.grad)


class Drifting(Plain):
    """Replicas that step by gradients of their own."""

    def gradient(self, parameter: Tensor) -> Tensor:
        return super().gradient(parameter) + 0.1 * dist.get_rank()


def slices(model: nn.Module, mesh: DeviceMesh) -> Plain:
    return Plain(model.parameters())


def drifting(model: nn.Module, mesh: DeviceMesh) -> Drifting:
    return Drifting(model.parameters())


def never(model: nn.Module, mesh: DeviceMesh) -> Plain:
    raise ValueError("no such optimizer")


def plain_state(model: nn.Module, mesh: DeviceMesh) -> Muon:
    """Return ours, with its momentum replaced by each rank's part."""
    optimizer = ours(model, mesh)

    def replace(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter, state in optimizer.state.items():
            momentum = state["momentum_buffer"]
            if isinstance(parameter, DTensor) and any(isinstance(p, Shard) for p in parameter.placements):
                state["momentum_buffer"] = momentum.to_local() if isinstance(momentum, DTensor) else momentum

    class Wrapper(torch.optim.Optimizer):
        def __init__(self) -> None:
            self.param_groups, self.state = optimizer.param_groups, {}

        def step(self, closure: Any = None) -> None:
            optimizer.step()
            self.state = {p: dict(s) for p, s in optimizer.state.items()}
            replace(self)

    return Wrapper()  # type: ignore[return-value]


def several(model: nn.Module, mesh: DeviceMesh) -> torch.optim.Optimizer:
    """Return an optimizer with another fault for each shape, so that one run of processes tells them all."""
    faults = {
        (48, 16): slices,
        (37, 16): slices,
        (24, 24): drifting,
        (8, 40): plain_state,
        (3, 16): ours,
        (4, 16, 12): slices,
    }
    return faults[tuple(model.weight.shape)](model, mesh)
