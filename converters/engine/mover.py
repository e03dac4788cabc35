"""Moving the bytes of one job: the part of offline work that touches data.

Every file is written front to back by one thread, item by item in bands of bounded size; what passes is summed.  No
tensor is ever deserialised.  Where every copy of an item is one run of bytes on both sides, as for rows, the bytes go
from the source's pages to the file; otherwise a band is assembled in memory first.  Both give the same file.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import PurePosixPath

from ...box import Box, Index, row_major
from ...errors import DestinationError, Interrupted, SourceError
from ...layout import Fragment, Place
from ...record import Chunk, Extent, StateRecord
from ...store.io.checksums import Sums, xxh3_128
from ...store.io.new_file import Writing, drafted
from ...store.io.regular import open_regular
from ...store.reading.bands import bands
from ...store.reading.dtypes import itemsize
from ...store.reading.payloads import Payloads, as_words, check_chunk, payload_of
from ...store.stored_items import check_blob
from ..translate.conventions import Words
from .elements import bytes_of, gather_elements
from .journal import ChunkSums, FinishedFile
from .output_files import OutputChunk, OutputFile, PlacedItem
from .staging import Staging

LARGEST_BAND = 2 << 20
"""Bytes moved at a time, at most: few enough to stay in cache from the copy to the checksums to the write."""

_MOST_ROWS = 1 << 16
"""Of a band: the fingerprint has a weight of 8 bytes for each, and remembers those of the last 16 bands."""

Advance = Callable[[int], None]
"""Told the bytes that have been checked or written since the last call; called from several threads."""


class Mover:
    """Moves bytes: the only part that touches data.

    Args:
        chunks: of the source, with their tensors, that are to be checked: `unchecked`, by item, until they are.
    """

    def __init__(
        self,
        payloads: Payloads,
        staging: Staging,
        chunks: Iterable[tuple[StateRecord, Chunk]],
        band_bytes: int,
        stop: threading.Event,
        progress: Advance,
    ) -> None:
        self._staged, self._drafts = staging.place, staging.drafts
        self.unchecked = {chunk.item: (tensor, chunk) for tensor, chunk in chunks}
        self._payloads = payloads
        self._band_bytes = min(band_bytes, LARGEST_BAND)
        self._stop = stop
        self._progress = progress

    def check(self, source: Extent) -> None:
        """Raises `SourceError` if a source chunk is not what was recorded of it.

        One that another thread has taken up is not waited for.
        """
        found = self.unchecked.pop(source, None)
        if found is not None:
            self._go_on()
            check_chunk(self._payloads, *found)
            self._progress(payload_of(*found).length)

    def write(self, file: OutputFile) -> FinishedFile:
        """One file, synced.  A chunk is checked right before an item is copied from it: if all were checked first the
        disk would have nothing to do, and the source would be read from it twice."""
        self._go_on()
        for folder in reversed(PurePosixPath(file.name).parents[:-1]):  # not the one that holds all: it must be there
            (self._staged / str(folder)).mkdir(exist_ok=True)
        with drafted(self._staged / file.name, file.length, self._drafts) as output:
            told: tuple[ChunkSums, ...] | None = None
            if file.header and not output.rewinds:  # what tells the sums comes first: they need a pass of their own
                told = tuple(self._pass(chunk) for chunk in file.chunks)
                output.write(file.header(told), 0)
            done = FinishedFile(
                tuple(self._write_item(output, item) for item in file.items),
                tuple(self._write_chunk(output, chunk) for chunk in file.chunks),
            )
            if told not in (None, done.items):
                raise SourceError(f"the source of {file.name} was not the same when it was read again")
            if file.header and output.rewinds:
                output.write(file.header(done.items), 0)
            return done

    def is_finished(self, file: OutputFile, done: FinishedFile | None) -> bool:
        """Whether a file that the journal claims holds, in every byte, what was written."""
        if done is None or (len(done.blobs), len(done.items)) != (len(file.items), len(file.chunks)):
            return False
        whole = self._holds(file, done)
        if whole:
            self._progress(file.payload)
        return whole

    def verify(self, file: OutputFile, done: FinishedFile) -> None:
        """Read a written file back, from the disk if the system lets its pages go, and compare every byte's sum.

        Raises:
            DestinationError: it does not hold what was written.
        """
        self._go_on()
        name = self._staged / file.name
        with open_regular(name) as written:
            written.forget()
        if not self._holds(file, done):
            raise DestinationError(f"{name} does not hold what was written into it: the disk or its driver lost data")
        self._progress(file.payload)

    def _holds(self, file: OutputFile, done: FinishedFile) -> bool:
        try:
            with open_regular(self._staged / file.name) as written, Payloads(self._staged) as mine:
                return written.size == file.length and all(
                    xxh3_128(mine.bands(extent)) == digest for extent, digest in _parts(file, done)
                )
        except SourceError:  # gone, too short, or no file of ours
            return False

    def _write_item(self, output: Writing, item: PlacedItem) -> str:
        source = item.output.source
        raw = item.output.data if source is None else check_blob(self._payloads, source)
        output.write(raw, item.blob.item.offset)
        return xxh3_128([raw])

    def _write_chunk(self, output: Writing, chunk: OutputChunk) -> ChunkSums:
        at = chunk.stored.item.offset
        output.write(chunk.frame.head, at)
        at += len(chunk.frame.head)

        def put(raw: memoryview) -> None:
            nonlocal at
            at = output.write(raw, at)
            self._progress(len(raw))

        passed = self._pass(chunk, put)
        output.write(chunk.frame.tail(passed.checksum), at)
        return passed

    def _pass(self, chunk: OutputChunk, put: Callable[[memoryview], None] = lambda raw: None) -> ChunkSums:
        """Sum the elements of a chunk, and hand on their bytes in order."""
        for source in sorted(chunk.sources, key=lambda source: (source.file, source.offset)):
            self.check(source)
        sums = Sums(chunk.frame.checksum_of)
        parts = self._straight(chunk) if is_direct(chunk) else self._assembled(chunk)
        for words, origin in parts:
            self._go_on()
            put(sums.add(words, origin))
        for source in chunk.sources:
            self._payloads.release(source)
        return ChunkSums(sums.digest, sums.checksum, sums.share)

    def _straight(self, chunk: OutputChunk) -> Iterator[tuple[Words, Index]]:
        """The elements of a chunk in order, as views of the source, with the global index of each view's first."""
        size = itemsize(chunk.tensor.dtype)
        for copy in sorted(chunk.copies, key=lambda copy: copy.target.offset):
            at = copy.source.offset
            for band in bands(copy.box, self._most(copy.box, size)):
                for box in band.boxes:
                    found = bytes_of(self._payloads, chunk.output, copy.source.buffer, at, box.numel)
                    yield as_words(found, chunk.tensor.dtype, box.shape), box.lo
                    at += box.numel

    def _assembled(self, chunk: OutputChunk) -> Iterator[tuple[Words, Index]]:
        """The elements of a chunk in order, gathered from wherever they lie."""
        fragments = [Fragment(copy.box, copy.source) for copy in chunk.copies]
        for band in bands(chunk.stored.box, self._most(chunk.stored.box, itemsize(chunk.tensor.dtype))):
            for box in band.boxes:
                yield gather_elements(self._payloads, chunk.output, fragments, box), box.lo

    def _most(self, box: Box, size: int) -> int:
        """Elements of a band of this box, at most."""
        rows = _MOST_ROWS * math.prod(box.shape[1:]) if box.ndim > 1 else box.numel
        return max(min(self._band_bytes // size, rows), 1)

    def _go_on(self) -> None:
        if self._stop.is_set():
            raise Interrupted("stopped")


def is_direct(chunk: OutputChunk) -> bool:
    """Whether elements are only moved, and each copy is one run of them, in the source as in what is written."""
    plain = chunk.output.scale is None
    return plain and all(
        _is_run(copy.source, copy.box.shape) and _is_run(copy.target, copy.box.shape) for copy in chunk.copies
    )


def _is_run(place: Place, shape: Index) -> bool:
    return all(n == 1 or a == b for n, a, b in zip(shape, place.strides, row_major(shape), strict=True))


def _parts(file: OutputFile, done: FinishedFile) -> Iterator[tuple[Extent, str]]:
    """A written file from its first byte to its last, with the digest of each part."""
    at = 0

    def known(content: bytes) -> tuple[Extent, str]:
        return Extent(file.name, at, len(content)), xxh3_128([content])

    if file.header:
        header = file.header(done.items)
        yield known(header)
        at = len(header)
    for item, digest in zip(file.items, done.blobs, strict=True):
        yield from _zeros(file.name, at, item.blob.item.offset)
        yield item.blob.item, digest
        at = item.blob.item.end
    for chunk, passed in zip(file.chunks, done.items, strict=True):
        payload = payload_of(chunk.tensor, chunk.stored)
        yield from _zeros(file.name, at, chunk.stored.item.offset)
        at = chunk.stored.item.offset
        yield known(chunk.frame.head)
        yield payload, passed.digest
        at = payload.end
        yield known(chunk.frame.tail(passed.checksum))
        at = chunk.stored.item.end
    yield from _zeros(file.name, at, file.length)


def _zeros(name: str, start: int, stop: int) -> Iterator[tuple[Extent, str]]:
    """What no item covers, `LARGEST_BAND` at a time: a padded buffer may have more of it than fits into memory."""
    for at in range(start, stop, LARGEST_BAND):
        length = min(LARGEST_BAND, stop - at)
        yield Extent(name, at, length), _digest_of_zeros(length)


@lru_cache
def _digest_of_zeros(length: int) -> str:
    return xxh3_128([bytes(length)])
