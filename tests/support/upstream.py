"""Megatron's own layout functions on random models: a program that prints cases in the form of the golden files.

    python -P tests/support/upstream.py SEED COUNT

It needs `megatron-core` (0.18 or later) and what that imports, which this project never does: so it runs in a process
of its own, and exits with 3 and the reason where the package cannot be imported.  ``-P`` keeps this folder off
the path.
"""

from __future__ import annotations

import inspect
import json
import math
import random
import sys
import typing
from itertools import product
from types import SimpleNamespace

if not hasattr(typing, "override"):  # Python 3.11
    typing.override = lambda function: function

try:
    import torch
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as fsdp
    from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.layout import GlobalLayout
    from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.placement import Flat
    from megatron.core.distributed.param_and_grad_buffer import _compute_default_per_buffer_param_layout
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer as LayerWise
except ImportError as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    sys.exit(3)

SPLITS_EXPERTS = "_should_split" in inspect.getsource(fsdp._get_parameter_groups)
"""Branch dev keeps expert tensors of three dims and different rows in buffers of their own, which we do not do."""

PADDED = "padded_ns_cost" if "compute_cost" in inspect.getsource(LayerWise) else "padded_numel"


def a_shape(rng):
    if rng.random() < 0.1:
        return [rng.randint(1, 300)]
    if rng.random() < 0.05:
        return [rng.randint(1, 9), rng.randint(1, 9), rng.randint(1, 5)]
    side = [1, 3, 5, 8, 16, 24, 40, 48, 64, 100, 128, 200]
    return [rng.choice(side) * rng.choice([1, 1, 2, 3]), rng.choice(side)]


def a_model(rng):
    """Few shapes, so that many are equal, as in transformers; experts, chunks and tied embeddings now and then."""
    shapes = [a_shape(rng) for _ in range(rng.randint(1, 7))]
    experts, chunks, tied = (rng.random() < share for share in (0.4, 0.25, 0.25))
    params = []
    for index in range(rng.randint(1, 40)):
        info = {"name": f"p{index}", "shape": rng.choice(shapes)}
        if experts and rng.random() < 0.5:
            info["expert"] = True
        if chunks:
            info["chunk"] = rng.randint(0, 2)
        if tied and rng.random() < 0.1:
            info["shared_embedding"] = True
        if rng.random() < 0.1:
            info["fold"] = rng.randint(2, 8)
        params.append(info)
    return params


def meta(info):
    param = torch.nn.Parameter(torch.empty(info["shape"], device="meta"))
    if info.get("shared_embedding"):
        param.shared_embedding = True
    if "fold" in info:
        param.is_gtp_weight_remat, param.gtp_remat_size = True, info["fold"]
    return param


def per_buffer(layout, positions):
    return {
        "index_map": [list(layout.param_index_map[param]) for param in positions],
        "buckets": [list(bucket) for bucket in layout.bucket_indices],
        "unpadded": layout.per_bucket_numel_unpadded,
    }


