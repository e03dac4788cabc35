"""What a rank returns for the items that it has written, or holds as a replica of what another rank has written."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DestinationError

_ROW = struct.Struct("<16sQQI")
_ROWS = np.dtype([("digest", "<u8", (2,)), ("share", "<u8"), ("length", "<u8"), ("crc32", "<u4")])


@dataclass(frozen=True, slots=True)
class ItemSums:
    """Of one item.

    Attributes:
        digest: xxh3-128, in hex, of the elements of a tensor, or of the bytes of an object.
        share: of the fingerprint of the tensor; 0 for an object.
        length: bytes of the item in the file; 0 if this rank does not write it.
        crc32: of the elements of a tensor; 0 for an object.
    """

    digest: str
    share: int = 0
    length: int = 0
    crc32: int = 0


def packed(items: Sequence[ItemSums]) -> bytes:
    """A receipt: 36 bytes for each item, in the order of the plan."""
    return b"".join(_ROW.pack(bytes.fromhex(item.digest), item.share, item.length, item.crc32) for item in items)


def unpacked(receipt: bytes, expected: int, rank: int) -> NDArray[Any]:
    """The rows of a receipt.

    Raises:
        DestinationError: there are more or fewer than the rank has planned.
    """
    if len(receipt) != expected * _ROW.size:
        raise DestinationError(
            f"rank {rank} planned to write or compare {expected} items and did so with {len(receipt) / _ROW.size:g}"
        )
    return np.frombuffer(receipt, _ROWS)
