"""A resume is proved: what will run is compared with what was saved, exactly, on any topology, and the run keeps it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import sweep
from support.commands import called
from support.workers import run
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

import muonckpt
from muonckpt.names.errors import called_like
from muonckpt.optimizer import LayerWise, Muon

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SAVED = 3

NOT_RECORDED = "requires_grad, which the checkpoint does not record"


def others_unchecked(proof: muonckpt.ResumeProof) -> tuple[str, ...]:
    """Return what a proof leaves out besides requires_grad, which saves of state dicts alone cannot record."""
    return tuple(part for part in proof.unchecked if part != NOT_RECORDED)


def module(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 7))


def muon(model: nn.Module) -> Muon:
    return Muon.for_model(model, lr=0.02, adamw_lr=3e-4)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    kinds = [
        [param for param in model.parameters() if (param.ndim > 1) == of_matrices] for of_matrices in (True, False)
    ]
    return torch.optim.AdamW([{"params": kinds[0], "name": "hidden"}, {"params": kinds[1], "lr": 1e-4}], lr=0.01)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {"muon": muon, "adamw": adamw}


class Training:
    """A model with its optimizer and scheduler; `state` gives all of it, `set` takes it."""

    def __init__(self, kind: str, form: str = "nested", seed: int = 0, shard: bool = False) -> None:
        self.model = module(seed)
        if shard:
            fully_shard(self.model)
        self.optimizer = OPTIMIZERS[kind](self.model)
        self.scheduler = LambdaLR(self.optimizer, lambda step: 0.9**step)
        self.options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
        self.numbered = form == "numbered"

    def train(self, steps: int) -> None:
        for step in range(steps):
            torch.manual_seed(step)
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 10)).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()

    def state(self) -> dict[str, Any]:
        if self.numbered:
            return {"net": self.model.state_dict(), "opt": self.optimizer, "rates": self.scheduler.state_dict()}
        weights, state = get_state_dict(self.model, self.optimizer, options=self.options)
        return {"net": weights, "opt": state, "rates": self.scheduler.state_dict()}

    def set(self, state: dict[str, Any]) -> None:
        if self.numbered:
            self.model.load_state_dict(state["net"])
        else:
            set_state_dict(
                self.model, self.optimizer, model_state_dict=state["net"], optim_state_dict=state["opt"],
                options=self.options,
            )  # fmt: skip
        self.scheduler.load_state_dict(state["rates"])

    def resume(self, folder: Path | str, forget: bool = False) -> muonckpt.Restored:
        state = self.state()
        restored = muonckpt.Series(folder).restore(state, required=True)
        if not forget:
            self.set(state)
        return restored

    def check(self, restored: muonckpt.Restored) -> muonckpt.ResumeProof:
        return restored.check(self.model, self.optimizer, scheduler=self.scheduler)


def saved(folder: Path, kind: str, form: str = "nested") -> Path:
    training = Training(kind, form)
    training.train(SAVED)
    muonckpt.Series(folder).save(SAVED, training.state())
    return folder


def slots(training: Training, *names: str) -> list[torch.Tensor]:
    return [state[name] for state in training.optimizer.state.values() for name in names if name in state]


def swapped(one: torch.Tensor, other: torch.Tensor) -> None:
    first = one.clone()
    one.copy_(other)
    other.copy_(first)


WRONG: dict[str, tuple[Callable[[Training], object], str]] = {
    "rate of one group": (lambda t: t.optimizer.param_groups[1].update(lr=0.5), "lr .* -> 0.5 in group 1"),
    "decay": (lambda t: t.optimizer.param_groups[0].update(weight_decay=0.3), "weight_decay .* -> 0.3 in group 0"),
    "an option that is gone": (
        lambda t: t.optimizer.param_groups[0].pop("weight_decay"),
        "weight_decay saved as .*, and not there now in group 0",
    ),
    "an option that was None": (
        lambda t: t.optimizer.param_groups[0].update(
            {next(k for k, v in t.optimizer.param_groups[0].items() if v is None): 2}
        ),
        "None -> 2 in group 0",
    ),
    "first moment": (
        lambda t: [each.mul_(20) for each in slots(t, "momentum_buffer", "exp_avg")],
        r"opt.state\..*: other elements",
    ),
    "second moment": (lambda t: [each.zero_() for each in slots(t, "exp_avg_sq")], "exp_avg_sq.*: other elements"),
    "one element of one momentum": (
        lambda t: slots(t, "momentum_buffer", "exp_avg")[0].view(-1)[7].add_(1e-7),
        "momentum_buffer|exp_avg: other elements",
    ),
    "step counts": (lambda t: [each.zero_() for each in slots(t, "step")], r"\.step.*: 3.0 -> 0.0"),
    "layers swapped": (lambda t: swapped(t.model[2].weight[:7], t.model[4].weight), r"net\.\*\.weight \(2\): other"),
    "another model": (lambda t: t.model.load_state_dict(module(1).state_dict()), r"net\..*: other elements"),
    "scheduler begun anew": (lambda t: setattr(t.scheduler, "last_epoch", 0), "rates.last_epoch: 3 -> 0"),
    "base rates": (lambda t: setattr(t.scheduler, "base_lrs", [1.0, 1.0]), r"rates.base_lrs: \[.*\] -> \[1.0, 1.0\]"),
    "dtype": (lambda t: t.model.to(torch.bfloat16), "bfloat16, saved as float32"),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@torch.no_grad()
def test_wrong_resumes_are_told_by_name_with_both_values(kind, tmp_path):
    with torch.enable_grad():
        saved(tmp_path, kind)
    for fault, (spoil, told) in WRONG.items():
        training = Training(kind, seed=5)
        restored = training.resume(tmp_path)
        spoil(training)
        proof = training.check(restored)
        assert not proof.equal, fault
        assert any(re.search(told, line) for line in proof.lines), (fault, proof.lines)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_that_was_restored_and_never_set_is_told(kind, tmp_path):
    """The commonest of all: load returns, and nobody calls set_state_dict."""
    for form in ("flat", "nested"):
        saved(tmp_path / form, kind, form)
        training = Training(kind, form, seed=5)
        proof = training.check(training.resume(tmp_path / form, forget=True))
        assert not proof.equal and any(line.startswith("lr ") for line in proof.lines), str(proof)


@pytest.mark.parametrize("form", ["nested", "flat", "numbered"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_true_resume_is_proved_in_each_form_of_state(kind, form, tmp_path):
    saved(tmp_path, kind, form)
    training = Training(kind, form, seed=5)
    if form == "numbered":
        training.train(1)  # torch's own optimizers have no state before, into which it could be loaded
    proof = training.check(training.resume(tmp_path))
    assert proof.equal and bool(others_unchecked(proof)) == (form == "numbered"), str(proof)
    assert all("matched by number" in part for part in others_unchecked(proof))
    assert proof.tensors == len(training.model.state_dict()) + sum(map(len, training.optimizer.state.values()))


def on_ranks(rank: int, world: int, folder: str, kind: str, fault: str) -> tuple[bool, tuple[str, ...]]:
    """Save on these ranks if nothing is there; else resume, perhaps with a fault on the last rank alone."""
    training = Training(kind, seed=5, shard=True)
    with muonckpt.Series(folder) as series:
        if series.latest() is None:
            training.train(SAVED)
            series.save(SAVED, training.state())
            return True, ()
    restored = training.resume(folder)
    with torch.no_grad():
        if fault == "momentum" and rank == world - 1:
            slots(training, "momentum_buffer", "exp_avg")[0].to_local().add_(1)
        if fault == "rate" and rank == world - 1:
            training.optimizer.param_groups[0]["lr"] = 1.0
    proof = training.check(restored)
    return proof.equal, proof.lines


@pytest.mark.parametrize("kind", sweep(OPTIMIZERS, "muon"))
def test_it_is_the_same_on_other_ranks(kind, tmp_path):
    """Saved by FSDP2 on 2 ranks, resumed on 3; a fault that one rank alone has is told on all."""
    assert all(equal for equal, _ in run(2, on_ranks, str(tmp_path), kind, ""))
    assert run(3, on_ranks, str(tmp_path), kind, "") == [(True, ())] * 3
    for fault, told in (("momentum", ": other elements than were saved"), ("rate", "-> 1.0 in group 0")):
        first, *others = run(3, on_ranks, str(tmp_path), kind, fault)
        assert not first[0] and told in first[1][0] and others == [first] * 2
    resumes = muonckpt.look_at_run(tmp_path).resumes
    assert [(one.step, one.ranks_saved, one.ranks, one.proof["equal"]) for one in resumes] == [
        (SAVED, 2, 3, True),
        (SAVED, 2, 3, False),
        (SAVED, 2, 3, False),
    ]


def layer_wise(rank: int, world: int, folder: str) -> tuple[bool, bool]:
    """Save by owners, resume with other weights, and check twice: as restored, and with one momentum changed."""
    model = module(rank if world == 2 else 7)
    kinds = [
        [param for param in model.parameters() if (param.ndim > 1) == of_matrices] for of_matrices in (True, False)
    ]
    optimizer = LayerWise(model, [{"params": kinds[0]}, {"params": kinds[1], "algorithm": "adamw", "lr": 1e-3}])
    if muonckpt.Series(folder).latest() is None:
        model(torch.ones(2, 10)).square().mean().backward()
        optimizer.step()
        muonckpt.Series(folder).save(1, {"net": model, "opt": optimizer})
        return True, False
    restored = muonckpt.Series(folder).restore({"net": model, "opt": optimizer}, required=True)
    first = restored.check(model, optimizer)
    with torch.no_grad():
        for state in optimizer.state.values():
            for slot in state.keys() & {"momentum_buffer"}:
                state[slot].add_(1)
    return first.equal, restored.check(model, optimizer).equal


def test_state_at_owners_is_proved_too(tmp_path):
    run(2, layer_wise, str(tmp_path))
    assert run(2, layer_wise, str(tmp_path)) == [(True, False)] * 2
    assert run(1, layer_wise, str(tmp_path)) == [(True, False)]


class Application:
    """All of a training as one object, as torch's tutorial of checkpoints has it."""

    def __init__(self, training: Training, optimizers: list[torch.optim.Optimizer]) -> None:
        self.training, self.optimizers, self.epoch = training, optimizers, 1

    def state_dict(self) -> dict[str, Any]:
        weights, state = get_state_dict(self.training.model, self.optimizers)
        return {"net": weights, "opt": state, "rates": self.training.scheduler.state_dict(), "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.training.model, self.optimizers, model_state_dict=state["net"], optim_state_dict=state["opt"]
        )
        self.training.scheduler.load_state_dict(state["rates"])


