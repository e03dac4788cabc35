"""muonckpt.load with grow=[GLOB, ...]: the saved rows are loaded with their state, and new ones begin."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.leaves import leaves
from support.regrouped import whole
from support.workers import run
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import muonckpt
from muonckpt.optimizer import Muon

ROWS, MORE = 7, 11
GROW = ["embed.weight", "head.*"]
FORMS = {form: StateDictOptions(flatten_optimizer_state_dict=form == "flat") for form in ("nested", "flat")}
STATE = {
    "embed.weight": {"exp_avg", "exp_avg_sq", "step"},
    "head.weight": {"momentum_buffer", "second_moment"},
    "head.bias": {"exp_avg", "exp_avg_sq", "step"},
    "up.weight": {"momentum_buffer"},
}

Tensors = dict[str, torch.Tensor]


class Net(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embed, self.up, self.head = nn.Embedding(rows, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, rows)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.up(self.embed(tokens))).square().mean()


def build(rows: int, seed: int, dim: int = 0) -> tuple[nn.Module, Muon]:
    torch.manual_seed(seed)
    model = Net(rows)
    if dist.is_initialized():
        fully_shard(model, shard_placement_fn=lambda parameter: Shard(dim if parameter.ndim > 1 else 0))
    adamw = {"params": [model.embed.weight, model.head.bias], "algorithm": "adamw", "lr": 1e-3}
    groups = [adamw, {"params": [model.head.weight], "algorithm": "normuon"}, {"params": [model.up.weight]}]
    optimizer = Muon(groups, lr=0.02, ns_dtype="float32")
    model(torch.arange(rows)).backward()
    optimizer.step()
    return model, optimizer


def template(model: nn.Module, optimizer: Muon, form: str) -> dict[str, Any]:
    weights, state = get_state_dict(model, optimizer, options=FORMS[form])
    return {"model": weights, "optimizer": state}


def tensors(model: nn.Module, optimizer: Muon) -> dict[tuple[str, str], torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        found |= {(name, slot): whole(value) for slot, value in optimizer.state[parameter].items()}
        found[name, "weight"] = whole(parameter)
    return found


def save(rank: int, world: int, folder: str) -> dict[tuple[str, str], torch.Tensor]:
    model, optimizer = build(ROWS, 0)
    for form in FORMS:
        muonckpt.save(template(model, optimizer, form), f"{folder}/{form}")
        muonckpt.Series(f"{folder}/{form}-run").save(5, template(model, optimizer, form))
    return tensors(model, optimizer)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, dict[tuple[str, str], torch.Tensor]]:
    folder = tmp_path_factory.mktemp("grow")
    return folder, run(2, save, str(folder))[0]


def grow(rank: int, world: int, folder: str, form: str, dim: int) -> tuple[Any, ...]:
    """Load into a model with more rows; return what it had before and has then, the report and the proof."""
    model, optimizer = build(MORE, 1, dim)
    before, state_dict = tensors(model, optimizer), template(model, optimizer, form)
    restored = muonckpt.Series(f"{folder}/{form}-run").restore(state_dict, grow=GROW, attest=True)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state_dict["model"],
        optim_state_dict=state_dict["optimizer"],
        options=FORMS[form],
    )
    return before, tensors(model, optimizer), restored.report, restored.check(model, optimizer)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("ranks", "dim"), [(1, 0), (3, 0), (3, 1)])
def test_saved_rows_are_loaded_bit_for_bit_and_new_ones_begin(ranks, dim, form, saved):
    folder, truth = saved
    for before, after, report, proof in run(ranks, grow, str(folder), form, dim):
        assert {name: {slot for of, slot in after if of == name} - {"weight"} for name in STATE} == STATE
        for (name, slot), value in after.items():
            old = truth[name, slot]
            if value.shape == old.shape:
                assert torch.equal(value, old), (name, slot)
                continue
            assert value.shape[0] == MORE and torch.equal(value[:ROWS], old), (name, slot)
            new = before[name, slot][ROWS:] if slot == "weight" else torch.zeros_like(value[ROWS:])
            assert torch.equal(value[ROWS:], new), (name, slot)
        assert report.grown == ("embed.weight", "head.bias", "head.weight") and len(report.loaded) == 4
        assert "grown, new rows begin: 3 (" in str(report) and not report.kept
        assert proof.equal and "proved" in str(proof)
        [grown] = [part for part in proof.unchecked if part.endswith(", which have grown")]
        assert "model.embed.weight" in grown


def refusal(state: dict[str, Any], path: Path, **arguments: Any) -> str:
    before = leaves(state)
    with pytest.raises(muonckpt.SourceError) as refused:
        muonckpt.load(state, path, **arguments)
    assert leaves(state) == before
    return str(refused.value)


@pytest.mark.parametrize("form", FORMS)
def test_the_error_names_what_has_grown_and_its_cure_loads(form, saved):
    folder, truth = saved
    model, optimizer = build(MORE, 1)
    state = template(model, optimizer, form)
    told = refusal(state, folder / form)
    assert "'model.embed.weight' has shape (7, 6), expected (11, 6)" in told and "fresh" not in told
    [globs] = re.findall(r"If the new rows are meant: muonckpt.load\(\.\.\., grow=(\[.*\])\)$", told)
    assert muonckpt.load(state, folder / form, grow=eval(globs)).grown
    assert torch.equal(state["model"]["embed.weight"][:ROWS], truth["embed.weight", "weight"])


def refused_with_more_rows(rank: int, world: int, folder: str) -> str:
    return refusal({"w": torch.zeros(5, 2)}, Path(folder))


def test_all_ranks_hear_which_name_grow_takes(tmp_path):
    muonckpt.save({"w": torch.zeros(3, 2)}, tmp_path / "c")
    for message in run(2, refused_with_more_rows, str(tmp_path / "c")):
        assert "grow=['w']" in message


def test_fewer_rows_and_other_columns_are_refused(saved):
    smaller = template(*build(ROWS - 1, 1), "nested")
    told = refusal(smaller, saved[0] / "nested", grow=["*"])
    assert "'model.embed.weight' has shape (7, 6), expected (6, 6)" in told and "new rows are meant" not in told
    wider = template(*build(MORE, 1), "nested")
    wider["model"]["embed.weight"] = torch.zeros(MORE, 9)
    assert "has shape (7, 6), expected (11, 9)" in refusal(wider, saved[0] / "nested", grow=GROW)


def test_the_same_script_starts_again_once_the_rows_are_saved(tmp_path):
    state = template(*build(MORE, 1), "nested")
    muonckpt.save(state, tmp_path / "c")
    again = template(*build(MORE, 2), "nested")
    assert not muonckpt.load(again, tmp_path / "c", grow=GROW).grown
    assert leaves(again) == leaves(state)


def test_a_glob_of_no_tensor_and_a_string_are_errors(saved):
    state = template(*build(MORE, 1), "nested")
    told = refusal(state, saved[0] / "nested", grow=[*GROW, "upper.*"])
    assert "grow='upper.*' matches no tensor that is loaded" in told
    with pytest.raises(TypeError, match=r"grow='\*': expected a list of globs, such as grow=\['\*'\]"):
        muonckpt.load(state, saved[0] / "nested", grow="*")


def test_masters_do_not_grow_as_zeros_would_be_their_new_weights(tmp_path):
    def state(rows: int) -> dict[str, Any]:
        slots = {"exp_avg": torch.ones(rows, 2), "fp32_param": torch.ones(rows, 2)}
        return {"optimizer": {"state": {"w": slots}, "param_groups": [{"params": ["w"], "lr": 1.0}]}}

    muonckpt.save(state(3), tmp_path / "c")
    told = refusal(state(4), tmp_path / "c", grow=["w"])
    assert "'w' cannot grow: it is not known how new rows of its fp32_param begin" in told
    assert "grow=" not in refusal(state(4), tmp_path / "c")


class Tied(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(rows, 4), nn.Linear(4, rows, bias=False)
        self.head.weight = self.embed.weight


def test_a_tied_vocabulary_grows_once(tmp_path):
    small, large = Tied(ROWS), Tied(MORE)
    muonckpt.save({"model": small.state_dict()}, tmp_path / "c")
    new = large.embed.weight[ROWS:].detach().clone()
    state = {"model": large.state_dict()}
    told = refusal(state, tmp_path / "c")
    report = muonckpt.load(state, tmp_path / "c", grow=eval(told.partition("grow=")[2].rstrip(")")))
    assert report.grown == ("embed.weight", "head.weight")
    assert torch.equal(large.head.weight, torch.cat([small.embed.weight, new]))


def test_numbered_state_does_not_grow_under_the_name_of_a_slot(tmp_path):
    def objects(rows: int) -> dict[str, Any]:
        model = nn.Linear(4, rows, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    muonckpt.save(objects(3), tmp_path / "c")
    with pytest.raises(muonckpt.SourceError, match=r"'optimizer.state.0.momentum_buffer' has shape \(3, 4\)") as told:
        muonckpt.load(objects(5), tmp_path / "c", grow=["*"])
    assert "new rows are meant" not in str(told.value)


def test_state_without_groups_grows_with_new_rows_of_zeros(tmp_path):
    def state(rows: int, value: float) -> dict[str, Any]:
        return {"optimizer": {"state": {"w": {"exp_avg": torch.full((rows, 2), value)}}}}

    muonckpt.save(state(3, 1.0), tmp_path / "c")
    larger = state(5, 7.0)
    assert muonckpt.load(larger, tmp_path / "c", grow=["w"]).grown == ("w",)
    assert larger["optimizer"]["state"]["w"]["exp_avg"].tolist() == [[1, 1]] * 3 + [[0, 0]] * 2
