"""The bytes of a checkpoint's items: mapped, bounded, and checked against what is recorded of them."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import xxhash
from isal import isal_zlib
from numpy.typing import NDArray

from ..errors import SourceError
from ..record import Blob, Chunk, Extent, StateRecord
from .dtypes import dtype

Buffer = bytes | memoryview | NDArray[Any]


BAND = 4 << 20
"""Bytes that are checked at a time: enough to amortise calls, few enough to stay in cache from one check to the next."""


class Payloads:
    """Read-only memory maps of the files of one checkpoint directory, opened when first used."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._maps: dict[str, mmap.mmap | bytes] = {}

    def __enter__(self) -> Payloads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Arrays handed out may still refer to the maps, so they are left to the garbage collector.
        self._maps.clear()

    def view(self, extent: Extent) -> memoryview:
        """The bytes of an extent, not copied.

        Raises:
            SourceError: no such regular file in the directory, or it is too short.
        """
        if extent.file not in self._maps:
            self._maps[extent.file] = _map(self.directory / extent.file)
        whole = memoryview(self._maps[extent.file])
        if extent.end > len(whole):
            raise SourceError(
                f"{self.directory / extent.file} has {len(whole)} bytes, expected at least {extent.end}: it was cut"
            )
        return whole[extent.offset : extent.end]

    def bands(self, extent: Extent) -> Iterator[memoryview]:
        """The bytes of an extent in order, `BAND` at a time; what has been consumed is given back to the system."""
        for start in range(extent.offset, extent.end, BAND):
            band = Extent(extent.file, start, min(BAND, extent.end - start))
            yield self.view(band)
            self.release(band)

    def release(self, extent: Extent) -> None:
        """Forget the pages of an extent: they stay in the page cache, but no longer count as memory of this process."""
        mapped = self._maps.get(extent.file)
        if isinstance(mapped, mmap.mmap):
            first = extent.offset // mmap.PAGESIZE * mmap.PAGESIZE
            mapped.madvise(mmap.MADV_DONTNEED, first, extent.end - first)


def elements(payloads: Payloads, tensor: StateRecord, chunk: Chunk) -> NDArray[Any]:
    """A chunk's elements as unsigned words in the shape of its box (one more dim of 2 for 16-byte elements)."""
    kind = dtype(tensor.dtype)
    words = np.frombuffer(payloads.view(payload_of(tensor, chunk)), dtype=kind.bits)
    shape = chunk.box.shape
    return words.reshape(shape if kind.itemsize <= 8 else (*shape, 2))


def check_chunk(payloads: Payloads, tensor: StateRecord, chunk: Chunk) -> None:
    """Compare a chunk's bytes with its digest, or where none is recorded with its CRC-32.

    Raises:
        SourceError: they differ; names the tensor, the box and the file.
    """
    extent = payload_of(tensor, chunk)
    where = f"tensor {tensor.key!r} box {chunk.box} in {payloads.directory / chunk.item.file}"
    if chunk.digest is not None:
        _compare(where, "digest", xxh3_128(payloads.bands(extent)), chunk.digest)
    elif chunk.crc32 is not None:
        _compare(where, "CRC-32", f"{crc32(payloads.bands(extent)):08x}", f"{chunk.crc32:08x}")


def check_blob(payloads: Payloads, blob: Blob) -> bytes:
    """The bytes of an item that is not a tensor, compared with its digest if there is one.

    Raises:
        SourceError: they differ.
    """
    raw = bytes(payloads.view(blob.item))
    if blob.digest is not None:
        where = f"item {blob.key!r} in {payloads.directory / blob.item.file}"
        _compare(where, "digest", xxh3_128([raw]), blob.digest)
    return raw


def xxh3_128(parts: Iterable[Buffer]) -> str:
    """Digest of the concatenated parts, in hex."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def crc32(parts: Iterable[Buffer], start: int = 0) -> int:
    """CRC-32 (the one of zip) of the concatenated parts, continued from ``start``."""
    for part in parts:
        start = isal_zlib.crc32(part, start)
    return start


def _compare(where: str, what: str, found: str, expected: str) -> None:
    if found != expected:
        raise SourceError(f"{where} is damaged: {what} {found}, expected {expected}")


def payload_of(tensor: StateRecord, chunk: Chunk) -> Extent:
    """Where a chunk's raw elements are.

    Raises:
        SourceError: their length is not that of the box.
    """
    expected = chunk.box.numel * dtype(tensor.dtype).itemsize
    if chunk.payload is None or chunk.payload.length != expected:
        found = None if chunk.payload is None else chunk.payload.length
        raise SourceError(f"tensor {tensor.key!r} box {chunk.box}: payload of {found} bytes, expected {expected}")
    return chunk.payload


def _map(file: Path) -> mmap.mmap | bytes:
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise SourceError(f"cannot open {file}: {error.strerror}") from error
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise SourceError(f"{file} is not a regular file")
        return mmap.mmap(handle, 0, access=mmap.ACCESS_READ) if found.st_size else b""
    finally:
        os.close(handle)
