"""The ``.metadata`` file of torch.distributed.checkpoint (DCP), read as plain data.

It is a pickle of small objects of torch.  A stock reader runs it, with any code in it; :mod:`.torch_save.inert_pickle`
runs nothing.

Source: ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py`` (torch 2.13).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import NamedTuple, cast

from ...algebra.box import Index
from ...names.errors import SourceError
from ...names.vocabulary import KeyPath
from ...programs.signs import FILESYSTEM, METADATA
from ..io.limits import gc_paused
from ..reading.dtypes import DTYPES
from .torch_save.inert_pickle import (
    Alike,
    Global,
    Record,
    expect,
    sequence,
    sizes_of,
    unpickle,
    unpickle_in_columns,
)

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
"""Every class and function that such a file may name, as "module name"."""

_ATTRIBUTES = ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version")


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """One tensor: dtype name, global size, and its chunks as (offsets, sizes), all in elements."""

    dtype: str
    size: Index
    chunks: tuple[tuple[Index, Index], ...]


class StoredItem(NamedTuple):
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
        try:
            return _metadata(unpickle_in_columns(data, KNOWN))
        except SourceError:  # or unusual, which is decided object by object
            return _metadata(unpickle(data, KNOWN))


def _metadata(content: object) -> Metadata:
    try:
        fields = _fields("Metadata", content)
        storage = _storage(expect(dict, fields["storage_data"]))
        room = len(storage)
        tensors: dict[str, TensorMeta] = {}
        blobs: list[str] = []
        known: dict[Alike, list[_Box]] = {}
        for key, value in expect(dict, fields["state_dict_metadata"]).items():
            if expect(Record, value).kind == f"{METADATA} BytesStorageMetadata":
                blobs.append(expect(str, key))
                continue
            # Chunks are counted before they are read: in a hostile file many tensors can share one list.
            tensors[expect(str, key)] = tensor = _tensor(value, room, known)
            room -= len(tensor.chunks)
        paths = expect(dict, fields.get("planner_data") or {})
        version = fields.get("version")
        return Metadata(
            tensors,
            tuple(blobs),
            storage,
            {expect(str, key): _path(path) for key, path in paths.items()},
            version if version is None else expect(str, version),
            tuple(expect(str, name) for name in fields if name not in _ATTRIBUTES),
        )
    except (KeyError, ValueError) as error:
        raise SourceError(f"expected the metadata of a checkpoint, found a part missing ({error})") from None


_Box = tuple[Index, Index]


def _fields(kind: str, value: object, module: str = METADATA) -> dict[str, object]:
    record = expect(Record, value)
    if record.kind != f"{module} {kind}":
        raise SourceError(f"expected an object of class {kind}, found {record.kind}")
    return expect(dict, record.state)


def _tensor(value: object, room: int, known: dict[Alike, list[_Box]]) -> TensorMeta:
    """Read a tensor.

    Args:
        room: how many chunks it may have.
        known: boxes of chunks that are alike, which tensors share.
    """
    fields = _fields("TensorStorageMetadata", value)
    properties = expect(tuple, expect(Record, fields["properties"]).state)
    dtype = expect(Global, properties[0] if properties else None).removeprefix("torch ")
    if dtype not in DTYPES:
        raise SourceError(f"expected a dtype, found {dtype!r}")
    chunks = [chunk if type(chunk) is Alike else Alike((chunk,)) for chunk in expect(list, fields["chunks"])]
    if (count := sum(alike.count for alike in chunks)) > room:
        raise SourceError(f"expected a stored item for each chunk, found {count} chunks and {room} items")
    boxes: list[_Box] = []
    for alike in chunks:
        if alike not in known:
            box = _fields("ChunkStorageMetadata", alike.model[0])
            known[alike] = [*zip(_sizes(alike, box["offsets"]), _sizes(alike, box["sizes"]), strict=True)]
        boxes += known[alike]
    return TensorMeta(dtype, sizes_of(fields["size"]), tuple(boxes))


def _storage(stored: dict[object, object]) -> dict[tuple[str, Index | None], StoredItem]:
    places: list[tuple[str, Index | None]] = []
    items: list[StoredItem] = []
    for key, value in stored.items():
        alike = key if type(key) is Alike else Alike((key, value))
        index = _fields("MetadataIndex", alike.model[0])
        info = _fields("_StorageInfo", alike.model[1], FILESYSTEM)
        offset = index.get("offset")
        corners = repeat(None, alike.count) if offset is None else _sizes(alike, offset)
        places += zip(_texts(alike, index["fqn"]), corners, strict=True)
        transforms = tuple(expect(str, name) for name in sequence(info.get("transform_descriptors") or ()))
        starts, lengths = _numbers(alike, info["offset"]), _numbers(alike, info["length"])
        columns = zip(
            _texts(alike, info["relative_path"]), starts, lengths, repeat(transforms, alike.count), strict=True
        )
        items += map(partial(tuple.__new__, StoredItem), columns)
    storage = dict(zip(places, items, strict=True))
    if len(storage) < len(places):
        name, corner = next(place for place, count in Counter(places).items() if count > 1)
        raise SourceError(f"expected one stored item for {name!r} at offset {corner}, found two")
    return storage


def _texts(alike: Alike, part: object) -> list[str]:
    texts = alike.column(part)
    if {*map(type, texts)} != {str}:
        raise SourceError(f"expected str, found {', '.join(sorted({kind.__name__ for kind in map(type, texts)}))}")
    return cast(list[str], texts)


def _numbers(alike: Alike, part: object) -> list[int]:
    column = alike.column(part)
    numbers = cast(list[int], column)
    for number in (min(numbers), max(numbers)) if {*map(type, column)} == {int} else column:
        sizes_of((number,))
    return numbers


def _sizes(alike: Alike, part: object) -> list[Index]:
    """Return the sizes that a part of the model has in each object."""
    if not alike.columns:
        return [sizes_of(part)] * alike.count
    column = alike.column(part)
    known = {size: sizes_of(size) for size in {*column}}
    if all(own is size for size, own in known.items()):  # they are tuples already
        return cast(list[Index], column)
    return [*map(known.__getitem__, column)]


def _path(value: object) -> KeyPath:
    parts = tuple(sequence(value))
    for part in parts:
        if type(part) is not int:
            expect(str, part)
    return cast(KeyPath, parts)
