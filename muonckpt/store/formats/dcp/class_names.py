"""The names of torch's classes in a ``.metadata`` file: apart, as its writer needs no more of the reader."""

from __future__ import annotations

from ...reading.dtypes import DTYPES

METADATA = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"
"""The modules of the classes in the file."""

_NAMES = {
    "torch": ("Size", *DTYPES),
    "torch.serialization": ("_get_layout",),
    FILESYSTEM: ("_StorageInfo",),
    METADATA: (
        *("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex"),
        *("BytesStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    # Megatron-LM's torch_dist adds the save plans of all ranks.
    "torch.distributed.checkpoint.planner": (
        *("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"),
    ),
    # StorageMeta holds the directory of the save; Python 3.13 moved the classes.
    "pathlib": (_PATHS := ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")),
    "pathlib._local": _PATHS,
}

KNOWN = frozenset(f"{module} {name}" for module, names in _NAMES.items() for name in names)
"""Everything in one that is not plain data, as "module name"."""
