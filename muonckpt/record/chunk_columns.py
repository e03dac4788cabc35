"""The chunks of tensors as a manifest has them: a list for each column, and boxes once for all tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..algebra.box import MAX_ELEMENTS
from ..names.errors import DamageError, LayoutError
from .chunks import Boxes, Chunks, columns_of
from .columns import UNKNOWN, Column, Columns, ColumnsBuilder, check_name

_NUMBERS = ("file", "item", "item_length", "payload", "payload_length", "crc32")
"""The columns of integers, as `Columns.of_extents` takes them."""

_OPTIONAL = frozenset({"payload", "payload_length", "crc32"})
"""The columns in which null stands for what is not known."""

_FIELDS = itemgetter("boxes", "digest", *_NUMBERS)
_MOST_CRC32 = 2**32 - 1
_BLOCK = 1 << 12
"""Chunks that are read or written at a time: enough to amortise calls, few enough to be small beside the text."""


class ColumnReader:
    """Reads the columns of tensors; they are checked, and joined, thousands of chunks at a time.

    Args:
        names: JSON data: the names of the files with data.
        boxes: JSON data: the lists of boxes to which tensors refer.

    Raises:
        TypeError, ValueError: this is not what it should be.
        SourceError: a file is not inside the checkpoint.
    """

    def __init__(self, names: Any, boxes: Any) -> None:
        if type(names) is not list or set(map(type, names)) - {str} or len(set(names)) != len(names):
            raise TypeError(f"expected different names of files, got {names!r:.200}")
        if type(boxes) is not list:
            raise TypeError(f"expected lists of boxes, got {boxes!r:.200}")
        for name in names:
            check_name(name)
        self._names = tuple(names)
        self._builder = ColumnsBuilder()
        self._listed = boxes
        self._geometries: dict[tuple[int, int], Boxes] = {}
        self._places: list[tuple[int, Boxes]] = []
        self._rows = 0
        self._lists: tuple[list[Any], ...] = ()
        self._begin()

    def _begin(self) -> None:
        self._lists = tuple([] for _ in ("digest", *_NUMBERS))

    def read(self, every: Sequence[Any], ndims: Sequence[int]) -> None:
        """Read the JSON data of the chunks of tensors with these numbers of dims.

        Raises:
            DamageError, KeyError, TypeError, ValueError: a field is missing, or not what it should be, in these or in
                earlier tensors.
        """
        numbers, *columns = zip(*map(_FIELDS, every), strict=True)
        for fields in every:
            if len(fields) > len(_NUMBERS) + 2:  # strides, above all, could reach outside the payload
                raise DamageError(f"damaged manifest: expected boxes, digest, {', '.join(_NUMBERS)}, found {[*fields]}")
        boxes = list(map(self._boxes, numbers, ndims))
        counts = list(map(len, boxes))
        for column, lists in zip(self._lists, columns, strict=True):
            if {*map(type, lists)} != {list} or list(map(len, lists)) != counts:
                wrong = [type(own) is not list or len(own) != count for own, count in zip(lists, counts, strict=True)]
                count, own = counts[wrong.index(True)], every[wrong.index(True)]
                raise TypeError(f"expected a value for each of {count} boxes in each column, got {own!r:.200}")
            column += chain.from_iterable(lists)
        *starts, self._rows = accumulate(counts, initial=self._rows)
        self._places += zip(starts, boxes, strict=True)
        if len(self._lists[0]) >= _BLOCK:
            self._flush()

    def chunks(self) -> list[Chunks]:
        """The chunks of each tensor.

        Raises:
            DamageError, TypeError, ValueError: as `read`.
            SourceError: a range of bytes ends too far away.
        """
        self._flush()
        columns = self._builder.build()
        return [Chunks(columns, *place) for place in self._places]

    def _boxes(self, number: Any, ndim: int) -> Boxes:
        known = self._geometries.get((number, ndim)) if type(number) is int else None
        if known is None:
            if type(number) is not int or not 0 <= number < len(self._listed):
                raise TypeError(f"expected a number of {len(self._listed)} lists of boxes, got {number!r:.200}")
            los, his = itemgetter("lo", "hi")(self._listed[number])
            if type(los) is not list or type(his) is not list or len(los) != len(his):
                raise TypeError(f"expected as many corners lo as hi, got {self._listed[number]!r:.200}")
            known = self._geometries[number, ndim] = _boxes(los, his, ndim)
        return known

    def _flush(self) -> None:
        digests, *lists = self._lists
        numbers = [_numbers(name, listed) for name, listed in zip(_NUMBERS, lists, strict=True)]
        file, item, item_length, payload, payload_length, crc32 = numbers
        if len(file) and file.max() >= len(self._names):
            raise DamageError(f"damaged manifest: expected numbers of {len(self._names)} files, found {file.max()}")
        if len(crc32) and crc32.max() > _MOST_CRC32:
            raise DamageError(f"damaged manifest: expected CRC-32 of 32 bits, found {crc32.max()}")
        if ((payload == UNKNOWN) != (payload_length == UNKNOWN)).any():
            raise DamageError("damaged manifest: expected an offset and a length of each payload, found one of them")
        digest, known = _digests(digests)
        block = Columns.of_extents(
            self._names, file.astype(np.int32), item, item_length, payload, payload_length, digest, known, crc32
        )
        self._builder.add(block, 0, len(block))
        self._begin()


def _boxes(los: list[Any], his: list[Any], ndim: int) -> Boxes:
    """Return the boxes with these corners, which are JSON data."""
    if set(map(type, [*los, *his])) - {list} or {*map(len, [*los, *his])} - {ndim}:
        raise DamageError(
            f"damaged manifest: expected boxes of {ndim} dims, found {los[:8]!r:.200} to {his[:8]!r:.200}"
        )
    numbers = [*chain.from_iterable(los), *chain.from_iterable(his)]
    if set(map(type, numbers)) - {int} or min(numbers, default=0) < 0:  # a bool is not an integer
        wrong = next(number for number in numbers if type(number) is not int or number < 0)
        raise TypeError(f"expected an integer >= 0, got {wrong!r:.200}")
    if max(numbers, default=0) > MAX_ELEMENTS:
        raise DamageError(f"damaged manifest: expected sizes and offsets up to {MAX_ELEMENTS}, found {max(numbers)}")
    try:
        return Boxes.of(*np.array(numbers, np.int64).reshape(2, len(los), ndim))
    except LayoutError as error:
        raise DamageError(f"damaged manifest: {error}") from error


def _numbers(name: str, listed: list[Any]) -> Column:
    """A column of integers >= 0, with `UNKNOWN` for null where that is allowed."""
    unknown = listed.count(None) if name in _OPTIONAL else 0
    known = [UNKNOWN if own is None else own for own in listed] if unknown else listed
    if set(map(type, known)) - {int}:  # a bool is not an integer
        raise TypeError(f"{name}: expected integers >= 0, got {listed[:8]!r:.200}")
    try:
        column = np.array(known, np.int64)
    except OverflowError:
        raise DamageError(f"damaged manifest: {name}: expected numbers up to {MAX_ELEMENTS}, found more") from None
    if np.count_nonzero(column < 0) != unknown:
        raise TypeError(f"{name}: expected integers >= 0, got {column.min()}")
    if len(column) and column.max() > MAX_ELEMENTS:
        raise DamageError(f"damaged manifest: {name}: expected numbers up to {MAX_ELEMENTS}, found {column.max()}")
    return column


def _digests(listed: list[Any]) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Digests in hex as rows of 16 bytes, and whether there is one."""
    known = np.array([own is not None for own in listed], np.bool_)
    texts = listed if known.all() else [_NO_DIGEST if own is None else own for own in listed]
    if set(map(type, texts)) <= {str} and set(map(len, texts)) <= {32}:
        text = "".join(texts)
        raw = bytes.fromhex(text)  # accepts upper case and spaces, too
        if raw.hex() == text:
            return np.frombuffer(raw, np.uint8).reshape(-1, 16), known
    raise ValueError(f"expected digests of 32 hexadecimal digits, found {listed[:8]!r:.300}")


