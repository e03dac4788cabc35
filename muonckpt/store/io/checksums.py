"""Digests and checksums of bytes: all that a chunk needs in one pass, and CRC-32s of parts joined into one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash
from isal import isal_zlib
from numpy.typing import NDArray

from ...algebra.box import Index
from ...algebra.fingerprint import combine, fingerprint

_BAND_BYTES = 1 << 20
"""Bytes per pass: they stay in cache from one sum to the next, and to the write."""

RawBytes = bytes | memoryview

Checksum = Callable[[RawBytes, int], int]
"""A function that continues a checksum: it takes the next bytes, and the checksum of those before them (at first 0)."""


def crc32_of(raw: RawBytes, start: int) -> int:
    return isal_zlib.crc32(raw, start)


def crc32(parts: Iterable[RawBytes]) -> int:
    """Return the CRC-32 of the concatenated parts."""
    checksum = 0
    for part in parts:
        checksum = isal_zlib.crc32(part, checksum)
    return checksum


def xxh3_128(parts: Iterable[RawBytes]) -> str:
    """Return the digest of the concatenated parts, in hex."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return str(state.hexdigest())


@dataclass(frozen=True, slots=True)
class Frame:
    """Makes the bytes around the elements of a stored chunk; the ``tail`` has their checksum.  Lengths are in bytes."""

    payload_length: int
    head: bytes = b""
    tail: Callable[[int], bytes] = lambda checksum: b""
    tail_length: int = 0
    checksum_of: Checksum = crc32_of

    @property
    def payload_offset(self) -> int:
        return len(self.head)

    @property
    def length(self) -> int:
        return len(self.head) + self.payload_length + self.tail_length


class Sums:
    """The xxh3-128, a checksum and the fingerprint share of a payload whose parts pass in order."""

    def __init__(self, checksum_of: Checksum = crc32_of) -> None:
        self.checksum = 0
        self.share = 0
        self._checksum_of = checksum_of
        self._xxh3 = xxhash.xxh3_128()

    @property
    def digest(self) -> str:
        return str(self._xxh3.hexdigest())

    def add(self, words: NDArray[Any], origin: Index) -> memoryview:
        """Add the next box of the payload, dense and unsigned words from global index ``origin`` on; return its bytes.

        A last dim beyond the origin's has the halves of 16-byte elements.
        """
        raw = words.reshape(-1).view(np.uint8).data
        self._xxh3.update(raw)
        self.checksum = self._checksum_of(raw, self.checksum)
        self.share = combine(self.share, fingerprint(words, origin + (0,) * (words.ndim - len(origin))))
        return raw

    def add_chunk(self, words: NDArray[Any], origin: Index) -> Iterator[memoryview]:
        """Add a dense chunk band by band, and yield the bytes of each band."""
        if words.ndim == 0 or words.nbytes <= _BAND_BYTES:
            yield self.add(words, origin)
            return
        rows = max(_BAND_BYTES * len(words) // words.nbytes, 1)
        for start in range(0, len(words), rows):
            yield self.add(words[start : start + rows], (origin[0] + start, *origin[1:]))


@dataclass(slots=True)
class JoinedCrc:
    """The CRC-32 of bytes whose ranges are added in any order; ``crc32`` covers the bytes up to ``reached``."""

    reached: int = 0
    crc32: int = 0
    _later_ranges: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, start: int, stop: int, crc32: int) -> None:
        """Add a range by its CRC-32; it is ignored if its first byte has been reached."""
        # Ranges wait until those before them have come.
        if start >= self.reached:
            self._later_ranges.setdefault(start, (stop, crc32))
        while following := self._later_ranges.pop(self.reached, None):
            stop, crc32 = following
            self.crc32 = join_crc32(self.crc32, crc32, stop - self.reached)
            self.reached = stop


_POLYNOMIAL = 0xEDB88320
"""The polynomial of CRC-32 (IEEE 802.3): the highest bit is the coefficient of x**0, that of x**32 is implied."""

_X0 = 1 << 31


def join_crc32(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of two runs of bytes end to end; ``length`` is the second's.

    A CRC is a polynomial over GF(2) modulo a fixed one, and to append bytes multiplies it by a power of x (Mark Adler,
    ``crc32_combine`` of zlib).
    """
    return _multiply_polynomials(first, _power_of_x(8 * length)) ^ second if first else second


@lru_cache(maxsize=1024)
def _power_of_x(power: int) -> int:
    # By repeated squaring.
    result, square = _X0, _X0 >> 1
    while power:
        result = _multiply_polynomials(result, square) if power & 1 else result
        square = _multiply_polynomials(square, square)
        power >>= 1
    return result


def _multiply_polynomials(left: int, right: int) -> int:
    # Bit by bit, the right factor times x each time, reduced by the polynomial.
    product = 0
    for bit in range(31, -1, -1):
        product ^= right if left >> bit & 1 else 0
        right = right >> 1 ^ (_POLYNOMIAL if right & 1 else 0)
    return product
