"""Names of files and items by which formats are told apart; readers and writers, slow to import, are elsewhere."""

from __future__ import annotations

import json

from ..io.location import Location
from ..io.regular import open_regular

METADATA_FILE = ".metadata"
"""Name of DCP's description of a checkpoint."""

OUR_MARK = "muonckpt"
"""The attribute of the ``Metadata`` that this package writes there: a manifest of ours was written beside it."""

COMMON_FILE = "common.pt"
"""The file in which Megatron's ``torch_dist`` before core 0.19 keeps everything that is not a tensor, as one item."""

COMMON_STATE = "common_state/shard_0_1"
"""Megatron's key of that item since core 0.19."""

FLAT_BUFFERS_FILE = "flat_buffers.json"
"""Name of the index of raw flat buffers."""

ZARR_FILE = "zarr.json"
"""Name of the file that describes a group or an array of zarr v3."""

MEGATRON_FILE = "metadata.json"
"""Name of the file that tells Megatron the format of a checkpoint."""

TORCH_SAVE = (b"PK\3\4", b"\x80\2\x8a\n")
"""The first bytes of a file of ``torch.save``: a zip archive, or before torch 1.6 a pickle."""

NAMES_FILE = "parameter_names.json"
"""Name of the file that a person writes beside an optimizer's, with the names of the parameters that it numbers."""

NUMBERED = "numbered_parameters"
"""The key in the provenance that lists the optimizers whose parameters have no names."""

NOT_READ = "not_read"
"""The key in the provenance that lists the files of a folder that were left alone."""

LAYER_WISE_FILES = ("layer_wise.toml", "layer_wise.json")
"""Names of a description of Megatron's per-rank optimizer files."""


def item_key(key: str) -> str:
    """Megatron's key of an item, which ends with its shard's number and the number of shards for strict loads."""
    return key if "/shard_" in key or key == COMMON_FILE else f"{key}/shard_0_1"


def folders_of_dcp(path: Location) -> list[str]:
    """The names of the folders in a folder that are checkpoints of DCP, sorted."""
    return sorted(entry.name for entry in path.iterdir() if (entry / METADATA_FILE).exists())


def is_torch_dist(path: Location) -> bool:
    """Whether a directory is a ``torch_dist`` checkpoint to Megatron."""
    if not (path / MEGATRON_FILE).is_file():
        return False
    with open_regular(path / MEGATRON_FILE) as file:
        data = file.read(0, min(file.size, 1 << 16))
    try:
        fields = json.loads(data)
    except ValueError:
        return False
    return isinstance(fields, dict) and fields.get("sharded_backend") == "torch_dist"
