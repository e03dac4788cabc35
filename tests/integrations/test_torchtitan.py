"""torchtitan's components with the script of their page: trained, saved, resumed on the same and on the other world."""

from __future__ import annotations

import shutil
import signal
import sys
import warnings
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from support import sweep
from support.failing import raised
from support.pages import as_launched, distance, script, uninterrupted_runs, whole
from support.workers import run
from torch import nn

import muonckpt
from muonckpt.optimizer import Muon
from muonckpt.optimizer.groups import TORCHTITAN, Rule

pytest.importorskip("torchtitan", reason="torchtitan is not installed (docs/integrations/torchtitan.md says how)")

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import ParamGroupConfig
from torchtitan.config.manager import ConfigManager

from muonckpt.integrations.torchtitan import MuonckptManager, MuonOptimizers

# torch's, of what torchtitan saves of its schedulers and loaders.
pytestmark = pytest.mark.filterwarnings("ignore:To get the last learning rate", "ignore:'set_vital' is deprecated")

KINDS = ["ours", "stock"]
"""The checkpoint manager."""


def train(rank: int, world: int, kind: str, folder: str, **options: Any) -> dict[str, Any]:
    """The script; whole parameters, and the names of the state of each."""
    with as_launched(rank, world):
        names = script("torchtitan.md")
        if kind == "stock":
            names["MuonckptManager"] = CheckpointManager
        trainer = names["Trainer"](folder, **options)
        trainer.train()
        parameters = dict(trainer.model.named_parameters())
        (optimizer,) = trainer.optimizers
        return {
            "parameters": {name: whole(parameter) for name, parameter in parameters.items()},
            "slots": {name: sorted(optimizer.state[parameter]) for name, parameter in parameters.items()},
            "sharing": list(optimizer.schedules),
            "rates": sorted({group["initial_lr"] for group in optimizer.param_groups}),
            "options": {option for group in optimizer.param_groups for option in group},
        }


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[tuple[str, int], tuple[Path, dict[str, Any]]]:
    return uninterrupted_runs(train, KINDS, lambda: tmp_path_factory.mktemp("run"))


def interrupted(folder: Path, to: Path) -> str:
    """The folder of a run that was ended after its first checkpoint."""
    shutil.copytree(folder / "checkpoint" / "step-3", to / "checkpoint" / "step-3")
    return str(to)


def test_matrices_are_stepped_by_muon_and_the_rest_by_adamw(uninterrupted):
    for (_, world), (_, result) in uninterrupted.items():
        for name, slots in result["slots"].items():
            assert slots == (["momentum_buffer"] if "feed_forward" in name else ["exp_avg", "exp_avg_sq", "step"]), name
        assert result["sharing"] == [tuple(range(world))], "ranks share the matrices out"
        assert result["rates"] == [3e-3, 0.02]
        assert not {"fused", "foreach"} & result["options"]


def test_two_ranks_train_as_one_process(uninterrupted):
    assert distance(uninterrupted["ours", 1][1], uninterrupted["ours", 2][1]) < 2e-5


RESUMED = [("ours", 1, 1), ("ours", 2, 2), ("ours", 2, 1), ("ours", 1, 2), ("stock", 2, 2), ("stock", 2, 1)]


@pytest.mark.parametrize(("kind", "saved", "resumed"), sweep(RESUMED, *RESUMED[1::2]))
def test_a_resumed_run_goes_on_as_the_uninterrupted_one(uninterrupted, kind, saved, resumed, tmp_path):
    folder, _ = uninterrupted[kind, saved]
    result = run(resumed, train, "ours", interrupted(folder, tmp_path))[0]
    gap = distance(result, uninterrupted["ours", resumed][1])
    assert gap == 0 if saved == resumed else gap < 2e-5


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_on_four_ranks_is_restarted_on_two_and_the_other_way_round(uninterrupted, kind, tmp_path):
    expected = uninterrupted[kind, 2][1]
    assert distance(run(4, train, kind, str(tmp_path / "four"))[0], expected) < 2e-5
    for saved, ranks in ((tmp_path / "four", 2), (uninterrupted[kind, 2][0], 4)):
        result = run(ranks, train, kind, interrupted(saved, tmp_path / f"on {ranks}"))[0]
        assert distance(result, expected) < 2e-5


