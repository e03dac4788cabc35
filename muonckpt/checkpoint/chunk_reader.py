"""Reading a rank's ranges of a checkpoint's chunks into memory, and checking them.

Every chunk of which something is read is compared with its digest by the rank that reads all of it; or, where several
ranks read parts, with its CRC-32, which follows from those of the parts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from ..algebra.box import Box, Index
from ..names.errors import DamageError, MuonckptError
from ..record.columns import UNKNOWN, Columns
from ..record.record import Chunk, Extent, StateRecord, with_chunks
from ..store.io.checksums import JoinedCrc, crc32, xxh3_128
from ..store.io.location import unavailable
from ..store.open_checkpoint import OpenCheckpoint
from ..store.reading.dtypes import itemsize
from ..store.reading.payloads import BAND_BYTES, Payloads, about_chunk, check_chunk, compare_checksums, payload_of
from .live_state import LocalParts
from .reading_plan import ChunkRange, ReadingRound

_GAP_BYTES = 64 << 10
"""Largest gap between two small ranges of a file that one read includes."""

_ALIGNMENT = 64
"""Reads of several items begin at multiples of it, so that items which are aligned in their file are so in memory."""


_BLOCK_BYTES = 64 << 20
"""Memory is allocated in blocks of this size, which serve one round after the other, and one load after the other."""

_SPARE_BYTES = 512 << 20
"""Most bytes of blocks that this process keeps for its next load: fresh memory can cost more than to read into it."""

_SPARE_BLOCKS: list[memoryview] = []
"""Blocks that no load uses now; lists are safe to use from several threads."""


class ReadMemory:
    """Memory for what is read in one round, until it has been moved to its targets."""

    def __init__(self) -> None:
        self._blocks: list[memoryview] = []
        self._used = _BLOCK_BYTES
        """Bytes of the last block."""

    def allocate(self, length: int) -> memoryview:
        """Return aligned memory; more than a block is allocated by itself."""
        if length > _BLOCK_BYTES:
            return np.empty(length, np.uint8).data
        if self._used + length > _BLOCK_BYTES:
            try:
                self._blocks.append(_SPARE_BLOCKS.pop())
            except IndexError:
                self._blocks.append(np.empty(_BLOCK_BYTES, np.uint8).data)
            self._used = 0
        start = self._used
        self._used += -(-length // _ALIGNMENT) * _ALIGNMENT
        return self._blocks[-1][start : start + length]

    def release(self) -> None:
        """Give the memory to the next round or load; nobody may use it afterwards."""
        _SPARE_BLOCKS.extend(self._blocks)
        self._blocks.clear()
        self._used = _BLOCK_BYTES
        del _SPARE_BLOCKS[_SPARE_BYTES // _BLOCK_BYTES :]


@dataclass(frozen=True, slots=True)
class RoundElements:
    """The elements that a rank has read in a round, by the keys of tensors, and their memory."""

    parts: Mapping[str, LocalParts]
    memory: ReadMemory


@dataclass(frozen=True, slots=True)
class PartialSum:
    """The CRC-32 of bytes ``start:stop`` of a chunk's payload, as a rank has read them.

    Attributes:
        key, chunk: of the tensor, and the chunk's number there.
        payload_bytes, recorded_crc32: the length and the CRC-32 of all of the payload, as its item records them.
    """

    key: str
    chunk: int
    payload_bytes: int
    recorded_crc32: int
    start: int
    stop: int
    crc32: int


class _Read(NamedTuple):
    """A range of a chunk that this rank reads.

    Attributes:
        tensor: with located chunks, of which this one is ``chunks[number]``.
        boxes: of its elements in the tensor, in their order.
        file, offset, length: its bytes.
        digest, crc32: the xxh3-128 of these bytes, and the CRC-32 of all of the chunk, where they are recorded.
        strides: those of a chunk that is not row-major.
        item: all bytes under the one checksum of a chunk that has none of its own.
    """

    tensor: StateRecord
    number: int
    range: ChunkRange
    boxes: tuple[Box, ...]
    file: str
    offset: int
    length: int
    digest: bytes | None
    crc32: int | None
    strides: Index | None
    item: Extent | None

    @property
    def chunk(self) -> Chunk:
        return self.tensor.chunks[self.number]

    @property
    def end(self) -> int:
        return self.offset + self.length

    @property
    def extent(self) -> Extent:
        return Extent(self.file, self.offset, self.length)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.tensor.dtype)
        return dtype


class ChunkReader:
    """A reader of the ranges that a plan gives to one rank, round by round.

    Args:
        rounds: of the plan.
        place: this rank's in the process group.
        has_closed_items: True if items have to be opened to know where their elements are.

    Attributes:
        sums: of the parts of chunks that other ranks read too.
        bytes_read: of tensors, so far.

    Raises:
        SourceError: an item is damaged, or not what the metadata promise.
    """

    def __init__(
        self, checkpoint: OpenCheckpoint, rounds: Sequence[ReadingRound], place: int, has_closed_items: bool
    ) -> None:
        self.sums: list[PartialSum] = []
        self.bytes_read = 0
        self._checkpoint = checkpoint
        self._payloads = checkpoint.payloads
        self._digests: dict[Extent, str] = {}
        """Of reads whose checksum is that of their item, taken from the bytes that were compared with it."""
        self._has_closed_items = has_closed_items
        self._rounds = [self._reads_of(each, place) for each in rounds]

    def _reads_of(self, of_all: ReadingRound, place: int) -> list[_Read]:
        """Open the items of this rank's chunks, and no others, and list its reads in the order of files."""
        readings = [pair for pair in of_all.readings if place in pair[1].numbers_by_reader]
        located: Sequence[StateRecord] = [tensor for tensor, _ in readings]
        if self._has_closed_items:
            chunks = [reading.chunks_of(place) for _, reading in readings]
            located = self._checkpoint.locate(with_chunks(located, chunks))
        # Tensors mostly share their columns, of which all rows are looked at together.
        by_columns: defaultdict[int, list[int]] = defaultdict(list)
        for number, tensor in enumerate(located):
            by_columns[id(tensor.chunks.columns)].append(number)
        reads: list[_Read] = []
        for numbers in by_columns.values():
            ranges = []
            for number in numbers:
                _, reading = readings[number]
                for of_range in reading.numbers_by_reader[place]:
                    part, boxes = reading.ranges[of_range], reading.boxes[of_range]
                    index = bisect_left(chunks[number], part.chunk) if self._has_closed_items else part.chunk
                    ranges.append((located[number], index, part, boxes))
            reads += _located_reads(self._payloads, ranges)
        return sorted(reads, key=_order)

    @property
    def strided_chunks(self) -> frozenset[tuple[str, int]]:
        """The key and the number of each chunk that is not row-major: a part of it is no run of bytes."""
        reads = chain.from_iterable(self._rounds)
        return frozenset((read.tensor.key, read.range.chunk) for read in reads if read.strides is not None)

    def check(self) -> None:
        """Read everything once to check it, and keep nothing; `read` reads and checks it again."""
        memory = ReadMemory()
        for group in chain.from_iterable(map(_near_reads, self._rounds)):
            with self._about(group[0]):
                if len(group) > 1 and group[0].item is None:
                    self._bytes_of(group, memory)
                else:
                    self._check_unread(group[0])
            memory.release()

    def read(self, number: int) -> RoundElements:
        """Read this rank's ranges of a round, check them, and return their elements."""
        memory = ReadMemory()
        elements: defaultdict[str, list[tuple[_Read, Sequence[Tensor]]]] = defaultdict(list)
        for group in _near_reads(self._rounds[number]):
            with self._about(group[0]):
                raw_bytes = self._bytes_of(group, memory)
            for read, of_read in zip(group, raw_bytes, strict=True):
                if read.boxes:
                    elements[read.tensor.key].append((read, _split(read, of_read)))
        return RoundElements({key: _joined(of_tensor) for key, of_tensor in elements.items()}, memory)

    @contextmanager
    def _about(self, read: _Read) -> Iterator[None]:
        """Name the file of a read in errors that are not ours."""
        try:
            yield
        except MuonckptError:
            raise
        except Exception as error:
            raise unavailable(self._payloads.place(read.file), error) from error

    def _bytes_of(self, group: Sequence[_Read], memory: ReadMemory) -> Sequence[memoryview]:
        """Return the bytes of reads that are near each other, read by one call and checked."""
        first, item = group[0], group[0].item
        if item is not None and _has_most(group):
            # The item's checksum is that of its bytes as they are read, and its chunks are parts of them.
            raw = memory.allocate(item.length)
            self._check_item(first, self._payloads.fill_bands(item, raw))
            return [raw[read.offset - item.offset : read.end - item.offset] for read in group]
        if len(group) == 1:
            raw = memory.allocate(first.length)
            self._check(first, self._payloads.fill_bands(first.extent, raw))
            self.bytes_read += len(raw)
            return [raw]
        start = first.offset // _ALIGNMENT * _ALIGNMENT
        raw = memory.allocate(max(read.end for read in group) - start)
        for _ in self._payloads.fill_bands(Extent(first.file, start, len(raw)), raw):
            pass
        self.bytes_read += len(raw)
        raw_bytes = [raw[read.offset - start : read.end - start] for read in group]
        for read, of_read in zip(group, raw_bytes, strict=True):
            self._check(read, (of_read,))
        return raw_bytes

    def _check_unread(self, read: _Read) -> None:
        """Check a read as far as there is a checksum, in memory that the next one overwrites."""
        if read.item is not None:
            self._digest_in_item(read)
        elif not self._payloads.is_verbatim(read.file):  # decoding tells damage
            self._payloads.view(read.extent)
        elif read.digest is not None or read.crc32 is not None:
            self._check(read, self._payloads.bands(read.extent))
            self.bytes_read += read.length

    def _check(self, read: _Read, parts: Iterable[memoryview]) -> None:
        """Compare the bytes of a read with the digest of its chunk or its item, or note their checksum."""
        tensor, payloads = read.tensor, self._payloads
        if read.digest is not None or read.item is not None:
            expected = self._digest_in_item(read) if read.digest is None else read.digest.hex()
            if (digest := xxh3_128(parts)) != expected:
                with about_chunk(payloads, tensor, read.chunk):
                    compare_checksums("digest", digest, expected)
        elif read.crc32 is not None:
            total = crc32(parts)
            if not read.range.is_whole:
                size = read.dtype.itemsize
                length, start = int(tensor.boxes.numel[read.number]) * size, read.range.start * size
                of_range = tensor.key, read.range.chunk, length, read.crc32, start, start + read.length, total
                self.sums.append(PartialSum(*of_range))
            elif total != read.crc32:
                with about_chunk(payloads, tensor, read.chunk):
                    compare_checksums("CRC-32", f"{total:08x}", f"{read.crc32:08x}")
        for _ in parts:  # of a chunk without a checksum of its own
            pass

    def _check_item(self, read: _Read, parts: Iterable[memoryview]) -> None:
        """Compare the item of a read with the checksum inside, given its bytes."""
        item = read.item
        assert item is not None, "the caller has looked"
        self.bytes_read += item.length
        with about_chunk(self._payloads, read.tensor, read.chunk):
            self._payloads.check_item(item, parts)
        for _ in parts:  # where the format has read it itself
            pass

    def _digest_in_item(self, read: _Read) -> str:
        """Return the digest of a read's bytes as they were when its item was compared with the checksum inside."""
        if read.extent not in self._digests:
            assert read.item is not None, "the caller has looked"
            reads = {each.extent for each in chain.from_iterable(self._rounds) if each.item == read.item}
            states = {extent: xxhash.xxh3_128() for extent in sorted(reads, key=lambda extent: extent.offset)}
            self._check_item(read, _digested(self._payloads.bands(read.item), read.item.offset, states))
            self._digests |= {extent: state.hexdigest() for extent, state in states.items()}
        return self._digests[read.extent]


