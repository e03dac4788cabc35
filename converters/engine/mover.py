"""Moving the bytes of one job: the part of offline work that touches data.

One thread writes a file from its first byte to its last, in bands of bounded size, and computes checksums on the way.
A chunk of the source is checked by the CRC-32s of what is read of it, or if it has none, before anything is copied.
No tensor is ever deserialised.  If every copy of a chunk is one run of bytes on both sides, as for rows, the bytes go
directly from the source to the file; otherwise bands are assembled in memory.  Both give the same file.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import lru_cache
from itertools import compress
from pathlib import PurePosixPath

import numpy as np
import xxhash

from ...box import Box, Index
from ...columns import Row
from ...errors import DestinationError, Interrupted, SourceError
from ...layout import Buffer, Fragment
from ...plan import Copy
from ...record import Extent
from ...store.io.checksums import Sums, crc32_joined, crc32_of, xxh3_128
from ...store.io.new_file import Writing, drafted
from ...store.io.regular import READ_BYTES, open_regular
from ...store.reading.bands import bands
from ...store.reading.dtypes import itemsize
from ...store.reading.payloads import Payloads, as_words, check_chunk, payload_of
from ...store.reading.strided import span
from ...store.stored_items import check_blob
from ..translate.conventions import Words
from .copied_runs import CopiedRuns
from .elements import bytes_of
from .journal import SUMS, ChunkSums, FinishedFile
from .output_chunks import ChunkPlan, OutputChunk, OutputChunks, is_direct
from .output_files import OutputFile, PlacedItem
from .outputs import OutputTensor, source_rows
from .small_chunks import Bytes, copied, is_small, rows, sums_of, windows
from .staging import Staging
from .unchecked_chunks import UncheckedChunks

LARGEST_BAND = 2 << 20
"""The most bytes of a band: it should stay in cache from the copy through the checksums to the write."""

_MAX_BAND_ROWS = 1 << 16
"""The most rows of a band: the fingerprint keeps 8 bytes for each row of the last 16 bands."""

Advance = Callable[[int], None]
"""Receives the number of bytes checked or written since the last call; called from several threads."""


class Mover:
    """Checks, copies and reads back the bytes of a job.

    Args:
        unchecked: the chunks of the source to check; those that have been are taken out of it.
    """

    def __init__(
        self,
        payloads: Payloads,
        staging: Staging,
        unchecked: UncheckedChunks,
        band_bytes: int,
        stop: threading.Event,
        progress: Advance,
    ) -> None:
        self._staged, self._drafts = staging.place, staging.drafts
        self.unchecked = unchecked
        self._payloads = payloads
        self._gathered = threading.local()
        self._copied = CopiedRuns(payloads, unchecked, progress)
        self._band_bytes = min(band_bytes, LARGEST_BAND)
        self._read_bytes = min(band_bytes // 4, READ_BYTES)  # a thread keeps three of them
        self._stop = stop
        self._progress = progress

    def check(self, source: Extent) -> None:
        """Check a chunk of the source against its checksum; returns at once if another thread has begun to.

        Raises:
            SourceError: the chunk is damaged.
        """
        if self.unchecked.take(source.file, [source.offset]) == [True]:
            self._raise_if_stopped()
            tensor, chunk = self.unchecked.at(source)
            check_chunk(self._payloads, tensor, chunk)
            self._progress(payload_of(tensor, chunk).length)

    def check_all(self, sources: Iterable[Extent]) -> None:
        """Check these chunks of the source, as `check` does."""
        for source in sources:
            self.check(source)

    def write(self, files: Sequence[OutputFile]) -> Iterator[tuple[OutputFile, FinishedFile]]:
        """Write files, and sync each when it is finished: band by band in turn, so that one read serves them all.

        A chunk of the source is checked while it is copied, or right before.  If all chunks were checked first, the
        disk would be idle meanwhile, and the source would be read from it twice.
        """
        writings = [(file, self._write(file)) for file in files]
        with ExitStack() as stack:
            for _, writing in writings:
                stack.callback(writing.close)
            while writings:
                unfinished = []
                for file, writing in writings:
                    try:
                        next(writing)
                        unfinished.append((file, writing))
                    except StopIteration as end:
                        yield file, end.value
                writings = unfinished

    def _write(self, file: OutputFile) -> Generator[None, None, FinishedFile]:
        """Write a file and sync it; pauses after every band."""
        self._raise_if_stopped()
        for folder in reversed(PurePosixPath(file.name).parents[:-1]):  # the staging directory itself exists
            (self._staged / str(folder)).mkdir(exist_ok=True)
        with drafted(self._staged / file.name, file.length, self._drafts) as output:
            first_sums: ChunkSums | None = None
            if (
                file.header and not output.rewinds
            ):  # the header with the sums is written first, so they need a pass of their own
                first_sums = np.empty(len(file.chunks), SUMS)
                for number, chunk in enumerate(file.chunks):
                    first_sums[number] = yield from self._pass(chunk)
                output.write(file.header(first_sums), 0)
            items = tuple(self._write_item(output, item) for item in file.items)
            sums = yield from self._written(output, file.chunks)
            if first_sums is not None and not np.array_equal(first_sums, sums):
                raise SourceError(f"the source of {file.name} changed between two reads; nothing was published")
            if file.header and output.rewinds:
                output.write(file.header(sums), 0)
        return FinishedFile(items, sums.tobytes())

    def is_finished(self, file: OutputFile, finished: FinishedFile | None) -> bool:
        """Whether a file that the journal names still holds, in every byte, what was written."""
        if finished is None or (len(finished.items), len(finished.chunks)) != (len(file.items), len(file.chunks)):
            return False
        whole = self._holds(file, finished)
        if whole:
            self._progress(file.payload)
        return whole

    def verify(self, file: OutputFile, finished: FinishedFile) -> None:
        """Read a written file back, from the disk if the system drops its cached pages, and compare all checksums.

        Raises:
            DestinationError: it does not hold what was written.
        """
        self._raise_if_stopped()
        place = self._staged / file.name
        with open_regular(place) as written:
            written.forget()
        if not self._holds(file, finished):
            raise DestinationError(f"{place} does not hold what was written to it: the disk or its driver lost data")
        self._progress(file.payload)

    def _holds(self, file: OutputFile, finished: FinishedFile) -> bool:
        try:
            with open_regular(self._staged / file.name) as written, Payloads(self._staged) as written_payloads:
                return written.size == file.length and all(
                    xxh3_128(written_payloads.bands(extent)) == digest
                    for extent, digest in expected_parts(file, finished)
                )
        except SourceError:  # it is gone, too short, or not a regular file
            return False

    def _write_item(self, output: Writing, item: PlacedItem) -> str:
        source = item.output.source
        if source is None:
            output.write(item.output.data, item.blob.item.offset)
            return xxh3_128([item.output.data])
        check_blob(self._payloads, source)
        position = item.blob.item.offset

        def written() -> Iterator[memoryview]:
            nonlocal position
            for raw in self._payloads.bands(source.item):
                position = output.write(raw, position)
                yield raw

        return xxh3_128(written())

    def _written(self, output: Writing, chunks: OutputChunks) -> Generator[None, None, ChunkSums]:
        """Write chunks in order; pauses after every band, or small chunks."""
        sums = np.empty(len(chunks), SUMS)
        known: dict[ChunkPlan, bool] = {}

        def fits(tensor: OutputTensor, plan: ChunkPlan) -> bool:
            if tensor.computed or tensor.in_memory:
                return False
            if plan not in known:
                known[plan] = plan.in_runs and is_small(plan, tensor.chunks)
            return known[plan]

        for window in windows(chunks, self._band_bytes // 4, fits):
            if len(window) > 1:
                self._write_window(output, chunks, window, sums)
                yield
            else:
                sums[window[0]] = yield from self._write_chunk(output, chunks[window[0]])
        return sums

    def _write_window(self, output: Writing, chunks: OutputChunks, window: Sequence[int], sums: ChunkSums) -> None:
        """Write small chunks together."""
        self._raise_if_stopped()
        start = chunks[window[0]].offset
        whole = bytearray(chunks[window[-1]].item.end - start)
        for plan, numbers in chunks.alike(window).items():
            elements = self._elements(plan, [chunks.outputs[number] for number in numbers])
            sums[numbers] = sums_of(plan, elements)
            places, checksums = (chunks.offsets[numbers] - start).tolist(), sums["checksum"][numbers].tolist()
            for place, raw, checksum in zip(places, elements, checksums, strict=True):
                item = b"".join((plan.frame.head, raw.data, plan.frame.tail(checksum)))
                whole[place : place + len(item)] = item
        output.write(memoryview(whole), start)
        self._progress(sum(chunks.plans[number].frame.payload_length for number in window))

    def _elements(self, plan: ChunkPlan, outputs: Sequence[OutputTensor]) -> Bytes:
        """The elements of small chunks of one plan, from sources that are checked."""
        sources = {}
        for buffer in plan.buffers:
            stored = source_rows(outputs, buffer)
            length = outputs[0].chunks[buffer].box.numel * itemsize(plan.dtype)
            for output, row in zip(outputs, stored, strict=True):
                if row[4] != length:
                    payload_of(output.record, output.chunks[buffer])  # says what is wrong
            sources[buffer] = rows(self._payloads, stored, length)
            self._check_rows(outputs, buffer, stored, sources[buffer])
        return copied(plan, sources)

    def _check_rows(self, outputs: Sequence[OutputTensor], buffer: Buffer, stored: Sequence[Row], read: Bytes) -> None:
        """Check chunks of the source, one buffer of each of these outputs, of which the bytes have been read."""
        items: defaultdict[str, list[int]] = defaultdict(list)
        for number, (file, *_) in enumerate(stored):
            items[file].append(number)
        checked = 0
        for file, numbers in items.items():
            taken = self.unchecked.take(file, [stored[number][1] for number in numbers])
            for number in compress(numbers, taken):
                digest = stored[number][5]
                if digest is None or xxhash.xxh3_128_hexdigest(read[number]) != digest:
                    output = outputs[number]
                    check_chunk(self._payloads, output.source_record, output.chunks[buffer])
                checked += read.shape[1]
        if checked:
            self._progress(checked)

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
        sums = Sums(chunk.plan.frame.checksum_of)
        for source in chunk.sources:  # of what is shared, no process reads all to copy it
            if source.crc32 is None or self.unchecked.is_shared(source.item):
                self.check(source.item)
        parts = self._direct(chunk, sums) if is_direct(chunk.output, chunk.plan) else self._assembled(chunk)
        for words, origin in parts:
            self._raise_if_stopped()
            put(sums.add(words, origin))
            yield
        return bytes.fromhex(sums.digest), sums.checksum, sums.share

    def _direct(self, chunk: OutputChunk, sums: Sums) -> Iterator[tuple[Words, Index]]:
        """The elements of a chunk in order, as views of the source, with the global index of each view's first.

        Whoever takes them adds them to ``sums``, which tell whether they are what the source should have.
        """
        plan, name = chunk.plan, chunk.plan.dtype
        size, adds_up = itemsize(name), plan.frame.checksum_of is crc32_of
        for copy in sorted(plan.copies, key=lambda copy: copy.target.offset):
            start, before, source = copy.source.offset, sums.checksum, chunk.output.chunks.get(copy.source.buffer)
            for band in bands(copy.box, self._band_numel(copy.box, size)):
                for box in band.boxes:
                    raw = bytes_of(self._payloads, chunk.output, copy.source.buffer, start, box.numel)
                    if source is not None and not adds_up:
                        self._copied.read(source, start * size, raw)
                    yield as_words(raw, name, box.shape), box.lo
                    start += box.numel
            if adds_up and source is not None and source.crc32 is not None:
                crc32 = crc32_joined(before, sums.checksum, copy.box.numel * size)
                self._copied.add(source, copy.source.offset * size, start * size, crc32)

    def _assembled(self, chunk: OutputChunk) -> Iterator[tuple[Words, Index]]:
        """The elements of a chunk in order, gathered from wherever they lie."""
        plan = chunk.plan
        fragments = [Fragment(copy.box, copy.source) for copy in plan.copies]
        size = itemsize(plan.dtype)
        one_read = min((self._numel_of_a_read(copy, size) for copy in plan.copies), default=1)
        numel = max(min(self._band_numel(plan.box, size), one_read), 1)
        for band in bands(plan.box, numel):
            for box in band.boxes:
                yield chunk.output.elements(self._payloads, fragments, box, self._copied.read, self._room), box.lo

    def _room(self, shape: Index, bits: str) -> Words:
        """Memory of this thread, which the next band overwrites: fresh memory has to be cleared by the system."""
        length = math.prod(shape) * np.dtype(bits).itemsize
        if len(getattr(self._gathered, "bytes", b"")) < length:
            self._gathered.bytes = np.empty(length, np.uint8)
        memory: Bytes = self._gathered.bytes
        return memory[:length].view(bits).reshape(shape)

    def _numel_of_a_read(self, copy: Copy, size: int) -> int:
        """How many elements of a copy one read of its source can gather."""
        return self._read_bytes * copy.box.numel // (size * span(copy.box.shape, copy.source.strides))

    def _band_numel(self, box: Box, size: int) -> int:
        """The most elements of a band of this box."""
        rows = _MAX_BAND_ROWS * math.prod(box.shape[1:]) if box.ndim > 1 else box.numel
        return max(min(self._band_bytes // size, rows), 1)

    def _raise_if_stopped(self) -> None:
        if self._stop.is_set():
            raise Interrupted("stopped")


def expected_parts(file: OutputFile, finished: FinishedFile) -> Iterator[tuple[Extent, str]]:
    """A written file from its first byte to its last, with the digest of each part."""
    end = 0

    def known(content: bytes) -> tuple[Extent, str]:
        return Extent(file.name, end, len(content)), xxh3_128([content])

    if file.header:
        header = file.header(finished.chunks)
        yield known(header)
        end = len(header)
    for item, digest in zip(file.items, finished.items, strict=True):
        yield from _zeros(file.name, end, item.blob.item.offset)
        yield item.blob.item, digest
        end = item.blob.item.end
    for chunk, (digest, checksum, _) in zip(file.chunks, finished.chunks.tolist(), strict=True):
        frame, payload = chunk.plan.frame, chunk.payload
        yield from _zeros(file.name, end, chunk.offset)
        end = chunk.offset
        yield known(frame.head)
        yield payload, digest.hex()
        end = payload.end
        yield known(frame.tail(checksum))
        end = chunk.item.end
    yield from _zeros(file.name, end, file.length)


def _zeros(name: str, start: int, stop: int) -> Iterator[tuple[Extent, str]]:
    """The padding between items, `LARGEST_BAND` bytes at a time, since all of it may not fit into memory."""
    for offset in range(start, stop, LARGEST_BAND):
        length = min(LARGEST_BAND, stop - offset)
        yield Extent(name, offset, length), _digest_of_zeros(length)


@lru_cache
def _digest_of_zeros(length: int) -> str:
    return xxh3_128([bytes(length)])
