"""Small chunks, read and checked many at a time: those of one dtype and box are rows of one array.

They are compared with everything that `audit` compares, but only `audit` finds the cause.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from ...algebra.box import Box, Index
from ...algebra.fingerprint import box_shares
from ...names.errors import MuonckptError
from ...record.chunks import Boxes, columns_of
from ...record.columns import UNKNOWN, Column, Columns
from ...record.record import Extent, StateRecord, first_rows_of
from ..io.checksums import crc32_of
from ..reading.blocks import join_ranges, slices_within
from ..reading.dtypes import dtype
from ..reading.payloads import BAND_BYTES, Payloads, count_nonfinite

if TYPE_CHECKING:
    from ..formats.torch_save.tensor_item import ItemTemplate

_MAX_RUN_BYTES = 4 * BAND_BYTES
"""Bytes that are read at a time."""

_GAP_BYTES = 512
"""Most bytes between two ranges of a file that are read together, because a call costs as much."""

_FRAME_BYTES = 2048
"""More bytes than an item has besides its elements."""

_Raw = NDArray[np.uint8]
_Flags = NDArray[np.bool_]


def examine_small(
    payloads: Payloads, tensors: Sequence[StateRecord], whole_items: bool
) -> tuple[_Flags, NDArray[np.uint64]]:
    """Compare the chunks of small tensors with their records.

    Args:
        whole_items: the chunks are in items that this package writes, whose bytes are all compared.

    Returns:
        Of each chunk of the tensors, whether all its bytes are as recorded and its elements finite, and its share in
        the fingerprint.  Chunks of large tensors are not sound.
    """
    first_rows = first_rows_of(tensors)
    is_sound, shares = np.zeros(first_rows[-1], np.bool_), np.zeros(first_rows[-1], np.uint64)
    for group in _read_groups(payloads, tensors, whole_items):
        for place in group.places:
            indices, words, agree = group.checked(place)
            if not len(indices):
                continue
            if count_nonfinite(words, group.dtype):
                agree &= [not count_nonfinite(part, group.dtype) for part in words]
            rows = first_rows[group.members[indices]] + place.number
            is_sound[rows] = agree
            shares[rows] = box_shares(words, place.box.lo)
    return is_sound, shares


def stack_small(payloads: Payloads, tensors: Sequence[StateRecord]) -> Iterator[tuple[Sequence[int], NDArray[Any]]]:
    """Yield the words of small tensors that are cut alike, ``[tensors, *shape]``, with the numbers of the tensors.

    Tensors that are large, or do not agree with their checksums, are left out.
    """
    for group in _read_groups(payloads, tensors, whole_items=False):
        first = tensors[group.members[0]]
        if first.coverage_fault:
            continue
        stacked = np.empty((len(group.members), *first.shape), dtype(group.dtype).bits)
        is_sound = np.ones(len(group.members), np.bool_)
        for place in group.places:
            indices, words, agree = group.checked(place)
            part: tuple[Any, ...] = (indices, *slices_within(place.box, (0,) * len(first.shape)))
            stacked[part] = words
            is_read = np.zeros(len(group.members), np.bool_)
            is_read[indices] = agree
            is_sound &= is_read
        yield group.members[is_sound].tolist(), stacked[is_sound]


class _Place(NamedTuple):
    """The place of a chunk's elements among its bytes; ``elements`` are the bytes of the elements.

    ``number`` is the chunk's in its tensor; ``template`` is the item's if whole items are read.
    """

    number: int
    box: Box
    head: int
    elements: int
    length: int
    template: ItemTemplate | None


@lru_cache(maxsize=64)
def _places(name: str, boxes: Boxes, whole_items: bool) -> tuple[_Place, ...]:
    if whole_items:
        from ..formats.torch_save.tensor_item import template  # `stats` and other formats do without
    places = []
    for number, box in enumerate(boxes):
        elements = box.numel * dtype(name).itemsize
        item = template(name, box.shape) if whole_items else None
        head, length = (len(item.head), item.length) if item else (0, elements)
        places.append(_Place(number, box, head, elements, length, item))
    return tuple(places)


@dataclass(frozen=True, slots=True)
class _Group:
    """Small tensors of one dtype and shape that are cut alike, whose chunks were read with those of others.

    Attributes:
        members: the numbers of the tensors.
        rows: of their first chunks in the columns.
        raw: the bytes of whole items, or of payloads.
        start: where those of each row of the columns begin; `UNKNOWN` where they are not read, or not as boxes say.
    """

    payloads: Payloads
    columns: Columns
    dtype: str
    members: Column
    rows: Column
    places: Sequence[_Place]
    raw: _Raw
    start: Column

    def checked(self, place: _Place) -> tuple[Column, NDArray[Any], _Flags]:
        """Return which members have a chunk there that was read, its words, and whether it agrees with its record."""
        indices = np.flatnonzero(self.start[self.rows + place.number] != UNKNOWN)
        rows = self.rows[indices] + place.number
        count = max(len(self.raw) - place.length + 1, 0)
        items = np.lib.stride_tricks.as_strided(self.raw, (count, place.length), (1, 1))[self.start[rows]]
        elements = np.ascontiguousarray(items[:, place.head : place.head + place.elements])
        agree = self._sums_agree(rows, elements)
        # The bytes around them: of a whole item they are compared with its template, and the checksum that torch's zip
        # has in them with the manifest's; in other formats the item may have a checksum of its own.
        if place.template:
            has_frame, checksums = place.template.recorded(items)
            agree &= has_frame & (checksums == self.columns.crc32[rows])
        elif self.payloads.has_inner_checksums:
            agree &= self._insides_agree(rows)
        return indices, elements.view(dtype(self.dtype).bits).reshape(len(rows), *place.box.shape), agree

    def _sums_agree(self, rows: Column, elements: _Raw) -> _Flags:
        """Compare elements ``[rows, bytes]`` with the digests and CRC-32s of the rows, where they have any."""
        length, raw = elements.shape[1], elements.reshape(-1).data
        parts = [raw[number * length : (number + 1) * length] for number in range(len(elements))]
        digests, checksums = self.columns.digest[rows], self.columns.crc32[rows]
        actual = np.frombuffer(b"".join(map(xxhash.xxh3_128_digest, parts)), np.uint8).reshape(-1, 16)
        agree: _Flags = (digests == actual).all(axis=1) | ~self.columns.has_digest[rows]
        agree &= (checksums == UNKNOWN) | (checksums == np.array([crc32_of(part, 0) for part in parts], np.int64))
        return agree

    def _insides_agree(self, rows: Column) -> _Flags:
        """Compare the items of rows with the checksums that their format keeps inside."""

        def agrees(item: Extent) -> bool:
            try:
                self.payloads.check_item(item)
            except MuonckptError:
                return False
            return True

        items = [Extent(file, offset, length) for file, offset, length, *_ in self.columns.rows(rows)]
        return np.array([agrees(item) for item in items], np.bool_)


def _read_groups(payloads: Payloads, tensors: Sequence[StateRecord], whole_items: bool) -> Iterator[_Group]:
    """Read small tensors, as many at a time as fit in memory, and yield those that are cut alike together."""
    for numbers in _runs(tensors):
        run = [tensors[number] for number in numbers]
        columns, first_rows = columns_of(tensor.chunks for tensor in run), first_rows_of(run)
        indices_by_cut: defaultdict[tuple[str, Index, Boxes], list[int]] = defaultdict(list)
        for index, tensor in enumerate(run):
            indices_by_cut[tensor.dtype, tensor.shape, tensor.boxes].append(index)
        # Only chunks of the length and at the place of their boxes are read.
        fits = np.zeros(len(columns), np.bool_)
        cuts = [
            (name, indices, _places(name, boxes, whole_items)) for (name, _, boxes), indices in indices_by_cut.items()
        ]
        for _, indices, places in cuts:
            sizes = [(place.number, place.elements, place.head, place.length) for place in places]
            chunk, elements, head, length = np.array(sizes, np.int64).reshape(-1, 4).T
            rows = first_rows[indices][:, np.newaxis] + chunk
            fits[rows] = columns.payload_length(rows) == elements
            if whole_items:
                fits[rows] &= columns.item_length(rows) == length
                fits[rows] &= columns.payload(rows) == columns.item[rows] + head
        raw, start = _read_rows(payloads, columns, np.flatnonzero(fits), whole_items)
        for name, indices, places in cuts:
            members = np.array(numbers, np.int64)[indices]
            yield _Group(payloads, columns, name, members, first_rows[indices], places, raw, start)


def _runs(tensors: Sequence[StateRecord]) -> Iterator[list[int]]:
    """Yield the numbers of small tensors, as many at a time as are read at once."""
    run: list[int] = []
    length = 0
    for number, tensor in enumerate(tensors):
        size = dtype(tensor.dtype).itemsize
        if tensor.chunks.strides is None and size <= 8 and tensor.boxes.elements * size <= BAND_BYTES:
            run.append(number)
            length += tensor.boxes.elements * size + _FRAME_BYTES * len(tensor.boxes)
            if length > _MAX_RUN_BYTES:
                yield run
                run, length = [], 0
    if run:
        yield run


def _read_rows(payloads: Payloads, columns: Columns, rows: Column, whole_items: bool) -> tuple[_Raw, Column]:
    """Return the bytes of rows, whole items or payloads, and where each row of the columns begins in them."""
    starts = np.full(len(columns), UNKNOWN, np.int64)
    if not len(rows):
        return np.zeros(0, np.uint8), starts
    # Ranges near each other are read together, file by file.
    offset = columns.item[rows] if whole_items else columns.payload(rows)
    order = np.lexsort((offset, columns.file[rows]))
    rows, offset = rows[order], offset[order]
    file, length = columns.file[rows], columns.item_length(rows) if whole_items else columns.payload_length(rows)
    ranges = join_ranges(offset, offset + length, _GAP_BYTES, file=file)
    bounds = np.append(0, np.cumsum(ranges.stop - ranges.start))
    raw = np.empty(int(bounds[-1]), np.uint8)
    starts[rows] = offset + np.repeat(bounds[:-1] - ranges.start, np.diff(np.append(ranges.first, len(rows))))
    # Bytes that cannot be read count as not read.
    places = zip(
        file[ranges.first].tolist(), ranges.start.tolist(), ranges.stop.tolist(), bounds.tolist(), strict=False
    )
    for (number, lo, hi, start), members in zip(places, ranges.members(len(rows)), strict=True):
        try:
            payloads.open_file(columns.names[number], hi).fill(raw[start : start + hi - lo].data, lo)
        except MuonckptError:
            starts[rows[members.start : members.stop]] = UNKNOWN
    return raw, starts
