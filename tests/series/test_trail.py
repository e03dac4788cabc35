"""A trail: what ranks note adds up on any topology, and the first steps after a restore tell if it is the same run."""

from __future__ import annotations

import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.commands import called
from support.workers import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import muonckpt
from muonckpt.optimizer import Muon
from muonckpt.store.trail import trail_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

BATCH, SAVED, LAST = 24, 4, 8
SHAPES = {"up": (36, 10), "down": (7, 36), "shift": (36,)}
FAULTS = {
    "model": "weights differ by .* of their norm: it is another model",
    "data": "at step 5 the gradient differs by .* of its norm .*: other data",
    "convention": r"momentum differs by .*: it began 20 times as large, as by another convention: 1 / \(1 - mu\) = 20",
    "warm-up": "at step 5 the learning rate is 0.004 where it was 0.02",
    "zero": "momentum differs by .*: it began at zero",
}


class Run:
    """Two matrices and a vector, replicated or in rows over all ranks, and data of which each rank has a share."""

    def __init__(self, rank: int, world: int, placement: Any, seed: int = 0) -> None:
        self.rank, self.world = rank, world
        draw = torch.Generator().manual_seed(seed)
        mesh = init_device_mesh("cpu", (world,))
        self.weights = {
            name: nn.Parameter(
                distribute_tensor(torch.randn(shape, generator=draw) / 6, mesh, [placement], src_data_rank=None)
            )
            for name, shape in SHAPES.items()
        }
        named = list(self.weights.items())
        self.optimizer = Muon([{"params": named[:2]}, {"params": named[2:], "algorithm": "adamw", "lr": 1e-3}])
        for group in self.optimizer.param_groups:
            group["initial_lr"] = group["lr"]  # as a scheduler does

    def state(self) -> dict[str, Any]:
        return {"model": dict(self.weights), "optimizer": self.optimizer}

    @torch.no_grad()
    def spoil(self, fault: str) -> None:
        """Do what a wrong resume leaves behind in weights or momentum."""
        other = Run(self.rank, self.world, Shard(0), seed=1)
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
        whole = {name: weight.detach().full_tensor().requires_grad_() for name, weight in self.weights.items()}
        hidden = (x[own] @ whole["up"].T + whole["shift"]).relu()
        loss = (hidden @ whole["down"].T - y[own]).square().mean()
        loss.backward()
        for name, weight in self.weights.items():
            gradient = whole[name].grad
            dist.all_reduce(gradient)
            weight.grad = distribute_tensor(
                gradient / self.world, weight.device_mesh, weight.placements, src_data_rank=None
            )
        self.optimizer.param_groups[0]["lr"] = 0.02 * min(1.0, (step - warm) / 5)
        self.optimizer.step()
        return loss.item()


def trained(rank: int, world: int, folder: str, fault: str, rows: bool, begin: bool) -> str:
    """Train, or resume with a fault; return what the series says of that, and check that it warns of the same."""
    run = Run(rank, world, Shard(0) if rows else Replicate())
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
    assert run(2, trained, str(folder), "", True, True) == ["", ""]
    return folder


def resumed(began: Path, tmp_path: Path, world: int, fault: str, cut: int | None, rows: bool = True) -> str:
    """Resume a copy of the run, whose trail may be cut amid the line of a step; return what the first rank says."""
    shutil.copytree(began, tmp_path / "run")
    for file in (tmp_path / "run" / "trail").iterdir() if cut else ():
        file.write_bytes(file.read_bytes().partition(b'"step": %d' % cut)[0] + b'"step": %d, "wor' % cut)
    return run(world, trained, str(tmp_path / "run"), fault, rows, False)[0]


@pytest.mark.parametrize(
    ("fault", "cut"), [*((fault, None) for fault in FAULTS), ("zero", 6), ("model", 5), ("zero", 5), ("convention", 5)]
)
def test_a_wrong_resume_is_told_within_three_steps(began, tmp_path, fault, cut):
    """Also where the run before was killed in the middle of a line: amid the second step, or the first."""
    told = resumed(began, tmp_path, 2, fault, cut)
    assert re.search(FAULTS[fault], told), told


@pytest.mark.parametrize(
    ("world", "rows", "cut", "expected"),
    [
        (2, True, None, "the first 3 steps after step 4: as in the run before, bit for bit"),
        (3, True, None, "the first 3 steps after step 4: as in the run before, "),
        (1, False, 6, "the first 1 step after step 4: as in the run before, "),
        (3, False, 5, "step 5 can follow step 4, with which the run before ended"),
    ],
)
def test_a_true_resume_is_the_same_run_on_any_topology(began, tmp_path, world, rows, cut, expected):
    assert resumed(began, tmp_path, world, "", cut, rows).startswith(expected)


def test_shares_of_ranks_add_up(began):
    """What two ranks have noted of their rows, beside one process that has everything."""
    noted = trail_of(began)
    assert [*noted] == [*range(1, LAST + 1)]
    run(1, trained, str(began.parent / "alone"), "", False, True)
    for step, alone in trail_of(began.parent / "alone").items():
        assert noted[step].loss == pytest.approx(alone.loss, rel=1e-4)
        assert noted[step].norms == pytest.approx(alone.norms, rel=1e-4)
        assert all(noted[step].apart(what, alone) < 1e-3 for what in alone.norms)
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
