"""New files, on the disk or in the store when they are done."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from threading import local

from .location import Location, Remote, Upload

_WRITEBACK_BYTES = 2 << 20
"""Bytes after which the disk is asked to write."""

_WRITE_BYTES = 256 << 10
"""Most bytes of one write.  For larger ones file systems allocate larger pages, which a guest that has returned
memory to its host must request again: measured at 4 GB, half the time in the kernel."""


def create_file(file: Location, length: int) -> AbstractContextManager[Writing]:
    """Make a file of ``length`` bytes, zeros where nothing is written; it is on the disk when the block has ended."""
    return file.upload(length) if isinstance(file, Remote) else Output(file, length)


def write_synced(file: Location, data: bytes) -> None:
    """Write a small new file and wait until it is on the disk or in the store."""
    write_parts(file, [data])


def write_parts(file: Location, parts: Iterable[bytes]) -> None:
    """Write a small new file from its parts, as `write_synced` does."""
    if isinstance(file, Remote):
        file.write(b"".join(parts))
        return
    with file.open("xb") as stream:
        stream.writelines(parts)
        stream.flush()
        os.fsync(stream.fileno())


class Output:
    """Writes a new local file, from several threads.

    Its space is allocated first, so that a full disk is noticed before any work.
    """

    rewinds = True

    def __init__(self, path: Path, length: int) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._length = length
        self._writeback = local()

    def __enter__(self) -> Output:
        # Allocated at once, a file is also in few pieces on the disk.
        try:
            os.posix_fallocate(self._handle, 0, self._length)
        except BaseException:
            os.close(self._handle)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                os.fsync(self._handle)
        finally:
            os.close(self._handle)

    def write(self, data: bytes | memoryview, offset: int) -> int:
        """Write at ``offset``; return the end."""
        start, remaining = getattr(self._writeback, "start", offset), memoryview(data)
        if not start <= offset <= start + _WRITEBACK_BYTES:  # this thread goes on elsewhere
            start = offset
        while remaining:  # a signal may cut a write short
            count = os.pwrite(self._handle, remaining[:_WRITE_BYTES], offset)
            remaining, offset = remaining[count:], offset + count
        # Linux starts writing dirty pages when asked to drop them.  Otherwise the disk would be idle until fsync().
        if offset - start >= _WRITEBACK_BYTES:
            os.posix_fadvise(self._handle, start, offset - start, os.POSIX_FADV_DONTNEED)
            start = offset
        self._writeback.start = start
        return offset


Writing = Output | Upload
"""A file that is being written; if it ``rewinds``, bytes before the last write may still be written."""
