"""Lightning with the script of its page: trained, saved, and resumed on the same and on the other world."""

from __future__ import annotations

import shutil
import signal
import warnings
from collections.abc import Sequence
from contextlib import chdir, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import sweep
from support.failing import raised
from support.pages import as_launched, distance, recipe, script, uninterrupted_runs, whole
from support.workers import run
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import muonckpt
from muonckpt.optimizer import Muon
from muonckpt.optimizer.groups import MODULE_TYPES, Rule

pytest.importorskip("lightning", reason="lightning is not installed (extra 'integrations')")

from lightning.pytorch import Callback
from lightning.pytorch.strategies import ModelParallelStrategy

from muonckpt.integrations.lightning import CheckpointOnSignal, link_last

# Lightning's, of runs that go on in another folder.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The dirpath has changed", "ignore:Checkpoint directory .* exists", "ignore:You're resuming"
)

KINDS = ["ddp", "fsdp2"]


def train(rank: int, world: int, kind: str, folder: str, resume: str | None = None) -> dict[str, Any]:
    """The script; whole parameters, and the names of the state of each."""
    with as_launched(rank, world):
        names = script("lightning.md")
        if kind == "stock":
            names["MuonckptStrategy"] = ModelParallelStrategy
        model = names["train"](folder, world, "ddp" if kind == "ddp" else "fsdp2", resume)
        optimizer = model.trainer.optimizers[0]
        parameters = dict(model.net.named_parameters())
        return {
            "parameters": {name: whole(parameter) for name, parameter in parameters.items()},
            "slots": {name: sorted(optimizer.state[parameter]) for name, parameter in parameters.items()},
            "sharded": {isinstance(parameter, DTensor) for parameter in parameters.values()},
            "sharing": list(optimizer.schedules),
            "rates": sorted({group["lr"] for group in optimizer.param_groups}),
        }


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[tuple[str, int], tuple[Path, dict[str, Any]]]:
    return uninterrupted_runs(train, KINDS, lambda: tmp_path_factory.mktemp("run"))


def test_matrices_are_stepped_by_muon_and_the_rest_by_adamw(uninterrupted):
    for (kind, world), (_, result) in uninterrupted.items():
        for name, slots in result["slots"].items():
            matrix = name.endswith(("up.weight", "down.weight"))
            assert slots == (["momentum_buffer"] if matrix else ["exp_avg", "exp_avg_sq", "step"]), name
        assert result["sharded"] == {kind == "fsdp2"}
        assert result["sharing"] == [tuple(range(world))], "ranks share the matrices out"
        assert result["rates"] == pytest.approx([0.49 * 3e-3, 0.49 * 0.02])


def test_two_ranks_train_as_one_process(uninterrupted):
    _, alone = uninterrupted["ddp", 1]
    for case in (("ddp", 2), ("fsdp2", 2), ("fsdp2", 1)):
        assert distance(alone, uninterrupted[case][1]) < 2e-5


RESUMED = [(kind, *ranks) for kind in KINDS for ranks in ((2, 1), (1, 2), (2, 2), (1, 1))]


@pytest.mark.parametrize(("kind", "saved", "resumed"), sweep(RESUMED, *RESUMED[::3]))
def test_a_resumed_run_goes_on_as_the_uninterrupted_one(uninterrupted, kind, saved, resumed, tmp_path):
    folder, _ = uninterrupted[kind, saved]
    result = run(resumed, train, kind, str(tmp_path), str(folder / "epoch=0.ckpt"))[0]
    gap = distance(result, uninterrupted[kind, resumed][1])
    assert gap == 0 if saved == resumed else gap < 2e-5


def test_a_checkpoint_of_the_strategy_is_one_of_this_package(uninterrupted):
    folder, _ = uninterrupted["fsdp2", 2]
    report = muonckpt.verify(folder / "epoch=0.ckpt")
    assert not report.findings
    assert not report.unchecked
    momenta = "optimizer_0.state.net.1.up.weight.momentum_buffer"
    assert {momenta, "state_dict.net.0.weight"} <= report.fingerprints.keys()
    assert (folder / "last.ckpt").resolve() == folder / "epoch=1.ckpt"


def test_a_save_that_was_killed_while_it_ran_along_leaves_last_at_the_one_before(uninterrupted, tmp_path):
    """As disks have it: Lightning's link names a checkpoint that never appeared."""
    folder, result = uninterrupted["fsdp2", 2]
    shutil.copytree(folder / "epoch=0.ckpt", tmp_path / "epoch=0.ckpt")
    link_last(str(tmp_path / "epoch=0.ckpt"))
    (tmp_path / "last.ckpt").symlink_to("epoch=1.ckpt")
    assert distance(run(2, train, "fsdp2", str(tmp_path), "last")[0], result) == 0


