"""Reading a rank's ranges of a checkpoint's chunks to where they belong, and checking them on the way.

Bytes with the same order in target and file are read into the target, and checked while in the processor's cache.
All others pass through one staging buffer.  Every chunk that is read, even in part, is compared with its digest by each
rank that reads all of it; or, where ranks read parts, with its CRC-32, which follows from those of the parts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..algebra.box import Box, Index, flat_boxes
from ..algebra.grouping import neighbours
from ..names.errors import DamageError, MuonckptError, about
from ..names.wording import listed
from ..record.chunks import columns_of
from ..record.columns import UNKNOWN
from ..record.record import Chunk, Extent, StateRecord, with_chunks
from ..store.io.checksums import JoinedCrc, crc32, xxh3_128
from ..store.io.location import unavailable
from ..store.open_checkpoint import OpenCheckpoint
from ..store.reading.payloads import BAND_BYTES, about_chunk, check_joined, compare_checksums, payload_of
from .live_state import LocalParts
from .reading_plan import ChunkRange, ReadingRound, TensorReading

_GAP_BYTES = 64 << 10
"""Largest gap between two small ranges of a file that one read includes."""

_ALIGNMENT = 64
"""Reads of several ranges begin at multiples of it, so that elements which are aligned in their file are in memory."""

_MIN_DIRECT_BYTES = 64 << 10
"""The least bytes that are read into a target by themselves: fewer are copied there."""

Targets = Mapping[str, Sequence[LocalParts]]
"""The tensors of this rank that a tensor of the checkpoint fills, by its key."""


class PartialSum(NamedTuple):
    """The CRC-32 of bytes ``start:stop`` of a chunk's payload, as the rank at a place of the group has read them."""

    key: str
    chunk: int
    start: int
    stop: int
    crc32: int
    place: int


class _Read(NamedTuple):
    """A range of a chunk that this rank reads.

    Attributes:
        tensor: with located chunks; this one is ``chunks[number]``, of this box.
        file, offset, length: its bytes.
        digest, crc32: the xxh3-128 of the bytes, and the CRC-32 of all of the chunk, where they are recorded.
        item: all bytes under the one checksum of a chunk that has none of its own, or shares it.
    """

    tensor: StateRecord
    number: int
    box: Box
    dtype: torch.dtype
    range: ChunkRange
    file: str
    offset: int
    length: int
    digest: str | None
    crc32: int | None
    item: Extent | None

    @property
    def chunk(self) -> Chunk:
        return self.tensor.chunks[self.number]

    @property
    def end(self) -> int:
        return self.offset + self.length

    @property
    def needs_item(self) -> bool:
        """True if the only checksum of the chunk is that of its item."""
        return self.item is not None and self.crc32 is None

    @property
    def order(self) -> Index | None:
        """The dims of a chunk that is not row-major, from the outermost in the file on."""
        strides = self.tensor.chunks.strides and self.tensor.chunks.strides[self.number]
        if not strides:
            return None
        shape = self.box.shape
        return tuple(sorted(range(len(shape)), key=lambda dim: (-strides[dim], -shape[dim])))

    @property
    def stored_shape(self) -> Index:
        """The shape of the chunk, of dims in the order of the file."""
        shape, order = self.box.shape, self.order
        return shape if order is None else tuple(shape[dim] for dim in order)


class _Span(NamedTuple):
    """The bytes of one or several reads; those of an item are read and checked together, small ones by one call."""

    extent: Extent
    reads: Sequence[_Read]
    is_item: bool


class _Target(NamedTuple):
    """The elements of a target in a box of a chunk, both with dims in the order of the file."""

    box: Box
    elements: Tensor


