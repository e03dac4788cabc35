"""The ``.metadata`` file of torch.distributed.checkpoint (DCP), read as plain data and written for a million chunks.

It is a pickle of small objects of torch.  A stock reader runs it, with any code in it; :mod:`.torch_save.inert_pickle`
runs nothing.

Source: ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py`` (torch 2.13).
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple, cast

from ...algebra.box import Index
from ...names.collector import gc_paused
from ...names.errors import LayoutError, SourceError
from ...names.vocabulary import KeyPath
from ...programs.signs import FILESYSTEM, METADATA, OUR_MARK
from ..reading.dtypes import DTYPES
from .torch_save.inert_pickle import (
    Global,
    ObjectColumns,
    Pickler,
    Record,
    expect,
    integer,
    sequence,
    sizes_of,
    unpickle,
    unpickle_in_columns,
)

if TYPE_CHECKING:  # reading does without numpy
    from ...record.chunks import Boxes
    from ...record.record import Blob, Manifest, StateRecord

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

CLASSES = frozenset(f"{module} {name}" for module, names in _NAMES.items() for name in names)
"""Every class and function that such a file may name, as "module name"."""

_ATTRIBUTES = ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version")


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Describes a tensor: dtype name, global size, and its chunks as (offsets, sizes), all in elements."""

    dtype: str
    size: Index
    chunks: tuple[tuple[Index, Index], ...]


