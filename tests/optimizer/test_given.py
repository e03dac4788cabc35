"""A resume says once which hyper-parameters of the code the saved state overrides, whatever schedules have done."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.least_squares import Line, contents, groups, same
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

import muonckpt
from muonckpt.optimizer import Muon

SCHEDULES = {
    "none": lambda opt: None,
    "ExponentialLR": lambda opt: schedulers.ExponentialLR(opt, 0.5),
    "warm-up": lambda opt: schedulers.LambdaLR(opt, lambda step: (1 + step) / 8),
    "OneCycleLR": lambda opt: schedulers.OneCycleLR(opt, max_lr=0.02, total_steps=10, cycle_momentum=False),
    "CyclicLR": lambda opt: schedulers.CyclicLR(opt, base_lr=0.001, max_lr=0.02, step_size_up=3, cycle_momentum=False),
    "ReduceLROnPlateau": lambda opt: schedulers.ReduceLROnPlateau(opt, patience=0, mode="max"),
    "SWALR": lambda opt: SWALR(opt, swa_lr=0.005, anneal_epochs=4),
}
"""Each changes rates, and what groups say of them, in another way."""


class Run:
    """A model, its optimizer and a schedule; momentum and decay are changed by hand, as many scripts do."""

    def __init__(self, schedule: str, lr: float = 0.01, **options: Any) -> None:
        self.net = Line()
        self.opt = Muon(groups(self.net.parameters(), "muon"), lr=lr, **options)
        self.schedule = SCHEDULES[schedule](self.opt)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.opt.param_groups[0]["momentum"] = 0.8 + step / 100
            loss = self.opt.step(self.net.closure(self.opt))
            if self.schedule is not None:
                self.schedule.step(*([loss.item()] if isinstance(self.schedule, schedulers.ReduceLROnPlateau) else []))

    def saved(self) -> dict[str, Any]:
        state = {"net": self.net.state_dict(), "opt": self.opt.state_dict()}
        return copy.deepcopy(state | {"schedule": self.schedule.state_dict() if self.schedule else None})

    def load(self, state: dict[str, Any], schedule: str | None = None) -> str:
        """Load, make the ``schedule`` after that if one is named, and return what warnings say."""
        self.net.load_state_dict(state["net"])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.opt.load_state_dict(copy.deepcopy(state["opt"]))
        if schedule is not None:
            epoch = state["schedule"]["last_epoch"] if state["schedule"] else -1
            later = {"OneCycleLR": {"max_lr": 0.02, "total_steps": 10, "cycle_momentum": False}}.get(schedule)
            made = (
                SCHEDULES[schedule]
                if later is None
                else lambda opt: schedulers.OneCycleLR(opt, last_epoch=epoch, **later)
            )
            before = [dict(group) for group in self.opt.param_groups]
            self.schedule = made(self.opt)
            for group, options in zip(self.opt.param_groups, before, strict=True):
                group.update(options)
        if self.schedule is not None:
            self.schedule.load_state_dict(copy.deepcopy(state["schedule"]))
        return "\n".join(str(warning.message) for warning in caught)


@pytest.mark.parametrize("order", ["schedule before loading", "schedule after loading"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_raise_no_alarm_and_a_resumed_run_goes_on_as_the_uninterrupted_one(name, order):
    whole, first = Run(name), Run(name)
    whole.train(0, 8)
    first.train(0, 4)
    late = order == "schedule after loading"
    resumed = Run("none" if late else name)
    assert resumed.load(first.saved(), name if late else None) == ""
    assert [*map(_rates, resumed.opt.param_groups)] == [*map(_rates, first.opt.param_groups)]
    resumed.train(4, 6)
    again = Run(name)
    assert again.load(resumed.saved()) == "", "nor when that run is resumed"
    again.train(6, 8)
    assert same(contents(again.net, again.opt), contents(whole.net, whole.opt))


def _rates(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "momentum")}


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_the_code_gives_otherwise_is_told_once_with_both_values_and_again_by_the_next_resume(name):
    first = Run(name)
    first.train(0, 3)
    state = first.saved()
    for _ in range(2):
        resumed = Run(name, lr=0.03, weight_decay=0.25)
        told = resumed.load(state)
        changed = "lr=0.01, not 0.03, weight_decay=0.1, not 0.25"
        assert f"group 0 (muon): {changed}; group 1 (adamw): {changed}. To train" in told
        assert "initial_lr" not in told.partition(". To train")[0] and "momentum" not in told
        assert resumed.load(state) == "", "once"
        resumed.train(3, 4)
        assert resumed.opt.param_groups[0]["weight_decay"] == 0.1
        state = resumed.saved()


def test_what_only_a_schedule_has_is_told(tmp_path):
    first, other = Run("OneCycleLR"), Run("none")
    state = first.saved()
    schedulers.OneCycleLR(other.opt, max_lr=0.05, total_steps=10, cycle_momentum=False)
    told = other.load(state)
    assert "initial_lr=0.0008, not 0.002, max_lr=0.02, not 0.05, min_lr=" in told
    assert other.opt.param_groups[0]["max_lr"] == 0.02


def test_each_option_that_the_saved_run_gives_is_told():
    changes = {"lr": 0.02, "weight_decay": 0.2, "momentum": 0.7, "eps": 1e-6}
    for option, value in changes.items():
        assert f"(muon): {option}=" in Run("none", **{option: value}).load(Run("none").saved()), option


@pytest.mark.parametrize("tensor", [False, True])
def test_a_rate_in_a_tensor_is_the_same_rate(tensor):
    first = Run("ExponentialLR", lr=torch.tensor(0.1) if tensor else 0.1)
    first.train(0, 2)
    assert Run("ExponentialLR", lr=0.1 if tensor else torch.tensor(0.1)).load(first.saved()) == ""
    assert "lr=0.1" in Run("none", lr=0.2).load(first.saved())


@pytest.mark.parametrize("name", ["none", "ExponentialLR", "ReduceLROnPlateau"])
def test_it_is_told_through_checkpoints_as_well(name, tmp_path: Path):
    first = Run(name)
    first.train(0, 3)
    muonckpt.save({"optimizer": get_optimizer_state_dict(first.net, first.opt)}, tmp_path / "c")
    for lr in (0.01, 0.03):
        other = Run(name, lr=lr)
        state = {"optimizer": get_optimizer_state_dict(other.net, other.opt)}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            muonckpt.load(state, tmp_path / "c")
            set_optimizer_state_dict(other.net, other.opt, state["optimizer"])
        assert ["lr=0.01, not 0.03" in str(warning.message) for warning in caught] == [True] * (lr != 0.01)
        assert same(contents(first.net, first.opt)[1:2], contents(other.net, other.opt)[1:2])


def test_copies_remember(tmp_path: Path):
    first = Run("ReduceLROnPlateau")
    first.train(0, 3)
    for twin in (copy.deepcopy(first.opt), _pickled(first.opt, tmp_path / "optimizer.pt")):
        assert twin.state_dict()["param_groups"] == first.opt.state_dict()["param_groups"]
        assert twin.state_dict()["param_groups"][0]["given_lr"] == 0.01


def _pickled(opt: Muon, path: Path) -> Muon:
    torch.save(opt, path)
    return torch.load(path, weights_only=False)


def test_a_rate_set_by_hand_goes_through_a_checkpoint_either_way(tmp_path):
    """Parameters with numbers count, too: either side may have been given another rate than it has now."""

    def made(rate: float) -> Muon:
        weight = torch.nn.Parameter(torch.ones(4, 6))
        weight.grad = torch.randn(4, 6)
        optimizer = Muon([weight], lr=0.02)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        return optimizer

    for number, (saved, resumed) in enumerate(((0.01, 0.02), (0.02, 0.01), (0.01, 0.005))):
        muonckpt.save({"optimizer": made(saved)}, tmp_path / str(number))
        optimizer = made(resumed)
        muonckpt.load({"optimizer": optimizer}, tmp_path / str(number))
        assert optimizer.param_groups[0]["lr"] == saved
        state = made(resumed).state_dict()
        muonckpt.load({"optimizer": state}, tmp_path / str(number))
        assert state["param_groups"][0]["lr"] == saved
