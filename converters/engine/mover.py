"""Moving the bytes of one job: the part of offline work that touches data.

A thread writes a chunk from its first byte to its last, in bands of bounded size, and computes checksums on the way.
A chunk of the source is checked by the CRC-32s of the bytes read, or if it has none, before anything is copied.
If every copy of a chunk is one run of bytes on both sides, as for rows, the bytes go directly from the source to the
file; otherwise bands are assembled in memory.  Small chunks are written together.  All ways give the same file.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePosixPath

import numpy as np
import xxhash
from numpy.typing import NDArray

from ...algebra.box import Box, Index
from ...algebra.fingerprint import box_shares
from ...algebra.layout import Buffer
from ...names.errors import Interrupted, SourceError
from ...record.chunks import Chunks
from ...record.columns import UNKNOWN, Column, Columns
from ...record.record import Extent
from ...store.io.checksums import Sums, crc32_of, join_crc32, xxh3_128
from ...store.io.location import Location, Remote
from ...store.io.new_file import Writing, create_file
from ...store.io.regular import READ_BYTES
from ...store.open_checkpoint import check_blob
from ...store.reading.blocks import bands, join_ranges, strided_span
from ...store.reading.dtypes import itemsize
from ...store.reading.payloads import Payloads, as_words, check_chunk, payload_of
from .in_step import Draft, FilesInStep, Part
from .output_files import (
    SUMS,
    ChunkPlan,
    ChunkSums,
    FinishedFile,
    OutputChunk,
    OutputChunks,
    OutputFile,
    PlacedItem,
    is_direct,
)
from .outputs import OutputTensor, Words, unseen
from .source_rows import CopiedRuns, Unchecked

SMALL_BYTES = 64 << 10
"""The most bytes of a small chunk in its file, and of the elements of chunks that it is copied from."""

_GAP = 16 << 10
"""Bytes between two ranges that are read along, because a call costs as much."""

_MAX_RUN_BYTES = 1 << 20
"""Bytes of small chunks that are read at a time."""

_LARGEST_BAND = 2 << 20
"""The most bytes of a band: it should stay in cache from the copy through the checksums to the write."""

_MAX_BAND_ROWS = 1 << 16
"""The most rows of a band: the fingerprint keeps 8 bytes for each row of the last 16 bands."""

Bytes = NDArray[np.uint8]

Advance = Callable[[int], None]
"""Receives the number of bytes checked or written since the last call; called from several threads."""


def is_small(plan: ChunkPlan, output: OutputTensor) -> bool:
    """Return whether a chunk has elements, and they are in small chunks of the source."""
    if not 0 < plan.frame.payload_length <= plan.frame.length <= SMALL_BYTES:
        return False
    size = itemsize(output.stored_dtype)
    for buffer in plan.copies.buffers:
        source, number = output.locate(buffer)
        if source.boxes.numel[number] * size > SMALL_BYTES:
            return False
    return True


def windows(chunks: OutputChunks, numbers: range, max_bytes: int) -> Iterator[range]:
    """Yield numbers of a file's chunks in order: neighbours that are small, up to ``max_bytes``; others alone."""
    # Whether a chunk is small is decided once for all that are made in one way of equal boxes.
    small_kinds: dict[Hashable, bool] = {}
    offsets, start = chunks.offsets.tolist(), numbers.start
    for number in numbers:
        output, plan = chunks.outputs[number], chunks.plans[number]
        joins = plan.copies.in_runs
        if joins:
            kind = plan, output.stored_dtype, output.boxes
            if kind not in small_kinds:
                small_kinds[kind] = is_small(plan, output)
            joins = small_kinds[kind]
        if start < number and (not joins or offsets[number] + plan.frame.length - offsets[start] > max_bytes):
            yield range(start, number)
            start = number
        if not joins:
            yield range(number, number + 1)
            start = number + 1
    if start < numbers.stop:
        yield range(start, numbers.stop)


def payload_rows(payloads: Payloads, columns: Columns, rows: Column, length: int) -> Bytes:
    """Return the payloads of rows, all of this length in bytes, as ``[rows, length]``."""
    # Neighbours in a file are read by one call.
    payload = columns.payload(rows)
    order = np.lexsort((payload, columns.file[rows]))
    file, start = columns.file[rows][order], payload[order]
    elements = np.empty((len(rows), length), np.uint8)
    runs = join_ranges(start, start + length, _GAP, _MAX_RUN_BYTES, file)
    files, starts, numbers = file.tolist(), start.tolist(), order.tolist()
    for offset, end, members in zip(runs.start.tolist(), runs.stop.tolist(), runs.members(len(rows)), strict=True):
        extent = Extent(columns.names[files[members[0]]], offset, end - offset)
        raw = np.frombuffer(payloads.read_scratch(extent), np.uint8)
        for member in members:
            place = starts[member] - offset
            elements[numbers[member]] = raw[place : place + length]
    return elements


