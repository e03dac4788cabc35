"""State of a method from outside: every tool knows it from what the checkpoint says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import muonckpt
from muonckpt import SourceError
from muonckpt.optimizer import MatrixMethod, MethodSlot, Muon, Option, WholeMatrix


def added_up(whole: WholeMatrix) -> torch.Tensor:
    whole.state["squares"].add_(whole.matrix.square())
    whole.state["rows"].add_(1)
    return whole.matrix


MINE = MatrixMethod(
    "mine",
    added_up,
    slots={"squares": MethodSlot(), "rows": MethodSlot("[m, 1]")},
    options={"width": Option(3)},
    takes="gradient",
)


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, dict]:
    model = nn.ModuleDict({"up": nn.Linear(3, 5), "down": nn.Linear(5, 3)})
    matrices, vectors = ([p for p in model.parameters() if p.ndim == dims] for dims in (2, 1))
    opt = Muon([{"params": matrices, "algorithm": MINE}, {"params": vectors, "algorithm": "adamw", "lr": 0.1}])
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    opt.step()
    weights, state = get_state_dict(model, opt)
    state = {"model": weights, "optimizer": state}
    muonckpt.save(state, tmp_path / "run")
    return tmp_path / "run", state


def test_inspect_names_the_method_and_its_slots_and_stats_measures_them(run):
    inspection = muonckpt.inspect(run[0])
    assert {"method": "mine", "parameters": 2, "matrices": 2} in [dict(row) for row in inspection.optimizer]
    assert not inspection.symptoms
    assert {"squares", "rows"} <= {row["slot"] for row in inspection.slots}
    measured = {tensor.key for tensor in muonckpt.stats(run[0]).tensors}
    assert {f"optimizer.state.{name}.weight.squares" for name in ("up", "down")} <= measured


@pytest.mark.parametrize("algorithm", ["muon", MINE], ids=["as stored", "given"])
def test_plan_knows_its_state_from_the_checkpoint(run, algorithm):
    """Gradients, squares and rows of four bytes travel to owners and back."""
    [alone, shared] = muonckpt.lab.plan([{"dp": 1}, {"dp": 2}], checkpoint=run[0], algorithm=algorithm).topologies
    assert alone.matrices == 2 and not alone.padding
    assert alone.checkpoint["bytes"] == shared.checkpoint["bytes"] == muonckpt.inspect(run[0]).bytes
    biases = 8 * 4 * 2 + 4 + 4
    assert alone.memory["state"] == 4 * (15 + 15 + 5 + 3) + biases
    notes = 2 * 2 * 16
    # Two or three of five rows of seven numbers leave their rank, one or two of three rows of eleven.
    sent = {2 * 4 * (up * (3 + 3 + 1) + down * (5 + 5 + 1)) + notes for up in (2, 3) for down in (1, 2)}
    assert shared.sent["mean"] * 2 in sent


def test_a_conversion_keeps_it_and_no_other_program_takes_it(run, tmp_path):
    muonckpt.convert(run[0], tmp_path / "again", to_dialect="muonckpt")
    assert not muonckpt.diff(run[0], tmp_path / "again").differs
    with pytest.raises(SourceError, match="dion has no place for mine with rows, squares"):
        muonckpt.convert(run[0], tmp_path / "other", to_dialect="dion")


def test_it_begins_anew_as_zeros(run):
    path, state = run
    report = muonckpt.load(state, path, fresh=["up.*"])
    assert report.fresh == ("up.bias", "up.weight")
    slots = state["optimizer"]["state"]
    assert not slots["up.weight"]["squares"].any() and not slots["up.weight"]["rows"].any()
    assert slots["down.weight"]["squares"].any()
