"""The bytes of a checkpoint's items: bounded, and checked against their recorded checksums."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from threading import Lock, local
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...algebra.box import Index, row_major
from ...algebra.fingerprint import combine, fingerprint
from ...algebra.grouping import batches
from ...algebra.layout import Place
from ...names.errors import (
    ChecksumError,
    DamageError,
    DiskError,
    MuonckptError,
    RemovedError,
    SourceError,
    UnavailableError,
)
from ...record.record import Chunk, Extent, Manifest, StateRecord
from ..io.checksums import JoinedCrc, crc32, xxh3_128
from ..io.limits import check_holes
from ..io.location import Location, is_there
from ..io.regular import READ_BYTES, BytesInMemory, FileBytes, Pace, PacedFile, open_regular
from .blocks import bands, blocks, strided_span, strided_view
from .dtypes import PARTS, dtype, itemsize

Reads = Callable[[int, memoryview], None]
"""Receives bytes as they were read from this byte of a file on."""

_WINDOW_BYTES = READ_BYTES + (READ_BYTES >> 2)
"""Most bytes of a thread's windows unless it may have fewer: a band of an output may cross several chunks."""


class Windows:
    """Keeps parts of files in one thread's memory, from which it gathers boxes near each other, the last used first.

    Outputs cut along other dims than their source consist of small pieces of it.  A call for each costs more than to
    read the gaps, and to read the gaps for every output costs as many times the source.  So a window reaches beyond a
    box by the size of a gap, and outputs that are written together find their next pieces there.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._windows: list[_Window] = []

    def view(self, file: FileBytes, payload: Extent, offset: int, length: int, reads: Reads) -> memoryview:
        """Return a range of a payload, in memory that the next call may overwrite; ``reads`` receives new bytes."""
        window = next((window for window in self._windows if window.has(file, offset, length)), None)
        if window is None:
            # Extend a window that ends near here, or open one; then close as many of the oldest as memory asks for.
            beyond = min(file.gap, length)
            start, stop = max(offset - beyond, payload.offset), min(offset + length + beyond, payload.end)
            window = next((window for window in self._windows if window.reaches(file, start)), None) or _Window()
            self._windows = [other for other in self._windows if other is not window]
            while self._windows and sum(map(len, self._windows)) + max(len(window), stop - start) > self._max_bytes:
                self._windows.pop()
            window.read(file, start, stop, reads)
        self._windows = [window, *(other for other in self._windows if other is not window)]
        return window.view(offset, length)


class _Window:
    def __init__(self) -> None:
        self._memory = memoryview(b"")
        self._file: FileBytes | None = None
        self._start = self._stop = 0

    def __len__(self) -> int:
        return len(self._memory)

    def has(self, file: FileBytes, offset: int, length: int) -> bool:
        return self._file is file and self._start <= offset and offset + length <= self._stop

    def reaches(self, file: FileBytes, start: int) -> bool:
        return self._file is file and self._start <= start <= self._stop

    def read(self, file: FileBytes, start: int, stop: int, reads: Reads) -> None:
        # Bytes from ``start`` on that it has already move to the front; the others are read after them.
        overlap = self._memory[start - self._start : self._stop - self._start] if self.reaches(file, start) else b""
        self._file = None  # until it has been read
        if len(self._memory) < stop - start:
            self._memory = np.empty(stop - start, np.uint8).data
        self._memory[: len(overlap)] = overlap
        rest, raw = start + len(overlap), self._memory[len(overlap) : stop - start]
        file.fill(raw, rest)
        reads(rest, raw)
        self._file, self._start, self._stop = file, start, stop

    def view(self, offset: int, length: int) -> memoryview:
        return self._memory[offset - self._start : offset - self._start + length]


Progress = Callable[[int, int], None]
"""Called from several threads with the bytes that were read since the last call, and with the total."""

BAND_BYTES = 2 << 20
"""Bytes that are read and checked at a time: enough to amortise calls, few enough to stay in cache in between."""

_MAX_SCRATCH = 64 << 20
"""Most bytes of memory that a thread keeps to read into."""


_OF_THIS_PROCESS = frozenset({"_files", "_states", "_opening", "_scratch"})
"""Attributes of `Payloads` that other processes make again."""


class Payloads:
    """Reads the files of one checkpoint directory, opened when first used; safe to use from several threads.

    Args:
        in_memory: bytes by file name that replace files of the directory.
    """

    def __init__(self, directory: Location, in_memory: Mapping[str, bytes] = MappingProxyType({})) -> None:
        self.directory = directory.absolute()
        self.pace: Pace | None = None
        """Limits the rate of reading; set before the first file is opened."""
        self.window_bytes = _WINDOW_BYTES
        """Most bytes of a thread's `Windows`; set before the first is read."""
        self._in_memory = {name: BytesInMemory(data) for name, data in in_memory.items()}
        self._files: dict[str, FileBytes] = {}
        self._states: dict[str, tuple[object, ...]] = {}
        # A quarter of what the process may have open: there may be other checkpoints.
        soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_open = sys.maxsize if soft_limit == resource.RLIM_INFINITY else max(soft_limit // 4, 1)
        self._opening = Lock()
        self._scratch = local()

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in _OF_THIS_PROCESS}
        in_memory = {name: bytes(data.view(0, data.size)) for name, data in self._in_memory.items()}
        return {**state, "_in_memory": in_memory}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        Payloads.__init__(self, state["directory"], state["_in_memory"])

    def __enter__(self) -> Payloads:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; reading opens them again."""
        self._files.clear()
        self._states.clear()

    def place(self, name: str) -> Location:
        return self.directory / name

    def keep(self, raw: bytes) -> Extent:
        """Keep bytes in memory, to be read as those of a file; return where.  Every process calls it the same."""
        name = xxh3_128([raw])
        self._in_memory.setdefault(name, BytesInMemory(raw))
        return Extent(name, 0, len(raw))

    def is_in_memory(self, name: str) -> bool:
        """Return whether a name is that of bytes in memory, and of no file."""
        return name in self._in_memory and not is_there(self.place(name))

    def is_verbatim(self, name: str) -> bool:
        """Return whether the bytes under a name are those of the file, and not made of them."""
        return name not in self._in_memory

    def view(self, extent: Extent) -> memoryview:
        """Return the bytes of an extent; raise `SourceError` if there is no such regular file, or it is too short."""
        return self.open_file(extent.file, extent.end).view(extent.offset, extent.length)

    def gather(self, payload: Extent, name: str, place: Place, shape: Index) -> NDArray[Any]:
        """Read a box of this shape at a place in a payload; elements as `as_words` gives them."""
        gathered = np.empty((*shape, *(2,) * (itemsize(name) > 8)), dtype(name).bits)
        self.gather_into(gathered, payload, name, place, shape)
        return gathered

    def gather_into(
        self,
        out: NDArray[Any],
        payload: Extent,
        name: str,
        place: Place,
        shape: Index,
        reads: Reads = lambda offset, raw: None,
    ) -> None:
        """Read a box of this shape at a place in a payload into ``out``; elements as `as_words` gives them.

        ``reads`` receives all bytes that are read: the box, and gaps that are too small to skip.
        """
        size = itemsize(name)
        start, reach = payload.offset + place.offset * size, size * strided_span(shape, place.strides)
        file = self.open_file(payload.file, start + reach)

        # Without gaps one read has all, and needs no copy if ``out`` has the elements in the order of the file.
        if reach == math.prod(shape) * size:
            if place.strides == row_major(shape) and out.flags.c_contiguous and out.dtype == dtype(name).bits:
                raw = out.reshape(-1).view(np.uint8).data
                file.fill(raw, start)
                reads(start, raw)
            else:
                raw = self.scratch(reach)
                file.fill(raw, start)
                reads(start, raw)
                out[...] = _strided_words(raw, name, place.strides, shape)
            return

        # With gaps blocks are read, several by one call; one may be alone in a window, or be followed by others there.
        parts = blocks(shape, place.strides, file.gap // size, file.max_bytes // size)
        for batch in batches(parts, lambda part: part.span, file.max_bytes // size):
            ranges = [(start + block.start * size, block.span * size) for block in batch]
            if len(ranges) > 1:
                views = file.views(ranges)
                for (offset, _), raw in zip(ranges, views, strict=True):
                    reads(offset, raw)
            else:
                windows: Windows = self._scratch.__dict__.setdefault("windows", Windows(self.window_bytes))
                views = [windows.view(file, payload, *ranges[0], reads)]
            for block, raw in zip(batch, views, strict=True):
                out[block.slices] = _strided_words(raw, name, place.strides, block.shape)

    def read_scratch(self, extent: Extent) -> memoryview:
        """Return the bytes of an extent, in memory that the next call of this thread overwrites.

        Fresh memory for every band costs a tenth of the time of a check.
        """
        file = self.open_file(extent.file, extent.end)
        raw = self.scratch(extent.length)
        file.fill(raw, extent.offset)
        return raw

    def bands(self, extent: Extent) -> Iterator[memoryview]:
        """Yield the bytes of an extent in order, `BAND_BYTES` at a time, in memory that the next ones overwrite."""
        for start in range(extent.offset, extent.end, BAND_BYTES):
            yield self.read_scratch(Extent(extent.file, start, min(BAND_BYTES, extent.end - start)))

    def fill_bands(self, extent: Extent, buffer: memoryview) -> Iterator[memoryview]:
        """Read an extent into a buffer of its length, `BAND_BYTES` at a time, and yield each part when it is there."""
        file = self.open_file(extent.file, extent.end)
        for start in range(0, extent.length, BAND_BYTES):
            part = buffer[start : start + BAND_BYTES]
            file.fill(part, extent.offset + start)
            yield part

    def has_checksum(self, chunk: Chunk) -> bool:
        """Return whether `check_chunk` has a checksum to compare a chunk's bytes with."""
        return chunk.digest is not None or chunk.crc32 is not None

    has_inner_checksums = False
    """Whether the format keeps checksums inside items, which `check_item` compares."""

    def check_item(self, item: Extent, parts: Iterable[memoryview] | None = None) -> None:
        """Compare an item with the checksum that its format keeps inside, if any.

        Args:
            parts: its bytes as they are read, in order; None if they are still to be read.

        Raises:
            DamageError: they differ.
        """

    def on_disk(self, name: str) -> int:
        """Return the bytes that a file has on the disk: fewer than its size if it has holes."""
        if name in self._in_memory:
            return self._in_memory[name].size
        with open_regular(self.place(name)) as opened:
            return opened.on_disk

    def scratch(self, length: int) -> memoryview:
        """Return memory of this thread, which the next call overwrites."""
        if length > _MAX_SCRATCH:
            return np.empty(length, np.uint8).data
        if len(getattr(self._scratch, "bytes", b"")) < length:
            self._scratch.bytes = np.empty(length, np.uint8).data
        raw: memoryview = self._scratch.bytes[:length]
        return raw

    def open_file(self, name: str, end: int) -> FileBytes:
        """Open a file; raise `DamageError` if it has fewer than ``end`` bytes."""
        # Checked before each read, as memory for the elements is taken next.
        file = self._bytes(name)
        if end > file.size:
            raise DamageError(f"{self.place(name)} has {file.size} bytes, expected at least {end}: it was cut")
        return file

    def _bytes(self, name: str) -> FileBytes:
        file = self._files.get(name)
        if file is None:
            # One thread opens; another may open the same file again, which is closed with its last reference.
            with self._opening:
                file = self._in_memory.get(name) or self._open(name)
                if len(self._files) >= self._max_open:
                    self._files.pop(next(iter(self._files)))  # closed when its last reader ends
                self._files[name] = file
        return file

    def _open(self, name: str) -> FileBytes:
        file = self.directory / name
        if name not in self._states and file.parent.resolve() != (self.directory.resolve() / name).parent:
            raise SourceError(f"cannot open {file}: one of its directories is a symbolic link")
        # A file that is opened again, because others had to be closed, must be the one that was opened first.
        opened = open_regular(file)
        check_holes(file, opened.size, opened.on_disk)
        if self._states.setdefault(name, opened.state) != opened.state:
            raise DamageError(f"{file} changed while it was read")
        return PacedFile(opened, self.pace) if self.pace else opened


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads one checkpoint, whose metadata were read when it was made.

    Attributes:
        outline: the manifest in the metadata, in which the places of elements may still be unknown.
        payloads: the bytes of its files.
        faults: the damage that shows without reading data, such as missing files.
        locate: returns tensors of the outline, or some of their chunks, with the places of elements.  It opens
            the items of chunks whose place is unknown, and raises `SourceError` if one is not as promised.
    """

    outline: Manifest
    payloads: Payloads
    faults: tuple[SourceError | DiskError, ...] = ()
    locate: Callable[[Sequence[StateRecord]], tuple[StateRecord, ...]] = tuple


def chunk_elements(payloads: Payloads, tensor: StateRecord, chunk: Chunk) -> NDArray[Any]:
    """Read a chunk's elements in the shape of its box, as `as_words` gives them."""
    return _view_elements(payloads.view(payload_of(tensor, chunk)), tensor, chunk)


