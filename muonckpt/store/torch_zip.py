"""One stored item of DCP: the stream that ``torch.save`` writes, an uncompressed zip archive.

A tensor's item has these members, each after a padded local header, in this order::

    archive/data.pkl                      a pickle: dtype, shape, strides
    archive/.format_version               "1"
    archive/.storage_alignment            "64"
    archive/byteorder                     "little"
    archive/data/0                        the payload: raw elements, 64-byte aligned within the item
    archive/version                       "3\\n"
    archive/.data/serialization_id        40 digits that no reader checks
    central directory, zip64 end record and locator, end record

Everything but the payload follows from dtype, shape and the payload's CRC-32.  So :func:`frame` gives the bytes
before and after it, and an item is written by laying a payload between them: byte-identical to ``torch.save`` of
a contiguous CPU tensor (torch 2.13).  All offsets inside are relative to the item, so it can be moved.

Sources: PKWARE's APPNOTE.TXT for the zip structures; ``caffe2/serialize/inline_container.cc`` and the miniz of
PyTorch for what it puts in them; ``torch/serialization.py`` (``_save``) and ``torch/_utils.py`` for the pickle.
"""

from __future__ import annotations

import itertools
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ..box import Index, row_major
from ..errors import SourceError
from .dtypes import DTYPES, itemsize
from .metadata_pickle import PERSISTENT, Global, Record, expect, integer, ints, unpickle

Read = Callable[[int, int], bytes]
"""``read(offset, length)``: that range of a file, in bytes; shorter where the file ends before."""

SERIALIZATION_ID = b"0" * 40
"""What we write where torch writes a hash of the item's names and checksums."""

_ALIGNMENT = 64
_BIG = 0xFFFFFFFF
_PAYLOAD = "data/0"
_HEAD, _TAIL = 1024, 2048
_LARGEST_DIRECTORY = 1 << 24
_LARGEST_PICKLE = 1 << 12

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")

_REBUILD = {"torch._utils _rebuild_tensor_v2": 6, "torch._utils _rebuild_tensor_v3": 7}
_UNTYPED = "torch.storage UntypedStorage"
_TYPED = {f"torch {dtype.storage}": name for name, dtype in DTYPES.items() if dtype.storage}
_NAMES = frozenset(
    {PERSISTENT, _UNTYPED, "collections OrderedDict", *_REBUILD, *_TYPED, *(f"torch {name}" for name in DTYPES)}
)


# Writing.


