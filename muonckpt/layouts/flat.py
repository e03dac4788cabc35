"""Flat buffers: tensors laid end to end and cut wherever a shard ends, in the middle of a row if need be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from ..box import Index, flat_boxes
from ..errors import LayoutError
from ..layout import Buffer, TensorLayout, dense


@dataclass(frozen=True, slots=True)
class FlatShard:
    """Elements ``start:stop`` of a flat buffer lie from element ``offset`` of ``buffer``."""

    buffer: Buffer
    start: int
    stop: int
    offset: int = 0


def even_shards(numel: int, ranks: int) -> tuple[FlatShard, ...]:
    """A flat buffer of ``numel`` elements (padding included) cut into equal parts over ranks 0 … ``ranks - 1``.

    Raises:
        LayoutError: the buffer does not divide; pad it first.
    """
    if numel % ranks:
        raise LayoutError(f"a flat buffer of {numel} elements does not divide over {ranks} ranks")
    size = numel // ranks
    return tuple(FlatShard(rank, rank * size, (rank + 1) * size) for rank in range(ranks))


@lru_cache(maxsize=65536)
def flat_layout(shape: Index, start: int, shards: tuple[FlatShard, ...]) -> TensorLayout:
    """The layout of a tensor whose row-major elements occupy ``start : start + numel`` of a sharded flat buffer.

    Raises:
        LayoutError: the shards do not hold all of that range.
    """
    stop = start + math.prod(shape)
    fragments = []
    for shard in shards:
        lo, hi = max(start, shard.start), min(stop, shard.stop)
        offset = shard.offset + lo - shard.start
        for box in flat_boxes(shape, lo - start, hi - start) if lo < hi else ():
            fragments.append(dense(box, shard.buffer, offset))
            offset += box.numel
    return TensorLayout.of(shape, tuple(fragments))
