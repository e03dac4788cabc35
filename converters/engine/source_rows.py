"""The chunks of a source as numbered rows, and the checks of the bytes read.

A chunk with a CRC-32 is checked by the bytes read for its copies: each is read once, and the checked bytes are those
that are copied.  Its CRC-32 follows from those of the runs that tile it, whichever thread reads them, in any order.
Other chunks are checked before anything is copied from them.  A second read for another file is not checked again:
a file that changes in between is found by the tensor's fingerprint, if the source has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from threading import Lock

import numpy as np
import xxhash
from numpy.typing import NDArray

from ...algebra.layout import Buffer
from ...record.chunks import Chunks
from ...record.columns import UNKNOWN, Column
from ...record.record import Chunk, Extent, Manifest, StateRecord
from ...store.io.checksums import JoinedCrc, crc32_of
from ...store.reading.blocks import join_ranges
from ...store.reading.payloads import Payloads, check_chunk, check_joined, payload_of
from .outputs import OutputTensor

Mask = NDArray[np.bool_]

Bytes = NDArray[np.uint8]

Advance = Callable[[int], None]
"""Receives the number of bytes checked or written since the last call; called from several threads."""

_GAP = 16 << 10
"""Bytes between two ranges that are read along, because a call costs as much."""

_MAX_RUN_BYTES = 1 << 20
"""Bytes of small chunks that are read at a time."""


class SourceRows:
    """The chunks of a source in columns, one tensor after the other; a row is the number of a chunk."""

    def __init__(self, manifest: Manifest) -> None:
        self._tensors = manifest.tensors
        self.columns = manifest.columns
        self.has_elements: Mask = manifest.elements > 0
        self._ends = np.cumsum([len(tensor.chunks) for tensor in self._tensors])
        starts = zip(self._tensors, [0, *self._ends.tolist()], strict=False)
        self._first = {tensor.chunks.place: start for tensor, start in starts if len(tensor.chunks)}

    def __len__(self) -> int:
        return len(self.columns)

    def first(self, chunks: Chunks) -> int:
        return self._first[chunks.place] if len(chunks) else 0

    def rows(self, outputs: Sequence[OutputTensor], buffer: Buffer) -> Column:
        """Return the row of each output's buffer."""
        places = (output.locate(buffer) for output in outputs)
        return np.array([self._first[source.place] + number for source, number in places], np.int64)

    def at(self, row: int) -> tuple[StateRecord, Chunk]:
        number = int(np.searchsorted(self._ends, row, side="right"))
        tensor = self._tensors[number]
        return tensor, tensor.chunks[row - int(self._ends[number]) + len(tensor.chunks)]


class SourceChecks:
    """Checks the chunks of a source, each once; safe to use from several threads.

    Args:
        selected: a mask of the rows to check.
        shared: a mask of the rows from which other processes copy as well: none of them reads all of such a chunk.
        progress: called with the length of each payload that was checked, in bytes.
    """

    def __init__(self, payloads: Payloads, rows: SourceRows, selected: Mask, shared: Mask, progress: Advance) -> None:
        self._payloads = payloads
        self._rows = rows
        self._is_waiting: Mask = rows.has_elements & selected
        self._is_checked_ahead: Mask = shared | (rows.columns.crc32 == UNKNOWN)
        self._progress = progress
        self._runs: dict[int, JoinedCrc] = {}
        self._lock = Lock()

    @property
    def waiting(self) -> Column:
        """The rows that are still to be checked."""
        return np.flatnonzero(self._is_waiting)

    def check(self, rows: Iterable[int]) -> None:
        """Compare chunks with their checksums, without those that another thread has begun to check.

        Raises:
            SourceError: one is damaged.
        """
        for row in rows:
            if self._mark_checked(np.array([row])).all():
                tensor, chunk = self._rows.at(row)
                check_chunk(self._payloads, tensor, chunk)
                self._progress(payload_of(tensor, chunk).length)

    def check_ahead(self, output: OutputTensor, buffers: Iterable[Buffer]) -> None:
        """Check the chunks of these buffers that reading them for copies does not check."""
        columns, rows = self._rows.columns, {int(self._rows.rows([output], buffer)[0]) for buffer in buffers}
        # In the order of files, which are read from front to back.
        ahead = [row for row in rows if self._is_checked_ahead[row]]
        self.check(sorted(ahead, key=lambda row: (columns.file[row], columns.item[row])))

    def read(self, chunks: Chunks, number: int, start: int, raw: memoryview) -> None:
        """Add bytes that were read from byte ``start`` of a chunk's payload; the last of its bytes check it.

        Neighbours are joined at once, so a chunk has few runs.  One whose runs do not tile it stays unchecked, because
        some bytes are not copied, or threads read runs that overlap.

        Raises:
            SourceError: the chunk is damaged, or changed while it was read.
        """
        row = self._rows.first(chunks) + number
        joined = self._runs.get(row)
        is_repeated = joined is not None and start < joined.reached  # another thread has read it
        if self._is_checked_ahead[row] or is_repeated or not self._is_waiting[row]:
            return
        crc32, length = crc32_of(raw, 0), max(int(self._rows.columns.payload_length(row)), 0)
        # Only who adds the last bytes goes on, and only if no one has checked the chunk otherwise.
        with self._lock:
            joined = self._runs.setdefault(row, JoinedCrc())
            joined.add(start, start + len(raw), crc32)
            if joined.reached < length:
                return
            del self._runs[row]
        if self._mark_checked(np.array([row])).all():
            check_joined(self._payloads, *self._rows.at(row), joined)
            self._progress(length)

    def read_small(self, outputs: Sequence[OutputTensor], buffer: Buffer, length: int) -> Bytes:
        """Return the payloads of small chunks, those of a buffer of outputs, as ``[outputs, length]``; check them.

        Raises:
            SourceError: one is damaged, or has another length in bytes.
        """
        rows, columns = self._rows.rows(outputs, buffer), self._rows.columns
        for row in rows[columns.payload_length(rows) != length].tolist():
            payload_of(*self._rows.at(row))  # names the fault
        # Neighbours in a file are read by one call.
        payload = columns.payload(rows)
        order = np.lexsort((payload, columns.file[rows]))
        file, start = columns.file[rows][order], payload[order]
        elements = np.empty((len(rows), length), np.uint8)
        runs = join_ranges(start, start + length, _GAP, _MAX_RUN_BYTES, file)
        files, starts, numbers = file.tolist(), start.tolist(), order.tolist()
        for offset, end, members in zip(runs.start.tolist(), runs.stop.tolist(), runs.members(len(rows)), strict=True):
            extent = Extent(columns.names[files[members[0]]], offset, end - offset)
            raw = np.frombuffer(self._payloads.read_scratch(extent), np.uint8)
            for member in members:
                place = starts[member] - offset
                elements[numbers[member]] = raw[place : place + length]
        # The first reader of a chunk checks it: by its digest, or without one as `check_chunk` does.
        unchecked_numbers = np.flatnonzero(self._mark_checked(rows)).tolist()
        for number in unchecked_numbers:
            row = int(rows[number])
            digest = columns.digest[row].tobytes() if columns.has_digest[row] else None
            if xxhash.xxh3_128_digest(elements[number]) != digest:
                check_chunk(self._payloads, *self._rows.at(row))
        if unchecked_numbers:
            self._progress(len(unchecked_numbers) * length)
        return elements

    def _mark_checked(self, rows: Column) -> Mask:
        """Mark rows as checked, and return a mask of the newly marked ones."""
        with self._lock:
            waiting: Mask = self._is_waiting[rows]
            self._is_waiting[rows] = False
        return waiting