def _digested(
    parts: Iterable[memoryview], offset: int, states: Mapping[Extent, xxhash.xxh3_128]
) -> Iterator[memoryview]:
    """Yield the bytes of a file from an offset on, and add those of each extent to its digest."""
    for part in parts:
        for extent, state in states.items():
            low, high = max(extent.offset - offset, 0), min(extent.end - offset, len(part))
            if low < high:
                state.update(part[low:high])
        offset += len(part)
        yield part


def judge_sums(checkpoint: OpenCheckpoint, sums: Iterable[PartialSum]) -> None:
    """Compare chunks that several ranks have read in parts with their recorded checksums.

    Raises:
        DamageError: a part is not what was saved; names the tensor, the box and the file.
    """
    by_chunk: defaultdict[tuple[str, int], list[PartialSum]] = defaultdict(list)
    for part in sums:
        by_chunk[part.key, part.chunk].append(part)
    for (key, number), parts in by_chunk.items():
        total = JoinedCrc()
        for part in parts:
            total.add(part.start, part.stop, part.crc32)
        recorded = {(part.payload_bytes, part.recorded_crc32) for part in parts}
        if recorded == {(total.reached, total.crc32)}:
            continue
        # Read it here, to find out what is wrong.
        tensor = checkpoint.tensors[key].record
        (located,) = checkpoint.locate(with_chunks([tensor], [[number]]))
        (chunk,) = located.chunks
        check_chunk(checkpoint.payloads, located, chunk)
        raise DamageError(f"tensor {key!r} box {chunk.box}: a rank read other bytes than {chunk.item.file} has")


