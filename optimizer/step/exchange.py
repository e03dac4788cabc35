"""Exchanges between ranks.  With `layer_wise`, this is the only file of the optimizer that talks to other ranks.

All of them raise `LostRankError` where a collective fails, because a rank has ended or does not answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...errors import lost_ranks
from ..planning.schedule import NOTE, Route
from .agreement import AgreedError, Facts, Intent, refusal

# torch 2.13 has a new name for it, and warns of the old one.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Link(Protocol):
    """A way to carry a rank's wire to the others: made once for a route, used every step."""

    def start(self, send: Tensor) -> Callable[[], Tensor]:
        """Begin; what is returned waits, and gives what arrived, laid out by ``receive_counts``."""
        ...


@dataclass(frozen=True, slots=True)
class Alone:
    """This process is the only rank: what it sends is what it receives."""

    def start(self, send: Tensor) -> Callable[[], Tensor]:
        return lambda: send


@dataclass(frozen=True, slots=True)
class AllToAll:
    """One ``all_to_all_single`` with exact splits: nothing travels that need not."""

    route: Route
    group: dist.ProcessGroup

    def start(self, send: Tensor) -> Callable[[], Tensor]:
        received = send.new_empty(sum(self.route.receive_counts))
        counts = list(self.route.receive_counts), list(self.route.send_counts)
        with lost_ranks():
            work = dist.all_to_all_single(received, send, *counts, self.group, async_op=True)

        def arrive() -> Tensor:
            with lost_ranks():
                work.wait()
            return received

        return arrive


@dataclass(frozen=True, slots=True)
class AllGather:
    """For networks that do not stand all-to-all at scale: every rank sends all that it has to all.

    It moves up to as many times the bytes as there are ranks.  ``starts`` says where each rank's wire has the part for
    this one, ``largest`` is the size of the longest wire; both in bytes.
    """

    route: Route
    group: dist.ProcessGroup
    starts: tuple[int, ...]
    largest: int

    @classmethod
    def over(cls, route: Route, group: dist.ProcessGroup, device: torch.device) -> AllGather:
        """Collective: ranks tell each other once how their wires are cut."""
        mine = torch.tensor(route.send_counts, dtype=torch.int64, device=device)
        table = torch.stack(_of_all(mine, group))
        before = table[:, : dist.get_rank(group)].sum(dim=1)
        return cls(route, group, tuple(before.tolist()), int(table.sum(dim=1).max()))

    def start(self, send: Tensor) -> Callable[[], Tensor]:
        padded = send.new_empty(self.largest)
        padded[: len(send)] = send
        wires = [send.new_empty(self.largest) for _ in self.starts]
        with lost_ranks():
            work = dist.all_gather(wires, padded, self.group, async_op=True)

        def arrive() -> Tensor:
            with lost_ranks():
                work.wait()
            cut = zip(wires, self.starts, self.route.receive_counts, strict=True)
            return torch.cat([wire[start : start + count] for wire, start, count in cut])

        return arrive


LINKS: Mapping[str, Callable[[Route, dist.ProcessGroup, torch.device], Link]] = {
    "all_to_all": lambda route, group, device: AllToAll(route, group),
    "all_gather": AllGather.over,
}


def link(route: Route, group: dist.ProcessGroup | None, device: torch.device, kind: str) -> Link:
    """A link of this kind.  Collective for those that must agree on something."""
    return LINKS[kind](route, group, device) if group is not None else Alone()


_connected: WeakKeyDictionary[dist.ProcessGroup, set[str]] = WeakKeyDictionary()
"""The kinds of links for which `connect` has made the connections of a process group."""


def connect(group: dist.ProcessGroup | None, device: torch.device, kind: str) -> None:
    """Make the connections that links of a kind need, by one that carries a byte from each rank to each.  Collective,
    once for a group.

    NCCL makes them when they are first used, which for an all-to-all is one connection for each pair of ranks.  In the
    midst of a step, with other exchanges under way, some ranks may wait there for others that wait elsewhere.  So all
    ranks do it before the first step, group after group in one order, and wait for each.
    """
    if group is None or kind in (kinds := _connected.setdefault(group, set())):
        return
    bytes_each = (1,) * dist.get_world_size(group)
    arrived = link(Route(bytes_each, bytes_each), group, device, kind).start(
        torch.zeros(len(bytes_each), dtype=torch.uint8, device=device)
    )()
    arrived.sum().item()  # waits for the device
    kinds.add(kind)


