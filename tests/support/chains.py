"""Chains of rewriting: a checkpoint goes through layouts and formats, hop by hop, and comes home."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import muonckpt
from muonckpt.layouts.buffers.placements import PLACEMENTS
from support.damages import content, tensors_of

HOPS: dict[str, dict[str, Any]] = {
    "rows of 1": {"mesh": {"dp": 1}, "format": "dcp"},
    "rows of 3": {"mesh": {"dp": 3}, "format": "dcp"},
    "rows of 7": {"mesh": {"dp": 7}, "format": "dcp"},
    "torch_dist": {"mesh": {"dp": 2}, "format": "torch_dist"},
    **{name: {"mesh": {"dp": 2 + at}, "format": "buffers", "layout": name} for at, name in enumerate(PLACEMENTS)},
    "safetensors": {"mesh": {"dp": 1}, "format": "safetensors"},
    "safetensors shards": {"mesh": {"dp": 1}, "format": "safetensors", "shard_size": 400},
    "zarr": {"mesh": {"dp": 1}, "format": "zarr"},
    "zarr shards": {"mesh": {"dp": 1}, "format": "zarr", "shard_size": 300},
}


TENSORS_ONLY = {name for name, how in HOPS.items() if how["format"] in ("safetensors", "zarr")}
"""Formats that leave what is no tensor in a file for people beside them (docs/formats/items.md)."""


def came_home_otherwise(source: Path, folder: Path, seed: str, with_items: bool, length: int = 20) -> str | None:
    """Take a checkpoint through a random chain that visits every hop, and home: what differs there, if anything.

    Args:
        with_items: through formats only that keep what is no tensor, and compare that as well.
    """
    dice = random.Random(seed)
    allowed = [name for name in HOPS if not (with_items and name in TENSORS_ONLY)]
    hops = [*allowed, *dice.choices(allowed, k=max(length - len(allowed), 0))]
    dice.shuffle(hops)
    at = source
    for number, name in enumerate([*hops, "rows of 1"]):
        to = folder / str(number) / "checkpoint"
        to.parent.mkdir(parents=True)
        muonckpt.reshard(at, to, **HOPS[name])
        at = to
    held, home = (content(place) if with_items else tensors_of(content(place)) for place in (source, at))
    home.pop("common.pt", None)  # Megatron's own, which torch_dist needs
    shutil.rmtree(folder)
    differing = [key for key in held.keys() | home.keys() if held.get(key) != home.get(key)]
    return f"{sorted(differing)} after {hops}" if differing else None