SCHEDULERS = {
    "once": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=20),
    "cyclic": lambda optimizer: CyclicLR(optimizer, 0.01, 0.1),  # takes a key out of the state that it loads
    "chained": lambda optimizer: ChainedScheduler([LinearLR(optimizer), ExponentialLR(optimizer, 0.9)]),
    "in turn": lambda optimizer: SequentialLR(optimizer, [LinearLR(optimizer), ExponentialLR(optimizer, 0.9)], [2]),
    "plateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=0),
}


@pytest.mark.filterwarnings("ignore:Detected call of", "ignore:.*other rates than they began with")
@pytest.mark.parametrize("schedule", SCHEDULERS)
def test_an_object_that_has_all_is_proved_and_what_it_has_besides_is_said(schedule, tmp_path):
    def application(seed: int) -> Application:
        training = Training("adamw", seed=seed)
        training.scheduler = SCHEDULERS[schedule](training.optimizer)
        return Application(training, [training.optimizer])

    training = application(0).training
    training.scheduler.step(*[1.0] * (schedule == "plateau"))
    muonckpt.Series(tmp_path).save(1, {"app": Application(training, [training.optimizer])})
    again = application(5)
    restored = muonckpt.Series(tmp_path).restore({"app": again}, required=True)
    proof = again.training.check(restored)
    assert proof.equal and others_unchecked(proof) == ("app.epoch",), str(proof)
    proof = restored.check(again.training.model, again.training.optimizer)
    assert proof.equal and others_unchecked(proof) == ("app.epoch", "app.rates"), str(proof)
    again.training.scheduler.last_epoch = 7
    assert "app.rates.last_epoch: " in again.training.check(restored).lines[0]


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def test_an_optimizer_of_other_tensors_than_the_model_is_reported(tmp_path):
    """`copy.deepcopy`, `fully_shard` or `assign=True` after the optimizer was made: the model would never train."""
    model = module()
    for form, state_of in {
        "numbered": lambda: {"net": model.state_dict(), "opt": muon(model).state_dict()},
        "nested": lambda: dict(zip(("net", "opt"), get_state_dict(model, muon(model)), strict=True)),
    }.items():
        state = state_of()
        muonckpt.Series(tmp_path / form).save(1, state)
        restored = muonckpt.Series(tmp_path / form).restore(state, required=True)
        proof = restored.check(model, muon(module()))
        assert proof.lines[0] == "optimizer 0: steps 6 of 6 parameters that are not the model's"


