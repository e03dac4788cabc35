"""The bytes of a checkpoint's items: mapped, bounded, and checked against what is recorded of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...box import Index
from ...errors import SourceError, about
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
        made: the bytes of files that are not taken from the directory, by name.
    """

    def __init__(self, directory: Location, made: Mapping[str, bytes] = MappingProxyType({})) -> None:
        self.directory = directory
        self._made = {name: Held(data) for name, data in made.items()}
        self._files: dict[str, FileBytes] = {}

    def __enter__(self) -> Payloads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files; to read on opens them again."""
        # Arrays handed out may still refer to the maps, so they are left to the garbage collector.
        self._files.clear()

    def view(self, extent: Extent) -> memoryview:
        """The bytes of an extent; of a local file not copied, of an object all of them read.

        Raises:
            SourceError: no such regular file in the directory, or it is too short.
        """
        return self._reaching(extent.file, extent.end).view(extent.offset, extent.length)

    def gather(self, payload: Extent, name: str, place: Place, shape: Index) -> NDArray[Any]:
        """The elements of a box of this shape at a place in a payload, read-only, as `as_words` gives them.

        Of a local file nothing is copied; of an object only what the box needs is read (and gaps that are too small
        to be left out), a few blocks at a time.
        """
        size = itemsize(name)
        at, reach = payload.offset + place.offset * size, size * span(shape, place.strides)
        file = self._reaching(payload.file, at + reach)

        def words(raw: memoryview, part: Index) -> NDArray[Any]:
            return strided(as_words(raw, name, (len(raw) // size,)), place.strides, part)

        parts = list(blocks(shape, place.strides, file.gap // size, file.most // size))
        if len(parts) <= 1:
            return words(file.view(at, reach), shape)
        gathered = np.empty((*shape, *(2,) * (size > 8)), dtype(name).bits)
        for batch in batches(parts, place.strides, file.most // size):
            ranges = [(at + block.start(place.strides) * size, block.span(place.strides) * size) for block in batch]
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
            SourceError: they differ.
        """

    def release(self, extent: Extent) -> None:
        """An extent is not needed for now: what of it is in the memory of this process is given back."""
        if extent.file in self._files:
            self._files[extent.file].release(extent.offset, extent.length)

    def _reaching(self, name: str, end: int) -> FileBytes:
        file = self._bytes(name)
        if end > file.size:
            raise SourceError(f"{self.directory / name} has {file.size} bytes, expected at least {end}: it was cut")
        return file

    def _bytes(self, name: str) -> FileBytes:
        if name not in self._files:
            self._files[name] = self._made.get(name) or _opened(self.directory, name)
        return self._files[name]


def elements(payloads: Payloads, tensor: StateRecord, chunk: Chunk) -> NDArray[Any]:
    """A chunk's elements as unsigned words in the shape of its box (one more dim of 2 for 16-byte elements)."""
    return _elements(payloads.view(payload_of(tensor, chunk)), tensor, chunk)


def checked_elements(payloads: Payloads, tensor: StateRecord, chunk: Chunk) -> NDArray[Any]:
    """The same, of bytes that are read once, and compared as `check_chunk` does.

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
    """Compare a chunk's bytes with its digest, or where none is recorded with its CRC-32, or what its format keeps.

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


def compare(what: str, found: str, expected: str) -> None:
    """Raises:
    SourceError: two sums differ.
    """
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


def _opened(directory: Location, name: str) -> FileBytes:
    file = directory / name
    if file.parent.resolve() != (directory.resolve() / name).parent:
        raise SourceError(f"cannot open {file}: there is a symbolic link on the way")
    with open_regular(file) as opened:
        return opened.mapped()
