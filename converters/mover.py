"""Moving the bytes of one job: the part of offline work that touches data.

Every file is written front to back by one thread, item by item in bands of bounded size; what passes is summed.  No
tensor is ever deserialised.  Where every copy of an item is one run of bytes on both sides, as for rows, the bytes go
from the source's pages to the file; otherwise a band is assembled in memory first.  Both give the same file.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..box import Box, Index, row_major
from ..errors import DestinationError, Interrupted, SourceError
from ..layout import Buffer, Place
from ..plan import Copy
from ..record import Chunk, Extent, StateRecord
from ..store.band import bands, within
from ..store.dtypes import dtype, itemsize
from ..store.payload import Payloads, as_words, check_blob, check_chunk, payload_of
from ..store.sums import Sums, xxh3_128
from .content import Entry, Wanted
from .conventions import scaled
from .job import Item, TargetFile
from .journal import Done, Sum

LARGEST_BAND = 2 << 20
"""Bytes moved at a time, at most: few enough to stay in cache from the copy to the checksums to the write."""

_MOST_ROWS = 1 << 16
"""Of a band: the fingerprint has a weight of 8 bytes for each, and remembers those of the last 16 bands."""

Progress = Callable[[int], None]
"""Told the bytes that have been checked or written since the last call; called from several threads."""

Words = NDArray[Any]


class Mover:
    """Moves bytes: the only part that touches data."""

    def __init__(
        self, payloads: Payloads, staged: Path, band_bytes: int, stop: threading.Event, progress: Progress
    ) -> None:
        self.staged = staged
        self._payloads = payloads
        self._band_bytes = min(band_bytes, LARGEST_BAND)
        self._stop = stop
        self._progress = progress

    def check(self, tensor: StateRecord, chunk: Chunk) -> None:
        """Raises `SourceError` if a source chunk is not what was recorded of it."""
        self._go_on()
        check_chunk(self._payloads, tensor, chunk)
        self._progress(payload_of(tensor, chunk).length)

    def write(self, file: TargetFile) -> Done:
        """One file, synced.  The space is taken first, so that a full disk is met before any work."""
        self._go_on()
        name = self.staged / file.name
        name.unlink(missing_ok=True)
        handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            os.posix_fallocate(handle, 0, file.length)
            done = Done(
                tuple(self._write_entry(handle, entry) for entry in file.entries),
                tuple(self._write_item(handle, item) for item in file.items),
            )
            os.fsync(handle)
        finally:
            os.close(handle)
        return done

    def is_finished(self, file: TargetFile, done: Done | None) -> bool:
        """Whether a file that the journal claims holds, in every byte, what was written."""
        if done is None or (len(done.blobs), len(done.items)) != (len(file.entries), len(file.items)):
            return False
        whole = self._holds(file, done)
        if whole:
            self._progress(file.payload)
        return whole

    def verify(self, file: TargetFile, done: Done) -> None:
        """Read a written file back, from the disk if the system lets its pages go, and compare every byte's sum.

        Raises:
            DestinationError: it does not hold what was written.
        """
        self._go_on()
        name = self.staged / file.name
        handle = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
        if not self._holds(file, done):
            raise DestinationError(f"{name} does not hold what was written into it: the disk or its driver lost data")
        self._progress(file.payload)

    def _holds(self, file: TargetFile, done: Done) -> bool:
        try:
            with Payloads(self.staged) as mine:
                whole = (self.staged / file.name).stat().st_size == file.length
                return whole and all(xxh3_128(mine.bands(extent)) == digest for extent, digest in _parts(file, done))
        except (SourceError, FileNotFoundError):  # gone, too short, or no file of ours
            return False

    def _write_entry(self, handle: int, entry: Entry) -> str:
        raw = entry.data if entry.source is None else check_blob(self._payloads, entry.source)
        _pwrite(handle, raw, entry.target.item.offset)
        return xxh3_128([raw])

    def _write_item(self, handle: int, item: Item) -> Sum:
        at = item.chunk.item.offset
        _pwrite(handle, item.frame.head, at)
        at += len(item.frame.head)
        sums = Sums()
        parts = self._straight(item) if is_straight(item) else self._assembled(item)
        for words, origin in parts:
            self._go_on()
            raw = sums.add(words, origin)
            _pwrite(handle, raw, at)
            at += len(raw)
            self._progress(len(raw))
        _pwrite(handle, item.frame.tail(sums.crc32), at)
        for buffer in {copy.source.buffer for copy in item.copies} & item.wanted.chunks.keys():
            self._payloads.release(item.wanted.chunks[buffer].item)
        return Sum(sums.digest, sums.crc32, sums.share)

    def _straight(self, item: Item) -> Iterator[tuple[Words, Index]]:
        """The elements of an item in order, as views of the source, with the global index of each view's first."""
        size = itemsize(item.tensor.dtype)
        for copy in sorted(item.copies, key=lambda copy: copy.target.offset):
            at = copy.source.offset
            for band in bands(copy.box, self._most(copy.box, size)):
                for box in band.boxes:
                    raw = self._raw(item.wanted, copy.source.buffer, at, box.numel)
                    yield as_words(raw, item.tensor.dtype, box.shape), box.lo
                    at += box.numel

    def _assembled(self, item: Item) -> Iterator[tuple[Words, Index]]:
        """The elements of an item in order, gathered from wherever they lie."""
        kind, scale = dtype(item.tensor.dtype), item.wanted.scale
        halves = (2,) if kind.itemsize > 8 else ()
        sources = {copy.source.buffer: self._whole(item.wanted, copy.source.buffer) for copy in item.copies}
        for band in bands(item.chunk.box, self._most(item.chunk.box, kind.itemsize)):
            for box in band.boxes:
                words = np.empty((*box.shape, *halves), kind.bits)
                for copy in item.copies:
                    common = copy.box & box
                    if common is not None:
                        place = _moved(copy, common)
                        words[within(common, box.lo)] = _strided(sources[place.buffer], place, common.shape)
                yield words if scale is None else scaled(words, item.tensor.dtype, scale), box.lo

    def _most(self, box: Box, size: int) -> int:
        """Elements of a band of this box, at most."""
        rows = _MOST_ROWS * math.prod(box.shape[1:]) if box.ndim > 1 else box.numel
        return max(min(self._band_bytes // size, rows), 1)

    def _whole(self, wanted: Wanted, buffer: Buffer) -> Words:
        """All elements of a buffer, flat (with a last dim of halves for 16-byte ones)."""
        size = itemsize(wanted.record.dtype)
        numel = len(wanted.made[buffer]) // size if buffer in wanted.made else wanted.chunks[buffer].box.numel
        return as_words(self._raw(wanted, buffer, 0, numel), wanted.record.dtype, (numel,))

    def _raw(self, wanted: Wanted, buffer: Buffer, start: int, numel: int) -> memoryview:
        """The bytes of ``numel`` elements from element ``start`` of a buffer, not copied."""
        size = itemsize(wanted.record.dtype)
        if buffer in wanted.made:
            return memoryview(wanted.made[buffer])[start * size : (start + numel) * size]
        payload = payload_of(wanted.record, wanted.chunks[buffer])
        return self._payloads.view(Extent(payload.file, payload.offset + start * size, numel * size))

    def _go_on(self) -> None:
        if self._stop.is_set():
            raise Interrupted("stopped")


def is_straight(item: Item) -> bool:
    """Whether elements are only moved, and each copy is one run of them, in the source as in the item."""
    plain = item.wanted.scale is None
    return plain and all(
        _is_run(copy.source, copy.box.shape) and _is_run(copy.target, copy.box.shape) for copy in item.copies
    )


def _is_run(place: Place, shape: Index) -> bool:
    return all(n == 1 or a == b for n, a, b in zip(shape, place.strides, row_major(shape), strict=True))


def _moved(copy: Copy, box: Box) -> Place:
    """The place in the source of a part of what is copied."""
    steps = zip(box.lo, copy.box.lo, copy.source.strides, strict=True)
    return Place(
        copy.source.buffer,
        copy.source.offset + sum((new - old) * stride for new, old, stride in steps),
        copy.source.strides,
    )


def _strided(flat: Words, place: Place, shape: Index) -> Words:
    """The elements of a box of this shape at a place; read-only.  ``flat`` may have a last dim of halves."""
    step = flat.strides[0]
    return np.lib.stride_tricks.as_strided(
        flat[place.offset :],
        (*shape, *flat.shape[1:]),
        (*(stride * step for stride in place.strides), *flat.strides[1:]),
        writeable=False,
    )


def _pwrite(handle: int, data: bytes | memoryview, at: int) -> None:
    left = memoryview(data)
    while left:
        written = os.pwrite(handle, left, at)
        left, at = left[written:], at + written


def _parts(file: TargetFile, done: Done) -> Iterator[tuple[Extent, str]]:
    """A written file from its first byte to its last, with the digest of each part."""
    at = 0

    def known(content: bytes) -> tuple[Extent, str]:
        return Extent(file.name, at, len(content)), xxh3_128([content])

    for entry, digest in zip(file.entries, done.blobs, strict=True):
        yield known(bytes(entry.target.item.offset - at))
        yield entry.target.item, digest
        at = entry.target.item.end
    for item, passed in zip(file.items, done.items, strict=True):
        payload = payload_of(item.tensor, item.chunk)
        yield known(bytes(item.chunk.item.offset - at) + item.frame.head)
        yield payload, passed.digest
        at = payload.end
        yield known(item.frame.tail(passed.crc32))
        at = item.chunk.item.end
    yield known(bytes(file.length - at))
