"""Exchanges between ranks, and the notes in front of them by which ranks stop together.

With `layer_wise`, this is the only file of the optimizer that talks to other ranks.  `LostRankError` says that a
collective has failed, because a rank has ended or does not answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...names.errors import lost_ranks
from ...ranks.release import in_flight
from ..ground.devices import is_asynchronous
from ..planning.schedule import NOTE, Route
from .agreement import AgreedError, Facts, Intent, refusal
from .rank_sets import collective_order, ranks_of_group, unique_groups

R = TypeVar("R")

# torch 2.13 has a new name for it, and warns of the old one.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


Link = Callable[[Tensor], Callable[[], Tensor]]
"""Begins to carry a wire to the other ranks; made once for a route.  The function that it returns waits, and returns
the bytes received, laid out by ``receive_counts``."""


def all_to_all(route: Route, group: dist.ProcessGroup, device: torch.device) -> Link:
    """Return a link by ``all_to_all_single`` with exact splits: nothing travels that need not."""
    splits = list(route.receive_counts), list(route.send_counts)

    def start(send: Tensor) -> Callable[[], Tensor]:
        received = send.new_empty(sum(route.receive_counts))
        with lost_ranks():
            work = dist.all_to_all_single(in_flight(received), in_flight(send), *splits, group, async_op=True)

        def arrive() -> Tensor:
            with lost_ranks():
                work.wait()
            return received

        return arrive

    return start


def all_gather(route: Route, group: dist.ProcessGroup, device: torch.device) -> Link:
    """Return a link for networks that do not stand all-to-all at scale: every rank sends its whole wire to all, up to
    as many times the bytes as there are ranks.  Collective.
    """
    # Where each rank's wire has the part for this one, and the size of the longest wire; in bytes.
    table = torch.stack(_gather(torch.tensor(route.send_counts, dtype=torch.int64, device=device), group))
    starts, largest = table[:, : dist.get_rank(group)].sum(dim=1).tolist(), int(table.sum(dim=1).max())

    def start(send: Tensor) -> Callable[[], Tensor]:
        padded = send.new_empty(largest)
        padded[: len(send)] = send
        wires = [send.new_empty(largest) for _ in starts]
        with lost_ranks():
            work = dist.all_gather(wires, in_flight(padded), group, async_op=True)

        def arrive() -> Tensor:
            with lost_ranks():
                work.wait()
            parts = zip(wires, starts, route.receive_counts, strict=True)
            return torch.cat([wire[start : start + count] for wire, start, count in parts])

        return arrive

    return start


LINKS: Mapping[str, Callable[[Route, dist.ProcessGroup, torch.device], Link]] = {
    "all_to_all": all_to_all,
    "all_gather": all_gather,
}


def link(route: Route, group: dist.ProcessGroup | None, device: torch.device, kind: str) -> Link:
    """Return a link of this kind; without a group, one by which this process receives what it sends.  Collective for
    some kinds.
    """
    return LINKS[kind](route, group, device) if group is not None else lambda send: lambda: send


_connected_kinds: WeakKeyDictionary[dist.ProcessGroup, set[str]] = WeakKeyDictionary()
"""The kinds of links for which `connect` has made the connections of a process group."""


def connect(group: dist.ProcessGroup | None, device: torch.device, kind: str) -> None:
    """Make the connections that links of a kind need, by sending a byte from each rank to each.  Collective.

    NCCL makes them at their first use, where amid a step some ranks may wait for others that wait elsewhere.
    """
    if group is None or kind in (kinds := _connected_kinds.setdefault(group, set())):
        return
    bytes_each = (1,) * dist.get_world_size(group)
    send = torch.zeros(len(bytes_each), dtype=torch.uint8, device=device)
    arrived = link(Route(bytes_each, bytes_each), group, device, kind)(send)()
    arrived.sum().item()  # waits for the device
    kinds.add(kind)


class Wire:
    """One exchange of a plan, which every step repeats.  Collective for some kinds of links.

    Attributes:
        sent_notes, received_notes: the places of notes among the bytes, one note after the other.
    """

    def __init__(self, route: Route, group: dist.ProcessGroup | None, device: torch.device, kind: str) -> None:
        self.link = link(route, group, device, kind)
        self.sent_notes = _places_of_notes(route.send_counts).to(device)
        self.received_notes = _places_of_notes(route.receive_counts).to(device)
        self._length, self._device = sum(route.send_counts), device

    def memory(self) -> Tensor:
        """Return fresh memory for the bytes to send, to be filled as the route says."""
        return torch.empty(self._length, dtype=torch.uint8, device=self._device)


def _places_of_notes(counts: Sequence[int]) -> Tensor:
    """Return the bytes of the notes on a wire with parts of so many bytes, one note after the other."""
    starts = torch.tensor([0, *accumulate(counts)][:-1], dtype=torch.int64)
    return (starts[:, None] + torch.arange(NOTE)).flatten()


def gather_numbers(numbers: Sequence[Tensor], group: dist.ProcessGroup) -> Tensor:
    """Return the numbers of every rank of a group, ``[ranks, numbers]``.  Collective."""
    row = torch.stack([*numbers])
    table = row.new_empty(dist.get_world_size(group) * len(row))
    with lost_ranks():
        ALL_GATHER(in_flight(table), row, group=group)
    return table.view(-1, len(row))


def max_over_ranks(numbers: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the largest of each number over a group; infinite where any rank has NaN.  Collective."""
    largest = numbers.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    if group is not None:
        with lost_ranks():
            dist.all_reduce(in_flight(largest), dist.ReduceOp.MAX, group=group)
    return largest


