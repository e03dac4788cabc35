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
