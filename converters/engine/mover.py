"""Moving the bytes of one job: the part of offline work that touches data.

A thread writes a chunk from its first byte to its last, in bands of bounded size: it gathers a band from wherever its
elements lie, sums it, and writes it.  Small chunks are gathered, summed and written together.  Both give the same file.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePosixPath

import numpy as np
import xxhash

from ...algebra.box import Index
from ...algebra.fingerprint import box_shares
from ...names.errors import DamageError, SourceError
from ...record.record import Blob
from ...store.io.checksums import Sums, xxh3_128
from ...store.io.location import Location
from ...store.io.new_file import Writing, create_file
from ...store.io.regular import READ_BYTES
from ...store.open_checkpoint import check_blob
from ...store.reading.blocks import bands
from ...store.reading.dtypes import itemsize
from ...store.reading.payloads import Payloads, as_words
from .in_step import Draft, FilesInStep
from .output_files import SUMS, ChunkPlan, ChunkSums, FinishedFile, OutputChunks, OutputFile
from .outputs import OutputItem, OutputTensor, Words
from .source_rows import Advance, Bytes, SourceChecks

SMALL_BYTES = 64 << 10
"""The most bytes of a small chunk in its file, and of the elements of chunks that it is copied from."""

_LARGEST_BAND = 2 << 20
"""The most bytes of a band: it should stay in cache from the copy through the checksums to the write."""

_MAX_BAND_ROWS = 1 << 16
"""The most rows of a band: the fingerprint keeps 8 bytes for each row of the last 16 bands."""


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
            kind = plan, output.kind
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
    """Copies the bytes of a job, and has those of the source checked.

    Args:
        band_bytes: the most bytes of a band; a thread keeps about twice as many.
        progress: may raise an error, to stop the thread that calls it.
    """

    def __init__(
        self, payloads: Payloads, staged: Location, checks: SourceChecks, band_bytes: int, progress: Advance
    ) -> None:
        self._staged = staged
        self._payloads = payloads
        self._checks = checks
        self._progress = progress
        self._thread = threading.local()
        payloads.window_bytes = min(band_bytes, payloads.window_bytes)
        self._band_bytes = min(band_bytes, _LARGEST_BAND)
        self._read_bytes = min(band_bytes // 4, READ_BYTES)  # a thread keeps hardly more

    def write(self, part: tuple[FilesInStep, Sequence[range]]) -> list[tuple[str, FinishedFile]]:
        """Write a part of some files; return them by name once they are finished and synced.

        A chunk of the source is checked while it is copied, or right before: if all were checked first, the disk would
        be idle meanwhile, and the source would be read from it twice.
        """
        self._progress(0)  # open no file where another thread has failed
        files, ranges = part
        drafts = files.begin_part(self._open_draft)
        if not drafts:
            return []
        # A band of each file in turn, so that one read serves them all.
        writings = [self._write_in_bands(draft, numbers) for draft, numbers in zip(drafts, ranges, strict=True)]
        ended = object()
        while writings:
            writings = [writing for writing in writings if next(writing, ended) is not ended]
        return files.end_part()

    @contextmanager
    def _open_draft(self, file: OutputFile) -> Iterator[Draft]:
        """Open a file to write its chunks; when all are written, write what depends on their sums, and sync it."""
        for folder in reversed(PurePosixPath(file.name).parents[:-1]):  # the staging directory itself exists
            (self._staged / str(folder)).mkdir(exist_ok=True)
        with create_file(self._staged / file.name, file.length) as output:
            draft = Draft(file, output, items=[], sums=np.empty(len(file.chunks), SUMS))
            yield draft
            if file.header and output.rewinds:
                output.write(file.header(draft.sums), 0)
            if file.footer:
                footer = file.footer(draft.sums)
                output.write(footer, file.length - len(footer))

    def _write_in_bands(self, draft: Draft, numbers: range) -> Generator[None, None, None]:
        """Write chunks of a file in order, before the first of them its items; pauses after every band."""
        file, writing, chunks = draft.file, draft.output, draft.file.chunks
        sums_of_header: ChunkSums | None = None
        if numbers.start == 0:
            # A header in front of chunks that cannot be written last needs a pass for their sums.
            if file.header and not writing.rewinds:
                sums_of_header = np.empty(len(chunks), SUMS)
                for number, (output, plan) in enumerate(zip(chunks.outputs, chunks.plans, strict=True)):
                    sums = Sums(plan.frame.checksum_of)
                    for _ in self._bands(output, plan, sums):
                        yield
                    sums_of_header[number] = bytes.fromhex(sums.digest), sums.checksum, sums.share
                writing.write(file.header(sums_of_header), 0)
            draft.items.extend(self._write_item(writing, item, blob) for item, blob in file.items)
        # Small neighbours are written together, other chunks band by band.
        for window in windows(chunks, numbers, self._band_bytes // 4):
            number, *others = window
            if others:
                self._write_window(draft, window)
                yield
                continue
            plan = chunks.plans[number]
            sums, position = Sums(plan.frame.checksum_of), writing.write(plan.frame.head, int(chunks.offsets[number]))
            for raw in self._bands(chunks.outputs[number], plan, sums):
                position = writing.write(raw, position)
                self._progress(len(raw))
                yield
            writing.write(plan.frame.tail(sums.checksum), position)
            draft.sums[number] = bytes.fromhex(sums.digest), sums.checksum, sums.share
        if sums_of_header is not None and not np.array_equal(sums_of_header, draft.sums):
            raise SourceError(f"the source of {file.name} changed between two reads; nothing was published")

    def _write_item(self, writing: Writing, item: OutputItem, blob: Blob) -> str:
        """Write an item at its place; return its digest."""
        source = item.source
        if source is None:
            writing.write(item.data, blob.item.offset)
            return xxh3_128([item.data])

        def copy() -> Iterator[memoryview]:
            position = blob.item.offset
            for raw in self._payloads.bands(source.item):
                position = writing.write(raw, position)
                yield raw

        # An item with a digest is checked by its copy.
        digest = xxh3_128(copy())
        if digest != source.digest:
            check_blob(self._payloads, source)
            if source.digest is not None:
                raise DamageError(f"item {source.key!r} in {source.item.file} changed while it was read")
        return digest

    def _write_window(self, draft: Draft, window: range) -> None:
        """Write small neighbours by one call, each plan's elements gathered together."""
        # Between the items of a file there are zeros.
        chunks, sums = draft.file.chunks, draft.sums
        start, last = int(chunks.offsets[window[0]]), window[-1]
        data = bytearray(int(chunks.offsets[last]) + chunks.plans[last].frame.length - start)
        for plan, numbers in chunks.grouped(window):
            elements = self._gather_small(plan, [chunks.outputs[number] for number in numbers])
            sums[numbers] = sums_of(plan, elements)
            places, checksums = (chunks.offsets[numbers] - start).tolist(), sums["checksum"][numbers].tolist()
            for place, raw, checksum in zip(places, elements, checksums, strict=True):
                item = b"".join((plan.frame.head, raw.data, plan.frame.tail(checksum)))
                data[place : place + len(item)] = item
        draft.output.write(memoryview(data), start)
        self._progress(sum(chunks.plans[number].frame.payload_length for number in window))

    def _gather_small(self, plan: ChunkPlan, outputs: Sequence[OutputTensor]) -> Bytes:
        """Return the elements of small chunks of one plan and kind, ``[chunks, payload_length]``."""
        # Equal boxes have equal copies, so each copy is made for all chunks at once.
        output, table = outputs[0], plan.copies.table
        size = itemsize(output.stored_dtype)
        raw, stored = np.empty((len(outputs), plan.box.numel * size), np.uint8), {}
        for buffer in plan.copies.buffers:
            source, number = output.locate(buffer)
            stored[buffer] = self._checks.read_small(outputs, buffer, int(source.boxes.numel[number]) * size)
        ranges = ((size * column).tolist() for column in (table.source_offset, table.target_offset, table.numel))
        for buffer, start, target, length in zip(table.source.tolist(), *ranges, strict=True):
            raw[:, target : target + length] = stored[buffer][:, start : start + length]
        if not output.computed:
            return raw
        words = as_words(raw.reshape(-1).data, output.stored_dtype, (-1,))
        return np.ascontiguousarray(output.compute(words)).view(np.uint8).reshape(len(outputs), -1)

    def _bands(self, output: OutputTensor, plan: ChunkPlan, sums: Sums) -> Iterator[memoryview]:
        """Yield the bytes of a chunk's elements in order, in bands, and add them to its sums."""
        box, copies = plan.box, plan.copies
        self._checks.check_ahead(output, copies.buffers)
        size = max(itemsize(output.stored_dtype), itemsize(plan.dtype))
        rows = _MAX_BAND_ROWS * math.prod(box.shape[1:]) if box.ndim > 1 else box.numel
        numel = min(self._band_bytes // size, rows, copies.max_numel(self._read_bytes // size))
        fragments, (first, last) = list(copies.fragments()), copies.extents()
        for band in bands(box, max(numel, 1)):
            near = fragments[bisect_left(last, band.start) : bisect_left(first, band.stop)]
            for part in band.boxes:
                elements = output.elements(self._payloads, near, part, self._checks.read, self._thread_memory)
                yield sums.add(elements, part.lo)

    def _thread_memory(self, shape: Index, bits: str) -> Words:
        """Return memory of this thread, which the next band overwrites: fresh memory is slower."""
        length = math.prod(shape) * np.dtype(bits).itemsize
        if len(getattr(self._thread, "memory", b"")) < length:
            self._thread.memory = np.empty(length, np.uint8)
        memory: Bytes = self._thread.memory
        return memory[:length].view(bits).reshape(shape)
