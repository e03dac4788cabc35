"""Tensors in small chunks, checked whole: many chunks at a time, each read once, where `audit` makes calls for each.

Everything is compared that `audit` and `descriptions` compare.  What is not as it should be is not reported here, but
left to them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import xxhash
from numpy.typing import NDArray

from ..box import Box, Index
from ..chunks import Boxes, columns_of
from ..columns import UNKNOWN, Column, Columns
from ..errors import MuonckptError
from ..fingerprint import as_hex, box_shares
from ..record import Extent, StateRecord
from .formats.torch_save.tensor_item import ItemTemplate, template
from .io.checksums import crc32_of
from .reading.dtypes import dtype
from .reading.finite import nonfinite
from .reading.payloads import BAND_BYTES, Payloads

_MOST = 4 * BAND_BYTES
"""_Raw that are read at a time."""

_GAP = 512
"""_Raw between two ranges of a file that are read along, because a call costs as much."""

_FRAME = 2048
"""More bytes than an item has besides its elements."""

_Raw = NDArray[np.uint8]
_Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Examined:
    """What was found of tensors that were read whole.

    Attributes:
        fingerprints: of each tensor if nothing at all is wrong with it: the bytes of each chunk agree with its
            checksums, and those of the tensor with its fingerprint; every element is there once, and none is infinite
            or NaN.  None of others, which may be large.
        framed: whether the items are those of their boxes, and have elements and CRC-32 where the manifest says.
    """

    fingerprints: tuple[str | None, ...]
    framed: bool


def examined(payloads: Payloads, tensors: Sequence[StateRecord], ours: bool) -> Examined:
    """Read those of these tensors that are small, and compare them with what is recorded of them.

    Args:
        ours: whether chunks are in items that this package writes, of which all bytes are compared.
    """
    prints: dict[int, str | None] = {}
    framed = True
    for run in _runs(tensors):
        for alike in _examined_run(payloads, [tensors[number] for number in run], ours):
            prints |= {run[number]: own for number, own in zip(alike.numbers, alike.fingerprints, strict=True)}
            framed &= alike.framed
    if ours and framed:
        framed = all(_is_framed(payloads, tensor) for tensor in tensors if not _is_small(tensor))
    return Examined(tuple(prints.get(number) for number in range(len(tensors))), framed)


def _is_small(tensor: StateRecord) -> bool:
    size = dtype(tensor.dtype).itemsize
    return tensor.chunks.strides is None and size <= 8 and tensor.boxes.elements * size <= BAND_BYTES


def _runs(tensors: Sequence[StateRecord]) -> Iterator[list[int]]:
    """The numbers of small tensors, as many as are read at a time."""
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


@dataclass(frozen=True, slots=True)
class _Alike:
    """What was found of the tensors of a run with these numbers, which have one dtype and are cut alike."""

    numbers: Sequence[int]
    fingerprints: Sequence[str | None]
    framed: bool


def _examined_run(payloads: Payloads, tensors: Sequence[StateRecord], ours: bool) -> Iterator[_Alike]:
    columns = columns_of(tensor.chunks for tensor in tensors)
    starts = np.cumsum([0, *(len(tensor.boxes) for tensor in tensors)])
    groups: defaultdict[tuple[str, Index, Boxes], list[int]] = defaultdict(list)
    for number, tensor in enumerate(tensors):
        groups[tensor.dtype, tensor.shape, tensor.boxes].append(number)
    rows = {key: starts[numbers][:, np.newaxis] + np.arange(len(key[2])) for key, numbers in groups.items()}
    fits = np.zeros(len(columns), np.bool_)
    for (name, _, boxes), own in rows.items():
        fits[own] = _fits(columns, own, _places(name, boxes, ours))
    read = _Bytes.of(payloads, columns, fits, ours)
    for (name, shape, boxes), numbers in groups.items():
        own = rows[name, shape, boxes]
        sound, framed, shares = _judged(payloads, columns, own, read, _places(name, boxes, ours), name)
        try:
            tensors[numbers[0]].chunk_layout()
        except MuonckptError:  # `audit` says what is wrong
            sound[:] = False
        prints = map(as_hex, shares.sum(axis=1, dtype=np.uint64).tolist())
        expected = (tensors[number].fingerprint for number in numbers)
        found = zip(np.all(sound, axis=1).tolist(), prints, expected, strict=True)
        yield _Alike(numbers, [own if good and known in (None, own) else None for good, own, known in found], framed)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where in the bytes that are read of a chunk its elements are; ``around`` is the template of the item, if whole
    items are read."""

    box: Box
    head: int
    elements: int
    length: int
    around: ItemTemplate | None


@lru_cache(maxsize=64)
def _places(name: str, boxes: Boxes, ours: bool) -> tuple[_Place, ...]:
    """Those of each box.  Cached for tensors that are cut alike."""
    places = []
    for box in boxes:
        elements = box.numel * dtype(name).itemsize
        around = template(name, box.shape) if ours else None
        head, length = (len(around.head), around.length) if around else (0, elements)
        places.append(_Place(box, head, elements, length, around))
    return tuple(places)


