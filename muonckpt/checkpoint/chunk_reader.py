"""Reading a rank's ranges of a checkpoint's chunks into memory, and checking them.

Every chunk of which something is read is compared with its digest by the rank that reads all of it; or, where several
ranks read parts, with its CRC-32, which follows from those of the parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from ..algebra.box import Box, Index
from ..names.errors import DamageError, SourceError
from ..record.record import Chunk, Extent, StateRecord, with_chunks
from ..store.io.checksums import JoinedCrc, crc32
from ..store.open_checkpoint import OpenCheckpoint
from ..store.reading.dtypes import itemsize
from ..store.reading.payloads import BAND_BYTES, check_bytes, check_chunk, checked_elements, payload_of
from .bits import bits_of
from .live_state import LocalParts
from .reading_plan import ChunkRange, ReadingRound

T = TypeVar("T")

_ALIGNMENT = 64
"""Reads of several items begin at multiples of it, so that items which are aligned in their file are so in memory."""


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


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """A range of a chunk that this rank reads.

    Attributes:
        extent: its bytes; None if they are no run that can be checked by itself, and so are gathered box by box.
        boxes: of its elements in the tensor, in their order.
    """

    tensor: StateRecord
    chunk: Chunk
    range: ChunkRange
    extent: Extent | None
    boxes: tuple[Box, ...]

    @property
    def file(self) -> str:
        return self.chunk.item.file

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
        ranges: defaultdict[str, list[tuple[ChunkRange, tuple[Box, ...]]]] = defaultdict(list)
        tensors: dict[str, StateRecord] = {}
        for tensor, reading in of_all.readings:
            for number in reading.numbers_by_reader.get(place, ()):
                tensors[tensor.key] = tensor
                ranges[tensor.key].append((reading.ranges[number], reading.boxes[number]))
        numbers = [sorted({part.chunk for part, _ in ranges[key]}) for key in tensors]
        located = self._checkpoint.locate(with_chunks([*tensors.values()], numbers))
        reads = []
        for tensor, chunk_numbers in zip(located, numbers, strict=True):
            chunks = dict(zip(chunk_numbers, tensor.chunks, strict=True))
            reads += [
                _Read(tensor, chunks[part.chunk], part, _extent(tensor, chunks[part.chunk], part), boxes)
                for part, boxes in ranges[tensor.key]
            ]
        return sorted(reads, key=_order)

    def check(self) -> None:
        """Read everything once to check it, and keep nothing."""
        for reads in self._rounds:
            for read in reads:
                self._guarded(read, partial(self._check, read, ()))

    def read(self, number: int, is_checked: bool) -> Mapping[str, LocalParts]:
        """Read this rank's ranges of a round, and return their elements by the keys of tensors.

        Args:
            is_checked: `check` has been called; else they are checked now.
        """
        elements: defaultdict[str, dict[tuple[int, int], Sequence[Tensor]]] = defaultdict(dict)
        boxes: defaultdict[str, dict[tuple[int, int], Sequence[Box]]] = defaultdict(dict)
        for reads in self._near_reads(self._rounds[number]):
            raw_bytes = self._guarded(reads[0], partial(self._raw_bytes, reads)) or [None] * len(reads)
            for read, raw in zip(reads, raw_bytes, strict=True):
                parts = self._guarded(read, partial(self._elements, read, raw, is_checked))
                place = read.range.chunk, read.range.start
                boxes[read.tensor.key][place] = read.boxes
                elements[read.tensor.key][place] = _zeros(read) if parts is None else parts
        local = {}
        for key in elements:
            by_first: dict[Index, Tensor] = {}
            for place in sorted(elements[key]):  # chunk by chunk, as plans count elements
                by_first |= zip((box.lo for box in boxes[key][place]), elements[key][place], strict=True)
            local[key] = LocalParts.of(by_first)
        return local

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
        first, last = group[0].extent, group[-1].extent
        if first is None or last is None or read.extent is None or read.file != group[0].file:
            return False
        file = self._guarded(read, partial(self._payloads.open_file, read.file, 0))
        is_close = file is not None and read.extent.offset <= last.end + file.gap
        return is_close and read.extent.end - first.offset <= BAND_BYTES

    def _raw_bytes(self, reads: Sequence[_Read]) -> Sequence[memoryview | None]:
        """Read the bytes of reads that are near each other; None for one alone, which is checked band by band."""
        if len(reads) == 1:
            return [None]
        extents = [read.extent for read in reads if read.extent is not None]
        start = extents[0].offset // _ALIGNMENT * _ALIGNMENT
        stop = max(extent.end for extent in extents)
        raw = np.empty(stop - start, np.uint8).data
        for _ in self._payloads.fill_bands(Extent(extents[0].file, start, stop - start), raw):
            pass
        return [raw[extent.offset - start : extent.end - start] for extent in extents]

    def _elements(self, read: _Read, raw: memoryview | None, is_checked: bool) -> Sequence[Tensor]:
        """Return the elements of each box of a read, after checking them unless that was done before."""
        if not read.boxes:  # read for the checksum of the chunk alone
            if not is_checked:
                self._check(read, ())
            return ()
        if read.extent is None:
            return [*self._gathered(read, is_checked)]
        if raw is None:
            raw = np.empty(read.extent.length, np.uint8).data
            parts: Iterable[memoryview] = self._payloads.fill_bands(read.extent, raw)
        else:
            parts = (raw,)
        if is_checked:
            for _ in parts:
                pass
        else:
            self._check(read, parts)
        elements = torch.frombuffer(raw, dtype=torch.uint8)
        if elements.data_ptr() % read.dtype.itemsize:  # torch's kernels crash on elements of 16 bytes at such places
            elements = elements.clone()
        elements = elements.view(read.dtype)
        by_box = torch.split(elements, [box.numel for box in read.boxes])
        return [part.view(box.shape) for part, box in zip(by_box, read.boxes, strict=True)]

    def _gathered(self, read: _Read, is_checked: bool) -> Iterator[Tensor]:
        """Yield elements that do not lie in row-major order, or whose checksum is that of the whole chunk."""
        payload = payload_of(read.tensor, read.chunk)
        if not is_checked and read.range.is_whole:
            part = torch.empty(read.chunk.box.shape, dtype=read.dtype)
            np.copyto(bits_of(part), checked_elements(self._payloads, read.tensor, read.chunk))
            yield part
            return
        if not is_checked:
            self._check(read, ())
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
        tensor, chunk, extent = read.tensor, read.chunk, read.extent
        if extent is None:
            if chunk not in self._checked:
                check_chunk(self._payloads, tensor, chunk)
                self._checked.add(chunk)
        elif read.range.is_whole:
            check_bytes(self._payloads, tensor, chunk, parts or self._payloads.bands(extent))
        else:
            payload = payload_of(tensor, chunk)
            assert chunk.crc32 is not None, "else it is no extent"
            start = extent.offset - payload.offset
            total = crc32(parts or self._payloads.bands(extent))
            sum_of_part = PartialSum(
                tensor.key, read.range.chunk, payload.length, chunk.crc32, start, start + extent.length, total
            )
            self.sums.append(sum_of_part)
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


def _extent(tensor: StateRecord, chunk: Chunk, part: ChunkRange) -> Extent | None:
    """Return the bytes of a range; None if they are no run, or the chunk has no checksum that parts could add up to."""
    if chunk.strides is not None or not (part.is_whole or chunk.crc32 is not None):
        return None
    payload, size = payload_of(tensor, chunk), itemsize(tensor.dtype)
    return Extent(payload.file, payload.offset + part.start * size, (part.stop - part.start) * size)


def _zeros(read: _Read) -> Sequence[Tensor]:
    """Return elements in the place of those that could not be read: the state dict is declared unusable then."""
    return [torch.zeros(box.shape, dtype=read.dtype) for box in read.boxes]


def _order(read: _Read) -> tuple[str, int, int]:
    return read.chunk.item.file, read.chunk.item.offset, read.range.start
