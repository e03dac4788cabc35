"""The chunks of a source as numbered rows, and which of them are still to be checked.

A chunk is checked by the bytes read for its copies: each is read once, and the checked bytes are those that
are copied.  Its CRC-32 follows from those of the runs that tile it, whichever thread reads them, in any order.  What is
read again for other files is not checked again: a file that changes in between is found by the tensor's fingerprint, if
the source has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from ...algebra.layout import Buffer
from ...names.errors import DamageError
from ...record.chunks import Chunks
from ...record.columns import UNKNOWN, Column
from ...record.record import Chunk, Manifest, StateRecord
from ...store.io.checksums import JoinedCrc, crc32_of
from ...store.reading.payloads import Payloads, check_chunk
from .outputs import OutputTensor

Mask = NDArray[np.bool_]


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

    def row(self, output: OutputTensor, buffer: Buffer) -> int:
        """Return the row of an output's buffer."""
        source, number = output.locate(buffer)
        first: int = self._first[source.place]
        return first + number

    def rows(self, outputs: Sequence[OutputTensor], buffer: Buffer) -> Column:
        return np.array([self.row(output, buffer) for output in outputs], np.int64)

    def at(self, row: int) -> tuple[StateRecord, Chunk]:
        number = int(np.searchsorted(self._ends, row, side="right"))
        tensor = self._tensors[number]
        return tensor, tensor.chunks[row - int(self._ends[number]) + len(tensor.chunks)]

    def in_file_order(self, output: OutputTensor, buffers: Iterable[Buffer]) -> list[int]:
        """Return the rows of an output's buffers, as they follow one another in files."""
        rows = {self.row(output, buffer) for buffer in buffers}
        return sorted(rows, key=lambda row: (self.columns.file[row], self.columns.item[row]))


class Unchecked:
    """The chunks of a source that are still to be checked; safe to use from several threads."""

    def __init__(self, rows: SourceRows) -> None:
        self.rows = rows
        self._waiting: Mask = rows.has_elements.copy()
        self._shared: Mask = np.zeros(len(rows), np.bool_)
        self._taking = Lock()

    def __len__(self) -> int:
        return int(np.count_nonzero(self._waiting))

    def __iter__(self) -> Iterator[int]:
        return iter(np.flatnonzero(self._waiting).tolist())

    def restrict(self, selected: Mask, shared: Mask) -> None:
        """Check only the selected rows; other processes copy from the shared ones as well."""
        self._waiting &= selected
        self._shared = shared

    def split(self, max_parts: int) -> Iterator[list[int]]:
        """Yield the rows that are still to be checked, in parts."""
        waiting = np.flatnonzero(self._waiting)
        for rows in np.array_split(waiting, max(min(max_parts, len(waiting)), 1)):
            yield rows.tolist()

    def take(self, rows: Column) -> Mask:
        """Mark rows as checked, and return a mask of the newly marked ones."""
        with self._taking:
            waiting: Mask = self._waiting[rows]
            self._waiting[rows] = False
        return waiting

    def waits(self, row: int) -> bool:
        return bool(self._waiting[row])

    def is_shared(self, row: int) -> bool:
        return bool(self._shared[row])


class CopiedRuns:
    """The runs of bytes that have been read of chunks, and that check them; safe to use from several threads.

    Neighbours are joined at once, so a chunk has few of them.  One whose runs do not tile it stays unchecked, because
    some bytes are not copied, or threads read runs that overlap.

    Args:
        progress: called with the length of each payload that was checked, in bytes.
    """

    def __init__(self, payloads: Payloads, unchecked: Unchecked, progress: Callable[[int], None]) -> None:
        self._payloads = payloads
        self._unchecked = unchecked
        self._columns = unchecked.rows.columns
        self._progress = progress
        self._runs: dict[int, JoinedCrc] = {}
        self._adding = Lock()

    def read(self, row: int, start: int, raw: memoryview) -> None:
        """Add bytes that were read from byte ``start`` of a chunk's payload, if the chunk has a CRC-32."""
        runs = self._runs.get(row)
        is_repeated = runs is not None and start < runs.reached  # another thread has read it
        if self._columns.crc32[row] != UNKNOWN and not is_repeated and self._unchecked.waits(row):
            self.add(row, start, start + len(raw), crc32_of(raw, 0))

    def add(self, row: int, start: int, stop: int, crc32: int) -> None:
        """Add bytes ``start:stop`` of a chunk's payload by their CRC-32; the last to be added check the chunk.

        Bytes that were added before, as those of replicas are, do not count.

        Raises:
            SourceError: the chunk is damaged, or changed while it was read.
        """
        length = max(int(self._columns.payload_length(row)), 0)
        # Only who adds the last bytes goes on, and only if no one has checked the chunk otherwise.
        with self._adding:
            runs = self._runs.setdefault(row, JoinedCrc())
            runs.add(start, stop, crc32)
            if runs.reached < length:
                return
            del self._runs[row]
        if not self._unchecked.take(np.array([row])).all():
            return
        if runs.crc32 != self._columns.crc32[row]:
            tensor, chunk = self._unchecked.rows.at(row)
            check_chunk(self._payloads, tensor, chunk)  # names the fault
            where = f"tensor {tensor.key!r} box {chunk.box} in {self._payloads.place(chunk.item.file)}"
            raise DamageError(
                f"{where} changed while it was read: what was copied has CRC-32 {runs.crc32:08x}, and what it has "
                f"now, as expected, {chunk.crc32:08x}"
            )
        self._progress(length)
