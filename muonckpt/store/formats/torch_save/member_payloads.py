"""The bytes of files of ``torch.save``, with a checksum for each storage of which tensors use parts."""

from __future__ import annotations

from collections.abc import Mapping

from ....record import Chunk, Extent
from ...io.checksums import crc32
from ...io.location import Location
from ...reading.payloads import BAND_BYTES, Payloads, compare


class MemberPayloads(Payloads):
    """The bytes of a directory.

    Args:
        in_memory: bytes by file name that stand in for files of the directory.
        checksums: the CRC-32 of items that are larger than the payloads in them.
    """

    def __init__(self, directory: Location, in_memory: Mapping[str, bytes], checksums: Mapping[Extent, int]) -> None:
        super().__init__(directory, in_memory)
        self._checksums = checksums
        self._sound: set[Extent] = set()

    def is_checked(self, chunk: Chunk) -> bool:
        return super().is_checked(chunk) or chunk.item in self._checksums

    def check_inside(self, item: Extent) -> None:
        """Compare a whole storage with its CRC-32, once."""
        expected = self._checksums.get(item)
        if expected is None or item in self._sound:
            return
        starts = range(item.offset, item.end, BAND_BYTES)
        parts = (self.view(Extent(item.file, start, min(BAND_BYTES, item.end - start))) for start in starts)
        compare("CRC-32", f"{crc32(parts):08x}", f"{expected:08x}")
        self._sound.add(item)
