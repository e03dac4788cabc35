"""Reads and writes the chunks of tensors in a manifest: a list for each column, and boxes once for all tensors."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..algebra.box import MAX_ELEMENTS
from ..names.errors import DamageError, LayoutError
from .chunks import Boxes, Chunks, columns_of
from .columns import UNKNOWN, Column, Columns, ColumnsBuilder, check_name, digest_rows
from .json_fields import compact

_NUMBERS = ("file", "item", "item_length", "payload", "payload_length", "crc32")
"""The columns of integers, as `Columns.of_extents` takes them."""

_OPTIONAL = frozenset({"payload", "payload_length", "crc32"})
"""The columns in which null means unknown."""

_FIELDS = itemgetter("boxes", "digest", *_NUMBERS)
_MAX_CRC32 = 2**32 - 1
_BLOCK = 1 << 12
"""Chunks that are read or written at a time: enough to amortise calls, few enough to be small beside the text."""


class ColumnReader:
    """Reads the columns of tensors from JSON data; they are checked, and joined, thousands of chunks at a time.

    Args:
        names: of the files with data.
        boxes: the lists of boxes to which tensors refer.

    Raises:
        TypeError, ValueError, SourceError: they are no such lists, or a file is outside the checkpoint.
    """

    def __init__(self, names: Any, boxes: Any) -> None:
        # The lists to which all tensors refer.
        if type(names) is not list or set(map(type, names)) - {str} or len(set(names)) != len(names):
            raise TypeError(f"expected different names of files, got {names!r:.200}")
        if type(boxes) is not list:
            raise TypeError(f"expected lists of boxes, got {boxes!r:.200}")
        for name in names:
            check_name(name)
        # Chunks accumulate as lists until a block is full.
        self._names = tuple(names)
        self._builder = ColumnsBuilder()
        self._box_lists = boxes
        self._boxes_read: dict[tuple[int, int], Boxes] = {}
        self._places: list[tuple[int, Boxes]] = []
        self._rows = 0
        self._pending: tuple[list[Any], ...] = tuple([] for _ in ("digest", *_NUMBERS))

    def read(self, chunk_fields: Sequence[Any], ndims: Sequence[int]) -> None:
        """Read the chunks of tensors with these numbers of dims.

        Raises:
            DamageError, KeyError, TypeError, ValueError: a field of this or an earlier tensor is missing or wrong.
        """
        numbers, *columns = zip(*map(_FIELDS, chunk_fields), strict=True)
        for fields in chunk_fields:
            if len(fields) > len(_NUMBERS) + 2:  # strides, above all, could reach outside the payload
                raise DamageError(f"damaged manifest: expected boxes, digest, {', '.join(_NUMBERS)}, found {[*fields]}")
        boxes = list(map(self._read_boxes, numbers, ndims))
        counts = list(map(len, boxes))
        # Each tensor has a value for each box in every column.
        for column, lists in zip(self._pending, columns, strict=True):
            if {*map(type, lists)} != {list} or list(map(len, lists)) != counts:
                for values, count, fields in zip(lists, counts, chunk_fields, strict=True):
                    if type(values) is not list or len(values) != count:
                        raise TypeError(
                            f"expected a value for each of {count} boxes in each column, got {fields!r:.200}"
                        )
            column += chain.from_iterable(lists)
        *starts, self._rows = accumulate(counts, initial=self._rows)
        self._places += zip(starts, boxes, strict=True)
        if len(self._pending[0]) >= _BLOCK:
            self._flush()

    def chunks(self) -> list[Chunks]:
        """Return the chunks of each tensor.

        Raises:
            DamageError, TypeError, ValueError: as `read`.
            SourceError: a range of bytes ends too far away.
        """
        self._flush()
        columns = self._builder.build()
        return [Chunks(columns, *place) for place in self._places]

    def _read_boxes(self, number: Any, ndim: int) -> Boxes:
        # Tensors that are cut alike share one list, which is read once.
        boxes = self._boxes_read.get((number, ndim)) if type(number) is int else None
        if boxes is None:
            if type(number) is not int or not 0 <= number < len(self._box_lists):
                raise TypeError(f"expected a number of {len(self._box_lists)} lists of boxes, got {number!r:.200}")
            los, his = itemgetter("lo", "hi")(self._box_lists[number])
            if type(los) is not list or type(his) is not list or len(los) != len(his):
                raise TypeError(f"expected as many corners lo as hi, got {self._box_lists[number]!r:.200}")
            boxes = self._boxes_read[number, ndim] = _parse_boxes(los, his, ndim)
        return boxes

    def _flush(self) -> None:
        """Check the pending values, and add them to the columns."""
        digests, *lists = self._pending
        numbers = [_read_numbers(name, values) for name, values in zip(_NUMBERS, lists, strict=True)]
        file, item, item_length, payload, payload_length, crc32 = numbers
        # Numbers that are valid alone may not fit each other.
        if len(file) and file.max() >= len(self._names):
            raise DamageError(f"damaged manifest: expected numbers of {len(self._names)} files, found {file.max()}")
        if len(crc32) and crc32.max() > _MAX_CRC32:
            raise DamageError(f"damaged manifest: expected CRC-32 of 32 bits, found {crc32.max()}")
        if ((payload == UNKNOWN) != (payload_length == UNKNOWN)).any():
            raise DamageError("damaged manifest: expected an offset and a length of each payload, found one of them")
        _check_digests(digests)
        extents = item, item_length, payload, payload_length
        block = Columns.of_extents(self._names, file.astype(np.int32), *extents, *digest_rows(digests), crc32)
        self._builder.add(block, 0, len(block))
        for values in self._pending:
            values.clear()


def _parse_boxes(los: list[Any], his: list[Any], ndim: int) -> Boxes:
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


def _read_numbers(name: str, values: list[Any]) -> Column:
    """Return a column of integers >= 0, with `UNKNOWN` for null where that is allowed."""
    num_unknown = values.count(None) if name in _OPTIONAL else 0
    integers = [UNKNOWN if value is None else value for value in values] if num_unknown else values
    if set(map(type, integers)) - {int}:  # a bool is not an integer
        raise TypeError(f"{name}: expected integers >= 0, got {values[:8]!r:.200}")
    try:
        column = np.array(integers, np.int64)
    except OverflowError:
        raise DamageError(f"damaged manifest: {name}: expected numbers up to {MAX_ELEMENTS}, found more") from None
    if np.count_nonzero(column < 0) != num_unknown:
        raise TypeError(f"{name}: expected integers >= 0, got {column.min()}")
    if len(column) and column.max() > MAX_ELEMENTS:
        raise DamageError(f"damaged manifest: {name}: expected numbers up to {MAX_ELEMENTS}, found {column.max()}")
    return column


def _check_digests(values: list[Any]) -> None:
    """Raise `ValueError` for a value that is neither null nor 32 lower-case hexadecimal digits."""
    texts = [value for value in values if value is not None]
    if set(map(type, texts)) <= {str} and set(map(len, texts)) <= {32}:
        text = "".join(texts)
        if bytes.fromhex(text).hex() == text:  # fromhex accepts upper case and spaces, too
            return
    raise ValueError(f"expected digests of 32 hexadecimal digits, found {values[:8]!r:.300}")


class ColumnWriter:
    """Writes the chunks of tensors as JSON text: the lists to which they refer, and then the columns of each.

    Attributes:
        names: the names of the files with data.
        boxes: the distinct lists of boxes.
    """

    def __init__(self, chunks: Sequence[Chunks]) -> None:
        self._chunks = chunks
        self._columns = columns_of(chunks)
        self._numbers: dict[Boxes, int] = {}
        self._box_numbers = [self._numbers.setdefault(each.boxes, len(self._numbers)) for each in chunks]

    @property
    def names(self) -> list[str]:
        return list(self._columns.names)

    @property
    def boxes(self) -> Iterator[str]:
        return (f'{{"lo": {boxes.lo.tolist()}, "hi": {boxes.hi.tolist()}}}' for boxes in self._numbers)

    def texts(self) -> Iterator[str]:
        stops = list(accumulate(map(len, self._chunks)))
        columns: Mapping[str, list[str]] = {}
        row, block_start, block_stop = 0, 0, -1
        for chunks, number, stop in zip(self._chunks, self._box_numbers, stops, strict=True):
            # The rows of many tensors become text together, in blocks that end where a tensor does.
            if stop > block_stop:
                block_start, block_stop = row, stops[min(bisect_left(stops, row + _BLOCK), len(stops) - 1)]
                columns = _column_texts(self._columns, slice(block_start, block_stop))
            lists = ((name, column[row - block_start : stop - block_start]) for name, column in columns.items())
            fields = ", ".join(f'"{name}": [{", ".join(values)}]' for name, values in lists)
            strides = f', "strides": {compact(chunks.strides)}' if chunks.strides else ""
            yield f'{{"boxes": {number}, {fields}{strides}}}'
            row = stop


def _column_texts(columns: Columns, rows: slice) -> Mapping[str, list[str]]:
    extents = columns.item_length(rows), columns.payload(rows), columns.payload_length(rows)
    values: tuple[NDArray[Any], ...] = (columns.file[rows], columns.item[rows], *extents, columns.crc32[rows])
    texts = {name: list(map(str, column.tolist())) for name, column in zip(_NUMBERS, values, strict=True)}
    # Unknown numbers are null in JSON.
    for name in _OPTIONAL:
        texts[name] = ["null" if text == _UNKNOWN_TEXT else text for text in texts[name]]
    digests = ["null" if digest is None else f'"{digest}"' for digest in columns.digests(rows)]
    return {**texts, "digest": digests}


_UNKNOWN_TEXT = str(UNKNOWN)