def _fits(columns: Columns, rows: Column, places: Sequence[_Place]) -> _Flags:
    """Which chunks have elements, and these in as many bytes, and at the place in their items, as their boxes say."""
    elements, head, length = np.array([(p.elements, p.head, p.length) for p in places], np.int64).reshape(-1, 3).T
    fits: _Flags = (columns.payload_length[rows] == elements) & (elements > 0)
    if any(place.around for place in places):
        items = columns.item[rows]
        fits &= (columns.item_length[rows] == length) & (columns.payload[rows] == items + head)
    return fits


@dataclass(frozen=True, slots=True)
class _Bytes:
    """_Raw that were read of files, and where those of each row begin in them; `UNKNOWN` where they were not read."""

    raw: _Raw
    at: Column

    @classmethod
    def of(cls, payloads: Payloads, columns: Columns, wanted: _Flags, ours: bool) -> _Bytes:
        """The items of rows if they are ``ours``, or else the payloads; neighbours in a file are read together."""
        at = np.full(len(columns), UNKNOWN, np.int64)
        offset, length = (columns.item, columns.item_length) if ours else (columns.payload, columns.payload_length)
        rows = np.flatnonzero(wanted)
        if not len(rows):
            return cls(np.zeros(0, np.uint8), at)
        rows = rows[np.lexsort((offset[rows], columns.file[rows]))]
        file, start, end = columns.file[rows], offset[rows], (offset + length)[rows]
        apart = np.append(True, (file[1:] != file[:-1]) | (start[1:] > end[:-1] + _GAP))
        first, window = np.flatnonzero(apart), np.cumsum(apart) - 1
        begin, end = start[first], np.maximum.reduceat(end, first)
        bounds = np.append(0, np.cumsum(end - begin))
        raw = np.empty(int(bounds[-1]), np.uint8)
        at[rows] = bounds[window] + start - begin[window]
        places = zip(file[first].tolist(), begin.tolist(), end.tolist(), bounds.tolist(), strict=False)
        for number, (named, lo, hi, here) in enumerate(places):
            try:
                payloads.reaching(columns.names[named], hi).fill(raw[here : here + hi - lo].data, lo)
            except MuonckptError:
                at[rows[window == number]] = UNKNOWN
        return cls(raw, at)

    def taken(self, rows: Column, length: int) -> _Raw:
        """The bytes of rows, ``[rows, length]``."""
        every = np.lib.stride_tricks.as_strided(self.raw, (len(self.raw) - length + 1, length), (1, 1))
        taken: _Raw = every[self.at[rows]]
        return taken


def _judged(
    payloads: Payloads, columns: Columns, rows: Column, read: _Bytes, places: Sequence[_Place], name: str
) -> tuple[_Flags, bool, NDArray[np.uint64]]:
    """Which chunks of tensors that are cut alike are sound, whether all are framed, and their shares of fingerprints.

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
        if nonfinite(words, name):
            good &= [not nonfinite(part, name) for part in words]
        if place.around:
            alike, recorded = place.around.recorded(raw)
            framed &= bool(is_read.all() and alike.all() and (recorded == columns.crc32[own]).all())
        else:
            good &= _hold_inside(payloads, columns, own)
        sound[is_read, number] = good
        shares[is_read, number] = box_shares(words, place.box.lo)
    return sound, framed, shares


def _sums_agree(columns: Columns, rows: Column, elements: _Raw) -> _Flags:
    """Whether the elements of each row have the digest and the CRC-32 that are recorded, if they are."""
    length, raw = elements.shape[1], elements.reshape(-1).data
    parts = [raw[start : start + length] for start in range(0, len(raw), length)]
    digests, sums = columns.digest[rows], columns.crc32[rows]
    actual = np.frombuffer(b"".join(map(xxhash.xxh3_128_digest, parts)), np.uint8).reshape(-1, 16)
    agree: _Flags = (digests == actual).all(axis=1) | ~columns.has_digest[rows]
    agree &= (sums == UNKNOWN) | (sums == np.array([crc32_of(part, 0) for part in parts], np.int64))
    return agree


def _hold_inside(payloads: Payloads, columns: Columns, rows: Column) -> list[bool]:
    """Whether the checksums that formats keep inside items hold."""

    def holds(item: Extent) -> bool:
        try:
            payloads.check_inside(item)
        except MuonckptError:
            return False
        return True

    return [holds(Extent(file, offset, length)) for file, offset, length, *_ in columns.rows_at(rows.tolist())]


def _is_framed(payloads: Payloads, tensor: StateRecord) -> bool:
    """Whether each item is that of its box, and has its elements and their CRC-32 where the manifest says."""
    places = _places(tensor.dtype, tensor.boxes, True)
    try:
        for (file, item, length, payload, _, _, crc32), place in zip(tensor.chunks.rows, places, strict=True):
            own = place.around
            if own is None or (own.length, item + len(own.head)) != (length, payload):
                return False
            head = bytes(payloads.glance(Extent(file, item, len(own.head))))
            tail = bytes(payloads.glance(Extent(file, item + own.tail_offset, length - own.tail_offset)))
            if own.crc32_of(head, tail) != crc32:
                return False
    except MuonckptError:
        return False
    return True
