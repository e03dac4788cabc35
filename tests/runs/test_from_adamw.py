"""The script of the page from AdamW to Muon: saved on two ranks by stock DCP, and gone on with on three."""

from __future__ import annotations

import pytest
import torch
from support.pages import script
from support.workers import run
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from muonckpt.optimizer import Muon

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of")


def adamw(rank: int, world: int, path: str) -> float:
    return script("adamw.md", "guide/migrations")["with_adamw"](path)


def muon(rank: int, world: int, path: str, folder: str, until: int) -> tuple[float, list[float]]:
    return script("adamw.md", "guide/migrations")["with_muon"](path, folder, until)


def test_the_rates_are_the_schedules_to_the_last_bit_and_the_loss_falls(tmp_path):
    path, folder = str(tmp_path / "adamw"), str(tmp_path / "muon")
    before = run(2, adamw, path)[0]
    loss, rates = run(3, muon, path, folder, 60)[0]
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1e-3)
    schedule = CosineAnnealingLR(optimizer, 200)
    for _ in range(60):
        schedule.step()
    assert {*rates} == {group["lr"] for group in optimizer.param_groups}
    later, _ = run(2, muon, path, folder, 80)[0]
    assert later < loss < before


def test_all_groups_of_matrices_warm_up_and_no_other_one():
    model = nn.ModuleDict({"qkv_proj": nn.Linear(4, 12), "up": nn.Linear(4, 4)})
    optimizer = Muon.for_model(model, lr=1e-3, adjust_lr_fn="match_rms_adamw", split={"qkv_proj": 3})
    schedule = script("adamw.md", "guide/migrations", number=-1)["cosine_and_warm_up"](optimizer, 200, first=40)
    assert [group["algorithm"] for group in optimizer.param_groups] == ["muon", "muon", "adamw"]
    for step in range(1, 100):
        schedule.step()
        *matrices, others = (group["lr"] for group in optimizer.param_groups)
        assert matrices == pytest.approx([others * min(1, max(0, step - 39) / 50)] * 2) and others > 0
