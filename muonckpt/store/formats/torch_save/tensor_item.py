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

Sources: ``torch/serialization.py`` (``_save``) and ``torch/_utils.py`` for the pickle; :mod:`.stored_zip` for the
archive.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from ....algebra.box import Index, row_major
from ....names.errors import SourceError
from ...io.checksums import Frame
from ...reading.dtypes import DTYPES, itemsize
from .inert_pickle import PERSISTENT, Global, Record, expect, integer, sizes_of, unpickle
from .stored_zip import (
    SERIALIZATION_ID,
    Read,
    ZipEntry,
    descriptor,
    local_header,
    member_data,
    members_in,
    store_end,
    store_front,
    window,
)

_PAYLOAD = "data/0"
_MAX_PICKLE = 1 << 12

_REBUILD = {"torch._utils _rebuild_tensor_v2": 6, "torch._utils _rebuild_tensor_v3": 7}
_UNTYPED = "torch.storage UntypedStorage"
_TYPED = {f"torch {dtype.storage}": name for name, dtype in DTYPES.items() if dtype.storage}
_TENSOR_NAMES = frozenset(
    {PERSISTENT, _UNTYPED, "collections OrderedDict", *_REBUILD, *_TYPED, *(f"torch {name}" for name in DTYPES)}
)


# Writing.


@lru_cache(maxsize=1024)
def frame(dtype: str, shape: Index) -> Frame:
    """Return the item of a dense row-major tensor of this dtype (torch's name) and shape, without its payload.

    Cached: the tensors of a model have few shapes.

    Raises:
        SourceError: the dtype is not one that torch can save.
    """
    head, members = _make_front(dtype, shape)
    # Where the tails of two checksums differ is where the checksum stands, as four bytes.
    blank, full = (_make_tail(head, members, crc32, SERIALIZATION_ID) for crc32 in _CHECKSUMS)
    differing = np.flatnonzero(np.frombuffer(blank, np.uint8) != np.frombuffer(full, np.uint8))
    return Frame(
        payload_length=members[-1].size,
        head=head,
        tail=partial(_fill_checksum, blank, differing[::4].tolist()),
        tail_length=len(blank),
    )


def _make_front(dtype: str, shape: Index) -> tuple[bytes, tuple[ZipEntry, ...]]:
    """Return the bytes before the payload, and the members up to it; its checksum is not known yet."""
    head, entries = store_front(tensor_pickle(dtype, shape))
    payload = ZipEntry(_PAYLOAD, len(head), math.prod(shape) * itemsize(dtype), 0)
    return head + local_header(payload), (*entries, payload)


def _fill_checksum(blank: bytes, places: Sequence[int], crc32: int) -> bytes:
    """Return the bytes after a payload: those of the checksum 0, with this one at its places."""
    tail = bytearray(blank)
    for place in places:
        tail[place : place + 4] = crc32.to_bytes(4, "little")
    return bytes(tail)


_CHECKSUMS = (0, 0xFFFFFFFF)
"""Checksums that differ in every byte."""

_IDS = tuple(digit * 40 for digit in (b"0", b"1", b"2", b"4", b"8", b"9"))


@dataclass(frozen=True, slots=True)
class ItemTemplate:
    """Recognises items of tensors of one dtype and shape, as torch and we write them, by the bytes that they share.

    That takes a fraction of the time of reading the archive.  All numbers are in bytes.

    Attributes:
        head: the bytes before the payload.
        fixed: ranges of the bytes after it that depend neither on the elements nor on the item's identity, and these
            bytes.
        crc32_at: the places of the payload's CRC-32 there.
    """

    head: bytes
    payload_length: int
    length: int
    fixed: tuple[tuple[slice, bytes], ...]
    crc32_at: tuple[slice, ...]

    @property
    def tail_offset(self) -> int:
        return len(self.head) + self.payload_length

    def crc32_of(self, head: bytes, tail: bytes) -> int | None:
        """Return the CRC-32 of the payload that an item records around it; None if it is another kind of item."""
        if head != self.head or len(tail) != self.length - self.tail_offset:
            return None
        checksums = {tail[place] for place in self.crc32_at}
        if len(checksums) > 1 or any(tail[place] != data for place, data in self.fixed):
            return None
        return int.from_bytes(checksums.pop(), "little")

    def recorded(self, items: NDArray[np.uint8]) -> tuple[NDArray[np.bool_], NDArray[np.uint32]]:
        """Return which of whole items ``[items, length]`` are of this kind, and their recorded CRC-32s."""
        tails = items[:, self.tail_offset :]
        fits = (items[:, : len(self.head)] == np.frombuffer(self.head, np.uint8)).all(axis=1)
        for place, data in self.fixed:
            fits &= (tails[:, place] == np.frombuffer(data, np.uint8)).all(axis=1)
        crc32, *repetitions = (np.ascontiguousarray(tails[:, place]).view("<u4")[:, 0] for place in self.crc32_at)
        for repetition in repetitions:
            fits &= repetition == crc32
        return fits, crc32