def test_parameters_and_optimizers_are_known_by_names_whatever_their_order(tmp_path):
    """Named parameters in another order, in the optimizer's own form; two optimizers in another order."""

    def named(reverse: bool) -> tuple[nn.Module, Muon]:
        model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
        matrices = [(name, param) for name, param in model.named_parameters() if param.ndim > 1]
        return model, Muon([{"params": matrices[::-1] if reverse else matrices}], lr=0.02)

    for reverse in (False, True):
        model, optimizer = named(reverse)
        if not reverse:
            model(torch.ones(2, 10)).square().mean().backward()
            optimizer.step()
            muonckpt.Series(tmp_path / "one").save(1, {"net": model.state_dict(), "opt": optimizer.state_dict()})
        state = {"net": model.state_dict(), "opt": optimizer.state_dict()}
        restored = muonckpt.Series(tmp_path / "one").restore(state, required=True)
        model.load_state_dict(state["net"])
        optimizer.load_state_dict(state["opt"])
        proof = restored.check(model, optimizer)
        assert proof.equal and not others_unchecked(proof), str(proof)
    vectors = torch.optim.AdamW([param for param in model.parameters() if param.ndim < 2])
    state = dict(zip(("net", "opt"), get_state_dict(model, [optimizer, vectors]), strict=True))
    muonckpt.Series(tmp_path / "two").save(1, state)
    restored = muonckpt.Series(tmp_path / "two").restore(state, required=True)
    for order in ((optimizer, vectors), (vectors, optimizer)):
        assert restored.check(model, *order).equal


