"""Tensors in small chunks, checked whole and many at a time, where `audit` makes calls for each chunk.

They are compared with everything that `audit` compares, but it is left to `audit` to find out what is wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

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
from ..io.ranges import join_ranges
from ..reading.blocks import slices_within
from ..reading.dtypes import dtype
from ..reading.payloads import BAND_BYTES, Payloads, count_nonfinite

if TYPE_CHECKING:
    from ..formats.torch_save.tensor_item import ItemTemplate

_MOST = 4 * BAND_BYTES
"""Bytes that are read at a time."""

_GAP = 512
"""Most bytes between two ranges of a file that are read together, because a call costs as much."""

_FRAME = 2048
"""More bytes than an item has besides its elements."""

_Raw = NDArray[np.uint8]
_Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Examined:
    """What is known of a tensor.

    Attributes:
        fingerprint: its fingerprint, if it agrees with all its checksums and its fingerprint, and has each element once
            and finite; else None.
        shares: of the chunks that agree with their checksums, and whose elements are finite, their shares of the
            fingerprint, by their numbers.
    """

    fingerprint: str | None = None
    shares: Mapping[int, int] = field(default_factory=dict)


_UNKNOWN = Examined()


def examined(payloads: Payloads, tensors: Sequence[StateRecord], ours: bool) -> tuple[list[Examined], bool]:
    """Read the small ones of these tensors, and compare them with their records.

    Args:
        ours: the chunks are in items that this package writes, of which all bytes are compared.

    Returns:
        What is known of each tensor, nothing of large ones.  And whether the items are *framed*: they are those of
        their boxes, with elements and CRC-32 where the manifest says.
    """
    known = [_UNKNOWN] * len(tensors)
    framed = True
    for run in _runs(tensors):
        members = [tensors[number] for number in run]
        columns, groups, read = _read_run(payloads, members, ours)
        for (name, _, boxes), (numbers, rows) in groups.items():
            sound, group_framed, shares = _judged(payloads, columns, rows, read, _places(name, boxes, ours), name)
            framed &= group_framed
            every = np.all(sound, axis=1) if _tiles(members[numbers[0]]) else np.zeros(len(numbers), np.bool_)
            computed = map(as_hex, shares.sum(axis=1, dtype=np.uint64).tolist())
            for row, (number, good, own) in enumerate(zip(numbers, every.tolist(), computed, strict=True)):
                if good and members[number].fingerprint in (None, own):
                    known[run[number]] = Examined(own)
                else:
                    found = np.flatnonzero(sound[row])
                    of_chunks = zip(found.tolist(), shares[row, found].tolist(), strict=True)
                    known[run[number]] = Examined(None, dict(of_chunks))
    if ours and framed:
        framed = all(_is_framed(payloads, tensor) for tensor in tensors if not _is_small(tensor))
    return known, framed


def _is_small(tensor: StateRecord) -> bool:
    size = dtype(tensor.dtype).itemsize
    return tensor.chunks.strides is None and size <= 8 and tensor.boxes.elements * size <= BAND_BYTES


def _runs(tensors: Sequence[StateRecord]) -> Iterator[list[int]]:
    run: list[int] = []
    length = 0
    for number, tensor in enumerate(tensors):
        if _is_small(tensor):
            run.append(number)
            length += tensor.boxes.elements * dtype(tensor.dtype).itemsize + _FRAME * len(tensor.boxes)
            if length > _MOST:
                yield run
                run, length = [], 0
    if run:
        yield run


_Groups = dict[tuple[str, Index, Boxes], tuple[list[int], Column]]
"""Tensors of one dtype and shape that are cut alike: their numbers, and rows of their chunks ``[tensors, boxes]``."""


def _read_run(payloads: Payloads, tensors: Sequence[StateRecord], ours: bool) -> tuple[Columns, _Groups, _Bytes]:
    """Read the chunks of tensors that have as many bytes, at the place in their items, as their boxes say."""
    columns = columns_of(tensor.chunks for tensor in tensors)
    starts = np.cumsum([0, *(len(tensor.boxes) for tensor in tensors)])
    members: defaultdict[tuple[str, Index, Boxes], list[int]] = defaultdict(list)
    for number, tensor in enumerate(tensors):
        members[tensor.dtype, tensor.shape, tensor.boxes].append(number)
    groups = {
        key: (numbers, starts[numbers][:, np.newaxis] + np.arange(len(key[2]))) for key, numbers in members.items()
    }
    fits = np.zeros(len(columns), np.bool_)
    for (name, _, boxes), (_, rows) in groups.items():
        places = _places(name, boxes, ours)
        elements, head, length = np.array([(p.elements, p.head, p.length) for p in places], np.int64).reshape(-1, 3).T
        fits[rows] = (columns.payload_length(rows) == elements) & (elements > 0)
        if any(place.around for place in places):
            items = columns.item[rows]
            fits[rows] &= (columns.item_length(rows) == length) & (columns.payload(rows) == items + head)
    return columns, groups, _Bytes.of(payloads, columns, fits, ours)


def _tiles(tensor: StateRecord) -> bool:
    try:
        tensor.chunk_layout()
    except MuonckptError:  # `audit` says what is wrong
        return False
    return True


def stacked(payloads: Payloads, tensors: Sequence[StateRecord]) -> Iterator[tuple[Sequence[int], NDArray[Any]]]:
    """Yield the words of small tensors that are cut alike, ``[tensors, *shape]``, with the numbers of the tensors.

    Chunks are compared with their checksums.  Tensors that are large, or not as they should be, are left out.
    """
    for run in _runs(tensors):
        members = [tensors[number] for number in run]
        columns, groups, read = _read_run(payloads, members, False)
        for (name, shape, boxes), (numbers, rows) in groups.items():
            words = np.empty((len(numbers), *shape), dtype(name).bits)
            sound = np.full(len(numbers), _tiles(members[numbers[0]]))
            for place, every in zip(_places(name, boxes, False), rows.T, strict=True):
                sound &= (read.at[every] != UNKNOWN) | (place.elements == 0)
                good = np.flatnonzero(sound)
                if not place.elements or not len(good):
                    continue
                elements = read.taken(every[good], place.length)
                part: tuple[Any, ...] = (good, *slices_within(place.box, (0,) * len(shape)))
                words[part] = elements.view(words.dtype).reshape(-1, *place.box.shape)
                agree = _sums_agree(columns, every[good], elements)
                bare = ~columns.has_digest[every[good]] & (columns.crc32[every[good]] == UNKNOWN)
                if bare.any():
                    agree[bare] &= _hold_inside(payloads, columns, every[good][bare])
                sound[good] = agree
            yield [run[number] for number, own in zip(numbers, sound.tolist(), strict=True) if own], words[sound]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a chunk's elements lie among its bytes; ``around`` is the item's template if whole items are read."""

    box: Box
    head: int
    elements: int
    length: int
    around: ItemTemplate | None