def test_a_checkpoint_is_one_of_this_package_with_torchtitans_keys(uninterrupted):
    reports = [muonckpt.verify(uninterrupted[kind, 2][0] / "checkpoint" / "step-3") for kind in KINDS]
    ours, stock = reports
    assert not ours.findings
    assert not ours.unchecked
    assert "optimizer.state.layers.1.feed_forward.w2.weight.momentum_buffer" in ours.fingerprints
    assert ours.fingerprints == stock.fingerprints


def begun(rank: int, world: int, folder: str, other: str) -> tuple[int, float, str]:
    """The script, begun from a run of AdamW by the page's method: its steps, and what is told."""
    with as_launched(rank, world), redirect_stdout(StringIO()) as told:
        trainer = script("torchtitan.md")["Trainer"](folder)
        (optimizer,) = trainer.optimizers
        rates: list[float] = []
        optimizer.register_step_pre_hook(lambda *_: rates.append(float(optimizer.param_groups[0]["lr"])))
        trainer.train(begin_from=other)
        return len(rates), rates[0], told.getvalue()


def test_a_run_begins_from_one_of_adamw_with_its_schedule(tmp_path):
    model = script("torchtitan.md")["Net"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        model(torch.arange(32)[None]).square().mean().backward()
        optimizer.step()
    other = muonckpt.Series(tmp_path / "adamw", model, optimizer).save(2).path
    steps, rate, told = run(2, begun, str(tmp_path / "muon"), other)[0]
    counts = "the state of 4 parameters goes on, that of 6 begins at zero; schedules are at their step 3; next step: 3"
    assert f"begun from {other}: 10 weights loaded; {counts}" in told, told
    expected, _ = run(1, rates_of_steps, str(tmp_path / "whole"), 0.02)[0]
    assert (steps, rate) == (3, expected[3][0])


def rates_of_steps(rank: int, world: int, folder: str, lr: float, **options: Any) -> tuple[list[list[float]], str]:
    """The rates with which the script's steps are taken, by group, and the line of a resume."""
    with as_launched(rank, world), redirect_stdout(StringIO()) as told:
        names = script("torchtitan.md")
        names["optimizers"] = lambda: MuonOptimizers.Config(lr=lr, adamw_lr=3e-3, options={"ns_dtype": "float32"})
        trainer = names["Trainer"](folder, **options)
        (optimizer,) = trainer.optimizers
        rates: list[list[float]] = []
        optimizer.register_step_pre_hook(lambda *_: rates.append([float(g["lr"]) for g in optimizer.param_groups]))
        trainer.train()
        return rates, told.getvalue()


@pytest.mark.filterwarnings("ignore:hyper-parameters are those of the saved run")
def test_a_resumed_run_steps_with_the_rates_of_the_saved_one(tmp_path):
    """Of a schedule torchtitan saves the step alone, and not the rates that it multiplies."""
    rates, told = run(2, rates_of_steps, str(tmp_path / "whole"), 0.02)[0]
    assert not told
    folder = interrupted(tmp_path / "whole", tmp_path / "resumed")
    resumed_rates, told = run(1, rates_of_steps, folder, 0.01)[0]
    assert resumed_rates == rates[3:]
    assert told.startswith("resumed from step 3, saved on 2 ranks, now 1, proved: 28 tensors and "), told
    assert "not checked" not in told


def warnings_with_steps(rank: int, world: int, folder: str, steps: int) -> list[str]:
    """The warnings of a run with another number of steps, by which its schedule decays otherwise."""
    with as_launched(rank, world), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        names = script("torchtitan.md")
        names["STEPS"] = steps
        names["Trainer"](folder).train()
        return [str(warning.message) for warning in caught if "resumed from" in str(warning.message)]


def test_another_schedule_is_reported(tmp_path):
    run(1, rates_of_steps, str(tmp_path / "whole"), 0.02)
    folder = interrupted(tmp_path / "whole", tmp_path / "resumed")
    [told] = run(1, warnings_with_steps, folder, 12)[0]
    assert "not as it was saved: lr_scheduler.0.lr_lambdas: the code's functions give" in told


def save_model_last(rank: int, world: int, folder: str) -> str:
    with as_launched(rank, world):
        names = script("torchtitan.md")
        full = names["checkpoints"]
        names["checkpoints"] = lambda **options: replace(full(**options), last_save_model_only=True)
        names["Trainer"](folder).train()
        return raised(names["Trainer"](folder).train)


def test_a_last_step_without_an_optimizer_is_named_and_moved_away(uninterrupted, tmp_path):
    for told in run(2, save_model_last, str(tmp_path)):
        assert "step-6 has the model alone, as last_save_model_only=True, torchtitan's default" in told
    shutil.move(tmp_path / "checkpoint" / "step-6", tmp_path / "step-6")
    assert distance(run(2, train, "ours", str(tmp_path))[0], uninterrupted["ours", 2][1]) == 0


def test_what_a_killed_save_has_left_is_no_checkpoint(uninterrupted, tmp_path):
    folder, result = uninterrupted["ours", 1]
    interrupted(folder, tmp_path)
    left = tmp_path / "checkpoint" / ".step-5.0123456789ab.tmp"
    shutil.copytree(folder / "checkpoint" / "step-6", left)
    assert distance(run(1, train, "ours", str(tmp_path))[0], result) == 0


def load_model_only(rank: int, world: int, folder: str, path: str) -> dict[str, Any]:
    with as_launched(rank, world):
        trainer = script("torchtitan.md")["Trainer"](folder, initial_load_path=path)
        trainer.checkpointer.load()
        (optimizer,) = trainer.optimizers
        assert trainer.step == 0
        assert not any(tensor.any() for slots in optimizer.state.values() for tensor in slots.values())
        return {"parameters": {name: whole(parameter) for name, parameter in trainer.model.named_parameters()}}


def test_a_run_begins_with_the_model_of_another(uninterrupted, tmp_path):
    folder, result = uninterrupted["ours", 2]
    path = str(folder / "checkpoint" / "step-6")
    assert distance(run(1, load_model_only, str(tmp_path), path)[0], result) == 0


class Numbers(torch.utils.data.IterableDataset):
    """A dataset that knows how far it has been read, as torchtitan's do."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self):
        while True:
            self.read += 1
            yield self.read

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


def read(rank: int, world: int, folder: str, saving: bool, **options: Any) -> tuple[str, int]:
    """Load if there is a checkpoint, read ten numbers and as many as the rank's, and save if told so."""
    with as_launched(rank, world):
        loader = ParallelAwareDataloader(Numbers(), dp_rank=rank, dp_world_size=world, batch_size=None)
        manager = script("torchtitan.md")["Trainer"](folder, dataloader=loader, **options).checkpointer
        told = raised(manager.load)
        numbers = iter(loader)
        *_, last = (next(numbers) for _ in range(10 + rank))
        if saving:
            manager.save(3)
        return told, last


def test_the_place_in_the_data_is_each_ranks_own(tmp_path):
    assert run(2, read, str(tmp_path), True) == [("no error", 10), ("no error", 11)]
    assert run(2, read, str(tmp_path), False) == [("no error", 20), ("no error", 22)]
    told, _ = run(1, read, str(tmp_path), False)[0]
    assert "extra key 'dataloader.dp_rank_1'" in told


def begin_data_anew(rank: int, world: int, folder: str) -> tuple[str, int]:
    return read(rank, world, folder, False, exclude_from_loading=["dataloader"])


def test_on_another_number_of_ranks_the_data_begins_anew(tmp_path):
    run(2, read, str(tmp_path), True)
    assert run(1, begin_data_anew, str(tmp_path))[0] == ("no error", 10)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"param_groups": [ParamGroupConfig(pattern=".*", optimizer_name="AdamW")]}, "here rules say"),
        ({"optimizer_factory_kwargs_by_name": {"Muon": {"stages": 2}}}, "options go to all of them"),
        ({"implementation": "fused_opt_states_bf16"}, "it changes the dtype of AdamW's state"),
        ({"options": {"fused": True}}, "fused"),
        ({"adamw_lr": None}, "lr"),
        ({"rules": [Rule("head", "nothing.weight")]}, "selects nothing"),
    ],
)
def test_what_belongs_to_other_optimizers_is_refused(options, told):
    config = MuonOptimizers.Config(**{"lr": 0.02, "adamw_lr": 3e-4, **options})
    with pytest.raises((ValueError, TypeError), match=told):
        config.build(model_parts=[script("torchtitan.md")["Net"]()])


