"""A run begins from a checkpoint of another one, and its schedules go on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
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
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import SWALR

import muonckpt
from muonckpt import Translation
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


def test_a_plain_file_of_a_tutorial_says_the_names_to_write_beside_it(tmp_path, monkeypatch):
    model = net()
    optimizer = adamw(model)
    train(model, optimizer, cosine(optimizer), 0, STEPS)
    path = tmp_path / "model.pt"
    torch.save({"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}, path)
    muonckpt.convert(path, tmp_path / "alone", to_dialect="muonckpt", translation=Translation(model_only=True))
    assert muonckpt.open(tmp_path / "alone").tensors.keys() == {f"model.{name}" for name in model.state_dict()}
    again = net()
    series = muonckpt.Series(tmp_path / "muon", again, muon(again))
    with pytest.raises(muonckpt.SourceError, match=r"to parameter_names.json beside them\. In the program") as refused:
        series.resume(begin_from=path)
    assert refused.value.__cause__ is None and len(str(refused.value).split()) <= 60
    monkeypatch.chdir(tmp_path)
    exec(str(refused.value).partition("that saved it: ")[2], {"model": model, "optimizer": optimizer, "json": json})
    assert series.resume(begin_from=path) == STEPS
    assert torch.equal(again[1][0].weight, model[1][0].weight)


def test_a_momentum_and_a_weight_of_16_bits_are_cast_by_what_two_errors_advise(tmp_path):
    """A run of DeepSpeed's ZeRO 2 keeps momentum, and here one weight, in bfloat16, and other weights in float32."""
    theirs, cast = golden("deepspeed_zero2") / "global_step3", tmp_path / "cast"
    with muonckpt.open(theirs) as source:
        weights = {name.removeprefix("model."): t for name, t in source.tensors.items() if name.startswith("model.")}
        groups = [*source.groups.values()]
    model = nn.Module()
    for name, weight in weights.items():
        *modules, leaf = name.split(".")
        place = model
        for part in modules:
            if not hasattr(place, part):
                place.add_module(part, nn.Module())
            place = getattr(place, part)
        place.register_parameter(leaf, nn.Parameter(torch.zeros(weight.shape)))
    algorithms = ["muon" if group["use_muon"] else "adamw" for group in groups]
    optimizer = Muon(
        [
            {"params": [(name, model.get_parameter(name)) for name in group["params"]], "algorithm": name, "lr": 0.1}
            for name, group in zip(algorithms, groups, strict=True)
        ]
    )
    series = muonckpt.Series(tmp_path / "run", model, optimizer)
    with pytest.raises(muonckpt.SourceError, match=r"State alone is cast exactly: .* --state-dtype float32$"):
        series.resume(begin_from=theirs)
    muonckpt.convert(theirs, cast, translation=Translation(state_dtype="float32"))
    with pytest.raises(
        muonckpt.SourceError, match=r"Exact for model.shift: weight\.data = weight\.data\.to\(torch\.bfloat16\)"
    ):
        series.resume(begin_from=cast)
    model.shift.data = model.shift.data.to(torch.bfloat16)
    assert series.resume(begin_from=cast) == 3
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32, torch.bfloat16}