@lru_cache(maxsize=4096)
def template(dtype: str, shape: Index) -> ItemTemplate:
    """Return the template of items of dense row-major tensors.

    Raises:
        SourceError: the dtype is not one that torch can save.
    """
    head, members = _make_front(dtype, shape)
    # The bytes in which the tails of any checksum and any id agree, as ranges.
    tails = [_make_tail(head, members, crc32, SERIALIZATION_ID) for crc32 in _CHECKSUMS]
    tails += (_make_tail(head, members, 0, identity) for identity in _IDS)
    columns = np.stack([np.frombuffer(tail, np.uint8) for tail in tails])
    is_fixed = np.pad((columns == columns[0]).all(axis=0), 1)
    bounds = np.flatnonzero(is_fixed[1:] != is_fixed[:-1]).reshape(-1, 2).tolist()
    return ItemTemplate(
        head,
        payload_length=members[-1].size,
        length=len(head) + members[-1].size + len(tails[0]),
        fixed=tuple((slice(start, stop), tails[0][start:stop]) for start, stop in bounds),
        crc32_at=tuple(slice(start, start + 4) for start in np.flatnonzero(columns[0] != columns[1])[::4].tolist()),
    )


def tail(dtype: str, shape: Index, crc32: int, serialization_id: bytes) -> bytes:
    """Return the bytes after the payload of an item of torch's, whose id has 40 ASCII digits."""
    return _make_tail(*_make_front(dtype, shape), crc32, serialization_id)


def _make_tail(head: bytes, members: tuple[ZipEntry, ...], crc32: int, serialization_id: bytes) -> bytes:
    payload = replace(members[-1], crc32=crc32)
    trailer = descriptor(payload)
    start = len(head) + payload.size + len(trailer)
    return trailer + store_end(start, (*members[:-1], payload), serialization_id)


def tensor_pickle(dtype: str, shape: Index) -> bytes:
    """Return a tensor's pickle as Python writes it in protocol 2; ``q`` gives each new object its memo number."""
    numel, storage = math.prod(shape), DTYPES[dtype].storage
    version, kind, count, element = b"2", f"torch\n{storage}".encode(), numel, b""
    if storage is None:
        version, kind, count = b"3", b"torch.storage\nUntypedStorage", numel * itemsize(dtype)
        element = b"ctorch\n" + dtype.encode() + b"\nq%c"
    # The storage is followed by this: its strides are row-major, with sizes of at least 1.
    strides = row_major(tuple(max(size, 1) for size in shape))
    end = b"\x89ccollections\nOrderedDict\nq%c)Rq%c" + element + b"tq%cRq%c."
    numbers = itertools.count(8 if shape else 6)
    return (
        b"\x80\2ctorch._utils\n_rebuild_tensor_v%b\nq\0((X\7\0\0\0storageq\1c%b\nq\2" % (version, kind)
        + b"X\1\0\0\x000q\3X\3\0\0\0cpuq\4%btq\5QK\0" % integer(count)
        + (_pickle_tuple(shape) + b"q\6" + _pickle_tuple(strides) + b"q\7" if shape else b"))")
        + end % tuple(itertools.islice(numbers, end.count(b"%c")))
    )


def _pickle_tuple(values: Sequence[int]) -> bytes:
    items = b"".join(map(integer, values))
    return b"(" + items + b"t" if len(values) > 3 else items + b"\x85\x86\x87"[len(values) - 1 : len(values)]


# Reading.


@dataclass(frozen=True, slots=True)
class TensorItem:
    """Describes a stored tensor: shape and strides in elements, its payload as a range of bytes in the file.

    The payload holds every element once, in the order of the strides.  ``crc32`` is None where the writer switched
    checksums off.
    """

    dtype: str
    shape: Index
    strides: Index
    offset: int
    length: int
    crc32: int | None

    @property
    def row_major(self) -> bool:
        return is_row_major(self.shape, self.strides)


def is_row_major(shape: Index, strides: Index) -> bool:
    """Return whether these strides, except for dims of size 1, are in row-major order."""
    return 0 in shape or _strides_and_sizes(shape, strides) == _strides_and_sizes(shape, row_major(shape))


