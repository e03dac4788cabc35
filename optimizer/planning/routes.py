"""What an exchange means for one rank: which strided parts of its tensors lie where on the wire.

The wire is a flat buffer of bytes, one part for each rank of the group.  Both sides derive it from the same plans, so
nothing is negotiated and nothing is padded but for alignment (at most 7 bytes between two ranks).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...box import Index
from ...layout import Buffer, Place
from ...plan import Copy, Share
from .units import OWNER

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
    """A tensor that travels, in which dtype, the rank that the share calls `units.OWNER`, and this rank's share of its
    plan."""

    key: Key
    dtype: torch.dtype
    owner: int
    share: Share

    def rank_of(self, buffer: Buffer) -> int:
        rank = self.owner if buffer == OWNER else buffer
        assert isinstance(rank, int), "the buffers of an exchange are ranks"
        return rank

    def strip(self, copy: Copy, place: Place, wire_offset: int) -> Strip:
        """The box of a copy at one of its ends."""
        return Strip(copy.box.shape, place.strides, place.offset, wire_offset, self.dtype)


def route(messages: Sequence[Message], ranks: Sequence[int], rank: int) -> Route:
    """The route of a list of messages, which every rank of ``ranks`` (in the order of its group) must list alike."""
    peers = {peer: index for index, peer in enumerate(ranks)}
    outgoing: defaultdict[int, list[tuple[Message, Copy]]] = defaultdict(list)
    incoming: defaultdict[int, list[tuple[Message, Copy]]] = defaultdict(list)
    for message in messages:
        for copy in message.share.gives:
            outgoing[peers[message.rank_of(copy.target.buffer)]].append((message, copy))
        for copy in message.share.takes:
            incoming[peers[message.rank_of(copy.source.buffer)]].append((message, copy))
    outgoing.pop(peers[rank], None)
    own: defaultdict[Key, list[LocalCopy]] = defaultdict(list)
    for message, copy in incoming.pop(peers[rank], []):
        own[message.key].append((message.strip(copy, copy.source, 0), message.strip(copy, copy.target, 0)))
    sends, send_counts = _laid_out([outgoing.get(peer, []) for peer in range(len(ranks))], lambda copy: copy.source)
    receives, receive_counts = _laid_out([incoming.get(p, []) for p in range(len(ranks))], lambda copy: copy.target)
    return Route(sends, receives, {key: tuple(moves) for key, moves in own.items()}, send_counts, receive_counts)


def _laid_out(
    by_peer: Sequence[Sequence[tuple[Message, Copy]]], here: Callable[[Copy], Place]
) -> tuple[Mapping[Key, tuple[Strip, ...]], tuple[int, ...]]:
    """Copies end to end, by the rank on the other side and then in the order of the messages."""
    strips: defaultdict[Key, list[Strip]] = defaultdict(list)
    counts, start = [], 0
    for copies in by_peer:
        end = start + NOTE
        for message, copy in copies:
            begin = _up(end, message.dtype.itemsize)
            strips[message.key].append(message.strip(copy, here(copy), begin))
            end = begin + copy.box.numel * message.dtype.itemsize
        counts.append(_up(end, WIRE_ALIGNMENT) - start)
        start += counts[-1]
    return {key: tuple(listed) for key, listed in strips.items()}, tuple(counts)


def _up(offset: int, to: int) -> int:
    return -(-offset // to) * to
