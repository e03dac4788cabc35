"""A file of ``torch.save``: nested data with tensors anywhere in it, read without running anything.

It is one uncompressed zip archive: ``data.pkl`` describes the object, ``data/<key>`` are the elements of its storages.

Sources: ``torch/serialization.py`` (``_save``), ``torch/_utils.py`` and ``torch/_tensor.py`` (``__reduce_ex__``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ....algebra.box import Box, Index
from ....names.errors import SourceError, about
from ....names.keys import key_of
from ....names.vocabulary import KeyPath
from ....record.record import Chunk, Chunks, Extent, StateRecord
from ...io import limits
from ...io.checksums import crc32
from ...io.location import Location
from ...io.regular import open_regular
from ...reading.dtypes import itemsize
from ...reading.payloads import Payloads, compare_checksums
from .inert_pickle import Anything, Global, Record, expect, unpickle
from .stored_zip import (
    ZipMember,
    member_data,
    read_members,
)
from .tensor_item import described_tensor, is_row_major


class MemberPayloads(Payloads):
    """Reads files of ``torch.save``, with a checksum for each storage that tensors use in part.

    Args:
        in_memory: bytes by file name that replace files of the directory.
        checksums: the CRC-32 of items that are larger than the payloads in them.
    """

    def __init__(self, directory: Location, in_memory: Mapping[str, bytes], checksums: Mapping[Extent, int]) -> None:
        super().__init__(directory, in_memory)
        self._checksums = checksums
        self._checked_items: set[Extent] = set()

    has_inner_checksums = True

    def has_checksum(self, chunk: Chunk) -> bool:
        return super().has_checksum(chunk) or chunk.item in self._checksums

    def check_item(self, item: Extent, parts: Iterable[memoryview] | None = None) -> None:
        """Compare a whole storage with its CRC-32: once, and whenever its bytes are given."""
        expected = self._checksums.get(item)
        if expected is not None and (parts is not None or item not in self._checked_items):
            compare_checksums("CRC-32", f"{crc32(parts or self.bands(item)):08x}", f"{expected:08x}")
            self._checked_items.add(item)


_TYPES = ("torch Tensor", "torch.nn.parameter Parameter")
_PARAMETERS = ("torch._utils _rebuild_parameter", "torch._utils _rebuild_parameter_with_state")
WITH_TYPE = "torch._tensor _rebuild_from_type_v2"
"""The function that makes a tensor of its own class, or with attributes."""

_WITH_ATTRIBUTES = (_PARAMETERS[1], WITH_TYPE)
_TENSORS = frozenset((*_PARAMETERS, WITH_TYPE, "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3"))


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """Holds a tensor of such a file, as its chunk with a box that begins at 0, and the attributes the program set."""

    dtype: str
    chunk: Chunk
    attributes: Mapping[object, object] = field(default_factory=dict)

    @property
    def shape(self) -> Index:
        return self.chunk.box.shape


@dataclass(frozen=True, slots=True)
class TorchFile:
    """Holds one file.  ``content`` is the object as inert data; `tensor` decodes the tensors in it."""

    name: str
    content: object
    members: Mapping[str, ZipMember]
    described: int
    """Bytes of the pickle; limits on its contents are in proportion to it."""

    def tensor(self, value: object) -> SavedTensor:
        """Decode a tensor, parameter or tensor with attributes of the content.

        The item of its chunk is the whole storage; the chunk has a checksum if the tensor is all of that.

        Raises:
            SourceError: it is not a tensor, or its elements are not without gaps in a member of the file.
        """
        tensor = described_tensor(_bare(value))
        member = self.members.get(f"data/{tensor.storage}")
        size = itemsize(tensor.dtype)
        if member is None or member.length != tensor.count * size:
            raise SourceError(f"expected {tensor.count * size} bytes in data/{tensor.storage}, found {member}")
        # A tensor that is not all of its storage has no checksum of its own.
        item = Extent(self.name, member.offset, member.length)
        start = member.offset + tensor.start * size
        payload = Extent(self.name, start, math.prod(tensor.shape) * size)
        strides = None if is_row_major(tensor.shape, tensor.strides) else tensor.strides
        crc32 = member.crc32 if payload == item else None
        chunk = Chunk(Box.of(tensor.shape), item, payload, crc32=crc32, strides=strides)
        match value:
            case Record(kind=kind, args=(_, _, _, dict() as state)) if kind in _WITH_ATTRIBUTES:
                return SavedTensor(tensor.dtype, chunk, state)
        return SavedTensor(tensor.dtype, chunk)

    def whole_tensor(self, value: object) -> SavedTensor:
        """Decode a tensor as `tensor` does; refuse one that is not a whole member of the file in row-major order."""
        tensor = self.tensor(value)
        chunk = tensor.chunk
        if chunk.payload != chunk.item or chunk.strides is not None:
            raise SourceError(
                f"{self.name}: expected a storage of just the elements of shape {tensor.shape} in row-major order, "
                f"found a view of {chunk.item.length} bytes with strides {chunk.strides}"
            )
        return tensor


def class_of(value: object) -> str | None:
    """Return the class of a tensor that is of another than torch's, as ``"module name"``; None for others."""
    match value:
        case Record(kind=kind, args=(inner, *_)) if kind in _PARAMETERS:
            return class_of(inner)
        case Record(kind=kind, args=(Global(), Global() as tensor_class, *_)) if kind == WITH_TYPE:
            return None if tensor_class in _TYPES else str(tensor_class)
    return None