class _Staging:
    """Memory through which pieces pass; two blocks of it, pinned, where copies to a GPU go on meanwhile.

    Attributes:
        devices: those to which copies from the last memory have begun.
    """

    def __init__(self, length: int, is_pinned: bool) -> None:
        self.devices: set[torch.device] = set()
        count = 2 if is_pinned else 1
        self._blocks = [torch.empty(length, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(count)]
        self._copies: list[list[torch.Event]] = [[] for _ in range(count)]

    def take(self, length: int) -> Tensor:
        """Return memory that the call after the next one may overwrite."""
        self._copies[-1] = [torch.accelerator.current_stream(device).record_event() for device in self.devices]
        self.devices.clear()
        self._blocks.append(self._blocks.pop(0))
        self._copies.append(self._copies.pop(0))
        for event in self._copies[-1]:
            event.synchronize()
        return self._blocks[-1][:length]

    def finish(self) -> None:
        """Wait for all copies."""
        for _ in self._blocks:
            self.take(0)


class ChunkReader:
    """A reader of the ranges that a plan gives to one rank, round by round.

    Args:
        rounds: of the plan.
        place: this rank's in the process group.
        is_pinned: True if targets are on GPUs.

    Attributes:
        sums: of the parts of chunks that other ranks read too.
        bytes_read: of tensors, so far.
        placed: elements that have been put where they belong, so far.

    Raises:
        SourceError: an item is damaged, or not what the metadata promise.
    """

    def __init__(self, checkpoint: OpenCheckpoint, rounds: Sequence[ReadingRound], place: int, is_pinned: bool) -> None:
        self.sums: list[PartialSum] = []
        self.bytes_read = self.placed = 0
        self._checkpoint, self._payloads, self._place = checkpoint, checkpoint.payloads, place
        self._readings = [[pair for pair in each.readings if place in pair[1].ranges_by_reader] for each in rounds]
        self._spans = [[*map(_span_of, neighbours(self._reads_of(of_round), _is_near))] for of_round in self._readings]
        spans = [*chain.from_iterable(self._spans)]
        longest = max((span.extent.length for span in spans), default=0)
        self._staging = _Staging(min(longest, BAND_BYTES), is_pinned)
        kept = (sum(_aligned(reading.kept_bytes[place]) for _, reading in of_round) for of_round in self._readings)
        self._kept = torch.empty(max(kept, default=0), dtype=torch.uint8, pin_memory=is_pinned)
        """Memory for the elements that are sent, until they are."""

    def _reads_of(self, readings: Sequence[tuple[StateRecord, TensorReading]]) -> list[_Read]:
        """Open the items of this rank's chunks, and no others, and return its reads in the order of files.

        Raises:
            SourceError: an item is damaged, or a payload has another length than the elements of its box.
        """
        tensors = [tensor for tensor, _ in readings]
        ranges = [reading.ranges_by_reader[self._place] for _, reading in readings]
        chunks: Sequence[Sequence[int]] = [range(len(tensor.chunks)) for tensor in tensors]
        # Chunks have no place yet where the metadata name only their items.
        if (self._checkpoint.outline.columns.payload_length() == UNKNOWN).any():
            chunks = [sorted({part.chunk for part in of_tensor}) for of_tensor in ranges]
            tensors = [*self._checkpoint.locate(with_chunks(tensors, chunks))]
        # All rows are looked at together, as the tensors of a model can be many and small.
        located, rows, first_row = list[tuple[StateRecord, int, ChunkRange]](), list[int](), 0
        for tensor, of_tensor, numbers in zip(tensors, ranges, chunks, strict=True):
            for part in of_tensor:
                number = bisect_left(numbers, part.chunk)
                located.append((tensor, number, part))
                rows.append(first_row + number)
            first_row += len(numbers)
        columns = columns_of(tensor.chunks for tensor in tensors).select(np.array(rows, np.int64))
        offsets, lengths = columns.payload().tolist(), columns.payload_length().tolist()
        files, sums, digests = columns.file.tolist(), columns.crc32.tolist(), columns.digests(slice(None))
        reads = list[_Read]()
        for row, (tensor, number, part) in enumerate(located):
            box, dtype = tensor.boxes[number], _torch_dtype(tensor)
            size = dtype.itemsize
            if lengths[row] != box.numel * size:
                payload_of(tensor, tensor.chunks[number])  # raises
            digest, item = digests[row] if part.is_whole else None, None
            if digest is None and part.is_whole:
                # The item of the chunk, if it has the one checksum of all its bytes.
                chunk = tensor.chunks[number]
                is_under_one = chunk.payload == chunk.item
                if chunk.crc32 is None:
                    is_under_one = self._payloads.has_checksum(chunk) and self._payloads.is_verbatim(chunk.item.file)
                item = chunk.item if is_under_one else None
            offset, length = offsets[row] + part.start * size, (part.stop - part.start) * size
            crc, file = None if sums[row] == UNKNOWN else sums[row], columns.names[files[row]]
            place = file, offset, length
            reads.append(_Read(tensor, number, box, dtype, part, *place, digest, crc, item))
        return sorted(reads, key=lambda read: (read.file, read.offset, read.range.start))

    def check(self) -> None:
        """Read this rank's ranges of all rounds, and check them."""
        for span in chain.from_iterable(self._spans):
            self._read_span(span, {})

    def read(self, number: int, targets: Targets) -> Mapping[str, LocalParts]:
        """Read this rank's ranges of a round to where they belong, check them, and return the elements to be sent."""
        kept = self._memory_of_sent(self._readings[number])
        kept_too = {**targets, **{key: [*targets.get(key, ()), parts] for key, parts in kept.items()}}
        for span in self._spans[number]:
            self._read_span(span, kept_too)
        self._staging.finish()
        self.placed -= sum(part.numel() for local in kept.values() for part in local.parts)
        return kept

    def _memory_of_sent(self, readings: Sequence[tuple[StateRecord, TensorReading]]) -> dict[str, LocalParts]:
        """Return the memory for the elements of tensors that this rank sends: box after box, as plans count them."""
        kept, start = dict[str, LocalParts](), 0
        for tensor, reading in readings:
            if length := int(reading.kept_bytes[self._place]):
                boxes = [*chain.from_iterable(part.boxes for part in reading.ranges_by_reader[self._place])]
                elements = self._kept[start : start + length].view(_torch_dtype(tensor))
                parts = torch.split(elements, [box.numel for box in boxes])
                shaped = [part.view(box.shape) for part, box in zip(parts, boxes, strict=True)]
                kept[tensor.key] = LocalParts.of(boxes, shaped)
                start += _aligned(length)
        return kept

    def _read_span(self, span: _Span, targets: Targets) -> None:
        """Read the bytes of a span once, put their elements, and check all; errors name its first tensor."""
        try:
            self._read_and_check(span, [_targets_in(read, targets) for read in span.reads])
        except Exception as error:
            is_ours, first = isinstance(error, MuonckptError), span.reads[0]
            if is_ours and str(error).startswith("tensor "):
                raise
            with about(f"tensor {first.tensor.key!r} box {first.box}"):
                if is_ours:
                    raise
                raise unavailable(self._payloads.place(span.extent.file), error) from error

    def _read_and_check(self, span: _Span, targets: list[list[_Target]]) -> None:
        """Read a span with the targets of each of its reads."""
        first, places = span.reads[0], [_Place(span.extent.offset, span.extent.end, None)]
        if len(span.reads) == 1 and not span.is_item:
            is_verbatim = self._payloads.is_verbatim(first.file)
            if not targets[0] and is_verbatim and first.digest is None and first.crc32 is None:
                return  # nothing to put, and nothing to check
            places, targets[0] = _places(first, targets[0])
        self.bytes_read += span.extent.length
        bands = self._bands(span, places, targets)
        if span.is_item or len(span.reads) == 1:
            self._check(first, bands)
        else:
            [raw] = bands
            for read in span.reads:
                start = read.offset - span.extent.offset
                self._check(read, (raw[start : start + read.length],))
        for _ in bands:  # where no checksum asks for them
            pass

    def _bands(
        self, span: _Span, places: Sequence[_Place], targets: Sequence[Sequence[_Target]]
    ) -> Iterator[memoryview]:
        """Read a span band by band, put the elements of its reads to the targets of each, and yield its bytes."""
        file = self._payloads.open_file(span.extent.file, span.extent.end)
        for place in places:
            for low in range(place.start, place.stop, BAND_BYTES):
                high = min(low + BAND_BYTES, place.stop)
                if place.memory is None:
                    raw = self._staging.take(high - low)
                else:
                    raw = place.memory[low - place.start : high - place.start]
                    self.placed += len(raw) // span.reads[0].dtype.itemsize
                file.fill(_bytes_in(raw), low)
                for read, of_read in zip(span.reads, targets, strict=True):
                    start, stop = max(read.offset, low), min(read.end, high)
                    if of_read and start < stop:
                        self._put(read, start - read.offset, raw[start - low : stop - low], of_read)
                yield _bytes_in(raw)

    def _put(self, read: _Read, offset: int, raw: Tensor, targets: Sequence[_Target]) -> None:
        """Copy the elements in the bytes of a read, from this one on, to the targets."""
        if raw.data_ptr() % read.dtype.itemsize:  # torch's kernels crash on elements of 16 bytes at such places
            raw = raw.clone()
        elements, shape = raw.view(read.dtype), read.stored_shape
        devices = {target.elements.device for target in targets if target.elements.is_cuda}
        is_pinned = bool(devices) and raw.is_pinned()
        start, done = read.range.start + offset // read.dtype.itemsize, 0
        for box in flat_boxes(shape, start, start + len(elements)):
            block = elements[done : done + box.numel].view(box.shape)
            done += box.numel
            for target in targets:
                if (common := box & target.box) is not None:
                    part = _part(block, box, common)
                    _part(target.elements, target.box, common).copy_(part, non_blocking=is_pinned)
                    self.placed += part.numel()
        if is_pinned:
            self._staging.devices |= devices

    def _check(self, read: _Read, parts: Iterable[memoryview]) -> None:
        """Compare the bytes of a read with the checksum of its chunk or item, or note the checksum of a part."""
        if read.digest is not None:
            if (digest := xxh3_128(parts)) != read.digest:
                with about_chunk(self._payloads, read.tensor, read.chunk):
                    compare_checksums("digest", digest, read.digest)
        elif read.crc32 is not None:
            total = crc32(parts)
            if not read.range.is_whole:
                start = read.range.start * read.dtype.itemsize
                of_range = read.range.chunk, start, start + read.length, total, self._place
                self.sums.append(PartialSum(read.tensor.key, *of_range))
            elif total != read.crc32:
                with about_chunk(self._payloads, read.tensor, read.chunk):
                    compare_checksums("CRC-32", f"{total:08x}", f"{read.crc32:08x}")
        elif read.item is not None:
            with about_chunk(self._payloads, read.tensor, read.chunk):
                self._payloads.check_item(read.item, parts)


def judge_sums(checkpoint: OpenCheckpoint, sums: Iterable[PartialSum], ranks: Sequence[int]) -> None:
    """Compare chunks that several ranks have read in parts with their recorded checksums.

    Args:
        ranks: the global ranks of the process group.

    Raises:
        DamageError: a part is not what was saved; names the tensor, the box, the file and the ranks that have read it.
    """
    by_chunk: defaultdict[tuple[str, int], list[PartialSum]] = defaultdict(list)
    for part in sums:
        by_chunk[part.key, part.chunk].append(part)
    for (key, number), parts in by_chunk.items():
        tensor, joined = checkpoint.tensors[key].record, JoinedCrc()
        ranges = {(part.start, part.stop, part.crc32) for part in parts}
        # Several ranks may have read a part; where they differ, no CRC-32 is that of all.
        for of_range in sorted(ranges) if len(ranges) == len({part.start for part in parts}) else ():
            joined.add(*of_range)
        if (joined.reached, joined.crc32) == tensor.chunks.length_and_crc32(number):
            continue
        try:
            check_joined(checkpoint.payloads, tensor, tensor.chunks[number], joined)
        except DamageError as error:
            readers = listed(sorted({ranks[part.place] for part in parts}), 8)
            raise DamageError(f"{error}; read by rank {readers}", keys=error.keys) from error


def _aligned(length: int) -> int:
    return -(-int(length) // _ALIGNMENT) * _ALIGNMENT


def _torch_dtype(tensor: StateRecord) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return dtype


def _is_near(group: Sequence[_Read], read: _Read) -> bool:
    """Return whether a read belongs to the same span as those before it: of one item, or small and near them."""
    first = group[0]
    if read.item is not None and read.item == first.item:
        return True
    if read.file != first.file or first.needs_item or read.needs_item:
        return False
    return read.offset <= group[-1].end + _GAP_BYTES and read.end - _aligned_start(first) <= BAND_BYTES


def _span_of(group: Sequence[_Read]) -> _Span:
    first = group[0]
    is_of_item = first.needs_item or (len(group) > 1 and all(read.item == first.item for read in group))
    if first.item is not None and is_of_item:
        return _Span(first.item, group, True)
    start = first.offset if len(group) == 1 else _aligned_start(first)
    return _Span(Extent(first.file, start, max(read.end for read in group) - start), group, False)


def _aligned_start(read: _Read) -> int:
    return read.offset // _ALIGNMENT * _ALIGNMENT


# --- Where elements belong --------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """The memory to which bytes ``start:stop`` of a file are read; None is the staging buffer."""

    start: int
    stop: int
    memory: Tensor | None


def _targets_in(read: _Read, targets: Targets) -> list[_Target]:
    """Return the targets of this rank in a chunk."""
    chunk, order, found = read.box, read.order, list[_Target]()
    for local in targets.get(read.tensor.key, ()):
        for number, common in _common_boxes(chunk, local.boxes):
            elements = _part(local.parts[number], local.boxes[number], common)
            inside = common.shift([-low for low in chunk.lo])
            if order is not None:
                elements = elements.permute(order)
                inside = Box(*(tuple(corner[dim] for dim in order) for corner in (inside.lo, inside.hi)))
            found.append(_Target(inside, elements))
    return found


@lru_cache(maxsize=4096)
def _common_boxes(chunk: Box, boxes: tuple[Box, ...]) -> tuple[tuple[int, Box], ...]:
    """Return what a chunk has in common with boxes, with their numbers.  Cached: layers repeat."""
    common = ((number, box & chunk) for number, box in enumerate(boxes))
    return tuple((number, box) for number, box in common if box is not None)


def _part(elements: Tensor, box: Box, part: Box) -> Tensor:
    """Return the elements of a part of a box, given those of all of it."""
    if part == box:
        return elements
    return elements[tuple(slice(low - at, high - at) for low, high, at in zip(part.lo, part.hi, box.lo, strict=True))]


def _places(read: _Read, targets: Sequence[_Target]) -> tuple[list[_Place], list[_Target]]:
    """Return the places to which a range of a chunk is read, one after the other, and the targets to be copied to."""
    start, stop, size = read.range.start, read.range.stop, read.dtype.itemsize
    places, copied, reached = list[_Place](), list[_Target](), read.offset
    for target in sorted(targets, key=lambda target: target.box.lo):
        low, high = _flat_range(target.box, read.stored_shape)
        first, last = max(low, start), min(high, stop)
        begin, end = (read.offset + (element - start) * size for element in (first, last))
        is_run = high - low == target.box.numel and end - begin >= _MIN_DIRECT_BYTES
        # Host memory without gaps takes the bytes as they are.
        elements = target.elements
        is_plain = type(elements) is Tensor and elements.is_cpu and elements.is_contiguous() and elements.data_ptr()
        if is_run and reached <= begin and is_plain:
            memory = elements.reshape(-1)[first - low : last - low].view(torch.uint8)
            places += _Place(reached, begin, None), _Place(begin, end, memory)
            reached = end
        else:
            copied.append(target)
    return [*places, _Place(reached, read.end, None)], copied


def _flat_range(box: Box, shape: Index) -> tuple[int, int]:
    """Return the numbers of the first element of a box, and after its last one, in row-major order of the shape."""
    first = last = 0
    for low, high, length in zip(box.lo, box.hi, shape, strict=True):
        first, last = first * length + low, last * length + high - 1
    return first, last + 1


def _bytes_in(raw: Tensor) -> memoryview:
    view: memoryview = raw.numpy().data
    return view
