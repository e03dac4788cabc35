"""The ``.metadata`` file of torch.distributed.checkpoint (DCP), written for a million chunks."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import lru_cache

from ...algebra.box import Index
from ...names.errors import LayoutError, SourceError
from ...programs.signs import FILESYSTEM, METADATA, OUR_MARK
from ...record.chunks import Boxes
from ...record.record import Blob, Manifest, StateRecord
from ..reading.dtypes import DTYPES
from .torch_save.inert_pickle import Global, Pickler, Record, integer


def metadata_parts(manifest: Manifest) -> Iterator[bytes]:
    """Yield the ``.metadata`` with which stock DCP reads the items of this manifest, in parts.

    Raises:
        LayoutError: a key occurs twice, or two chunks of a tensor begin at the same place.
    """
    entries: tuple[StateRecord | Blob, ...] = (*manifest.tensors, *manifest.blobs)
    _refuse_twice("key", (entry.key for entry in entries))
    for tensor in manifest.tensors:
        if len(tensor.boxes) > 1 and not _differ(tensor.boxes):
            _refuse_twice(f"offset of the boxes of {tensor.key!r}", map(tuple, tensor.boxes.lo.tolist()))
    return _pickled_parts(manifest.tensors, manifest.blobs)


@lru_cache(maxsize=1024)
def _differ(boxes: Boxes) -> bool:
    """Return whether no two boxes begin at the same place.  Cached: tensors have few geometries."""
    return len(set(map(tuple, boxes.lo.tolist()))) == len(boxes)


def _refuse_twice(what: str, values: Iterable[Hashable]) -> None:
    if twice := [value for value, count in Counter(values).items() if count > 1]:
        raise LayoutError(f"expected each {what} once; found {twice[0]!r} twice")


def _pickled_parts(tensors: Sequence[StateRecord], blobs: Sequence[Blob]) -> Iterator[bytes]:
    """Yield the ``.metadata`` file of these tensors and items, in parts of bounded size.

    It names no directory of a save (``storage_meta`` is None) and has `OUR_MARK`; DCP accepts both.
    """
    writer = _MetadataWriter()
    writer.begin("Metadata", METADATA)
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
    entries: tuple[StateRecord | Blob, ...] = (*tensors, *blobs)
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
        self._offsets: dict[Boxes, tuple[bytes, ...]] = {}
        """The bytes written for the offsets of each box, once all of them repeat."""
        self._files: dict[str, bytes] = {}
        """The bytes written for each file between the offsets of a box and those of its item, once they repeat."""

    def full_parts(self) -> Iterator[bytes]:
        """Yield the bytes written so far, if they are enough to be passed on."""
        if len(self.out) >= _PART:
            yield bytes(self.out)
            self.out.clear()

    def begin(self, kind: str, module: str) -> None:
        """Begin an object whose attributes follow; `_END` ends it."""
        self.again((kind, module), lambda: self.put(Record(Global(f"{module} {kind}"), ())))
        self.out += _DICT

    def again(self, name: object, write: Callable[[], None]) -> None:
        """Write the value of this name: opcodes are repeated once they make no new entries in the pickle's memo."""
        if name in self._pickled:
            self.out += self._pickled[name]
            return
        start, known = len(self.out), len(self.memo)
        write()
        if len(self.memo) == known:
            self._pickled[name] = bytes(self.out[start:])

    def tensor(self, tensor: StateRecord) -> None:
        if tensor.dtype not in DTYPES:
            raise SourceError(f"expected a dtype of torch, found {tensor.dtype!r}")
        self.again(("tensor", tensor.dtype, tensor.shape, tensor.boxes), lambda: self.put(_tensor_record(tensor)))

    def item(self, file: str, offset: int, length: int) -> None:
        start, known = len(self.out), len(self.memo)
        self.begin("_StorageInfo", FILESYSTEM)
        self.again("relative_path", lambda: self.put("relative_path"))
        self.put(file)
        self.again("offset", lambda: self.put("offset"))
        if len(self.memo) == known:
            self._files[file] = bytes(self.out[start:])
        self.out += integer(offset)
        self.again("length", lambda: self.put("length"))
        self.out += integer(length) + _END

    def places(self, tensor: StateRecord) -> None:
        """Write ``MetadataIndex`` and ``_StorageInfo`` of each chunk."""
        files, offsets, lengths = tensor.chunks.items
        if tensor.boxes in self._offsets and self._files.keys() >= set(files):
            self._repeat(tensor, files, offsets, lengths)
            return
        corners = list(map(tuple, tensor.boxes.lo.tolist()))
        items = zip(files, offsets, lengths, strict=True)
        for number, (lo, item) in enumerate(zip(corners, items, strict=True)):
            self._index(tensor.key)
            self._offset(number, lo)
            self.item(*item)
        numbered = [("offset", number, lo) for number, lo in enumerate(corners)]
        if self._pickled.keys() >= set(numbered):
            self._offsets[tensor.boxes] = tuple(map(self._pickled.__getitem__, numbered))

    def _repeat(self, tensor: StateRecord, files: list[str], offsets: list[int], lengths: list[int]) -> None:
        """Write the places of a tensor from bytes written before, except for its key and numbers."""
        start = len(self.out)
        self._index(tensor.key)
        index = bytes(self.out[start:])
        del self.out[start:]
        ends = {length: self._pickled["length"] + integer(length) + _END for length in set(lengths)}
        places = zip(self._offsets[tensor.boxes], files, offsets, lengths, strict=True)
        self.out += b"".join(
            [index + box + self._files[file] + integer(offset) + ends[length] for box, file, offset, length in places]
        )

    def _index(self, key: str) -> None:
        self.begin("MetadataIndex", METADATA)
        self.again("fqn", lambda: self.put("fqn"))
        self.put(key)

    def _offset(self, number: int, lo: Index) -> None:
        def write() -> None:
            for value in ("offset", _size(lo), "index", number):
                self.put(value)
            self.out += _END

        self.again(("offset", number, lo), write)


def _object(kind: str, state: object = None, module: str = METADATA) -> Record:
    return Record(Global(f"{module} {kind}"), (), state)


def _size(sizes: Index) -> Record:
    return Record(Global("torch Size"), (sizes,))


def _tensor_record(tensor: StateRecord) -> Record:
    layout = Record(Global("torch.serialization _get_layout"), ("torch.strided",))
    contiguous = Record(Global(f"{METADATA} _MEM_FORMAT_ENCODING"), (0,))
    properties = (Global(f"torch {tensor.dtype}"), layout, False, contiguous, False)
    chunks = [
        _object("ChunkStorageMetadata", {"offsets": _size(box.lo), "sizes": _size(box.shape)}) for box in tensor.boxes
    ]
    return _object(
        "TensorStorageMetadata",
        {"properties": _object("TensorProperties", properties), "size": _size(tensor.shape), "chunks": chunks},
    )
