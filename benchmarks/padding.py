"""Padding and balance of whole-parameter buffers: Megatron's two padded algorithms and ours, and what a change moves.

Parameters are fused as Megatron has them (q, k, v in one; gate and up in one; two matrices an expert), without tensor
or pipeline parallelism.  Experts are shared by 8 expert-parallel ranks; we look at the experts of one of them.  Buckets
close at Megatron's default size.  Padding is in percent of the parameters' elements.  *Busiest* is the greatest load of
a rank, dense and expert parameters together, over the mean: of Newton-Schulz FLOPs, and of elements held.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from models import Model, Weight, deepseek_v3, llama3_8b, llama3_70b, qwen3_235b

from muonckpt.layouts.buffers.algorithms import balanced, padded_nscost, padded_numel
from muonckpt.layouts.buffers.buffer_layout import BufferLayout
from muonckpt.layouts.buffers.parameters import GroupSizes, Parameter, newton_schulz, numel

MODELS = (llama3_8b, llama3_70b, qwen3_235b, deepseek_v3)
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
EXPERT_PARALLEL = 8
LAYOUTS = (padded_numel, padded_nscost, balanced)

Buffers = Sequence[BufferLayout]


def parameters_of(model: Model) -> list[Parameter]:
    """In forward order; of the experts, those of one expert-parallel rank."""
    return [parameter for number, layer in enumerate(model.layers) for parameter in _of_layer(number, layer)]


def _of_layer(number: int, layer: Sequence[Weight]) -> Iterator[Parameter]:
    fused: dict[str, list[Weight]] = {}
    for weight in layer:
        name = "qkv" if weight.name in ("q", "k", "v") else weight.name
        name = name.replace(".gate", ".fc1").replace(".up", ".fc1").replace(".down", ".fc2")
        fused.setdefault(name, []).append(weight)
    for name, weights in fused.items():
        *experts, _, columns = weights[0].shape
        shape = (sum(weight.shape[-2] for weight in weights), columns)
        if not experts:
            yield Parameter(f"{number}.{name}", shape)
        for expert in range(math.prod(experts) // EXPERT_PARALLEL if experts else 0):
            yield Parameter(f"{number}.{name}.{expert}", shape, expert=True)


def ranks_of(dp: int) -> GroupSizes:
    return GroupSizes(dp, dp // EXPERT_PARALLEL)


def bucket_size(dp: int) -> int:
    """Megatron's default (``DistributedDataParallel``)."""
    return max(40_000_000, 1_000_000 * dp)


def owners_of(buffers: Buffers) -> dict[str, int | None]:
    return {name: owner for layout in buffers for name, owner in layout.owners.items()}


def padding(parameters: Sequence[Parameter], buffers: Buffers) -> float:
    return sum(layout.padding for layout in buffers) / numel(parameters)


def busiest(
    parameters: Sequence[Parameter], ranks: GroupSizes, buffers: Buffers, cost: Callable[[Parameter], int]
) -> float:
    load = np.zeros(ranks.dense)
    owners = owners_of(buffers)
    for parameter in parameters:
        load.reshape(ranks.of(parameter), -1)[owners[parameter.name]] += cost(parameter)
    return float(load.max() / load.mean())


def least_busiest(parameters: Sequence[Parameter], ranks: GroupSizes) -> float:
    """What no assignment of whole parameters can go below: the mean, or the largest parameter."""
    mean = sum(newton_schulz(p) / ranks.of(p) for p in parameters)
    return max(1.0, max(map(newton_schulz, parameters)) / mean)


def moved(parameters: Sequence[Parameter], before: Buffers, after: Buffers) -> float:
    """Share of the elements that were there before and have another owner now."""
    old, new = owners_of(before), owners_of(after)
    shared_parameters = [parameter for parameter in parameters if parameter.name in old]
    return numel(p for p in shared_parameters if old[p.name] != new[p.name]) / numel(shared_parameters)


def print_padding() -> None:
    print("| model | dp | padding %: 0.19 | main | ours | busiest, FLOPs: 0.19 | main | ours | bound "
          "| busiest, elements: 0.19 | main | ours |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for make in MODELS:
        model = make()
        parameters = parameters_of(model)
        for dp in SIZES:
            ranks = ranks_of(dp)
            buffers_of_layouts = [layout(parameters, ranks, bucket_size(dp)) for layout in LAYOUTS]
            row = [
                *(f"{100 * padding(parameters, buffers):.1f}" for buffers in buffers_of_layouts),
                *(f"{busiest(parameters, ranks, buffers, newton_schulz):.3f}" for buffers in buffers_of_layouts),
                f"{least_busiest(parameters, ranks):.3f}",
                *(f"{busiest(parameters, ranks, buffers, lambda p: p.numel):.3f}" for buffers in buffers_of_layouts),
            ]
            print(f"| {model.name} | {dp} | {' | '.join(row)} |", flush=True)


def print_moves(dp: int = 64) -> None:
    print(f"| model, dp {dp} | change | moved %: 0.19 | main | ours | busiest, FLOPs: 0.19 | main | ours |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for make in MODELS:
        model = make()
        more_padding, fewer = (
            replace(model, layers=layers) for layers in (model.layers + model.layers[-1:], model.layers[:-1])
        )
        size = bucket_size(dp)
        changes = {
            "a layer more": (more_padding, dp, size),
            "a layer fewer": (fewer, dp, size),
            "8 ranks more": (model, dp + 8, size),
            "8 ranks fewer": (model, dp - 8, size),
            "buckets of a tenth": (model, dp, size // 10),
        }
        before = [layout(parameters_of(model), ranks_of(dp), size) for layout in LAYOUTS]
        for change, (changed, ranks, buckets) in changes.items():
            parameters = parameters_of(changed)
            after = [layout(parameters, ranks_of(ranks), buckets) for layout in (padded_numel, padded_nscost)]
            after.append(balanced(parameters, ranks_of(ranks), buckets, previous=owners_of(before[-1])))
            row = [
                *(f"{100 * moved(parameters, *pair):.1f}" for pair in zip(before, after, strict=True)),
                *(f"{busiest(parameters, ranks_of(ranks), buffers, newton_schulz):.3f}" for buffers in after),
            ]
            print(f"| {model.name} | {change} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    print_padding()
    print()
    print_moves()