def layer_wise(rng):
    """One case of the layer-wise optimizer: padded, compact and ping-pong of the installed version."""
    infos = a_model(rng)
    params = [meta(info) for info in infos]
    index = {param: number for number, param in enumerate(params)}
    sizes = {False: rng.choice([1, 2, 3, 4, 5, 6, 8, 16, 64]), True: rng.choice([1, 2, 3, 4, 8])}
    total = sum(math.prod(info["shape"]) for info in infos)
    case = {
        "dp": sizes[False],
        "expert_dp": sizes[True],
        "bucket_size": rng.choice([None, 1, total // 3 + 1, total // 10 + 1, rng.randint(1, total)]),
        "busbw": rng.random() < 0.2,
        "params": infos,
        "buffers": [],
    }
    config = SimpleNamespace(pad_buckets_for_high_nccl_busbw=case["busbw"])
    keys = sorted({(info.get("chunk", 0), info.get("expert", False)) for info in infos})
    results = {PADDED: [], "compact_buffer": [], "distributed_optimizer": []}
    owner = [None] * len(params)
    identity = {}
    for chunk, expert in keys:
        positions = [i for i, e in enumerate(infos) if (e.get("chunk", 0), e.get("expert", False)) == (chunk, expert)]
        bucket_params, size = [params[i] for i in positions], sizes[expert]
        case["buffers"].append({"chunk": chunk, "expert": expert, "dp": size, "params": positions})
        padded = LayerWise._compute_per_buffer_param_layout(bucket_params, case["bucket_size"], size, config)
        plain = _compute_default_per_buffer_param_layout(bucket_params, case["bucket_size"])
        cut = DistributedOptimizer._compute_per_buffer_param_layout(bucket_params, case["bucket_size"], size, config)
        for key, layout in zip(results, (padded, plain, cut), strict=True):
            results[key].append(per_buffer(layout, bucket_params))
        for param in bucket_params:
            start, _, bucket = padded.param_index_map[param]
            first, last = padded.bucket_indices[bucket]
            owner[index[param]] = (start - first) // ((last - first) // size)
            identity[param] = (chunk, int(expert), plain.param_index_map[param][0])
    case |= {key: {"buffers": buffers} for key, buffers in results.items()}
    case[PADDED]["owner"] = owner
    groups = [[i for i, info in enumerate(infos) if info.get("expert", False) == expert] for expert in (False, True)]
    if rng.random() < 0.5:
        groups = [part for group in groups for part in (group[1::2], group[::2])]
        case["param_groups"] = groups
    case["pingpong_legacy"] = {"owner": ping_pong(infos, params, groups, sizes, None)}
    if hasattr(LayerWise, "_build_param_sort_keys"):
        case["pingpong_total_order"] = {"owner": ping_pong(infos, params, groups, sizes, identity)}
    return case


def ping_pong(infos, params, groups, sizes, identity):
    optimizer = SimpleNamespace(
        param_groups=[
            {"params": [params[i] for i in group], "is_expert_parallel": infos[group[0]].get("expert", False)}
            for group in groups
            if group
        ]
    )
    no_groups = SimpleNamespace(dp_cp=None, expt_dp=None)
    self = SimpleNamespace(
        dp_cp=None, expt_dp=None, pg_collection=no_groups, _build_param_sort_keys=lambda chunks: identity
    )
    LayerWise._shard_params_ping_pong(self, [optimizer], sizes[False], sizes[True])
    index = {param: number for number, param in enumerate(params)}
    owner = [0] * len(params)  # an expert group of one rank is not listed
    for params_of_ranks in (self.dp_cp_params_list, self.expt_dp_params_list or []):
        for rank, bucket_params in enumerate(params_of_ranks):
            for param in bucket_params:
                owner[index[param]] = rank
    return owner


class Unit(torch.nn.Module):
    pass


def v1(rng):
    """One case of Megatron-FSDP version 1: its grouping and its buffers."""
    root = torch.nn.Module()
    units = [Unit() for _ in range(rng.choice([0, 0, 1, 3]))]
    for number, unit in enumerate(units):
        root.add_module(f"unit{number}", unit)
        unit.add_module("experts", torch.nn.Module())
    shapes = [a_shape(rng) for _ in range(rng.randint(1, 6))]
    for number in range(rng.randint(1, 16)):
        home = rng.choice([root, *units])
        shape, tied = rng.choice(shapes), rng.random() < 0.05
        if home is not root and rng.random() < 0.3 and not (SPLITS_EXPERTS and len(shape) > 2):
            home = home.experts
        home.register_parameter(f"p{number}", meta({"shape": shape, "shared_embedding": tied}))
    infos = []
    for name, param in root.named_parameters():
        unit = {"unit": int(name[len("unit")])} if name.startswith("unit") else {}
        tied = {"shared_embedding": True} if hasattr(param, "shared_embedding") else {}
        infos.append({"name": name, "shape": list(param.shape), **unit, **tied})
    index = {param: number for number, param in enumerate(root.parameters())}
    case = {
        "dp": rng.choice([1, 2, 3, 4, 7, 16]),
        "expert_dp": rng.randint(1, 4),
        "bucket_size": rng.choice([40_000_000, rng.randint(1, 5000)]),
        "params": infos,
        "groups": [],
    }
    config = SimpleNamespace(data_parallel_sharding_strategy="optim_grads_params")
    policy = fsdp.BucketingPolicy(case["bucket_size"], [Unit], config.data_parallel_sharding_strategy)
    for group in fsdp._get_parameter_groups(root, policy, {})[0]:
        size = case["expert_dp"] if group.is_expert_param else case["dp"]
        built = [
            fsdp.build_data_parallel_buffer_index(
                [param.shape for param in group.params], rank, size, True, config, 0, group.chunk_size_factor
            )
            for rank in range(size)
        ]
        items, bucket, shard = built[0]
        starts = [items[number].global_data_index for number in range(len(group.params))]
        ends = [start + param.numel() for start, param in zip(starts, group.params, strict=True)]
        rows = [param.shape[1:].numel() for param in group.params]
        cut = any(
            start < shard.size * rank < end and (shard.size * rank - start) % row
            for start, end, row in zip(starts, ends, rows, strict=True)
            for rank in range(size)
        )
        case["groups"].append(
            {
                "dp": size,
                "chunk_size_factor": group.chunk_size_factor,
                "params": [index[param] for param in group.params],
                "offsets": starts,
                "size": bucket.size,
                "shard_size": shard.size,
                "row_aligned": not cut,
                "slices": [parts(starts, ends, s.global_data_index, s.size) for _, _, s in built],
            }
        )
    return case


def v2(rng):
    """One case of Megatron-FSDP version 2: its global layout and each rank's range."""
    shapes = [a_shape(rng) for _ in range(rng.randint(1, 12))]
    mesh = [rng.randint(1, 5) for _ in range(rng.randint(1, 3))]
    flat = rng.randint(0, len(mesh))
    layout = GlobalLayout.build(shapes, math.prod(mesh))
    placements = ["replicate"] * (len(mesh) - flat) + ["flat"] * flat
    local_placements = [Flat() if placement == "flat" else None for placement in placements]
    ranges = []
    for at in product(*map(range, mesh)):
        position = SimpleNamespace(size=mesh.__getitem__, get_local_rank=at.__getitem__)
        ranges.append(list(layout.get_local_range(position, local_placements)))
    ends = [start + math.prod(shape) for start, shape in zip(layout.tensor_to_offset, shapes, strict=True)]
    return {
        "mesh": mesh,
        "placements": placements,
        "shapes": shapes,
        "tensor_to_offset": list(layout.tensor_to_offset),
        "size": layout.size,
        "local_ranges": ranges,
        "slices": [parts(layout.tensor_to_offset, ends, start, numel) for start, numel in ranges],
    }


def parts(starts, ends, first, numel):
    """What each parameter has in [first, first + numel), relative to itself; None where nothing."""
    cut = [
        (max(start, first) - start, min(end, first + numel) - start) for start, end in zip(starts, ends, strict=True)
    ]
    return [[lo, hi] if lo < hi else None for lo, hi in cut]


def main(seed: int, count: int) -> None:
    rng = random.Random(seed)
    print(
        json.dumps(
            {
                "cases": [layer_wise(rng) for _ in range(count)],
                "v1": [v1(rng) for _ in range(count)],
                "v2": [v2(rng) for _ in range(count)],
            }
        )
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
