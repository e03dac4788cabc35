"""accelerate with the script of its page: trained, saved, and resumed on the same and on the other world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import sweep
from support.accelerated import accelerated
from support.pages import distance, script, uninterrupted_runs, whole
from support.workers import run
from torch.distributed.tensor import DTensor

from muonckpt.integrations.saved import check_saved

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed (extra 'integrations')")

KINDS = ["plain", "fsdp2", "fsdp2 full", "plain bf16", "fsdp2 bf16"]


def train(rank: int, world: int, kind: str, folder: str, resume: str | None = None) -> dict[str, Any]:
    """The script; whole parameters, and the names of the state of each."""
    fsdp = "fsdp2" in kind
    with accelerated(rank, world, fsdp):
        arguments = {"mixed_precision": "bf16" if "bf16" in kind else "no"}
        if fsdp:
            arguments["fsdp_plugin"] = accelerate.FullyShardedDataParallelPlugin(
                fsdp_version=2,
                state_dict_type="FULL_STATE_DICT" if "full" in kind else "SHARDED_STATE_DICT",
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["Block"],
                cpu_ram_efficient_loading=False,
            )
        model, optimizer = script("accelerate.md")["train"](folder, resume, **arguments)
        parameters = dict(getattr(model, "module", model).named_parameters())
        return {
            "parameters": {name: whole(parameter) for name, parameter in parameters.items()},
            "slots": {name: sorted(optimizer.state[parameter]) for name, parameter in parameters.items()},
            "sharded": {isinstance(parameter, DTensor) for parameter in parameters.values()},
            "sharing": list(optimizer.optimizer.schedules),
        }


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
    for case in (("plain", 2), ("fsdp2", 2), ("fsdp2", 1), ("fsdp2 full", 2)):
        assert distance(alone, uninterrupted[case][1]) < 2e-5
    assert distance(alone, uninterrupted["plain bf16", 1][1]) > 1e-4, "bf16 is on"


RESUMED = [(kind, *ranks) for kind in KINDS for ranks in ((2, 1), (1, 2), (2, 2), (1, 1))]


@pytest.mark.parametrize(("kind", "saved", "resumed"), sweep(RESUMED, *RESUMED[::3]))
def test_a_resumed_run_goes_on_as_the_uninterrupted_one(uninterrupted, kind, saved, resumed, tmp_path):
    folder, _ = uninterrupted[kind, saved]
    result = run(resumed, train, kind, str(tmp_path / "saved"), str(folder))[0]
    gap = distance(result, uninterrupted[kind, resumed][1])
    if saved == resumed:
        assert gap == 0
    else:
        assert gap < (2e-2 if "bf16" in kind else 2e-5)


def test_what_is_checked_of_a_saved_folder(uninterrupted):
    parts = {kind: {part.name for part in check_saved(uninterrupted[kind, 2][0])} for kind in KINDS}
    assert parts["plain"] == {"saved", "optimizer.bin", "scheduler.bin"}, "weights are in the folder itself"
    assert parts["fsdp2"] == {"pytorch_model_fsdp_0", "optimizer_0", "scheduler.bin"}
    assert parts["fsdp2 full"] == {"pytorch_model_fsdp.bin", "optimizer.bin", "scheduler.bin"}
