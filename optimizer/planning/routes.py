"""What an exchange means for one rank: which strided parts of its tensors lie where on the wire.

The wire is a flat buffer of bytes, one part for each rank of the group.  Both sides derive it from the same plans, so
nothing is negotiated and nothing is padded but for alignment (at most 7 bytes between two ranks).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from torch import Tensor

from ...box import Index
from ...layout import Buffer, Place
from ...plan import Copy, Share
from .encodings import Coding
from .units import OWNER

ALIGN = 8
"""Each rank's part of the wire begins at a multiple of this, in bytes: of the size of any element."""

NOTE = 16
"""Bytes in front of each rank's part: what the sender is about to do, as a digest (`step.agreement.Intent`)."""

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

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def of(self, memory: Tensor) -> Tensor:
        """This box as a view of a contiguous tensor."""
        return memory.as_strided(self.sizes, self.strides, memory.storage_offset() + self.offset)

    def on(self, wire: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the wire: this box's values, and the bytes after them."""
        count = self.numel * self.coding.dtype.itemsize
        values = wire.narrow(0, self.at, count).view(self.coding.dtype).view(self.sizes)
        return values, wire.narrow(0, self.at + count, self.coding.tail)


@dataclass(frozen=True, slots=True)
class Own:
    """What a rank has for itself: pairs of strips, from and to, at the same places of a buffer of ``bytes``.

    It goes through the same coding as what travels, matrix by matrix, and never lies on a wire.
    """

    sources: tuple[Strip, ...] = ()
    targets: tuple[Strip, ...] = ()
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Route:
    """One rank's part of an exchange: strips by what travels, and bytes to and from each rank of the group."""

    sends: Mapping[Key, tuple[Strip, ...]]
    receives: Mapping[Key, tuple[Strip, ...]]
    own: Mapping[Key, Own]
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Of both buffers together."""
        return sum(self.send_counts) + sum(self.receive_counts)


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor that travels, how, the rank that the share calls `units.OWNER`, and this rank's share of its plan."""

    key: Key
    coding: Coding
    owner: int
    share: Share

    def rank_of(self, buffer: Buffer) -> int:
        found = self.owner if buffer == OWNER else buffer
        assert isinstance(found, int), "the buffers of an exchange are ranks"
        return found


def route(items: Sequence[Item], ranks: Sequence[int], rank: int) -> Route:
    """The route of a list of items, which every rank of ``ranks`` (in the order of its group) must list alike."""
    peers = {peer: index for index, peer in enumerate(ranks)}
    outgoing: defaultdict[int, list[tuple[Item, Copy]]] = defaultdict(list)
    incoming: defaultdict[int, list[tuple[Item, Copy]]] = defaultdict(list)
    for item in items:
        for copy in item.share.gives:
            outgoing[peers[item.rank_of(copy.target.buffer)]].append((item, copy))
        for copy in item.share.takes:
            incoming[peers[item.rank_of(copy.source.buffer)]].append((item, copy))
    outgoing.pop(peers[rank], None)
    kept = incoming.pop(peers[rank], [])
    sends, send_counts = _laid_out([outgoing.get(peer, []) for peer in range(len(ranks))], lambda copy: copy.source)
    receives, receive_counts = _laid_out([incoming.get(p, []) for p in range(len(ranks))], lambda copy: copy.target)
    return Route(sends, receives, _own(kept), send_counts, receive_counts)


def _own(kept: Sequence[tuple[Item, Copy]]) -> Mapping[Key, Own]:
    found = {}
    for item, copies in groupby(kept, key=itemgetter(0)):
        pairs = [(item, copy) for _, copy in copies]
        sources, [size] = _laid_out([pairs], lambda copy: copy.source)
        targets, _ = _laid_out([pairs], lambda copy: copy.target)
        found[item.key] = Own(sources[item.key], targets[item.key], size)
    return found


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
