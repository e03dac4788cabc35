"""A series that has the objects of a training saves, resumes and proves them, on every kind of mesh."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import megatron_training
from support.commands import called
from support.forked import Scripts
from support.megatron_model import Topology, on_cpu
from support.megatron_training import with_the_package
from support.workers import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ExponentialLR, LinearLR, SequentialLR, StepLR
from torch.utils.data import DataLoader

import muonckpt
from muonckpt.optimizer import LayerWise, Muon

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STEPS = 3


class Net(nn.Module):
    """Two matrices in turn, and a stack of four experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)
        self.experts = nn.Parameter(torch.randn(4, 12, 12) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        experts = self.experts
        if hasattr(experts, "full_tensor"):
            experts = experts.full_tensor()
        return (self.down(self.up(x).relu()) + (x @ experts).sum(0)).square().mean()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices for Muon, vectors for AdamW, each with its name."""
    matrices = [(name, param) for name, param in model.named_parameters() if param.ndim > 1]
    vectors = [(name, param) for name, param in model.named_parameters() if param.ndim < 2]
    return [{"params": matrices, "lr": 0.02}, {"params": vectors, "algorithm": "adamw", "lr": 1e-3}]


Made = tuple[nn.Module, torch.optim.Optimizer, Callable[[int], None]]
"""A model, its optimizer, and a function that makes the gradients of a step."""


def made_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Made:
    def backward(step: int) -> None:
        model(torch.randn(4, 12, generator=torch.Generator().manual_seed(step))).backward()

    return model, optimizer or Muon(groups(model)), backward


def fsdp(rank: int, world: int) -> Made:
    return made_of(fully_shard(Net()))


def hsdp(rank: int, world: int) -> Made:
    return made_of(
        fully_shard(Net(), mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicas", "shards")))
    )


def ddp(rank: int, world: int) -> Made:
    model = DistributedDataParallel(Net())
    return made_of(model, Muon(groups(model), replicas=dist.group.WORLD))


def tensor_parallel(rank: int, world: int) -> Made:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return made_of(parallelize_module(Net(), init_device_mesh("cpu", (world,)), plan))


def expert_parallel(rank: int, world: int) -> Made:
    model = Net()
    mesh = init_device_mesh("cpu", (world,))
    model.experts = nn.Parameter(distribute_tensor(model.experts.detach(), mesh, [Shard(0)]))
    return made_of(model)


def pipeline(rank: int, world: int) -> Made:
    """Six layers in stages, each with the names of the whole model."""
    names = [f"layer{number}" for number in range(6) if number * world // 6 == rank]
    torch.manual_seed(rank)
    stage = nn.ModuleDict({name: nn.Linear(12, 12) for name in names})

    def backward(step: int) -> None:
        for layer in stage.values():
            layer(torch.ones(2, 12) * step).square().mean().backward()

    return stage, Muon(groups(stage)), backward


def layer_wise(rank: int, world: int) -> Made:
    model = Net()
    return made_of(model, LayerWise(model, groups(model)))


def megatron_fsdp(rank: int, world: int, version: int) -> Made:
    from muonckpt.optimizer.megatron_fsdp import attach

    topology = Topology(shard=world, version=version)
    model, _, optimizer = megatron_training.build(rank, topology)
    attach(optimizer, model)
    return model, optimizer, lambda step: megatron_training.backward(model, rank, step, topology)


def megatron_v1(rank: int, world: int) -> Made:
    return megatron_fsdp(rank, world, 1)


def megatron_v2(rank: int, world: int) -> Made:
    return megatron_fsdp(rank, world, 2)


def week(rank: int, world: int, make: Callable[[int, int], Made], folder: str, until: int) -> tuple[int, str]:
    """Train until a step as a script does, and stop as if killed; return the first step and what the run recorded."""
    with on_cpu():
        model, optimizer, backward = make(rank, world)
        scheduler = ExponentialLR(optimizer, 0.9)
        series = muonckpt.Series(folder, model, optimizer, scheduler=scheduler)
        first = series.resume(strict=True)
        for step in range(first, until):
            optimizer.zero_grad()
            backward(step)
            optimizer.step()
            scheduler.step()
            series.save(step)
        resumes = muonckpt.look_at_run(folder).resumes if first else ()
        expected = optimizer.param_groups[0]["initial_lr"]
        for _ in range(until):
            expected *= 0.9
        assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (until, expected), (
            "as without an interruption"
        )
        return first, resumes[-1].verdict if resumes else ""


CASES = [(fsdp, 2, 3), (tensor_parallel, 3, 2), (expert_parallel, 2, 4), (ddp, 3, 2), (hsdp, 4, 2), (pipeline, 3, 2)]
CASES += [(layer_wise, 2, 3)]


@pytest.mark.parametrize(
    ("make", "ranks", "later_ranks"),
    [
        *(pytest.param(*case, id=case[0].__name__) for case in CASES),
        pytest.param(megatron_v1, 2, 3, id="Megatron-FSDP v1", marks=with_the_package),
        pytest.param(megatron_v2, 3, 2, id="Megatron-FSDP v2", marks=with_the_package),
    ],
)
def test_a_run_resumes_on_another_number_of_ranks_and_is_proved(make, ranks, later_ranks, tmp_path):
    folder = str(tmp_path / "run")
    assert {first for first, _ in run(ranks, week, make, folder, STEPS)} == {0}
    found = run(later_ranks, week, make, folder, STEPS + 2)
    assert found == [found[0]] * later_ranks
    first, verdict = found[0]
    assert first == STEPS and verdict.startswith("proved: "), verdict


class Loader:
    """Counts what it has given."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Job:
    """Two optimizers and two schedulers, and a loader."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        matrices = [param for param in self.model.parameters() if param.ndim > 1]
        vectors = [param for param in self.model.parameters() if param.ndim < 2]
        self.optimizers = [Muon(matrices, lr=0.02), torch.optim.AdamW(vectors, lr=1e-3)]
        self.schedulers = [ExponentialLR(self.optimizers[0], 0.9), StepLR(self.optimizers[1], 2)]
        self.loader = Loader()
        extra = {"loader": self.loader}
        self.series = muonckpt.Series(folder, self.model, self.optimizers, scheduler=self.schedulers, extra=extra)

    def train(self, steps: int) -> None:
        for step in range(steps):
            self.model(torch.ones(2, 6) * step).square().mean().backward()
            for each in (*self.optimizers, *self.schedulers):
                each.step()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            self.loader.position += 1


UNSTEPPED: dict[str, Callable[[nn.Module], list[torch.optim.Optimizer]]] = {
    "adamw": lambda net: [torch.optim.AdamW(net.parameters())],
    "nadam": lambda net: [torch.optim.NAdam(net.parameters())],
    "sgd": lambda net: [torch.optim.SGD(net.parameters(), momentum=0.9, dampening=0.5)],
    "two": lambda net: [torch.optim.Muon([net.weight]), torch.optim.AdamW([net.bias])],
    "muonckpt": lambda net: [Muon.for_model(net, lr=0.1, adamw_lr=0.1)],
}


@pytest.mark.parametrize("make", UNSTEPPED.values(), ids=UNSTEPPED.keys())
def test_a_new_run_trains_as_without_a_series(make, tmp_path):
    bits = []
    for folder in (None, tmp_path):
        torch.manual_seed(0)
        net = nn.Linear(6, 6)
        optimizers = make(net)
        if folder:
            assert muonckpt.Series(folder, net, optimizers).resume() == 0
        for _ in range(STEPS):
            net(torch.ones(2, 6)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        bits.append(net.state_dict())
    assert all(torch.equal(bits[0][name], bits[1][name]) for name in bits[0])


def test_a_save_before_the_first_step_counts_no_step(tmp_path):
    net = nn.Linear(6, 6)
    optimizer = torch.optim.AdamW(net.parameters())
    run = muonckpt.Series(tmp_path, net, optimizer)
    run.save(0)
    assert [state["step"].item() for state in optimizer.state.values()] == [0, 0]
    run.resume()
    assert [state["step"].item() for state in optimizer.state.values()] == [0, 0]


def test_a_group_without_parameters_keeps_its_options(tmp_path):
    """Torch sets the options of a group by its parameters, and its next step dies where there are none."""

    def begun() -> tuple[torch.optim.Optimizer, muonckpt.Series]:
        net = nn.Linear(6, 6)
        optimizer = torch.optim.AdamW([{"params": []}, {"params": [*net.parameters()]}])
        return optimizer, muonckpt.Series(tmp_path, net, optimizer)

    optimizer, run = begun()
    run.save(0)
    again, run = begun()
    run.resume()
    assert [*map(len, again.param_groups)] == [*map(len, optimizer.param_groups)]
    again.step()


def test_a_parameter_in_two_optimizers_is_refused(tmp_path):
    """The state of one of them would be lost."""
    net = nn.Linear(6, 6)
    first, second = torch.optim.AdamW(net.parameters()), torch.optim.AdamW([net.bias])
    with pytest.raises(muonckpt.ArgumentError, match="parameter 'bias' is in two optimizers"):
        muonckpt.Series(tmp_path, net, [first, second]).save(0)
    for folder, optimizer in {"first": first, "second": second}.items():
        run = muonckpt.Series(tmp_path / folder, net, [optimizer, optimizer])
        run.save(0)
        assert run.resume(strict=True) == 1


def test_an_optimizer_whose_state_torch_cannot_take_is_refused(tmp_path):
    net = nn.Linear(6, 6)
    with pytest.raises(
        muonckpt.ArgumentError, match=r"get_state_dict.* fails .TypeError.* whose step needs no closure"
    ):
        muonckpt.Series(tmp_path, net, torch.optim.LBFGS(net.parameters())).resume()
    lazy = nn.LazyLinear(6)
    with pytest.raises(
        muonckpt.ArgumentError, match=r"get_state_dict.* fails .ValueError.* parameters are initialised"
    ):
        muonckpt.Series(tmp_path, lazy, torch.optim.AdamW(lazy.parameters())).resume()


def test_state_of_a_parameter_that_is_frozen_now_is_loaded_by_the_advice(tmp_path):
    """Torch leaves the state of frozen parameters out of the state dict of a new optimizer."""

    def begun() -> tuple[nn.Linear, torch.optim.Optimizer, muonckpt.Series]:
        net = nn.Linear(6, 6)
        optimizer = torch.optim.AdamW(net.parameters())
        return net, optimizer, muonckpt.Series(tmp_path, net, optimizer)

    net, optimizer, run = begun()
    net(torch.ones(2, 6)).square().mean().backward()
    optimizer.step()
    net.bias.requires_grad_(False)
    run.save(0)
    again, _, run = begun()
    again.bias.requires_grad_(False)
    with pytest.raises(muonckpt.SourceError, match="give their optimizer, and unfreeze them until it is loaded"):
        run.resume()
    again, optimizer_again, run = begun()
    with pytest.warns(UserWarning, match="bias.requires_grad: False -> True; 8 tensors"):
        assert run.resume() == 1
    exp_avg = optimizer_again.state[again.bias]["exp_avg"]
    assert exp_avg.any() and torch.equal(exp_avg, optimizer.state[net.bias]["exp_avg"])


def test_several_optimizers_schedulers_and_other_objects_come_back(tmp_path, capsys):
    job = Job(tmp_path)
    assert job.series.resume() == 0
    assert (
        capsys.readouterr().out
        == f"no checkpoint in {tmp_path}: starting at step 0 (to make this an error: resume(required=True))\n"
    )
    job.train(3)
    job.series.save(2)
    again = Job(tmp_path, seed=1)
    assert again.series.resume() == 3
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("resumed from step 2, saved on 1 rank, now 1, proved: ") and "not checked" not in line
    assert again.loader.position == 3
    for each in (job, again):
        each.train(2)
    assert all(torch.equal(a, b) for a, b in zip(job.model.parameters(), again.model.parameters(), strict=True))
    assert [s.get_last_lr() for s in job.schedulers] == [s.get_last_lr() for s in again.schedulers]
    again.series.async_save(4).result()
    assert again.series.latest().step == 4


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_rates_that_are_tensors_come_back_to_parts_that_share_them(tmp_path):
    """The first part of a schedule in turn has the rates of the whole, until the next begins."""

    def begun() -> tuple[muonckpt.Series, SequentialLR]:
        model = nn.Linear(6, 6, bias=False)
        optimizer = Muon(model.parameters(), lr=torch.tensor(0.02))
        scheduler = SequentialLR(optimizer, [LinearLR(optimizer), ExponentialLR(optimizer, 0.9)], [2])
        return muonckpt.Series(tmp_path, model, optimizer, scheduler=scheduler), scheduler

    run, scheduler = begun()
    for _ in range(3):
        scheduler.step()
    run.save(2)
    run, again = begun()
    assert run.resume(strict=True) == 3
    for each in (scheduler, again):
        each.step()
    assert torch.equal(again.get_last_lr()[0], scheduler.get_last_lr()[0])


@pytest.mark.parametrize("saved", [None, "other kind"])
def test_a_scheduler_and_a_loader_that_a_run_was_saved_without_come_in_by_a_new_run(saved, tmp_path, capsys):
    job = Job(tmp_path / "new")
    former = ExponentialLR(job.optimizers[0], 0.5) if saved else None
    old = muonckpt.Series(tmp_path / "old", job.model, job.optimizers, scheduler=former)
    job.train(3)
    for _ in range(3 if former else 0):
        former.step()
    old.save(2)
    weights = [param.clone() for param in job.model.parameters()]
    again = Job(tmp_path / "old", seed=1)
    with pytest.raises(muonckpt.SourceError, match="It was saved without 'loader'") as refused:
        again.series.resume()
    [call] = re.findall(r"begin a run in another folder: (resume\(.*\))$", str(refused.value))
    again = Job(tmp_path / "new", seed=1)
    assert eval(f"series.{call}", {"series": again.series}) == 3
    assert "; as the code made it: loader; schedules are at their step 3;" in capsys.readouterr().out
    assert all(map(torch.equal, weights, again.model.parameters()))
    assert [optimizer.param_groups[0]["lr"] for optimizer in again.optimizers] == [0.02 * 0.9 * 0.9 * 0.9, 1e-3 * 0.1]


class Losses:
    """An object whose state gets keys while a run trains."""

    def __init__(self, values: dict[str, float]) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return {"values": dict(self.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


def test_an_object_with_other_keys_than_when_it_was_saved_is_loaded_by_the_advice(tmp_path):
    def begun(values: dict[str, float]) -> tuple[Losses, muonckpt.Series]:
        net, losses = nn.Linear(6, 6), Losses(values)
        return losses, muonckpt.Series(tmp_path, net, torch.optim.AdamW(net.parameters()), extra={"losses": losses})

    begun({"code": 0.5, "math": 0.25})[1].save(0)
    line = r"The state of 'losses' had other keys when it was saved. Before resume, give it those, as (.*) has them$"
    for values in ({}, {"code": 0.0}, {"prose": 0.0}):
        with pytest.raises(muonckpt.SourceError, match=line) as refused:
            begun(values)[1].resume()
        [items] = re.findall(line, str(refused.value))
        saved = {key: value for key, value in eval(items, {"muonckpt": muonckpt}).items() if key.startswith("losses.")}
        losses, run = begun({key.removeprefix("losses.values."): 0.0 for key in saved})
        assert run.resume(strict=True) == 1
        assert losses.values == {"code": 0.5, "math": 0.25}


def test_objects_that_a_run_has_no_longer_stay_in_its_checkpoint(tmp_path):
    job = Job(tmp_path)
    job.series.save(2)
    series = muonckpt.Series(tmp_path, job.model, job.optimizers)
    line = r"state of 'loader' and a scheduler, and .* Write Series\(..., (scheduler=scheduler, extra={.*})\); to leave"
    with pytest.raises(muonckpt.SourceError, match=line) as refused:
        series.resume()
    [arguments] = re.findall(line, str(refused.value))
    given = eval(f"dict({arguments})", {"scheduler": job.schedulers, "loader": job.loader})
    assert muonckpt.Series(tmp_path, job.model, job.optimizers, **given).resume() == 3
    [globs] = re.findall(r"allow_extra=(\[.*\])\)", str(refused.value))
    with pytest.raises(muonckpt.AttestError, match="a scheduler that the series does not have, so that no checkpoint"):
        series.resume(allow_extra=eval(globs), strict=True)
    with pytest.warns(
        UserWarning, match="a scheduler that the series does not have, so that no checkpoint has its state"
    ):
        assert series.resume(allow_extra=eval(globs)) == 3


def blocks(number: int) -> nn.Module:
    torch.manual_seed(number)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)) for _ in range(number)))


def started(folder: Path, model: nn.Module, **choices: Any) -> tuple[int, dict[str, Any]]:
    """Resume as a script does, train a step and save it; return the step, and the state that was set by then."""
    series = muonckpt.Series(folder, model, optimizer := Muon(groups(model)))
    step = series.resume(**choices)
    resumed = {"weights": deepcopy(model.state_dict()), "state": deepcopy(optimizer.state_dict()["state"])}
    model(torch.ones(2, 6)).square().mean().backward()
    optimizer.step()
    series.save(step)
    return step, resumed


@pytest.mark.parametrize(("saved", "now"), [(2, 3), (3, 2)])
def test_a_layer_more_or_less_goes_on_by_the_line_to_write_and_the_same_script_starts_again(
    saved, now, tmp_path, capsys
):
    started(tmp_path, blocks(saved))
    with pytest.raises(muonckpt.SourceError, match=r"Series\.resume\(\.\.\., fresh=\['2\.\*'\]\)"):
        started(tmp_path, blocks(now))
    model = blocks(now)
    assert started(tmp_path, model, fresh=["2.*"])[0] == 1
    trained = deepcopy(model.state_dict())
    capsys.readouterr()
    # The checkpoint has the state of the new layer by now, so nothing begins again.
    step, resumed = started(tmp_path, blocks(now), fresh=["2.*"])
    [line] = capsys.readouterr().out.splitlines()
    assert step == 2 and "proved" in line and "not checked" not in line
    assert all(map(torch.equal, resumed["weights"].values(), trained.values()))
    assert all(slots for slots in resumed["state"].values())


def test_a_lost_momentum_of_the_only_step_begins_from_zero_by_the_line_that_verify_prints(tmp_path, capsys):
    key, step = "optimizer.state.0.0.weight.momentum_buffer", tmp_path / "step-00000000"
    started(tmp_path, blocks(1))
    with muonckpt.open(step) as opened:
        payload = opened.tensors[key].record.chunks[0].payload
    data = bytearray((step / payload.file).read_bytes())
    data[payload.end - 1] ^= 1
    (step / payload.file).write_bytes(data)
    with pytest.raises(muonckpt.DamageError, match=r"What to do: \(a\) muonckpt verify (\S+) ") as refused:
        started(tmp_path, blocks(1))
    [path] = re.findall(r"\(a\) muonckpt verify (\S+) ", str(refused.value))
    [line] = re.findall(r"\([a-z]\) Series\.resume\(\.\.\., (.*)\)$", called("verify", path).stdout, re.MULTILINE)
    choices = eval(f"dict({line})")
    with pytest.warns(RuntimeWarning), pytest.raises(muonckpt.DamageError, match="expected a whole checkpoint"):
        started(tmp_path, blocks(1), fresh=["0.1.*"])  # another parameter than the one that has lost its momentum
    model = blocks(1)
    with pytest.warns(RuntimeWarning, match="is not whole: .* 1 of 1 momenta .*; restoring it but for fresh state"):
        number, resumed = started(tmp_path, model, **choices)
    assert number == 1 and not resumed["state"][0]["momentum_buffer"].any()
    trained = deepcopy(model.state_dict())
    capsys.readouterr()
    number, resumed = started(tmp_path, blocks(1), **choices)
    assert number == 2 and "not checked" not in capsys.readouterr().out
    assert all(map(torch.equal, resumed["weights"].values(), trained.values()))
    assert resumed["state"][0]["momentum_buffer"].any()


def test_a_group_whose_state_begins_again_keeps_the_rates_of_its_checkpoint(tmp_path, capsys):
    started(tmp_path, blocks(1))
    step = tmp_path / "step-00000000"
    with muonckpt.open(step) as opened:
        payload = opened.tensors["optimizer.state.0.0.weight.momentum_buffer"].record.chunks[0].payload
    data = bytearray((step / payload.file).read_bytes())
    data[payload.end - 1] ^= 1
    (step / payload.file).write_bytes(data)
    [line] = re.findall(r"\([a-z]\) Series\.resume\(\.\.\., (.*)\)$", called("verify", step).stdout, re.MULTILINE)
    model = blocks(1)
    optimizer = Muon([{**group, "lr": 0.5} for group in groups(model)])
    with pytest.warns(UserWarning, match=r"lr=0\.02, not 0\.5"), pytest.warns(RuntimeWarning, match="fresh state"):
        assert muonckpt.Series(tmp_path, model, optimizer).resume(**eval(f"dict({line})")) == 1
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 1e-3]
    assert "param_groups" not in capsys.readouterr().out


def test_a_step_that_cannot_begin_again_is_not_called_restored(tmp_path, capsys):
    for _ in range(2):
        started(tmp_path, blocks(1))
    keys = {0: ["momentum_buffer"], 1: ["momentum_buffer", "weight"]}
    for number, names in keys.items():
        path = tmp_path / f"step-{number:08}"
        with muonckpt.open(path) as opened:
            tensors = [tensor for tensor in opened.tensors if tensor.rpartition(".")[2] in names and "0.0." in tensor]
            payloads = [opened.tensors[tensor].record.chunks[0].payload for tensor in tensors]
        for payload in payloads:
            data = bytearray((path / payload.file).read_bytes())
            data[payload.end - 1] ^= 1
            (path / payload.file).write_bytes(data)
    assert called("verify", tmp_path, "--all").returncode == 1
    capsys.readouterr()
    with pytest.warns(RuntimeWarning) as caught:
        assert started(tmp_path, blocks(1), fresh=["0.0.weight"])[0] == 1
    warned = [str(each.message) for each in caught if "is not whole" in str(each.message)]
    fresh, instead = (
        "restoring it but for fresh state, if the rest is whole",
        f"restoring {tmp_path / 'step-00000000'} instead",
    )
    effects = [
        [name, effect]
        for text in warned
        for name in ("00000001", "00000000")
        for effect in (fresh, instead)
        if f"step-{name} is not whole" in text and effect in text
    ]
    assert effects == [["00000001", fresh], ["00000001", instead], ["00000000", fresh]]
    assert "resumed from step 0" in capsys.readouterr().out


def test_a_line_that_begins_state_from_zero_names_its_step(tmp_path):
    for _ in range(2):
        started(tmp_path, blocks(1))
    for number, key in enumerate(("state.0.0.weight.momentum_buffer", "state.0.0.bias.exp_avg")):
        path = tmp_path / f"step-{number:08}"
        with muonckpt.open(path) as opened:
            payload = opened.tensors[f"optimizer.{key}"].record.chunks[0].payload
        data = bytearray((path / payload.file).read_bytes())
        data[payload.end - 1] ^= 1
        (path / payload.file).write_bytes(data)
    lines = [line for line in called("verify", tmp_path, "--all").stdout.splitlines() if "Series.resume(" in line]
    names = [re.findall(r"fresh=\['(.*)'\]\) \(in Python, for (.*?):", line) for line in lines]
    assert names == [[("0.0.bias", "step-00000001")], [("0.0.weight", "step-00000000")]]


def test_options_that_no_saved_state_fits_are_called_those_of_the_code(tmp_path, capsys):
    started(tmp_path, blocks(1))
    model = blocks(1)
    matrices, vectors = groups(model)
    optimizer = Muon([{**matrices, "algorithm": "adamw", "lr": 0.5}, vectors])
    assert muonckpt.Series(tmp_path, model, optimizer).resume(fresh=["0.0.weight"]) == 1
    assert optimizer.param_groups[0]["lr"] == 0.5
    kept = r"not checked: optimizer\.param_groups\.[^;]* and \d more, which are the code's, optimizer\.state\."
    assert re.search(kept, capsys.readouterr().out)


def test_a_checkpoint_of_another_model_is_no_renaming_and_its_folder_is_left(tmp_path):
    started(tmp_path / "run", blocks(2))
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))
    scheduler = ExponentialLR(optimizer := Muon(groups(model)), 0.5)
    fault = r"of another model: none of its 8 weights has the name and shape of one here\. Give Series another folder$"
    with pytest.raises(muonckpt.SourceError, match=fault):
        muonckpt.Series(tmp_path / "run", model, optimizer, scheduler=scheduler).resume()
    assert muonckpt.Series(tmp_path / "another folder", model, optimizer, scheduler=scheduler).resume() == 0


def test_a_new_rate_is_set_by_the_line_to_write_and_then_kept_in_silence(tmp_path, recwarn):
    def resumed(lr: float) -> tuple[muonckpt.Series, Muon]:
        model = nn.Linear(6, 6, bias=False)
        optimizer = Muon(model.parameters(), lr=lr)
        series = muonckpt.Series(tmp_path, model, optimizer)
        series.resume()
        return series, optimizer

    resumed(0.02)[0].save(0)
    with pytest.warns(UserWarning, match=r"group 0 \(muon\): lr=0.02, not 0.01") as told:
        series, optimizer = resumed(0.01)
    assert optimizer.param_groups[0]["lr"] == 0.02
    [line] = re.findall(r"write after loading (.*), and so on", str(told[0].message))
    exec(line)
    series.save(1)
    assert resumed(0.01)[1].param_groups[0]["lr"] == 0.01 and not recwarn.list


WRONG: dict[str, tuple[Callable[[Job], object], str]] = {
    "frozen": (lambda job: job.model[0].weight.requires_grad_(False), "0.weight.requires_grad: True -> False"),
    "another scheduler": (
        lambda job: setattr(job.schedulers[0], "optimizer", torch.optim.SGD([nn.Parameter(torch.ones(1))])),
        "scheduler.0: the scheduler steps another optimizer",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_what_is_not_as_it_was_saved_is_a_warning_or_an_error(fault, tmp_path, capsys):
    spoil, message = WRONG[fault]
    job = Job(tmp_path)
    job.train(2)
    job.series.save(1)
    again = Job(tmp_path)
    spoil(again)
    with pytest.warns(UserWarning, match=f"not as it was saved: .*{message}"):
        assert again.series.resume() == 2
    assert not capsys.readouterr().out
    with pytest.raises(muonckpt.AttestError, match=message):
        again.series.resume(strict=True)


def test_an_optimizer_of_another_model_is_reported_before_it_trains(tmp_path):
    job = Job(tmp_path)
    other = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    series = muonckpt.Series(tmp_path, other, job.optimizers)
    for call in (series.resume, lambda: series.save(1)):
        with pytest.raises(muonckpt.ArgumentError, match=r"optimizer 0 steps 2 of 2 parameters .*Make the optimizer"):
            call()


def test_arguments_that_are_something_else_are_refused_with_the_line_to_write(tmp_path):
    job = Job(tmp_path)
    call = r"Write Series\(folder, model, optimizer, "
    for arguments, options in (
        ((job.optimizers, job.model), {}),
        ((job.model, job.model), {}),
        ((job.model,), {}),
        ((job.model, job.optimizers), {"scheduler": 3}),
        ((job.model, job.optimizers), {"extra": {"epoch": 3}}),
    ):
        with pytest.raises(muonckpt.ArgumentError, match=call):
            muonckpt.Series(tmp_path, *arguments, **options)
    with pytest.raises(muonckpt.ArgumentError, match="'model' is that of another object"):
        muonckpt.Series(tmp_path, job.model, job.optimizers, extra={"model": job.loader})
    with pytest.raises(muonckpt.ArgumentError, match=r"Write run.save\(step\)"):
        job.series.save(1, {"model": job.model.state_dict()})
    plain = muonckpt.Series(tmp_path)
    with pytest.raises(muonckpt.ArgumentError, match=r"Write Series\(folder, model, optimizer\).save\(step\)"):
        plain.save(1)
    with pytest.raises(muonckpt.ArgumentError, match=r"Write Series\(folder, model, optimizer\)"):
        plain.resume()


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_loader_without_state_is_refused_with_the_one_that_keeps_its_place(tmp_path):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    job = Job(tmp_path)
    with pytest.raises(muonckpt.ArgumentError, match=r"loader: expected state_dict .*, found DataLoader") as told:
        muonckpt.Series(tmp_path, job.model, job.optimizers, extra={"loader": DataLoader(range(8))})
    [line] = re.findall(r"Write (extra=.*), from torchdata.stateful_dataloader, which", str(told.value))
    names = {"StatefulDataLoader": stateful, "job": job, "Series": muonckpt.Series}
    place, batches = 0, []
    for _ in range(2):
        code = line.replace("...", "range(8), batch_size=2")
        extra = eval(f"dict({code})", names)["extra"]
        series = muonckpt.Series(tmp_path, job.model, job.optimizers, scheduler=job.schedulers, extra=extra)
        place = series.resume()
        loader = iter(extra["loader"])
        batches += [next(loader).tolist(), next(loader).tolist()]
        series.save(place)
    assert batches == [[0, 1], [2, 3], [4, 5], [6, 7]]


SCRIPT = """
import os, sys, torch, muonckpt
from torch import nn
from muonckpt.optimizer import Muon

os.chdir(sys.argv[1])
torch.manual_seed(0)
model = nn.Linear(64, 64, bias=False)
optimizer = Muon(model.named_parameters(), lr=0.02)
run = muonckpt.Series("run", model, optimizer)
for step in range(run.resume(), 6):
    optimizer.zero_grad()
    model(torch.ones(8, 64) * step).square().mean().backward()
    optimizer.step()
    run.save(step)
    if step == 3 and not os.path.exists("killed"):
        open("killed", "w").close()
        os.kill(os.getpid(), 9)
print(model.weight.double().sum().item())
"""


def test_a_script_that_is_killed_goes_on_exactly(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)

    def call(folder: Path) -> tuple[int | None, list[str]]:
        folder.mkdir(exist_ok=True)
        with Scripts(folder, [{}], tmp_path / "script.py", folder) as started:
            [(code, out, _)] = started.ended([0])
        return code, out.splitlines()

    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "killed").touch()
    _, [_, expected] = call(tmp_path / "whole")
    assert call(tmp_path / "cut")[0] == -9
    _, (line, found) = call(tmp_path / "cut")
    assert line.startswith("resumed from step 3, ") and "proved" in line and found == expected
