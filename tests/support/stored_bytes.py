"""Bytes of a checkpoint's files, read without the package's readers; and how many a process has read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from isal import isal_zlib

from muonckpt.record.record import Extent, StateRecord
from muonckpt.store.reading.dtypes import DTYPES


def bytes_read() -> int:
    """Return the bytes that read calls of this process got, of files and sockets alike."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def raw(path: Path, extent: Extent) -> bytes:
    with (path / extent.file).open("rb") as stream:
        stream.seek(extent.offset)
        return stream.read(extent.length)


def assemble(path: Path, tensor: StateRecord) -> bytes:
    """The whole tensor in row-major order, put together from its payloads, each checked with its CRC-32."""
    kind = DTYPES[tensor.dtype]
    whole = np.zeros((*tensor.shape, kind.itemsize), np.uint8)
    counts = np.zeros(tensor.shape, np.uint8)
    for chunk in tensor.chunks:
        assert chunk.payload is not None
        payload = raw(path, chunk.payload)
        assert isal_zlib.crc32(payload) == chunk.crc32
        window = tuple(map(slice, chunk.box.lo, chunk.box.hi))
        whole[window] = np.frombuffer(payload, np.uint8).reshape(*chunk.box.shape, kind.itemsize)
        counts[window] += 1
    assert (counts == 1).all()
    return whole.tobytes()
