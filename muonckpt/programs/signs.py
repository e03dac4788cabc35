"""Names of files, items and classes in several formats; imports little, as every command needs some of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

METADATA_FILE = ".metadata"

METADATA = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"
"""The modules of the classes in that file."""

OUR_MARK = "muonckpt"
"""The attribute that this package adds to DCP's ``Metadata``: a manifest of ours was written beside it."""

COMMON_FILE = "common.pt"
"""The item of everything that is not a tensor in Megatron's ``torch_dist``, before core 0.19 a file."""

COMMON_STATE = "common_state/shard_0_1"
"""Megatron's key of that item since core 0.19."""

FLAT_BUFFERS_FILE = "flat_buffers.json"

BUFFER_FILES = "rank_[0-9]*.bin"
"""A shell pattern of the files of buffers that it describes."""

ZARR_FILE = "zarr.json"

MEGATRON_FILE = "metadata.json"
"""The file that tells Megatron the format of a checkpoint."""

INTEGRITY_FILE = "integrity.json"
"""The file in which Megatron may record the SHA-256 of each other file of a ``torch_dist`` checkpoint."""

TORCH_CHECKPOINTING_FILE = "metadata.pkl"
"""The file in which torch_checkpointing says how tensors are sharded."""

TORCH_SAVE = (b"PK\3\4", b"\x80\2\x8a\n")
"""The first bytes of a file of ``torch.save``: a zip archive, or before torch 1.6 a pickle."""

NAMES_FILE = "parameter_names.json"
"""The names of the parameters that an optimizer numbers, which a person writes beside its file."""

NUMBERED = "numbered_parameters"
"""The key in the provenance that lists the optimizers whose parameters have no names."""

SOURCE_ROOTS = "source_roots"
"""The key in the provenance of the roots that a source of Megatron-FSDP had, by its program: it gets them back."""

UNSAID = "unsaid"
"""The key in the provenance of options that stock DCP needs and no run said: they are a new optimizer's."""

GROUP_MEMBERS = "group_members"
"""The key in the provenance of the names of parameters in Megatron's groups, by the prefix of each optimizer's keys:
its common state does not name them."""

NOT_READ = "not_read"
"""The key in the provenance that lists the files of a folder that were left alone."""

LAYER_WISE_FILES = ("layer_wise.toml", "layer_wise.json")
"""Descriptions of Megatron's per-rank optimizer files."""

_ZARR_2 = "zarr v2, which is not read: open it with the zarr library and write it again with zarr_format=3"
_ORBAX = "an OCDBT database of tensorstore, as Orbax writes it"
_ELSEWHERE = ", which is not read: load it with its own program and save the tensors with safetensors or torch.save"

UNREAD: Mapping[str, str] = MappingProxyType(
    {
        ".zgroup": _ZARR_2,
        ".zarray": _ZARR_2,
        ".zmetadata": _ZARR_2,
        "manifest.ocdbt": f"{_ORBAX}{_ELSEWHERE}",
        ZARR_FILE: "zarr v3 whose groups lack that file: give the folder of one array, or write "
        '{"zarr_format": 3, "node_type": "group"} into the file in each folder above the arrays',
        "*.gguf": f"GGUF of llama.cpp{_ELSEWHERE}",
        "*.h5": f"HDF5{_ELSEWHERE}",
        "*.msgpack": f"msgpack of Flax{_ELSEWHERE}",
        "*.data-?????-of-?????": f"a checkpoint of TensorFlow{_ELSEWHERE}",
    }
)
"""Formats that are not read, and what to do, by shell patterns of the names of their files."""


def unsaid_record(unsaid: Mapping[str, Collection[str]]) -> list[dict[str, list[str]]]:
    """Return what the provenance says of unsaid options, by the names of parameters."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, options in unsaid.items():
        names.setdefault(tuple(sorted(options)), []).append(name)
    return [{"options": [*options], "params": members} for options, members in names.items() if options]


def unsaid_by_name(provenance: Mapping[str, object]) -> dict[str, frozenset[str]]:
    """Return the options that a checkpoint has and no run said, by the names of parameters."""
    unsaid: dict[str, frozenset[str]] = {}
    match provenance.get(UNSAID):
        case [*records]:
            for record in records:
                match record:
                    case {"options": [*options], "params": [*names]}:
                        unsaid |= dict.fromkeys(map(str, names), frozenset(map(str, options)))
    return unsaid