def test_model_parts_have_an_optimizer_each_and_share_names():
    """As on a rank with two stages of a pipeline."""
    net = script("torchtitan.md")["Net"]()
    first, second = ({"layers": nn.ModuleDict({number: block})} for number, block in net.layers.items())
    stages = [nn.ModuleDict({"tok_embeddings": net.tok_embeddings, **first}), nn.ModuleDict(second)]
    container = MuonOptimizers.Config(lr=0.02, adamw_lr=3e-4).build(model_parts=stages)
    assert [type(optimizer) for optimizer in container] == [Muon, Muon]
    state = container.state_dict()
    assert "state.tok_embeddings.weight.exp_avg" in state
    assert "state.layers.0.feed_forward.w1.weight.momentum_buffer" in state
    assert "state.layers.1.feed_forward.w1.weight.momentum_buffer" in state
    for value in state.values():
        if isinstance(value, torch.Tensor):
            value.fill_(1)
    container.load_state_dict(state)
    assert all(
        tensor.eq(1).all() for optimizer in container for slots in optimizer.state.values() for tensor in slots.values()
    )


def test_frozen_parameters_have_no_state():
    net = script("torchtitan.md")["Net"]()
    net.layers["0"].requires_grad_(False)
    state = MuonOptimizers.Config(lr=0.02, adamw_lr=3e-4).build(model_parts=[net]).state_dict()
    assert not any("layers.0" in key for key in state)
    assert any("layers.1" in key for key in state)


