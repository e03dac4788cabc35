"""Windows: parts of files in the memory of one thread, from which it gathers boxes that lie near each other.

Outputs that are cut along other dims than their source consist of small pieces of it, each of the pieces between those
of another.  A call for every piece costs more than to read the gaps as well, and to read all of them for every output
costs as many times the source as there are outputs.  So a window reaches beyond a box by the size of a gap, and whoever
writes outputs in step finds in it what the next one needs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...record import Extent
from ..io.regular import FileBytes

Reads = Callable[[int, memoryview], None]
"""Receives bytes as they were read from this byte of a file on."""

_MOST = 3
"""Windows of a thread: a band of an output may lie in several chunks of the source."""


class Windows:
    """The windows of one thread, those that were used last first."""

    def __init__(self) -> None:
        self._windows: list[_Window] = []

    def view(self, file: FileBytes, payload: Extent, offset: int, length: int, reads: Reads) -> memoryview:
        """The bytes of a range of a payload, in memory that the next call may overwrite.

        ``reads`` sees what is read, in memory that it must not keep.
        """
        window = next((window for window in self._windows if window.has(file, offset, length)), None)
        if window is None:
            beyond = min(file.gap, length)
            start, stop = max(offset - beyond, payload.offset), min(offset + length + beyond, payload.end)
            window = next((window for window in self._windows if window.reaches(file, start)), None)
            if window is None:
                window = self._windows[-1] if len(self._windows) == _MOST else _Window()
            window.read(file, start, stop, reads)
        self._windows = [window, *(other for other in self._windows if other is not window)]
        return window.view(offset, length)


class _Window:
    def __init__(self) -> None:
        self._memory = memoryview(b"")
        self._file: FileBytes | None = None
        self._start = self._stop = 0

    def has(self, file: FileBytes, offset: int, length: int) -> bool:
        return self._file is file and self._start <= offset and offset + length <= self._stop

    def reaches(self, file: FileBytes, start: int) -> bool:
        """Whether there is nothing between this window and another that begins at ``start``."""
        return self._file is file and self._start <= start <= self._stop

    def read(self, file: FileBytes, start: int, stop: int, reads: Reads) -> None:
        """Move to ``start:stop`` of a file.  What it has of this already is not read again."""
        kept = self._memory[start - self._start : self._stop - self._start] if self.reaches(file, start) else b""
        read_from = start + len(kept)
        self._file = None  # until it has been read
        if len(self._memory) < stop - start:
            self._memory = np.empty(stop - start, np.uint8).data
        self._memory[: len(kept)] = kept
        file.fill(self._memory[len(kept) : stop - start], read_from)
        reads(read_from, self._memory[len(kept) : stop - start])
        self._file, self._start, self._stop = file, start, stop

    def view(self, offset: int, length: int) -> memoryview:
        return self._memory[offset - self._start : offset - self._start + length]
