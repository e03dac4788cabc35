"""Every limit on what a file may cost its reader, and the switch that lifts them.

Nothing is read before its size has been compared with a limit, and parsed values are counted.  A checkpoint may have
hundreds of megabytes of descriptions, so a long description must be in proportion: no longer than the other files of
the checkpoint together, as far as these really take space on the disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ...names.errors import SourceError
from .location import Location, Remote, local_errors, raise_error

SWITCH = "MUONCKPT_LIMITS"
"""The environment variable that lifts all limits if it is ``off``, for a checkpoint that is trusted."""

SMALL_DESCRIPTION = 1 << 20
"""Bytes of a description, such as a manifest, a header or an index, that are read whatever else there is."""

ITEM_BYTES = 8 << 20
"""Bytes of the pickle of an item that is decoded.  The names of a parameter group's parameters are one item."""

ITEM_CONTAINERS = 1 << 18
"""Tuples, lists, dicts and objects in such a pickle."""

UNFOLDED = 8
"""Elements and characters that an item may have when the parts that its pickle shares are written out: so many times
the pickle's bytes, and `SMALL_DESCRIPTION` more."""

PICKLE_BYTES = 4
"""Bytes of a pickle for each tuple, list, dict and object in it, beyond the first `FREE_PARTS`.  DCP writes six."""

JSON_BYTES = 12
"""Bytes of JSON or TOML for each list and table in it, beyond the first `FREE_PARTS`.  Our manifests have about 50."""

FREE_PARTS = 1 << 16

KEYS = 10_000
"""Keys of dicts, in one pickle; an attacker can choose many with the same hash: large integers, floats and
tuples.  Hashes of strings are secret, small integers are their own."""

SMALL_KEY = 1 << 24

ZIP_DIRECTORY = 16 << 20
"""Bytes of the directory of a zip archive, about 60 for each member."""

DOTS = 2_000
"""Dots in a line of TOML: its reader takes quadratic time for dotted keys."""

DECODED = 128 << 20
"""Bytes that the file of an encoded zarr array may have when it is decoded, and 1000 more for each on the disk."""

HOLES = 64
"""Bytes that a file of elements may have for each on the disk, and `DECODED` more: holes take time to read too."""


class LimitError(SourceError):
    """A file would cost more than its reader allows."""


def check_limit(size: int, limit: int, noun: str) -> None:
    """Raise `LimitError`, which says how limits are lifted, if a size or a number is larger than its limit."""
    if size > limit and os.environ.get(SWITCH) != "off":
        raise LimitError(
            f"expected at most {limit} {noun}, found {size}; if you trust this checkpoint, set {SWITCH}=off in the "
            "environment, which lifts the limits on what a file may cost (docs/guide/reliability.md)"
        )


def check_description(file: Location, size: int) -> None:
    """Check that a file that describes those in its folder and below is no longer than in proportion to them."""
    if size <= SMALL_DESCRIPTION:
        return
    bytes_beside = 0
    for length in _sizes_beside(file):
        bytes_beside += length
        if SMALL_DESCRIPTION + bytes_beside >= size:
            return
    check_limit(
        size,
        SMALL_DESCRIPTION + bytes_beside,
        f"bytes in {file}, whose neighbours have {bytes_beside} bytes on the disk (are some missing?)",
    )


def bytes_on_disk(status: os.stat_result) -> int:
    """Return the bytes that a local file has on the disk: fewer than its size if it has holes."""
    return min(status.st_size, 512 * status.st_blocks)


def check_holes(file: Location, size: int, on_disk: int) -> None:
    """Check that a file of elements is not almost all holes."""
    check_limit(size, DECODED + HOLES * on_disk, f"bytes in {file}, which has {on_disk} bytes on the disk")


def check_text(data: bytes) -> None:
    """Check, before a JSON or TOML text is parsed, that it has no more lists and tables than descriptions have."""
    if len(data) > FREE_PARTS:
        limit = FREE_PARTS + len(data) // JSON_BYTES
        check_limit(data.count(b"[") + data.count(b"{"), limit, "lists and tables in the text")


def _sizes_beside(file: Location) -> Iterator[int]:
    """Yield the sizes of all other files in the folder of a file and below it, each file once."""
    if isinstance(file, Remote):
        described = file.parent.described()
        yield from (int(info["size"] or 0) for name, info in described.items() if name != file.name)
        return
    # A file with several names counts once, and the description itself not at all.
    with local_errors(file.parent):
        description = file.lstat()
        counts_blocks = description.st_blocks > 0  # some file systems do not say how many there are
        counted_files = {(description.st_dev, description.st_ino)}
        for folder, _, names in os.walk(file.parent, onerror=raise_error):
            for name in names:
                status = (Path(folder) / name).lstat()
                if (status.st_dev, status.st_ino) not in counted_files:
                    counted_files.add((status.st_dev, status.st_ino))
                    yield bytes_on_disk(status) if counts_blocks else status.st_size
