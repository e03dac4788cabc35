"""Small chunks, many at a time: read, summed and laid out in a few calls for all of them instead of several for each.

A window is a range of the file to write with nothing but small chunks in it.  In a window those of one shape that are
copied alike, as the matrices of many layers or experts are, become the rows of one array.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from ...fingerprint import box_shares
from ...layout import Buffer
from ...record import Extent
from ...store.reading.dtypes import dtype, itemsize
from ...store.reading.payloads import Payloads
from .journal import ChunkSums
from .output_files import OutputChunk

SMALL_BYTES = 64 << 10
"""The most bytes of a small chunk in its file, and of the elements of chunks that it is copied from."""

_GAP = 16 << 10
"""Bytes between two ranges that are read along, because a call costs as much."""

_MOST = 1 << 20
"""Bytes that are read at a time."""

Bytes = NDArray[np.uint8]


def windows(
    chunks: Sequence[OutputChunk], most: int, fits: Callable[[OutputChunk], bool]
) -> Iterator[Sequence[OutputChunk]]:
    """The chunks of a file in order: those that fit, in at most ``most`` bytes, together, others alone."""
    window: list[OutputChunk] = []
    for chunk in chunks:
        small = fits(chunk)
        if window and (not small or chunk.stored.item.end - window[0].stored.item.offset > most):
            yield window
            window = []
        if small:
            window.append(chunk)
        else:
            yield (chunk,)
    if window:
        yield window


def is_small(chunk: OutputChunk) -> bool:
    """Whether a chunk has elements, and they are in small chunks of the source."""
    if not chunk.frame.payload_length > 0 or chunk.frame.length > SMALL_BYTES:
        return False
    size, stored = itemsize(chunk.tensor.dtype), chunk.output.chunks
    return all(stored[copy.source.buffer].box.numel * size <= SMALL_BYTES for copy in chunk.copies)


def alike(window: Sequence[OutputChunk]) -> list[list[int]]:
    """The numbers of chunks that have the same box and frame, and are filled by the same copies."""
    groups: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for number, chunk in enumerate(window):
        groups[id(chunk.frame), id(chunk.copies), chunk.stored.box, chunk.tensor.dtype].append(number)
    return list(groups.values())


def rows(payloads: Payloads, extents: Sequence[Extent]) -> Bytes:
    """The bytes of extents of one length, ``[extents, length]``; neighbours in a file are read together."""
    length = extents[0].length
    found = np.empty((len(extents), length), np.uint8)
    order = sorted(range(len(extents)), key=lambda number: (extents[number].file, extents[number].offset))
    first = 0
    while first < len(order):
        start = extents[order[first]]
        last, end = first, start.end
        while last + 1 < len(order):
            following = extents[order[last + 1]]
            if following.file != start.file or following.offset > end + _GAP or following.end > start.offset + _MOST:
                break
            last, end = last + 1, following.end
        raw = np.frombuffer(payloads.glance(Extent(start.file, start.offset, end - start.offset)), np.uint8)
        for number in order[first : last + 1]:
            offset = extents[number].offset - start.offset
            found[number] = raw[offset : offset + length]
        first = last + 1
    return found


def copied(chunk: OutputChunk, sources: Mapping[Buffer, Bytes]) -> Bytes:
    """The elements of chunks that are alike, ``[chunks, payload_length]``, from those of their sources, by buffer."""
    size = itemsize(chunk.tensor.dtype)
    elements = np.empty((len(next(iter(sources.values()))), chunk.frame.payload_length), np.uint8)
    for copy in chunk.copies:
        start, target, length = (size * n for n in (copy.source.offset, copy.target.offset, copy.box.numel))
        elements[:, target : target + length] = sources[copy.source.buffer][:, start : start + length]
    return elements


def sums_of(chunk: OutputChunk, elements: Bytes) -> Iterator[ChunkSums]:
    """The sums of the elements of chunks that are alike."""
    kind, box, length = dtype(chunk.tensor.dtype), chunk.stored.box, elements.shape[1]
    halves = (2,) if kind.itemsize > 8 else ()
    words = elements.view(kind.bits).reshape(len(elements), *box.shape, *halves)
    raw, checksum_of = elements.reshape(-1).data, chunk.frame.checksum_of
    for number, share in enumerate(box_shares(words, box.lo + (0,) * len(halves))):
        own = raw[number * length : (number + 1) * length]
        yield ChunkSums(xxhash.xxh3_128_hexdigest(own), checksum_of(own, 0), share)