_NO_DIGEST = "0" * 32


class ColumnWriter:
    """The JSON text of the chunks of tensors: what they refer to, and then the columns of each.

    Attributes:
        names: the names of the files with data.
        boxes: the distinct lists of boxes.
    """

    def __init__(self, every: Sequence[Chunks]) -> None:
        self._every = every
        self._columns = columns_of(every)
        self._numbers: dict[Boxes, int] = {}
        self._of_tensor = [
            (self._numbers.setdefault(chunks.boxes, len(self._numbers)), len(chunks)) for chunks in every
        ]

    @property
    def names(self) -> list[str]:
        return list(self._columns.names)

    @property
    def boxes(self) -> Iterator[str]:
        return (f'{{"lo": {boxes.lo.tolist()}, "hi": {boxes.hi.tolist()}}}' for boxes in self._numbers)

    def texts(self) -> Iterator[str]:
        """The columns of each tensor's chunks."""
        start = first = 0
        while first < len(self._every):
            stop, last = start, first
            while last < len(self._every) and stop - start < _BLOCK:
                stop += self._of_tensor[last][1]
                last += 1
            columns = _texts(self._columns, start, stop)
            position = 0
            for chunks, (number, count) in zip(self._every[first:last], self._of_tensor[first:last], strict=True):
                own = slice(position, position + count)
                fields = ", ".join(f'"{name}": [{", ".join(column[own])}]' for name, column in columns.items())
                strides = chunks.strides and [own and list(own) for own in chunks.strides]
                more = f', "strides": {_nulls(strides)}' if strides else ""
                yield f'{{"boxes": {number}, {fields}{more}}}'
                position += count
            start, first = stop, last


def _texts(columns: Columns, start: int, stop: int) -> Mapping[str, list[str]]:
    """The text of each value in rows of columns."""
    span = slice(start, stop)
    digests, known = columns.digest[span].tobytes().hex(), columns.has_digest[span].tolist()
    extents = columns.item_length(span), columns.payload(span), columns.payload_length(span)
    values: tuple[NDArray[Any], ...] = (columns.file[span], columns.item[span], *extents, columns.crc32[span])
    numbers = {name: list(map(str, column.tolist())) for name, column in zip(_NUMBERS, values, strict=True)}
    for name in _OPTIONAL:
        numbers[name] = ["null" if text == _UNKNOWN_TEXT else text for text in numbers[name]]
    each = (f'"{digests[32 * row : 32 * row + 32]}"' if own else "null" for row, own in enumerate(known))
    return {**numbers, "digest": list(each)}


_UNKNOWN_TEXT = str(UNKNOWN)


def _nulls(values: Sequence[object]) -> str:
    return f"[{', '.join('null' if value is None else str(value) for value in values)}]"