@dataclass(frozen=True, slots=True)
class _Entry:
    """A member as the central directory lists it.  ``at`` is where its local header begins in the item."""

    name: str
    at: int
    size: int
    crc32: int

    @property
    def flags(self) -> int:
        """The name is UTF-8, and a data descriptor follows, which torch omits for an empty member."""
        return 0x808 if self.size else 0x800

    def zip64(self, packed: int) -> bytes:
        """The extra field with the numbers that do not fit in 32 bits: both sizes, and the header's offset."""
        sizes = (self.size, packed) if self.size >= _BIG else ()
        numbers = (*sizes, self.at) if self.at >= _BIG else sizes
        return struct.pack(f"<2H{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""


@dataclass(frozen=True, slots=True)
class Frame:
    """A tensor's item without its payload; all numbers in bytes.

    ``head`` is what comes before the payload of ``payload_length`` bytes, ``length`` the length of the whole item.
    ``members`` are those of the head and then the payload, whose checksum is not known yet.
    """

    head: bytes
    payload_length: int
    length: int
    members: tuple[_Entry, ...]

    @property
    def payload_offset(self) -> int:
        """Where the payload begins in the item."""
        return len(self.head)

    def tail(self, crc32: int, serialization_id: bytes = SERIALIZATION_ID) -> bytes:
        """What comes after the payload whose CRC-32 this is.  ``serialization_id`` has 40 ASCII digits."""
        return _tail(self.members, len(self.head) + self.payload_length, crc32, serialization_id)


def frame(dtype: str, shape: Sequence[int]) -> Frame:
    """The item of a dense row-major tensor of this dtype (torch's name) and shape (elements), but for its payload.

    Raises:
        SourceError: the dtype is not one that torch can save.
    """
    payload_length = math.prod(shape) * itemsize(dtype)
    contents = (
        ("data.pkl", _data_pickle(dtype, tuple(shape))),
        (".format_version", b"1"),
        (".storage_alignment", str(_ALIGNMENT).encode()),
        ("byteorder", b"little"),
    )
    head, members = _store(contents, 0)
    payload = _Entry(_PAYLOAD, len(head), payload_length, 0)
    head += _local(payload)
    payload_end = len(head) + payload_length
    length = payload_end + len(_tail((*members, payload), payload_end, 0, SERIALIZATION_ID))
    return Frame(head, payload_length, length, (*members, payload))


def _tail(members: tuple[_Entry, ...], payload_end: int, crc32: int, serialization_id: bytes) -> bytes:
    payload = replace(members[-1], crc32=crc32)
    descriptor = _descriptor(payload)
    start = payload_end + len(descriptor)
    rest, others = _store((("version", b"3\n"), (".data/serialization_id", serialization_id)), start)
    entries = (*members[:-1], payload, *others)
    directory = b"".join(map(_central, entries))
    return descriptor + rest + directory + _end(len(entries), start + len(rest), len(directory))


def _store(contents: Iterable[tuple[str, bytes]], at: int) -> tuple[bytes, tuple[_Entry, ...]]:
    """Small members, one behind another from byte ``at`` of the item."""
    out, entries = b"", []
    for name, data in contents:
        entry = _Entry(name, at + len(out), len(data), zlib.crc32(data))
        entries.append(entry)
        out += _local(entry) + data + _descriptor(entry)
    return out, tuple(entries)


def _local(entry: _Entry) -> bytes:
    """A local header, padded so that the member's data is aligned.  Checksum and sizes follow the data."""
    name = f"archive/{entry.name}".encode()
    zip64 = entry.zip64(packed=0)
    padding = -(entry.at + _LOCAL.size + len(name) + len(zip64) + 4) % _ALIGNMENT
    extra = zip64 + b"FB" + struct.pack("<H", padding) + b"Z" * padding
    return _LOCAL.pack(b"PK\3\4", 0, entry.flags, 0, 0, 0, 0, 0, 0, len(name), len(extra)) + name + extra


def _descriptor(entry: _Entry) -> bytes:
    if not entry.size:
        return b""
    sizes = "<4sI2Q" if entry.size >= _BIG or entry.at >= _BIG else "<4s3I"
    return struct.pack(sizes, b"PK\7\x08", entry.crc32, entry.size, entry.size)


def _central(entry: _Entry) -> bytes:
    name = f"archive/{entry.name}".encode()
    extra = entry.zip64(packed=entry.size)
    size, at = min(entry.size, _BIG), min(entry.at, _BIG)
    numbers = (0, 0, entry.flags, 0, 0, 0, entry.crc32, size, size, len(name), len(extra), 0, 0, 0, 0, at)
    return _CENTRAL.pack(b"PK\1\2", *numbers) + name + extra


def _end(count: int, at: int, size: int) -> bytes:
    """The end records of a directory of ``size`` bytes at byte ``at``.  torch writes all three for any size."""
    return (
        _END64.pack(b"PK\6\6", _END64.size - 12, 798, 45, 0, 0, count, count, size, at)
        + _LOCATOR.pack(b"PK\6\7", 0, at + size, 1)
        + _END.pack(b"PK\5\6", 0, 0, count, count, size, min(at, _BIG), 0)
    )


def _data_pickle(dtype: str, shape: Index) -> bytes:
    """The pickle of a tensor as Python writes it in protocol 2; ``q`` gives each new object its memo number."""
    numel, storage = math.prod(shape), DTYPES[dtype].storage
    version, kind, count, element = b"2", f"torch\n{storage}".encode(), numel, b""
    if storage is None:
        version, kind, count = b"3", b"torch.storage\nUntypedStorage", numel * itemsize(dtype)
        element = b"ctorch\n" + dtype.encode() + b"\nq%c"
    strides = [math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape))]
    after = b"\x89ccollections\nOrderedDict\nq%c)Rq%c" + element + b"tq%cRq%c."
    numbers = itertools.count(8 if shape else 6)
    return (
        b"\x80\2ctorch._utils\n_rebuild_tensor_v%b\nq\0((X\7\0\0\0storageq\1c%b\nq\2" % (version, kind)
        + b"X\1\0\0\x000q\3X\3\0\0\0cpuq\4%btq\5QK\0" % integer(count)
        + (_tuple(shape) + b"q\6" + _tuple(strides) + b"q\7" if shape else b"))")
        + after % tuple(itertools.islice(numbers, after.count(b"%c")))
    )


