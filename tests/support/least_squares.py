"""Least squares, with every algorithm: the smallest training there is."""

from __future__ import annotations

import torch
from torch import nn

from muonckpt.optimizer import Muon

MATRIX, SCALAR = ("muon", "normuon"), ("adamw", "lion")
ALGORITHMS = (*MATRIX, *SCALAR)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def groups(params, algorithm: str, **options) -> list[dict]:
    """The parameters with one algorithm, but those that are no matrices with AdamW if it is one for matrices; one rate
    serves both."""
    params = list(params)
    fits = [p for p in params if algorithm in SCALAR or p.ndim > 1]
    other_params = [p for p in params if algorithm not in SCALAR and p.ndim < 2]
    scale = {"adjust_lr_fn": "match_rms_adamw"} if algorithm in MATRIX else {}
    param_groups = [{"params": fits, "algorithm": algorithm, **scale}, {"params": other_params, "algorithm": "adamw"}]
    return [{**group, **options} for group in param_groups if group["params"]]


class Line(nn.Module):
    """Least squares, with a weight and a bias that may be strided in memory."""

    def __init__(self, stride: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(normal(10, 5, stride, dtype=dtype)[..., 0])
        self.bias = nn.Parameter(normal(10, stride, seed=1, dtype=dtype)[..., 0])
        self.x = normal(5, seed=2, dtype=dtype)

    def forward(self) -> torch.Tensor:
        return (self.weight.mv(self.x) + self.bias).square().sum()

    def closure(self, opt: torch.optim.Optimizer):
        def loss() -> torch.Tensor:
            opt.zero_grad()
            value = self()
            value.backward()
            return value

        return loss


def contents(net: nn.Module, opt: Muon) -> list[torch.Tensor]:
    """Copies of all parameters and all state."""
    params = list(net.parameters())
    slots = {p: opt.state.get(p, {}) for p in params}  # looking must not make any
    return [t.detach().clone() for p in params for t in (p, *(slots[p][slot] for slot in sorted(slots[p])))]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def run_steps(net: Line, opt: Muon, count: int = 3) -> list[torch.Tensor]:
    for _ in range(count):
        opt.step(net.closure(opt))
    return contents(net, opt)


def trained(algorithm: str, count: int = 3, stride: int = 1, **options) -> list[torch.Tensor]:
    net = Line(stride)
    return run_steps(net, Muon(groups(net.parameters(), algorithm), **options), count)
