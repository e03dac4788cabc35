"""Reading a rank's ranges of a checkpoint's chunks into memory, and checking them.

Every chunk of which something is read is compared with its digest by the rank that reads all of it; or, where several
ranks read parts, with its CRC-32, which follows from those of the parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import xxhash
from torch import Tensor

from ..algebra.box import Box
from ..names.errors import DamageError, SourceError
from ..record.columns import UNKNOWN
from ..record.record import Chunk, Extent, StateRecord, with_chunks
from ..store.io.checksums import JoinedCrc, crc32
from ..store.open_checkpoint import OpenCheckpoint
from ..store.reading.dtypes import itemsize
from ..store.reading.payloads import BAND_BYTES, check_bytes, check_chunk, checked_elements, payload_of
from .bits import bits_of
from .live_state import LocalParts
from .reading_plan import ChunkRange, ReadingRound

T = TypeVar("T")

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
        file, offset, length: its bytes; the length is `UNKNOWN` if they are no run that can be checked by itself, so
            that they are gathered box by box.
        digest: the xxh3-128 of these bytes, where it is recorded.
    """

    tensor: StateRecord
    number: int
    range: ChunkRange
    boxes: tuple[Box, ...]
    file: str
    offset: int
    length: int
    digest: bytes | None

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

    It goes on after damage, so that all of it is known at the end.

    Args:
        rounds: of the plan.
        place: this rank's in the process group.

    Attributes:
        faults: the first fault of each damaged file, by name.
        sums: of the parts of chunks that other ranks read too.

    Raises:
        SourceError: an item is damaged, or not what the metadata promise.
    """

    def __init__(self, checkpoint: OpenCheckpoint, rounds: Sequence[ReadingRound], place: int) -> None:
        self.faults: dict[str, SourceError] = {}
        self.sums: list[PartialSum] = []
        self._checkpoint = checkpoint
        self._payloads = checkpoint.payloads
        self._checked: set[Chunk] = set()
        self._rounds = [self._reads_of(each, place) for each in rounds]

    def _reads_of(self, of_all: ReadingRound, place: int) -> list[_Read]:
        """Open the items of this rank's chunks, and no others, and list its reads in the order of files."""
        readings = [pair for pair in of_all.readings if place in pair[1].numbers_by_reader]
        chunks = [reading.chunks_of(place) for _, reading in readings]
        located = self._checkpoint.locate(with_chunks([tensor for tensor, _ in readings], chunks))
        # Tensors mostly share their columns, of which all rows are looked at together.
        by_columns: defaultdict[int, list[int]] = defaultdict(list)
        for number, tensor in enumerate(located):
            by_columns[id(tensor.chunks.columns)].append(number)
        reads: list[_Read] = []
        for numbers in by_columns.values():
            ranges = []
            for number in numbers:
                _, reading = readings[number]
                index_of = {chunk: index for index, chunk in enumerate(chunks[number])}
                for of_range in reading.numbers_by_reader[place]:
                    part, boxes = reading.ranges[of_range], reading.boxes[of_range]
                    ranges.append((located[number], index_of[part.chunk], part, boxes))
            reads += _located_reads(ranges)
        return sorted(reads, key=_order)

    def check(self) -> None:
        """Read everything once to check it, and keep nothing; `read` reads and checks it again."""
        for reads in self._rounds:
            for read in reads:
                self._guarded(read, partial(self._check, read, ()))

    def read(self, number: int) -> RoundElements:
        """Read this rank's ranges of a round, check them, and return their elements."""
        memory = ReadMemory()
        elements: defaultdict[str, list[tuple[_Read, Sequence[Tensor]]]] = defaultdict(list)
        for reads in self._near_reads(self._rounds[number]):
            raw_bytes = self._guarded(reads[0], partial(self._raw_bytes, reads, memory)) or [None] * len(reads)
            for read, raw in zip(reads, raw_bytes, strict=True):
                parts: Sequence[Tensor] | None
                if raw is not None and read.digest and read.digest == xxhash.xxh3_128_digest(raw):
                    parts = _split(read, raw)
                else:
                    parts = self._guarded(read, partial(self._elements, read, raw, memory))
                if read.boxes:
                    elements[read.tensor.key].append((read, _zeros(read) if parts is None else parts))
        return RoundElements({key: _joined(of_tensor) for key, of_tensor in elements.items()}, memory)

    def _guarded(self, read: _Read, action: Callable[[], T]) -> T | None:
        """Return what an action returns; note its error as a fault of the read's file, and return None."""
        try:
            return action()
        except SourceError as error:
            self.faults.setdefault(read.file, error)
        except Exception as error:  # other ranks wait in the exchange that comes next
            place = self._payloads.place(read.file)
            self.faults.setdefault(read.file, SourceError(f"cannot read {place}: {type(error).__name__}: {error}"))
        return None

    def _near_reads(self, reads: Sequence[_Read]) -> Iterator[Sequence[_Read]]:
        """Group reads: small ones near each other are read at once."""
        group: list[_Read] = []
        for read in reads:
            if group and not self._is_near(group, read):
                yield group
                group = []
            group.append(read)
        if group:
            yield group

    def _is_near(self, group: Sequence[_Read], read: _Read) -> bool:
        """Return whether a read can be done in one call with those before it."""
        first, last = group[0], group[-1]
        if UNKNOWN in (read.length, last.length) or read.file != first.file:
            return False
        return read.offset <= last.end + _GAP_BYTES and read.end - first.offset <= BAND_BYTES

    def _raw_bytes(self, reads: Sequence[_Read], memory: ReadMemory) -> Sequence[memoryview | None]:
        """Read the bytes of reads that are near each other; None for one alone, which is checked band by band."""
        if len(reads) == 1:
            return [None]
        start = reads[0].offset // _ALIGNMENT * _ALIGNMENT
        stop = max(read.end for read in reads)
        raw = memory.allocate(stop - start)
        for _ in self._payloads.fill_bands(Extent(reads[0].file, start, stop - start), raw):
            pass
        return [raw[read.offset - start : read.end - start] for read in reads]

    def _elements(self, read: _Read, raw: memoryview | None, memory: ReadMemory) -> Sequence[Tensor]:
        """Return the elements of each box of a read, after checking them."""
        if not read.boxes:  # read for the checksum of the chunk alone
            self._check(read, ())
            return ()
        if read.length == UNKNOWN:
            return [*self._gathered(read)]
        if raw is None:
            raw = memory.allocate(read.length)
            parts: Iterable[memoryview] = self._payloads.fill_bands(read.extent, raw)
        else:
            parts = (raw,)
        self._check(read, parts)
        return _split(read, raw)

    def _gathered(self, read: _Read) -> Iterator[Tensor]:
        """Yield elements that do not lie in row-major order, or whose checksum is that of the whole chunk."""
        payload = payload_of(read.tensor, read.chunk)
        if read.range.is_whole or self._payloads.has_checksum(read.chunk):
            # The bytes that are used are those that were checked, although this rank may use few of them.
            elements = checked_elements(self._payloads, read.tensor, read.chunk)
            for box in read.boxes:
                local_box = box.shift([-low for low in read.chunk.box.lo])
                part = torch.empty(box.shape, dtype=read.dtype)
                np.copyto(bits_of(part), elements[tuple(map(slice, local_box.lo, local_box.hi))])
                yield part
            return
        self._check(read, ())  # the item may have a checksum that its format alone knows
        for box in read.boxes:
            part = torch.empty(box.shape, dtype=read.dtype)
            place = read.chunk.stored("").place_at(box.lo)
            self._payloads.gather_into(bits_of(part), payload, read.tensor.dtype, place, box.shape)
            yield part

    def _check(self, read: _Read, parts: Iterable[memoryview]) -> None:
        """Compare a read with the digest of its chunk, or note its checksum.

        Args:
            parts: its bytes as they are read; none if they are still to be read.
        """
        tensor, chunk = read.tensor, read.chunk
        if read.length == UNKNOWN:
            if chunk not in self._checked:
                check_chunk(self._payloads, tensor, chunk)
                if not self._payloads.is_verbatim(read.file):  # decoding tells damage, too
                    self._payloads.view(payload_of(tensor, chunk))
                self._checked.add(chunk)
        elif read.range.is_whole:
            check_bytes(self._payloads, tensor, chunk, parts or self._payloads.bands(read.extent))
        else:
            payload = payload_of(tensor, chunk)
            assert chunk.crc32 is not None, "else its bytes would not be known as a run"
            start = read.offset - payload.offset
            total = crc32(parts or self._payloads.bands(read.extent))
            of_range = tensor.key, read.range.chunk, payload.length, chunk.crc32, start, start + read.length, total
            self.sums.append(PartialSum(*of_range))
        for _ in parts:  # some checks read the file itself
            pass


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