@pytest.mark.filterwarnings("ignore:hyper-parameters are those of the saved run")
def test_what_code_gave_is_lost_in_the_flat_form_and_is_no_difference(tmp_path):
    def new() -> tuple[nn.Linear, Muon, OneCycleLR]:
        model = nn.Linear(8, 8, bias=False)
        optimizer = Muon(model.parameters(), lr=0.02)
        return model, optimizer, OneCycleLR(optimizer, 0.1, total_steps=30, cycle_momentum=False)

    def state_of(model: nn.Module, optimizer: Muon, scheduler: OneCycleLR) -> dict[str, Any]:
        return {**dict(zip("mo", get_state_dict(model, optimizer, options=FLAT), strict=True)), "s": scheduler}

    muonckpt.Series(tmp_path).save(1, state_of(*new()))
    model, optimizer, scheduler = new()
    state = state_of(model, optimizer, scheduler)
    restored = muonckpt.Series(tmp_path).restore(state, required=True)
    set_state_dict(model, optimizer, model_state_dict=state["m"], optim_state_dict=state["o"], options=FLAT)
    assert restored.check(model, optimizer, scheduler=scheduler).equal


def test_a_parameter_that_is_frozen_or_unfrozen_only_now_is_reported(tmp_path):
    training = Training("muon")
    training.model[0].weight.requires_grad_(False)
    frozen = muonckpt.checkpoint.live_parts.frozen_parameters(training.model)
    muonckpt.Series(tmp_path).save(1, training.state(), provenance={"frozen": frozen})
    for names, lines in (
        ({"0.weight"}, ()),
        ({"0.weight", "2.weight"}, ("2.weight.requires_grad: True -> False",)),
        (set(), ("0.weight.requires_grad: False -> True",)),
    ):
        again = Training("muon")
        for name, param in again.model.named_parameters():
            param.requires_grad_(name not in names)
        proof = again.check(again.resume(tmp_path))
        assert proof.lines == lines and not proof.unchecked, str(proof)


