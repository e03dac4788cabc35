"""accelerate with the script of its page: trained, saved, and resumed on the same and on the other world."""

from __future__ import annotations

import shutil
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import sweep
from support.accelerated import accelerated
from support.pages import distance, script, uninterrupted_runs, whole
from support.workers import run
from torch.distributed.tensor import DTensor

from muonckpt.integrations.saved import check_saved

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed (extra 'integrations')")

KINDS = ["plain", "fsdp2", "fsdp2 bf16", "plain states", "fsdp2 states", "fsdp2 full states"]


def train(
    rank: int, world: int, kind: str, folder: str, begin_from: str | None = None, method: str = "muon"
) -> dict[str, Any]:
    """The script; whole parameters, and the names of the state of each."""
    fsdp = "fsdp2" in kind
    with accelerated(rank, world, fsdp), redirect_stdout(StringIO()) as told:
        arguments = {"mixed_precision": "bf16" if "bf16" in kind else "no"}
        if fsdp:
            arguments["fsdp_plugin"] = accelerate.FullyShardedDataParallelPlugin(
                fsdp_version=2,
                state_dict_type="FULL_STATE_DICT" if "full" in kind else "SHARDED_STATE_DICT",
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["Block"],
                cpu_ram_efficient_loading=False,
            )
        names = script("accelerate.md")
        if "states" in kind:
            accelerators: list[Any] = []
            names["Accelerator"] = lambda **options: (
                accelerators.append(accelerate.Accelerator(**options)) or (accelerators[0])
            )
            names["muonckpt"] = SimpleNamespace(Series=lambda folder, *_, **__: States(accelerators[0], Path(folder)))
        if method == "adamw":
            make = lambda model, *_, **__: torch.optim.AdamW(model.parameters(), lr=0.5)  # noqa: E731
            names["Muon"] = SimpleNamespace(for_model=make)
        if begin_from is not None:
            names["SAVE_AFTER"] = 9
        model, optimizer = names["train"](folder, begin_from, **arguments)
        parameters = dict(getattr(model, "module", model).named_parameters())
        return {
            "parameters": {name: whole(parameter) for name, parameter in parameters.items()},
            "slots": {name: sorted(optimizer.state[parameter]) for name, parameter in parameters.items()},
            "sharded": {isinstance(parameter, DTensor) for parameter in parameters.values()},
            "sharing": list(getattr(optimizer.optimizer, "schedules", ())),
            "rates": sorted(float(group["lr"]) for group in optimizer.param_groups),
            "told": told.getvalue(),
        }


@dataclass
class States:
    """What accelerate's own ``save_state`` and ``load_state`` do in place of the script's series."""

    accelerator: Any
    folder: Path

    def resume(self, begin_from: str | None) -> int:
        if not self.folder.exists():
            return 0
        self.accelerator.load_state(str(self.folder))
        return 6

    def save(self, batch: int) -> None:
        self.accelerator.save_state(str(self.folder))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            check_saved(self.folder)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[tuple[str, int], tuple[Path, dict[str, Any]]]:
    return uninterrupted_runs(train, KINDS, lambda: tmp_path_factory.mktemp("run") / "saved")


def test_matrices_are_stepped_by_muon_and_the_rest_by_adamw(uninterrupted):
    for (kind, world), (_, result) in uninterrupted.items():
        for name, slots in result["slots"].items():
            matrix = name.endswith(("up.weight", "down.weight"))
            assert slots == (["momentum_buffer"] if matrix else ["exp_avg", "exp_avg_sq", "step"]), name
        assert result["sharded"] == {"fsdp2" in kind}
        assert result["sharing"] == [tuple(range(world))], "ranks share the matrices out"


def test_two_ranks_train_as_one_process(uninterrupted):
    _, alone = uninterrupted["plain", 1]
    for case in (("plain", 2), ("fsdp2", 2), ("fsdp2", 1), ("plain states", 2), ("fsdp2 full states", 2)):
        assert distance(alone, uninterrupted[case][1]) < 2e-5
    assert distance(alone, uninterrupted["fsdp2 bf16", 1][1]) > 1e-4, "bf16 is on"


RESUMED = [(kind, *ranks) for kind in KINDS for ranks in ((2, 1), (1, 2), (2, 2), (1, 1))]


@pytest.mark.parametrize(("kind", "saved", "resumed"), sweep(RESUMED, *RESUMED[::3]))
def test_a_resumed_run_goes_on_as_the_uninterrupted_one(uninterrupted, kind, saved, resumed, tmp_path):
    shutil.copytree(uninterrupted[kind, saved][0], tmp_path / "saved")
    result = run(resumed, train, kind, str(tmp_path / "saved"))[0]
    if "states" not in kind:
        assert result["told"].startswith(f"resumed from step 5, saved on {saved} rank"), result["told"]
        assert f", now {resumed}, proved: 48 tensors and " in result["told"]
        assert "not checked" not in result["told"]
    gap = distance(result, uninterrupted[kind, resumed][1])
    if saved == resumed:
        assert gap == 0
    else:
        assert gap < (2e-2 if "bf16" in kind else 2e-5)


def test_what_is_checked_of_a_saved_folder(uninterrupted):
    parts = {kind: {part.name for part in check_saved(uninterrupted[kind, 2][0])} for kind in KINDS if "states" in kind}
    assert parts["plain states"] == {"saved", "optimizer.bin", "scheduler.bin"}, "weights are in the folder itself"
    assert parts["fsdp2 states"] == {"pytorch_model_fsdp_0", "optimizer_0", "scheduler.bin"}
    assert parts["fsdp2 full states"] == {"pytorch_model_fsdp.bin", "optimizer.bin", "scheduler.bin"}


@pytest.mark.parametrize(("kind", "saved", "begun"), [("plain", 2, 1), ("fsdp2", 1, 2)])
def test_a_run_begins_from_one_of_adamw_and_goes_on_from_its_own_steps(kind, saved, begun, tmp_path):
    run(saved, train, kind, str(tmp_path / "adamw"), None, "adamw")
    other = str(tmp_path / "adamw" / "step-00000005")
    result = run(begun, train, kind, str(tmp_path / "muon"), other)[0]
    assert result["told"].startswith(f"begun from {other}: "), result["told"]
    assert (
        "the state of 10 parameters goes on, that of 4 begins at zero; schedules are at their step 3" in result["told"]
    )
    assert result["rates"] == [0.5 * 3e-3, 0.5 * 0.02]
    again = run(begun, train, kind, str(tmp_path / "muon"), other)[0]
    assert again["told"].startswith("resumed from step 9, saved on ") and ", proved: 48 tensors" in again["told"]
    assert distance(again, result) == 0