def muon_and_adamw_of_torch(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [torch.optim.Muon(matrices), torch.optim.AdamW(vectors)]


@pytest.mark.parametrize(
    ("saved_with", "goes_on_with"), [(adamw, muon), (muon, adamw), (muon, muon_and_adamw_of_torch)]
)
def test_a_run_of_another_optimizer_in_the_same_folder_goes_on_in_another(saved_with, goes_on_with, tmp_path):
    model = net()
    muonckpt.Series(tmp_path / "run", model, saved_with(model)).save(STEPS)
    again = net()
    optimizer = goes_on_with(again)
    with pytest.raises(
        muonckpt.SourceError, match=r"was saved with another optimizer\. Begin a run in another"
    ) as refused:
        muonckpt.Series(tmp_path / "run", again, optimizer).resume()
    [call] = re.findall(r"whose method stays: (resume\(.*\))$", str(refused.value))
    assert eval(f"series.{call}", {"series": muonckpt.Series(tmp_path / "new", again, optimizer)}) == STEPS + 1
    again(torch.arange(12)).square().mean().backward()
    for each in optimizer if isinstance(optimizer, list) else [optimizer]:
        each.step()


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": cosine,
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4)),
    "once": lambda optimizer: OneCycleLR(
        optimizer, [group["lr"] for group in optimizer.param_groups], total_steps=30, cycle_momentum=False
    ),
    "cyclic": lambda optimizer: CyclicLR(optimizer, 1e-5, 1e-2, step_size_up=3, cycle_momentum=False),
    "restarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 4, 2),
    "multiplied": lambda optimizer: MultiplicativeLR(optimizer, lambda step: 0.93),
    "steps": lambda optimizer: StepLR(optimizer, 3, 0.3),
    "milestones": lambda optimizer: MultiStepLR(optimizer, [2, 5, 8], 0.37),
    "constant": lambda optimizer: ConstantLR(optimizer, 0.3, 8),
    "polynomial": lambda optimizer: PolynomialLR(optimizer, 25, 1.3),
    "chained": lambda optimizer: ChainedScheduler([LinearLR(optimizer), ExponentialLR(optimizer, 0.9)]),
    "in turn": lambda optimizer: SequentialLR(optimizer, [LinearLR(optimizer), ExponentialLR(optimizer, 0.9)], [4]),
    "averaged": lambda optimizer: SWALR(optimizer, 1e-4, anneal_epochs=5),
    "turns in turns": lambda optimizer: SequentialLR(
        optimizer, [SCHEDULES["in turn"](optimizer), cosine(optimizer)], [7]
    ),
    "chains in a chain": lambda optimizer: ChainedScheduler([SCHEDULES["chained"](optimizer), cosine(optimizer)]),
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
        f"zero; schedules are at their step {STEPS}; next step: {STEPS}; "
        "lr and other options are the code's, so betas=(0.9, 0.95) where 7 parameters had (0.9, 0.999), "
        "weight_decay=0.1 where 7 parameters had 0.01"
    )
    train(model, optimizer, scheduler, first, STEPS + 3)
    assert [group["lr"] for group in optimizer.param_groups] == rates(SCHEDULES[schedule], optimizer, STEPS + 3)