def test_zero_and_minus_zero_differ(tmp_path):
    saved_state = {"x": torch.ones(2), "item": 0.0, "scalar": torch.tensor(0.0)}
    muonckpt.Series(tmp_path).save(1, saved_state)
    restored = muonckpt.Series(tmp_path).restore({**saved_state}, required=True)
    assert restored.compare(saved_state).equal
    for key, value in (("item", -0.0), ("scalar", torch.tensor(-0.0))):
        assert [line.partition(":")[0] for line in restored.compare({**saved_state, key: value}).lines] == [key]


class Rotary(nn.Module):
    """A matrix, and a buffer that is in no state dict."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.register_buffer("table", buffer, persistent=False)


def buffers(rank: int, world: int, folder: str) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return what a proof says of a buffer that is alike, that differs on a rank, and that is not finite there."""
    found = []
    for last in (1.0, 2.0, torch.nan, torch.inf, -torch.inf):
        model = Rotary(torch.full((8,), last if rank == world - 1 else 1.0))
        optimizer = Muon([*model.named_parameters()], lr=0.02)
        with muonckpt.Series(folder) as series:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            if series.latest() is None:
                series.save(1, state)
            proof = series.restore(state, required=True).check(model, optimizer)
        found.append((proof.lines, others_unchecked(proof)))
    return found


def test_buffers_that_are_in_no_state_dict_are_finite_and_alike_on_all_ranks(tmp_path):
    """A model from the meta device has what was in memory, where `reset_parameters` forgets a buffer."""
    alike, *others = run(2, buffers, str(tmp_path))[0]
    assert alike == ((), ("table, which no state dict has",))
    assert all(len(lines) == 1 and lines[0].startswith("table: ") and not unchecked for lines, unchecked in others)
    model = Rotary(torch.tensor([0.0, -torch.inf]))
    muonckpt.Series(tmp_path / "mask").save(1, {"model": model.state_dict()})
    assert muonckpt.Series(tmp_path / "mask").restore({"model": model.state_dict()}).check(model).equal, "a mask"


def test_a_rate_that_is_a_tensor_is_told_with_both_values(tmp_path):
    model = module()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), foreach=False)
    state = dict(zip(("net", "opt"), get_state_dict(model, optimizer), strict=True))
    muonckpt.Series(tmp_path).save(1, state)
    restored = muonckpt.Series(tmp_path).restore(state, required=True)
    assert restored.check(model, optimizer).equal
    for rate, told in ((torch.tensor(0.5), "lr 0.01 -> 0.5 in group 0"), (0.01, "lr tensor(0.01) -> 0.01 in group 0")):
        optimizer.param_groups[0]["lr"] = rate
        [line] = restored.check(model, optimizer).lines
        assert line.startswith(told)


def test_optimizers_that_were_saved_as_one_are_so_whatever_options_a_later_scheduler_writes(tmp_path):
    model = module()
    optimizers = [Muon([param for param in model.parameters() if param.ndim > 1])]
    optimizers.append(torch.optim.AdamW([param for param in model.parameters() if param.ndim < 2]))
    state = dict(zip(("net", "opt"), get_state_dict(model, optimizers), strict=True))
    muonckpt.Series(tmp_path).save(1, state)
    restored = muonckpt.Series(tmp_path).restore(state, required=True)
    LambdaLR(optimizers[0], lambda step: 1.0)
    assert restored.check(model, *optimizers).equal


