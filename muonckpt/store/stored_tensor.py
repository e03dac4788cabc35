"""The tensors of an open checkpoint, read as numpy arrays: whole, or a box of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..box import Box, Index
from ..errors import SourceError
from ..record import Chunk, StateRecord
from ..vocabulary import Convention
from .reading.bands import within
from .reading.dtypes import dtype
from .reading.payloads import check_chunk, checked_elements, payload_of
from .reading.reader import Reader

Selection = int | slice | EllipsisType | tuple[int | slice | EllipsisType, ...]
"""Numpy's basic indexing, with steps of one."""

_WIDER = "bfloat16"
"""The type that numpy lacks, but float32 represents exactly: its bits are the upper half of float32's."""


class TensorReader:
    """Reads boxes of tensors.  A chunk is located, and checked whole, before any of it is used for the first time.

    Not thread-safe.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._located: dict[tuple[str, Index], Chunk] = {}
        """Chunks whose elements have been located, by the tensor's key and the chunk's first index."""
        self._checked: set[Chunk] = set()

    def words(self, tensor: StateRecord, box: Box) -> NDArray[Any]:
        """The elements of a box, as raw bits, in an array of its own (one more dim of 2 for 16-byte elements).

        Raises:
            SourceError: a chunk is damaged.
            LayoutError: the chunks of the tensor leave a hole or overlap.
        """
        tensor.chunk_layout()
        kind, chunks = dtype(tensor.dtype), self._chunks(tensor, box)
        for chunk in chunks:  # before memory is taken for them
            payload = payload_of(tensor, chunk)
            self._reader.payloads.reaching(payload.file, payload.end)
        words = np.empty((*box.shape, *(2,) * (kind.itemsize > 8)), kind.bits)
        for chunk in chunks:
            common = chunk.box & box
            assert common is not None, "the chunk was chosen because they have elements in common"
            words[within(common, box.lo)] = self._elements(tensor, chunk, common)
        return words

    def _chunks(self, tensor: StateRecord, box: Box) -> list[Chunk]:
        """The located chunks that have elements of a box."""
        needed = [(number, own.lo) for number, own in enumerate(tensor.boxes) if own & box]
        fresh = tensor.chunks.only([number for number, lo in needed if (tensor.key, lo) not in self._located])
        (located,) = self._reader.locate((replace(tensor, chunks=fresh),))
        self._located.update({(tensor.key, chunk.box.lo): chunk for chunk in located.chunks})
        return [self._located[tensor.key, lo] for _, lo in needed]

    def _elements(self, tensor: StateRecord, chunk: Chunk, box: Box) -> NDArray[Any]:
        """The elements of a box of a chunk, which is checked if it has not been."""
        payloads = self._reader.payloads
        if chunk not in self._checked and chunk.box == box:
            elements = checked_elements(payloads, tensor, chunk)
        else:
            if chunk not in self._checked:
                check_chunk(payloads, tensor, chunk)
            place = chunk.stored("").place_at(box.lo)
            elements = payloads.gather(payload_of(tensor, chunk), tensor.dtype, place, box.shape)
        self._checked.add(chunk)
        return elements


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of an open checkpoint.

    ``tensor[10:20]`` reads a box of it, as numpy would index it; negative indices count from the end, steps are one.
    A chunk is checked whole against its recorded checksum when any of it is read for the first time.
    """

    record: StateRecord
    reader: TensorReader

    @property
    def key(self) -> str:
        """The flat key in the checkpoint."""
        return self.record.key

    @property
    def shape(self) -> Index:
        """The logical shape."""
        return self.record.shape

    @property
    def dtype(self) -> str:
        """Torch's name of the element type without the prefix, such as ``"bfloat16"``."""
        return self.record.dtype

    @property
    def name(self) -> str | None:
        """The parameter whose optimizer state it is, where that is recorded."""
        return self.record.name

    @property
    def slot(self) -> str | None:
        """Its slot of optimizer state, where that is recorded."""
        return self.record.slot

    @property
    def convention(self) -> Convention | None:
        """How it accumulates gradients, where it is a momentum buffer and that is recorded."""
        return self.record.convention

    @property
    def layout(self) -> Mapping[str, Any] | None:
        """Its layout on the ranks of the program that wrote it, where that is recorded."""
        return self.record.layout

    @property
    def fingerprint(self) -> str | None:
        """The recorded fingerprint, 16 hex digits."""
        return self.record.fingerprint

    def numpy(self) -> NDArray[Any]:
        """All elements; those of bfloat16 as float32, exactly, because numpy has no bfloat16.

        Raises:
            SourceError: a chunk is damaged; or numpy has no such type, and `bits` gives the raw elements.
            LayoutError: the chunks leave a hole or overlap.
        """
        return self[...]

    def bits(self) -> NDArray[Any]:
        """All elements as unsigned integers of their size; 16-byte elements as two of 8 bytes, on one more dim.

        Raises:
            SourceError: a chunk is damaged.
            LayoutError: the chunks leave a hole or overlap.
        """
        return self.reader.words(self.record, Box.of(self.shape))

    def __getitem__(self, selection: Selection) -> NDArray[Any]:
        indices = [range(size)[index] for index, size in zip(self._indices(selection), self.shape, strict=True)]
        ranges = [range(index, index + 1) if isinstance(index, int) else index for index in indices]
        if any(along.step != 1 for along in ranges):
            raise IndexError(f"tensor {self.key!r}: expected slices with a step of 1, found {selection}")
        lo = tuple(along.start for along in ranges)
        box = Box(lo, tuple(start + len(along) for start, along in zip(lo, ranges, strict=True)))
        elements: NDArray[Any] = _typed(self.reader.words(self.record, box), self.record)
        return elements[tuple(0 if isinstance(index, int) else slice(None) for index in indices)]

    def _indices(self, selection: Selection) -> list[Any]:
        """An integer or a slice for each dim."""
        indices = list(selection) if isinstance(selection, tuple) else [selection]
        indices += [] if Ellipsis in indices else [Ellipsis]
        before = indices.index(Ellipsis)
        missing = len(self.shape) - len(indices) + 1
        if missing < 0 or indices.count(Ellipsis) > 1:
            raise IndexError(f"tensor {self.key!r} has {len(self.shape)} dims, found {len(indices) - 1} indices")
        return [*indices[:before], *[slice(None)] * missing, *indices[before + 1 :]]


def _typed(words: NDArray[Any], tensor: StateRecord) -> NDArray[Any]:
    """Raw bits as numbers."""
    if tensor.dtype == _WIDER:
        return (words.astype(np.uint32) << 16).view(np.float32)
    try:
        kind = np.dtype(tensor.dtype).newbyteorder("<")
    except TypeError:
        raise SourceError(
            f"tensor {tensor.key!r}: numpy has no {tensor.dtype}; bits() gives the raw bits of its elements"
        ) from None
    numbers: NDArray[Any] = words.view(kind)
    return numbers[..., 0] if kind.itemsize > 8 else numbers
