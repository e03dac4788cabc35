"""Keys are found as people write them: in full, as patterns, and without their first segments."""

from __future__ import annotations

import json
import re

import pytest
import torch
from support.commands import called

import muonckpt
from muonckpt.names.wording import listed
from muonckpt.optimizer import Muon
from muonckpt.record.record import find_keys, match_keys

KEYS = ["model.layers.3.w1", "model.layers.13.w1", "ema.layers.3.w2", "model.layers.3.w2", "model.odd[0]",
        "optimizer.state.4.momentum_buffer"]  # fmt: skip
NAMES = {KEYS[-1]: ("layers.3.w1.momentum_buffer", "layers.3.w1")}


@pytest.mark.parametrize(
    ("word", "keys"),
    [
        ("model.layers.3.w1", KEYS[:1]),
        ("layers.3.w1", KEYS[:1]),  # not 13, and not the state, whose key does not end with it
        ("3.w2", KEYS[2:4]),
        ("w1", KEYS[:2]),
        ("layers.?.w1", KEYS[:1]),
        ("*w1", KEYS[:2]),
        ("odd[0]", KEYS[4:5]),  # a name in brackets is no set of characters
        ("layers.3.w1.momentum_buffer", KEYS[5:]),
        ("w1.momentum*", KEYS[5:]),
        ("4.momentum_buffer", KEYS[5:]),
        ("w3", []),
        ("ayers.3.w1", []),
    ],
)
def test_a_key_is_found_by_its_last_segments_or_by_its_parameter(word, keys):
    assert find_keys(word, KEYS, NAMES) == keys


def test_a_parameter_means_its_state_where_there_is_no_weight():
    assert find_keys("layers.3.w1", KEYS[1:], NAMES) == KEYS[5:]


def test_a_word_that_may_be_several_keys_is_refused_and_lists_them():
    with pytest.raises(muonckpt.TargetError, match=r"2 tensors: ema\.layers\.3\.w2, model\.layers\.3\.w2"):
        match_keys(["3.w2"], KEYS)
    assert match_keys(["*3.w2", "3.w1"], KEYS) == {*KEYS[2:4], KEYS[0]}
    assert match_keys([], KEYS) == {*KEYS}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Save a model, and its state by numbers, whose names the manifest records."""
    path = tmp_path_factory.mktemp("keys")
    model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4, bias=False) for name in ("up", "down")})
    opt = Muon([{"params": list(model.named_parameters()), "algorithm": "muon"}])
    sum(p.sum() for p in model.parameters()).backward()
    opt.step()
    muonckpt.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, path / "a")
    return path


def test_every_command_takes_such_keys(saved, tmp_path):
    a = saved / "a"
    # A part of a key means the tensor that ends with it.
    tensors = json.loads(called("inspect", a, "up.weight", "--json").stdout)
    assert [tensor["key"] for tensor in tensors] == ["model.up.weight"]
    page = called("inspect", a, "--tensor", "up.weight")
    assert page.stdout.startswith("model.up.weight: 4 x 4"), page.stderr
    difference = json.loads(called("diff", a, a, "down.weight", "--json").stdout)
    assert [tensor["key"] for tensor in difference["tensors"]] == ["model.down.weight"]
    statistics = json.loads(called("stats", a, "down.weight", "--json").stdout)
    assert [tensor["key"] for tensor in statistics["tensors"]] == ["model.down.weight"]
    assert called("reshard", a, tmp_path / "b", "--mesh", "dp=2", "--select", "up.weight").returncode == 0
    assert [*muonckpt.open(tmp_path / "b").tensors] == ["model.up.weight"]
    # A parameter and a slot mean a state that is stored by number.
    momentum = called("inspect", a, "--tensor", "up.weight.momentum_buffer[2:, 1]", "--json")
    entry = json.loads(momentum.stdout)
    assert re.fullmatch(r"optimizer\.state\.[01]\.momentum_buffer", entry["key"]) and entry["name"] == "up.weight"
    for command in (["diff", a, a], ["stats", a]):
        answer = json.loads(called(*command, "up.weight.momentum_buffer", "--json").stdout)
        assert [tensor["key"] for tensor in answer["tensors"]] == [entry["key"]]
    # A part of several keys is refused.
    refusal = called("inspect", a, "--tensor", "weight")
    assert refusal.returncode == 2 and "model.down.weight" in refusal.stderr.replace("\n", " ")


def test_a_list_counts_what_it_does_not_show():
    assert [listed([], 2), listed("ab", 2), listed(range(3), 2)] == ["", "a, b", "0, 1 and 1 more"]
    assert listed("abc", 1, "; ") == "a; and 2 more" and listed("abc", 1, "\n- ") == "a\n- and 2 more"
    assert listed("abc", 2, " and ") == "a and b and 1 more"
    with pytest.raises(
        muonckpt.TargetError, match=r"may be each of 12 tensors: x0\.w, .*, x4\.w and 7 more; write more"
    ):
        match_keys(["w"], [f"x{number}.w" for number in range(12)])