def _strides_and_sizes(shape: Index, strides: Index) -> list[tuple[int, int]]:
    return [(stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1]


def read_tensor(read: Read, offset: int, length: int) -> TensorItem:
    """Read the tensor in the item of ``length`` bytes at byte ``offset`` of a file, without its payload.

    Raises:
        SourceError: it is not a tensor's item, or the payload is not simply the tensor's elements: encoded, big-endian,
            a view with holes, lazily conjugated; or a checksum of its small members is wrong.
    """
    # Its members are the payload and small ones.
    part = window(read, offset, length)
    members = {member.name: member for member in members_in(part, offset, length)}
    if [name for name in members if name.startswith("data/")] != [_PAYLOAD] or "data.pkl" not in members:
        raise SourceError(f"expected the item of one tensor, found a zip archive of {', '.join(members):.200}")

    def content(name: str) -> bytes:
        return member_data(lambda start, count: part(start - offset, count), members[name], _MAX_PICKLE)

    if "byteorder" in members and content("byteorder") != b"little":
        raise SourceError(f"expected little-endian elements, found {content('byteorder')!r}")
    # The payload is as long as the pickle says.
    dtype, shape, strides = _parse_tensor(content("data.pkl"))
    payload = members[_PAYLOAD]
    size = math.prod(shape) * itemsize(dtype)
    if payload.length != size:
        raise SourceError(f"expected {size} bytes for {dtype} of shape {shape}, found {payload.length}")
    return TensorItem(dtype, shape, strides, payload.offset, payload.length, payload.crc32)


@lru_cache(maxsize=1024)
def _parse_tensor(data: bytes) -> tuple[str, Index, Index]:
    tensor = described_tensor(unpickle(data, _TENSOR_NAMES))
    if tensor.start != 0 or tensor.count != math.prod(tensor.shape):
        raise SourceError(
            f"expected a storage of just the elements of shape {tensor.shape}, found a view of {tensor.count}"
        )
    if tensor.storage != "0":
        raise SourceError(f"expected a tensor of storage '0', found storage {tensor.storage!r}")
    return tensor.dtype, tensor.shape, tensor.strides


@dataclass(frozen=True, slots=True)
class Described:
    """Describes a tensor as a pickle does: each element is in the member ``data/{storage}`` once.

    They lie without gaps from element ``start`` on, in the order of the strides; the member has ``count`` elements.
    """

    storage: str
    dtype: str
    shape: Index
    strides: Index
    start: int
    count: int


def described_tensor(value: object) -> Described:
    """Return the tensor that part of a pickle describes.

    Raises:
        SourceError: it is something else, a view with gaps or beyond its storage, or more than a plain tensor.
    """
    call = expect(Record, value)
    args, arity = expect(tuple, call.args), _REBUILD.get(call.kind)
    if arity is None or len(args) < arity:
        raise SourceError(f"expected the pickle of a tensor, found {call.kind} of {len(args)} arguments")
    if len(args) > arity:
        flags = [key for key in args[-1] if type(key) is str] if type(args[-1]) is dict else "?"
        raise SourceError(f"expected a plain tensor, found one with the flags {flags}: resolve them before saving")
    # Version 3 adds the dtype of an untyped storage.
    storage, start, size, stride, _, hooks, *element = args
    match storage:
        case Record(kind=reference, args=("storage", Global() as kind, str() as key, str(), int() as count)):
            no_hooks = expect(Record, hooks)
            is_plain = reference == PERSISTENT and no_hooks.args == () and not no_hooks.items
        case _:
            is_plain = False
    if not is_plain:
        raise SourceError("expected a tensor with a storage and without hooks, found something else")
    dtype = expect(Global, element[0]).removeprefix("torch ") if element else _TYPED.get(kind, kind)
    if bool(element) != (kind == _UNTYPED) or dtype not in DTYPES:
        raise SourceError(f"expected the storage and the dtype to agree, found {kind} and {dtype}")
    # Its elements lie inside the storage, each once.
    shape, strides = sizes_of(size), sizes_of(stride)
    first, stored = sizes_of((start, count))
    if 0 in shape:
        first = 0  # torch 2.9 keeps where an empty part was cut, in a storage that it has dropped
    numel, remainder = divmod(stored, itemsize(dtype) if element else 1)
    if remainder or first + math.prod(shape) > numel:
        raise SourceError(f"expected a storage with the elements of shape {shape} from {first} on, found {numel}")
    if not _is_dense(shape, strides):
        raise SourceError(f"expected each element once, found strides {strides} for shape {shape}")
    return Described(storage=key, dtype=dtype, shape=shape, strides=strides, start=first, count=numel)


def _is_dense(shape: Index, strides: Index) -> bool:
    if len(shape) != len(strides):
        return False
    step = 1
    for stride, size in sorted(_strides_and_sizes(shape, strides)):
        if stride != step:
            return 0 in shape
        step *= size
    return True
