"""Small tensors, read and checked many at a time: those of one dtype that are cut alike are rows of one array.

They are compared with everything that `audit` compares, but only `audit` finds the cause.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from ...algebra.box import Box, Index
from ...algebra.grouping import batches
from ...names.errors import MuonckptError
from ...record.chunks import Boxes, columns_of
from ...record.columns import UNKNOWN, Column, Columns
from ...record.record import Extent, StateRecord, first_rows_of
from ..io.checksums import crc32_of
from ..reading.blocks import join_ranges, slices_within
from ..reading.dtypes import dtype, itemsize
from ..reading.payloads import BAND_BYTES, Payloads

if TYPE_CHECKING:
    from ..formats.torch_save.tensor_item import ItemTemplate

_MAX_RUN_BYTES = 4 * BAND_BYTES
"""Bytes that are read at a time."""

_GAP_BYTES = 512
"""Most bytes between two ranges of a file that are read together, because a call costs as much."""

_FRAME_BYTES = 2048
"""More bytes than an item has besides its elements."""


class AlikeChunks(NamedTuple):
    """The chunks of one box of tensors of one dtype.

    Attributes:
        words: ``[chunks, *shape]``.
        agree: which chunks were read, and have no checksum or frame that is not as recorded.
    """

    box: Box
    words: NDArray[Any]
    agree: NDArray[np.bool_]


def read_small(
    payloads: Payloads, tensors: Sequence[StateRecord], whole_items: bool
) -> Iterator[tuple[Column, Sequence[AlikeChunks]]]:
    """Read small tensors, as many at a time as fit in memory; large ones are left out.

    Args:
        whole_items: the chunks are in items that this package writes, whose bytes are all compared.

    Yields:
        The numbers of tensors that are cut alike, and their chunks, box by box.
    """

    def size_of(number: int) -> int:
        tensor = tensors[number]
        return tensor.boxes.elements * itemsize(tensor.dtype) + _FRAME_BYTES * len(tensor.boxes)

    small = []
    for number, tensor in enumerate(tensors):
        size = itemsize(tensor.dtype)
        if tensor.chunks.strides is None and size <= 8 and tensor.boxes.elements * size <= BAND_BYTES:
            small.append(number)
    for numbers in batches(small, size_of, _MAX_RUN_BYTES):
        run = [tensors[number] for number in numbers]
        columns, first_rows = columns_of(tensor.chunks for tensor in run), first_rows_of(run)
        indices_by_cut: defaultdict[tuple[str, Index, Boxes], list[int]] = defaultdict(list)
        for index, tensor in enumerate(run):
            indices_by_cut[tensor.dtype, tensor.shape, tensor.boxes].append(index)
        # Only chunks of the length and at the place of their boxes are read.
        fits = np.zeros(len(columns), np.bool_)
        for (name, _, boxes), indices in indices_by_cut.items():
            for number, box in enumerate(boxes):
                rows = first_rows[indices] + number
                fits[rows] = columns.payload_length(rows) == box.numel * itemsize(name)
                if whole_items:
                    template = _template(name, box.shape)
                    fits[rows] &= columns.item_length(rows) == template.length
                    fits[rows] &= columns.payload(rows) == columns.item[rows] + len(template.head)
        read = _Rows.read(payloads, columns, np.flatnonzero(fits), whole_items)
        for (name, _, boxes), indices in indices_by_cut.items():
            first = first_rows[indices]
            alike = [read.checked(first + number, name, box) for number, box in enumerate(boxes)]
            yield np.array(numbers, np.int64)[indices], alike


def stack_small(payloads: Payloads, tensors: Sequence[StateRecord]) -> Iterator[tuple[Sequence[int], NDArray[Any]]]:
    """Yield the words of small tensors that are cut alike, ``[tensors, *shape]``, with the numbers of the tensors.

    Tensors that are large, or do not agree with their checksums, are left out.
    """
    for members, alike in read_small(payloads, tensors, whole_items=False):
        first = tensors[members[0]]
        if first.coverage_fault:
            continue
        stacked = np.empty((len(members), *first.shape), dtype(first.dtype).bits)
        is_sound = np.ones(len(members), np.bool_)
        for box, words, agree in alike:
            stacked[(slice(None), *slices_within(box, (0,) * len(first.shape)))] = words
            is_sound &= agree
        yield members[is_sound].tolist(), stacked[is_sound]


def _template(name: str, shape: Index) -> ItemTemplate:
    from ..formats.torch_save.tensor_item import template  # `stats` and other formats do without

    return template(name, shape)


class _Rows(NamedTuple):
    """The bytes of rows of columns, whole items or payloads.

    Attributes:
        starts: where each row begins in ``raw``; `UNKNOWN` where it was not or cannot be read.
    """

    payloads: Payloads
    columns: Columns
    whole_items: bool
    raw: NDArray[np.uint8]
    starts: Column

    @classmethod
    def read(cls, payloads: Payloads, columns: Columns, rows: Column, whole_items: bool) -> _Rows:
        starts = np.full(len(columns), UNKNOWN, np.int64)
        # Ranges near each other are read together, file by file.
        offset = columns.item[rows] if whole_items else columns.payload(rows)
        order = np.lexsort((offset, columns.file[rows]))
        rows, offset = rows[order], offset[order]
        file, length = columns.file[rows], columns.item_length(rows) if whole_items else columns.payload_length(rows)
        ranges = join_ranges(offset, offset + length, _GAP_BYTES, file=file)
        bounds = np.append(0, np.cumsum(ranges.stop - ranges.start)).tolist()
        raw = np.empty(bounds[-1], np.uint8)
        for number, members in enumerate(ranges.members(len(rows))):
            part, lo = raw[bounds[number] : bounds[number + 1]], int(ranges.start[number])
            of_range = slice(members.start, members.stop)
            try:
                payloads.open_file(columns.names[file[members.start]], lo + len(part)).fill(part.data, lo)
            except MuonckptError:
                continue
            starts[rows[of_range]] = offset[of_range] - lo + bounds[number]
        return cls(payloads, columns, whole_items, raw, starts)

    def checked(self, rows: Column, name: str, box: Box) -> AlikeChunks:
        """Take the chunks of one box, and compare them with their records."""
        template = _template(name, box.shape) if self.whole_items else None
        length = box.numel * itemsize(name)
        head, item_length = (len(template.head), template.length) if template else (0, length)
        starts = self.starts[rows]
        agree = starts != UNKNOWN
        items = np.zeros((len(rows), item_length), np.uint8)
        if agree.any():
            places = np.lib.stride_tricks.as_strided(self.raw, (len(self.raw) - item_length + 1, item_length), (1, 1))
            items[agree] = places[starts[agree]]
        elements = np.ascontiguousarray(items[:, head : head + length])
        # Digests and CRC-32s, where the rows have any.
        parts = [part.data for part in elements]
        digests, checksums = self.columns.digest[rows], self.columns.crc32[rows]
        actual = np.frombuffer(b"".join(map(xxhash.xxh3_128_digest, parts)), np.uint8).reshape(-1, 16)
        agree &= (digests == actual).all(axis=1) | ~self.columns.has_digest[rows]
        agree &= (checksums == UNKNOWN) | (checksums == np.array([crc32_of(part, 0) for part in parts], np.int64))
        # The bytes around them: of a whole item they are compared with its template, and the checksum that torch's zip
        # has in them with the manifest's; in other formats the item may have a checksum of its own.
        if template:
            has_frame, inner_checksums = template.recorded(items)
            agree &= has_frame & (inner_checksums == checksums)
        elif self.payloads.has_inner_checksums:
            for number, (file, offset, length, *_) in enumerate(self.columns.rows(rows)):
                try:
                    self.payloads.check_item(Extent(file, offset, length))
                except MuonckptError:
                    agree[number] = False
        return AlikeChunks(box, elements.view(dtype(name).bits).reshape(len(rows), *box.shape), agree)
