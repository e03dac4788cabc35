"""A trail: what ranks note adds up on any topology, and the first steps after a restore tell if it is the same run."""

from __future__ import annotations

import math
import re
import shutil
import uuid
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem
from support import sweep
from support.commands import called
from support.workers import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import muonckpt
from muonckpt.optimizer import LayerWise, Muon
from muonckpt.store.io.location import location
from muonckpt.store.trail import LINES, attempts_of, trail_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

BATCH, SAVED, LAST = 24, 4, 8
SHAPES = {"up": (36, 10), "down": (7, 36), "shift": (36,)}
FAULTS = {
    "model": "weights differ by .* of their norm: it is another model",
    "data": "at step 5 the gradient differs by .* of its norm .*: other data",
    "convention": r"momentum differs by .*: it began 20 times as large, as by another convention: 1 / \(1 - mu\) = 20",
    "warm-up": "learning rate is 0.004 (where it was 0.02|behind 0.016): was the schedule restored",
    "zero": "momentum differs by .*: it began at zero",
}


class Run:
    """Two matrices and a vector, replicated, in rows or by `LayerWise`, and data of which each rank has a share."""

    def __init__(self, rank: int, world: int, lies: str, seed: int = 0) -> None:
        self.rank, self.world, self.lies = rank, world, lies
        draw = torch.Generator().manual_seed(seed)
        drawn = {name: torch.randn(shape, generator=draw) / 6 for name, shape in SHAPES.items()}
        if lies == "layer-wise":
            self.weights = nn.ParameterDict([*drawn.items()])
        else:
            mesh, placement = init_device_mesh("cpu", (world,)), Shard(0) if lies == "rows" else Replicate()
            self.weights = {
                name: nn.Parameter(distribute_tensor(weight, mesh, [placement], src_data_rank=None))
                for name, weight in drawn.items()
            }
        named = list(self.weights.items())
        groups = [{"params": named[:2]}, {"params": named[2:], "algorithm": "adamw", "lr": 1e-3}]
        self.optimizer = LayerWise(self.weights, groups) if lies == "layer-wise" else Muon(groups)
        for group in self.optimizer.param_groups:
            group["initial_lr"] = group["lr"]  # as a scheduler does

    def state(self) -> dict[str, Any]:
        return {"model": dict(self.weights), "optimizer": self.optimizer}

    @torch.no_grad()
    def spoil(self, fault: str) -> None:
        """Do what a wrong resume leaves behind in weights or momentum."""
        other = Run(self.rank, self.world, self.lies, seed=1)
        for name, weight in self.weights.items():
            if fault == "model":
                weight.copy_(other.weights[name])
            if "momentum_buffer" in self.optimizer.state[weight]:
                self.optimizer.state[weight]["momentum_buffer"].mul_({"zero": 0, "convention": 20}.get(fault, 1))

    def step(self, step: int, seed: int = 0, warm: int = 0) -> float:
        """Take a step with the step's data, whose gradient is the mean over ranks; return this rank's loss."""
        draw = torch.Generator().manual_seed(1000 * seed + step)
        x, y = torch.randn(BATCH, 10, generator=draw), torch.randn(BATCH, 7, generator=draw)
        own = slice(BATCH // self.world * self.rank, BATCH // self.world * (self.rank + 1))
        whole = dict(self.weights)
        if self.lies != "layer-wise":
            whole = {name: weight.detach().full_tensor().requires_grad_() for name, weight in whole.items()}
        hidden = (x[own] @ whole["up"].T + whole["shift"]).relu()
        loss = (hidden @ whole["down"].T - y[own]).square().mean()
        loss.backward()
        for name, weight in self.weights.items() if self.lies != "layer-wise" else ():
            gradient = whole[name].grad
            dist.all_reduce(gradient)
            weight.grad = distribute_tensor(
                gradient / self.world, weight.device_mesh, weight.placements, src_data_rank=None
            )
        self.optimizer.param_groups[0]["lr"] = 0.02 * min(1.0, (step - warm) / 5)
        self.optimizer.step()
        return loss.item()


def trained(rank: int, world: int, folder: str, fault: str, lies: str, begin: bool) -> str:
    """Train, or resume with a fault; return what the series says of that, and check that it warns of the same."""
    run = Run(rank, world, lies)
    with warnings.catch_warnings(record=True) as caught, muonckpt.Series(folder) as series:
        warnings.simplefilter("always")
        first = 1
        if not begin:
            first = series.restore(run.state(), required=True).step + 1
            run.spoil(fault)
        for step in range(first, LAST + 1):
            loss = run.step(step, seed=fault == "data", warm=4 * (fault == "warm-up"))
            series.note(step, run.optimizer, loss=loss)
            dist.barrier()  # so that the first rank finds all lines of the step before
            if step == SAVED and begin:
                series.save(step, run.state())
    told = "" if series.continuation is None else str(series.continuation)
    warned = [str(one.message) for one in caught if issubclass(one.category, RuntimeWarning)]
    assert warned == ([told] if series.continuation and not series.continuation.same else [])
    return told


@pytest.fixture(scope="module")
def began(tmp_path_factory) -> Path:
    """A run of two ranks that saved a step and went on."""
    folder = tmp_path_factory.mktemp("trail") / "run"
    assert run(2, trained, str(folder), "", "rows", True) == ["", ""]
    return folder


def resumed(began: Path, tmp_path: Path, world: int, fault: str, cut: int | None, lies: str = "rows") -> str:
    """Resume a copy of the run, whose trail may be cut amid the line of a step; return what the first rank says."""
    shutil.copytree(began, tmp_path / "run")
    for file in (tmp_path / "run" / "trail").iterdir() if cut else ():
        file.write_bytes(file.read_bytes().partition(b'"step": %d' % cut)[0] + b'"step": %d, "wor' % cut)
    return run(world, trained, str(tmp_path / "run"), fault, lies, False)[0]


WRONG = [
    *((fault, None, "rows") for fault in FAULTS),
    ("zero", 6, "rows"),
    *((fault, 5, "rows") for fault in ("model", "zero", "convention", "warm-up")),
    *((fault, None, "layer-wise") for fault in ("data", "convention")),
]


@pytest.mark.parametrize(
    ("fault", "cut", "lies"),
    sweep(WRONG, *WRONG[: len(FAULTS) + 1], WRONG[-1]),
)
def test_a_wrong_resume_is_told_within_three_steps(began, tmp_path, fault, cut, lies):
    """Also where the run before was killed in the middle of a line: amid the second step, or the first."""
    told = resumed(began, tmp_path, 2, fault, cut, lies)
    assert re.search(FAULTS[fault], told), told


@pytest.mark.parametrize(
    ("world", "lies", "cut", "expected"),
    [
        (2, "rows", None, "the first 3 steps after step 4: as in the run before, bit for bit"),
        (3, "rows", None, "the first 3 steps after step 4: as in the run before, "),
        (1, "replicas", 6, "the first 1 step after step 4: as in the run before, "),
        (3, "replicas", 5, "step 5 can follow step 4, with which the run before ended"),
        (2, "layer-wise", None, "the first 3 steps after step 4: as in the run before, "),
        (2, "layer-wise", 5, "step 5 can follow step 4, with which the run before ended"),
    ],
)
def test_a_true_resume_is_the_same_run_on_any_topology(began, tmp_path, world, lies, cut, expected):
    assert resumed(began, tmp_path, world, "", cut, lies).startswith(expected)


def test_shares_of_ranks_add_up(began):
    """What two ranks have noted of their rows, or of the matrices that they own, beside one that has everything."""
    run(2, trained, str(began.parent / "owned"), "", "layer-wise", True)
    run(1, trained, str(began.parent / "alone"), "", "replicas", True)
    noted = trail_of(began)
    assert [*noted] == [*range(1, LAST + 1)]
    for step, alone in trail_of(began.parent / "alone").items():
        for one in (noted[step], trail_of(began.parent / "owned")[step]):
            assert one.loss == pytest.approx(alone.loss, rel=1e-4)
            assert one.norms == pytest.approx(alone.norms, rel=1e-4)
            assert all(one.apart(what, alone) < 1e-3 for what in alone.norms)
    template = {"model": {name: torch.zeros(shape) for name, shape in SHAPES.items()}}
    muonckpt.load(template, began / f"step-{SAVED:08d}", allow_extra=["optimizer.*"])
    weights = torch.cat([weight.reshape(-1) for weight in template["model"].values()])
    assert noted[SAVED].norms["weights"] == pytest.approx(weights.norm().item(), rel=1e-5)


def test_two_trails_side_by_side(began, tmp_path):
    """They part where another run went on from a step; a trail is the same as itself."""
    resumed(began, tmp_path, 2, "data", None)
    same, other = called("diff", str(began), str(began)), called("diff", str(began), str(tmp_path / "run"))
    assert (same.returncode, other.returncode) == (0, 1)
    assert f"{LAST} steps in both trails, 0 with other weights: none" in same.stdout
    assert f"{LAST} steps in both trails, 4 with other weights: first at step 5" in other.stdout
    [row] = [line for line in other.stdout.splitlines() if line.strip().startswith("5 ")]
    assert f"{trail_of(began)[5].norms['gradient']:.4g}" in row


def test_lines_that_cannot_be_read_are_told(began, tmp_path):
    """A line that is cut, one with a flipped bit, one of other numbers, and a rank's file that is gone."""
    shutil.copytree(began, tmp_path / "run")
    first, second = sorted((tmp_path / "run" / "trail").iterdir())
    lines = first.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b'"squares": [', b'"squares": {')
    lines[5] = b'{"step": 6, "world": 2, "squares": []}\n'
    first.write_bytes(b"".join(lines)[:-20])
    [attempt] = attempts_of(tmp_path / "run")
    assert [*attempt.steps] == [1, 3, 4, 5, 7] and attempt.steps == {
        step: noted for step, noted in trail_of(began).items() if step in attempt.steps
    }
    assert attempt.faults == (
        f"attempt 1: line 2 of {LAST} in {first.name} is damaged …, 3 in all",
        "attempt 1: 3 steps (2 to 8) not noted by all ranks, and left out",
    )
    assert f"note: {tmp_path / 'run'}: {attempt.faults[0]}" in called("diff", str(began), str(tmp_path / "run")).stderr
    second.unlink()
    [attempt] = attempts_of(tmp_path / "run")
    assert not attempt.steps and "attempt 1: nothing is here of 1 of 2 ranks: 1" in attempt.faults


