"""What an exchange means for one rank: which strided parts of its tensors lie where on the wire.

The wire is a flat buffer of bytes, one part for each rank of the group.  Both sides derive it from the same plans, so
nothing is negotiated and nothing is padded but for alignment (at most 7 bytes between two ranks).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ...box import Index
from .owners import Int
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


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """A tensor that travels, in which dtype, the rank that the trip calls `trips.OWNER`, and this rank's part of it.

    Layers that repeat share their messages.
    """

    dtype: torch.dtype
    owner: int
    trip: Trip

    def strip(self, end: End, wire_offset: int) -> Strip:
        """The box of one end, and its place on the wire."""
        return Strip(end.sizes, end.strides, end.offset, wire_offset, self.dtype)


class Strips(Mapping[Key, tuple[Strip, ...]]):
    """The strips of what travels in one direction, made when they are asked for: what is kept of each is one number.

    Args:
        numbers: of the messages, by what travels.
        ends: of each message, in this direction.
        wire_offsets: of all ends of all messages, in their order.
    """

    def __init__(
        self,
        numbers: Mapping[Key, int],
        messages: Sequence[Message],
        ends: Sequence[Sequence[End]],
        wire_offsets: Int,
    ) -> None:
        self._numbers, self._messages, self._ends, self._wire_offsets = numbers, messages, ends, wire_offsets
        self._first = np.cumsum([0, *map(len, ends)])

    def __getitem__(self, key: Key) -> tuple[Strip, ...]:
        number = self._numbers[key]
        if not self._ends[number]:
            raise KeyError(key)
        offsets = self._wire_offsets[self._first[number] : self._first[number + 1]].tolist()
        return tuple(map(self._messages[number].strip, self._ends[number], offsets))

    def __iter__(self) -> Iterator[Key]:
        return (key for key, number in self._numbers.items() if self._ends[number])

    def __len__(self) -> int:
        return sum(map(bool, self._ends))


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

    def listed(self) -> Route:
        """The same, with all strips made, for those who go through them at every step."""
        return replace(self, sends=dict(self.sends), receives=dict(self.receives))


def route(numbers: Mapping[Key, int], messages: Sequence[Message], positions: Mapping[int, int]) -> Route:
    """The route of a list of messages, which every rank of a group must list alike.

    Args:
        numbers: of what travels, in the order of the messages.
        positions: of the ranks in their group.
    """
    own = {
        key: tuple((message.strip(here, 0), message.strip(there, 0)) for here, there in message.trip.own)
        for key, message in zip(numbers, messages, strict=True)
        if message.trip.own
    }
    gives = [message.trip.gives for message in messages]
    takes = [message.trip.takes for message in messages]
    sends, send_counts = _laid_out(messages, gives, positions)
    receives, receive_counts = _laid_out(messages, takes, positions)
    return Route(
        Strips(numbers, messages, gives, sends), Strips(numbers, messages, takes, receives), own, send_counts,
        receive_counts,
    )  # fmt: skip


def _laid_out(
    messages: Sequence[Message], ends: Sequence[Sequence[End]], positions: Mapping[int, int]
) -> tuple[Int, tuple[int, ...]]:
    """Where each end of each message begins on the wire, and how many bytes each rank's part has: boxes end to end, by
    the rank on the other side and then in the order of the messages.
    """
    peers: list[int] = []
    sizes: list[int] = []
    for message, some in zip(messages, ends, strict=True):
        owner, item = positions[message.owner], message.dtype.itemsize
        for end in some:
            peers.append(owner if end.peer == OWNER else positions[end.peer])  # type: ignore[index]
            sizes.append(end.numel * item)
    each = np.array([message.dtype.itemsize for message in messages], np.int64)
    items = np.repeat(each, np.array([*map(len, ends)], np.int64))
    across = np.array(peers, np.int64)
    order = np.argsort(across, kind="stable")
    present, first = np.unique(across[order], return_index=True)
    ordered = list(zip(np.array(sizes, np.int64)[order].tolist(), items[order].tolist(), strict=True))
    empty = _up(NOTE, WIRE_ALIGNMENT)
    counts, more = [empty] * len(positions), 0
    begins: list[int] = []
    for peer, (low, high) in zip(present.tolist(), pairwise([*first.tolist(), len(order)]), strict=True):
        start = peer * empty + more
        end = start + NOTE
        for size, item in ordered[low:high]:
            begin = -(-end // item) * item
            begins.append(begin)
            end = begin + size
        counts[peer] = _up(end, WIRE_ALIGNMENT) - start
        more += counts[peer] - empty
    offsets = np.empty(len(order), np.int64)
    offsets[order] = begins
    return offsets, tuple(counts)


def _up(offset: int, to: int) -> int:
    return -(-offset // to) * to