def along(rank: int, world: int, folder: str) -> dict[str, torch.Tensor]:
    """The script, saving while it trains, and keeping one checkpoint."""
    with as_launched(rank, world):
        names = script("lightning.md")
        callback = names["ModelCheckpoint"]

        class Watched(names["MuonckptStrategy"]):
            def remove_checkpoint(self, filepath: str) -> None:
                super().remove_checkpoint(filepath)
                assert Path(filepath).exists(), "the next one is not there yet"

            def on_train_epoch_start(self) -> None:
                if self.lightning_module.trainer.current_epoch == 1:
                    self.settle()
                    assert str(Path(folder, "last-whole.ckpt").readlink()) == "epoch=0.ckpt"

        names["MuonckptStrategy"] = partial(Watched, along=True)
        names["ModelCheckpoint"] = lambda folder, **how: callback(folder, **how | {"save_top_k": 1})
        model = names["train"](folder, world, "fsdp2")
        return {"parameters": {name: whole(parameter) for name, parameter in model.net.named_parameters()}}


def test_saves_that_run_along_are_the_same_and_the_one_before_goes_when_they_are_there(uninterrupted, tmp_path):
    folder, result = uninterrupted["fsdp2", 2]
    assert distance(run(2, along, str(tmp_path))[0], result) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"epoch=1.ckpt", "last.ckpt", "last-whole.ckpt"}
    saved, expected = (muonckpt.verify(place / "epoch=1.ckpt") for place in (tmp_path, folder))
    assert not saved.findings and saved.fingerprints == expected.fingerprints


def test_checkpoints_of_the_stock_strategy_are_loaded(uninterrupted, tmp_path):
    run(2, train, "stock", str(tmp_path / "stock"))
    for kind in ("fsdp2", "stock"):
        result = run(2, train, kind, str(tmp_path / kind / "out"), str(tmp_path / "stock" / "epoch=0.ckpt"))[0]
        assert distance(result, uninterrupted["fsdp2", 2][1]) == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "stock"])
def test_a_run_on_four_ranks_goes_on_with_two_and_those_with_four(uninterrupted, kind, tmp_path):
    _, expected = uninterrupted["ddp" if kind == "ddp" else "fsdp2", 2]
    for saved, resumed in ((4, 2), (2, 4)):
        folder = tmp_path / f"from {saved}"
        assert distance(run(saved, train, kind, str(folder))[0], expected) < 2e-5
        result = run(resumed, train, kind, str(tmp_path / f"on {resumed}"), str(folder / "epoch=0.ckpt"))[0]
        assert distance(result, expected) < 2e-5


class Sender(Callback):
    """Sends this process signals, each amid a step."""

    def __init__(self, numbers: dict[int, signal.Signals]) -> None:
        self.numbers = numbers

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step + 1 in self.numbers:
            signal.raise_signal(self.numbers[trainer.global_step + 1])


def preempted(rank: int, world: int, kind: str, folder: str) -> object:
    """The script; one rank gets a signal in step 2, the other one in the last one of the epoch."""
    with as_launched(rank, world):
        names = script("lightning.md")
        made, asked = names["Trainer"], (signal.SIGTERM, signal.SIGUSR2)
        sender = Sender([{3: signal.SIGTERM}, {2: signal.SIGUSR2}][rank])
        names["Trainer"] = lambda callbacks, **options: made(
            callbacks=[*callbacks, CheckpointOnSignal(folder, on=asked), sender], **options
        )
        try:
            names["train"](folder, world, kind)
        except SystemExit as ended:
            return ended.code
        finally:
            for number in asked:
                signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize("kind", KINDS)
def test_a_signal_to_any_rank_is_a_checkpoint_and_the_run_goes_on_from_it(uninterrupted, kind, tmp_path):
    assert run(2, preempted, kind, str(tmp_path)) == [75, 75]
    assert {path.name for path in tmp_path.glob("step=*")} == {"step=2.ckpt", "step=3.ckpt"}
    result = run(2, train, kind, str(tmp_path), "last")[0]
    assert distance(result, uninterrupted[kind, 2][1]) == 0


