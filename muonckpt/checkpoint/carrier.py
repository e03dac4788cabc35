"""One rank's part in moving tensors: what it copies, packs, exchanges and unpacks, stage by stage."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from ..box import Box
from ..fingerprint import combine
from ..layout import Place
from ..layouts.boxed_tensor import Parts
from ..plan import Copy
from .all_ranks import exchanged
from .device_fingerprint import share_of, unsigned
from .transfers import Portions, Transfer


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """The parts of a tensor that are here; plans count their elements end to end.

    Attributes:
        starts: of each part.
    """

    boxes: tuple[Box, ...]
    parts: tuple[Tensor, ...]
    starts: tuple[int, ...]

    @classmethod
    def of(cls, parts: Parts) -> Memory:
        boxes = tuple(Box.of(tuple(part.shape)).shift(lo) for lo, part in parts.items())
        return cls(boxes, tuple(parts.values()), tuple(accumulate((box.numel for box in boxes), initial=0))[:-1])

    def view(self, place: Place, box: Box) -> Tensor:
        """The elements of a box that lies in the part at a place."""
        number = bisect_right(self.starts, place.offset) - 1
        lo = self.boxes[number].lo
        window = tuple(slice(a - at, b - at) for a, b, at in zip(box.lo, box.hi, lo, strict=True))
        return self.parts[number][window]

    def share(self) -> int:
        """Of the tensor's fingerprint."""
        return combine(*(share(part, box) for part, box in zip(self.parts, self.boxes, strict=True)))


def share(elements: Tensor, box: Box) -> int:
    """The share of a box in its tensor's fingerprint; waits for the device."""
    return unsigned(int(share_of(elements, box.lo)))


@dataclass(frozen=True, slots=True)
class _Parcel:
    """Elements of a box that this rank gives to another one, or takes from it; ``place`` is where they lie here."""

    number: int
    place: Place
    box: Box
    nbytes: int


Parcels = Mapping[int, Sequence[_Parcel]]
"""By the other rank, in the order of the group."""


class Carrier:
    """Carries out this rank's part of moves.

    Errors of this rank are kept in ``failure``, and it goes on exchanging, so that the others do not hang.

    Attributes:
        sent, received: bytes so far.
        largest: bytes of its buffers.
    """

    def __init__(
        self,
        source: Mapping[str, Parts],
        target: Mapping[str, Parts],
        moves: Sequence[Transfer],
        stages: Sequence[Portions],
        ranks: Sequence[int],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.failure: Exception | None = None
        self.sent = self.received = 0
        self._moves, self._ranks, self._group = moves, ranks, group
        self._source = [Memory.of(source.get(move.source, {})) for move in moves]
        self._target = [Memory.of(target.get(move.target, {})) for move in moves]
        self._gives = [[copy for copy in move.copies() if copy.source.buffer == self.rank] for move in moves]
        self._takes = [[copy for copy in move.copies() if copy.target.buffer == self.rank] for move in moves]
        self._stages = [(self._given(stage), self._taken(stage)) for stage in stages]
        self.largest = max((sum(_sizes(gives)) + sum(_sizes(takes)) for gives, takes in self._stages), default=0)
        self._wire = torch.empty(0, dtype=torch.uint8)

    def make_buffers(self, device: torch.device) -> None:
        """Have memory for the largest stage."""
        self._wire = torch.empty(self.largest, dtype=torch.uint8, device=device)

    @torch.no_grad()
    def run(self) -> None:
        """Copy what stays here, and exchange what does not.  Collective."""
        self._attempt(self._copy_own)
        for gives, takes in self._stages:
            give, take = _sizes(gives), _sizes(takes)
            send, receive = self._wire[: sum(give)], self._wire[sum(give) : sum(give) + sum(take)]
            self._attempt(self._pack, gives, send)
            exchanged(self._group, send, give, receive, take)
            self._attempt(self._unpack, takes, receive)
            self.sent, self.received = self.sent + len(send), self.received + len(receive)
        self._wire = self._wire[:0].clone()

    def departed(self) -> dict[tuple[int, int], int]:
        """The share in fingerprints of what this rank has given, by number of the move and rank that takes it."""
        shares: defaultdict[tuple[int, int], int] = defaultdict(int)
        for number, copies in enumerate(self._gives):
            for copy in copies:
                elements = self._source[number].view(copy.source, copy.box)
                taker = number, int(copy.target.buffer)
                shares[taker] = combine(shares[taker], share(elements, copy.box))
        return dict(shares)

    def arrived(self) -> dict[int, int]:
        """The share in fingerprints of what this rank has taken, by number of the move."""
        return {number: self._target[number].share() for number, copies in enumerate(self._takes) if copies}

    def _given(self, stage: Portions) -> Parcels:
        return self._parcels(stage, self._gives, lambda copy: (copy.target.buffer, copy.source))

    def _taken(self, stage: Portions) -> Parcels:
        return self._parcels(stage, self._takes, lambda copy: (copy.source.buffer, copy.target))

    def _parcels(
        self, stage: Portions, copies: Sequence[Sequence[Copy]], ends: Callable[[Copy], tuple[int | str, Place]]
    ) -> Parcels:
        """Two ranks list what goes from one to the other in the same order: that of the stage, and of the plan."""
        parcels: dict[int, list[_Parcel]] = {rank: [] for rank in self._ranks}
        for portion in stage:
            size = self._moves[portion.number].itemsize
            for copy in copies[portion.number]:
                other, place = ends(copy)
                common = copy.box & portion.box
                if common is not None and other != self.rank:
                    parcels[int(other)].append(_Parcel(portion.number, place, common, common.numel * size))
        return parcels

    def _attempt(self, work: Callable[..., None], *arguments: object) -> None:
        try:
            work(*arguments)
        except Exception as error:
            self.failure = self.failure or error

    def _copy_own(self) -> None:
        for number, copies in enumerate(self._takes):
            for copy in copies:
                if copy.source.buffer == self.rank:
                    elements = self._source[number].view(copy.source, copy.box)
                    self._target[number].view(copy.target, copy.box).copy_(elements)

    def _pack(self, gives: Parcels, wire: Tensor) -> None:
        for parcel, raw in _cut(gives, wire):
            elements = self._source[parcel.number].view(parcel.place, parcel.box)
            raw.view(elements.dtype).view(elements.shape).copy_(elements)

    def _unpack(self, takes: Parcels, wire: Tensor) -> None:
        for parcel, raw in _cut(takes, wire):
            elements = self._target[parcel.number].view(parcel.place, parcel.box)
            elements.copy_(raw.view(elements.dtype).view(elements.shape))


def _sizes(parcels: Parcels) -> list[int]:
    """Bytes by rank of the group."""
    return [sum(parcel.nbytes for parcel in each) for each in parcels.values()]


def _cut(parcels: Parcels, wire: Tensor) -> list[tuple[_Parcel, Tensor]]:
    """Each parcel with its bytes.  All of a stage have elements of one size, so every parcel is aligned to it."""
    every = [parcel for each in parcels.values() for parcel in each]
    return list(zip(every, torch.split(wire, [parcel.nbytes for parcel in every]), strict=True)) if every else []
