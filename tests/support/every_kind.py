"""A parameter of every kind that Muon steps, trained for some steps on any mesh, and the bits that come of it."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from muonckpt.optimizer import Muon, StepExecution

# (shape, group options): matrices of all kinds, among them some with fewer rows than ranks, and scalar parameters.
LONGER = {"algorithm": "normuon", "statistics": "longer"}

TENSORS = [
    ((40, 16), {"pieces": (24, 8, 8)}),
    ((48, 16), {"pieces": (24, 24)}),
    ((13, 16), {}),
    ((3, 16), {}),
    ((1, 16), {}),
    ((33, 7), {}),
    ((5, 12, 7), {}),
    ((2, 6, 10), {}),
    ((64, 64), {"nesterov": False}),
    ((48, 16), {"pieces": (8, 2, 2), "interleaved": 4}),
    ((12, 30), {"columns": (7, 11, 12), "adjust_lr_fn": "spectral"}),
    ((3, 10, 12), {"pieces": (4, 6), "columns": (9, 3), "cautious": True}),
    ((40, 16), {"algorithm": "normuon", "pieces": (24, 8, 8)}),
    ((14, 40), LONGER),
    (
        (2, 10, 36),
        {"algorithm": "normuon", "statistics": "longer", "pieces": (2, 3), "interleaved": 2, "columns": (17, 19)},
    ),
    ((4, 9, 11), {"algorithm": "normuon", "ns_dtype": "float32", "columns": (5, 6)}),
    ((20, 50), {"ns_dtype": "float16", "gram": (2,)}),
    ((6, 5, 3, 3), {"flatten": True, "adjust_lr_fn": "spectral"}),
    ((8, 3, 5), {"flatten": True, "pieces": (2, 2, 2, 2), "nesterov": False}),
    ((3, 2, 2, 3, 2), {"algorithm": "normuon", "flatten": True}),
    ((12, 5, 3, 1), {**LONGER, "flatten": True, "pieces": (4, 8)}),
    ((13, 16), {"momentum_dtype": "bfloat16"}),
    ((4, 9, 11), {"momentum_dtype": "bfloat16", "nesterov": False}),
    ((33, 7), {"algorithm": "normuon", "momentum_dtype": "bfloat16"}),
    ((22, 16), {"algorithm": "adamw"}),
    ((41,), {"algorithm": "adamw"}),
    ((7,), {"algorithm": "adamw", "cautious": True}),
    ((19, 3), {"algorithm": "lion", "cautious": True}),
    ((22, 16), {"algorithm": "adamw", "state_dtype": "bfloat16"}),
    ((41,), {"algorithm": "adamw", "state_dtype": "bfloat16"}),
    ((19, 3), {"algorithm": "lion", "state_dtype": "bfloat16"}),
]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, without autograd."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


STEPS = 3
"""The first begins without momentum, the second makes all plans and buffers anew or uses them again."""


def values(seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape, _ in TENSORS]


def make(params: list[torch.Tensor], **options) -> Muon:
    groups = [{"params": [p], "lr": 0.02, **group} for p, (_, group) in zip(params, TENSORS, strict=True)]
    return Muon(groups, execution=StepExecution(stages=3), **options)


def train(params: list[torch.Tensor], opt: Muon, place, dtype: torch.dtype, steps: int = STEPS) -> None:
    for step in range(1, steps + 1):
        for p, g in zip(params, values(step, dtype), strict=True):
            p.grad = place(g)
        opt.step()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def snapshot(params: list[torch.Tensor], opt: Muon) -> list[torch.Tensor]:
    return [whole(t).clone() for p in params for t in (p, *(opt.state[p][slot] for slot in sorted(opt.state[p])))]


def assert_same_bits(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y), f"{tuple(x.shape)}: differ by {(x - y).abs().max()}"


@cache
def single(dtype: torch.dtype) -> list[torch.Tensor]:
    """What a single process makes of them.  Do not change."""
    params = [nn.Parameter(v) for v in values(0, dtype)]
    opt = make(params)
    train(params, opt, lambda g: g, dtype)
    return snapshot(params, opt)