def stages(rank: int, world: int, folder: str) -> float:
    """Train a stage of one's own; that of rank 1 grows in step 2.  Return the norm of its weights at the end."""
    layers = nn.ModuleDict({f"{rank}-{number}": nn.Linear(8, 4, bias=False) for number in range(2)})
    named = [(name, layer.weight) for name, layer in layers.items()]
    optimizers = [Muon(named[:1], lr=0.02)]
    with muonckpt.Series(folder) as series:
        for step in range(1, 6):
            for _, weight in named:
                weight.grad = torch.ones_like(weight)
            if step == 2 and rank == 1:
                optimizers.append(Muon(named[1:], lr=0.02))
            for optimizer in optimizers:
                optimizer.step()
            series.note(step, *optimizers)
            if step == 4:
                series.save(step, {"layers": dict(named)})
    noted = [param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]]
    return sum(param.square().sum().item() for param in noted) ** 0.5


def test_ranks_whose_parameters_have_grown_do_not_wait_for_the_others(tmp_path):
    """A stage of a pipeline was unfrozen: its ranks alone know; all note it from the next save on."""
    norms = run(2, stages, str(tmp_path))
    before, after = attempts_of(tmp_path)
    assert ([*before.steps], [*after.steps]) == ([1, 2, 3, 4], [5])
    assert after.steps[5].norms["weights"] == pytest.approx(math.hypot(*norms), rel=1e-6)


