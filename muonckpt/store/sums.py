"""Everything that is computed of a chunk's bytes, in one pass over them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import xxhash
from isal import isal_zlib
from numpy.typing import NDArray

from ..box import Index
from ..fingerprint import combine, fingerprint

BAND = 1 << 20
"""Bytes summed at a time: few enough that they stay in cache from one sum to the next, and to the write."""

Bytes = bytes | memoryview


class Sums:
    """The xxh3-128, the CRC-32 and the share of the fingerprint of a payload, as its parts pass in order."""

    def __init__(self) -> None:
        self.crc32 = 0
        self.share = 0
        self._xxh3 = xxhash.xxh3_128()

    @property
    def digest(self) -> str:
        """xxh3-128 in hex."""
        return str(self._xxh3.hexdigest())

    def add(self, words: NDArray[Any], origin: Index) -> memoryview:
        """The next box of the payload: dense unsigned words whose first element has the global index ``origin``.

        Words may have one more, last dim than the origin: the halves of 16-byte elements.  Returns their bytes.
        """
        raw = words.reshape(-1).view(np.uint8).data
        self._xxh3.update(raw)
        self.crc32 = isal_zlib.crc32(raw, self.crc32)
        self.share = combine(self.share, fingerprint(words, origin + (0,) * (words.ndim - len(origin))))
        return raw

    def passing(self, words: NDArray[Any], origin: Index) -> Iterator[memoryview]:
        """Add a whole dense chunk band by band, and hand on the bytes of each."""
        if words.ndim == 0 or words.nbytes <= BAND:
            yield self.add(words, origin)
            return
        rows = max(BAND * len(words) // words.nbytes, 1)
        for start in range(0, len(words), rows):
            yield self.add(words[start : start + rows], (origin[0] + start, *origin[1:]))


def xxh3_128(parts: Iterable[Bytes]) -> str:
    """Digest of the concatenated parts, in hex."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return str(state.hexdigest())


def crc32(parts: Iterable[Bytes]) -> int:
    """CRC-32 (the one of zip) of the concatenated parts."""
    total = 0
    for part in parts:
        total = isal_zlib.crc32(part, total)
    return total