def gather_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor on every rank of its mesh, ``Partial`` reduced.  Collective if it is a DTensor."""
    if not isinstance(tensor, DTensor):
        return tensor
    with lost_ranks():
        return tensor.full_tensor()


def reduce_flags(flags: Tensor, intent: Intent, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Return which flags (0 or 1, uint8) any rank of a group has set; and the note that arrived and the one sent, for
    `Notes.check`.  One collective.
    """
    note = intent.note(flags.device)
    # The largest of each byte and of its complement: this rank's, unless notes differ.
    sent = torch.cat([note, 255 - note])
    maxima = torch.cat([flags, sent])
    with lost_ranks():
        dist.all_reduce(in_flight(maxima), dist.ReduceOp.MAX, group=group)
    return maxima[: len(flags)], maxima[len(flags) :], sent


def disagreement(intent: Intent, group: dist.ProcessGroup) -> Exception:
    """Return the error of ranks that differ, once they have told each other how.  Collective."""
    ranks = dist.get_process_group_ranks(group)
    # Each rank compares its facts with the first rank's, so that only complaints travel to all.
    reference: list[Facts | None] = [dict(intent.facts()) if intent.error is None else None]
    with lost_ranks():
        dist.broadcast_object_list(reference, group=group, group_src=0)
    complaints = [""] * len(ranks)
    with lost_ranks():
        dist.all_gather_object(complaints, intent.complaint(ranks[0], reference[0]), group)
    return intent.error or refusal(intent.task, dict(zip(ranks, complaints, strict=True)))


