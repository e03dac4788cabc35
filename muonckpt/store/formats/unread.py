"""What a folder has of formats that are not read: the table of formats and the reader of last resort name it."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from types import MappingProxyType

from ...programs.signs import ZARR_FILE
from ..io.location import Location, listing

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
"""What files are whose formats are not read, and what to do, by shell patterns of their names."""

_MOST_FOLDERS = 64
"""Folders in which files of such formats are looked for."""


def unread_format(path: Location) -> str:
    """Return what a folder has of a format that is not read, and what to do; empty if nothing known is in it."""
    pending = [""]
    for place in pending:  # which grows
        files, folders = listing(path / place)
        for pattern, meaning in UNREAD.items():
            if found := fnmatch.filter(sorted(files), pattern):
                return f"{f'{place}/' * bool(place)}{found[0]} is of {meaning}"
        prefix = f"{place}/" if place else ""
        pending += [f"{prefix}{name}" for name in sorted(folders)][: max(_MOST_FOLDERS - len(pending), 0)]
    return ""
