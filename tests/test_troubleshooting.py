"""The messages on the page of messages are those that are said: each is brought about here."""

from __future__ import annotations

import re
import shutil
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.commands import called
from support.workers import run
from torch import nn

import muonckpt
from muonckpt.optimizer import Muon
from muonckpt.optimizer.groups import MODULE_TYPES, sort_parameters

PAGE = Path(__file__).parents[1] / "docs" / "guide" / "troubleshooting.md"
WEIGHT = {"w": torch.ones(8, 4)}


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(*shape))


def saved(name: str, state: object) -> str:
    muonckpt.save({"optimizer": state}, name)
    return name


def momentum(options: dict[str, object], **slots: torch.Tensor) -> dict[str, object]:
    return {"state": {"up": slots}, "param_groups": [{"params": ["up"], "lr": 0.02, **options}]}


def changed_file(name: str, change: Callable[[bytes], bytes]) -> str:
    [source] = Path("run").glob("*.distcp")
    shutil.copytree("run", name)
    (Path(name) / source.name).write_bytes(change(source.read_bytes()))
    return name


def flipped(data: bytes) -> bytes:
    return data.replace(WEIGHT["w"].numpy().tobytes(), torch.full((8, 4), 2.0).numpy().tobytes())


def with_other_metadata() -> str:
    metadata = Path(shutil.copytree("run", "cut_metadata")) / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:-20])
    return called("inspect", "cut_metadata").stdout


def of_another_save() -> str:
    muonckpt.save({"w": 2 * WEIGHT["w"]}, "other")
    shutil.copyfile("run/muonckpt.json", "other/muonckpt.json")
    return called("verify", "other").stdout


def moments_without_their_steps() -> str:
    group = {"params": ["w"], "lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    state = {"w": {"exp_avg": WEIGHT["w"], "exp_avg_sq": WEIGHT["w"]}}
    muonckpt.save({"model": WEIGHT, "optimizer": {"state": state, "param_groups": [group]}}, "stepless")
    return called("convert", "stepless", "stepped", "--to", "muonckpt").stderr


def a_hole() -> None:
    Path("hole").mkdir()
    with Path("hole/.metadata").open("wb") as file:
        file.truncate(1 << 30)
    muonckpt.open("hole")


def another_option() -> None:
    layer = nn.Linear(4, 4, bias=False)
    state = Muon(layer.parameters(), lr=0.02).state_dict()
    Muon(layer.parameters(), lr=0.02, ns_steps=4).load_state_dict(state)


def another_rate() -> None:
    layer = nn.Linear(4, 4, bias=False)
    state = Muon(layer.parameters(), lr=0.02).state_dict()
    Muon(layer.parameters(), lr=0.01).load_state_dict(state)


def a_destroyed_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    weight = parameter(3, 3)
    weight.grad = torch.ones(3, 3)
    optimizer = Muon([weight], lr=0.02, replicas=dist.group.WORLD)
    optimizer.step()
    dist.destroy_process_group()
    optimizer.step()


def on_two_ranks(rank: int, world: int, path: str, option: bool) -> str:
    state = {"state": {"up": {}}, "param_groups": [{"params": ["up"], "lr": rank * option}]}
    try:
        muonckpt.save({**WEIGHT, "optimizer": state, "position": rank}, path)
    except muonckpt.LayoutError as error:
        return str(error)
    return path


def under_torchrun() -> None:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TORCHELASTIC_RUN_ID", "none")
        environment.setenv("WORLD_SIZE", "2")
        muonckpt.save(WEIGHT, "alone")


def calls() -> Iterator[Callable[[], object]]:
    """Each of these raises, warns or prints what a heading has."""
    two_words = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    live = {"optimizer": momentum({"convention": "ema"}, momentum_buffer=torch.ones(4, 4))}
    summed = saved("sum", momentum({"convention": "sum"}, momentum_buffer=torch.ones(4, 4)))
    of_torch = saved("of_torch", momentum({"ns_coefficients": (2.0, -1.5, 0.5)}, momentum_buffer=torch.ones(4, 4)))
    unknown = saved("unknown", momentum({"momentum": 0.95}, momentum_buffer=torch.ones(4, 4)))
    Path("empty").mkdir()
    yield under_torchrun
    yield lambda: muonckpt.save(WEIGHT, "run")
    yield lambda: muonckpt.save({"arguments": Namespace(lr=0.1)}, "namespace")
    yield lambda: run(2, on_two_ranks, str(Path("drifted").absolute()), True)[0]
    yield lambda: muonckpt.open("nowhere")
    yield lambda: muonckpt.open("empty")
    yield lambda: muonckpt.load({**WEIGHT, "b": torch.ones(2)}, "run")
    yield lambda: muonckpt.load({}, "run")
    by_rank = run(2, on_two_ranks, str(Path("by_rank").absolute()), False)[0]
    yield lambda: muonckpt.load({**WEIGHT, "position": 0}, by_rank, allow_extra=["optimizer.*"])
    yield lambda: muonckpt.load(live, of_torch)
    muonckpt.save({"embedding": torch.ones(4, 4), "head": torch.zeros(4, 4)}, "untied")
    yield lambda: muonckpt.load(dict.fromkeys(("embedding", "head"), torch.ones(4, 4)), "untied")
    yield lambda: muonckpt.load({"w": torch.ones(4, 4)}, "run")
    yield lambda: muonckpt.load({"w": torch.ones(8, 4, dtype=torch.bfloat16)}, "run")
    yield lambda: muonckpt.load(live, summed)
    yield another_option
    yield lambda: muonckpt.load(dict(WEIGHT), changed_file("flipped", flipped))
    yield lambda: muonckpt.open("x" * 300)
    yield with_other_metadata
    yield of_another_save
    yield a_hole
    yield another_rate
    yield a_destroyed_group
    yield lambda: Muon([parameter(3)], lr=0.02)
    yield lambda: Muon([{"params": [parameter(3, 3)]}, {"params": [parameter(3)], "algorithm": "adamw"}], lr=0.02)
    yield lambda: sort_parameters(two_words, MODULE_TYPES)
    yield Muon([parameter(3, 3)], lr=0.02).step
    yield lambda: called("convert", unknown, "translated", "--to", "muonckpt").stderr
    yield moments_without_their_steps
    yield lambda: called("reshard", "run", "two").stderr
    yield lambda: called("reshard", "run", "two", "--mesh", "dp=2", "--shard", "*experts*=dp:0").stderr


def message(call: Callable[[], object]) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            printed = call()
        except (muonckpt.MuonckptError, ValueError, RuntimeError) as error:
            return str(error)
    return "\n".join([str(printed), *(str(warning.message) for warning in caught)])


def test_every_message_on_the_page_is_said_and_no_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    muonckpt.save(WEIGHT, "run")
    headings = re.findall(r"^### `(.+)`$", PAGE.read_text(), re.MULTILINE)
    said = [message(call) for call in calls()]
    for heading, text in zip(headings, said, strict=True):
        pattern = ".+".join(map(re.escape, re.split("…", heading)))
        assert re.search(pattern, " ".join(text.split())), f"### {heading}\n{text}"