def sums_of(plan: ChunkPlan, elements: Bytes) -> ChunkSums:
    """Return the sums of the elements of chunks of one plan."""
    raw, length, checksum_of = elements.reshape(-1).data, elements.shape[1], plan.frame.checksum_of
    words, sums = as_words(raw, plan.dtype, (len(elements), *plan.box.shape)), np.empty(len(elements), SUMS)
    parts = [raw[start : start + length] for start in range(0, len(raw), length)]
    sums["digest"] = np.frombuffer(b"".join(map(xxhash.xxh3_128_digest, parts)), "V16")
    sums["checksum"] = [checksum_of(part, 0) for part in parts]
    sums["share"] = box_shares(words, plan.box.lo + (0,) * (words.ndim - 1 - plan.box.ndim))  # halves of 16 bytes
    return sums


class Mover:
    """Checks and copies the bytes of a job; checked rows of the source leave ``unchecked``."""

    def __init__(
        self,
        payloads: Payloads,
        staged: Location,
        unchecked: Unchecked,
        band_bytes: int,
        progress: Advance,
    ) -> None:
        self._staged = staged
        self.unchecked = unchecked
        self._payloads = payloads
        self._thread = threading.local()
        self._copied = CopiedRuns(payloads, unchecked, progress)
        payloads.window_bytes = min(band_bytes, payloads.window_bytes)
        self._band_bytes = min(band_bytes, _LARGEST_BAND)
        self._read_bytes = min(band_bytes // 4, READ_BYTES)  # a thread keeps hardly more
        self._stop = threading.Event()
        self._progress = progress

    def stop(self) -> None:
        """Have all threads that move bytes raise `Interrupted` soon."""
        self._stop.set()

    def check(self, rows: Iterable[int]) -> None:
        """Check chunks of the source against their checksums, without those that another thread has begun to check.

        Raises:
            SourceError: one is damaged.
        """
        for row in rows:
            if self.unchecked.take(np.array([row])).all():
                self._raise_if_stopped()
                tensor, chunk = self.unchecked.rows.at(row)
                check_chunk(self._payloads, tensor, chunk)
                self._progress(payload_of(tensor, chunk).length)

    @property
    def writes_in_any_order(self) -> bool:
        """Whether several threads can write to a file: an object of a store is written front to back."""
        return not isinstance(self._staged, Remote)

    def write(self, group: FilesInStep) -> list[tuple[str, FinishedFile]]:
        """Write files band by band in turn, so that one read serves them all, or a share of them beside other threads.

        A chunk of the source is checked while it is copied, or right before: if all were checked first, the disk would
        be idle meanwhile, and the source would be read from it twice.

        Returns:
            The files by name, finished and synced, for the last thread that works on them.
        """

        def write_part(part: Part) -> None:
            writings = [self._write(draft, numbers) for draft, numbers in part]
            while writings:  # a band of each; a generator that has ended returns the default
                writings = [writing for writing in writings if next(writing, writing) is None]

        return group.write(self._draft, write_part)

    @contextmanager
    def _draft(self, file: OutputFile) -> Iterator[Draft]:
        """Open a file to write its chunks; when all are written, write what depends on their sums, and sync it."""
        self._raise_if_stopped()
        for folder in reversed(PurePosixPath(file.name).parents[:-1]):  # the staging directory itself exists
            (self._staged / str(folder)).mkdir(exist_ok=True)
        with create_file(self._staged / file.name, file.length) as output:
            draft = Draft(file, output)
            yield draft
            if file.header and output.rewinds:
                output.write(file.header(draft.sums), 0)
            if file.footer:
                footer = file.footer(draft.sums)
                output.write(footer, file.length - len(footer))

    def _write(self, draft: Draft, numbers: range) -> Generator[None, None, None]:
        """Write chunks of a file in order, before the first of them its items; pauses after every band."""
        self._raise_if_stopped()
        file, output = draft.file, draft.output
        sums_of_header: ChunkSums | None = None
        if numbers.start == 0:
            # A header in front of chunks that cannot be written last needs a pass for their sums.
            if file.header and not output.rewinds:
                sums_of_header = np.empty(len(file.chunks), SUMS)
                for number, chunk in enumerate(file.chunks):
                    sums_of_header[number] = yield from self._pass(chunk)
                output.write(file.header(sums_of_header), 0)
            draft.items = tuple(self._write_item(output, item) for item in file.items)
        # Small neighbours are written together, other chunks band by band.
        for window in windows(file.chunks, numbers, self._band_bytes // 4):
            if len(window) > 1:
                self._write_window(output, file.chunks, window, draft.sums)
                yield
            else:
                draft.sums[window[0]] = yield from self._write_chunk(output, file.chunks[window[0]])
        if sums_of_header is not None and not np.array_equal(sums_of_header, draft.sums):
            raise SourceError(f"the source of {file.name} changed between two reads; nothing was published")

    def _write_item(self, output: Writing, item: PlacedItem) -> str:
        # An item of the source is checked before, and digested during its copy.
        source = item.output.source
        if source is None:
            output.write(item.output.data, item.blob.item.offset)
            return xxh3_128([item.output.data])
        check_blob(self._payloads, source)

        def copy() -> Iterator[memoryview]:
            position = item.blob.item.offset
            for raw in self._payloads.bands(source.item):
                position = output.write(raw, position)
                yield raw

        return xxh3_128(copy())

    def _write_window(self, output: Writing, chunks: OutputChunks, window: Sequence[int], sums: ChunkSums) -> None:
        """Write small neighbours by one call, each plan's elements gathered together."""
        self._raise_if_stopped()
        # Between the items of a file there are zeros.
        start = chunks[window[0]].offset
        data = bytearray(chunks[window[-1]].item.end - start)
        for plan, numbers in chunks.grouped(window):
            elements = self._elements(plan, [chunks.outputs[number] for number in numbers])
            sums[numbers] = sums_of(plan, elements)
            places, checksums = (chunks.offsets[numbers] - start).tolist(), sums["checksum"][numbers].tolist()
            for place, raw, checksum in zip(places, elements, checksums, strict=True):
                item = b"".join((plan.frame.head, raw.data, plan.frame.tail(checksum)))
                data[place : place + len(item)] = item
        output.write(memoryview(data), start)
        self._progress(sum(chunks.plans[number].frame.payload_length for number in window))

    def _elements(self, plan: ChunkPlan, outputs: Sequence[OutputTensor]) -> Bytes:
        """Return the elements of small chunks of one plan and kind, ``[chunks, payload_length]``."""
        # Equal boxes have equal copies, so each copy is made for all chunks at once.
        output, table = outputs[0], plan.copies.table
        size = itemsize(output.stored_dtype)
        raw = np.empty((len(outputs), plan.box.numel * size), np.uint8)
        stored = {buffer: self._stored(outputs, buffer, size) for buffer in plan.copies.buffers}
        ranges = ((size * column).tolist() for column in (table.source_offset, table.target_offset, table.numel))
        for buffer, start, target, length in zip(table.source.tolist(), *ranges, strict=True):
            raw[:, target : target + length] = stored[buffer][:, start : start + length]
        if not output.computed:
            return raw
        words = as_words(raw.reshape(-1).data, output.stored_dtype, (-1,))
        return np.ascontiguousarray(output.compute(words)).view(np.uint8).reshape(len(outputs), -1)

    def _stored(self, outputs: Sequence[OutputTensor], buffer: Buffer, size: int) -> Bytes:
        """Return all elements, of ``size`` bytes, of a buffer of outputs of one kind, after checking them."""
        source, number = outputs[0].locate(buffer)
        rows, columns = self.unchecked.rows.rows(outputs, buffer), self.unchecked.rows.columns
        length = int(source.boxes.numel[number]) * size
        for row in rows[columns.payload_length(rows) != length].tolist():
            payload_of(*self.unchecked.rows.at(row))  # names the fault
        elements = payload_rows(self._payloads, columns, rows, length)
        # The first reader of a chunk checks it: by its digest, or without one as `check_chunk` does.
        unchecked_numbers = np.flatnonzero(self.unchecked.take(rows)).tolist()
        for number in unchecked_numbers:
            row = int(rows[number])
            digest = columns.digest[row].tobytes() if columns.has_digest[row] else None
            if xxhash.xxh3_128_digest(elements[number]) != digest:
                check_chunk(self._payloads, *self.unchecked.rows.at(row))
        if unchecked_numbers:
            self._progress(len(unchecked_numbers) * length)
        return elements

    def _write_chunk(self, output: Writing, chunk: OutputChunk) -> Generator[None, None, tuple[bytes, int, int]]:
        frame = chunk.plan.frame
        position = output.write(frame.head, chunk.offset)

        def put(raw: memoryview) -> None:
            nonlocal position
            position = output.write(raw, position)
            self._progress(len(raw))

        sums = yield from self._pass(chunk, put)
        output.write(frame.tail(sums[1]), position)
        return sums

    def _pass(
        self, chunk: OutputChunk, put: Callable[[memoryview], None] = lambda raw: None
    ) -> Generator[None, None, tuple[bytes, int, int]]:
        """Compute the `SUMS` of a chunk's elements, and pass their bytes on in order; pauses after every band."""
        sums, rows = Sums(chunk.plan.frame.checksum_of), self.unchecked.rows
        # A chunk without a CRC-32, or that other processes copy from, too, is not checked by the bytes read here.
        for row in rows.in_file_order(chunk.output, chunk.plan.copies.buffers):
            if rows.columns.crc32[row] == UNKNOWN or self.unchecked.is_shared(row):
                self.check([row])
        parts = self._direct(chunk, sums) if is_direct(chunk.output, chunk.plan) else self._assembled(chunk)
        for words, origin in parts:
            self._raise_if_stopped()
            put(sums.add(words, origin))
            yield
        return bytes.fromhex(sums.digest), sums.checksum, sums.share

    def _direct(self, chunk: OutputChunk, sums: Sums) -> Iterator[tuple[Words, Index]]:
        """Yield the elements of a chunk in order, as views of the source, and the global index of each view's first.

        The caller adds them to ``sums``, which tell whether they are what the source should have.
        """
        plan, name = chunk.plan, chunk.plan.dtype
        size, adds_up = itemsize(name), plan.frame.checksum_of is crc32_of
        for fragment in plan.copies.fragments():
            buffer, first, before = fragment.place.buffer, fragment.place.offset, sums.checksum
            row, start = self.unchecked.rows.row(chunk.output, buffer), first
            # The CRC-32 of the written bytes is that of the bytes read, so the source's follows from it.
            reads = unseen if adds_up else self._reads
            for band in bands(fragment.box, self._band_numel(fragment.box, size)):
                for box in band.boxes:
                    raw = chunk.output.read(self._payloads, buffer, start, box.numel, reads)
                    yield as_words(raw, name, box.shape), box.lo
                    start += box.numel
            if adds_up and self.unchecked.rows.columns.crc32[row] != UNKNOWN:
                crc32 = join_crc32(before, sums.checksum, fragment.box.numel * size)
                self._copied.add(row, first * size, start * size, crc32)

    def _reads(self, chunks: Chunks, number: int, start: int, raw: memoryview) -> None:
        self._copied.read(self.unchecked.rows.first(chunks) + number, start, raw)

    def _assembled(self, chunk: OutputChunk) -> Iterator[tuple[Words, Index]]:
        """Yield the elements of a chunk in order, gathered from wherever they lie."""
        plan = chunk.plan
        fragments = list(plan.copies.fragments())
        size, numel = itemsize(plan.dtype), self._band_numel(plan.box, itemsize(plan.dtype))
        # A band has no more elements than one read of each fragment can gather.
        for fragment in fragments:
            reach = size * strided_span(fragment.box.shape, fragment.place.strides)
            numel = max(min(numel, self._read_bytes * fragment.box.numel // reach), 1)
        for band in bands(plan.box, numel):
            for box in band.boxes:
                yield chunk.output.elements(self._payloads, fragments, box, self._reads, self._room), box.lo

    def _room(self, shape: Index, bits: str) -> Words:
        """Return memory of this thread, which the next band overwrites: fresh memory is slower."""
        length = math.prod(shape) * np.dtype(bits).itemsize
        if len(getattr(self._thread, "memory", b"")) < length:
            self._thread.memory = np.empty(length, np.uint8)
        memory: Bytes = self._thread.memory
        return memory[:length].view(bits).reshape(shape)

    def _band_numel(self, box: Box, size: int) -> int:
        """Return the most elements of a band of this box."""
        rows = _MAX_BAND_ROWS * math.prod(box.shape[1:]) if box.ndim > 1 else box.numel
        return max(min(self._band_bytes // size, rows), 1)

    def _raise_if_stopped(self) -> None:
        if self._stop.is_set():
            raise Interrupted("stopped")
