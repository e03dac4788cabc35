"""Schedulers keep rates by number of the group, which a resume compares with the groups of this optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiplicativeLR,
    OneCycleLR,
    SequentialLR,
)

import muonckpt

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class TwoGroups:
    """Two matrices in groups with rates of their own; `resumed` has the same groups in another order."""

    def __init__(self, schedule: Callable[[torch.optim.Optimizer], Any], reverse: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        rates = {"0": (0.1, 0.2), "1": (0.001, 0.5)}
        groups = [{"params": [self.model[int(name)].weight], "lr": lr} for name, (lr, _) in rates.items()]
        self.optimizer = torch.optim.SGD(groups[::-1] if reverse else groups, momentum=0.9)
        self.scheduler = schedule(self.optimizer)

    def step(self) -> None:
        self.model(torch.ones(2, 8)).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()

    def state(self) -> dict[str, Any]:
        weights, state = get_state_dict(self.model, self.optimizer, options=FLAT)
        return {"model": weights, "optimizer": state, "rates": self.scheduler}

    def set(self, state: dict[str, Any]) -> None:
        weights, optim = state["model"], state["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=weights, optim_state_dict=optim, options=FLAT)


BY_GROUP: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 0.9**step),
    "once": lambda optimizer: OneCycleLR(optimizer, [0.1, 0.001], total_steps=30, cycle_momentum=False),
    "cyclic": lambda optimizer: CyclicLR(optimizer, [0.01, 0.001], [0.1, 0.2], cycle_momentum=False),
    "chained": lambda optimizer: ChainedScheduler([LinearLR(optimizer), ExponentialLR(optimizer, 0.9)]),
    "in turn": lambda optimizer: SequentialLR(optimizer, [LinearLR(optimizer), ExponentialLR(optimizer, 0.9)], [2]),
}


@pytest.mark.parametrize("schedule", BY_GROUP)
def test_rates_by_number_are_compared_with_the_groups_of_this_optimizer(schedule, tmp_path):
    """Rates of the flat form come back by name, those of a scheduler by number."""
    first = TwoGroups(BY_GROUP[schedule])
    for _ in range(3):
        first.step()
    muonckpt.Series(tmp_path).save(3, first.state())
    for reverse in (False, True):
        again = TwoGroups(BY_GROUP[schedule], reverse)
        state = again.state()
        restored = muonckpt.Series(tmp_path).restore(state, required=True)
        again.set(state)
        proof = restored.check(again.model, again.optimizer, scheduler=again.scheduler)
        assert proof.equal is not reverse, str(proof)
        assert not reverse or any("_last_lr: " in line or "base_lrs: " in line for line in proof.lines)
    other = TwoGroups(BY_GROUP[schedule])
    proof = restored.check(again.model, again.optimizer, scheduler=other.scheduler)
    assert any("steps another optimizer" in line for line in proof.lines)


def test_lists_of_a_scheduler_that_nothing_proves_are_named(tmp_path):
    """Both groups begin a cycle at one rate, so that only the list itself says which of them rises to which."""
    make = lambda optimizer: CyclicLR(optimizer, 0.001, [0.1, 0.2], cycle_momentum=False)  # noqa: E731
    muonckpt.Series(tmp_path).save(0, TwoGroups(make).state())
    again = TwoGroups(make, reverse=True)
    state = again.state()
    restored = muonckpt.Series(tmp_path).restore(state, required=True)
    again.set(state)
    proof = restored.check(again.model, again.optimizer, scheduler=again.scheduler)
    assert tuple(p for p in proof.unchecked if "which group" in p) == (
        "which group each value of rates.max_lrs is for",
    ), str(proof)


class SavesNoRates(LambdaLR):
    """Saves where it is, as torchtitan's does, and takes the rates from the code."""

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["last_epoch"]
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