def checked_elements(payloads: Payloads, tensor: StateRecord, chunk: Chunk) -> NDArray[Any]:
    """Read a chunk's elements, from bytes that are read once and compared as `check_chunk` does; raises as that.

    They are in memory that the next call of this thread overwrites.
    """
    with about_chunk(payloads, tensor, chunk):
        payload = payload_of(tensor, chunk)
        if chunk.digest is None and chunk.crc32 is None:
            payloads.check_item(chunk.item)
            return _view_elements(payloads.read_scratch(payload), tensor, chunk)
        # Each part is compared while it is in the processor's cache.
        raw = payloads.scratch(payload.length)
        _compare_sums(payloads, chunk, payloads.fill_bands(payload, raw))
        return _view_elements(raw, tensor, chunk)


def _view_elements(raw: memoryview, tensor: StateRecord, chunk: Chunk) -> NDArray[Any]:
    return _strided_words(raw, tensor.dtype, chunk.stored("").place.strides, chunk.box.shape)


def _strided_words(raw: memoryview, name: str, strides: Index, shape: Index) -> NDArray[Any]:
    return strided_view(as_words(raw, name, (len(raw) // itemsize(name),)), strides, shape)


def as_words(raw: memoryview, name: str, shape: Index) -> NDArray[Any]:
    """View raw elements of this dtype as unsigned words in this shape (one more dim of 2 for 16-byte elements)."""
    kind = dtype(name)
    return np.frombuffer(raw, kind.bits).reshape(shape if kind.itemsize <= 8 else (*shape, 2))


def chunk_bands(payloads: Payloads, tensor: StateRecord, chunk: Chunk) -> Iterator[tuple[NDArray[Any], Index]]:
    """Yield a chunk's elements in the order of its box, in bands, each with the global index of its first element.

    They are as `as_words` gives them, in memory that the next band may overwrite.
    """
    # Row-major chunks are read from end to end; others box by box, wherever their elements lie.
    payload, size = payload_of(tensor, chunk), itemsize(tensor.dtype)
    offset = payload.offset
    for band in bands(chunk.box, BAND_BYTES // size):
        for box in band.boxes:
            if chunk.strides is None:
                part = Extent(payload.file, offset, box.numel * size)
                yield as_words(payloads.read_scratch(part), tensor.dtype, box.shape), box.lo
                offset = part.end
            else:
                yield payloads.gather(payload, tensor.dtype, chunk.stored("").place_at(box.lo), box.shape), box.lo


def chunk_share(payloads: Payloads, tensor: StateRecord, chunk: Chunk) -> int:
    """Return the share of a chunk in the fingerprint of its tensor, in bounded memory."""
    share = 0
    for words, origin in chunk_bands(payloads, tensor, chunk):
        share = combine(share, fingerprint(words, origin + (0,) * (words.ndim - len(origin))))
    return share


def check_chunk(payloads: Payloads, tensor: StateRecord, chunk: Chunk) -> None:
    """Compare a chunk's bytes with its digest, else with its CRC-32, else with the checksum inside its item.

    Raises:
        SourceError: they differ, or cannot be read; names the tensor, the box and the file.
    """
    with about_chunk(payloads, tensor, chunk):
        _compare_sums(payloads, chunk, payloads.bands(payload_of(tensor, chunk)))


def check_joined(payloads: Payloads, tensor: StateRecord, chunk: Chunk, joined: JoinedCrc) -> None:
    """Compare a chunk's CRC-32 with that of the parts that were read of it, by whichever threads or ranks.

    Raises:
        DamageError: the chunk is damaged; or a part was read wrongly, or when the file had other bytes.
    """
    if (joined.reached, joined.crc32) == (payload_of(tensor, chunk).length, chunk.crc32):
        return
    check_chunk(payloads, tensor, chunk)  # names the fault
    raise DamageError(
        f"tensor {tensor.key!r} box {chunk.box} in {payloads.place(chunk.item.file)} changed while it was read: the "
        f"parts that were read have CRC-32 {joined.crc32:08x}, and the chunk has {chunk.crc32:08x}, as expected"
    )


def about_chunk(payloads: Payloads, tensor: StateRecord, chunk: Chunk) -> AbstractContextManager[None]:
    """Say in errors that a chunk is damaged: which one, and where."""
    return about_entry(tensor.key, f"tensor {tensor.key!r} box {chunk.box} in {payloads.place(chunk.item.file)}")


@contextmanager
def about_entry(key: str, subject: str) -> Iterator[None]:
    """Say in errors that a tensor or an item is damaged, and give its key to those about checksums."""
    try:
        yield
    except ChecksumError as error:
        raise ChecksumError(f"{subject} is damaged: {error}", keys=error.keys or (key,)) from error
    except DiskError as error:
        raise DiskError(f"{subject} is damaged: {error}") from error
    except (UnavailableError, RemovedError) as error:  # these say nothing about its bytes
        raise type(error)(f"{subject}: {error}") from error
    except MuonckptError as error:
        raise type(error)(f"{subject} is damaged: {error}") from error


def _compare_sums(payloads: Payloads, chunk: Chunk, parts: Iterable[memoryview]) -> None:
    if chunk.digest is not None:
        compare_checksums("digest", xxh3_128(parts), chunk.digest)
    elif chunk.crc32 is not None:
        compare_checksums("CRC-32", f"{crc32(parts):08x}", f"{chunk.crc32:08x}")
    else:
        payloads.check_item(chunk.item)


def compare_checksums(kind: str, actual: str, expected: str) -> None:
    """Raise `ChecksumError` if two checksums of one kind differ."""
    if actual != expected:
        raise ChecksumError(f"{kind} {actual}, expected {expected}")


def tensor_bytes(tensor: StateRecord) -> int:
    """Return the bytes of all elements of a tensor."""
    return math.prod(tensor.shape) * itemsize(tensor.dtype)


def payload_of(tensor: StateRecord, chunk: Chunk) -> Extent:
    """Return the extent of a chunk's raw elements; raise `SourceError` if its length is not that of the box."""
    expected = chunk.box.numel * dtype(tensor.dtype).itemsize
    if chunk.payload is None or chunk.payload.length != expected:
        actual = None if chunk.payload is None else chunk.payload.length
        raise SourceError(f"tensor {tensor.key!r} box {chunk.box}: payload of {actual} bytes, expected {expected}")
    return chunk.payload


# (mask, value): an element is infinite or NaN if bits & mask == value.  IEEE 754 and bfloat16; the OCP 8-bit formats;
# the "fnuz" ones, whose only NaN is a negative zero (arXiv:2206.02915); the OCP MX scale.
_NONFINITE = {"float16": (0x7C00, 0x7C00), "bfloat16": (0x7F80, 0x7F80), "float8_e5m2": (0x7C, 0x7C)}
_NONFINITE |= {"float8_e4m3fn": (0x7F, 0x7F), "float8_e8m0fnu": (0xFF, 0xFF)}
_NONFINITE |= {"float8_e4m3fnuz": (0xFF, 0x80), "float8_e5m2fnuz": (0xFF, 0x80)}


def count_nonfinite(words: NDArray[Any], name: str) -> int:
    """Count the elements, given as raw bits, that are infinite or NaN; 0 for types that have neither."""
    # Both parts of complex numbers count.
    parts = PARTS.get(name, name)
    flat = words.reshape(-1).view(dtype(parts).bits)
    if parts in ("float32", "float64"):  # numpy's own test is vectorised, but lacks the other types
        return int(flat.size - np.count_nonzero(np.isfinite(flat.view(parts))))
    if parts not in _NONFINITE:
        return 0
    mask, value = map(flat.dtype.type, _NONFINITE[parts])
    return int(np.count_nonzero((flat & mask) == value))