def whole_chunks(checkpoint: OpenCheckpoint, columns: Columns) -> dict[str, dict[int, Extent | None]]:
    """Return the chunks of which no part can be checked by itself, as far as the metadata, in columns, tell it."""
    # Chunks may share an item, as tensors of one storage do; or have no checksum of which those of parts are a part.
    is_open = columns.payload_length() != UNKNOWN
    order = np.lexsort((columns.item, columns.file))
    is_same = (np.diff(columns.file[order]) == 0) & (np.diff(columns.item[order]) == 0)
    is_shared = np.zeros(len(columns), np.bool_)
    is_shared[order[1:][is_same]] = is_shared[order[:-1][is_same]] = True
    is_shared &= is_open & ~columns.has_digest
    lacks_crc32 = is_open & (columns.crc32 == UNKNOWN)
    has_some = bool(is_shared.any() or lacks_crc32.any())
    # Few chunks are like that, but in formats of other programs.
    whole: dict[str, dict[int, Extent | None]] = {}
    row = 0
    for tensor in checkpoint.outline.tensors:
        for number, chunk in enumerate(tensor.chunks if has_some or tensor.chunks.strides else ()):
            has_no_sum = lacks_crc32[row + number] and chunk.digest is None
            is_item = is_shared[row + number] or (has_no_sum and checkpoint.payloads.has_checksum(chunk))
            if is_item or chunk.strides or (lacks_crc32[row + number] and not has_no_sum):
                whole.setdefault(tensor.key, {})[number] = chunk.item if is_item else None
        row += len(tensor.chunks)
    return whole