class StoredItem(NamedTuple):
    """Names an item: ``length`` bytes at byte ``offset`` of ``file``, whose name is not checked yet.

    ``transforms`` are the encodings of the stream (compression, encryption), which are rare.
    """

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Metadata:
    """Holds the content of a ``.metadata`` file.

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
            return _read_metadata(unpickle_in_columns(data, CLASSES))
        except SourceError:  # or unusual, which is decided object by object
            return _read_metadata(unpickle(data, CLASSES))


def _read_metadata(content: object) -> Metadata:
    """Read the content of the pickle: tensors with their chunks, blobs, and the item of each."""
    try:
        fields = _read_fields("Metadata", content)
        storage = _read_storage(expect(dict, fields["storage_data"]))
        items_to_use = len(storage)
        tensors: dict[str, TensorMeta] = {}
        blobs: list[str] = []
        boxes_of: dict[ObjectColumns, list[_Box]] = {}
        for key, value in expect(dict, fields["state_dict_metadata"]).items():
            if expect(Record, value).kind == f"{METADATA} BytesStorageMetadata":
                blobs.append(expect(str, key))
                continue
            # Chunks are counted before they are read: in a hostile file many tensors can share one list.
            tensors[expect(str, key)] = tensor = _read_tensor(value, items_to_use, boxes_of)
            items_to_use -= len(tensor.chunks)
        paths = expect(dict, fields.get("planner_data") or {})
        version = fields.get("version")
        return Metadata(
            tensors,
            blobs=tuple(blobs),
            storage=storage,
            paths={expect(str, key): _read_path(path) for key, path in paths.items()},
            version=version if version is None else expect(str, version),
            extra=tuple(expect(str, name) for name in fields if name not in _ATTRIBUTES),
        )
    except (KeyError, ValueError) as error:
        raise SourceError(f"expected the metadata of a checkpoint, found a part missing ({error})") from None


_Box = tuple[Index, Index]


def _read_fields(kind: str, value: object, module: str = METADATA) -> dict[str, object]:
    record = expect(Record, value)
    if record.kind != f"{module} {kind}":
        raise SourceError(f"expected an object of class {kind}, found {record.kind}")
    return expect(dict, record.state)


def _read_tensor(value: object, max_chunks: int, boxes_of: dict[ObjectColumns, list[_Box]]) -> TensorMeta:
    """Read a tensor; ``boxes_of`` gets the boxes of chunks that recur, which tensors share."""
    fields = _read_fields("TensorStorageMetadata", value)
    # Its dtype is the first of its properties.
    properties = expect(tuple, expect(Record, fields["properties"]).state)
    dtype = expect(Global, properties[0] if properties else None).removeprefix("torch ")
    if dtype not in DTYPES:
        raise SourceError(f"expected a dtype, found {dtype!r}")
    chunks = list(map(_as_columns, expect(list, fields["chunks"])))
    if (count := sum(chunk.count for chunk in chunks)) > max_chunks:
        raise SourceError(f"expected a stored item for each chunk, found {count} chunks and {max_chunks} items")
    # Chunks that recur are read once.
    boxes: list[_Box] = []
    for chunk in chunks:
        if chunk not in boxes_of:
            box = _read_fields("ChunkStorageMetadata", chunk.model[0])
            boxes_of[chunk] = [*zip(_read_sizes(chunk, box["offsets"]), _read_sizes(chunk, box["sizes"]), strict=True)]
        boxes += boxes_of[chunk]
    return TensorMeta(dtype, sizes_of(fields["size"]), tuple(boxes))


def _read_storage(stored: dict[object, object]) -> dict[tuple[str, Index | None], StoredItem]:
    """Read the items by the key of a tensor and the offsets of the chunk; without offsets for a blob."""
    places: list[tuple[str, Index | None]] = []
    items: list[StoredItem] = []
    for key, value in stored.items():
        entries = _as_columns(key, value)
        # The keys of the entries: (tensor key, offsets of the chunk).
        index = _read_fields("MetadataIndex", entries.model[0])
        offset = index.get("offset")
        corners = repeat(None, entries.count) if offset is None else _read_sizes(entries, offset)
        places += zip(_read_texts(entries, index["fqn"]), corners, strict=True)
        # Their values, made without a call of Python for each.
        info = _read_fields("_StorageInfo", entries.model[1], FILESYSTEM)
        files = _read_texts(entries, info["relative_path"])
        starts, lengths = _read_numbers(entries, info["offset"]), _read_numbers(entries, info["length"])
        transforms = tuple(expect(str, name) for name in sequence(info.get("transform_descriptors") or ()))
        columns = zip(files, starts, lengths, repeat(transforms, entries.count), strict=True)
        items += map(partial(tuple.__new__, StoredItem), columns)
    storage = dict(zip(places, items, strict=True))
    if len(storage) < len(places):
        name, corner = next(place for place, count in Counter(places).items() if count > 1)
        raise SourceError(f"expected one stored item for {name!r} at offset {corner}, found two")
    return storage


def _as_columns(*values: object) -> ObjectColumns:
    """Return objects that recur as they are, and one object, or a key and its value, as columns of one row."""
    return values[0] if type(values[0]) is ObjectColumns else ObjectColumns(values)


def _read_texts(objects: ObjectColumns, part: object) -> list[str]:
    texts = objects.column(part)
    if kinds := {*map(type, texts)} - {str}:
        raise SourceError(f"expected str, found {', '.join(sorted(kind.__name__ for kind in kinds))}")
    return cast(list[str], texts)


def _read_numbers(objects: ObjectColumns, part: object) -> list[int]:
    column = objects.column(part)
    numbers = cast(list[int], column)
    for number in (min(numbers), max(numbers)) if {*map(type, column)} == {int} else column:
        sizes_of((number,))
    return numbers


def _read_sizes(objects: ObjectColumns, part: object) -> list[Index]:
    """Return the sizes that a part of the model has in each object."""
    if not objects.columns:
        return [sizes_of(part)] * objects.count
    column = objects.column(part)
    sizes = {value: sizes_of(value) for value in {*column}}
    if all(size is value for value, size in sizes.items()):  # they are tuples already
        return cast(list[Index], column)
    return [*map(sizes.__getitem__, column)]


def _read_path(value: object) -> KeyPath:
    parts = sequence(value)
    for part in parts:
        if type(part) is not int:
            expect(str, part)
    return cast(KeyPath, tuple(parts))


# Writing.


def metadata_parts(manifest: Manifest) -> Iterator[bytes]:
    """Yield the ``.metadata`` with which stock DCP reads the items of this manifest, in parts of bounded size.

    It names no directory of a save (``storage_meta`` is None) and has `OUR_MARK`; DCP accepts both.

    Raises:
        LayoutError: a key occurs twice, or two chunks of a tensor begin at the same place.
    """
    tensors, blobs = manifest.tensors, manifest.blobs
    entries: tuple[StateRecord | Blob, ...] = (*tensors, *blobs)
    _refuse_twice("key", (entry.key for entry in entries))
    # Tensors have few geometries.
    for boxes, tensor in {tensor.boxes: tensor for tensor in reversed(tensors)}.items():
        _refuse_twice(f"offset of the boxes of {tensor.key!r}", map(tuple, boxes.lo.tolist()))
    return _pickled_parts(tensors, blobs)


def _refuse_twice(noun: str, values: Iterable[Hashable]) -> None:
    duplicates = [value for value, count in Counter(values).items() if count > 1]
    if duplicates:
        raise LayoutError(f"expected each {noun} once; found {duplicates[0]!r} twice")


def _pickled_parts(tensors: Sequence[StateRecord], blobs: Sequence[Blob]) -> Iterator[bytes]:
    """Yield the pickle of the metadata in parts; its keys are in the order in which DCP writes them."""
    writer = _MetadataWriter()
    # The tensors with the boxes of their chunks, and the items.
    writer.begin("Metadata", METADATA)
    writer.put("state_dict_metadata")
    writer.out += _DICT
    for tensor in tensors:
        writer.put(tensor.key)
        writer.tensor(tensor)
        yield from writer.full_parts()
    for blob in blobs:
        writer.put(blob.key)
        writer.put_cached(("blob",), lambda: writer.put(_make_object("BytesStorageMetadata")))
    writer.out += pickle.SETITEMS
    # The paths of keys.
    entries: tuple[StateRecord | Blob, ...] = (*tensors, *blobs)
    writer.put("planner_data")
    writer.put({entry.key: entry.path for entry in entries})
    yield from writer.full_parts()
    # Where each item lies, and each chunk.
    writer.put("storage_data")
    writer.out += _DICT
    for blob in blobs:
        writer.index(blob.key)
        writer.put_word("index")
        writer.out += pickle.NONE + _END
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
_PART_BYTES = 1 << 20


class _MetadataWriter(Pickler):
    """Pickles the objects of a million chunks from opcodes that it has pickled before, wherever it can."""

    def __init__(self) -> None:
        super().__init__()
        self._pickled: dict[object, bytes] = {}
        self._offsets: dict[Boxes, tuple[bytes, ...]] = {}
        """The bytes written for the offsets of each box, once all of them repeat."""

    def full_parts(self) -> Iterator[bytes]:
        """Yield the bytes written so far, if they are enough to be passed on."""
        if len(self.out) >= _PART_BYTES:
            yield bytes(self.out)
            self.out.clear()

    def begin(self, kind: str, module: str) -> None:
        """Begin an object whose attributes follow; `_END` ends it."""
        self.put_cached((kind, module), lambda: self.put(Record(Global(f"{module} {kind}"), ())))
        self.out += _DICT

    def put_cached(self, name: object, write: Callable[[], None]) -> None:
        """Write the value of this name, by the bytes of the last time if they are kept.

        The first time a value is written, it makes entries in the pickle's memo, and later bytes refer to them: bytes
        that make no new entries are kept.
        """
        if name in self._pickled:
            self.out += self._pickled[name]
            return
        start, memo_length = len(self.out), len(self.memo)
        write()
        if len(self.memo) == memo_length:
            self._pickled[name] = bytes(self.out[start:])

    def put_word(self, word: str) -> None:
        self.put_cached(word, lambda: self.put(word))

    def tensor(self, tensor: StateRecord) -> None:
        if tensor.dtype not in DTYPES:
            raise SourceError(f"expected a dtype of torch, found {tensor.dtype!r}")
        self.put_cached(("tensor", tensor.dtype, tensor.shape, tensor.boxes), lambda: self.put(_make_tensor(tensor)))

    def item(self, file: str, offset: int, length: int) -> None:
        """Write the ``_StorageInfo`` of an item."""

        def write() -> None:
            self.begin("_StorageInfo", FILESYSTEM)
            self.put_word("relative_path")
            self.put(file)
            self.put_word("offset")

        self.put_cached(("file", file), write)
        self.out += integer(offset)
        self.put_word("length")
        self.out += integer(length) + _END

    def places(self, tensor: StateRecord) -> None:
        """Write ``MetadataIndex`` and ``_StorageInfo`` of each chunk."""
        files, offsets, lengths = tensor.chunks.items
        boxes = tensor.boxes
        if boxes in self._offsets and self._pickled.keys() >= {("file", file) for file in {*files}}:
            self._write_from_cache(tensor, files, offsets, lengths)
            return
        # One by one, until the bytes of every offset repeat.
        corners = list(map(tuple, boxes.lo.tolist()))
        items = zip(files, offsets, lengths, strict=True)
        for number, (lo, item) in enumerate(zip(corners, items, strict=True)):
            self.index(tensor.key)
            self.put_cached(("offset", number, lo), partial(self._put_offset, number, lo))
            self.item(*item)
        numbered = [("offset", number, lo) for number, lo in enumerate(corners)]
        if self._pickled.keys() >= set(numbered):
            self._offsets[boxes] = tuple(map(self._pickled.__getitem__, numbered))

    def _write_from_cache(self, tensor: StateRecord, files: list[str], offsets: list[int], lengths: list[int]) -> None:
        """Write the places of a tensor from bytes written before, except for its key and numbers."""
        start = len(self.out)
        self.index(tensor.key)
        index = bytes(self.out[start:])
        del self.out[start:]
        heads = {file: self._pickled["file", file] for file in {*files}}
        ends = {length: self._pickled["length"] + integer(length) + _END for length in {*lengths}}
        places = zip(self._offsets[tensor.boxes], files, offsets, lengths, strict=True)
        self.out += b"".join(
            [index + box + heads[file] + integer(offset) + ends[length] for box, file, offset, length in places]
        )

    def index(self, key: str) -> None:
        self.begin("MetadataIndex", METADATA)
        self.put_word("fqn")
        self.put(key)

    def _put_offset(self, number: int, lo: Index) -> None:
        for value in ("offset", _make_size(lo), "index", number):
            self.put(value)
        self.out += _END


def _make_object(kind: str, state: object = None) -> Record:
    return Record(Global(f"{METADATA} {kind}"), (), state)


def _make_size(sizes: Index) -> Record:
    return Record(Global("torch Size"), (sizes,))


def _make_tensor(tensor: StateRecord) -> Record:
    layout = Record(Global("torch.serialization _get_layout"), ("torch.strided",))
    contiguous = Record(Global(f"{METADATA} _MEM_FORMAT_ENCODING"), (0,))
    properties = (Global(f"torch {tensor.dtype}"), layout, False, contiguous, False)
    chunks = []
    for box in tensor.boxes:
        chunks.append(
            _make_object("ChunkStorageMetadata", {"offsets": _make_size(box.lo), "sizes": _make_size(box.shape)})
        )
    return _make_object(
        "TensorStorageMetadata",
        {
            "properties": _make_object("TensorProperties", properties),
            "size": _make_size(tensor.shape),
            "chunks": chunks,
        },
    )
