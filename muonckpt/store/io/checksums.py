"""All digests of a chunk's bytes, computed in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
        """Add a whole dense chunk band by band, and yield the bytes of each band."""
        if words.ndim == 0 or words.nbytes <= _BAND_BYTES:
            yield self.add(words, origin)
            return
        rows = max(_BAND_BYTES * len(words) // words.nbytes, 1)
        for start in range(0, len(words), rows):
            yield self.add(words[start : start + rows], (origin[0] + start, *origin[1:]))


def xxh3_128(parts: Iterable[RawBytes]) -> str:
    """Return the digest of the concatenated parts, in hex."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return str(state.hexdigest())


def crc32(parts: Iterable[RawBytes]) -> int:
    total = 0
    for part in parts:
        total = isal_zlib.crc32(part, total)
    return total
