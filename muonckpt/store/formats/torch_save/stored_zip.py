"""The uncompressed zip archives of ``torch.save``: their headers and directory, written and read.

All offsets in an archive are relative to it, so it can lie anywhere in a file.  Nothing here knows what a member means.

Sources: PKWARE's APPNOTE.TXT for the zip structures; ``caffe2/serialize/inline_container.cc`` and the miniz of PyTorch
for what it puts in them.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

from ....names.errors import DamageError, SourceError
from ...io import limits

Read = Callable[[int, int], bytes]
"""``read(offset, length)``: that range of a file, in bytes; shorter where the file ends before."""

MEMBER_ALIGNMENT = 64
"""Members' data begins at multiples of this many bytes of the archive, and our archives at such of the file, so that
payloads can be mapped as arrays."""

SERIALIZATION_ID = b"0" * 40
"""Replaces torch's hash of the item's names and checksums."""

_BIG = 0xFFFFFFFF
_HEAD_BYTES, _TAIL_BYTES = 1024, 2048
_FOLDER = 0x10  # of the external attributes

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")


def aligned(offset: int) -> int:
    return -(-offset // MEMBER_ALIGNMENT) * MEMBER_ALIGNMENT


@dataclass(frozen=True, slots=True)
class ZipEntry:
    """Describes a member in the central directory.  ``header_offset`` is where its local header begins."""

    name: str
    header_offset: int
    size: int
    crc32: int

    @property
    def flags(self) -> int:
        """A UTF-8 name and, except after an empty member, a data descriptor."""
        return 0x808 if self.size else 0x800

    def zip64(self, packed: int) -> bytes:
        """Return the extra field with the numbers that do not fit in 32 bits: both sizes, and the header's offset."""
        sizes = (self.size, packed) if self.size >= _BIG else ()
        numbers = (*sizes, self.header_offset) if self.header_offset >= _BIG else sizes
        return struct.pack(f"<2H{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""


class ZipMember(NamedTuple):
    """Locates a member of an item: its name without the archive's, and its data as a range of bytes in the file.

    ``crc32`` is None where the writer switched checksums off, so that all checksums in the item are 0.
    """

    name: str
    offset: int
    length: int
    crc32: int | None


def store(contents: Iterable[tuple[str, bytes]], start: int) -> tuple[bytes, tuple[ZipEntry, ...]]:
    """Lay out small members, one after another from byte ``start`` of the item."""
    out, entries = b"", []
    for name, data in contents:
        entry = ZipEntry(name, start + len(out), len(data), zlib.crc32(data))
        entries.append(entry)
        out += local_header(entry) + data + descriptor(entry)
    return out, tuple(entries)


def store_front(pickled: bytes) -> tuple[bytes, tuple[ZipEntry, ...]]:
    """Lay out the members that torch writes before the elements."""
    alignment = str(MEMBER_ALIGNMENT).encode()
    members = (("data.pkl", pickled), (".format_version", b"1"), (".storage_alignment", alignment))
    return store((*members, ("byteorder", b"little")), 0)


def store_end(start: int, entries: Sequence[ZipEntry], serialization_id: bytes = SERIALIZATION_ID) -> bytes:
    """Lay out the members that torch writes after the elements, from byte ``start`` on, and the directory of all."""
    data, last_entries = store((("version", b"3\n"), (".data/serialization_id", serialization_id)), start)
    return data + directory((*entries, *last_entries), start + len(data))


def local_header(entry: ZipEntry) -> bytes:
    # An extra field that no reader knows pads the header, so that the data are aligned.
    name = f"archive/{entry.name}".encode()
    zip64 = entry.zip64(packed=0)
    padding = -(entry.header_offset + _LOCAL.size + len(name) + len(zip64) + 4) % MEMBER_ALIGNMENT
    extra = zip64 + b"FB" + struct.pack("<H", padding) + b"Z" * padding
    return _LOCAL.pack(b"PK\3\4", 0, entry.flags, 0, 0, 0, 0, 0, 0, len(name), len(extra)) + name + extra


def descriptor(entry: ZipEntry) -> bytes:
    if not entry.size:
        return b""
    sizes = "<4sI2Q" if entry.size >= _BIG or entry.header_offset >= _BIG else "<4s3I"
    return struct.pack(sizes, b"PK\7\x08", entry.crc32, entry.size, entry.size)


def directory(entries: tuple[ZipEntry, ...], start: int) -> bytes:
    """Return the central directory of the members and the end records, for byte ``start`` of the archive."""
    central = b"".join(map(_central_entry, entries))
    count, size = len(entries), len(central)
    return (  # torch writes all three end records, however large the archive
        central
        + _END64.pack(b"PK\6\6", _END64.size - 12, 798, 45, 0, 0, count, count, size, start)
        + _LOCATOR.pack(b"PK\6\7", 0, start + size, 1)
        + _END.pack(b"PK\5\6", 0, 0, count, count, size, min(start, _BIG), 0)
    )


@lru_cache(maxsize=8192)
def _central_entry(entry: ZipEntry) -> bytes:
    name = f"archive/{entry.name}".encode()
    extra = entry.zip64(packed=entry.size)
    size, header_offset = min(entry.size, _BIG), min(entry.header_offset, _BIG)
    numbers = (0, 0, entry.flags, 0, 0, 0, entry.crc32, size, size, len(name), len(extra), 0, 0, 0, 0, header_offset)
    return _CENTRAL.pack(b"PK\1\2", *numbers) + name + extra


def read_members(read: Read, length: int) -> tuple[ZipMember, ...]:
    """Return the members of an archive of ``length`` bytes, in the order of their data.

    Raises:
        SourceError: it is not a zip archive as torch writes them, or members overlap or leave the item.
    """
    return members_in(window(read, 0, length), 0, length)


def data_pickle(raw: bytes) -> bytes:
    """Return the pickle in an item in memory, compared with its checksum; an item of a tensor has members beside it.

    Raises:
        SourceError: it has none, or is no such archive.
    """

    def read(offset: int, length: int) -> bytes:
        return raw[offset : offset + length]

    members = {member.name: member for member in read_members(read, len(raw))}
    pickled = members.get("data.pkl")
    if pickled is None:
        raise SourceError(f"expected a data.pkl, found a zip archive of {', '.join(members):.200}")
    limits.check_limit(pickled.length, limits.ITEM_BYTES, "bytes in the data.pkl of an item")
    return member_data(read, pickled, pickled.length)


def member_data(read: Read, member: ZipMember, max_bytes: int) -> bytes:
    """Read a small member, compared with its checksum.  ``read`` takes offsets in the file.

    Raises:
        DamageError: it has another checksum.
        SourceError: it has more than ``max_bytes``.
    """
    if member.length > max_bytes:
        raise SourceError(f"expected at most {max_bytes} bytes in {member.name}, found {member.length}")
    data = _read_exactly(read, member.offset, member.length)
    if member.crc32 is not None and zlib.crc32(data) != member.crc32:
        raise DamageError(f"expected checksum {member.crc32:#010x} for {member.name}, found {zlib.crc32(data):#010x}")
    return data


def window(read: Read, offset: int, length: int) -> Read:
    """Read parts of an item by offsets in it.  Its ends, all but the payload, are read once."""
    head = _read_exactly(read, offset, length if length <= _HEAD_BYTES + _TAIL_BYTES else _HEAD_BYTES)
    tail_start = max(length - _TAIL_BYTES, 0)
    tail = head[tail_start:] if len(head) == length else _read_exactly(read, offset + tail_start, _TAIL_BYTES)

    def part(start: int, count: int) -> bytes:
        if start < 0 or start + count > length:
            raise SourceError(f"expected bytes {start}:{start + count} in an item of {length} bytes")
        if start + count <= len(head):
            return head[start : start + count]
        if start >= tail_start:
            return tail[start - tail_start : start - tail_start + count]
        return _read_exactly(read, offset + start, count)

    return part


def _read_exactly(read: Read, offset: int, length: int) -> bytes:
    data = bytes(read(offset, length))
    if len(data) != length:
        raise DamageError(f"expected {length} bytes at byte {offset} of the file, found {len(data)}")
    return data


def members_in(part: Read, offset: int, length: int) -> tuple[ZipMember, ...]:
    """Return the members of the item of ``length`` bytes at byte ``offset`` of a file, read with ``part``."""
    directory_offset, count, listing = _read_directory(part, length)
    entries = sorted(_read_entries(listing), key=itemgetter(0))
    if len(entries) != count:
        raise SourceError(f"expected {count} members in the zip archive, found {len(entries)}")
    folders, _, names = zip(*(name.partition("/") for _, name, *_ in entries), strict=True) if entries else ((), (), ())
    if len({*folders}) != 1 or len({*names}) != len(entries):
        first_names = ", ".join(name for _, name, *_ in entries[:9])
        raise SourceError(f"expected members of one folder with different names, found {first_names:.200}")

    # Each local header says the same name, and its data end before the next one: no two readers see different bytes.
    has_checksums = any(crc32 for *_, crc32 in entries)
    ends = [*(header_offset for header_offset, *_ in entries[1:]), directory_offset]
    members = list[tuple[str, int, int, int | None]]()
    for (header_offset, entry_name, size, crc32), end, name in zip(entries, ends, names, strict=True):
        expected_name = entry_name.encode()
        header = part(header_offset, _LOCAL.size + len(expected_name))
        signature, *_, name_length, extra_length = _LOCAL.unpack_from(header)
        local_name = header[_LOCAL.size :]
        if signature != b"PK\3\4" or name_length != len(expected_name) or local_name != expected_name:
            raise SourceError(
                f"expected the header of {entry_name!r} at byte {header_offset} of the item, found {local_name!r}"
            )
        start = header_offset + len(header) + int(extra_length)
        if start + size > end:
            raise SourceError(f"expected {name} to end by byte {end} of the item, found {start + size}")
        members.append((name, offset + start, size, crc32 if has_checksums else None))
    return tuple(map(ZipMember._make, members))


def _read_directory(part: Read, length: int) -> tuple[int, int, bytes]:
    """Return the offset of the central directory in the item, its number of entries, and its bytes.

    Redundant fields must agree: other zip readers may use them.
    """
    signature, *disks, count_on_disk, count, size, start, comment = _END.unpack(part(length - _END.size, _END.size))
    if signature != b"PK\5\6" or comment:
        kind = DamageError if part(0, 4) == b"PK\3\4" else SourceError
        raise kind(
            f"a zip archive is cut short, or something follows it: expected its end record, PK\\x05\\x06, in the last "
            f"{_END.size} of {length} bytes, found {signature!r}"
        )
    # The numbers of the short record are those of the long one, or the largest that fit there.
    short, maxima = (count_on_disk, count, size, start), (0xFFFF, 0xFFFF, _BIG, _BIG)
    numbers = _read_zip64_end(part, length) or short
    agree = all(number in (long, maximum) for number, long, maximum in zip(short, numbers, maxima, strict=True))
    is_saturated = numbers is short and {0xFFFF, _BIG} & {count, size, start}
    if any(disks) or numbers[0] != numbers[1] or not agree or is_saturated:
        raise SourceError(
            "the end of a zip archive contradicts itself: expected end records that agree (entries here, entries in "
            f"all, bytes and offset of the directory) on disk 0, found {short} and {numbers} on disks {disks}"
        )
    _, count, size, start = numbers
    limits.check_limit(size, limits.ZIP_DIRECTORY, "bytes in the directory of a zip archive")
    return start, count, part(start, size)


def _read_zip64_end(part: Read, length: int) -> tuple[int, int, int, int] | None:
    """Return the numbers of the zip64 end record (entries on this disk, entries, size, offset), if there is one."""
    locator_offset = length - _END.size - _LOCATOR.size
    if locator_offset < 0:
        return None
    locator, disk, end64_offset, disks = _LOCATOR.unpack(part(locator_offset, _LOCATOR.size))
    if locator != b"PK\6\7":
        return None
    signature, record, _, _, *disk_numbers, count_on_disk, count, size, start = _END64.unpack(
        part(end64_offset, _END64.size)
    )
    if (signature, record, disk, disks, *disk_numbers) != (b"PK\6\6", _END64.size - 12, 0, 1, 0, 0):
        raise SourceError(
            f"the end of a large zip archive is damaged: expected its zip64 end record, PK\\x06\\x06 and "
            f"{_END64.size - 12} bytes, at byte {end64_offset} of {length}, found {signature!r} and {record} bytes"
        )
    return count_on_disk, count, size, start


def _read_entries(directory: bytes) -> Iterator[tuple[int, str, int, int]]:
    """Yield for each member the offset of its local header, its name, its size and its CRC-32."""
    position = 0
    while position < len(directory):
        if len(directory) - position < _CENTRAL.size or directory[position : position + 4] != b"PK\1\2":
            signature = directory[position : position + 4]
            raise SourceError(
                f"the directory of a zip archive is damaged: expected an entry, PK\\x01\\x02, at byte {position} of "
                f"{len(directory)}, found {signature!r}"
            )
        _, _, _, flags, method, _, _, *numbers, disk, _, kind, header = _CENTRAL.unpack_from(directory, position)
        crc32, packed, size, name_length, extra_length, comment_length = numbers
        # The name, extra fields and a comment follow the fixed part.
        name_offset = position + _CENTRAL.size
        extra_offset = name_offset + name_length
        position = extra_offset + extra_length + comment_length
        if position > len(directory):
            raise SourceError(
                f"the directory of a zip archive is damaged: expected its last entry to end by byte {len(directory)}, "
                f"found that it ends at {position}"
            )
        name = directory[name_offset:extra_offset].decode("utf-8", "replace")
        if _BIG in (size, packed, header):
            extra = directory[extra_offset : extra_offset + extra_length]
            size, packed, header = _read_zip64_numbers((size, packed, header), extra)
        # Neither compressed nor encrypted, and no folder.
        if disk or kind & _FOLDER or method or flags & ~0x808 or packed != size:
            raise SourceError(f"expected {name!r} stored plainly, found method {method}, flags {flags:#x}")
        yield header, name, size, crc32


def _read_zip64_numbers(numbers: tuple[int, int, int], extra: bytes) -> Iterator[int]:
    """Yield size, packed size and header offset, from the zip64 extra field where they do not fit in 32 bits."""
    # The field has only those numbers that do not fit, in this order.
    big = b""
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<2H", extra)
        if kind == 1:
            big = extra[4 : 4 + length]
        extra = extra[4 + length :]
    for number in numbers:
        if number == _BIG:
            if len(big) < 8:
                raise SourceError(
                    "the directory of a zip archive is damaged: a size or offset is too large for its entry, expected "
                    "a zip64 field with it, found none"
                )
            (number,), big = struct.unpack_from("<Q", big), big[8:]
        yield number
