"""What an exchange means for one rank: which strided parts of its tensors lie where on the wire.

The wire is a flat buffer of bytes, one part for each rank of the group.  Both sides derive it from the same plans, so
nothing is negotiated and nothing is padded but for alignment (at most 7 bytes between two ranks).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..box import Index
from ..layout import Place
from ..plan import Copy, Share
from .coding import Coding

ALIGN = 8
"""Each rank's part of the wire begins at a multiple of this, in bytes: of the size of any element."""

NOTE = 8
"""Bytes in front of each rank's part: a digest of what the sender is about to do."""

Key = tuple[int, str]
"""A tensor that travels: the number of its matrix, and its slot."""


@dataclass(frozen=True, slots=True)
class Strip:
    """A box in a tensor's memory (``offset``, ``sizes``, ``strides``, in elements) and, dense, on the wire.

    ``at`` is in bytes; ``coding`` says what lies there.
    """

    sizes: Index
    strides: Index
    offset: int
    at: int
    coding: Coding

    def of(self, memory: Tensor) -> Tensor:
        """This box as a view of a contiguous tensor."""
        return memory.as_strided(self.sizes, self.strides, memory.storage_offset() + self.offset)

    def on(self, wire: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the wire: this box's values, and the bytes after them."""
        count = math.prod(self.sizes) * self.coding.dtype.itemsize
        values = wire.narrow(0, self.at, count).view(self.coding.dtype).view(self.sizes)
        return values, wire.narrow(0, self.at + count, self.coding.tail)


@dataclass(frozen=True, slots=True)
class Route:
    """One rank's part of an exchange: strips by what travels, and bytes to and from each rank of the group."""

    sends: Mapping[Key, tuple[Strip, ...]]
    receives: Mapping[Key, tuple[Strip, ...]]
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Of both buffers together."""
        return sum(self.send_counts) + sum(self.receive_counts)


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor that travels, how, and this rank's share of its plan."""

    key: Key
    coding: Coding
    share: Share


def route(items: Iterable[Item], ranks: Sequence[int]) -> Route:
    """The route of a list of items, which every rank of ``ranks`` (in the order of its group) must list alike."""
    peers = {rank: index for index, rank in enumerate(ranks)}
    outgoing: list[list[tuple[Item, Copy]]] = [[] for _ in ranks]
    incoming: list[list[tuple[Item, Copy]]] = [[] for _ in ranks]
    for item in items:
        for copy in item.share.gives:
            outgoing[peers[copy.target.buffer]].append((item, copy))  # type: ignore[index]
        for copy in item.share.takes:
            incoming[peers[copy.source.buffer]].append((item, copy))  # type: ignore[index]
    sends, send_counts = _laid_out(outgoing, lambda copy: copy.source)
    receives, receive_counts = _laid_out(incoming, lambda copy: copy.target)
    return Route(sends, receives, send_counts, receive_counts)


def _laid_out(
    by_peer: Sequence[Sequence[tuple[Item, Copy]]], here: Callable[[Copy], Place]
) -> tuple[Mapping[Key, tuple[Strip, ...]], tuple[int, ...]]:
    """Copies end to end, by the rank on the other side and then in the order of the items."""
    strips: defaultdict[Key, list[Strip]] = defaultdict(list)
    counts, start = [], 0
    for copies in by_peer:
        at = start + NOTE
        for item, copy in copies:
            place, size = here(copy), item.coding.dtype.itemsize
            at = _up(at, size)
            strips[item.key].append(Strip(copy.box.shape, place.strides, place.offset, at, item.coding))
            at += copy.box.numel * size + item.coding.tail
        counts.append(_up(at, ALIGN) - start)
        start += counts[-1]
    return {key: tuple(found) for key, found in strips.items()}, tuple(counts)


def _up(at: int, to: int) -> int:
    return -(-at // to) * to