@lru_cache(maxsize=64)
def _places(name: str, boxes: Boxes, ours: bool) -> tuple[_Place, ...]:
    if ours:
        from ..formats.torch_save.tensor_item import template  # `stats` and other formats do without
    places = []
    for box in boxes:
        elements = box.numel * dtype(name).itemsize
        around = template(name, box.shape) if ours else None
        head, length = (len(around.head), around.length) if around else (0, elements)
        places.append(_Place(box, head, elements, length, around))
    return tuple(places)


@dataclass(frozen=True, slots=True)
class _Bytes:
    """Bytes that were read, and where each row begins in them; `UNKNOWN` where it was not read."""

    raw: _Raw
    at: Column

    @classmethod
    def of(cls, payloads: Payloads, columns: Columns, wanted: _Flags, ours: bool) -> _Bytes:
        """Read the items of the wanted rows if they are ``ours``, else only the payloads."""
        at = np.full(len(columns), UNKNOWN, np.int64)
        rows = np.flatnonzero(wanted)
        if not len(rows):
            return cls(np.zeros(0, np.uint8), at)
        start = columns.item[rows] if ours else columns.payload(rows)
        order = np.lexsort((start, columns.file[rows]))
        rows, start = rows[order], start[order]
        file, length = columns.file[rows], columns.item_length(rows) if ours else columns.payload_length(rows)
        runs = join_ranges(start, start + length, _GAP, file=file)
        bounds = np.append(0, np.cumsum(runs.stop - runs.start))
        raw = np.empty(int(bounds[-1]), np.uint8)
        at[rows] = start + np.repeat(bounds[:-1] - runs.start, np.diff(np.append(runs.first, len(rows))))
        places = zip(file[runs.first].tolist(), runs.start.tolist(), runs.stop.tolist(), bounds.tolist(), strict=False)
        for (named, lo, hi, here), members in zip(places, runs.members(len(rows)), strict=True):
            try:
                payloads.open_file(columns.names[named], hi).fill(raw[here : here + hi - lo].data, lo)
            except MuonckptError:
                at[rows[members.start : members.stop]] = UNKNOWN
        return cls(raw, at)

    def taken(self, rows: Column, length: int) -> _Raw:
        every = np.lib.stride_tricks.as_strided(self.raw, (len(self.raw) - length + 1, length), (1, 1))
        taken: _Raw = every[self.at[rows]]
        return taken


