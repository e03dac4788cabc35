"""A file of ``torch.save``: nested data with tensors anywhere in it, read without running anything.

It is one uncompressed zip archive: ``data.pkl`` describes the object, ``data/<key>`` are the elements of its storages.

Sources: ``torch/serialization.py`` (``_save``), ``torch/_utils.py`` and ``torch/_tensor.py`` (``__reduce_ex__``) for
the ways in which a tensor is pickled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ....box import Box, Index
from ....errors import SourceError, about
from ....record import Chunk, Extent
from ...io import limits
from ...io.checksums import crc32
from ...io.location import Location
from ...io.regular import File, open_regular
from ...reading.dtypes import itemsize
from ...reading.payloads import BAND_BYTES, Payloads, compare
from .inert_pickle import Anything, Global, Record, unpickle
from .stored_zip import ZipMember, member_data, read_members
from .tensor_item import described, is_row_major


class MemberPayloads(Payloads):
    """The bytes of files of ``torch.save``, with a checksum for each storage of which tensors use parts.

    Args:
        in_memory: bytes by file name that stand in for files of the directory.
        checksums: the CRC-32 of items that are larger than the payloads in them.
    """

    def __init__(self, directory: Location, in_memory: Mapping[str, bytes], checksums: Mapping[Extent, int]) -> None:
        super().__init__(directory, in_memory)
        self._checksums = checksums
        self._sound: set[Extent] = set()

    def is_checked(self, chunk: Chunk) -> bool:
        return super().is_checked(chunk) or chunk.item in self._checksums

    def check_inside(self, item: Extent) -> None:
        """Compare a whole storage with its CRC-32, once."""
        expected = self._checksums.get(item)
        if expected is None or item in self._sound:
            return
        starts = range(item.offset, item.end, BAND_BYTES)
        parts = (self.view(Extent(item.file, start, min(BAND_BYTES, item.end - start))) for start in starts)
        compare("CRC-32", f"{crc32(parts):08x}", f"{expected:08x}")
        self._sound.add(item)


_TYPES = ("torch Tensor", "torch.nn.parameter Parameter")
_PARAMETERS = ("torch._utils _rebuild_parameter", "torch._utils _rebuild_parameter_with_state")
WITH_TYPE = "torch._tensor _rebuild_from_type_v2"
"""The function that makes a tensor of a class of its own, or with attributes."""

_TENSORS = frozenset((*_PARAMETERS, WITH_TYPE, "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3"))


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of such a file: its raw little-endian row-major elements are ``payload``.

    ``attributes`` are those that the program has set on it.
    """

    dtype: str
    shape: Index
    payload: Extent
    crc32: int | None
    attributes: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TorchFile:
    """One file.  ``content`` is the object as inert data; `tensor` decodes the tensors in it."""

    name: str
    content: object
    members: Mapping[str, ZipMember]
    described: int
    """Bytes of the pickle, by which limits on what is in it are measured."""

    def tensor(self, value: object) -> SavedTensor:
        """Decode the tensor that part of the content stands for, also if it is a parameter or has attributes.

        Raises:
            SourceError: it is not a tensor, or its elements are not a whole member of the file in row-major order.
        """
        tensor = described(_bare(value))
        tensor.check_whole()
        member = self.members.get(f"data/{tensor.storage}")
        size = math.prod(tensor.shape) * itemsize(tensor.dtype)
        if member is None or member.length != size or not is_row_major(tensor.shape, tensor.strides):
            raise SourceError(
                f"{self.name}: expected {size} bytes of row-major elements in data/{tensor.storage} for {tensor.dtype} "
                f"of shape {tensor.shape}, found strides {tensor.strides} and {member}"
            )
        payload = Extent(self.name, member.offset, member.length)
        return SavedTensor(tensor.dtype, tensor.shape, payload, member.crc32, _attributes(value))

    def chunk(self, value: object) -> tuple[str, Chunk]:
        """Return the dtype of a tensor, and its chunk with a box that begins at 0.

        Its item is the whole storage, of which it may be a part; it has a checksum if it is all of that.

        Raises:
            SourceError: it is not a tensor, or its elements are not without gaps in a member of the file.
        """
        tensor = described(_bare(value))
        member = self.members.get(f"data/{tensor.storage}")
        size = itemsize(tensor.dtype)
        if member is None or member.length != tensor.count * size:
            raise SourceError(f"expected {tensor.count * size} bytes in data/{tensor.storage}, found {member}")
        item = Extent(self.name, member.offset, member.length)
        start = member.offset + tensor.start * size
        payload = Extent(self.name, start, math.prod(tensor.shape) * size)
        strides = None if is_row_major(tensor.shape, tensor.strides) else tensor.strides
        crc32 = member.crc32 if payload == item else None
        return tensor.dtype, Chunk(Box.of(tensor.shape), item, payload, crc32=crc32, strides=strides)

    @property
    def checksums(self) -> dict[Extent, int]:
        return {
            Extent(self.name, member.offset, member.length): member.crc32
            for name, member in self.members.items()
            if name.startswith("data/") and member.crc32 is not None
        }


def is_tensor(value: object) -> bool:
    """Return whether a part of the content stands for a tensor, of any kind."""
    return isinstance(value, Record) and value.kind in _TENSORS


def read_torch_file(directory: Location, name: str) -> TorchFile:
    """Read a file of a directory, but not its tensors' elements.

    Raises:
        SourceError: it is missing, damaged, big-endian, or not an archive of ``torch.save``.
    """
    with open_regular(directory / name) as file, about(directory / name):
        return _read(file, name)


def _read(file: File, name: str) -> TorchFile:
    if file.read(0, min(file.size, 2)) == b"\x80\2":
        raise SourceError(
            "expected the zip archive that torch.save writes since 1.6, found the form before that, or another pickle: "
            "load it with torch and save it again"
        )
    members = {member.name: member for member in read_members(file.read, file.size)}
    if "data.pkl" not in members:
        raise SourceError(f"expected a file of torch.save, found a zip archive of {', '.join(members):.200}")
    if "byteorder" in members and member_data(file.read, members["byteorder"], 64) != b"little":
        raise SourceError("expected little-endian elements")
    pickled = members["data.pkl"].length
    most = limits.SMALL_DESCRIPTION + max(file.on_disk - pickled, 0)
    limits.check_limit(pickled, most, "bytes in data.pkl, in proportion to the rest of the file")
    content = unpickle(member_data(file.read, members["data.pkl"], pickled), Anything())
    return TorchFile(name, content, members, pickled)


def _bare(value: object) -> object:
    """Return the plain tensor in a parameter, or in a tensor with attributes such as Megatron's ``partition_dim``."""
    match value:
        case Record(kind=kind, args=args) if kind in _PARAMETERS:
            return args[0] if isinstance(args, tuple) and args else value
        case Record(kind=kind, args=(Global() as call, Global() as own, args, _)) if kind == WITH_TYPE:
            return Record(call, args) if own in _TYPES else value
    return value


def _attributes(value: object) -> Mapping[str, object]:
    match value:
        case Record(
            kind="torch._utils _rebuild_parameter_with_state" | "torch._tensor _rebuild_from_type_v2",
            args=(_, _, _, dict() as state),
        ):
            return {str(name): attribute for name, attribute in state.items()}
    return {}
