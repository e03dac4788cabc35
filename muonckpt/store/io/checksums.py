"""All digests of a chunk's bytes, computed in one pass over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash
from isal import isal_zlib
from numpy.typing import NDArray

from ...box import Index
from ...fingerprint import combine, fingerprint

_BAND_BYTES = 1 << 20
"""Bytes summed at a time: few enough that they stay in cache from one sum to the next, and to the write."""

RawBytes = bytes | memoryview

Checksum = Callable[[RawBytes, int], int]
"""Continues a checksum: (the next bytes, the checksum of those before, 0 at first) to the checksum of all."""

_POLYNOMIAL = 0xEDB88320
"""The polynomial of CRC-32 (IEEE 802.3): the highest bit is the coefficient of x**0, that of x**32 is implied."""

_X0 = 1 << 31


def crc32_of(raw: RawBytes, start: int) -> int:
    """CRC-32, the one of zip."""
    return isal_zlib.crc32(raw, start)


class Sums:
    """The xxh3-128, a checksum and the share of the fingerprint of a payload, as its parts pass in order."""

    def __init__(self, checksum_of: Checksum = crc32_of) -> None:
        self.checksum = 0
        self.share = 0
        self._checksum_of = checksum_of
        self._xxh3 = xxhash.xxh3_128()

    @property
    def digest(self) -> str:
        """xxh3-128 in hex."""
        return str(self._xxh3.hexdigest())

    def add(self, words: NDArray[Any], origin: Index) -> memoryview:
        """Add the next box of the payload: dense unsigned words whose first element has the global index ``origin``.

        Words may have one more, last dim than the origin: the halves of 16-byte elements.  Returns their bytes.
        """
        raw = words.reshape(-1).view(np.uint8).data
        self._xxh3.update(raw)
        self.checksum = self._checksum_of(raw, self.checksum)
        self.share = combine(self.share, fingerprint(words, origin + (0,) * (words.ndim - len(origin))))
        return raw

    def passing(self, words: NDArray[Any], origin: Index) -> Iterator[memoryview]:
        """Add a whole dense chunk band by band, and yield the bytes of each band."""
        if words.ndim == 0 or words.nbytes <= _BAND_BYTES:
            yield self.add(words, origin)
            return
        rows = max(_BAND_BYTES * len(words) // words.nbytes, 1)
        for start in range(0, len(words), rows):
            yield self.add(words[start : start + rows], (origin[0] + start, *origin[1:]))


def xxh3_128(parts: Iterable[RawBytes]) -> str:
    """Digest of the concatenated parts, in hex."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return str(state.hexdigest())


def crc32(parts: Iterable[RawBytes]) -> int:
    """CRC-32 (the one of zip) of the concatenated parts."""
    total = 0
    for part in parts:
        total = isal_zlib.crc32(part, total)
    return total


def crc32_joined(first: int, second: int, length: int) -> int:
    """CRC-32 of two runs of bytes end to end, from those of both; ``length`` is the second's, in bytes.

    A CRC is a polynomial over GF(2) modulo a fixed one, and to append bytes multiplies what came before by a power of
    x (Mark Adler, ``crc32_combine`` of zlib).
    """
    return _product(first, _x_to(8 * length)) ^ second


@lru_cache(maxsize=1024)
def _x_to(power: int) -> int:
    """x**power, by squaring."""
    result, square = _X0, _X0 >> 1
    while power:
        result = _product(result, square) if power & 1 else result
        square = _product(square, square)
        power >>= 1
    return result


def _product(left: int, right: int) -> int:
    """Product of two polynomials modulo that of CRC-32; the highest bit is the coefficient of x**0."""
    product = 0
    for bit in range(31, -1, -1):
        product ^= right if left >> bit & 1 else 0
        right = right >> 1 ^ (_POLYNOMIAL if right & 1 else 0)
    return product
