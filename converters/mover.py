"""Moving the bytes of one job: the part of offline work that touches data.

Every file is written front to back by one thread, item by item in bands of bounded size; what passes is summed.  No
tensor is ever deserialised.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..box import Box
from ..errors import Interrupted, SourceError
from ..plan import Copy
from ..record import Blob, Chunk, Extent, StateRecord
from ..store import torch_zip
from ..store.band import bands, within
from ..store.dtypes import dtype
from ..store.payload import Payloads, check_blob, check_chunk, elements, payload_of
from ..store.sums import Sums, xxh3_128
from .journal import Done, Sum

LARGEST_BAND = 1 << 20
"""Bytes moved at a time, at most: few enough to stay in cache from the copy to the checksums to the write."""

frame_of = lru_cache(maxsize=1024)(torch_zip.frame)
"""The frame of an item by dtype and shape, of which a checkpoint has few."""

Progress = Callable[[int], None]
"""Told the bytes that have been checked or written since the last call; called from several threads."""


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor item to write: where it goes (``chunk``) and the copies from source chunks that make it."""

    tensor: StateRecord
    chunk: Chunk
    copies: tuple[Copy, ...]


@dataclass(frozen=True, slots=True)
class TargetFile:
    """One file to write.  ``blobs`` pairs what is in the source with where it goes.  ``length`` in bytes."""

    name: str
    blobs: tuple[tuple[Blob, Blob], ...]
    items: tuple[Item, ...]
    length: int

    @property
    def payload(self) -> int:
        """Bytes of elements in it."""
        return sum(payload_of(item.tensor, item.chunk).length for item in self.items)


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
                tuple(self._write_blob(handle, *pair) for pair in file.blobs),
                tuple(self._write_item(handle, item) for item in file.items),
            )
            os.fsync(handle)
        finally:
            os.close(handle)
        return done

    def is_finished(self, file: TargetFile, done: Done | None) -> bool:
        """Whether a file that the journal claims holds, in every byte, what was written."""
        if done is None or (len(done.blobs), len(done.items)) != (len(file.blobs), len(file.items)):
            return False
        try:
            with Payloads(self.staged) as mine:
                whole = (self.staged / file.name).stat().st_size == file.length
                whole = whole and all(xxh3_128(mine.bands(extent)) == digest for extent, digest in _parts(file, done))
        except (SourceError, FileNotFoundError):  # gone, too short, or no file of ours
            return False
        if whole:
            self._progress(file.payload)
        return whole

    def _write_blob(self, handle: int, source: Blob, target: Blob) -> str:
        raw = check_blob(self._payloads, source)
        _pwrite(handle, raw, target.item.offset)
        return xxh3_128([raw])

    def _write_item(self, handle: int, item: Item) -> Sum:
        frame = frame_of(item.tensor.dtype, item.chunk.box.shape)
        at = item.chunk.item.offset
        _pwrite(handle, frame.head, at)
        at += len(frame.head)
        sums = Sums()
        for band in bands(item.chunk.box, max(self._band_bytes // dtype(item.tensor.dtype).itemsize, 1)):
            for box in band.boxes:
                self._go_on()
                raw = sums.add(self._assemble(item, box), box.lo)
                _pwrite(handle, raw, at)
                at += len(raw)
                self._progress(len(raw))
        _pwrite(handle, frame.tail(sums.crc32), at)
        for copy in item.copies:
            self._payloads.release(_source(item, copy).item)
        return Sum(sums.digest, sums.crc32, sums.share)

    def _assemble(self, item: Item, box: Box) -> NDArray[Any]:
        """The elements of ``box``, dense, from the source chunks that hold them."""
        kind = dtype(item.tensor.dtype)
        halves = (2,) if kind.itemsize > 8 else ()
        words = np.empty((*box.shape, *halves), kind.bits)
        for copy in item.copies:
            common = copy.box & box
            if common is not None:
                chunk = _source(item, copy)
                source = elements(self._payloads, item.tensor, chunk)
                words[within(common, box.lo)] = source[within(common, chunk.box.lo)]
        return words

    def _go_on(self) -> None:
        if self._stop.is_set():
            raise Interrupted("stopped")


def _source(item: Item, copy: Copy) -> Chunk:
    return item.tensor.chunks[int(copy.source.buffer)]


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

    for (_, blob), digest in zip(file.blobs, done.blobs, strict=True):
        yield known(bytes(blob.item.offset - at))
        yield blob.item, digest
        at = blob.item.end
    for item, passed in zip(file.items, done.items, strict=True):
        frame = frame_of(item.tensor.dtype, item.chunk.box.shape)
        payload = payload_of(item.tensor, item.chunk)
        yield known(bytes(item.chunk.item.offset - at) + frame.head)
        yield payload, passed.digest
        at = payload.end
        yield known(frame.tail(passed.crc32))
        at = item.chunk.item.end
    yield known(bytes(file.length - at))