def _judged(
    payloads: Payloads, columns: Columns, rows: Column, read: _Bytes, places: Sequence[_Place], name: str
) -> tuple[_Flags, bool, NDArray[np.uint64]]:
    """Return which chunks of tensors cut alike are sound, whether all are framed, and their fingerprint shares.

    Args:
        rows: ``[tensors, boxes]``.
    """
    kind = dtype(name)
    sound, framed = np.ones(rows.shape, np.bool_), True
    shares = np.zeros(rows.shape, np.uint64)
    for number, place in enumerate(places):
        if not place.elements:
            framed = False
            continue
        every = rows[:, number]
        is_read = read.at[every] != UNKNOWN
        own = every[is_read]
        sound[:, number] = is_read
        if not len(own):
            framed = False
            continue
        raw = read.taken(own, place.length)
        elements = np.ascontiguousarray(raw[:, place.head : place.head + place.elements])
        words = elements.view(kind.bits).reshape(len(own), *place.box.shape)
        good = _sums_agree(columns, own, elements)
        if count_nonfinite(words, name):
            good &= [not count_nonfinite(part, name) for part in words]
        if place.around:
            alike, recorded = place.around.recorded(raw)
            framed &= bool(is_read.all() and alike.all() and (recorded == columns.crc32[own]).all())
        else:
            good &= _hold_inside(payloads, columns, own)
        sound[is_read, number] = good
        shares[is_read, number] = box_shares(words, place.box.lo)
    return sound, framed, shares


def _sums_agree(columns: Columns, rows: Column, elements: _Raw) -> _Flags:
    length, raw = elements.shape[1], elements.reshape(-1).data
    parts = [raw[start : start + length] for start in range(0, len(raw), length)]
    digests, sums = columns.digest[rows], columns.crc32[rows]
    actual = np.frombuffer(b"".join(map(xxhash.xxh3_128_digest, parts)), np.uint8).reshape(-1, 16)
    agree: _Flags = (digests == actual).all(axis=1) | ~columns.has_digest[rows]
    agree &= (sums == UNKNOWN) | (sums == np.array([crc32_of(part, 0) for part in parts], np.int64))
    return agree


def _hold_inside(payloads: Payloads, columns: Columns, rows: Column) -> list[bool]:
    def holds(item: Extent) -> bool:
        try:
            payloads.check_item(item)
        except MuonckptError:
            return False
        return True

    return [holds(Extent(file, offset, length)) for file, offset, length, *_ in columns.rows(rows)]


def _is_framed(payloads: Payloads, tensor: StateRecord) -> bool:
    places = _places(tensor.dtype, tensor.boxes, True)
    try:
        for (file, item, length, payload, _, _, crc32), place in zip(tensor.chunks.rows, places, strict=True):
            own = place.around
            if own is None or (own.length, item + len(own.head)) != (length, payload):
                return False
            head = bytes(payloads.read_scratch(Extent(file, item, len(own.head))))
            tail = bytes(payloads.read_scratch(Extent(file, item + own.tail_offset, length - own.tail_offset)))
            if own.crc32_of(head, tail) != crc32:
                return False
    except MuonckptError:
        return False
    return True