def test_what_allow_extra_left_in_the_checkpoint_is_said(tmp_path):
    saved(tmp_path, "adamw")
    training = Training("adamw", seed=5)
    state = training.state()
    rates = state.pop("rates")
    restored = muonckpt.Series(tmp_path).restore(state, allow_extra=["rates.*"])
    training.set({**state, "rates": rates})
    [beside] = others_unchecked(restored.check(training.model, training.optimizer))
    assert beside.startswith("rates.") and beside.endswith("which stay in the checkpoint")


def test_what_fresh_left_in_the_checkpoint_is_said(tmp_path, capsys):
    """A layer that the model has no longer: its weight as well as its state."""
    model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(2)))
    muonckpt.Series(tmp_path, model, torch.optim.AdamW(model.parameters())).save(0)
    assert muonckpt.Series(tmp_path, model[:1], torch.optim.AdamW(model[:1].parameters())).resume(fresh=["1.*"]) == 1
    state = "model.1.weight, optimizer.state.1.weight.exp_avg, optimizer.state.1.weight.exp_avg_sq"
    assert f"; not checked: {state}, optimizer.state.1.weight.step, which stay in" in capsys.readouterr().out


def test_a_new_layer_is_named_by_its_own_number(tmp_path, capsys):
    """Its two matrices are one name, which the layers that were loaded do not match."""
    model = nn.Sequential(*(nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(2))) for _ in range(3)))
    muonckpt.Series(tmp_path, model[:2], torch.optim.AdamW(model[:2].parameters())).save(0)
    assert muonckpt.Series(tmp_path, model, torch.optim.AdamW(model.parameters())).resume(fresh=["2.*"]) == 1
    line = capsys.readouterr().out
    state = ", ".join(f"optimizer.state.2.*.weight.{slot} (2)" for slot in ("exp_avg", "exp_avg_sq", "step"))
    assert line.startswith("2 weights stay as initialised: model.2.*.weight (2); resumed from step 0")
    assert f"; not checked: {state}, which began from zero" in line


def test_parameters_called_by_a_star_and_by_a_number(tmp_path):
    model = nn.ModuleDict({"*": nn.Linear(6, 6), "0": nn.Linear(6, 6)})
    run = muonckpt.Series(tmp_path, model, torch.optim.AdamW(model.parameters()))
    run.save(0)
    assert run.resume(strict=True) == 1


def test_an_error_of_a_right_call_is_raised_as_it_is():
    @called_like("check(first, second)")
    def check(*optimizers: torch.optim.Optimizer) -> None:
        raise RuntimeError(f"the network is down for {len(optimizers)}")

    optimizer = torch.optim.AdamW([torch.ones(2)])
    with pytest.raises(RuntimeError, match="the network is down for 2"):
        check(optimizer, optimizer)
    with pytest.raises(muonckpt.ArgumentError, match=r"expected .*Optimizer.* Write check\(first, second\)"):
        check(optimizer, [optimizer])


def test_a_list_with_empty_members_is_proved(tmp_path):
    class Counts:
        def state_dict(self) -> dict[str, Any]:
            return {"by_source": [3, {}, {"seen": 4}]}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert state == self.state_dict()

    model = nn.Linear(6, 6)
    run = muonckpt.Series(tmp_path, model, torch.optim.AdamW(model.parameters()), extra={"counts": Counts()})
    run.save(0)
    assert run.resume(strict=True) == 1


