"""The bytes of a checkpoint's items: mapped, bounded, and checked against what is recorded of them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..box import Index
from ..errors import SourceError
from ..record import Blob, Chunk, Extent, StateRecord
from . import stored_zip
from .dtypes import dtype
from .regular import open_regular
from .sums import crc32, xxh3_128

BAND = 4 << 20
"""Bytes that are checked at a time: enough to amortise calls, few enough to stay in cache between two checks."""


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
            self._maps[extent.file] = _map(self.directory, extent.file)
        mapped = self._maps[extent.file]
        # The size that it has now: to touch a page of a map whose file has been cut meanwhile ends the process.
        size = mapped.size() if isinstance(mapped, mmap.mmap) else 0
        if extent.end > min(size, len(mapped)):
            raise SourceError(
                f"{self.directory / extent.file} has {size} bytes, expected at least {extent.end}: it was cut"
            )
        return memoryview(mapped)[extent.offset : extent.end]

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
    return as_words(payloads.view(payload_of(tensor, chunk)), tensor.dtype, chunk.box.shape)


def as_words(raw: memoryview, name: str, shape: Index) -> NDArray[Any]:
    """Raw elements of this dtype as unsigned words in this shape (one more dim of 2 for 16-byte elements)."""
    kind = dtype(name)
    return np.frombuffer(raw, kind.bits).reshape(shape if kind.itemsize <= 8 else (*shape, 2))


def check_chunk(payloads: Payloads, tensor: StateRecord, chunk: Chunk) -> None:
    """Compare a chunk's bytes with its digest, or where none is recorded with its CRC-32.

    Raises:
        SourceError: they differ, or cannot be read; names the tensor, the box and the file.
    """
    extent = payload_of(tensor, chunk)
    with _at(f"tensor {tensor.key!r} box {chunk.box} in {payloads.directory / chunk.item.file}"):
        if chunk.digest is not None:
            _compare("digest", xxh3_128(payloads.bands(extent)), chunk.digest)
        elif chunk.crc32 is not None:
            _compare("CRC-32", f"{crc32(payloads.bands(extent)):08x}", f"{chunk.crc32:08x}")


def check_blob(payloads: Payloads, blob: Blob) -> bytes:
    """The bytes of an item that is not a tensor, compared with its digest, or with the CRC-32s of the zip that it is.

    Raises:
        SourceError: they differ, or cannot be read; names the item and the file.
    """
    with _at(f"item {blob.key!r} in {payloads.directory / blob.item.file}"):
        raw = bytes(payloads.view(blob.item))
        if blob.digest is not None:
            _compare("digest", xxh3_128([raw]), blob.digest)
            return raw
        for member in stored_zip.read_members(lambda at, count: raw[at : at + count], 0, len(raw)):
            if member.crc32 is not None:
                found = crc32([raw[member.offset : member.offset + member.length]])
                _compare(f"CRC-32 of {member.name}", f"{found:08x}", f"{member.crc32:08x}")
        return raw


@contextmanager
def _at(place: str) -> Iterator[None]:
    """Say in front of any error raised inside what is damaged."""
    try:
        yield
    except SourceError as error:
        raise SourceError(f"{place} is damaged: {error}") from error


def _compare(what: str, found: str, expected: str) -> None:
    if found != expected:
        raise SourceError(f"{what} {found}, expected {expected}")


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


def _map(directory: Path, name: str) -> mmap.mmap | bytes:
    file = directory / name
    if file.parent.resolve() != directory.resolve() / Path(name).parent:
        raise SourceError(f"cannot open {file}: there is a symbolic link on the way")
    with open_regular(file) as handle:
        return mmap.mmap(handle, 0, access=mmap.ACCESS_READ) if os.fstat(handle).st_size else b""
