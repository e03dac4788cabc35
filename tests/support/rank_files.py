"""Megatron's per-rank optimizer files, made with everything in them that those of real runs have."""

from __future__ import annotations

import argparse
import collections
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from muonckpt.layouts.buffers.parameters import Parameter
from muonckpt.store.formats.layer_wise_names import Description, ListedParameter, distribute


def described(folder, **description):
    (folder / "layer_wise.json").write_text(json.dumps(description))
    return folder


def dressed(tensor: torch.Tensor, as_parameter: bool, name: str) -> torch.Tensor:
    """With attributes, as Megatron sets them on its masters; torch pickles such a tensor in another way."""
    out = torch.nn.Parameter(tensor) if as_parameter else tensor
    dim, stride = CUTS.get(name.rpartition(".")[2], (-1, 1))
    out.tensor_model_parallel, out.partition_dim, out.partition_stride = dim >= 0, dim, stride
    return out


def value_of(name: str, slot: str, shape) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name + slot))))


MODEL = [
    *(
        (f"layers.{n}.{part}", shape)
        for n in range(3)
        for part, shape in (("qkv", (6, 4)), ("fc", (8, 3)), ("o", (4, 4)))
    ),
    ("norm", (4,)),
]


WORDS = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "max_lr": 0.1,
         "min_lr": 0.0}  # fmt: skip
"""What Megatron tells groups by."""


CUTS = {"qkv": (0, 1), "fc": (0, 2), "o": (1, 1)}
"""The dim that tensor parallelism cuts, and Megatron's stride, by the end of the name."""


def part_of(name: str, whole: torch.Tensor, part: int, parts: int) -> torch.Tensor:
    """What a tensor-parallel rank has of a parameter, cut as Megatron's ``_initialize_affine_weight_cpu`` does it."""
    if name.rpartition(".")[2] not in CUTS or parts == 1:
        return whole
    dim, stride = CUTS[name.rpartition(".")[2]]
    pieces = torch.split(whole, whole.shape[dim] // parts // stride, dim)
    return torch.cat(pieces[part::parts], dim).clone()


def written(tmp_path: Path, algorithm: str, ranks: int, parts: int = 1) -> Path:
    """The files of Muon, with ``legacy-pingpong`` of AdamW too; the model's file; and a description that reads that.

    With ``parts`` they are in a folder for each tensor-parallel rank.
    """
    folder = tmp_path / algorithm
    folder.mkdir()
    for part in range(parts):
        _write(folder / f"mp_rank_{part:02}" if parts > 1 else folder, algorithm, ranks, part, parts)
    groups = [{"names": ["layers.*"], "dims": 2}, *([{"names": ["norm"]}] if algorithm == "legacy-pingpong" else [])]
    extra_arguments = {}
    if parts > 1:
        cuts = [{"names": [f"*.{name}"], "dim": dim, "interleaved": stride} for name, (dim, stride) in CUTS.items()]
        extra_arguments = {"tensor_parallel": [f"mp_rank_{part:02}" for part in range(parts)], "cut": cuts}
    return described(
        folder, algorithm=algorithm, bucket_size=40, model="model_optim_rng.pt", group=groups, **extra_arguments
    )


def _write(folder: Path, algorithm: str, ranks: int, part: int, parts: int) -> None:
    adam = algorithm == "legacy-pingpong"

    def value(name: str, slot: str) -> torch.Tensor:
        return part_of(name, value_of(name, slot, dict(MODEL)[name]), part, parts)

    managed = [(name, tuple(value(name, "").shape)) for name, shape in MODEL if adam or len(shape) == 2]
    members = [ListedParameter(Parameter(name, shape), int(len(shape) != 2)) for name, shape in managed]
    buffer_description = Description(algorithm, tuple(members), bucket_size=40)
    shares = distribute(buffer_description, buffer_description.members, ranks).names
    folder.mkdir(exist_ok=True)
    for rank in range(ranks):
        children = [child(value, shares.get((rank, 0), ()), {"momentum_buffer"}, None, {"lr": 0.1, "momentum": 0.9})]
        if adam:
            slots, options = {"exp_avg", "exp_avg_sq"}, {"lr": 0.5, "betas": (0.9, 0.95)}
            children.append(child(value, shares.get((rank, 1), ()), slots, 3, options))
        torch.save(children if adam else children[0], folder / f"layer_wise_optimizer_{rank}.pt")
    weights = collections.OrderedDict()
    for name, _ in MODEL:
        weights[name] = value(name, "fp32_param").bfloat16()
        weights[f"{name}._extra_state"] = None
    other_entries = {
        "args": argparse.Namespace(dtype=torch.bfloat16),
        "rng": [random.getstate(), np.random.get_state()],
    }
    torch.save({"model": weights, **other_entries}, folder / "model_optim_rng.pt")


def child(
    value: Callable[[str, str], torch.Tensor], names: Sequence[str], slots: set[str], step: int | None, options: dict
) -> dict:
    """The state dict of one optimizer that owns these parameters."""
    state = {n: {slot: value(name, slot) for slot in slots} for n, name in enumerate(names)}
    for slot_value in state.values() if step is not None else ():
        slot_value["step"] = torch.tensor(float(step))
    group = {**options, **WORDS, "params": list(range(len(names)))}
    masters = [dressed(value(name, "fp32_param"), n % 2 > 0, name) for n, name in enumerate(names)]
    return {"optimizer": {"state": state, "param_groups": [group]}, "fp32_from_fp16_params": [masters]}
