"""Random damage to every format that we write: it is found before anything is overwritten, or makes no difference.

Each from another seed; the suite tries a few.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from support.damages import (
    DAMAGES,
    Damage,
    content,
    duplicated,
    load_fault,
    misspelt,
    reshard_fault,
    swapped,
    verify_fault,
)
from support.hostile import boxed
from support.resharded import grouped
from support.sharded import as_stock
from support.trials import SCALE, count, tally
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import muonckpt
from muonckpt.optimizer import Muon

TRIED = count(42, 200)

FORMATS = {
    "own": {},
    "own, 3 ranks": {"mesh": {"dp": 3}},
    "torch_dist": {"mesh": {"dp": 2}, "format": "torch_dist"},
    "buffers": {"mesh": {"dp": 2}, "format": "buffers", "layout": "balanced"},
    "safetensors": {"mesh": {"dp": 1}, "format": "safetensors"},
    "safetensors folder": {"mesh": {"dp": 1}, "format": "safetensors", "shard_size": 400},
    "zarr": {"mesh": {"dp": 1}, "format": "zarr", "shard_size": 400},
    "stock": {"mesh": {"dp": 3}},
}


MAY_REFUSE = {
    "stock": (".metadata", "torch"),
    "zarr": ("zarr.json", ".metadata"),
    "buffers": (".metadata",),
    "safetensors": ("expected a safetensors file", "expected a checkpoint directory"),
    "safetensors folder": ("one of the dtypes",),
}
"""Words of errors where nothing can be opened: the one file that makes it a checkpoint is gone, or cannot be parsed."""

pytestmark = pytest.mark.filterwarnings("ignore:.*was saved with a muonckpt.json")


@pytest.fixture(scope="module")
def saves(tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """Two saves of one run in each format."""
    folder = tmp_path_factory.mktemp("saves")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))
    weights, biases = ([p for p in net.parameters() if p.ndim == dims] for dims in (2, 1))
    opt = Muon([{"params": weights, "lr": 0.02}, {"params": biases, "lr": 0.1, "algorithm": "adamw"}])
    made: dict[str, tuple[Path, Path]] = {}
    for save in ("first", "second"):
        net(torch.randn(4, 6)).square().sum().backward()
        opt.step()
        model, state = get_state_dict(net, opt)
        muonckpt.save({"model": model, "optimizer": state}, folder / f"own-{save}", provenance={"step": 3})
    for name, options in FORMATS.items():
        pair = tuple(folder / f"{name.replace(' ', '-')}-{save}" / "checkpoint" for save in ("first", "second"))
        for path, save in zip(pair, ("first", "second"), strict=True):
            path.parent.mkdir(exist_ok=True)
            if options:
                muonckpt.reshard(folder / f"own-{save}", path, **grouped(**options))
            else:
                shutil.copytree(folder / f"own-{save}", path)
            if name == "stock":
                as_stock(path)
        made[name] = pair
    return made


def unjudged(name: str, damage: Damage) -> set[str]:
    """What cannot notice this damage: nothing in the files tells."""
    if name == "stock":  # an item has neither the name of its tensor nor that of its save; a key is found by verify
        alike = damage in (swapped, duplicated)
        return {"verify", "load", "reshard"} if alike else {"reshard"} if damage is misspelt else set()
    return {"load", "reshard"} if name == "safetensors" and damage is swapped else set()  # it is another one, and whole


def test_no_random_damage_passes(saves, tmp_path):
    held = {name: content(first) for name, (first, _) in saves.items()}
    seen: Counter[str] = Counter()
    rows = defaultdict[str, list[tuple[str, str | None]]](list)
    for seed in range(TRIED):
        name, damage = [*saves][seed % len(saves)], DAMAGES[seed // len(saves) % len(DAMAGES)]
        first, second = saves[name]
        shutil.copytree(first.parent, tmp_path / str(seed))
        whole = first.is_file()  # then the file of items beside it is part of it
        place, other = (tmp_path / str(seed), second.parent) if whole else (tmp_path / str(seed) / first.name, second)
        what = damage(random.Random(seed), place, other)
        path = tmp_path / str(seed) / first.name
        checks = {
            "verify": lambda path=path, name=name: verify_fault(path, held[name], MAY_REFUSE.get(name, ())),
            "load": lambda path=path, name=name: load_fault(path, held[name]),
            "reshard": lambda path=path, name=name: reshard_fault(path, held[name], path.with_name("out")),
        }
        for check in sorted(checks.keys() - unjudged(name, damage)):
            if check != "reshard" or SCALE or seed % 3 == 0:
                verdict, fault = checks[check]()
                seen[f"{check}: {verdict}"] += 1
                rows[check].append((f"seed {seed}, {name}, {damage.__name__}: {what}", fault))
        shutil.rmtree(tmp_path / str(seed))
    for check, found in rows.items():
        with tally(f"random damages: {check}") as row:
            for each in found:
                row.add(*each)
    assert seen["verify: faulty"] > TRIED / 2, seen
    print(dict(seen))


NESTED = count(3, 200)


@pytest.mark.filterwarnings("ignore:.* its .metadata is missing")  # only the manifest is written here
def test_random_nested_boxes_are_refused_by_all_that_read_them(tmp_path):
    """Also where volumes add up to the tensor's: a box that is there again in place of another leaves a hole."""
    for trial in range(NESTED):
        rng = random.Random(f"nested boxes {trial}")
        size, dims = rng.choice([4, 16, 64]), rng.choice([1, 2])
        tiles = [([start] + [0] * (dims - 1), [start + 1] + [size] * (dims - 1)) for start in range(size)]
        ends = (sorted(rng.sample(range(size + 1), 2)) for _ in range(rng.randrange(1, 40)))
        inner = [([lo, *[0] * (dims - 1)], [hi, *[rng.randrange(1, size + 1)] * (dims - 1)]) for lo, hi in ends]
        kept = tiles[: len(tiles) - sum(hi[0] - lo[0] for lo, hi in inner) % len(tiles)]
        boxes = [*kept, *inner]
        rng.shuffle(boxes)
        held = np.zeros([size] * dims, int)
        for lo, hi in {(*lo, *hi): (lo, hi) for lo, hi in boxes}.values():  # equal ones are replicas
            held[tuple(map(slice, lo, hi))] += 1
        if (held == 1).all():
            continue
        folder = tmp_path / str(trial)
        folder.mkdir()
        boxed([size] * dims, boxes)(folder)
        assert "coverage" in {finding.kind for finding in muonckpt.verify(folder).findings}
        with (
            muonckpt.open(folder) as opened,
            pytest.raises(muonckpt.LayoutError, match=r"overlap in part|no buffer|twice"),
        ):
            opened.tensors["w"].bits()
        with pytest.raises(muonckpt.MuonckptError, match=r"overlap in part|no buffer|twice"):
            muonckpt.reshard(folder, tmp_path / f"{trial}-cut", mesh={"dp": 2})
