"""Elements on their way from a checkpoint in any layout to a file: gathered box by box, summed as they pass."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..box import Box
from ..record import StateRecord
from .band import bands, within
from .dtypes import dtype
from .payload import Payloads, elements
from .sums import Sums

Fetch = Callable[[StateRecord, Box], NDArray[Any]]
"""Gives the elements of a box of a tensor: dense unsigned words in the box's shape, 16-byte elements as two."""


def assemble(payloads: Payloads, tensor: StateRecord, box: Box) -> NDArray[Any]:
    """The elements of ``box`` from the chunks that hold them; `StateRecord.chunk_layout` proves that some do."""
    kind = dtype(tensor.dtype)
    halves = (2,) if kind.itemsize > 8 else ()
    words = np.empty((*box.shape, *halves), kind.bits)
    for chunk in tensor.chunks:
        common = chunk.box & box
        if common is not None:
            words[within(common, box.lo)] = elements(payloads, tensor, chunk)[within(common, chunk.box.lo)]
    return words


def passing(fetch: Fetch, tensor: StateRecord, box: Box, most: int, sums: Sums) -> Iterator[memoryview]:
    """The bytes of a box in row-major order, ``most`` bytes at a time, added to the sums."""
    for band in bands(box, max(most // dtype(tensor.dtype).itemsize, 1)):
        for part in band.boxes:
            yield sums.add(fetch(tensor, part), part.lo)


def create(file: Path, length: int) -> int:
    """A descriptor of a new file of ``length`` bytes.  The space is taken first, so that a full disk is met early."""
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.posix_fallocate(handle, 0, length)
    except BaseException:
        os.close(handle)
        raise
    return handle


def write_at(handle: int, data: bytes | memoryview, at: int) -> int:
    """Write all of ``data`` at byte ``at``; returns the byte behind it."""
    left = memoryview(data)
    while left:
        written = os.pwrite(handle, left, at)
        left, at = left[written:], at + written
    return at
