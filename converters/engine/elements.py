"""Reads the elements of an output tensor from wherever they lie in the source or in memory."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...box import Box, Index
from ...layout import Buffer, Fragment, Place
from ...record import Extent
from ...store.reading.bands import within
from ...store.reading.dtypes import dtype, itemsize
from ...store.reading.payloads import Payloads, as_words, payload_of
from ...store.reading.strided import span, strided
from ..translate.conventions import Words, scaled
from .outputs import OutputTensor


def bytes_of(payloads: Payloads, tensor: OutputTensor, buffer: Buffer, start: int, numel: int) -> memoryview:
    """The bytes of ``numel`` elements from element ``start`` of a buffer; the next call may overwrite them."""
    record = tensor.source_record
    size = itemsize(record.dtype)
    if buffer in tensor.in_memory:
        return memoryview(tensor.in_memory[buffer])[start * size : (start + numel) * size]
    payload = payload_of(record, tensor.chunks[buffer])
    return payloads.glance(Extent(payload.file, payload.offset + start * size, numel * size))


def gather_elements(payloads: Payloads, tensor: OutputTensor, fragments: Iterable[Fragment], box: Box) -> Words:
    """The elements of a box, dense and as they will be written.  ``fragments`` must cover the box, without overlaps."""
    held = tensor.source_record.dtype
    kind = dtype(held)
    halves = (2,) if kind.itemsize > 8 else ()
    words = np.empty((*box.shape, *halves), kind.bits)
    for fragment in fragments:
        common = fragment.box & box
        if common is not None:
            words[within(common, box.lo)] = _elements_at(payloads, tensor, fragment.place_at(common.lo), common.shape)
    if not tensor.computed:
        return words
    return scaled(words, held, 1.0 if tensor.scale is None else tensor.scale, tensor.record.dtype)


def _elements_at(payloads: Payloads, tensor: OutputTensor, place: Place, shape: Index) -> Words:
    """The elements of a box of this shape at a place; reads nothing before the first or after the last of them."""
    record = tensor.source_record
    name = record.dtype
    if place.buffer not in tensor.in_memory:
        return payloads.gather(payload_of(record, tensor.chunks[place.buffer]), name, place, shape)
    numel = span(shape, place.strides)
    words = as_words(bytes_of(payloads, tensor, place.buffer, place.offset, numel), name, (numel,))
    return strided(words, place.strides, shape)
