"""Checking chunks of the source by what is copied from them: each is read once, and what is checked is what was copied.

The CRC-32 of a chunk follows from those of the runs of bytes that tile it, in whatever order and by whichever thread
they are copied.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from threading import Lock

from ...errors import DamageError
from ...record import Chunk
from ...store.io.checksums import crc32_joined
from ...store.reading.payloads import Payloads, check_chunk
from .unchecked_chunks import UncheckedChunks

_Run = tuple[int, int, int]
"""Bytes ``start:stop`` of a payload, and their CRC-32."""


class CopiedRuns:
    """Runs of chunks that have not been copied whole yet; safe to use from several threads.

    Neighbours are joined at once, so a chunk has few of them however many files it is copied to.  Chunks of which some
    bytes are copied by other processes, or not at all, stay unchecked.

    Args:
        unchecked: the chunks to check; those that have been are taken out of it.
        progress: called with the length of each payload that was checked, in bytes.
    """

    def __init__(self, payloads: Payloads, unchecked: UncheckedChunks, progress: Callable[[int], None]) -> None:
        self._payloads = payloads
        self._unchecked = unchecked
        self._progress = progress
        self._runs: dict[tuple[str, int], list[_Run]] = {}
        self._adding = Lock()

    def add(self, chunk: Chunk, start: int, stop: int, crc32: int) -> None:
        """Add copied bytes ``start:stop`` of a chunk's payload; bytes that were added before, as replicas are, do not
        count.  When the last are added, the chunk is checked.

        Raises:
            SourceError: the chunk is damaged, or was written while it was read.
        """
        length = 0 if chunk.payload is None else chunk.payload.length
        whole = self._joined(chunk, length, (start, stop, crc32))
        if whole is None or self._unchecked.take(chunk.item.file, [chunk.item.offset]) != [True]:
            return
        if whole != chunk.crc32:
            tensor, _ = self._unchecked.at(chunk.item)
            check_chunk(self._payloads, tensor, chunk)  # says what is wrong
            where = f"tensor {tensor.key!r} box {chunk.box} in {self._payloads.place(chunk.item.file)}"
            raise DamageError(
                f"{where} was written while it was read: what was copied has CRC-32 {whole:08x}, and what it has now, "
                f"as expected, {chunk.crc32:08x}"
            )
        self._progress(length)

    def _joined(self, chunk: Chunk, length: int, run: _Run) -> int | None:
        """The CRC-32 of a chunk's payload if this run is the last of it; then its runs are forgotten."""
        key, (start, stop, _) = (chunk.item.file, chunk.item.offset), run
        with self._adding:
            runs = self._runs.setdefault(key, [])
            at = bisect_left(runs, run)
            if (at and runs[at - 1][1] > start) or (at < len(runs) and runs[at][0] < stop):
                return None
            runs.insert(at, run)
            for left in (at, at - 1):
                if 0 <= left < len(runs) - 1 and runs[left][1] == runs[left + 1][0]:
                    runs[left : left + 2] = [_both(runs[left], runs[left + 1])]
            if runs[0][:2] != (0, length):
                return None
            return self._runs.pop(key)[0][2]


def _both(first: _Run, second: _Run) -> _Run:
    return first[0], second[1], crc32_joined(first[2], second[2], second[1] - second[0])
