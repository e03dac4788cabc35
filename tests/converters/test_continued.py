"""A run of another program, converted, goes on as if nothing had happened: its options, schedules and lazy state."""

from __future__ import annotations

import json

import pytest
import torch
from support.continued import (
    EXACT,
    Model,
    exact_torch_muon,
    furthest,
    load_ours,
    load_stock,
    save,
    train,
    weights_of,
)
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim.lr_scheduler import LambdaLR

import muonckpt
from muonckpt.errors import SourceError
from muonckpt.optimizer.muon import Muon

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def falling(step: int) -> float:
    return 0.9**step


def torchs(model: Model, **options) -> list[torch.optim.Optimizer]:
    """As torch has them; the matrices are in two groups."""
    matrices = [{"params": model.matrices[:1], "weight_decay": 0.3}, {"params": model.matrices[1:]}]
    matrices = [group | {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 6, **options} for group in matrices]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(model.vectors, lr=0.01)]


def ours(model: Model, **options) -> Muon:
    """Other rates, and its groups in another order and otherwise cut."""
    groups = [
        {"params": model.vectors, "algorithm": "adamw", "lr": 7.0},
        {"params": model.matrices[1:], "weight_decay": 5.0},
        {"params": model.matrices[:1]},
    ]
    how = {"adjust_lr_fn": "match_rms_adamw", "ns_coefficients": "keller", "ns_steps": 6, **EXACT, **options}
    return Muon(groups, lr=7.0, **how)


@pytest.mark.filterwarnings("ignore:.*does not say options")
def test_a_run_of_torch_with_a_schedule_goes_on_in_ours_and_back_in_torch(tmp_path, monkeypatch):
    model = Model()
    optimizers = torchs(model)
    schedulers = [LambdaLR(optimizer, falling) for optimizer in optimizers]
    with exact_torch_muon(monkeypatch):
        train(model, optimizers, range(3), schedulers)
    save(model, optimizers, tmp_path / "torch", lr_scheduler=schedulers[0].state_dict(), loader={"seen": 3})
    start = weights_of(model)
    with exact_torch_muon(monkeypatch):
        train(model, optimizers, range(3, 6), schedulers)

    report = muonckpt.convert(tmp_path / "torch", tmp_path / "ours", to_dialect="muonckpt")
    assert {check.subject for check in report.checklist if check.action == "set in code"} == {
        "blocks of muon groups",
        "ns_dtype of muon groups",
    }
    twin = Model()
    optimizer = ours(twin)
    cure = r"extra key 'loader.seen'.*allow_extra=\['loader\.\*', 'lr_scheduler\.\*'\]"
    with pytest.raises(SourceError, match=cure) as refusal:
        load_ours(twin, optimizer, tmp_path / "ours")
    assert "muonckpt convert" not in str(refusal.value)
    loaded = load_ours(twin, optimizer, tmp_path / "ours", allow_extra=["loader.*", "lr_scheduler.*"])
    assert loaded.own_options == tuple(f"group {number}: blocks=1, ns_dtype='float32'" for number in (1, 2))
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.01, 0.02, 0.02]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.1, 0.3]
    schedule = LambdaLR(optimizer, falling, last_epoch=2)
    train(twin, [optimizer], range(3, 6), [schedule])
    assert furthest(model, twin, start) < 1e-5
    assert [g["lr"] for g in optimizer.param_groups] == [optimizers[1].param_groups[0]["lr"]] + [
        group["lr"] for group in reversed(optimizers[0].param_groups)
    ]

    # And back, into the groups of a given run, whose other coefficients are reported.
    save(twin, [optimizer], tmp_path / "again")
    start = weights_of(twin)
    train(twin, [optimizer], range(6, 8), [schedule])
    third = Model()
    optimizers = torchs(third, ns_coefficients=(1.0, 2.0, 3.0))
    template = tmp_path / "template.json"
    template.write_text(json.dumps({"param_groups": get_state_dict(third, optimizers)[1]["param_groups"]}))
    third = Model()
    optimizers = torchs(third, ns_coefficients=(1.0, 2.0, 3.0))
    report = muonckpt.convert(
        tmp_path / "again", tmp_path / "back", from_dialect="muonckpt", to_dialect="torch", like=template
    )
    differing = [check for check in report.checklist if check.subject.startswith("ns_coefficients")]
    assert [check.values for check in differing] == [("(3.4445, -4.775, 2.0315)",)] * 2
    for each in optimizers:
        each.param_groups[0].update(lr=7.0, initial_lr=7.0)
        LambdaLR(each, falling)  # stock DCP loads what its template has: so that it has initial_lr
    load_stock(third, optimizers, tmp_path / "back")
    schedulers = [LambdaLR(optimizer, falling, last_epoch=5) for optimizer in optimizers]
    with exact_torch_muon(monkeypatch):
        train(third, optimizers, range(6, 8), schedulers)
    assert furthest(twin, third, start) < 1e-5


def test_a_matrix_without_a_gradient_is_said_and_filled_only_if_asked_to(tmp_path, monkeypatch):
    model = Model()
    optimizers = torchs(model)
    with exact_torch_muon(monkeypatch):
        train(model, optimizers, range(3), idle=("down", "shift"))
        save(model, optimizers, tmp_path / "torch")
        start = weights_of(model)
        train(model, optimizers, range(3, 6))
    report = muonckpt.convert(tmp_path / "torch", tmp_path / "lacking", to_dialect="muonckpt")
    (missing,) = (check for check in report.checklist if check.subject == "no state in the source")
    assert missing.values == ("down", "shift") and "--fill-missing" in missing.reason
    twin = Model()
    with pytest.raises(SourceError, match="2 parameters differ: new, without state in the checkpoint: shift, down"):
        load_ours(twin, ours(twin), tmp_path / "lacking")
    muonckpt.convert(tmp_path / "torch", tmp_path / "filled", to_dialect="muonckpt", fill_missing=True, verify=True)
    optimizer = ours(twin)
    with pytest.warns(UserWarning, match="does not say options, which stay as the running optimizer's"):
        load_ours(twin, optimizer, tmp_path / "filled")
    train(twin, [optimizer], range(3, 6))
    assert furthest(model, twin, start) < 1e-5
