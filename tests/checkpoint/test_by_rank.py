"""Items that are no tensors and differ from rank to rank: each rank has its value back, or is told that it has none."""

from __future__ import annotations

import ast
import math
import random
import re
import shutil
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.commands import called
from support.workers import run

import muonckpt
from muonckpt import LayoutError, MuonckptError, SourceError


def state_of(rank: int) -> dict[str, Any]:
    """What differs stands beside what does not, at every depth."""
    dice = random.Random(rank)
    return {
        "model": {"w": torch.arange(6.0), "extra": {"seen": rank}},
        "loader": {"shard": rank, "offset": 1000 + 7 * rank, "epoch": 3, "buffer": [rank, [rank, "x"]]},
        "random": {"python": dice.getstate(), "numpy": ("MT19937", list(range(rank, rank + 5)), 1, 0.5)},
        "run": {"step": 40, "loss": math.nan, "best": [math.nan, 1.0], "time": 1e9 + rank, "name": "x", "none": None},
        "mixed": rank or None,
    }


def emptied(state: Any) -> Any:
    """A template."""
    if isinstance(state, dict):
        return {key: emptied(value) for key, value in state.items()}
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else None


def shown(state: dict[str, Any]) -> str:
    return repr({**state, "model": {**state["model"], "w": state["model"]["w"].tolist()}})


WAYS = ("save", "async_save", "Series", "redistribute")


def back(rank: int, world: int, folder: str, way: str) -> str:
    source, target = state_of(rank), emptied(state_of(rank))
    match way:
        case "save":
            muonckpt.save(source, f"{folder}/c")
            muonckpt.load(target, f"{folder}/c", attest=True)
        case "async_save":
            saving = muonckpt.async_save(source, f"{folder}/c")
            source["loader"]["offset"] = source["loader"]["buffer"][0] = -1
            saving.result()
            source = state_of(rank)
            muonckpt.load(target, f"{folder}/c", check="while")
        case "Series":
            for step in (1, 2):
                muonckpt.Series(folder).save(step, source)
            muonckpt.Series(folder).restore(target)
        case "redistribute":
            muonckpt.redistribute(source, target)
    return "as it was" if shown(target) == shown(source) else shown(target)


@pytest.mark.parametrize("way", WAYS)
def test_each_rank_has_its_values_back(way, tmp_path):
    assert run(3, back, str(tmp_path), way) == ["as it was"] * 3


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("by_rank")
    assert run(2, back, str(folder), "save") == ["as it was"] * 2
    return folder / "c"


def test_what_differs_is_there_for_each_rank_and_what_does_not_once(saved):
    with muonckpt.open(saved) as checkpoint:
        items = dict(checkpoint.items)
    ranks = [{key.split(".", 2)[2] for key in items if key.startswith(f"by_rank.{rank}-of-2.")} for rank in range(2)]
    differing = {"model.extra.seen", "loader.shard", "loader.offset", "loader.buffer", "random.python", "random.numpy"}
    assert ranks[0] == ranks[1] == differing | {"run.time", "mixed"}
    assert items["by_rank.1-of-2.loader.offset"] == 1007 and items["loader.offset"] == 1000
    assert muonckpt.verify(saved).verdict == "whole"
    template = emptied(state_of(0))
    del template["random"]
    dcp.load(template, checkpoint_id=saved, no_dist=True)
    assert template["loader"] == state_of(0)["loader"] and template["model"]["w"].tolist() == [*range(6)]


def resumed(rank: int, world: int, path: str, lines: str) -> str:
    """Load, after these lines of advice; what was loaded, or the error."""
    state_dict = emptied(state_of(rank))
    arguments = {"allow_extra": False}
    if lines:
        parts, globs = re.fullmatch(r"leave (.*) out of the state dict, with allow_extra=(\[.*\])", lines).groups()
        for key in re.findall("'(.*?)'", parts):
            *parents, leaf = key.split(".")
            node = state_dict
            for parent in parents:
                node = node[parent]
            del node[leaf]
        arguments["allow_extra"] = ast.literal_eval(globs)
    try:
        muonckpt.load(state_dict, path, **arguments)
    except MuonckptError as error:
        return str(error)
    return repr((state_dict["loader"], state_dict["model"]["w"].tolist(), state_dict["run"], "mixed" in state_dict))


@pytest.mark.parametrize("world", [1, 3])
def test_another_number_of_ranks_is_told_what_to_write(saved, world):
    (told,) = {*run(world, resumed, str(saved), "")}
    assert f"'loader.buffer' and 7 more differ from rank to rank: 2 ranks saved a value each, and {world} load" in told
    assert "extra key" not in told and "missing" not in told
    (lines,) = re.findall("To go on without, (.*);", told)
    assert "'random'" in lines and "'loader.offset', " in lines
    run_of_all = {key: value for key, value in state_of(0)["run"].items() if key != "time"}
    expected = repr(({"epoch": 3}, [*map(float, range(6))], run_of_all, False))
    assert run(world, resumed, str(saved), lines) == [expected] * world


