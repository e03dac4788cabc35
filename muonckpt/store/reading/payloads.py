"""The bytes of a checkpoint's items: mapped, bounded, and checked against their recorded checksums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...box import Index
from ...errors import DamageError, SourceError, about
from ...layout import Place
from ...record import Chunk, Extent, StateRecord
from ..io.checksums import crc32, xxh3_128
from ..io.location import Location
from ..io.regular import FileBytes, Held, open_regular
from .dtypes import dtype, itemsize
from .strided import batches, blocks, span, strided

BAND_BYTES = 4 << 20
"""Bytes that are checked at a time: enough to amortise calls, few enough to stay in cache between two checks."""


class Payloads:
    """The bytes of the files of one checkpoint directory, opened when first used: mapped, or read by ranges.

    Args:
        in_memory: bytes by file name that stand in for files of the directory.
    """

    def __init__(self, directory: Location, in_memory: Mapping[str, bytes] = MappingProxyType({})) -> None:
        self.directory = directory
        self._in_memory = {name: Held(data) for name, data in in_memory.items()}
        self._files: dict[str, FileBytes] = {}

    def __enter__(self) -> Payloads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files.  Reading afterwards opens them again."""
        # Arrays handed out may still refer to the maps, so they are left to the garbage collector.
        self._files.clear()

    def view(self, extent: Extent) -> memoryview:
        """The bytes of an extent: a view of a local file, or read from an object.

        Raises:
            SourceError: the directory has no such regular file, or the file is too short.
        """
        return self._reaching(extent.file, extent.end).view(extent.offset, extent.length)

    def gather(self, payload: Extent, name: str, place: Place, shape: Index) -> NDArray[Any]:
        """The elements of a box of this shape at a place in a payload, read-only, as `as_words` gives them.

        The elements of a local file are not copied.  Of an object only the blocks that the box needs are read, with
        the gaps that are too small to skip.
        """
        size = itemsize(name)
        start, reach = payload.offset + place.offset * size, size * span(shape, place.strides)
        file = self._reaching(payload.file, start + reach)

        def words(raw: memoryview, part: Index) -> NDArray[Any]:
            return strided(as_words(raw, name, (len(raw) // size,)), place.strides, part)

        parts = list(blocks(shape, place.strides, file.gap // size, file.most // size))
        if len(parts) <= 1:
            return words(file.view(start, reach), shape)
        gathered = np.empty((*shape, *(2,) * (size > 8)), dtype(name).bits)
        for batch in batches(parts, place.strides, file.most // size):
            ranges = [(start + block.start(place.strides) * size, block.span(place.strides) * size) for block in batch]
            for block, raw in zip(batch, file.views(ranges), strict=True):
                gathered[block.slices] = words(raw, block.shape)
        return gathered

    def bands(self, extent: Extent) -> Iterator[memoryview]:
        """The bytes of an extent in order, `BAND_BYTES` at a time; what the caller has consumed is released."""
        for start in range(extent.offset, extent.end, BAND_BYTES):
            band = Extent(extent.file, start, min(BAND_BYTES, extent.end - start))
            yield self.view(band)
            self.release(band)

    def is_checked(self, chunk: Chunk) -> bool:
        """Whether `check_chunk` has anything to compare a chunk's bytes with."""
        return chunk.digest is not None or chunk.crc32 is not None

    def check_inside(self, item: Extent) -> None:
        """Compare an item with a checksum that its format keeps inside, if there is one.

        Raises:
            DamageError: they differ.
        """

    def release(self, extent: Extent) -> None:
        """Free the memory of an extent that is not needed for now."""
        if extent.file in self._files:
            self._files[extent.file].release(extent.offset, extent.length)

    def _reaching(self, name: str, end: int) -> FileBytes:
        file = self._bytes(name)
        if end > file.size:
            raise DamageError(f"{self.directory / name} has {file.size} bytes, expected at least {end}: it was cut")
        return file

    def _bytes(self, name: str) -> FileBytes:
        if name not in self._files:
            self._files[name] = self._in_memory.get(name) or _opened(self.directory, name)
        return self._files[name]


def elements(payloads: Payloads, tensor: StateRecord, chunk: Chunk) -> NDArray[Any]:
    """A chunk's elements as unsigned words in the shape of its box (one more dim of 2 for 16-byte elements)."""
    return _elements(payloads.view(payload_of(tensor, chunk)), tensor, chunk)


def checked_elements(payloads: Payloads, tensor: StateRecord, chunk: Chunk) -> NDArray[Any]:
    """A chunk's elements, from bytes that are read once and compared as `check_chunk` does.

    Raises:
        SourceError: they differ, or cannot be read; names the tensor, the box and the file.
    """
    with _damage(payloads, tensor, chunk):
        raw = payloads.view(payload_of(tensor, chunk))
        _compare_sums(payloads, chunk, [raw])
        return _elements(raw, tensor, chunk)


def _elements(raw: memoryview, tensor: StateRecord, chunk: Chunk) -> NDArray[Any]:
    words = as_words(raw, tensor.dtype, (chunk.box.numel,))
    return strided(words, chunk.stored("").place.strides, chunk.box.shape)


def as_words(raw: memoryview, name: str, shape: Index) -> NDArray[Any]:
    """Raw elements of this dtype as unsigned words in this shape (one more dim of 2 for 16-byte elements)."""
    kind = dtype(name)
    return np.frombuffer(raw, kind.bits).reshape(shape if kind.itemsize <= 8 else (*shape, 2))


def check_chunk(payloads: Payloads, tensor: StateRecord, chunk: Chunk) -> None:
    """Compare a chunk's bytes with its digest, else with its CRC-32, else with the checksum that its format keeps.

    Raises:
        SourceError: they differ, or cannot be read; names the tensor, the box and the file.
    """
    with _damage(payloads, tensor, chunk):
        _compare_sums(payloads, chunk, payloads.bands(payload_of(tensor, chunk)))


def _damage(payloads: Payloads, tensor: StateRecord, chunk: Chunk) -> AbstractContextManager[None]:
    return about(f"tensor {tensor.key!r} box {chunk.box} in {payloads.directory / chunk.item.file} is damaged")


def _compare_sums(payloads: Payloads, chunk: Chunk, parts: Iterable[memoryview]) -> None:
    if chunk.digest is not None:
        compare("digest", xxh3_128(parts), chunk.digest)
    elif chunk.crc32 is not None:
        compare("CRC-32", f"{crc32(parts):08x}", f"{chunk.crc32:08x}")
    else:
        payloads.check_inside(chunk.item)


def compare(kind: str, actual: str, expected: str) -> None:
    """Compare two checksums of one kind.

    Raises:
        DamageError: they differ.
    """
    if actual != expected:
        raise DamageError(f"{kind} {actual}, expected {expected}")


def payload_of(tensor: StateRecord, chunk: Chunk) -> Extent:
    """The extent of a chunk's raw elements.

    Raises:
        SourceError: its length is not that of the box.
    """
    expected = chunk.box.numel * dtype(tensor.dtype).itemsize
    if chunk.payload is None or chunk.payload.length != expected:
        actual = None if chunk.payload is None else chunk.payload.length
        raise SourceError(f"tensor {tensor.key!r} box {chunk.box}: payload of {actual} bytes, expected {expected}")
    return chunk.payload


def _opened(directory: Location, name: str) -> FileBytes:
    file = directory / name
    if file.parent.resolve() != (directory.resolve() / name).parent:
        raise SourceError(f"cannot open {file}: one of its directories is a symbolic link")
    with open_regular(file) as opened:
        return opened.mapped()
