"""What an exchange means for one rank: which strided parts of its tensors lie where on the wire.

The wire is a flat buffer of bytes, one part for each rank of the group.  Both sides derive it from the same plans, so
nothing is negotiated and nothing is padded but for alignment (at most 7 bytes between two ranks).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...box import Index
from .trips import OWNER, End, Trip

WIRE_ALIGNMENT = 8
"""Each rank's part of the wire begins at a multiple of this, in bytes: of the size of any element."""

NOTE = 16
"""Bytes in front of each rank's part: what the sender is about to do, as a digest (`step.agreement.Intent`)."""

Key = tuple[int, str]
"""A tensor that travels: the number of its matrix, and its slot."""


@dataclass(frozen=True, slots=True)
class Strip:
    """A box in a tensor's memory (``offset``, ``sizes``, ``strides``, in elements) and, dense, on the wire, where it
    begins at the byte ``wire_offset`` and is of ``dtype``.
    """

    sizes: Index
    strides: Index
    offset: int
    wire_offset: int
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def of(self, memory: Tensor) -> Tensor:
        """This box as a view of a contiguous tensor."""
        return memory.as_strided(self.sizes, self.strides, memory.storage_offset() + self.offset)

    def on(self, wire: Tensor) -> Tensor:
        """This box as a view of the wire."""
        return wire.narrow(0, self.wire_offset, self.numel * self.dtype.itemsize).view(self.dtype).view(self.sizes)


LocalCopy = tuple[Strip, Strip]
"""What a rank has for itself: the same box where it lies, and where it goes; it never lies on a wire."""


@dataclass(frozen=True, slots=True)
class Route:
    """One rank's part of an exchange: strips by what travels, and bytes to and from each rank of the group."""

    sends: Mapping[Key, tuple[Strip, ...]]
    receives: Mapping[Key, tuple[Strip, ...]]
    own: Mapping[Key, tuple[LocalCopy, ...]]
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Of both buffers together."""
        return sum(self.send_counts) + sum(self.receive_counts)


@dataclass(frozen=True, slots=True)
class Message:
    """A tensor that travels, in which dtype, the rank that the trip calls `trips.OWNER`, and this rank's part of it."""

    key: Key
    dtype: torch.dtype
    owner: int
    trip: Trip

    def strip(self, end: End, wire_offset: int) -> Strip:
        """The box of one end, and its place on the wire."""
        return Strip(end.sizes, end.strides, end.offset, wire_offset, self.dtype)


def route(messages: Sequence[Message], ranks: Sequence[int], rank: int) -> Route:
    """The route of a list of messages, which every rank of ``ranks`` (in the order of its group) must list alike."""
    peers = {peer: index for index, peer in enumerate(ranks)}
    outgoing: defaultdict[int, list[tuple[Message, End]]] = defaultdict(list)
    incoming: defaultdict[int, list[tuple[Message, End]]] = defaultdict(list)
    own: dict[Key, tuple[LocalCopy, ...]] = {}
    for message in messages:
        trip, owner = message.trip, peers[message.owner]
        for end in trip.gives:
            outgoing[owner if end.peer == OWNER else peers[end.peer]].append((message, end))  # type: ignore[index]
        for end in trip.takes:
            incoming[owner if end.peer == OWNER else peers[end.peer]].append((message, end))  # type: ignore[index]
        if trip.own:
            own[message.key] = tuple((message.strip(here, 0), message.strip(there, 0)) for here, there in trip.own)
    sends, send_counts = _laid_out(outgoing, len(ranks))
    receives, receive_counts = _laid_out(incoming, len(ranks))
    return Route(sends, receives, own, send_counts, receive_counts)


def _laid_out(
    by_peer: Mapping[int, Sequence[tuple[Message, End]]], ranks: int
) -> tuple[Mapping[Key, tuple[Strip, ...]], tuple[int, ...]]:
    """Boxes end to end, by the rank on the other side and then in the order of the messages."""
    strips: defaultdict[Key, list[Strip]] = defaultdict(list)
    empty = _up(NOTE, WIRE_ALIGNMENT)
    counts, more = [empty] * ranks, 0
    for peer in sorted(by_peer):
        start = peer * empty + more
        end = start + NOTE
        for message, box in by_peer[peer]:
            begin = _up(end, message.dtype.itemsize)
            strips[message.key].append(message.strip(box, begin))
            end = begin + box.numel * message.dtype.itemsize
        counts[peer] = _up(end, WIRE_ALIGNMENT) - start
        more += counts[peer] - empty
    return {key: tuple(listed) for key, listed in strips.items()}, tuple(counts)


def _up(offset: int, to: int) -> int:
    return -(-offset // to) * to