def _tuple(values: Sequence[int]) -> bytes:
    items = b"".join(map(integer, values))
    return b"(" + items + b"t" if len(values) > 3 else items + b"\x85\x86\x87"[len(values) - 1 : len(values)]


# Reading.


@dataclass(frozen=True, slots=True)
class Member:
    """A member of an item: its name without the archive's, and its data as a range of bytes in the file.

    ``crc32`` is None where the writer switched checksums off; every one in the item is 0 then.
    """

    name: str
    offset: int
    length: int
    crc32: int | None


@dataclass(frozen=True, slots=True)
class TensorItem:
    """A stored tensor: shape and strides in elements, its payload as a range of bytes in the file.

    The payload holds every element once, in the order that the strides say.  ``crc32`` is None where the writer
    switched checksums off.
    """

    dtype: str
    shape: Index
    strides: Index
    offset: int
    length: int
    crc32: int | None

    @property
    def row_major(self) -> bool:
        """Whether the elements lie in row-major order; the strides of dims of size 1 do not matter."""
        return 0 in self.shape or _steps(self.shape, self.strides) == _steps(self.shape, row_major(self.shape))


def _steps(shape: Index, strides: Index) -> list[tuple[int, int]]:
    """(stride, size) of the dims that have more than one index."""
    return [(stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1]


def read_members(read: Read, offset: int, length: int) -> tuple[Member, ...]:
    """The members of the item that is ``length`` bytes at byte ``offset`` of a file, in the order of their data.

    Also for items that are not tensors; what their pickles hold is never looked at.

    Raises:
        SourceError: it is not a zip archive as torch writes them, or members overlap or leave the item.
    """
    return _members(_window(read, offset, length), offset, length)


def read_tensor(read: Read, offset: int, length: int) -> TensorItem:
    """The tensor in the item that is ``length`` bytes at byte ``offset`` of a file.  Does not read its payload.

    Raises:
        SourceError: it is not a tensor's item, or the payload is not simply the tensor's elements: encoded,
            big-endian, a view with holes, lazily conjugated; or a checksum of its small members is wrong.
    """
    part = _window(read, offset, length)
    members = {member.name: member for member in _members(part, offset, length)}
    if [name for name in members if name.startswith("data/")] != [_PAYLOAD] or "data.pkl" not in members:
        raise SourceError(f"expected the item of one tensor, found a zip archive of {', '.join(members)}")

    def content(name: str) -> bytes:
        member = members[name]
        if member.length > _LARGEST_PICKLE:
            raise SourceError(f"expected at most {_LARGEST_PICKLE} bytes in {name}, found {member.length}")
        data = part(member.offset - offset, member.length)
        if member.crc32 is not None and zlib.crc32(data) != member.crc32:
            raise SourceError(f"expected checksum {member.crc32:#010x} for {name}, found {zlib.crc32(data):#010x}")
        return data

    if "byteorder" in members and content("byteorder") != b"little":
        raise SourceError(f"expected little-endian elements, found {content('byteorder')!r}")
    dtype, shape, strides = _tensor(content("data.pkl"))
    payload = members[_PAYLOAD]
    size = math.prod(shape) * itemsize(dtype)
    if payload.length != size:
        raise SourceError(f"expected {size} bytes for {dtype} of shape {shape}, found {payload.length}")
    return TensorItem(dtype, shape, strides, payload.offset, payload.length, payload.crc32)


@lru_cache(maxsize=1024)
def _tensor(data: bytes) -> tuple[str, Index, Index]:
    """Dtype, shape and strides in the pickle of a tensor, whose storage must hold each of its elements once."""
    call = expect(Record, unpickle(data, _NAMES))
    args, arity = expect(tuple, call.args), _REBUILD.get(call.kind)
    if arity is None or len(args) < arity:
        raise SourceError(f"expected the pickle of a tensor, found {call.kind} of {len(args)} arguments")
    if len(args) > arity:
        flags = [key for key in args[-1] if type(key) is str] if type(args[-1]) is dict else "?"
        raise SourceError(f"expected a plain tensor, found one with the flags {flags}: resolve them before saving")
    storage, start, size, stride, _, hooks, *element = args
    match storage:
        case Record(kind=reference, args=("storage", Global() as kind, "0", str(), int() as count)):
            known = reference == PERSISTENT and expect(Record, hooks).args == ()
        case _:
            known = False
    if not known:
        raise SourceError("expected a tensor of storage '0' without hooks, found something else")
    dtype = expect(Global, element[0]).removeprefix("torch ") if element else _TYPED.get(kind, kind)
    if bool(element) != (kind == _UNTYPED) or dtype not in DTYPES:
        raise SourceError(f"expected the storage and the dtype to agree, found {kind} and {dtype}")
    shape, strides = ints(size), ints(stride)
    if start != 0 or count != math.prod(shape) * (itemsize(dtype) if element else 1):
        raise SourceError(f"expected a storage of just the elements of shape {shape}, found a view of {count}")
    if not _is_dense(shape, strides):
        raise SourceError(f"expected each element once, found strides {strides} for shape {shape}")
    return dtype, shape, strides


def _is_dense(shape: Index, strides: Index) -> bool:
    """Whether these strides visit each of the elements from 0 on once, in whatever order of dims."""
    if len(shape) != len(strides):
        return False
    step = 1
    for stride, size in sorted(_steps(shape, strides)):
        if stride != step:
            return 0 in shape
        step *= size
    return True


def _window(read: Read, offset: int, length: int) -> Read:
    """Read parts of an item by offsets in it.  Its ends, which hold everything but the payload, are read once."""
    head = _exactly(read, offset, min(length, _HEAD))
    tail_at = max(length - _TAIL, 0)
    tail = _exactly(read, offset + tail_at, length - tail_at)

    def part(start: int, count: int) -> bytes:
        if start < 0 or start + count > length:
            raise SourceError(f"expected bytes {start}:{start + count} in an item of {length} bytes")
        if start + count <= len(head):
            return head[start : start + count]
        if start >= tail_at:
            return tail[start - tail_at : start - tail_at + count]
        return _exactly(read, offset + start, count)

    return part


def _exactly(read: Read, offset: int, length: int) -> bytes:
    data = bytes(read(offset, length))
    if len(data) != length:
        raise SourceError(f"expected {length} bytes at byte {offset} of the file, found {len(data)}")
    return data


def _members(part: Read, offset: int, length: int) -> tuple[Member, ...]:
    directory_at, directory = _directory(part, length)
    entries = sorted(_entries(directory), key=lambda entry: entry.at)
    split = [entry.name.partition("/") for entry in entries]
    if len({folder for folder, _, _ in split}) != 1 or len({name for _, _, name in split}) != len(entries):
        raise SourceError(f"expected members of one folder with different names, found {[e.name for e in entries]}")
    recorded = any(entry.crc32 for entry in entries)
    members = []
    for entry, next_at, (_, _, name) in zip(
        entries, [*(entry.at for entry in entries[1:]), directory_at], split, strict=True
    ):
        at = _data_at(part, entry)
        if at + entry.size > next_at:
            raise SourceError(f"expected {name} to end by byte {next_at} of the item, found {at + entry.size}")
        members.append(Member(name, offset + at, entry.size, entry.crc32 if recorded else None))
    return tuple(members)


def _directory(part: Read, length: int) -> tuple[int, bytes]:
    """Where the central directory begins in the item, and its bytes."""
    signature, *_, count, size, at, comment = _END.unpack(part(length - _END.size, _END.size))
    if signature != b"PK\5\6" or comment:
        raise SourceError(f"expected a zip archive to end in the last {_END.size} bytes, found {signature!r}")
    if count == 0xFFFF or _BIG in (size, at):
        before = length - _END.size - _LOCATOR.size
        locator, _, end64_at, _ = _LOCATOR.unpack(part(before, _LOCATOR.size))
        end64, *_, size, at = _END64.unpack(part(end64_at, _END64.size))
        if (locator, end64) != (b"PK\6\7", b"PK\6\6"):
            raise SourceError(f"expected zip64 end records, found {locator!r} and {end64!r}")
    if size > _LARGEST_DIRECTORY:
        raise SourceError(f"expected a zip directory of at most {_LARGEST_DIRECTORY} bytes, found {size}")
    return at, part(at, size)


def _entries(directory: bytes) -> Iterator[_Entry]:
    at = 0
    while at < len(directory):
        if len(directory) - at < _CENTRAL.size or directory[at : at + 4] != b"PK\1\2":
            raise SourceError(f"expected an entry at byte {at} of the zip directory, found {directory[at : at + 4]!r}")
        _, _, _, flags, method, _, _, *numbers, _, _, _, header = _CENTRAL.unpack_from(directory, at)
        crc32, packed, size, name_length, extra_length, comment_length = numbers
        name_at = at + _CENTRAL.size
        extra_at = name_at + name_length
        at = extra_at + extra_length + comment_length
        name = directory[name_at:extra_at].decode("utf-8", "replace")
        size, packed, header = _unsaturated((size, packed, header), directory[extra_at : extra_at + extra_length])
        if method or flags & ~0x808 or packed != size:
            raise SourceError(f"expected {name!r} stored plainly, found method {method}, flags {flags:#x}")
        yield _Entry(name, header, size, crc32)


def _unsaturated(numbers: tuple[int, int, int], extra: bytes) -> Iterator[int]:
    """Size, packed size and header offset; what does not fit in 32 bits comes from the zip64 extra field."""
    big = b""
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<2H", extra)
        if kind == 1:
            big = extra[4 : 4 + length]
        extra = extra[4 + length :]
    for number in numbers:
        if number == _BIG:
            if len(big) < 8:
                raise SourceError("expected a zip64 field with the number that does not fit, found none")
            (number,), big = struct.unpack_from("<Q", big), big[8:]
        yield number


def _data_at(part: Read, entry: _Entry) -> int:
    """Where a member's data begins in the item, by its local header."""
    signature, *_, name_length, extra_length = _LOCAL.unpack(part(entry.at, _LOCAL.size))
    name = part(entry.at + _LOCAL.size, name_length)
    if signature != b"PK\3\4" or name != entry.name.encode():
        raise SourceError(f"expected the header of {entry.name!r} at byte {entry.at} of the item, found {name!r}")
    return entry.at + _LOCAL.size + int(name_length) + int(extra_length)
