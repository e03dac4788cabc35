"""A run begins from a checkpoint of another one, and its schedules go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.golden import golden
from support.workers import run
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

import muonckpt
from muonckpt.optimizer import Muon

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected call of")

STEPS = 6


def net(layers: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(12, 8), *blocks)


def muon(model: nn.Module) -> Muon:
    matrices = [(name, p) for name, p in model.named_parameters() if p.ndim > 1 and not name.startswith("0.")]
    others = [(name, p) for name, p in model.named_parameters() if p.ndim < 2 or name.startswith("0.")]
    return Muon([{"params": matrices, "lr": 0.02}, {"params": others, "algorithm": "adamw", "lr": 1e-3}])


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=False)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, first: int, until: int) -> None:
    for step in range(first, until):
        optimizer.zero_grad()
        model(torch.arange(12) * (step + 1) % 12).square().mean().backward()
        optimizer.step()
        scheduler.step()


def cosine(optimizer: torch.optim.Optimizer) -> CosineAnnealingLR:
    return CosineAnnealingLR(optimizer, 20)


def saved_by_adamw(path: Path | str, shard: bool = False) -> dict[str, torch.Tensor]:
    """Train with AdamW, and save as a script with stock DCP does; return all that was saved, whole."""
    model = fully_shard(net()) if shard else net()
    optimizer = adamw(model)
    scheduler = cosine(optimizer)
    train(model, optimizer, scheduler, 0, STEPS)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state, "scheduler": scheduler.state_dict()}, checkpoint_id=path)
    moments = {f"{name} {slot}": t for name, slots in state["state"].items() for slot, t in slots.items()}
    return {name: whole(value).clone() for name, value in (weights | moments).items()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def rates(make: Callable[[Any], Any], optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """The rates of groups as these after so many steps without an interruption."""
    groups = [
        {"params": [nn.Parameter(torch.ones(1))], "lr": lr}
        for lr in ([0.02, 1e-3] if isinstance(optimizer, Muon) else [3e-4])
    ]
    other = torch.optim.SGD(groups, momentum=0.9)
    scheduler = make(other)
    for _ in range(steps):
        scheduler.step()
    return [group["lr"] for group in other.param_groups]


def adamw_job(rank: int, world: int, path: str) -> dict[str, torch.Tensor]:
    return saved_by_adamw(path, shard=True)


def muon_job(rank: int, world: int, path: str, folder: str, until: int) -> dict[str, Any]:
    model = fully_shard(net())
    optimizer = muon(model)
    scheduler = cosine(optimizer)
    series = muonckpt.Series(folder, model, optimizer, scheduler=scheduler)
    first = series.resume(begin_from=path)
    names = {param: name for name, param in model.named_parameters()}
    found: dict[str, Any] = {name: whole(param).detach().clone() for param, name in names.items()}
    for param, slots in optimizer.state.items():
        found |= {f"{names[param]} {slot}": whole(value).clone() for slot, value in slots.items()}
    train(model, optimizer, scheduler, first, until)
    series.save(until - 1)
    return {"first": first, "state": found, "rates": [group["lr"] for group in optimizer.param_groups]}


def test_a_run_of_adamw_goes_on_with_muon_on_other_ranks(tmp_path):
    path, folder = str(tmp_path / "adamw"), str(tmp_path / "muon")
    expected = run(2, adamw_job, path)[0]
    first, *others = run(3, muon_job, path, folder, STEPS + 2)
    assert first["first"] == STEPS and all(other["rates"] == first["rates"] for other in others)
    state = first["state"]
    for key, value in state.items():
        if "momentum_buffer" in key:
            assert not value.any(), key
        else:
            assert torch.equal(value, expected[key]), key
    assert {key for key in expected if key not in state} == {
        f"{block}.0.weight {slot}" for block in (1, 2) for slot in ("exp_avg", "exp_avg_sq", "step")
    }
    assert first["rates"] == rates(cosine, Muon([nn.Parameter(torch.ones(2, 2))]), STEPS + 2)
    again = run(2, muon_job, path, folder, STEPS + 4)[0]
    assert again["first"] == STEPS + 2, "its own step"
    assert again["rates"] == rates(cosine, Muon([nn.Parameter(torch.ones(2, 2))]), STEPS + 4)
    assert sorted(entry.name for entry in Path(folder).iterdir() if "begin" in entry.name) == []


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": cosine,
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4)),
    "once": lambda optimizer: OneCycleLR(
        optimizer, [group["lr"] for group in optimizer.param_groups], total_steps=30, cycle_momentum=False
    ),
    "chained": lambda optimizer: ChainedScheduler([LinearLR(optimizer), ExponentialLR(optimizer, 0.9)]),
    "in turn": lambda optimizer: SequentialLR(optimizer, [LinearLR(optimizer), ExponentialLR(optimizer, 0.9)], [4]),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rates_are_those_of_a_run_without_an_interruption(schedule, tmp_path, capsys):
    saved_by_adamw(tmp_path / "adamw")
    model = net()
    optimizer = muon(model)
    scheduler = SCHEDULES[schedule](optimizer)
    series = muonckpt.Series(tmp_path / "muon", model, optimizer, scheduler=scheduler)
    first = series.resume(begin_from=tmp_path / "adamw")
    [line] = capsys.readouterr().out.splitlines()
    assert line == (
        f"begun from {tmp_path / 'adamw'}: 9 weights loaded; the state of 7 parameters goes on, that of 2 begins at "
        f"zero; schedules are at their step {STEPS}; next step: {STEPS}"
    )
    train(model, optimizer, scheduler, first, STEPS + 3)
    assert [group["lr"] for group in optimizer.param_groups] == rates(SCHEDULES[schedule], optimizer, STEPS + 3)


def test_schedules_that_depend_on_more_than_steps_are_refused_by_name(tmp_path):
    saved_by_adamw(tmp_path / "adamw")
    model = net()
    optimizer = muon(model)
    for scheduler, message in (
        (ReduceLROnPlateau(optimizer), "ReduceLROnPlateau: its rate depends on more than the number of steps"),
        (ExponentialLR(optimizer, 0.9), "ExponentialLR: expected a new scheduler, found one at its step 1"),
    ):
        if isinstance(scheduler, ExponentialLR):
            scheduler.step()
        series = muonckpt.Series(tmp_path / "muon", model, optimizer, scheduler=scheduler)
        with pytest.raises(muonckpt.ArgumentError, match=message):
            series.resume(begin_from=tmp_path / "adamw")


def test_two_optimizers_become_one_and_layers_come_and_go(tmp_path):
    """`torch.optim.Muon` and AdamW go on as one optimizer; a layer that is new begins where `fresh` names it."""
    model = net()
    matrices = [p for name, p in model.named_parameters() if p.ndim > 1 and not name.startswith("0.")]
    others = [p for name, p in model.named_parameters() if p.ndim < 2 or name.startswith("0.")]
    two = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-3, foreach=False)]
    model(torch.arange(12)).square().mean().backward()
    for optimizer in two:
        optimizer.step()
    weights, state = get_state_dict(model, two)
    expected = {name: dict(slots) for name, slots in state["state"].items()}
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "two")
    for layers, fresh, continued, new in ((2, (), 9, 0), (1, (), 5, 0), (3, ["3.*"], 9, 4)):
        other = net(layers)
        optimizer = muon(other)
        series = muonckpt.Series(tmp_path / f"run{layers}", other, optimizer)
        assert series.resume(begin_from=tmp_path / "two", fresh=fresh) == 1
        names = {param: name for name, param in other.named_parameters()}
        counts = [0, 0]
        for param, slots in optimizer.state.items():
            goes_on = names[param] in expected
            counts[not goes_on] += 1
            for slot, value in slots.items():
                assert torch.equal(value, expected[names[param]][slot]) if goes_on else not value.any()
        assert counts == [continued, new]
    series = muonckpt.Series(tmp_path / "lacking", net(3), muon(net(3)))
    with pytest.raises(muonckpt.ArgumentError, match="that are not the model's"):
        series.resume(begin_from=tmp_path / "two")
    larger = net(3)
    with pytest.raises(muonckpt.SourceError, match=r"3\.0\.weight"):
        muonckpt.Series(tmp_path / "lacking", larger, muon(larger)).resume(begin_from=tmp_path / "two")


def test_momentum_of_another_method_is_not_taken_for_muons(tmp_path):
    """SGD keeps a slot of the same name and shape."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.arange(12)).square().mean().backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "sgd")
    other = net()
    ours = muon(other)
    series = muonckpt.Series(tmp_path / "run", other, ours)
    with pytest.raises(muonckpt.ArgumentError, match=r"does not say how many steps .* begin_step=N"):
        series.resume(begin_from=tmp_path / "sgd")
    assert series.resume(begin_from=tmp_path / "sgd", begin_step=1) == 1
    assert all(not value.any() for slots in ours.state.values() for value in slots.values())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_another_program_writes_what_a_run_begins_from(tmp_path):
    """dion keeps momentum as a sum, which is converted; `convert` is the oracle."""
    source = golden("dion_fsdp4/ckpt")
    muonckpt.convert(source, tmp_path / "ours", to_dialect="muonckpt")
    with muonckpt.open(tmp_path / "ours") as opened:
        stored = {key: torch.tensor(tensor.numpy()) for key, tensor in opened.tensors.items()}
    named = {key.removeprefix("model."): value for key, value in stored.items() if key.startswith("model.")}
    holder = nn.Module()
    for name, value in named.items():
        module = holder
        *path, leaf = name.split(".")
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(leaf, nn.Parameter(torch.zeros_like(value)))
    momenta = {key.split(".", 2)[2] for key in stored if key.endswith("momentum_buffer")}
    matrices = [(n, p) for n, p in holder.named_parameters() if f"{n}.momentum_buffer" in momenta]
    others = [(n, p) for n, p in holder.named_parameters() if f"{n}.momentum_buffer" not in momenta]
    optimizer = Muon([{"params": matrices}, {"params": others, "algorithm": "adamw", "lr": 1e-3}], lr=0.02)
    series = muonckpt.Series(tmp_path / "run", holder, optimizer)
    assert series.resume(begin_from=source, begin_step=3) == 3
    for name, param in holder.named_parameters():
        assert torch.equal(param, stored[f"model.{name}"])
        for slot, value in optimizer.state[param].items():
            assert torch.equal(value, stored[f"optimizer.state.{name}.{slot}"]), (name, slot)
