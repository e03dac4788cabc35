"""What `audit_step` says of steps that other projects' optimizers made by themselves: the table of its guide.

    PYTHONPATH=…dion:…muon.py's folder:… python benchmarks/audit_peers.py

Each trains a small network for six steps on one process, and saves the last two by stock DCP.
"""

from __future__ import annotations

import platform
import tempfile
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from muonckpt.lab import audit_step
from muonckpt.lab.step_audit.step_audit import verdict_row
from muonckpt.optimizer import Muon

STEPS = 6


def _split(model: nn.Module) -> tuple[list[Any], list[Any]]:
    parameters = list(model.parameters())
    return [p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim != 2]


def ours(model: nn.Module) -> Any:
    matrices, vectors = _split(model)
    return Muon([{"params": matrices, "lr": 0.02}, {"params": vectors, "algorithm": "adamw", "lr": 1e-3}])


def torch_muon(model: nn.Module) -> Any:
    return torch.optim.Muon(_split(model)[0], lr=0.02)


def keller(model: nn.Module) -> Any:
    matrices, vectors = _split(model)
    group = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.01, "use_muon": False, "params": vectors}
    muon = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.01, "use_muon": True, "params": matrices}
    return import_module("muon").SingleDeviceMuonWithAuxAdam([muon, group])


def dion_muon(model: nn.Module) -> Any:
    matrices, vectors = _split(model)
    groups = [{"params": matrices}, {"params": vectors, "algorithm": "adamw", "lr": 1e-3}]
    return import_module("dion").Muon(groups, lr=0.02, weight_decay=0.01)


def dion_normuon(model: nn.Module) -> Any:
    matrices, vectors = _split(model)
    groups = [{"params": matrices}, {"params": vectors, "algorithm": "lion", "lr": 1e-3}]
    return import_module("dion").NorMuon(groups, lr=0.02, weight_decay=0.01)


PEERS: Mapping[str, Callable[[nn.Module], Any]] = {
    "muonckpt": ours,
    "torch.optim.Muon": torch_muon,
    "Keller Jordan's script": keller,
    "dion Muon": dion_muon,
    "dion NorMuon": dion_normuon,
}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.compiler.set_stance("force_eager")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}\n")
    print("| optimizer | parameter | it orthogonalised | as | scale | left over | rounding may | next hypothesis | |")
    print("|---|---|---|---|---|---:|---:|---:|---|")
    for name, make in PEERS.items():
        try:
            rows = audited(make)
        except ImportError as error:
            print(f"| {name} | | cannot be imported here: {error} | | | | | | |")
            continue
        for row in rows:
            print(f"| {name} | {' | '.join(row)} |")


def audited(make: Callable[[nn.Module], Any]) -> list[tuple[str, ...]]:
    """Train, save the last two steps, and return the rows of the verdicts."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(48, 96), nn.ReLU(), nn.Linear(96, 48, bias=False))
    optimizer = make(model)
    with tempfile.TemporaryDirectory() as folder:
        for step in range(STEPS):
            batch = torch.randn(256, 48)
            (model(batch) - batch.roll(1, -1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step >= STEPS - 2:
                weights, state = get_state_dict(model, optimizer)
                dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/{step}", no_dist=True)
        audit = audit_step(f"{folder}/{STEPS - 2}", f"{folder}/{STEPS - 1}")
    rows = []
    for verdict in audit.verdicts:
        cut, rule, scale, _, status = verdict_row(verdict)
        figures = (
            "-" if figure is None else f"{figure:.2g}" for figure in (verdict.residual, verdict.bound, verdict.rival)
        )
        rows.append((verdict.name, cut, rule, scale, *figures, status))
    return rows


if __name__ == "__main__":
    main()
