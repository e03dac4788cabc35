"""ChunkReads the elements of an output tensor from wherever they lie in the source or in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from ...box import Box, Index
from ...layout import Buffer, Fragment, Place
from ...record import Chunk, Extent, StateRecord
from ...store.reading.bands import within
from ...store.reading.dtypes import dtype, itemsize
from ...store.reading.payloads import Payloads, as_words, payload_of
from ...store.reading.strided import span, strided
from ..translate.conventions import Words

ChunkReads = Callable[[Chunk, int, memoryview], None]
"""Receives a chunk of the source, and bytes as they were read from this byte of its payload on."""

Room = Callable[[Index, str], Words]
"""Returns memory for words of this shape and type, with whatever is in it."""


def unseen(chunk: Chunk, start: int, raw: memoryview) -> None:
    """Nobody looks at what is read."""


class Elements(Protocol):
    """A tensor whose elements lie in chunks of a source or in memory, by buffer."""

    @property
    def source_record(self) -> StateRecord: ...

    @property
    def chunks(self) -> Mapping[Buffer, Chunk]: ...

    @property
    def in_memory(self) -> Mapping[Buffer, bytes]: ...


def bytes_of(payloads: Payloads, tensor: Elements, buffer: Buffer, start: int, numel: int) -> memoryview:
    """The bytes of ``numel`` elements from element ``start`` of a buffer; the next call may overwrite them."""
    record = tensor.source_record
    size = itemsize(record.dtype)
    if buffer in tensor.in_memory:
        return memoryview(tensor.in_memory[buffer])[start * size : (start + numel) * size]
    payload = payload_of(record, tensor.chunks[buffer])
    return payloads.glance(Extent(payload.file, payload.offset + start * size, numel * size))


def gather_elements(
    payloads: Payloads,
    tensor: Elements,
    fragments: Iterable[Fragment],
    box: Box,
    reads: ChunkReads = unseen,
    room: Room = np.empty,
) -> Words:
    """The elements of a box as the source has them, dense.  ``fragments`` must cover the box, without overlaps."""
    kind = dtype(tensor.source_record.dtype)
    halves = (2,) if kind.itemsize > 8 else ()
    words = room((*box.shape, *halves), kind.bits)
    for fragment in fragments:
        common = fragment.box & box
        if common is not None:
            part: tuple[Any, ...] = (*within(common, box.lo), ...)  # so that without dims it is a view, too
            _copy_from(payloads, tensor, fragment.place_at(common.lo), common.shape, words[part], reads)
    return words


def _copy_from(payloads: Payloads, tensor: Elements, place: Place, shape: Index, out: Words, reads: ChunkReads) -> None:
    """Copy the elements of a box of this shape; reads nothing before the first or after the last of them."""
    record = tensor.source_record
    name = record.dtype
    if place.buffer not in tensor.in_memory:
        chunk = tensor.chunks[place.buffer]
        payload = payload_of(record, chunk)
        payloads.gather_into(
            out, payload, name, place, shape, lambda offset, raw: reads(chunk, offset - payload.offset, raw)
        )
        return
    numel = span(shape, place.strides)
    words = as_words(bytes_of(payloads, tensor, place.buffer, place.offset, numel), name, (numel,))
    out[...] = strided(words, place.strides, shape)