def test_values_of_other_ranks_are_loaded_by_their_keys(saved):
    template = {"by_rank": {"1-of-2": {"loader": {"offset": None}}}}
    muonckpt.load(template, saved, allow_extra=True)
    assert template == {"by_rank": {"1-of-2": {"loader": {"offset": 1007}}}}
    with pytest.raises(LayoutError, match="rename 'by_rank' in the state dict"):
        muonckpt.save({**template, "loader": {"offset": 1}}, saved.parent / "again")


def reloaded(rank: int, world: int, path: str) -> bool:
    target = emptied(state_of(rank))
    muonckpt.load(target, path)
    return shown(target) == shown(state_of(rank))


def test_they_survive_a_reshard_and_a_lost_manifest(saved, tmp_path):
    assert called("reshard", saved, tmp_path / "resharded", "--mesh", "a=4", "--shard", "*=a:0").returncode == 0
    assert run(2, reloaded, str(tmp_path / "resharded")) == [True, True]
    shutil.copytree(saved, tmp_path / "stock")
    (tmp_path / "stock" / "muonckpt.json").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run(2, reloaded, str(tmp_path / "stock")) == [True, True]


def some(rank: int, world: int, path: str, way: str) -> str:
    """Ranks 1 and 2 have a value; rank 0, or a fourth rank, asks for one, too."""
    source = {"w": torch.ones(2), **({"offset": rank} if 0 < rank < 3 else {})}
    target: dict[str, Any] = {"w": torch.zeros(2), "offset": None}
    if way == "not all ask":
        target = {"w": torch.zeros(2), **({"offset": None} if rank == 1 else {})}
    try:
        if way == "redistribute":
            muonckpt.redistribute(source, target)
        else:
            muonckpt.save(source, path)
            muonckpt.load(target, path)
    except SourceError as error:
        return str(error)
    return "no error"


def test_a_rank_that_has_no_value_is_refused_and_a_value_that_no_rank_takes_is_told(tmp_path):
    words = "'offset' differ from rank to rank: 2 of 4 ranks saved a value each, and 4 load, some without one"
    for way in ("load", "redistribute"):
        assert all(words in told for told in run(4, some, str(tmp_path / way), way))
    assert all("extra key 'by_rank." in told for told in run(3, some, str(tmp_path / "c"), "not all ask"))


def on_and_off(rank: int, world: int, folder: str) -> list[Any]:
    """Save again and again what differs now and then; what came back."""
    told = []
    for step, differs in enumerate((False, True, False, True, True)):
        muonckpt.save({"w": torch.ones(2), "x": rank * differs + 10 * step}, f"{folder}/{step}")
        target = {"w": torch.zeros(2), "x": None}
        muonckpt.load(target, f"{folder}/{step}")
        told.append(target["x"])
    return told


def test_what_differs_now_and_then_is_never_taken_for_alike(tmp_path):
    assert run(2, on_and_off, str(tmp_path)) == [[0, 10, 20, 30, 40], [0, 11, 20, 31, 41]]


def lists_and_numbers(rank: int, loaded: bool) -> dict[str, Any]:
    """What differs stands in lists beside tensors, and under keys that are numbers; as it is, or a template of it."""
    value, milestones = (None, Counter({3: 0, 5: 0})) if loaded else (rank, Counter({3: 2, 5: 1}))
    fill = torch.zeros if loaded else torch.ones
    return {"workers": [fill(2), value, {"seen": [fill(1), [{2: value, 4: 5}]]}], "rates": {"milestones": milestones}}


def listed_back(rank: int, world: int, folder: str, way: str) -> str:
    source, target = lists_and_numbers(rank, False), lists_and_numbers(rank, True)
    if way == "redistribute":
        muonckpt.redistribute(source, target)
    else:
        series = muonckpt.Series(folder)
        series.save(1, source)
        series.restore(target)
        series.save(2, target)  # what was loaded can be saved
    return "as it was" if repr(target) == repr(source) else repr(target)


@pytest.mark.parametrize("way", ["save", "redistribute"])
def test_values_in_lists_and_under_numbers_come_back(way, tmp_path):
    assert run(2, listed_back, str(tmp_path), way) == ["as it was"] * 2


def set_saved(rank: int, world: int, path: str) -> None:
    epochs = set(range(0, 9, 8) if rank else range(8, -1, -8))  # 0 and 8, in the order in which they were added
    muonckpt.save({"w": torch.ones(2), "epochs": epochs, "shards": {rank, 8}}, path)


def test_equal_sets_are_one_value_whatever_their_order_is(tmp_path):
    assert [*set(range(0, 9, 8))] != [*set(range(8, -1, -8))]
    run(2, set_saved, str(tmp_path / "c"))
    template: dict[str, Any] = {"epochs": None}
    muonckpt.load(template, tmp_path / "c", allow_extra=True)  # in one process, that takes no value of several ranks
    assert template == {"epochs": {0, 8}}
    template = {"by_rank": {"1-of-2": {"shards": None}}}
    muonckpt.load(template, tmp_path / "c", allow_extra=True)
    assert template["by_rank"]["1-of-2"]["shards"] == {1, 8}