def test_parameters_whose_names_repeat_are_all_noted(tmp_path):
    layers = [nn.Linear(8, 4, bias=False), nn.Linear(8, 40, bias=False)]
    optimizer = Muon([pair for layer in layers for pair in layer.named_parameters()], lr=0.02)
    with muonckpt.Series(tmp_path) as series:
        series.note(1, optimizer)
    (noted,) = attempts_of(tmp_path)
    squares = sum(layer.weight.square().sum().item() for layer in layers)
    assert noted.steps[1].norms["weights"] == pytest.approx(squares**0.5, rel=1e-6)


@pytest.mark.parametrize("went_on", [True, False])
def test_a_run_that_trains_other_parameters_is_not_taken_for_another_model(went_on, tmp_path):
    """As after unfreezing: sums over other parameters say nothing of how far two runs are apart."""
    layers = nn.ModuleDict({"old": nn.Linear(8, 4, bias=False), "new": nn.Linear(8, 40, bias=False)})

    def steps(series: muonckpt.Series, names: list[str], first: int, last: int) -> None:
        optimizer = Muon([(name, layers[name].weight) for name in names], lr=0.02)
        for step in range(first, last + 1):
            for layer in layers.values():
                layer.weight.grad = torch.ones_like(layer.weight)
            optimizer.step()
            series.note(step, optimizer)
            if step == 2:
                series.save(step, {"layers": layers})

    with muonckpt.Series(tmp_path) as series:
        steps(series, ["old"], 1, 5 if went_on else 2)
    with muonckpt.Series(tmp_path) as series:
        series.restore({"layers": layers})
        with pytest.warns(RuntimeWarning, match="step 3 is not compared with the run before, restored at step 2"):
            steps(series, ["old", "new"], 3, 5)
        assert "other parameters" in str(series.continuation)


