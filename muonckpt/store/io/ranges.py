"""Ranges of bytes in files: near ones joined for one read, and their CRC-32s joined into that of the whole."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...record.columns import Column

Numbers = NDArray[np.signedinteger[Any]]


@dataclass(frozen=True, slots=True)
class Runs:
    """Joined ranges: the bytes ``start:stop`` of each run in its file, and the number of its ``first`` range."""

    start: Column
    stop: Column
    first: Column

    def members(self, ranges: int) -> Iterator[range]:
        """Yield the numbers of each run's ranges, of so many ranges in all."""
        first = self.first.tolist()
        return map(range, first, [*first[1:], ranges])


def join_ranges(start: Column, stop: Column, gap: int, most: int = sys.maxsize, file: Numbers | None = None) -> Runs:
    """Join ranges of bytes, given in the order of ``file`` and ``start``, into runs that are each read at once.

    Args:
        gap: the most bytes between two neighbours in a run: as many as cost less to read than a call.
        most: the most bytes of a run of several ranges.
        file: the number of each range's file; None: all are in one.
    """
    apart = start[1:] > stop[:-1] + gap
    if file is not None:
        apart |= file[1:] != file[:-1]
    first = np.flatnonzero(np.append(True, apart)) if len(start) else np.zeros(0, np.int64)
    if len(start) and most < sys.maxsize:
        cuts = []
        for lo, hi in pairwise([*first.tolist(), len(start)]):
            reach = np.maximum.accumulate(stop[lo:hi])
            while lo < hi:
                cuts.append(lo)
                lo = max(hi - len(reach) + int(np.searchsorted(reach, start[lo] + most, side="right")), lo + 1)
        first = np.array(cuts)
    return Runs(start[first], np.maximum.reduceat(stop, first) if len(first) else stop[:0], first)


@dataclass(slots=True)
class JoinedCrc:
    """The CRC-32 of bytes whose ranges are added in any order; ``crc32`` covers the bytes up to ``reached``."""

    reached: int = 0
    crc32: int = 0
    _waiting: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, start: int, stop: int, crc32: int) -> None:
        """Add a range by its CRC-32; it is ignored if its first byte has been reached."""
        if start >= self.reached:
            self._waiting.setdefault(start, (stop, crc32))
        while waiting := self._waiting.pop(self.reached, None):
            stop, crc32 = waiting
            self.reached, self.crc32 = stop, join_crc32(self.crc32, crc32, stop - self.reached)


_POLYNOMIAL = 0xEDB88320
"""The polynomial of CRC-32 (IEEE 802.3): the highest bit is the coefficient of x**0, that of x**32 is implied."""

_X0 = 1 << 31


def join_crc32(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of two runs of bytes end to end; ``length`` is the second's.

    A CRC is a polynomial over GF(2) modulo a fixed one, and to append bytes multiplies it by a power of x (Mark Adler,
    ``crc32_combine`` of zlib).
    """
    return _product(first, _x_to(8 * length)) ^ second if first else second


@lru_cache(maxsize=1024)
def _x_to(power: int) -> int:
    result, square = _X0, _X0 >> 1
    while power:
        result = _product(result, square) if power & 1 else result
        square = _product(square, square)
        power >>= 1
    return result


def _product(left: int, right: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        product ^= right if left >> bit & 1 else 0
        right = right >> 1 ^ (_POLYNOMIAL if right & 1 else 0)
    return product
