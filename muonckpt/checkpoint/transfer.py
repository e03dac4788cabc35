"""The mover: elements from where ranks have them, in live tensors or in buffers, into live tensors.

`load` and `redistribute` use it alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..algebra.box import Box
from .all_ranks import exchange, place_in
from .live_state import NO_PARTS, LocalParts
from .transfer_plan import CopySide, Move, Stage, sides_of

Elements = Callable[[str], LocalParts]
"""A function that returns the elements of a tensor that this rank has, by its key."""


class _Parcels(NamedTuple):
    """The copies in which this rank sends, or receives, a stage: those of each other rank are together on the wire.

    Attributes:
        portions: the number of the move, and its copies.
        order: of all copies on the wire.
        splits: bytes for each rank.
    """

    portions: list[tuple[int, CopySide]]
    order: list[int]
    splits: list[int]

    @classmethod
    def of(cls, portions: Sequence[tuple[int, CopySide, Box]], moves: Sequence[Move], num_ranks: int) -> _Parcels:
        cut, places, sizes = list[tuple[int, CopySide]](), list[int](), list[int]()
        for number, side, box in portions:
            inside = side.within(box)
            cut.append((number, inside))
            places += inside.other.tolist()
            sizes += ((inside.hi - inside.lo).prod(axis=1) * moves[number].itemsize).tolist()
        splits = np.zeros(num_ranks, np.int64)
        np.add.at(splits, np.array(places, np.int64), sizes)
        return cls(cut, np.argsort(np.array(places, np.int64), kind="stable").tolist(), splits.tolist())

    def on_wire(self, wire: Tensor, parts_of: Callable[[int], LocalParts]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the places on the wire, aligned as all elements of a stage have one size, and the elements.

        Args:
            parts_of: gives the elements of a move.
        """
        elements, start = list[Tensor](), 0
        for number, side in self.portions:
            elements += views(parts_of(number), side)
        for row in self.order:
            part = elements[row]
            yield wire[start : start + part.nbytes].view(part.dtype).view(part.shape), part
            start += part.nbytes


class Transfer:
    """The executor of this rank's part of moves.

    Args:
        moves, stages: the same on all ranks.

    Attributes:
        wire_bytes: of the memory from which it exchanges.
        sent_bytes, received_bytes, received_elements: of all stages.
    """

    def __init__(self, moves: Sequence[Move], stages: Sequence[Stage], process_group: dist.ProcessGroup | None) -> None:
        self._group, self._moves = process_group, moves
        place, num_ranks = place_in(process_group)
        self.sides = [sides_of(move.copies, place) for move in moves]
        self._stages: list[tuple[_Parcels, _Parcels]] = []
        for stage in stages:
            outgoing = [(number, self.sides[number].outgoing, box) for number, box in stage]
            incoming = [(number, self.sides[number].incoming, box) for number, box in stage]
            self._stages.append((_Parcels.of(outgoing, moves, num_ranks), _Parcels.of(incoming, moves, num_ranks)))
        self.sent_bytes = sum(sum(outgoing.splits) for outgoing, _ in self._stages)
        self.received_bytes = sum(sum(incoming.splits) for _, incoming in self._stages)
        self.wire_bytes = max((sum(out.splits) + sum(incoming.splits) for out, incoming in self._stages), default=0)
        self.received_elements = sum(
            sum(incoming.splits) // moves[stage[0].move].itemsize
            for stage, (_, incoming) in zip(stages, self._stages, strict=True)
        )

    @torch.no_grad()
    def run(self, sources: Mapping[str, LocalParts], targets: Elements, wire: Tensor) -> Exception | None:
        """Copy what stays on this rank, and exchange everything else, stage by stage.

        Args:
            sources, targets: the elements of the moves' tensors on this rank, by the keys of either side.
            wire: the memory from which bytes are exchanged.

        Returns:
            This rank's error: it goes on exchanging, so that the other ranks do not hang.

        Raises:
            LostRankError: another rank was lost.
        """
        failures = list[Exception]()

        def copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
            try:
                for target, source in pairs:
                    target.copy_(source)
            except Exception as error:  # other ranks wait in the next exchange: it is raised after the last one
                failures.append(error)

        def of_source(number: int) -> LocalParts:
            return sources.get(self._moves[number].source, NO_PARTS)

        def of_target(number: int) -> LocalParts:
            return targets(self._moves[number].target)

        # Elements of this rank never touch the wire.
        for number, sides in enumerate(self.sides):
            if len(sides.local_source.other):
                copy(
                    zip(
                        views(of_target(number), sides.local_target),
                        views(of_source(number), sides.local_source),
                        strict=True,
                    )
                )
        for outgoing, incoming in self._stages:
            # Both buffers are parts of one memory, which no stage exceeds.
            sent_bytes, received_bytes = sum(outgoing.splits), sum(incoming.splits)
            outbox, inbox = wire[:sent_bytes], wire[sent_bytes : sent_bytes + received_bytes]
            copy(outgoing.on_wire(outbox, of_source))
            exchange(self._group, outbox, outgoing.splits, inbox, incoming.splits)
            copy((elements, place) for place, elements in incoming.on_wire(inbox, of_target))
        return failures[0] if failures else None


def views(parts: LocalParts, side: CopySide) -> Iterator[Tensor]:
    """Yield the elements of each copy of a side."""
    return map(parts.view, side.offset.tolist(), map(tuple, side.lo.tolist()), map(tuple, side.hi.tolist()))