def test_arguments_that_are_something_else_are_refused_with_a_sentence(tmp_path):
    saved(tmp_path, "adamw")
    training = Training("adamw")
    restored = training.resume(tmp_path)
    model, optimizer = training.model, training.optimizer
    for told, arguments, scheduler in (
        ("expected a model, found AdamW", (optimizer, model), None),
        ("expected an optimizer, found LambdaLR", (model, optimizer, training.scheduler), None),
        ("expected an optimizer, found list", (model, [optimizer]), None),
        ("expected one scheduler with a state_dict, found list", (model, optimizer), [training.scheduler]),
    ):
        with pytest.raises(muonckpt.ArgumentError, match=told):
            restored.check(*arguments, scheduler=scheduler)
    with pytest.raises(muonckpt.ArgumentError, match="expected a state dict to check, found NoneType"):
        restored.compare(None)


def replicas(rank: int, world: int, folder: str) -> tuple[tuple[str, ...], str]:
    """Resume alike on all ranks, then with a momentum that differs on the last; and with other arguments there."""
    training = Training("muon", seed=5)
    restored = training.resume(folder)
    assert training.check(restored).equal
    with pytest.raises(muonckpt.ArgumentError) as refused:
        restored.check(None if rank else training.model, training.optimizer)
    with torch.no_grad():
        slots(training, "momentum_buffer")[0].add_(rank)
    return training.check(restored).lines, str(refused.value)


def test_a_replica_that_differs_and_an_error_on_one_rank_are_told_on_all(tmp_path):
    saved(tmp_path, "muon")
    first, other = run(2, replicas, str(tmp_path))
    assert first == other
    [line], refused = first
    assert re.search(r"opt\.state\..*replicas differ: rank 0 holds \w{16}, rank 1 holds", line)
    assert "expected a model, found NoneType" in refused and "(rank 1)" in refused
    assert "replicas differ" in muonckpt.look_at_run(tmp_path).resumes[-1].verdict


def test_a_rate_that_is_changed_on_purpose_is_told_with_the_name_of_its_group(tmp_path):
    saved(tmp_path, "adamw")
    training = Training("adamw")
    restored = training.resume(tmp_path)
    training.optimizer.param_groups[0]["lr"] = 0.01
    assert training.check(restored).lines == (f"lr {0.01 * 0.9**3!r} -> 0.01 in group 0 (hidden)",)


