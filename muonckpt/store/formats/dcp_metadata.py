"""The ``.metadata`` file of torch.distributed.checkpoint (DCP), read as plain data.

It is a pickle of small objects of torch.  A stock reader runs it, with any code in it; :mod:`.torch_save.inert_pickle`
runs nothing.

Source: ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py`` (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from ...box import Index
from ...errors import SourceError
from ...vocabulary import KeyPath
from ..io.limits import gc_paused
from ..reading.dtypes import DTYPES
from .signs import FILESYSTEM, METADATA
from .torch_save.inert_pickle import Global, Record, expect, sequence, sizes_of, unpickle

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

_KNOWN = frozenset(f"{module} {name}" for module, names in _NAMES.items() for name in names)
"""Every class and function that such a file may name, as "module name"."""

_ATTRIBUTES = ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version")


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """One tensor: dtype name, global size, and its chunks as (offsets, sizes), all in elements."""

    dtype: str
    size: Index
    chunks: tuple[tuple[Index, Index], ...]


@dataclass(frozen=True, slots=True)
class StoredItem:
    """An item of ``length`` bytes at byte ``offset`` of ``file``, whose name is not checked yet.

    ``transforms`` are the encodings of the stream (compression, encryption), which are rare.
    """

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Metadata:
    """The content of a ``.metadata`` file.

    ``storage`` is keyed by (tensor key, offsets of the chunk) and by (blob key, None).  ``paths`` has the nested paths
    of flat keys.  ``extra`` names other programs' attributes.
    """

    tensors: Mapping[str, TensorMeta]
    blobs: tuple[str, ...]
    storage: Mapping[tuple[str, Index | None], StoredItem]
    paths: Mapping[str, KeyPath] = field(default_factory=dict)
    version: str | None = "1.0.0"
    extra: tuple[str, ...] = ()


def parse_metadata(data: bytes) -> Metadata:
    """Parse a ``.metadata`` file.  Runs nothing, imports nothing.

    Raises:
        SourceError: it is cut or no such file, has a name that a stock file lacks, a size that is not an integer >= 0,
            or an item twice.  File names are not checked here.
    """
    with gc_paused():
        content = unpickle(data, _KNOWN)
        try:
            fields = _fields("Metadata", content)
            stored = expect(dict, fields["storage_data"])
            room = len(stored)
            tensors: dict[str, TensorMeta] = {}
            blobs: list[str] = []
            for key, value in expect(dict, fields["state_dict_metadata"]).items():
                if expect(Record, value).kind == f"{METADATA} BytesStorageMetadata":
                    blobs.append(expect(str, key))
                    continue
                # Chunks are counted before they are read: in a hostile file many tensors can share one list.
                tensors[expect(str, key)] = tensor = _tensor(value, room)
                room -= len(tensor.chunks)
            paths = expect(dict, fields.get("planner_data") or {})
            version = fields.get("version")
            return Metadata(
                tensors,
                tuple(blobs),
                _storage(stored),
                {expect(str, key): _path(path) for key, path in paths.items()},
                version if version is None else expect(str, version),
                tuple(name for name in fields if name not in _ATTRIBUTES),
            )
        except (KeyError, ValueError) as error:
            raise SourceError(f"expected the metadata of a checkpoint, found a part missing ({error})") from None


def _fields(kind: str, value: object, module: str = METADATA) -> dict[str, object]:
    record = expect(Record, value)
    if record.kind != f"{module} {kind}":
        raise SourceError(f"expected an object of class {kind}, found {record.kind}")
    return expect(dict, record.state)


def _tensor(value: object, room: int) -> TensorMeta:
    fields = _fields("TensorStorageMetadata", value)
    properties = expect(tuple, expect(Record, fields["properties"]).state)
    dtype = expect(Global, properties[0] if properties else None).removeprefix("torch ")
    if dtype not in DTYPES:
        raise SourceError(f"expected a dtype, found {dtype!r}")
    chunks = expect(list, fields["chunks"])
    if len(chunks) > room:
        raise SourceError(f"expected a stored item for each chunk, found {len(chunks)} chunks and {room} items")
    boxes = (_fields("ChunkStorageMetadata", chunk) for chunk in chunks)
    return TensorMeta(
        dtype,
        sizes_of(fields["size"]),
        tuple((sizes_of(box["offsets"]), sizes_of(box["sizes"])) for box in boxes),
    )


def _storage(stored: dict[object, object]) -> dict[tuple[str, Index | None], StoredItem]:
    storage = {}
    for key, value in stored.items():
        index = _fields("MetadataIndex", key)
        offset = index.get("offset")
        where = expect(str, index["fqn"]), None if offset is None else sizes_of(offset)
        if where in storage:
            raise SourceError(f"expected one stored item for {where[0]!r} at offset {where[1]}, found two")
        info = _fields("_StorageInfo", value, FILESYSTEM)
        start, length = sizes_of((info["offset"], info["length"]))
        transforms = sequence(info.get("transform_descriptors") or ())
        storage[where] = StoredItem(
            expect(str, info["relative_path"]), start, length, tuple(expect(str, name) for name in transforms)
        )
    return storage


def _path(value: object) -> KeyPath:
    parts = tuple(sequence(value))
    for part in parts:
        if type(part) is not int:
            expect(str, part)
    return cast(KeyPath, parts)
