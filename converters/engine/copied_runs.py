"""Checking chunks of the source by what is read of them to be copied.

So each is read once, and the bytes that are checked are the bytes that are copied.  Where a second thread reads bytes
once more, for other files, its reading is not checked anew: a file that changes in between is found by the tensor's
fingerprint, if the source has one.

The CRC-32 of a chunk follows from those of the runs of bytes that tile it, in whatever order and by whichever thread
they are read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock

from ...errors import DamageError
from ...record import Chunk
from ...store.io.checksums import crc32_joined, crc32_of
from ...store.reading.payloads import Payloads, check_chunk
from .unchecked_chunks import UncheckedChunks


@dataclass(slots=True)
class _Runs:
    """The runs of a payload: ``crc32`` is that of its bytes up to ``reached``; ``waiting`` are runs behind that, by
    their first byte: where they stop, and their CRC-32."""

    reached: int = 0
    crc32: int = 0
    waiting: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, start: int, stop: int, crc32: int) -> None:
        if start >= self.reached:
            self.waiting.setdefault(start, (stop, crc32))
        while run := self.waiting.pop(self.reached, None):
            stop, crc32 = run
            self.reached, self.crc32 = stop, crc32_joined(self.crc32, crc32, stop - self.reached)


class CopiedRuns:
    """Runs of chunks that have not been read whole yet; safe to use from several threads.

    Neighbours are joined at once, so a chunk has few of them however many files it is copied to.  Chunks stay unchecked
    if runs do not tile them: some bytes are not copied, or threads read runs that overlap.

    Args:
        unchecked: the chunks to check; those that have been are taken out of it.
        progress: called with the length of each payload that was checked, in bytes.
    """

    def __init__(self, payloads: Payloads, unchecked: UncheckedChunks, progress: Callable[[int], None]) -> None:
        self._payloads = payloads
        self._unchecked = unchecked
        self._progress = progress
        self._runs: dict[tuple[str, int], _Runs] = {}
        self._adding = Lock()

    def read(self, chunk: Chunk, start: int, raw: memoryview) -> None:
        """Add bytes that were read from byte ``start`` of a chunk's payload, as `add` does; if there is a CRC-32."""
        known = self._runs.get((chunk.item.file, chunk.item.offset))
        another_thread_did = known is not None and start < known.reached
        if chunk.crc32 is not None and not another_thread_did and self._unchecked.waits(chunk.item):
            self.add(chunk, start, start + len(raw), crc32_of(raw, 0))

    def add(self, chunk: Chunk, start: int, stop: int, crc32: int) -> None:
        """Add bytes ``start:stop`` of a chunk's payload, by their CRC-32.  When the last are added, it is checked.

        Bytes that were added before, as those of replicas are, do not count.

        Raises:
            SourceError: the chunk is damaged, or was written while it was read.
        """
        length = 0 if chunk.payload is None else chunk.payload.length
        key = chunk.item.file, chunk.item.offset
        with self._adding:
            runs = self._runs.setdefault(key, _Runs())
            runs.add(start, stop, crc32)
            if runs.reached < length:
                return
            del self._runs[key]
        if self._unchecked.take(chunk.item.file, [chunk.item.offset]) != [True]:
            return
        if runs.crc32 != chunk.crc32:
            tensor, _ = self._unchecked.at(chunk.item)
            check_chunk(self._payloads, tensor, chunk)  # says what is wrong
            where = f"tensor {tensor.key!r} box {chunk.box} in {self._payloads.place(chunk.item.file)}"
            raise DamageError(
                f"{where} was written while it was read: what was copied has CRC-32 {runs.crc32:08x}, and what it has "
                f"now, as expected, {chunk.crc32:08x}"
            )
        self._progress(length)
