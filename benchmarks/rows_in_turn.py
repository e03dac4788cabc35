"""Rows in turn beside Muon: the loss of the demo's transformer, bytes of a step on 8 ranks, and the time of a step.

A step's time is a median of ratios to Muon's of every round; steps alternate, in turning order.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from machine import describe
from torch import nn

from muonckpt.forecasting.models import fresh_parameter, options_of
from muonckpt.forecasting.topologies import MuonOptions, step_plan
from muonckpt.layouts.mesh import Mesh, Shard, mesh_layout
from muonckpt.optimizer import Muon
from muonckpt.optimizer.methods.matrix import MATRICES

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from model import ModelConfig, Transformer
from text import global_batch, standard_library
from training import train_step

KINDS: Mapping[str, Mapping[str, Any]] = {
    "muon": {},
    "cyclic_rows, period=2": {"algorithm": "cyclic_rows", "period": 2},
    "cyclic_rows, period=4": {"algorithm": "cyclic_rows", "period": 4},
    "cyclic_rows, period=8": {"algorithm": "cyclic_rows", "period": 8},
}
RATES = (0.01, 0.02, 0.04) if "--quick" not in sys.argv else (0.01,)
SHOWN = (50, 100, 200) if "--quick" not in sys.argv else (4,)
ROUNDS, SIDE, RANKS = 15, 1024, 8


def losses(kind: str, lr: float, text: torch.Tensor) -> list[float]:
    """Mean losses of 20 steps up to each of those shown."""
    torch.manual_seed(0)
    model = Transformer(ModelConfig(hidden=344))  # every piece has a multiple of 8 rows
    matrices = [weight for weight in model.weights() if weight.kind in ("matrix", "experts")]
    rest = [weight.parameter for weight in model.weights() if weight.kind not in ("matrix", "experts")]
    groups = [{"params": [w.parameter], "lr": lr, "pieces": w.row_blocks or None, **KINDS[kind]} for w in matrices]
    optimizer = Muon([*groups, {"params": rest, "lr": 3e-3, "algorithm": "adamw"}])
    found = [
        train_step(model, optimizer, global_batch(text, seed=0, step=step, rows=4, seq=64), 4, 4)
        for step in range(max(SHOWN))
    ]
    return [statistics.fmean(found[max(0, step - 20) : step]) for step in SHOWN]


def stepping(kind: str) -> Muon:
    params = [nn.Parameter(torch.zeros(SIDE, SIDE)) for _ in range(4)]
    for number, param in enumerate(params):
        param.grad = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(number))
    return Muon([{"params": params, "lr": 1e-3, **KINDS[kind]}])


def seconds(optimizer: Muon) -> float:
    begin = time.process_time()
    optimizer.step()
    return time.process_time() - begin


def planned(kind: str) -> tuple[int, int]:
    """Return the bytes and FLOPs of all ranks in a step of 32 matrices, with rows over the ranks."""
    method, mesh = MATRICES[KINDS[kind].get("algorithm", "muon")], Mesh.of(RANKS)
    one = fresh_parameter("", (SIDE, SIDE), "float32", matrix=True, method=method)
    options = options_of(method, {"pieces": None, **KINDS[kind]})
    like = type(one)(one.name, one.shape, one.dtype, method, options, one.state)
    plan = step_plan([like] * 32, lambda _, shape: mesh_layout(shape, mesh, (Shard(0),)), RANKS, MuonOptions(stages=1))
    return int(plan.sent.sum()), int(plan.work.sum())


def main() -> None:
    torch.set_num_threads(1)
    print(describe())
    text = standard_library()
    print(f"\n| loss | lr | {' | '.join(f'to step {step}' for step in SHOWN)} |\n|{'---|' * (len(SHOWN) + 2)}")
    for kind in KINDS:
        for lr in RATES:
            print(f"| {kind} | {lr} | {' | '.join(f'{loss:.3f}' for loss in losses(kind, lr, text))} |", flush=True)
    optimizers = {kind: stepping(kind) for kind in KINDS}
    ratios: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(ROUNDS + 8):
        order = list(KINDS)[:: 1 if turn % 2 else -1]
        taken = {kind: seconds(optimizers[kind]) for kind in order}
        for kind in KINDS if turn >= 8 else ():
            ratios[kind].append(taken[kind] / taken["muon"])
    print(
        f"\n| matrices of {SIDE} x {SIDE} | CPU time of a step | bytes sent, {RANKS} ranks | FLOPs |\n|---|---|---|---|"
    )
    whole = planned("muon")
    for kind in KINDS:
        shares = " | ".join(f"{mine / all_of_it:.3f}" for mine, all_of_it in zip(planned(kind), whole, strict=True))
        print(f"| {kind} | {statistics.median(ratios[kind]):.2f} | {shares} |")


if __name__ == "__main__":
    main()