class Wire:
    """One exchange under way: fill the memory as the route says, :meth:`start`, :meth:`arrive`, read the memory."""

    def __init__(self, route: Route, link: Link, device: torch.device) -> None:
        self._route, self._link = route, link
        self._note: Tensor | None = None
        self._buffer: Tensor | None = torch.empty(sum(route.send_counts), dtype=torch.uint8, device=device)
        self._arrive: Callable[[], Tensor] | None = None

    @property
    def memory(self) -> Tensor:
        """Bytes: what is sent, and after :meth:`arrive` what was received."""
        assert self._buffer is not None, "under way"
        return self._buffer

    def start(self, note: Tensor | None) -> None:
        """Begin the exchange.  What was sent may not be touched until it has arrived.

        Args:
            note: to all ranks (`Intent.note`); None: there is none.
        """
        assert self._buffer is not None, "started already"
        if note is not None:
            for start in _starts(self._route.send_counts):
                self._buffer.narrow(0, start, NOTE).copy_(note)
        self._note = note
        self._arrive = self._link.start(self._buffer)

    def arrive(self) -> None:
        """Wait until everything is here; the sending side's memory is given back."""
        assert self._arrive is not None, "not started"
        self._buffer = self._arrive()
        self._arrive = None

    def differing(self) -> Tensor:
        """Whether any rank has sent another note than this one; a bool on the device."""
        assert self._note is not None, "no notes have arrived"
        return (self._notes() != self._note)[:, :-1].any()

    def flagged(self) -> Tensor:
        """Return whether the last byte of any rank's note is set (`Intent.unfit`); a bool on the device."""
        return self._notes()[:, -1].any()

    def _notes(self) -> Tensor:
        assert self._buffer is not None, "no notes have arrived"
        return torch.stack([self._buffer.narrow(0, start, NOTE) for start in _starts(self._route.receive_counts)])


def gather_numbers(numbers: Sequence[Tensor], group: dist.ProcessGroup) -> Tensor:
    """Return some numbers of every rank of a group, ``[ranks, numbers]``, in the order of its ranks.  Collective."""
    mine = torch.stack([*numbers])
    table = mine.new_empty(dist.get_world_size(group) * len(mine))
    with lost_ranks():
        ALL_GATHER(table, mine, group=group)
    return table.view(-1, len(mine))


def largest_of_all(numbers: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the largest of each number over a group; infinite where any rank has NaN.  Collective."""
    largest = numbers.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    if group is not None:
        with lost_ranks():
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest


def gathered(tensor: Tensor) -> Tensor:
    """All of a tensor on every rank of its mesh; a ``Partial`` one is reduced.  Collective if it is a DTensor."""
    if not isinstance(tensor, DTensor):
        return tensor
    with lost_ranks():
        return tensor.full_tensor()


def agree(intent: Intent, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Compare what all ranks of a group intend.  Collective.

    Raises:
        AgreedError: on every rank, if they differ or one of them has failed: its own error, or who differs.
    """
    if group is not None and differ(intent, group, device):
        raise AgreedError(disagreement(intent, group))
    if intent.error is not None:
        raise AgreedError(intent.error)


def differ(intent: Intent, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Whether any two ranks of a group intend different things; a bool on the device.  Collective."""
    mine = intent.note(device)
    return (torch.stack(_of_all(mine, group)) != mine).any()


def any_has(flags: Tensor, intent: Intent, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Which flags (0 or 1, uint8) any rank of a group has set, and `differ`.  One collective."""
    note = intent.note(flags.device)
    # The largest of each byte and of its complement: this rank's, unless notes differ.
    told = torch.cat([flags, note, 255 - note])
    with lost_ranks():
        dist.all_reduce(told, dist.ReduceOp.MAX, group=group)
    union, largest, smallest = torch.split(told, [len(flags), NOTE, NOTE])
    return union, (largest != note).any() | (smallest != 255 - note).any()


def disagreement(intent: Intent, group: dist.ProcessGroup) -> Exception:
    """What to raise where ranks of a group have found that they differ: they tell each other how.  Collective."""
    ranks = dist.get_process_group_ranks(group)
    reference: list[Facts | None] = [dict(intent.facts()) if intent.error is None else None]
    with lost_ranks():
        dist.broadcast_object_list(reference, group=group, group_src=0)
    complaints = gather_texts(intent.complaint(ranks[0], reference[0]), group)
    return intent.error or refusal(intent.task, complaints)


def gather_texts(text: str, group: dist.ProcessGroup | None) -> dict[int, str]:
    """What each rank of a group has to tell, by rank.  Collective."""
    if group is None:
        return {0: text}
    ranks = dist.get_process_group_ranks(group)
    texts = [""] * len(ranks)
    with lost_ranks():
        dist.all_gather_object(texts, text, group)
    return dict(zip(ranks, texts, strict=True))


def _of_all(mine: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """A tensor of every rank of a group, in order."""
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    with lost_ranks():
        dist.all_gather(everyone, mine, group)
    return everyone


def _starts(counts: Sequence[int]) -> list[int]:
    return list(accumulate(counts, initial=0))[:-1]
