"""The script of the page from AdamW to Muon: saved on two ranks by stock DCP, and gone on with on three."""

from __future__ import annotations

import pytest
import torch
from support.pages import script
from support.workers import run
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of")


def adamw(rank: int, world: int, path: str) -> float:
    return script("adamw.md", "guide/migrations")["with_adamw"](path)


def muon(rank: int, world: int, path: str, folder: str, until: int) -> tuple[float, list[float]]:
    return script("adamw.md", "guide/migrations")["with_muon"](path, folder, until)


def test_the_rates_are_the_schedules_to_the_last_bit_and_the_loss_falls(tmp_path):
    path, folder = str(tmp_path / "adamw"), str(tmp_path / "muon")
    before = run(2, adamw, path)[0]
    loss, rates = run(3, muon, path, folder, 60)[0]
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in (1e-3, 1e-3)]
    optimizer = torch.optim.SGD(groups)
    schedule = CosineAnnealingLR(optimizer, 200)
    for _ in range(60):
        schedule.step()
    assert rates == [group["lr"] for group in optimizer.param_groups]
    later, _ = run(2, muon, path, folder, 80)[0]
    assert later < loss < before
