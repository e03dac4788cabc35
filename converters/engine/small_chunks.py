"""Small chunks, many at a time: read, summed and laid out in a few calls for all of them instead of several for each.

A window is a range of the file to write with nothing but small chunks in it.  In a window those of one shape that are
copied alike, as the matrices of many layers or experts are, become the rows of one array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from ...columns import Row
from ...fingerprint import box_shares
from ...layout import Buffer
from ...record import Chunk, Extent
from ...store.reading.dtypes import dtype, itemsize
from ...store.reading.payloads import Payloads
from .journal import SUMS, ChunkSums
from .output_chunks import ChunkPlan, OutputChunks
from .outputs import OutputTensor

SMALL_BYTES = 64 << 10
"""The most bytes of a small chunk in its file, and of the elements of chunks that it is copied from."""

_GAP = 16 << 10
"""Bytes between two ranges that are read along, because a call costs as much."""

_MOST = 1 << 20
"""Bytes that are read at a time."""

Bytes = NDArray[np.uint8]


def windows(
    chunks: OutputChunks, most: int, fits: Callable[[OutputTensor, ChunkPlan], bool]
) -> Iterator[Sequence[int]]:
    """The numbers of a file's chunks in order: those that fit, in at most ``most`` bytes, together, others alone."""
    offsets, start = chunks.offsets.tolist(), 0
    for number, (output, plan, offset) in enumerate(zip(chunks.outputs, chunks.plans, offsets, strict=True)):
        small = fits(output, plan)
        if start < number and (not small or offset + plan.frame.length - offsets[start] > most):
            yield range(start, number)
            start = number
        if not small:
            yield range(number, number + 1)
            start = number + 1
    if start < len(chunks):
        yield range(start, len(chunks))


def is_small(plan: ChunkPlan, stored: Mapping[Buffer, Chunk]) -> bool:
    """Whether a chunk has elements, and they are in small chunks of the source, which are ``stored``."""
    if not plan.frame.payload_length > 0 or plan.frame.length > SMALL_BYTES:
        return False
    size = itemsize(plan.dtype)
    return all(stored[buffer].box.numel * size <= SMALL_BYTES for buffer in plan.buffers)


def rows(payloads: Payloads, stored: Sequence[Row], length: int) -> Bytes:
    """The payloads of chunks, all of this length, ``[chunks, length]``; neighbours in a file are read together."""
    found = np.empty((len(stored), length), np.uint8)
    places = [(file, offset) for file, _, _, offset, _, _, _ in stored]
    order = sorted(range(len(places)), key=places.__getitem__)
    first = 0
    while first < len(order):
        file, start = places[order[first]]
        last, end = first, start + length
        while last + 1 < len(order):
            following, offset = places[order[last + 1]]
            if following != file or offset > end + _GAP or offset + length > start + _MOST:
                break
            last, end = last + 1, offset + length
        raw = np.frombuffer(payloads.glance(Extent(file, start, end - start)), np.uint8)
        for number in order[first : last + 1]:
            offset = places[number][1] - start
            found[number] = raw[offset : offset + length]
        first = last + 1
    return found


def copied(plan: ChunkPlan, sources: Mapping[Buffer, Bytes]) -> Bytes:
    """The elements of chunks of one plan, ``[chunks, payload_length]``, from those of their sources, by buffer."""
    size = itemsize(plan.dtype)
    elements = np.empty((len(next(iter(sources.values()))), plan.frame.payload_length), np.uint8)
    for copy in plan.copies:
        start, target, length = (size * n for n in (copy.source.offset, copy.target.offset, copy.box.numel))
        elements[:, target : target + length] = sources[copy.source.buffer][:, start : start + length]
    return elements


def sums_of(plan: ChunkPlan, elements: Bytes) -> ChunkSums:
    """The sums of the elements of chunks of one plan."""
    kind, length, checksum_of = dtype(plan.dtype), elements.shape[1], plan.frame.checksum_of
    halves = (2,) if kind.itemsize > 8 else ()
    words = elements.view(kind.bits).reshape(len(elements), *plan.box.shape, *halves)
    raw, sums = elements.reshape(-1).data, np.empty(len(elements), SUMS)
    parts = [raw[start : start + length] for start in range(0, len(raw), length)]
    sums["digest"] = np.frombuffer(b"".join(map(xxhash.xxh3_128_digest, parts)), "V16")
    sums["checksum"] = [checksum_of(part, 0) for part in parts]
    sums["share"] = box_shares(words, plan.box.lo + (0,) * len(halves))
    return sums
