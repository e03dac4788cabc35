"""Codes of 8 bits are moved bit for bit, and never taken for numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import muonckpt
from muonckpt.names.errors import SourceError
from muonckpt.optimizer import Muon

SLOTS = ["momentum_buffer", "exp_avg", "exp_avg_sq"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two checkpoints of a run."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 16, bias=False), nn.Linear(16, 8))
    matrices = {"params": [net[0].weight, net[1].weight], "momentum_dtype": "8bit", "block_size": 16}
    rest = {"params": [net[1].bias], "algorithm": "adamw", "lr": 1e-3, "state_dtype": "8bit"}
    opt, folder = Muon([matrices, rest]), tmp_path_factory.mktemp("run")
    for step in range(2):
        net(torch.randn(5, 64)).square().mean().backward()
        opt.step()
        weights, state = get_state_dict(net, opt)
        muonckpt.save({"model": weights, "optimizer": state}, folder / str(step))
    return [folder / "0", folder / "1"]


def test_a_reshard_changes_no_bit(saved, tmp_path):
    muonckpt.reshard(saved[1], tmp_path / "cut", mesh={"dp": 3})
    with muonckpt.open(tmp_path / "cut") as moved, muonckpt.open(saved[1]) as before:
        kept = [key for key in before.tensors if key.endswith(("_codes", "_scales"))]
        assert len(kept) == 2 * (2 + 2)
        for key in kept:
            assert np.array_equal(moved.tensors[key].bits(), before.tensors[key].bits()), key


def test_other_programs_and_averages_refuse_it(saved, tmp_path):
    for program in ("torch", "dion", "dcp"):
        with pytest.raises(SourceError, match="has momentum_buffer_codes: state in 8 bits, which other programs"):
            muonckpt.convert(saved[1], tmp_path / program, to_dialect=program)
    average = muonckpt.Average(others_from="last")
    with pytest.raises(SourceError, match="part of state in 8 bits, which is not averaged: leave it out by `model_on"):
        muonckpt.merge(saved, tmp_path / "average", average=average)


def test_a_plan_counts_its_matrices(saved):
    found = muonckpt.forecast([{"dp": 2}], checkpoint=saved[1])
    assert found.topologies[0].matrices == 2


def test_inspect_knows_the_methods(saved):
    found = muonckpt.inspect(saved[1])
    assert {row["method"]: row["parameters"] for row in found.optimizer} == {"muon": 2, "adamw": 1}
    assert found.step == 2


def test_inspect_counts_codes_where_their_averages_belong(saved):
    roles = {row["role"]: row for row in muonckpt.inspect(saved[1]).roles}
    assert roles["momentum"]["tensors"] == 2
    assert roles["momentum"]["slots"] == ("momentum_buffer_codes",)
    assert roles["moments"]["slots"] == ("exp_avg_codes", "exp_avg_sq_codes")
    assert roles["other state"]["slots"] == ("momentum_buffer_scales", "exp_avg_scales", "exp_avg_sq_scales")


def test_stats_measure_scales_and_no_codes(saved):
    measured = {tensor.key.rpartition(".")[2] for tensor in muonckpt.stats(saved[1]).tensors}
    assert {f"{slot}_scales" for slot in SLOTS} <= measured
    assert not {f"{slot}_codes" for slot in SLOTS} & measured
