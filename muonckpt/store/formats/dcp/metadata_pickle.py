"""The ``.metadata`` file of torch.distributed.checkpoint (DCP), read and written as plain data.

The file is a pickle of small objects of torch (``Metadata`` and its parts).  A stock reader runs it, with any code that
an attacker put there; :mod:`.inert_pickle` runs nothing.

Sources: ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py`` (torch 2.13) for the objects and their
attributes.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from ....box import Index
from ....chunks import Boxes, Row
from ....errors import SourceError
from ....record import Blob
from ....vocabulary import KeyPath
from ...io.gc_paused import gc_paused
from ...reading.dtypes import DTYPES
from ..torch_save.inert_pickle import Global, Pickler, Record, expect, integer, sequence, sizes_of, unpickle

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
OUR_MARK = "muonckpt"
"""The attribute of `dump_metadata`'s ``Metadata``: a manifest of ours was written beside it."""

_ATTRIBUTES = ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version")

_NAMES = {
    "torch": ("Size", *DTYPES),
    "torch.serialization": ("_get_layout",),
    _FILESYSTEM: ("_StorageInfo",),
    _METADATA: (
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


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """One tensor: dtype name, global size, and its chunks as (offsets, sizes), all in elements."""

    dtype: str
    size: Index
    chunks: tuple[tuple[Index, Index], ...]


@dataclass(frozen=True, slots=True)
class StoredItem:
    """Where an item lies: ``length`` bytes at byte ``offset`` of ``file``, a name not checked yet.

    ``transforms`` names what the stream was encoded with (compression, encryption), which is rare.
    """

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Metadata:
    """The content of a ``.metadata`` file.

    ``storage`` is keyed by (tensor key, offsets of the chunk) and by (blob key, None).  ``paths`` says where a flat
    key sat in the nested state dict; a key that has none is its own path.  ``extra`` names attributes that another
    program added; their values are not kept.
    """

    tensors: Mapping[str, TensorMeta]
    blobs: tuple[str, ...]
    storage: Mapping[tuple[str, Index | None], StoredItem]
    paths: Mapping[str, KeyPath] = field(default_factory=dict)
    version: str | None = "1.0.0"
    extra: tuple[str, ...] = ()


# Reading.


def parse_metadata(data: bytes) -> Metadata:
    """The content of a ``.metadata`` file.  Runs nothing, imports nothing.

    Raises:
        SourceError: it is not such a file, is cut, names anything that a stock file does not have, or
            has a size that is not an integer >= 0, or an item twice.  File names are not checked here.
    """
    with gc_paused():
        content = unpickle(data, _KNOWN)
        try:
            return _metadata(content)
        except (KeyError, ValueError) as error:
            raise SourceError(f"expected the metadata of a checkpoint, found a part missing ({error})") from None


def _metadata(content: object) -> Metadata:
    fields = _fields("Metadata", content)
    stored = expect(dict, fields["storage_data"])
    room = len(stored)
    tensors: dict[str, TensorMeta] = {}
    blobs: list[str] = []
    for key, value in expect(dict, fields["state_dict_metadata"]).items():
        if expect(Record, value).kind == f"{_METADATA} BytesStorageMetadata":
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


def _fields(kind: str, value: object, module: str = _METADATA) -> dict[str, object]:
    """The attributes of an object of this class."""
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
        info = _fields("_StorageInfo", value, _FILESYSTEM)
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


# Writing.


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor to describe: its chunks are rows (file, offset, length of the item, …), one for each box."""

    key: str
    path: KeyPath
    dtype: str
    shape: Index
    boxes: Boxes
    rows: Callable[[], Iterable[Row]]


def pickled_parts(tensors: Sequence[TensorEntry], blobs: Sequence[Blob]) -> Iterator[bytes]:
    """The ``.metadata`` file of these tensors and items, as stock DCP reads it, in parts of bounded size.

    It names no directory of a save (``storage_meta`` is None, which DCP accepts), and has `OUR_MARK`, which DCP
    ignores.

    Raises:
        SourceError: a dtype is not one of torch's.
    """
    writer = _MetadataWriter()
    writer.begin("Metadata", _METADATA)
    writer.put("state_dict_metadata")
    writer.out += _DICT
    for tensor in tensors:
        writer.put(tensor.key)
        writer.tensor(tensor)
        yield from writer.full_parts()
    for blob in blobs:
        writer.put(blob.key)
        writer.put(_object("BytesStorageMetadata"))
    writer.out += pickle.SETITEMS
    writer.put("planner_data")
    writer.out += _DICT
    entries: tuple[TensorEntry | Blob, ...] = (*tensors, *blobs)
    for entry in entries:
        writer.put(entry.key)
        writer.put(entry.path)
        yield from writer.full_parts()
    writer.out += pickle.SETITEMS
    writer.put("storage_data")
    writer.out += _DICT
    for blob in blobs:
        writer.put(_object("MetadataIndex", {"fqn": blob.key, "index": None}))
        writer.item(blob.item.file, blob.item.offset, blob.item.length)
        yield from writer.full_parts()
    for tensor in tensors:
        writer.places(tensor)
        yield from writer.full_parts()
    writer.out += pickle.SETITEMS
    for name, value in (("storage_meta", None), ("version", "1.0.0"), (OUR_MARK, True)):
        writer.put(name)
        writer.put(value)
    writer.out += pickle.SETITEMS + pickle.BUILD + pickle.STOP
    yield bytes(writer.out)


_DICT = pickle.EMPTY_DICT + pickle.MARK
_END = pickle.SETITEMS + pickle.BUILD
_PART = 1 << 20


class _MetadataWriter(Pickler):
    """Pickles the objects of a million chunks from opcodes that it has pickled before, wherever it can."""

    def __init__(self) -> None:
        super().__init__()
        self._pickled: dict[object, bytes] = {}

    def full_parts(self) -> Iterator[bytes]:
        """What has been written, if it is long enough to be passed on."""
        if len(self.out) >= _PART:
            yield bytes(self.out)
            self.out.clear()

    def begin(self, kind: str, module: str) -> None:
        """Begin an object whose attributes follow; `_END` ends it."""
        self.again((kind, module), lambda: self.put(Record(Global(f"{module} {kind}"), ())))
        self.out += _DICT

    def again(self, name: object, write: Callable[[], None]) -> None:
        """Write what has this name: opcodes are repeated once they make no new entries in the pickle's memo."""
        if name in self._pickled:
            self.out += self._pickled[name]
            return
        start, known = len(self.out), len(self.memo)
        write()
        if len(self.memo) == known:
            self._pickled[name] = bytes(self.out[start:])

    def tensor(self, tensor: TensorEntry) -> None:
        """Write the ``TensorStorageMetadata`` of a tensor."""
        if tensor.dtype not in DTYPES:
            raise SourceError(f"expected a dtype of torch, found {tensor.dtype!r}")
        self.again(("tensor", tensor.dtype, tensor.shape, tensor.boxes), lambda: self.put(_tensor_record(tensor)))

    def item(self, file: str, offset: int, length: int) -> None:
        """Write the ``_StorageInfo`` of an item."""
        self.begin("_StorageInfo", _FILESYSTEM)
        self.again("relative_path", lambda: self.put("relative_path"))
        self.again(("file", file), lambda: self.put(file))
        self.again("offset", lambda: self.put("offset"))
        self.out += integer(offset)
        self.again("length", lambda: self.put("length"))
        self.out += integer(length) + _END

    def places(self, tensor: TensorEntry) -> None:
        """Write ``MetadataIndex`` and ``_StorageInfo`` of each chunk."""
        for number, (row, lo) in enumerate(zip(tensor.rows(), tensor.boxes.lo.tolist(), strict=True)):
            self.begin("MetadataIndex", _METADATA)
            self.again("fqn", lambda: self.put("fqn"))
            self.put(tensor.key)
            self._offset(number, tuple(lo))
            self.item(*row[:3])

    def _offset(self, number: int, lo: Index) -> None:
        def write() -> None:
            for value in ("offset", _size(lo), "index", number):
                self.put(value)
            self.out += _END

        self.again(("offset", number, lo), write)


def _object(kind: str, state: object = None, module: str = _METADATA) -> Record:
    return Record(Global(f"{module} {kind}"), (), state)


def _size(sizes: Index) -> Record:
    return Record(Global("torch Size"), (sizes,))


def _tensor_record(tensor: TensorEntry) -> Record:
    layout = Record(Global("torch.serialization _get_layout"), ("torch.strided",))
    contiguous = Record(Global(f"{_METADATA} _MEM_FORMAT_ENCODING"), (0,))
    properties = (Global(f"torch {tensor.dtype}"), layout, False, contiguous, False)
    chunks = [
        _object("ChunkStorageMetadata", {"offsets": _size(box.lo), "sizes": _size(box.shape)}) for box in tensor.boxes
    ]
    return _object(
        "TensorStorageMetadata",
        {"properties": _object("TensorProperties", properties), "size": _size(tensor.shape), "chunks": chunks},
    )