def _located_reads(
    payloads: Payloads, ranges: Sequence[tuple[StateRecord, int, ChunkRange, tuple[Box, ...]]]
) -> Iterator[_Read]:
    """Yield reads of ranges whose chunks are located: rows of the same columns.

    Raises:
        SourceError: a payload has another length than the elements of its box.
    """
    columns = ranges[0][0].chunks.columns
    rows = np.array([tensor.chunks.start + number for tensor, number, _, _ in ranges], np.int64)
    files = [columns.names[file] for file in columns.file[rows].tolist()]
    offsets, lengths = columns.payload(rows).tolist(), columns.payload_length(rows).tolist()
    sums, has_digest = columns.crc32[rows].tolist(), columns.has_digest[rows].tolist()
    digests = columns.digest[rows].tobytes()
    for row, (tensor, number, part, boxes) in enumerate(ranges):
        size, offset, length = itemsize(tensor.dtype), offsets[row], lengths[row]
        if length != tensor.boxes.numel[number] * size:
            payload_of(tensor, tensor.chunks[number])  # raises
        digest = digests[16 * row : 16 * row + 16] if part.is_whole and has_digest[row] else None
        crc = None if sums[row] == UNKNOWN else sums[row]
        strides = None if tensor.chunks.strides is None else tensor.chunks.strides[number]
        item = _item_to_check(payloads, tensor.chunks[number]) if digest is None and crc is None else None
        if not part.is_whole and strides is None:
            offset, length = offset + part.start * size, (part.stop - part.start) * size
        yield _Read(tensor, number, part, boxes, files[row], offset, length, digest, crc, strides, item)