def _located_reads(ranges: Sequence[tuple[StateRecord, int, ChunkRange, tuple[Box, ...]]]) -> Iterator[_Read]:
    """Yield reads of ranges whose chunks are located: rows of the same columns.

    Raises:
        SourceError: a payload has another length than the elements of its box.
    """
    columns = ranges[0][0].chunks.columns
    rows = np.array([tensor.chunks.start + number for tensor, number, _, _ in ranges], np.int64)
    files = [columns.names[file] for file in columns.file[rows].tolist()]
    offsets, lengths = columns.payload(rows).tolist(), columns.payload_length(rows).tolist()
    has_crc32, has_digest = (columns.crc32[rows] != UNKNOWN).tolist(), columns.has_digest[rows].tolist()
    digests = columns.digest[rows].tobytes()
    for row, (tensor, number, part, boxes) in enumerate(ranges):
        size, offset, length = itemsize(tensor.dtype), offsets[row], lengths[row]
        if lengths[row] != tensor.boxes.numel[number] * size:
            payload_of(tensor, tensor.chunks[number])  # raises
        digest = digests[16 * row : 16 * row + 16] if part.is_whole and has_digest[row] else None
        if (tensor.chunks.strides and tensor.chunks.strides[number]) or not (part.is_whole or has_crc32[row]):
            length, digest = UNKNOWN, None
        elif not part.is_whole:
            offset, length = offset + part.start * size, (part.stop - part.start) * size
        yield _Read(tensor, number, part, boxes, files[row], offset, length, digest)


def _split(read: _Read, raw: memoryview) -> Sequence[Tensor]:
    """Return the elements of each box of a read, in its bytes."""
    elements = torch.frombuffer(raw, dtype=torch.uint8)
    if elements.data_ptr() % read.dtype.itemsize:  # torch's kernels crash on elements of 16 bytes at such places
        elements = elements.clone()
    elements = elements.view(read.dtype)
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


def _zeros(read: _Read) -> Sequence[Tensor]:
    """Return elements in the place of those that could not be read: the state dict is declared unusable then."""
    return [torch.zeros(box.shape, dtype=read.dtype) for box in read.boxes]


def _order(read: _Read) -> tuple[str, int, int]:
    return read.file, read.offset, read.range.start
