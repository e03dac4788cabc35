"""Elements on their way from a checkpoint in any layout to a file: gathered box by box, summed as they pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..box import Box
from ..layout import dense
from ..record import StateRecord
from .band import bands, within
from .dtypes import dtype
from .payload import Payloads, payload_of
from .sums import Sums

Fetch = Callable[[StateRecord, Box], NDArray[Any]]
"""Gives the elements of a box of a tensor: dense unsigned words in the box's shape, 16-byte elements as two."""


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A file to write: the number of tensors of which it has elements, their bytes, and its length in bytes."""

    name: str
    count: int
    payload: int
    length: int


def assemble(payloads: Payloads, tensor: StateRecord, box: Box) -> NDArray[Any]:
    """The elements of ``box`` from the chunks that hold them; `StateRecord.chunk_layout` proves that some do."""
    kind = dtype(tensor.dtype)
    halves = (2,) if kind.itemsize > 8 else ()
    words = np.empty((*box.shape, *halves), kind.bits)
    for chunk in tensor.chunks:
        common = chunk.box & box
        if common is not None:
            place = dense(chunk.box, chunk.item.file).at(common.lo)
            found = payloads.gather(payload_of(tensor, chunk), tensor.dtype, place, common.shape)
            words[within(common, box.lo)] = found
    return words


def passing(fetch: Fetch, tensor: StateRecord, box: Box, most: int, sums: Sums) -> Iterator[memoryview]:
    """The bytes of a box in row-major order, ``most`` bytes at a time, added to the sums."""
    for band in bands(box, max(most // dtype(tensor.dtype).itemsize, 1)):
        for part in band.boxes:
            yield sums.add(fetch(tensor, part), part.lo)
