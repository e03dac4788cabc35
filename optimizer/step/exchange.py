"""Exchanges between ranks, and the notes in front of them by which ranks stop together.

With `layer_wise`, this is the only file of the optimizer that talks to other ranks.  Its functions raise
`LostRankError` where a collective fails, because a rank has ended or does not answer.

A `Link` carries bytes, a `Wire` is one exchange under way, and `Notes` are those of one process group; `StepExchange`
is one rank's part in a step of such a group, and `GroupAgreement` compares in several groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...errors import lost_ranks
from ..ground.cuda_graphs import capturable
from ..planning.schedule import NOTE, Route
from .agreement import AgreedError, Facts, Intent, refusal
from .rank_sets import in_order, members, one_of_each

R = TypeVar("R")

# torch 2.13 has a new name for it, and warns of the old one.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Link(Protocol):
    """A way to carry a rank's wire to the others: made once for a route, used every step."""

    def start(self, send: Tensor) -> Callable[[], Tensor]:
        """Begin; the function that is returned waits and gives what arrived, laid out by ``receive_counts``."""
        ...


@dataclass(frozen=True, slots=True)
class Alone:
    """This process is the only rank: it receives what it sends."""

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


class AllGather:
    """For networks that do not stand all-to-all at scale: every rank sends all that it has to all.

    It moves up to as many times the bytes as there are ranks.  Made collectively: ranks tell each other once how their
    wires are cut.
    """

    def __init__(self, route: Route, group: dist.ProcessGroup, device: torch.device) -> None:
        self._route, self._group = route, group
        table = torch.stack(_of_all(torch.tensor(route.send_counts, dtype=torch.int64, device=device), group))
        # Where each rank's wire has the part for this one, and the size of the longest wire; in bytes.
        self._starts = table[:, : dist.get_rank(group)].sum(dim=1).tolist()
        self._largest = int(table.sum(dim=1).max())

    def start(self, send: Tensor) -> Callable[[], Tensor]:
        padded = send.new_empty(self._largest)
        padded[: len(send)] = send
        wires = [send.new_empty(self._largest) for _ in self._starts]
        with lost_ranks():
            work = dist.all_gather(wires, padded, self._group, async_op=True)

        def arrive() -> Tensor:
            with lost_ranks():
                work.wait()
            cut = zip(wires, self._starts, self._route.receive_counts, strict=True)
            return torch.cat([wire[start : start + count] for wire, start, count in cut])

        return arrive


LINKS: Mapping[str, Callable[[Route, dist.ProcessGroup, torch.device], Link]] = {
    "all_to_all": lambda route, group, device: AllToAll(route, group),
    "all_gather": AllGather,
}


def link(route: Route, group: dist.ProcessGroup | None, device: torch.device, kind: str) -> Link:
    """Return a link of this kind.  Collective for those that must agree on something."""
    return LINKS[kind](route, group, device) if group is not None else Alone()


_connected: WeakKeyDictionary[dist.ProcessGroup, set[str]] = WeakKeyDictionary()
"""The kinds of links for which `connect` has made the connections of a process group."""


def connect(group: dist.ProcessGroup | None, device: torch.device, kind: str) -> None:
    """Make the connections that links of a kind need, by sending a byte from each rank to each.  Collective, once for a
    group.

    NCCL makes them when they are first used, which for an all-to-all is one for each pair of ranks.  Amid a step, some
    ranks may wait there for others that wait elsewhere.  So all ranks do it before the first step, group after group in
    one order, and wait for each.
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
        """The bytes to send, and after :meth:`arrive` those received."""
        assert self._buffer is not None, "under way"
        return self._buffer

    def start(self, note: Tensor | None) -> None:
        """Begin the exchange, with a note to all ranks.  What was sent may not be touched until it has arrived."""
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

    def notes(self) -> Tensor:
        """Return the notes that have arrived, ``[ranks, NOTE]``."""
        starts = _starts(self._route.receive_counts)
        return torch.stack([self.memory.narrow(0, start, NOTE) for start in starts])

    def differing(self) -> Tensor:
        """Return whether any note that has arrived differs from the one sent, but for the last byte; a bool on the
        device."""
        assert self._note is not None, "no notes have arrived"
        return (self.notes() != self._note)[:, :-1].any()


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
    """Return the whole tensor on every rank of its mesh, ``Partial`` reduced.  Collective if it is a DTensor."""
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
    """Return whether any two ranks of a group intend different things; a bool on the device.  Collective."""
    mine = intent.note(device)
    return (torch.stack(_of_all(mine, group)) != mine).any()


def any_has(flags: Tensor, intent: Intent, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return which flags (0 or 1, uint8) any rank of a group has set, and `differ`.  One collective."""
    note = intent.note(flags.device)
    # The largest of each byte and of its complement: this rank's, unless notes differ.
    told = torch.cat([flags, note, 255 - note])
    with lost_ranks():
        dist.all_reduce(told, dist.ReduceOp.MAX, group=group)
    union, largest, smallest = torch.split(told, [len(flags), NOTE, NOTE])
    return union, (largest != note).any() | (smallest != 255 - note).any()


def disagreement(intent: Intent, group: dist.ProcessGroup) -> Exception:
    """Return the error of ranks that have found that they differ: they tell each other how.  Collective."""
    ranks = dist.get_process_group_ranks(group)
    reference: list[Facts | None] = [dict(intent.facts()) if intent.error is None else None]
    with lost_ranks():
        dist.broadcast_object_list(reference, group=group, group_src=0)
    complaints = gather_texts(intent.complaint(ranks[0], reference[0]), group)
    return intent.error or refusal(intent.task, complaints)


