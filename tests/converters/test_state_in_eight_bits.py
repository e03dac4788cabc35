"""State in 8 bits, as earlier versions wrote it, is refused by name wherever state is read."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import muonckpt
from muonckpt.names.errors import SourceError
from muonckpt.optimizer import Muon


def made() -> tuple[nn.Module, Muon]:
    model = nn.Linear(64, 16, bias=False)
    return model, Muon([{"params": [("weight", model.weight)]}])


@pytest.fixture
def saved(tmp_path):
    model, optimizer = made()
    weights, state = get_state_dict(model, optimizer)
    codes, scales = torch.ones(16, 64, dtype=torch.int8), torch.ones(16, 4)
    state["state"]["weight"] = {"momentum_buffer_codes": codes, "momentum_buffer_scales": scales}
    state["param_groups"][0] |= {"momentum_dtype": "8bit", "block_size": 16, "rounding_seed": 5, "steps_taken": 2}
    muonckpt.save({"model": weights, "optimizer": state}, tmp_path / "saved")
    return tmp_path / "saved", weights, state


READERS = {
    "inspect": lambda path, out: muonckpt.inspect(path),
    "stats": lambda path, out: muonckpt.stats(path),
    "forecast": lambda path, out: muonckpt.lab.plan([{"dp": 2}], checkpoint=path),
    "reshard": lambda path, out: muonckpt.reshard(path, out, mesh={"dp": 3}),
    "convert": lambda path, out: muonckpt.convert(path, out, to_dialect="torch"),
}


@pytest.mark.parametrize("reader", READERS)
def test_offline_commands_refuse_it(reader, saved, tmp_path):
    with pytest.raises(SourceError, match=r"'weight' has momentum_buffer_codes: state in 8 bits, which is not read"):
        READERS[reader](saved[0], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_loads_refuse_it_and_what_the_message_says_takes_the_weights(saved):
    path, expected, saved_state = saved
    model, optimizer = made()
    weights, state = get_state_dict(model, optimizer)
    with pytest.raises(SourceError, match=r"momentum_buffer_codes.*: state in 8 bits, which is not read"):
        muonckpt.load({"model": weights, "optimizer": state}, path)
    saved_state["state"] = {0: saved_state["state"]["weight"]}
    saved_state["param_groups"][0]["params"] = [0]
    with pytest.raises(ValueError, match=r"momentum_buffer_codes.*: state in 8 bits, which is not read"):
        optimizer.load_state_dict(saved_state)
    state["state"]["weight"]["momentum_buffer"].fill_(3)
    muonckpt.load({"model": weights, "optimizer": state}, path, fresh=["*"])
    assert torch.equal(weights["weight"], expected["weight"])
    assert not state["state"]["weight"]["momentum_buffer"].any()
