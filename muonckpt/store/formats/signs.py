"""Names of files and items by which formats are told apart; readers and writers, slow to import, are elsewhere."""

from __future__ import annotations

import json
import re
import warnings

from ...errors import SourceError
from ..io.location import Location
from ..io.regular import open_regular

METADATA_FILE = ".metadata"

OUR_MARK = "muonckpt"
"""The attribute that this package adds to DCP's ``Metadata``: a manifest of ours was written beside it."""

COMMON_FILE = "common.pt"
"""The item of everything that is not a tensor in Megatron's ``torch_dist``, before core 0.19 a file."""

COMMON_STATE = "common_state/shard_0_1"
"""Megatron's key of that item since core 0.19."""

FLAT_BUFFERS_FILE = "flat_buffers.json"

ZARR_FILE = "zarr.json"

MEGATRON_FILE = "metadata.json"
"""The file that tells Megatron the format of a checkpoint."""

TORCH_SAVE = (b"PK\3\4", b"\x80\2\x8a\n")
"""The first bytes of a file of ``torch.save``: a zip archive, or before torch 1.6 a pickle."""

NAMES_FILE = "parameter_names.json"
"""The names of the parameters that an optimizer numbers, which a person writes beside its file."""

NUMBERED = "numbered_parameters"
"""The key in the provenance that lists the optimizers whose parameters have no names."""

NOT_READ = "not_read"
"""The key in the provenance that lists the files of a folder that were left alone."""

LAYER_WISE_FILES = ("layer_wise.toml", "layer_wise.json")
"""Descriptions of Megatron's per-rank optimizer files."""


def item_key(key: str) -> str:
    """Return Megatron's key of an item, which ends with its shard's number and the number of shards."""
    return key if "/shard_" in key or key == COMMON_FILE else f"{key}/shard_0_1"


def folders_of_dcp(path: Location) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if (entry / METADATA_FILE).exists())


def items_beside(checkpoint: Location) -> Location:
    """Return the place of the file of items of a checkpoint that holds tensors only: docs/formats/items.md."""
    return checkpoint.parent / f"{checkpoint.name}.items.json"


def is_torch_dist(path: Location) -> bool:
    """Return whether a directory is a ``torch_dist`` checkpoint to Megatron."""
    if not (path / MEGATRON_FILE).is_file():
        return False
    with open_regular(path / MEGATRON_FILE) as file:
        data = file.read(0, min(file.size, 1 << 16))
    try:
        fields = json.loads(data)
    except ValueError:
        return False
    return isinstance(fields, dict) and fields.get("sharded_backend") == "torch_dist"


_OF_RUN = re.compile(r"(iter_|checkpoint-|step-|global_step)[0-9]+(\.[0-9]+)?")
"""Folders in which programs keep the checkpoints of a run: Megatron, Hugging Face, ours, DeepSpeed."""


def refuse_stray(path: Location) -> None:
    """Refuse a file of tensors in a folder of checkpoints by step, where it is hardly what was meant.

    A model of several files can only be named by its folder, so for that there is a warning.

    Raises:
        SourceError: the folder has one file of tensors, and checkpoints.
    """
    if not path.is_dir():
        return
    entries: list[Location] = list(path.iterdir())
    steps = sorted(entry.name for entry in entries if _OF_RUN.fullmatch(entry.name) and entry.is_dir())
    files = sorted(entry.name for entry in entries if entry.name.endswith((".safetensors", ".safetensors.index.json")))
    if not (steps and files):
        return
    held = f"{path} holds the checkpoints {', '.join(steps[:4])}{', …' * (len(steps) > 4)} of a run, and {files[0]}"
    if len(files) == 1:
        raise SourceError(f"{held}: name the checkpoint that you mean, or {path / files[0]}")
    warnings.warn(f"{held}, which is read; name a checkpoint of the run if you mean that", stacklevel=2)