def gather_texts(text: str, group: dist.ProcessGroup | None) -> dict[int, str]:
    """Return the text of each rank of a group, by rank.  Collective."""
    if group is None:
        return {0: text}
    ranks = dist.get_process_group_ranks(group)
    texts = [""] * len(ranks)
    with lost_ranks():
        dist.all_gather_object(texts, text, group)
    return dict(zip(ranks, texts, strict=True))


def _of_all(mine: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return a tensor of every rank of a group, in order."""
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    with lost_ranks():
        dist.all_gather(everyone, mine, group)
    return everyone


def _starts(counts: Sequence[int]) -> list[int]:
    return list(accumulate(counts, initial=0))[:-1]


class Notes:
    """The notes of a process group: whether they differed, read at once or later.

    On a GPU, reading keeps the host waiting until all work before it is done; so only the first notes of a step are
    read at once there, and the others when the next step begins.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self._unread: list[Tensor] = []

    def settle(self, intent: Intent, differing: Tensor, at_once: bool = False) -> None:
        """Take in whether notes have differed from this rank's.

        Args:
            at_once: wait for the device.

        Raises:
            AgreedError: on every rank, if they have, where that is read.
        """
        if not at_once and capturable(self.device):
            self._unread.append(differing)
        elif differing:
            raise AgreedError(disagreement(intent, self.group))

    def compare(self, intent: Intent, at_once: bool = False) -> None:
        """Send notes and settle them.  Collective; the same exceptions."""
        self.settle(intent, differ(intent, self.group, self.device), at_once)

    def read(self) -> None:
        """Read what has not been read.

        Raises:
            AgreedError: some rank failed in the last step.
        """
        unread, self._unread = self._unread, []
        if unread and torch.stack(unread).any():
            raise AgreedError(
                RuntimeError(
                    "another rank failed during the last optimizer step (its own error says why), so that step is "
                    "incomplete: go on from a checkpoint"
                )
            )


class StepExchange:
    """One rank's part in a step: its own work, and the notes that tell the others of it.

    Once some of a rank's own work has failed, it does no more of it, but it goes on exchanging, and sends zeros: its
    notes differ from then on, and where they arrive all ranks stop at the same place.

    Args:
        notes: of the ranks that take this step; None: this rank is alone, or a CUDA graph is being captured.
        unfit: whether something here forbids the step to all ranks: a bool on the device, without dims.  It travels as
            the last byte of a note, which is not compared.  None: nothing can.
    """

    def __init__(self, intent: Intent, notes: Notes | None, unfit: Tensor | None = None) -> None:
        self._notes, self._unfit = notes, unfit
        self._intend(intent)

    def _intend(self, intent: Intent) -> None:
        self._intent = intent
        self._note = intent.note(self._notes.device) if self._notes is not None else None
        if self._note is not None and self._unfit is not None:
            self._note[-1].copy_(self._unfit)

    def attempt(self, work: Callable[..., R], *arguments: object) -> R | None:
        """Do some work, unless some has failed."""
        if self._intent.error is None:
            try:
                return work(*arguments)
            except Exception as error:
                self.fail(error)
        return None

    def fail(self, error: Exception) -> None:
        """Do no more work; the others learn why."""
        if self._notes is None:
            raise AgreedError(error)
        self._intend(self._intent.failed(error, dist.get_rank()))

    def start(self, wire: Wire) -> None:
        """Begin an exchange."""
        if self._intent.error is not None:
            wire.memory.zero_()
        wire.start(self._note)

    def check_first(self, wire: Wire) -> bool:
        """Compare the first notes of a step, at once; returns whether the step is forbidden.

        Raises:
            AgreedError: on every rank, if they differ.
        """
        if self._notes is None:
            return self._unfit is not None and bool(self._unfit)
        told = torch.stack([wire.differing(), wire.notes()[:, -1].any()])
        differ, forbidden = told.tolist()  # one wait for the device
        if differ:
            raise AgreedError(disagreement(self._intent, self._notes.group))
        return bool(forbidden)

    def check(self, wire: Wire) -> None:
        """Compare the notes that have arrived; see `Notes.settle`."""
        if self._notes is not None:
            self._notes.settle(self._intent, wire.differing())

    def end(self) -> None:
        """Raise this rank's error as an `AgreedError`, if it has one: all exchanges are done."""
        if self._intent.error is not None:
            raise AgreedError(self._intent.error)


class GroupAgreement:
    """The notes of several process groups, compared one group after the other: what fails in one is told in the next.

    Args:
        groups: which this rank is a member of; None is left out.
    """

    def __init__(self, groups: Iterable[dist.ProcessGroup | None], device: torch.device) -> None:
        some = {group: None for group in one_of_each(*groups) if group is not None}
        self.groups = sorted(some, key=lambda group: in_order(members(group)))
        self._notes = [Notes(group, device) for group in self.groups]

    @property
    def widest(self) -> dist.ProcessGroup | None:
        """The last group, whose ranks know what all that are in it have told."""
        return self.groups[-1] if self.groups else None

    def agree(self, intent: Intent, compare: Callable[[Notes, Intent], None]) -> None:
        """Compare what the ranks intend, by ``compare`` with one group after the other.  Collective.

        Raises:
            Exception: on every rank, if any differ or one has failed, where that is read.
        """
        failure: Exception | None = None
        for notes in self._notes:
            try:
                compare(notes, intent)
            except AgreedError as agreed:
                failure = failure or agreed.error
                intent = intent if intent.error is not None else intent.failed(agreed.error, dist.get_rank())
        if failure is not None:
            raise failure

    def read(self) -> None:
        """Read what no group has read yet.

        Raises:
            RuntimeError: some rank failed in the last step.
        """
        try:
            for notes in self._notes:
                notes.read()
        except AgreedError as agreed:
            raise agreed.error from None
