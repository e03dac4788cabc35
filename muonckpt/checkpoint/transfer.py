"""The mover: elements from where ranks have them, in live tensors or in buffers, into live tensors.

`load` and `redistribute` use it alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..algebra.box import Box
from .all_ranks import exchange, place_in
from .live_state import LocalParts
from .transfer_plan import CopySide, Move, RankSides, Stage, sides_of

Elements = Callable[[str], LocalParts]
"""A function that returns the elements of a tensor that this rank has, by its key."""


class MoveParts(NamedTuple):
    """A move on this rank: which copies concern it, and the elements on both sides."""

    sides: RankSides
    source: LocalParts
    target: LocalParts


class _Parcels(NamedTuple):
    """The elements that this rank sends or receives in a stage, by the other rank, and the bytes for each rank."""

    elements: list[Tensor]
    splits: list[int]

    def on_wire(self, wire: Tensor) -> Iterator[Tensor]:
        """Yield the elements' places on the wire: aligned, as all elements of a stage have one size."""
        start = 0
        for part in self.elements:
            yield wire[start : start + part.nbytes].view(part.dtype).view(part.shape)
            start += part.nbytes


class Transfer:
    """The executor of this rank's part of moves.

    It keeps an error in ``failure`` and goes on exchanging, so that the other ranks do not hang.

    Args:
        sources, targets: the elements of the moves' tensors on this rank, by the keys of either side.
        moves, stages: the same on all ranks.
        device: that of the memory from which bytes are exchanged.

    Attributes:
        sent_bytes, received_bytes: so far.
        buffer_bytes: of its exchange buffers.
    """

    def __init__(
        self,
        sources: Elements,
        targets: Elements,
        moves: Sequence[Move],
        stages: Sequence[Stage],
        process_group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self.failure: Exception | None = None
        self.sent_bytes = self.received_bytes = 0
        self._group = process_group
        place, num_ranks = place_in(process_group)
        self.parts = [
            MoveParts(sides_of(move.copies, place), sources(move.source), targets(move.target)) for move in moves
        ]
        self._stages: list[tuple[_Parcels, _Parcels]] = []
        for stage in stages:
            portions = [(self.parts[number], box) for number, box in stage]
            outgoing = _parcels([(part.sides.outgoing, part.source, box) for part, box in portions], num_ranks)
            incoming = _parcels([(part.sides.incoming, part.target, box) for part, box in portions], num_ranks)
            self._stages.append((outgoing, incoming))
        self.buffer_bytes = max(
            (sum(outgoing.splits) + sum(incoming.splits) for outgoing, incoming in self._stages), default=0
        )
        self._wire = torch.empty(self.buffer_bytes, dtype=torch.uint8, device=device)

    @torch.no_grad()
    def run(self) -> None:
        """Copy what stays on this rank, and exchange everything else, stage by stage.

        Raises:
            LostRankError: another rank was lost.
        """
        # Elements of this rank never touch the wire.
        for sides, source, target in self.parts:
            self._copy(views(target, sides.local_target), views(source, sides.local_source))
        for outgoing, incoming in self._stages:
            # Both buffers are parts of one memory, which no stage exceeds.
            sent_bytes, received_bytes = sum(outgoing.splits), sum(incoming.splits)
            outbox, inbox = self._wire[:sent_bytes], self._wire[sent_bytes : sent_bytes + received_bytes]
            self._copy(outgoing.on_wire(outbox), outgoing.elements)
            exchange(self._group, outbox, outgoing.splits, inbox, incoming.splits)
            self._copy(incoming.elements, incoming.on_wire(inbox))
            self.sent_bytes, self.received_bytes = self.sent_bytes + sent_bytes, self.received_bytes + received_bytes
        self._wire = self._wire[:0].clone()

    def _copy(self, targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
        try:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
        except Exception as error:  # other ranks wait in the next exchange: it is raised after the last one
            self.failure = self.failure or error


def views(parts: LocalParts, side: CopySide) -> Iterator[Tensor]:
    """Yield the elements of each copy of a side."""
    return map(parts.view, side.offset.tolist(), map(tuple, side.lo.tolist()), map(tuple, side.hi.tolist()))


def _parcels(portions: Sequence[tuple[CopySide, LocalParts, Box]], num_ranks: int) -> _Parcels:
    """List the elements that are exchanged with each rank, on both sides in the order of the stage and of the plan."""
    elements, places = list[Tensor](), list[int]()
    for side, parts, box in portions:
        inside = side.within(box)
        elements += views(parts, inside)
        places += inside.other.tolist()
    order = np.argsort(np.array(places, np.int64), kind="stable").tolist()
    splits = np.zeros(num_ranks, np.int64)
    np.add.at(splits, np.array(places, np.int64), [part.nbytes for part in elements])
    return _Parcels([elements[row] for row in order], splits.tolist())