def _gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the tensor of every rank of a group, in order."""
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    with lost_ranks():
        dist.all_gather(tensors, in_flight(tensor), group)
    return tensors


class Notes:
    """The verdicts on a process group's notes.  Reading one keeps the host waiting for a GPU, so there only the first
    of a step are read at once, and the others when the next step begins.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device, self.num_ranks = group, device, dist.get_world_size(group)
        self._unread: list[Tensor] = []

    def check(self, intent: Intent, arrived: Tensor, sent: Tensor, at_once: bool = False) -> None:
        """Raise an `AgreedError`, on every rank, if notes differ, or let `read` do so on a GPU, unless ``at_once``."""
        if not at_once and is_asynchronous(self.device):
            self._unread.append(arrived.ne(sent).any())
        elif not torch.equal(arrived, sent):
            raise AgreedError(disagreement(intent, self.group))

    def compare(self, intent: Intent, at_once: bool = False) -> None:
        """Send notes and `check` them.  Collective."""
        arrived = torch.cat(_gather(intent.note(self.device), self.group))
        self.check(intent, arrived, intent.note(self.device, self.num_ranks), at_once)

    def read(self) -> None:
        """Raise an `AgreedError` if some rank failed in the last step."""
        unread, self._unread = self._unread, []
        if unread and torch.stack(unread).any():
            raise AgreedError(
                RuntimeError(
                    "another rank failed during the last optimizer step (its own error says why), so that step is "
                    "incomplete: go on from a checkpoint"
                )
            )


Arrival = Callable[[bool], Tensor]
"""Waits for the bytes of all ranks, compares their notes as `Notes.check` does, and returns the bytes."""


class StepExchange:
    """One rank's part in the exchanges of a step.

    When its work fails, it does no more, but goes on exchanging: it sends zeros and another note, and where that
    arrives all ranks stop at the same place.

    Args:
        notes: None: this rank is alone.
    """

    def __init__(self, intent: Intent, notes: Notes | None) -> None:
        self._notes = notes
        self._set_intent(intent)

    def _set_intent(self, intent: Intent) -> None:
        self._intent, self._sent_notes = intent, None
        if self._notes is not None:
            self._sent_notes = intent.note(self._notes.device, self._notes.num_ranks)

    def attempt(self, work: Callable[..., R], *arguments: object) -> R | None:
        """Return ``work(*arguments)``; None if it or work before it fails."""
        if self._intent.error is None:
            try:
                return work(*arguments)
            except Exception as error:
                if self._notes is None:
                    raise AgreedError(error) from error
                self._set_intent(self._intent.failed(error))
        return None

    def start(self, wire: Wire, memory: Tensor) -> Arrival:
        """Begin an exchange, with a note to each rank."""
        if self._intent.error is not None:
            memory.zero_()
        notes, sent_notes = self._notes, self._sent_notes
        if sent_notes is not None:
            memory.index_copy_(0, wire.sent_notes, sent_notes)
        arrive = wire.link(memory)

        def receive(at_once: bool) -> Tensor:
            received = arrive()
            if notes is not None and sent_notes is not None:
                notes.check(self._intent, received.index_select(0, wire.received_notes), sent_notes, at_once)
            return received

        return receive

    def end(self) -> None:
        """Raise this rank's error as an `AgreedError`, if it has one: all exchanges are done."""
        if self._intent.error is not None:
            raise AgreedError(self._intent.error)


class GroupAgreement:
    """The notes of this rank's process groups (None is left out), compared one group after the other: a failure in one
    is reported in the next.
    """

    def __init__(self, groups: Iterable[dist.ProcessGroup | None], device: torch.device) -> None:
        distinct = {group: None for group in unique_groups(*groups) if group is not None}
        self.groups = sorted(distinct, key=lambda group: collective_order(ranks_of_group(group)))
        self._notes = [Notes(group, device) for group in self.groups]

    def agree(self, intent: Intent, compare: Callable[[Notes, Intent], None]) -> None:
        """Compare what the ranks intend, by ``compare`` with one group after the other.  Collective.

        Raises:
            Exception: on every rank, if any differ or one has failed, where that is read.
        """
        failure: Exception | None = None
        # Each group passes on the notes of the one before, so they reach all ranks in one pass.
        for notes in self._notes:
            try:
                compare(notes, intent)
            except AgreedError as agreed:
                failure = failure or agreed.error
                intent = intent if intent.error is not None else intent.failed(agreed.error)
        if failure is not None:
            raise failure

    def read(self) -> None:
        """Raise a RuntimeError if some rank failed in the last step."""
        try:
            for notes in self._notes:
                notes.read()
        except AgreedError as agreed:
            raise agreed.error from None
