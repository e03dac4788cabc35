"""A run whose names try to be HTML, for whatever shows names in a browser."""

from __future__ import annotations

from pathlib import Path

import torch

import muonckpt

HOSTILE = [
    "</script><script>document.title = 'run'</script>",
    "<!--<script>",
    "]]>&lt;img src=x onerror=alert(1)>",
    "'\"`${alert(1)}\\",
    "line\u2028break\u202ereversed",
    "<b>bold</b>.weight",
]


def two_steps(folder: Path) -> Path:
    """Two steps of a run; names that try to be HTML, numbers that JSON lacks, and state that has vanished."""
    generator = torch.Generator().manual_seed(0)
    names = [*HOSTILE, *(f"layers.{layer}.up.weight" for layer in range(4))]
    model = {name: torch.randn(12, 9, generator=generator) for name in names}
    momentum = {name: {"momentum_buffer": torch.randn(12, 9, generator=generator)} for name in names}
    group = {"params": names, "algorithm": "muon", "lr": 0.02, "convention": "ema", "eps": float("inf")}
    for step in (10, 20):
        state = {"state": momentum, "param_groups": [group]}
        muonckpt.save({"model": model, "optimizer": state}, folder / str(step))
        model = {name: weight + 0.01 for name, weight in model.items()}
        momentum[names[-1]]["momentum_buffer"][3, 4] = torch.nan
    return folder
