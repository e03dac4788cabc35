"""Layer-wise training of a small model in every layout, and what one process makes of the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex

from muonckpt.names.vocabulary import PLACEMENTS
from muonckpt.optimizer import LayerWise, Muon
from support.workers import run

LAYOUTS = [*PLACEMENTS]

# (shape, options of its group)
PARAMETERS = {
    "embedding": ((37, 15), {"algorithm": "adamw"}),
    "norm": ((16,), {"algorithm": "adamw"}),
    "qkv": ((48, 16), {"pieces": (32, 8, 8)}),
    "proj": ((16, 16), {}),
    "conv": ((7, 3, 2), {"algorithm": "lion", "cautious": True}),
    "up": ((40, 16), {"algorithm": "normuon"}),
    "down": ((16, 40), {"ns_dtype": "float16", "gram": (2,)}),
    "stack": ((3, 8, 12), {"nesterov": False}),
    "bias": ((5,), {"algorithm": "adamw", "weight_decay": 0.0}),
}


class Net(nn.Module):
    """Parameters whose gradients are what they are multiplied with."""

    def __init__(self, names: tuple[str, ...] = tuple(PARAMETERS), dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name in names:
            value = torch.randn(PARAMETERS[name][0], generator=generator)
            self.register_parameter(name, nn.Parameter(value.to(dtype)))

    def forward(self, by: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum((self.get_parameter(name) * value).sum() for name, value in by.items())


def groups(net: Net) -> list[dict]:
    return [{"params": [p], "lr": 0.02, **PARAMETERS[name][1]} for name, p in net.named_parameters()]


def gradients(net: Net, seed: int, rank: int) -> dict[str, torch.Tensor]:
    """Small whole numbers: their sums are exact in any order and dtype."""
    gradients = {}
    for index, (name, p) in enumerate(net.named_parameters()):
        generator = torch.Generator().manual_seed(1000 * seed + 10 * rank + index)
        gradients[name] = torch.randint(-8, 9, p.shape, generator=generator).to(p.dtype)
    return gradients


@cache
def alone(
    world: int,
    steps: int,
    dtype: torch.dtype = torch.float32,
    names: tuple[str, ...] = tuple(PARAMETERS),
    has_gradient: Callable[[str, int], bool] = lambda name, step: True,
    of: Callable[[Net, int, int], dict[str, torch.Tensor]] = gradients,
    grouped: Callable[[Net], list[dict]] = groups,
) -> dict[str, torch.Tensor]:
    """Train in one process with the gradients ``of`` all ranks added up, where a parameter ``has_gradient``, and with
    float32 masters.
    """
    net = Net(names, dtype)
    master = Net(names)
    master.load_state_dict({name: p.detach().float() for name, p in net.named_parameters()})
    opt = Muon(grouped(master))
    for step in range(steps):
        for name, p in master.named_parameters():
            total = sum(of(net, step, rank)[name].float() for rank in range(world))
            p.grad = total if has_gradient(name, step) else None
        opt.step()
    results = {name: p.detach().to(dtype) for name, p in master.named_parameters()}
    for name, p in master.named_parameters():
        results |= {f"{name}.{slot}": value for slot, value in opt.state[p].items()}
    return results


def pieces(net: Net, opt: LayerWise) -> dict[str, list]:
    """Parameters, and the chunks that this rank holds of each state tensor, as (offsets, values)."""
    results = {name: p.detach().clone() for name, p in net.named_parameters()}
    for name, p in net.named_parameters():
        for slot, value in opt.state[p].items():
            if value.ndim == 0 or not hasattr(value, "__create_chunk_list__"):
                results[f"{name}.{slot}"] = [((0,) * value.ndim, value.detach().clone())]
                continue
            results[f"{name}.{slot}"] = [
                (tuple(c.offsets), value.__get_tensor_shard__(MetadataIndex(name, c.offsets)).clone())
                for c in value.__create_chunk_list__()
            ]
    return results


def check(results: list[dict], expected: dict[str, torch.Tensor], layout: str = "") -> None:
    """Parameters on every rank; of state each element with exactly one, but for counters, which all have."""
    for key, expected_tensor in expected.items():
        if "." not in key:
            assert all(torch.equal(of_rank[key], expected_tensor) for of_rank in results), (layout, key)
        elif expected_tensor.ndim == 0:
            assert all(torch.equal(of_rank[key][0][1], expected_tensor) for of_rank in results), (layout, key)
        else:
            times = torch.zeros(expected_tensor.shape, dtype=torch.int)
            for of_rank in results:
                for lo, value in of_rank[key]:
                    box = tuple(slice(a, a + n) for a, n in zip(lo, value.shape, strict=True))
                    assert torch.equal(expected_tensor[box], value), (layout, key)
                    times[box] += 1
            assert (times == 1).all(), (layout, key)


def run_layouts(
    rank: int, world: int, function: Callable[..., Any], layouts: Sequence[str], args: tuple
) -> dict[str, Any]:
    return {layout: function(rank, world, layout, *args) for layout in layouts}


def run_each(world: int, function: Callable[..., Any], *args: Any, layouts: Sequence[str] = LAYOUTS):
    """(layout, results by rank) of ``function(rank, world, layout, *args)``, all layouts in one job."""
    results = run(world, run_layouts, function, layouts, args)
    return [(layout, [of_rank[layout] for of_rank in results]) for layout in layouts]


def of_pair(number: int) -> dict[str, torch.Tensor]:
    """What the experts come to that ranks ``which`` and ``which + 2`` share."""
    shared = alone(2, 2, of=lambda net, step, rank: gradients(net, step, number + 2 * rank))
    return {key: value for key, value in shared.items() if key.split(".")[0] in ("up", "down")}


def of_dense(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What belongs to no expert."""
    return {key: value for key, value in state.items() if key.split(".")[0] not in ("up", "down")}