def test_several_optimizers_are_found_where_they_were_saved(tmp_path):
    """Each at its key, or all in one state dict; a weight that is in no optimizer stays out of it."""
    model = module()
    matrices = [param for param in model.parameters() if param.ndim > 1]
    optimizers = [Muon(matrices), torch.optim.AdamW([param for param in model.parameters() if param.ndim < 2])]
    model(torch.ones(2, 10)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    apart = {"net": model, "first": optimizers[0].state_dict(), "second": optimizers[1].state_dict()}
    together = dict(zip(("net", "both"), get_state_dict(model, optimizers), strict=True))
    for name, state in {"apart": apart, "together": together}.items():
        series = muonckpt.Series(tmp_path / name)
        series.save(1, state)
        restored = series.restore(state)
        assert restored.check(model, *optimizers).equal
        optimizers[1].param_groups[0]["lr"] *= 2
        assert len(restored.check(model, *optimizers).lines) == 1
        optimizers[1].param_groups[0]["lr"] /= 2


def test_what_may_be_either_of_two_parts_is_compared_as_a_state_dict(tmp_path):
    """Averaged weights beside the weights: nothing guesses which is the model, and the printed cure decides."""
    model, averaged = module(0), module(1)
    state = {"net": model.state_dict(), "average": averaged.state_dict()}
    series = muonckpt.Series(tmp_path)
    series.save(1, state)
    restored = series.restore(state)
    with pytest.raises(
        muonckpt.ArgumentError, match=r"may be any of 'average' and 'net'.*restored.compare\(state_dict\)"
    ):
        restored.check(model)
    assert restored.compare({"net": model, "average": averaged}).equal
    mixed = restored.compare({"net": averaged, "average": averaged})
    assert {difference.key.partition(".")[0] for difference in mixed.differences} == {"net"}
    with pytest.raises(muonckpt.ArgumentError, match="nothing that was restored has the keys of the model"):
        restored.check(nn.ModuleDict({"other": nn.Linear(2, 2)}))


def test_what_is_not_compared_is_said(tmp_path):
    """A scheduler that was restored and not given; weights that were not saved; state that begins from zero."""
    training = Training("muon")
    training.train(1)
    state = training.state()
    trained = {name: value for name, value in state["net"].items() if not name.startswith("0.")}
    muonckpt.Series(tmp_path).save(1, {**state, "net": trained, "seed": 3})
    again = Training("muon", seed=5)
    state = {**again.state(), "seed": 0}
    state["net"] = {name: value for name, value in state["net"].items() if not name.startswith("0.")}
    restored = muonckpt.Series(tmp_path).restore(state, fresh=["4.*"])
    set_state_dict(
        again.model, again.optimizer, model_state_dict=again.model.state_dict(), optim_state_dict=state["opt"]
    )
    again.model.load_state_dict(state["net"], strict=False)
    proof = restored.check(again.model, again.optimizer)
    assert proof.equal, str(proof)
    told = " ".join(proof.unchecked)
    assert "rates" in told and "seed" in told
    assert "opt.state.4.weight" in told and "began from zero" in told
    assert "0.weight" in told and "which the checkpoint does not have" in told


def test_the_run_keeps_each_resume_and_commands_show_it(tmp_path):
    for wrong in (False, True):
        saved(tmp_path / str(wrong), "muon")
        training = Training("muon")
        restored = training.resume(tmp_path / str(wrong))
        assert [one.verdict for one in muonckpt.look_at_run(tmp_path / str(wrong)).resumes] == ["not checked"]
        if wrong:
            training.optimizer.param_groups[0]["lr"] = 1.0
        training.check(restored)
    shown = called("inspect", str(tmp_path / "True")).stdout
    assert "1 rank -> 1" in " ".join(shown.split()) and "-> 1.0 in group 0" in " ".join(shown.split())
    assert "proved:" in called("inspect", str(tmp_path / "False")).stdout
    both = called("diff", str(tmp_path / "True"), str(tmp_path / "False"))
    assert both.returncode == 0 and "-> 1.0 in group 0" in " ".join(both.stdout.split()) and "proved:" in both.stdout
    [proof] = (tmp_path / "True" / "resumes").glob("*.proof-*.json")
    proof.write_text('{"equal": true')
    assert "1 record in resumes cannot be read" in called("inspect", str(tmp_path / "True")).stdout


def test_two_runs_side_by_side(tmp_path):
    """The steps of both, by what their metadata record: the same training, and one that parted."""
    for name, last in (("one", 0), ("same", 0), ("other", 1)):
        training = Training("muon")
        for step in (1, 2):
            training.train(1 + last * (step == 2))
            muonckpt.Series(tmp_path / name).save(step, training.state())
    assert not muonckpt.diff_runs(tmp_path / "one", tmp_path / "same").differs
    first, second = muonckpt.diff_runs(tmp_path / "one", tmp_path / "other").steps
    assert not first.differs and second.differs and second.counts[0] > 0
    assert called("diff", str(tmp_path / "one"), str(tmp_path / "other")).returncode == 1
    data = json.loads(called("diff", str(tmp_path / "one"), str(tmp_path / "other"), "--json").stdout)
    assert data["differs"] and [step["name"] for step in data["steps"]] == ["step-00000001", "step-00000002"]
    # Equal steps of two runs are no stale ones, and neighbours that differ alike are one row.
    same = called("diff", str(tmp_path / "one"), str(tmp_path / "same")).stdout
    assert "did not change" not in same and "step-00000001 to step-00000002" in same
    shown = called("diff", str(tmp_path / "one"), str(tmp_path / "other")).stdout
    (line,) = [line for line in shown.splitlines() if line.startswith("muonckpt diff ")]
    assert line.split()[2:] == [str(tmp_path / name / "step-00000002") for name in ("one", "other")]
    assert called(*line.split()[1:]).returncode == 1, "the command that it prints reads what differs"