def is_tensor(value: object) -> bool:
    """Return whether a part of the content describes a tensor, of any kind."""
    return isinstance(value, Record) and value.kind in _TENSORS


_MAPPINGS = frozenset({"collections OrderedDict", "collections defaultdict"})


def is_mapping(value: object) -> bool:
    """Return whether a part of a pickle is a dict, an OrderedDict or a defaultdict."""
    return type(value) is dict or (isinstance(value, Record) and value.kind in _MAPPINGS)


def mapping(value: object) -> Mapping[object, object]:
    """Return the items of a dict, an OrderedDict or a defaultdict; raise `SourceError` for another part of a pickle."""
    if isinstance(value, Record) and value.kind in _MAPPINGS:
        return value.items or {}
    return expect(dict, value)


def whole_record(path: KeyPath, tensor: SavedTensor) -> StateRecord:
    """Return the record of a tensor that one chunk holds."""
    chunks = Chunks.of([tensor.chunk], len(tensor.shape))
    return StateRecord(key_of(path), path, tensor.shape, tensor.dtype, chunks)


def checksums_inside(files: Iterable[TorchFile], tensors: Iterable[StateRecord]) -> dict[Extent, int]:
    """Return the CRC-32 of each storage in the files that a tensor uses only in part."""
    # A tensor that is all of its storage has the checksum itself.
    storages: set[Extent] = set()
    for tensor in tensors:
        storages.update(chunk.item for chunk in tensor.chunks if chunk.crc32 is None)
    checksums = {}
    for file in files:
        for name, member in file.members.items():
            extent = Extent(file.name, member.offset, member.length)
            if name.startswith("data/") and member.crc32 is not None and extent in storages:
                checksums[extent] = member.crc32
    return checksums


def read_torch_file(directory: Location, name: str) -> TorchFile:
    """Read a file of a directory, but not its tensors' elements.

    Raises:
        SourceError: it is missing, damaged, big-endian, or not an archive of ``torch.save``.
    """
    with open_regular(directory / name) as file, about(directory / name):
        if file.read(0, min(file.size, 2)) == b"\x80\2":
            raise SourceError(
                "expected the zip archive that torch.save writes since 1.6, found the form before that, or another "
                "pickle: load it with torch and save it again"
            )
        # Its members are a pickle, which may be long in proportion to the elements, and the storages.
        members = {member.name: member for member in read_members(file.read, file.size)}
        if "data.pkl" not in members:
            raise SourceError(f"expected a file of torch.save, found a zip archive of {', '.join(members):.200}")
        if "byteorder" in members and member_data(file.read, members["byteorder"], 64) != b"little":
            raise SourceError("expected little-endian elements")
        pickled = members["data.pkl"].length
        max_bytes = limits.SMALL_DESCRIPTION + max(file.on_disk - pickled, 0)
        limits.check_limit(pickled, max_bytes, "bytes in data.pkl, in proportion to the other members of the file")
        content = unpickle(member_data(file.read, members["data.pkl"], pickled), Anything())
        return TorchFile(name, content, members, described=pickled)


def _bare(value: object) -> object:
    """Return the plain tensor in a parameter, or in one with attributes such as Megatron's ``partition_dim``."""
    match value:
        case Record(kind=kind, args=args) if kind in _PARAMETERS:
            return args[0] if isinstance(args, tuple) and args else value
        case Record(kind=kind, args=(Global() as call, Global() as tensor_class, args, _)) if kind == WITH_TYPE:
            return Record(call, args) if tensor_class in _TYPES else value
    return value