@pytest.mark.parametrize("schedule", ["cosine", "chained", "in turn"])
def test_several_schedules_go_on_at_their_own_step_which_is_not_that_of_the_optimizers(schedule, tmp_path):
    make = SCHEDULES[schedule]
    model = net()
    two = [torch.optim.AdamW(each.parameters(), lr=3e-4) for each in model]
    schedulers = [make(optimizer) for optimizer in two]
    for step in range(STEPS):
        model(torch.arange(12)).square().mean().backward()
        for optimizer, scheduler in zip(two, schedulers, strict=True):
            optimizer.step()
            if step % 2:
                scheduler.step()
    weights, state = get_state_dict(model, two)

    def begun(path: Path) -> list[float]:
        schedules = [scheduler.state_dict() for scheduler in schedulers]
        dcp.save({"model": weights, "optimizer": state, "rates": schedules}, checkpoint_id=path)
        other = net()
        optimizer = muon(other)
        series = muonckpt.Series(tmp_path / "run", other, optimizer, scheduler=make(optimizer))
        assert series.resume(begin_from=path, strict=True) == STEPS
        return [group["lr"] for group in optimizer.param_groups]

    assert begun(tmp_path / "two") == rates(make, Muon([nn.Parameter(torch.ones(2, 2))]), STEPS // 2)
    schedulers[0].step()
    with pytest.raises(muonckpt.ArgumentError, match=r"expected schedulers at one step .*, found 3 and 4\. Make"):
        begun(tmp_path / "apart")


@pytest.mark.filterwarnings("ignore:the optimizer has a scheduler that the series does not have")
@pytest.mark.parametrize(("given", "expected"), [({}, 2), ({"begin_step": 5}, 5)])
def test_a_schedule_that_was_not_saved_goes_on_at_the_number_of_updates(given, expected, tmp_path):
    """The step of a series counts batches, three of which make an update."""
    model = net()
    optimizer = adamw(model)
    scheduler = cosine(optimizer)
    train(model, optimizer, scheduler, 0, 2)
    muonckpt.Series(tmp_path / "adamw", model, optimizer).save(5)
    other = net()
    ours = muon(other)
    series = muonckpt.Series(tmp_path / "run", other, ours, scheduler=cosine(ours))
    assert series.resume(begin_from=tmp_path / "adamw" / "step-00000005", **given) == given.get("begin_step", 6)
    assert [group["lr"] for group in ours.param_groups] == rates(cosine, ours, expected)


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
    with pytest.raises(muonckpt.SourceError, match=r"'model\.3\.\*'.*fresh=\['3\.\*'\]"):
        muonckpt.Series(tmp_path / "lacking", larger, muon(larger)).resume(begin_from=tmp_path / "two")


def wider_vocabulary(model: nn.Sequential, rows: int) -> nn.Sequential:
    model[0] = nn.Embedding(rows, 8)
    return model


def grow_job(rank: int, world: int, path: str, folder: str) -> tuple[str, torch.Tensor, dict[str, torch.Tensor]]:
    model = fully_shard(wider_vocabulary(net(), 17))
    optimizer = muon(model)
    [table, *_] = model.parameters()
    before = whole(table).detach().clone()
    with redirect_stdout(StringIO()) as line:
        assert muonckpt.Series(folder, model, optimizer).resume(begin_from=path, grow=["0.weight"]) == STEPS
    slots = {slot: whole(value) for slot, value in optimizer.state[table].items()}
    return line.getvalue(), before, {"weight": whole(table).detach(), **slots}


def test_a_vocabulary_grows_with_its_moments(tmp_path):
    path = tmp_path / "adamw"
    saved = saved_by_adamw(path)
    line, before, after = run(2, grow_job, str(path), str(tmp_path / "run"))[0]
    assert "9 weights loaded; 0.weight grown, new rows begin; the state of 7 parameters goes on" in line
    assert torch.equal(after["weight"], torch.cat([saved["0.weight"], before[12:]]))
    assert torch.equal(after["step"], saved["0.weight step"])
    for slot in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(after[slot], torch.cat([saved[f"0.weight {slot}"], torch.zeros(5, 8)]))
    # The error without it names it, for this call.
    model = wider_vocabulary(net(), 17)
    with pytest.raises(muonckpt.SourceError, match=r"Series.resume\(..., grow=\['0.weight'\]\)$") as told:
        muonckpt.Series(tmp_path / "other", model, muon(model)).resume(begin_from=path)
    assert str(told.value).startswith(str(path)) and not list((tmp_path / "other").iterdir())
    # Or the table begins, as another one.
    before = model[0].weight.detach().clone()
    muonckpt.Series(tmp_path / "other", model, muon(model)).resume(begin_from=path, fresh=["0.weight"])
    assert torch.equal(model[0].weight, before) and torch.equal(model[1][0].weight, saved["1.0.weight"])


class Adapted(nn.Module):
    """A linear layer with LoRA, whose own names are those of PEFT."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def adapted() -> nn.Sequential:
    model = net()
    for block in (model[1], model[2]):
        block[0] = Adapted(block[0])
    return model


def with_state(model: nn.Module, path: Path) -> dict[str, torch.Tensor]:
    optimizer = adamw(model)
    model(torch.arange(12)).square().mean().backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    return {name: value.clone() for name, value in weights.items()}


def follow_renaming(error: Exception, source: Path, folder: Path) -> Path:
    """Do what an error says of parameters that were renamed."""
    command, table = str(error).split(", with FILE:\n")
    assert command.endswith(f"If they were renamed: muonckpt convert {source} NEW --rules FILE")
    (folder / "rules.toml").write_text(table)
    muonckpt.convert(source, folder / "renamed", translation=Translation(rules=str(folder / "rules.toml")))
    return folder / "renamed"


def test_adapters_begin_beside_the_weights_of_their_base(tmp_path, capsys):
    """The wrapper of adapters has changed their names."""
    saved = with_state(net(), tmp_path / "base")
    model = adapted()
    series = muonckpt.Series(tmp_path / "run", model, muon(model))
    with pytest.raises(muonckpt.SourceError) as told:
        series.resume(begin_from=tmp_path / "base", fresh=["*lora_*"])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    series.resume(begin_from=follow_renaming(told.value, tmp_path / "base", tmp_path), fresh=["*lora_*"], begin_step=1)
    line = "4 weights stay as initialised; 9 weights loaded; the state of 7 parameters goes on, that of 6 begins at"
    assert line in capsys.readouterr().out
    for name, param in model.named_parameters():
        expected = before[name] if "lora" in name else saved[name.replace(".base_layer", "")]
        assert torch.equal(param, expected), name


@pytest.mark.parametrize("source", ["folder", "file"])
def test_weights_alone_under_the_names_of_the_model_begin_a_run(source, tmp_path, capsys):
    base, model = net(), net()
    muonckpt.save({"model": base.state_dict()}, tmp_path / "saved")
    request = Translation(model_only=True, roots={"model": ""})
    muonckpt.convert(
        tmp_path / "saved", tmp_path / "folder", to_dialect="muonckpt", format="safetensors", translation=request
    )
    torch.save(base.state_dict(), tmp_path / "file")
    with torch.no_grad():
        model[0].weight.zero_()
    series = muonckpt.Series(tmp_path / "run", model, muon(model))
    assert series.resume(begin_from=tmp_path / source, begin_step=0) == 0
    assert "9 weights loaded; the state of 0 parameters goes on, that of 9 begins" in capsys.readouterr().out
    assert torch.equal(model[0].weight, base[0].weight)


def test_adapters_that_the_model_lacks_are_named_and_not_loaded(tmp_path, capsys):
    """Nothing says how they were scaled, so that they are merged before, by the program that has them."""
    saved = with_state(adapted(), tmp_path / "adapted")
    model = net()
    series = muonckpt.Series(tmp_path / "run", model, muon(model))
    with pytest.raises(muonckpt.SourceError) as told:
        series.resume(begin_from=tmp_path / "adapted")
    series.resume(begin_from=follow_renaming(told.value, tmp_path / "adapted", tmp_path), begin_step=1)
    unused = "not loaded, as the model lacks them: *.0.lora_A.weight (2), *.0.lora_B.weight (2)"
    assert f"9 weights loaded; {unused}; the state of 5 parameters goes on" in capsys.readouterr().out
    for name, param in model.named_parameters():
        assert torch.equal(param, saved[name if name in saved else name.replace(".0.", ".0.base_layer.")]), name


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adafactor])
def test_state_of_an_unknown_optimizer_begins_and_the_line_says_so(make, tmp_path, capsys):
    """SGD keeps a slot of Muon's name and shape."""
    model = net()
    optimizer = make(model.parameters(), **({"momentum": 0.9} if make is torch.optim.SGD else {}))
    model(torch.arange(12)).square().mean().backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "other")
    other = net()
    ours = muon(other)
    series = muonckpt.Series(tmp_path / "run", other, ours)
    with pytest.raises(muonckpt.ArgumentError, match=r"does not say how many steps .* begin_step=N"):
        series.resume(begin_from=tmp_path / "other")
    assert series.resume(begin_from=tmp_path / "other", begin_step=1) == 1
    line = "9 weights loaded; its optimizer is not known; the state of 0 parameters goes on, that of 9 begins at zero"
    assert line in capsys.readouterr().out
    assert all(not value.any() for slots in ours.state.values() for value in slots.values())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    ("arguments", "found"),
    [({"begin_step": 3}, "3"), ({"begin_from": "other", "begin_step": "3"}, "'3'"),
     ({"begin_from": "other", "begin_step": -1}, "-1"), ({"begin_from": "other", "begin_step": True}, "True")],
)  # fmt: skip
def test_a_step_to_begin_with_is_an_integer_beside_a_checkpoint(tmp_path, arguments, found):
    model = net()
    with pytest.raises(muonckpt.ArgumentError, match=rf"begin_step={found}: expected an integer, 0 or more, beside"):
        muonckpt.Series(tmp_path, model, muon(model)).resume(**arguments)


def test_other_refusals_of_a_translation_are_raised_with_the_copy_to_make(tmp_path):
    """State of AdamW that lacks its steps is not that of an unknown optimizer."""
    model = net()
    optimizer = adamw(model)
    model(torch.arange(12)).square().mean().backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    for slots in state["state"].values():
        del slots["step"]
    source, copy = tmp_path / "adamw", tmp_path / "copy"
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=source)
    other = net()
    ours = muon(other)
    series = muonckpt.Series(tmp_path / "run", other, ours)
    with pytest.raises(muonckpt.SourceError) as told:
        series.resume(begin_from=source)
    assert "give `step=`. Do so by muonckpt.convert(" in str(told.value)
    muonckpt.convert(source, copy, to_dialect="muonckpt", translation=Translation(step=1))
    assert series.resume(begin_from=copy) == 1
    assert torch.equal(ours.state[other[0].weight]["exp_avg"], state["state"]["0.weight"]["exp_avg"])


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
