"""The chunks of tensors in a manifest of version 1, an object each, read into columns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np

from .box import MOST_ELEMENTS
from .chunks import Boxes, Chunks
from .columns import UNKNOWN, Columns, ColumnsBuilder
from .errors import DamageError, LayoutError

_FIELDS = itemgetter("lo", "hi", "file", "item", "payload", "digest", "crc32")
_HEX = re.compile(r"[0-9a-f]*")
_BLOCK = 1 << 13
"""Chunks that are read at a time: enough to amortise calls, few enough to be small beside the text."""

_NO_PAYLOAD = (UNKNOWN, UNKNOWN)


class Geometries:
    """Boxes from their JSON data; those of an earlier tensor if they are the same."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bytes], Boxes] = {}

    def boxes(self, los: Sequence[Any], his: Sequence[Any], ndim: int) -> Boxes:
        """The boxes with these corners.

        Raises:
            DamageError, TypeError: they are not corners of boxes of this number of dims.
        """
        if set(map(type, los)) | set(map(type, his)) <= {list} and {*map(len, los), *map(len, his)} <= {ndim}:
            numbers = [*chain.from_iterable(los), *chain.from_iterable(his)]
            _check_integers(numbers)
            corners = np.array(numbers, np.int64)
            key = ndim, corners.tobytes()
            if key not in self._known:
                try:
                    self._known[key] = Boxes.of(*corners.reshape(2, len(los), ndim))
                except LayoutError as error:
                    raise DamageError(f"damaged manifest: {error}") from error
            return self._known[key]
        raise DamageError(
            f"damaged manifest: expected boxes of {ndim} dims, found {los[:8]!r:.200} to {his[:8]!r:.200}"
        )


class ObjectReader:
    """Reads the chunks of one tensor after another; they are checked, and become columns, thousands at a time."""

    def __init__(self) -> None:
        self._builder = ColumnsBuilder()
        self._geometries = Geometries()
        self._places: list[tuple[int, Boxes]] = []
        self._counts: list[tuple[int, int]] = []
        self._listed: list[Any] = []

    def read(self, every: Sequence[Any], ndims: Sequence[int]) -> None:
        """Read the JSON data of the chunks of tensors with these numbers of dims.

        Raises:
            DamageError, KeyError, TypeError, ValueError: a field is missing, or not what it should be, in these or in
                earlier tensors.
            SourceError: a file is not inside the checkpoint.
        """
        for listed, ndim in zip(every, ndims, strict=True):
            if not isinstance(listed, list):
                raise TypeError(f"expected a list of chunks, got {listed!r:.200}")
            self._counts.append((len(listed), ndim))
            self._listed += listed
            if len(self._listed) >= _BLOCK:
                self._flush()

    def finished(self) -> list[Chunks]:
        """The chunks of each tensor.

        Raises:
            DamageError, KeyError, TypeError, ValueError, SourceError: as `read`.
        """
        self._flush()
        columns = self._builder.finished()
        return [Chunks(columns, *place) for place in self._places]

    def _flush(self) -> None:
        listed, counts = self._listed, self._counts
        self._listed, self._counts = [], []
        if any("strides" in chunk for chunk in listed):  # they could reach outside the payload
            raise DamageError("damaged manifest: elements are stored row by row, found strides")
        fields = zip(*map(_FIELDS, listed), strict=True) if listed else [()] * 7
        los, his, files, items, payloads, digests, crc32s = fields
        start = self._builder.rows
        columns = _columns(files, items, payloads, digests, crc32s)
        self._builder.add(columns, 0, len(columns))
        position = 0
        for count, ndim in counts:
            stop = position + count
            boxes = self._geometries.boxes(los[position:stop], his[position:stop], ndim)
            self._places.append((start + position, boxes))
            position = stop


def _columns(
    files: Sequence[Any], items: Sequence[Any], payloads: Sequence[Any], digests: Sequence[Any], crc32s: Sequence[Any]
) -> Columns:
    """The fields of many chunks as columns."""
    _check_numbers(items, 2)
    _check_numbers([own for own in payloads if own is not None], 2)
    _check_integers([crc32 for crc32 in crc32s if crc32 is not None])
    _check_digests([digest for digest in digests if digest is not None])
    if set(map(type, files)) - {str}:
        raise TypeError(f"expected names of files, got {set(map(type, files))}")
    known = [_NO_PAYLOAD if own is None else own for own in payloads]
    sums = [UNKNOWN if crc32 is None else crc32 for crc32 in crc32s]
    fields = zip(files, items, known, digests, sums, strict=True)
    return Columns.of((file, *item, *payload, digest, crc32) for file, item, payload, digest, crc32 in fields)


def _check_numbers(rows: Iterable[Sequence[object]], width: int) -> None:
    """Check that every row is a list of this many integers >= 0.

    Raises:
        TypeError: one is not.
    """
    rows = list(rows)
    if set(map(type, rows)) - {list} or set(map(len, rows)) - {width}:
        raise TypeError(f"expected lists of {width} integers, got {rows[:8]!r:.200}")
    _check_integers(list(chain.from_iterable(rows)))


def _check_integers(numbers: Sequence[Any]) -> None:
    if set(map(type, numbers)) - {int} or min(numbers, default=0) < 0:  # a bool is not an integer
        wrong = next(number for number in numbers if type(number) is not int or number < 0)
        raise TypeError(f"expected an integer >= 0, got {wrong!r:.200}")
    if max(numbers, default=0) > MOST_ELEMENTS:
        raise DamageError(f"damaged manifest: expected sizes and offsets up to {MOST_ELEMENTS}, found {max(numbers)}")


def _check_digests(known: Sequence[Any]) -> None:
    if set(map(type, known)) - {str} or set(map(len, known)) - {32} or not _HEX.fullmatch("".join(known)):
        raise ValueError(f"expected digests of 32 hexadecimal digits, found {known[:8]!r:.300}")
