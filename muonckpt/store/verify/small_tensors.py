"""Tensors in small chunks, checked whole and many at a time, where `audit` makes calls for each chunk.

They are compared with everything that `audit` compares, but only `audit` finds the cause.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from ...algebra.box import Box, Index
from ...algebra.fingerprint import as_hex, box_shares
from ...names.errors import MuonckptError
from ...record.chunks import Boxes, columns_of
from ...record.columns import UNKNOWN, Column, Columns
from ...record.record import Extent, StateRecord
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


@dataclass(frozen=True, slots=True)
class Examination:
    """The outcome of comparing a tensor with its record.

    Attributes:
        fingerprint: None unless all checksums and the fingerprint agree, and each element is there once and finite.
        shares: in the fingerprint, of the chunks that are sound, by their numbers.
    """

    fingerprint: str | None = None
    shares: Mapping[int, int] = field(default_factory=dict)


def examine_small(
    payloads: Payloads, tensors: Sequence[StateRecord], whole_items: bool
) -> tuple[list[Examination], bool]:
    """Compare small tensors with their records; return the examinations of all, which are empty for large ones.

    Args:
        whole_items: the chunks are in items that this package writes, whose bytes are all compared.

    Returns:
        Beside the examinations, whether the items are *framed*: those of their boxes, as the manifest says.
    """
    examinations = [Examination()] * len(tensors)
    framed = True
    for numbers in _runs(tensors):
        run = _Run.read(payloads, [tensors[number] for number in numbers], whole_items)
        for group in run.groups:
            sound, shares, group_framed = run.check(group)
            framed &= group_framed
            # The shares of chunks sum up to the fingerprint; where that disagrees, sound chunks need not be read again.
            sums = map(as_hex, shares.sum(axis=1, dtype=np.uint64).tolist())
            for row, (member, fingerprint) in enumerate(zip(group.members, sums, strict=True)):
                number = numbers[member]
                if group.tiles and sound[row].all() and tensors[number].fingerprint in (None, fingerprint):
                    examinations[number] = Examination(fingerprint)
                else:
                    chunks = np.flatnonzero(sound[row])
                    chunk_shares = zip(chunks.tolist(), shares[row, chunks].tolist(), strict=True)
                    examinations[number] = Examination(None, dict(chunk_shares))
    if whole_items and framed:
        framed = all(_is_framed(payloads, tensor) for tensor in tensors if not _is_small(tensor))
    return examinations, framed


def stack_small(payloads: Payloads, tensors: Sequence[StateRecord]) -> Iterator[tuple[Sequence[int], NDArray[Any]]]:
    """Yield the words of small tensors that are cut alike, ``[tensors, *shape]``, with the numbers of the tensors.

    Tensors that are large, or do not agree with their checksums, are left out.
    """
    for numbers in _runs(tensors):
        run = _Run.read(payloads, [tensors[number] for number in numbers], False)
        for group in run.groups:
            words = np.empty((len(group.members), *group.shape), dtype(group.dtype).bits)
            sound = np.full(len(group.members), group.tiles)
            for place, rows in zip(group.places, group.rows.T, strict=True):
                if not place.elements:
                    continue
                # A tensor is left out when one of its chunks cannot be read or does not agree.
                sound &= run.start[rows] != UNKNOWN
                if not sound.any():
                    break
                rows = rows[sound]
                elements = run.items(rows, place.length)
                part: tuple[Any, ...] = (sound, *slices_within(place.box, (0,) * len(group.shape)))
                words[part] = elements.view(words.dtype).reshape(-1, *place.box.shape)
                agree = run.sums_agree(rows, elements)
                # Where nothing else is recorded, the item may have a checksum inside.
                bare = ~run.columns.has_digest[rows] & (run.columns.crc32[rows] == UNKNOWN)
                agree[bare] &= run.insides_agree(rows[bare])
                sound[sound] = agree
            yield [numbers[member] for member in np.array(group.members)[sound]], words[sound]


def _is_small(tensor: StateRecord) -> bool:
    size = dtype(tensor.dtype).itemsize
    return tensor.chunks.strides is None and size <= 8 and tensor.boxes.elements * size <= BAND_BYTES


def _runs(tensors: Sequence[StateRecord]) -> Iterator[list[int]]:
    """Yield the numbers of small tensors, as many at a time as are read at once."""
    run: list[int] = []
    length = 0
    for number, tensor in enumerate(tensors):
        if _is_small(tensor):
            run.append(number)
            length += tensor.boxes.elements * dtype(tensor.dtype).itemsize + _FRAME_BYTES * len(tensor.boxes)
            if length > _MAX_RUN_BYTES:
                yield run
                run, length = [], 0
    if run:
        yield run


class _Place(NamedTuple):
    """The place of a chunk's elements among its bytes; ``elements`` are the bytes of the elements.

    ``template`` is the item's if whole items are read.
    """

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
    for box in boxes:
        elements = box.numel * dtype(name).itemsize
        item = template(name, box.shape) if whole_items else None
        head, length = (len(item.head), item.length) if item else (0, elements)
        places.append(_Place(box, head, elements, length, item))
    return tuple(places)


class _Group(NamedTuple):
    """Tensors of one dtype and shape that are cut alike.

    Attributes:
        members: their numbers in the run.
        rows: of their chunks in the columns of the run, ``[tensors, boxes]``.
        tiles: whether the boxes have each element once.
    """

    dtype: str
    shape: Index
    members: Sequence[int]
    rows: Column
    places: Sequence[_Place]
    tiles: bool


@dataclass(frozen=True, slots=True)
class _Run:
    """Small tensors whose chunks were read together.

    Attributes:
        raw: the bytes of whole items, or of payloads.
        start: where those of each row of the columns begin; `UNKNOWN` where they are not read, or not as boxes say.
    """

    payloads: Payloads
    columns: Columns
    groups: Sequence[_Group]
    raw: _Raw
    start: Column

    @classmethod
    def read(cls, payloads: Payloads, tensors: Sequence[StateRecord], whole_items: bool) -> _Run:
        columns = columns_of(tensor.chunks for tensor in tensors)
        first_rows = np.cumsum([0, *(len(tensor.boxes) for tensor in tensors)])
        members: defaultdict[tuple[str, Index, Boxes], list[int]] = defaultdict(list)
        for number, tensor in enumerate(tensors):
            members[tensor.dtype, tensor.shape, tensor.boxes].append(number)
        groups = []
        fits = np.zeros(len(columns), np.bool_)
        for (name, shape, boxes), numbers in members.items():
            rows = first_rows[numbers][:, np.newaxis] + np.arange(len(boxes))
            places = _places(name, boxes, whole_items)
            groups.append(_Group(name, shape, numbers, rows, places, _tiles(tensors[numbers[0]])))
            # Only chunks of the length and at the place of their boxes are read.
            sizes = [(place.elements, place.head, place.length) for place in places]
            elements, head, length = np.array(sizes, np.int64).reshape(-1, 3).T
            fits[rows] = (columns.payload_length(rows) == elements) & (elements > 0)
            if any(place.template for place in places):
                items = columns.item[rows]
                fits[rows] &= (columns.item_length(rows) == length) & (columns.payload(rows) == items + head)
        return cls(payloads, columns, groups, *_read_rows(payloads, columns, np.flatnonzero(fits), whole_items))

    def items(self, rows: Column, length: int) -> _Raw:
        """Return the bytes of rows that were read, ``[rows, length]``."""
        windows = np.lib.stride_tricks.as_strided(self.raw, (len(self.raw) - length + 1, length), (1, 1))
        items: _Raw = windows[self.start[rows]]
        return items

    def check(self, group: _Group) -> tuple[_Flags, NDArray[np.uint64], bool]:
        """Return which chunks ``[tensors, boxes]`` are sound, their fingerprint shares, and whether all are framed.

        A chunk is sound if its elements are as recorded and finite, and framed if the item around them is one that this
        package writes, so that it needs no parsing.
        """
        sound, framed = np.ones(group.rows.shape, np.bool_), True
        shares = np.zeros(group.rows.shape, np.uint64)
        for number, (place, rows) in enumerate(zip(group.places, group.rows.T, strict=True)):
            # The items of empty boxes are not read here, so nothing is known of their frames.
            if not place.elements:
                framed = False
                continue
            # A chunk that could not be read, or that lies elsewhere than its box says, is not sound.
            is_read = self.start[rows] != UNKNOWN
            sound[:, number] = is_read
            framed &= bool(is_read.all())
            if not is_read.any():
                continue
            rows = rows[is_read]
            # Elements are compared with their digests and checksums, and have to be finite.
            items = self.items(rows, place.length)
            elements = np.ascontiguousarray(items[:, place.head : place.head + place.elements])
            words = elements.view(dtype(group.dtype).bits).reshape(len(rows), *place.box.shape)
            agree = self.sums_agree(rows, elements)
            if count_nonfinite(words, group.dtype):
                agree &= [not count_nonfinite(part, group.dtype) for part in words]
            # The bytes around them: of a whole item they are compared with its template, and the checksum that torch's
            # zip has in them with the manifest's; in other formats the item may have a checksum of its own.
            if place.template:
                has_frame, checksums = place.template.recorded(items)
                framed &= bool(has_frame.all() and (checksums == self.columns.crc32[rows]).all())
            else:
                agree &= self.insides_agree(rows)
            sound[is_read, number] = agree
            shares[is_read, number] = box_shares(words, place.box.lo)
        return sound, shares, framed

    def sums_agree(self, rows: Column, elements: _Raw) -> _Flags:
        """Compare elements ``[rows, bytes]`` with the digests and CRC-32s of the rows, where they have any."""
        length, raw = elements.shape[1], elements.reshape(-1).data
        parts = [raw[start : start + length] for start in range(0, len(raw), length)]
        digests, checksums = self.columns.digest[rows], self.columns.crc32[rows]
        actual = np.frombuffer(b"".join(map(xxhash.xxh3_128_digest, parts)), np.uint8).reshape(-1, 16)
        agree: _Flags = (digests == actual).all(axis=1) | ~self.columns.has_digest[rows]
        agree &= (checksums == UNKNOWN) | (checksums == np.array([crc32_of(part, 0) for part in parts], np.int64))
        return agree

    def insides_agree(self, rows: Column) -> _Flags:
        """Compare the items of rows with the checksums that their format keeps inside."""

        def agrees(item: Extent) -> bool:
            try:
                self.payloads.check_item(item)
            except MuonckptError:
                return False
            return True

        items = [Extent(file, offset, length) for file, offset, length, *_ in self.columns.rows(rows)]
        return np.array([agrees(item) for item in items], np.bool_)


def _tiles(tensor: StateRecord) -> bool:
    try:
        tensor.chunk_layout()
    except MuonckptError:  # `audit` names the fault
        return False
    return True


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


def _is_framed(payloads: Payloads, tensor: StateRecord) -> bool:
    """Return whether the items of a large tensor have the bytes around their elements that we write."""
    places = _places(tensor.dtype, tensor.boxes, True)
    try:
        for (file, item, length, payload, _, _, crc32), place in zip(tensor.chunks.rows, places, strict=True):
            template = place.template
            if template is None or (template.length, item + len(template.head)) != (length, payload):
                return False
            # The bytes before and after its elements.
            head = bytes(payloads.read_scratch(Extent(file, item, len(template.head))))
            tail = bytes(
                payloads.read_scratch(Extent(file, item + template.tail_offset, length - template.tail_offset))
            )
            if template.crc32_of(head, tail) != crc32:
                return False
    except MuonckptError:
        return False
    return True