def _item_to_check(payloads: Payloads, chunk: Chunk) -> Extent | None:
    """Return the bytes under the checksum of a chunk that has none of its own; None if there is no checksum."""
    return chunk.item if payloads.has_checksum(chunk) and payloads.is_verbatim(chunk.item.file) else None


def _near_reads(reads: Sequence[_Read]) -> Iterator[Sequence[_Read]]:
    """Group reads, in the order of files, that are done by one call."""
    group: list[_Read] = []
    for read in reads:
        if group and not _is_near(group, read):
            yield from _groups_of(group)
            group = []
        group.append(read)
    yield from _groups_of(group)


def _is_near(group: Sequence[_Read], read: _Read) -> bool:
    """Return whether a read can be done in one call with those before it: they are small, or have bytes in common."""
    first, last = group[0], group[-1]
    if read.file != first.file or read.item != first.item:
        return False
    is_small = read.offset <= last.end + _GAP_BYTES and read.end - first.offset <= BAND_BYTES
    return is_small or read.item is not None or read.offset < last.end


def _groups_of(group: Sequence[_Read]) -> Iterator[Sequence[_Read]]:
    """Divide reads of one item that are few of its bytes: these are read alone, after the item was checked."""
    is_divided = group and group[0].item is not None and not _has_most(group)
    yield from ([read] for read in group) if is_divided else [group] * bool(group)


def _has_most(group: Sequence[_Read]) -> bool:
    """Return whether reads are so much of their item that all of it is read at once."""
    item = group[0].item
    assert item is not None, "the caller has looked"
    is_inside = all(read.file == item.file and item.offset <= read.offset and read.end <= item.end for read in group)
    return is_inside and 2 * sum(read.length for read in group) >= item.length


def _split(read: _Read, raw: memoryview) -> Sequence[Tensor]:
    """Return the elements of each box of a read, in its bytes."""
    elements = torch.frombuffer(raw, dtype=torch.uint8)
    if elements.data_ptr() % read.dtype.itemsize:  # torch's kernels crash on elements of 16 bytes at such places
        elements = elements.clone()
    elements = elements.view(read.dtype)
    if read.strides is not None:
        return (elements.as_strided(read.boxes[0].shape, read.strides),)
    if len(read.boxes) == 1:
        return (elements.view(read.boxes[0].shape),)
    by_box = torch.split(elements, [box.numel for box in read.boxes])
    return [part.view(box.shape) for part, box in zip(by_box, read.boxes, strict=True)]


def _joined(reads: Sequence[tuple[_Read, Sequence[Tensor]]]) -> LocalParts:
    """Return the elements of all reads of a tensor, chunk by chunk, as plans count them."""
    if len(reads) > 1:
        reads = sorted(reads, key=lambda pair: (pair[0].range.chunk, pair[0].range.start))
    boxes, parts = list[Box](), list[Tensor]()
    for read, of_read in reads:
        boxes += read.boxes
        parts += of_read
    return LocalParts.of(boxes, parts)


def _order(read: _Read) -> tuple[str, int, int]:
    return read.file, read.offset, read.range.start
