"""The files by which formats are told apart: to look for them imports no format's reader."""

from __future__ import annotations

import json
import re

from ..io.location import Location
from ..io.regular import open_regular

FLAT_BUFFERS = "flat_buffers.json"
"""Name of the index of raw flat buffers."""

ZARR = "zarr.json"
"""Name of the file that describes a group or an array of zarr v3."""

MEGATRON = "metadata.json"
"""Name of the file that tells Megatron the format of a checkpoint."""

LAYER_WISE = ("layer_wise.toml", "layer_wise.json")
"""Names of a description of Megatron's per-rank optimizer files."""

LAYER_WISE_RANK = re.compile(r"layer_wise_optimizer_(0|[1-9][0-9]*)\.pt")
"""What these files are called."""


def has_flat_buffers(path: Location) -> bool:
    """Whether a directory holds raw flat buffers."""
    return (path / FLAT_BUFFERS).exists()


def is_torch_dist(path: Location) -> bool:
    """Whether a directory is a ``torch_dist`` checkpoint to Megatron."""
    if not (path / MEGATRON).is_file():
        return False
    with open_regular(path / MEGATRON) as file:
        data = file.read(0, min(file.size, 1 << 16))
    try:
        told = json.loads(data)
    except ValueError:
        return False
    return isinstance(told, dict) and told.get("sharded_backend") == "torch_dist"


def is_zarr(path: Location) -> bool:
    """Whether a directory is a zarr group or array of version 3."""
    return (path / ZARR).exists()


def has_safetensors(path: Location) -> bool:
    """Whether a directory holds safetensors files."""
    return any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json"))


def describes_layer_wise(path: Location) -> bool:
    """Whether a directory holds a description of Megatron's per-rank optimizer files."""
    return any((path / name).is_file() for name in LAYER_WISE)


def has_layer_wise(path: Location) -> bool:
    """Whether a directory holds such files.  Some programs leave them beside other checkpoints."""
    return path.is_dir() and any(LAYER_WISE_RANK.fullmatch(file.name) for file in path.iterdir())