def train_with(rank: int, world: int, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    return train(rank, world, "ours", folder, **options)


def test_what_is_saved_along_with_training_is_resumed_exactly(uninterrupted, tmp_path):
    folder = tmp_path / "along"
    run(2, train_with, str(folder), {"async_mode": "async"})
    result = run(2, train, "ours", interrupted(folder, tmp_path / "resumed"))[0]
    assert distance(result, uninterrupted["ours", 2][1]) == 0
    [six] = (folder / "checkpoint").glob("step-6")
    assert not muonckpt.verify(six).findings


def preempted(rank: int, world: int, folder: str, mode: str) -> object:
    """The script; one rank gets a signal in step 2, the other one in step 5."""
    with as_launched(rank, world):
        trainer = script("torchtitan.md")["Trainer"](folder, on=(signal.SIGTERM, signal.SIGUSR2), async_mode=mode)
        step = trainer.train_step

        def signalled() -> None:
            if (rank, trainer.step) in ((1, 2), (0, 5)):
                signal.raise_signal({2: signal.SIGUSR2, 5: signal.SIGTERM}[trainer.step])
            step()

        trainer.train_step = signalled
        try:
            trainer.train()
        except SystemExit as ended:
            return ended.code
        finally:
            trainer.checkpointer.close()


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_signal_to_any_rank_is_a_checkpoint(mode, tmp_path):
    assert run(2, preempted, str(tmp_path), mode) == [75, 75]
    places = sorted((tmp_path / "checkpoint").glob("step-*"))
    assert [place.name for place in places] == ["step-2", "step-3", "step-5"]
    assert all(muonckpt.verify(place).verdict == "whole" for place in places)


def test_another_asynchronous_mode_is_refused():
    with pytest.raises(ValueError, match="'async', which copies to pinned memory by itself"):
        MuonckptManager.Config(async_mode="async_with_pinned_mem")


def test_state_that_is_named_starts_fresh(uninterrupted, tmp_path):
    to = interrupted(uninterrupted["ours", 2][0], tmp_path)
    result = run(1, train_with, to, {"fresh": ("*feed_forward.w1.weight",)})[0]
    assert distance(result, uninterrupted["ours", 1][1]) > 1e-3


@dataclass
class TrainerConfig:
    """The fields of Trainer.Config that matter here."""

    hf_assets_path: str = "."
    optimizer: MuonOptimizers.Config.__base__ = field(
        default_factory=lambda: MuonOptimizers.Config(
            lr=0.02, adamw_lr=3e-4, rules=[[Rule("other", "*.scale", optional=True)], TORCHTITAN]
        )
    )
    checkpoint: CheckpointManager.Config.__base__ = field(default_factory=MuonckptManager.Config)


def test_the_command_line_changes_their_options(monkeypatch):
    module = type(sys)("mine")
    module.muon = TrainerConfig
    monkeypatch.setitem(sys.modules, "mine", module)
    arguments = ["--module", "mine", "--config", "muon", "--optimizer.lr", "0.05", "--checkpoint.interval", "7"]
    config = ConfigManager().parse_args(arguments)
    assert (config.optimizer.lr, config.optimizer.adamw_lr, config.checkpoint.interval) == (0.05, 3e-4, 7)
    assert config.optimizer.rules == [[Rule("other", "*.scale", optional=True)], TORCHTITAN]
    assert isinstance(config.checkpoint, MuonckptManager.Config)
    assert "Rule('other'" in config.optimizer.to_dict()["rules"]