@pytest.mark.filterwarnings("ignore:the run goes on with the values of its checkpoint")
def test_base_rates_that_a_scheduler_does_not_save_are_told_from_those_of_the_saved_run(tmp_path):
    def begun(rate: float) -> tuple[TwoGroups, muonckpt.Series]:
        one = TwoGroups(lambda optimizer: SavesNoRates(optimizer, lambda step: 0.9**step))
        for group in one.optimizer.param_groups:
            group["initial_lr"] *= rate
        one.scheduler.base_lrs = [group["initial_lr"] for group in one.optimizer.param_groups]
        return one, muonckpt.Series(tmp_path, one.model, one.optimizer, scheduler=one.scheduler)

    one, run = begun(1.0)
    one.step()
    run.save(0)
    _, run = begun(1.0)
    assert run.resume(strict=True) == 1
    _, run = begun(0.5)
    with pytest.raises(
        muonckpt.AttestError, match=r"base_lrs: \[0.05, 0.0005\], but .* have initial_lr \[0.1, 0.001\]"
    ):
        run.resume(strict=True)


def half(step: int, base: float) -> float:
    return base**step


@pytest.mark.parametrize("argument", ["scheduler", "extra"])
@pytest.mark.parametrize("in_turn", [False, True])
def test_a_function_that_gives_another_rate_is_reported(in_turn, argument, tmp_path):
    """No checkpoint has the functions of a schedule."""

    def begun(base: float) -> tuple[TwoGroups, muonckpt.Series]:
        def schedule(optimizer: torch.optim.Optimizer) -> Any:
            scheduler = LambdaLR(optimizer, [lambda step: base**step, partial(half, base=base)])
            return SequentialLR(optimizer, [scheduler, ExponentialLR(optimizer, 0.9)], [5]) if in_turn else scheduler

        one = TwoGroups(schedule)
        given = {"scheduler": one.scheduler} if argument == "scheduler" else {"extra": {"rates": one.scheduler}}
        return one, muonckpt.Series(tmp_path, one.model, one.optimizer, **given)

    one, run = begun(0.5)
    for _ in range(3):
        one.step()
    run.save(2)
    _, run = begun(0.5)
    assert run.resume(strict=True) == 3
    _, run = begun(0.25)
    with pytest.raises(
        muonckpt.AttestError, match=r"lr_lambdas: the code's functions give \[0.0015625, 1.5625e-05\] at"
    ):
        run.resume(strict=True)


def test_functions_that_no_rate_shows_are_named(tmp_path, capsys):
    one = TwoGroups(lambda optimizer: MultiplicativeLR(optimizer, lambda _: 0.9))
    run = muonckpt.Series(tmp_path, one.model, one.optimizer, scheduler=one.scheduler)
    run.save(0)
    run.resume()
    assert capsys.readouterr().out.endswith("; not checked: the functions of scheduler\n")


def test_what_the_code_gives_and_the_checkpoint_replaces_is_warned_of(tmp_path):
    def begun(folder: str, steps: int, dampening: float) -> tuple[TwoGroups, muonckpt.Series]:
        def schedule(optimizer: torch.optim.Optimizer) -> Any:
            parts = [LinearLR(optimizer), CosineAnnealingLR(optimizer, steps)]
            return SequentialLR(optimizer, parts, [steps])

        one = TwoGroups(schedule)
        one.optimizer.param_groups[0]["dampening"] = dampening
        return one, muonckpt.Series(tmp_path / folder, one.model, one.optimizer, scheduler=one.scheduler)

    one, run = begun("run", 4, 0.0)
    for _ in range(3):
        one.step()
    saved = run.save(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert begun("run", 4, 0.0)[1].resume() == 3
    one, run = begun("run", 8, 0.5)
    with pytest.warns(UserWarning) as caught:
        run.resume()
    [message] = [str(warning.message) for warning in caught]
    assert "now: param_groups[0]['dampening']=0.0, not 0.5, scheduler._milestones=[4], not [8], scheduler." in message
    assert "_schedulers.1.T_max=4, not 8. To train" in message
    # The way out: the schedule of the code, as far as the other run had come.
    one, run = begun("next", 8, 0.5)
    run.resume(begin_from=saved.path)
    other, _ = begun("other", 8, 0.5)
    for _ in range(3):
        other.step()
    assert message.endswith(f"run.resume(begin_from={saved.path!r})")
    assert one.scheduler.get_last_lr() == other.scheduler.get_last_lr()
    assert one.optimizer.param_groups[0]["dampening"] == 0.5