def evaluate(rank: int, world: int, folder: str) -> dict[str, torch.Tensor]:
    """What a fresh model holds after its weights were loaded to be evaluated."""
    with as_launched(rank, world):
        names = script("lightning.md")

        class Evaluated(names["Net"]):
            def test_step(self, text: torch.Tensor) -> None:
                self.seen = {name: whole(parameter) for name, parameter in self.net.named_parameters()}

        model = Evaluated()
        trainer = names["Trainer"](
            accelerator="cpu",
            devices=world,
            strategy=names["MuonckptStrategy"](data_parallel_size=world, tensor_parallel_size=1),
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.test(model, DataLoader(torch.zeros(2, 9, dtype=torch.long)), folder, verbose=False)
        return {"parameters": model.seen}


def test_weights_are_loaded_without_an_optimizer(uninterrupted):
    folder, result = uninterrupted["fsdp2", 2]
    assert distance(run(1, evaluate, str(folder / "epoch=1.ckpt"))[0], result) == 0


def test_one_plain_process_loads_the_weights_as_the_page_says(uninterrupted):
    folder, result = uninterrupted["fsdp2", 2]
    model = script("lightning.md")["Net"]()
    report = muonckpt.load({"state_dict": model.state_dict()}, folder / "epoch=1.ckpt", allow_extra=True)
    assert str(report) == f"weights loaded: {len(model.state_dict())}"
    assert distance({"parameters": dict(model.net.named_parameters())}, result) == 0


class Watch(Callback):
    """Notes the step of a checkpoint before each micro-batch, from the first save on."""

    def __init__(self, place: Path) -> None:
        self.place, self.steps = place, list[int]()

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if self.steps or self.place.exists():
            self.steps.append(muonckpt.open(self.place).provenance["step"])


def accumulate(
    rank: int,
    world: int,
    folder: str,
    steps: int,
    resume: str | None,
    saving: dict[str, Any],
    along: bool = False,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """The page's module with gradient accumulation and validation: eight micro-batches and four steps an epoch."""
    with as_launched(rank, world), redirect_stdout(StringIO()) as told:
        names = script("lightning.md")

        class Net(names["Net"]):
            def validation_step(self, text: torch.Tensor) -> None:
                self.log("val", torch.tensor(-float(self.global_step)), sync_dist=True)  # each step is better

        model, watch = Net(), Watch(Path(folder) / f"{saving['filename']}.ckpt")
        texts = torch.randint(32, (16, 9), generator=torch.Generator().manual_seed(1))
        loader = DataLoader(texts, batch_size=2 // world)
        trainer = names["Trainer"](
            accelerator="cpu",
            devices=world,
            strategy=names["MuonckptStrategy"](data_parallel_size=world, tensor_parallel_size=1, along=along),
            max_steps=steps,
            accumulate_grad_batches=2,
            val_check_interval=4,
            callbacks=[watch, *callbacks, names["ModelCheckpoint"](folder, **saving)],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, loader, loader, ckpt_path=resume)
        parameters = {name: whole(parameter) for name, parameter in model.net.named_parameters()}
        return {"parameters": parameters, "told": told.getvalue(), "steps": watch.steps}


@pytest.mark.parametrize("last", [True, "link"])
def test_a_restored_step_is_not_saved_again_amid_accumulated_gradients(last, tmp_path):
    saving = {"filename": "{step}", "every_n_train_steps": 2, "save_top_k": -1, "save_last": last}
    expected = run(2, accumulate, str(tmp_path / "whole"), 8, None, saving)[0]
    folder = tmp_path / "resumed"
    run(2, accumulate, str(folder), 4, None, saving)
    files = {name: (folder / name).stat().st_ino for name in ("step=4.ckpt", "last.ckpt")}
    resumed = run(2, accumulate, str(folder), 5, str(folder / "last.ckpt"), saving)[0]
    assert files == {name: (folder / name).stat().st_ino for name in files}, "neither is written again"
    assert "resumed from step 4, saved on 2 ranks, now 2, proved: 48 tensors and" in resumed["told"]
    assert distance(run(2, accumulate, str(folder), 8, str(folder / "last.ckpt"), saving)[0], expected) == 0


TWICE = {
    "best": {"filename": "best", "monitor": "val", "save_top_k": 1},
    "no counter": {"filename": "best", "monitor": "val", "save_top_k": 3, "enable_version_counter": False},
    "epoch": {"filename": "epoch", "every_n_train_steps": 2},
    "last": {"filename": "last", "every_n_train_steps": 2, "save_top_k": 0, "save_last": True},
}
"""Names that ModelCheckpoint gives a file at every second step."""


@pytest.mark.parametrize("name", TWICE)
@pytest.mark.parametrize("along", [False, True])
def test_a_checkpoint_that_lightning_writes_over_is_replaced_by_a_whole_one(name, along, tmp_path):
    result = run(1, accumulate, str(tmp_path), 8, None, TWICE[name], along)[0]
    [place] = {path.resolve() for path in tmp_path.iterdir()}  # and nothing else
    assert muonckpt.verify(place).verdict == "whole"
    assert muonckpt.open(place).provenance["step"] == 8
    # A checkpoint is there at any time; one that is saved along appears at the next save.
    assert result["steps"] == sorted(result["steps"])
    assert {2, 4} <= {*result["steps"]} <= {2, 4, 6}


def begin(rank: int, world: int, folder: str, is_first: bool) -> tuple[str, list[float]]:
    """The script in a folder, with AdamW, or begun from that by the page's method: what is told, and the last rates."""
    with as_launched(rank, world), chdir(folder), redirect_stdout(StringIO()) as told:
        names = script("lightning.md")
        if is_first:
            make = lambda model, *_, **__: torch.optim.AdamW(model.parameters(), lr=0.5)  # noqa: E731
            names["Muon"] = SimpleNamespace(for_model=make)
        else:
            methods = {"muonckpt": muonckpt}
            recipe("lightning.md", "def on_train_start(self):", methods)
            names["Net"].on_train_start = methods["on_train_start"]
        model = names["train"]("adamw-run" if is_first else "muon-run", world, "fsdp2")
        return told.getvalue(), sorted(group["lr"] for group in model.trainer.optimizers[0].param_groups)


def test_a_run_begins_from_one_of_adamw_as_the_page_says(tmp_path):
    run(2, begin, str(tmp_path), True)
    told, rates = run(1, begin, str(tmp_path), False)[0]
    counts = "the state of 10 parameters goes on, that of 4 begins at zero; schedules are at their step 1"
    assert told.startswith(f"begun from adamw-run/epoch=0.ckpt: 14 weights loaded; {counts}"), told
    assert rates == pytest.approx([0.7**3 * 3e-3, 0.7**3 * 0.02])


class SettleAlone(Callback):
    """Has one rank end its saves before each micro-batch, as the teardown of a rank that has failed does."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.strategy.global_rank == 1:
            trainer.strategy.settle()


def test_a_rank_settles_its_saves_without_the_others(tmp_path):
    run(2, accumulate, str(tmp_path), 8, None, TWICE["best"], True, [SettleAlone()])
    assert muonckpt.open(tmp_path / "best.ckpt").provenance["step"] == 8


def regrouped(rank: int, world: int, folder: str, resume: str, fresh: list[str]) -> tuple[str, str]:
    """The script, resumed with a matrix moved to AdamW: its error, and its warnings."""
    names = script("lightning.md")
    with as_launched(rank, world), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rules = [Rule("other", "1.up.weight"), MODULE_TYPES]
        names["Muon"] = SimpleNamespace(for_model=partial(Muon.for_model, rules=rules))
        names["MuonckptStrategy"] = partial(names["MuonckptStrategy"], fresh=fresh)
        told = raised(names["train"], folder, world, "fsdp2", resume)
        return told, "\n".join(str(warning.message) for warning in caught)


@pytest.mark.parametrize("ranks", sweep([1, 2], 2))
def test_a_matrix_that_moved_to_adamw_starts_fresh_by_name(uninterrupted, ranks, tmp_path):
    saved = str(uninterrupted["fsdp2", 2][0] / "epoch=0.ckpt")
    told, warned = run(ranks, regrouped, str(tmp_path / "a"), saved, ["net.1.up.w*"])[0]
    assert told == "no error"
    assert "state loaded: 13\nstate starts fresh: 1 (net.1.up.weight)" in warned
    state = muonckpt.open(tmp_path / "a" / "epoch=1.ckpt").tensors
    assert "optimizer_0.state.net.1.up.weight.exp_avg_sq" in state
    told, _ = run(ranks, regrouped, str(tmp_path / "b"), saved, [])[0]
    assert "1 parameter differs: moved from 'muon' to 'adamw': net.1.up.weight" in told


@pytest.mark.parametrize("sizes", [{}, {"data_parallel_size": 2}, {"tensor_parallel_size": 1}])
def test_sizes_that_are_left_to_lightning_are_refused(sizes):
    """It would make all ranks tensor parallel, and each would step over all the data."""
    with pytest.raises(ValueError, match=r"='auto'.*expected two numbers.*tensor_parallel_size=1\) is FSDP2"):
        script("lightning.md")["MuonckptStrategy"](**sizes)