def test_a_trail_in_a_store_is_made_of_objects(monkeypatch):
    """They do not grow: lines go there with a save, 64 together and at the end; who is killed loses the last."""
    url = f"memory://{uuid.uuid4().hex}"
    layer = nn.Linear(8, 4, bias=False)
    optimizer = Muon(layer.named_parameters(), lr=0.02)
    state = {"layer": layer, "optimizer": optimizer}

    def steps(series: muonckpt.Series, first: int, last: int) -> None:
        for step in range(first, last + 1):
            layer.weight.grad = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            optimizer.step()
            series.note(step, optimizer)

    def objects() -> int:
        return len([*(location(url) / "trail").iterdir()])

    killed = muonckpt.Series(url)
    steps(killed, 1, 5)
    assert trail_of(url) == {}
    killed.save(5, state)
    steps(killed, 6, 5 + LINES + 2)
    before = trail_of(url)
    assert [*before] == [*range(1, 5 + LINES + 1)] and objects() == 2
    with muonckpt.Series(url) as series:
        assert series.restore(state).step == 5
        steps(series, 6, 8)
        assert str(series.continuation) == "the first 3 steps after step 5: as in the run before, bit for bit"
        steps(series, 9, 12)
    assert trail_of(url) == before and [[*attempt.steps] for attempt in attempts_of(url)] == [
        [*before],
        [*range(6, 13)],
    ]

    def full(*_: Any, **__: Any) -> None:
        raise OSError("the store is full")

    with muonckpt.Series(url) as series:
        steps(series, 13, 14)
        monkeypatch.setattr(MemoryFileSystem, "pipe_file", full)
        with pytest.warns(RuntimeWarning, match="cannot write the trail; training goes on without: .*full"):
            steps(series, 15, 13 + LINES)
