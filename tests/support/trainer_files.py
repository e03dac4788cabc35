"""Folders of files that trainers make with torch.save, small, as their code writes them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def of_one_process(folder: Path) -> Path:
    """As Hugging Face's Trainer saves a model of a matrix and a vector under AdamW, and the names of the optimizer."""
    path = folder / "checkpoint-1"
    path.mkdir()
    weights = {"up.weight": torch.ones(4, 6), "norm.weight": torch.ones(6)}
    params = [torch.nn.Parameter(weight.clone()) for weight in weights.values()]
    optimizer = torch.optim.AdamW(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    save_file(weights, path / "model.safetensors")
    torch.save(optimizer.state_dict(), path / "optimizer.pt")
    (path / "parameter_names.json").write_text(json.dumps([*weights]))
    return path


def of_deepspeed(folder: Path) -> Path:
    """A universal folder of a matrix and a vector."""
    path = folder / "universal"
    for name, weight in {"up.weight": torch.ones(4, 6), "norm.weight": torch.ones(6)}.items():
        (path / "zero" / name).mkdir(parents=True)
        for slot in ("fp32", "exp_avg", "exp_avg_sq"):
            torch.save({"param": weight}, path / "zero" / name / f"{slot}.pt")
        torch.save(torch.tensor(3.0), path / "zero" / name / "step.pt")
    return path


NANOCHAT = {
    "lm_head.weight": (64, 32),
    "lambdas": (3,),
    **{f"h.{n}.{part}.weight": shape for n in range(3) for part, shape in (("q", (8, 6)), ("up", (12, 6)))},
}
"""AdamW's parameters first: one that is cut over ranks and one that is not; then matrices, three of each shape."""


def of_nanochat(folder: Path, world: int = 2, step: int = 100) -> dict[str, torch.Tensor]:
    """As nanochat's MuonAdamW lays state out on its ranks; returns what is in the files, by our keys."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(step)
    names = [*NANOCHAT][:2] + [n for part in ("q", "up") for n in NANOCHAT if f".{part}." in n]
    truth = {f"model.{name}": torch.randn(NANOCHAT[name], generator=generator) for name in NANOCHAT}
    groups = [{"kind": "adamw", "lr": 0.1, "betas": (0.8, 0.96), "params": [number]} for number in (0, 1)]
    groups += [{"kind": "muon", "lr": 0.02, "momentum": 0.95, "params": [*range(2 + 3 * n, 5 + 3 * n)]} for n in (0, 1)]
    states: list[dict] = [{} for _ in range(world)]
    for group in groups:
        names_of_group = [names[number] for number in group["params"]]
        shape = NANOCHAT[names_of_group[0]]
        if group["kind"] == "adamw":
            slots = {slot: torch.randn(shape, generator=generator) for slot in ("exp_avg", "exp_avg_sq")}
            truth |= {f"optimizer.state.{names_of_group[0]}.{slot}": value for slot, value in slots.items()}
            for rank, state in enumerate(states):
                parts = slots if truth[f"model.{names_of_group[0]}"].numel() < 1024 else {
                    slot: value.chunk(world)[rank].clone() for slot, value in slots.items()
                }  # fmt: skip
                state[group["params"][0]] = {"step": 7, **parts}
            continue
        chunk = -(-len(names_of_group) // world)
        for slot, sizes in (("momentum_buffer", shape), ("second_momentum_buffer", (shape[0], 1))):
            stack = torch.zeros(chunk * world, *sizes)
            stack[: len(names_of_group)] = torch.randn(len(names_of_group), *sizes, generator=generator)
            truth |= {f"optimizer.state.{name}.{slot}": stack[number] for number, name in enumerate(names_of_group)}
            for rank, state in enumerate(states):
                state.setdefault(group["params"][0], {})[slot] = stack[rank * chunk : (rank + 1) * chunk].clone()
    torch.save({name: truth[f"model.{name}"] for name in NANOCHAT}, folder / f"model_{step:06d}.pt")
    (folder / f"meta_{step:06d}.json").write_text("{}")
    for rank, state in enumerate(states):
        torch.save({"state": state, "param_groups": groups}, folder / f"optim_{step:06d}_rank{rank}.pt")
    (folder / "parameter_names.json").write_text(json.dumps(names))
    return truth
