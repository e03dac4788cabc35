"""Exchanges between ranks.  With `layer_wise`, this is the only file of the step that talks to other ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..cuda_graphs import uploaded
from ..newton_schulz.iterations import tree_sum
from ..planning.routes import NOTE, Key, Own, Route, Strip
from .process_groups import Ranks, new_group


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
        work = dist.all_to_all_single(received, send, *counts, self.group, async_op=True)

        def arrive() -> Tensor:
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
        everyone = [torch.empty_like(mine) for _ in route.send_counts]
        dist.all_gather(everyone, mine, group)
        table = torch.stack(everyone)
        before = table[:, : dist.get_rank(group)].sum(dim=1)
        return cls(route, group, tuple(before.tolist()), int(table.sum(dim=1).max()))

    def start(self, send: Tensor) -> Callable[[], Tensor]:
        padded = send.new_empty(self.largest)
        padded[: len(send)] = send
        wires = [send.new_empty(self.largest) for _ in self.starts]
        work = dist.all_gather(wires, padded, self.group, async_op=True)

        def arrive() -> Tensor:
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


class Wire:
    """One exchange under way: fill the views of :meth:`sending`, :meth:`start`, :meth:`arrive`, read :meth:`received`.

    Args:
        intent: what this rank is about to do; compared with the others' by :meth:`check`.
    """

    def __init__(self, route: Route, link: Link, device: torch.device, intent: bytes) -> None:
        self._route, self._link = route, link
        # One rank has nobody to tell.
        self._note = uploaded(tuple(_digest(intent)), torch.uint8, device) if len(route.send_counts) > 1 else None
        self._buffer: Tensor | None = torch.empty(sum(route.send_counts), dtype=torch.uint8, device=device)
        self._arrive: Callable[[], Tensor] | None = None

    @property
    def memory(self) -> Tensor:
        """Bytes: what is sent, and after :meth:`arrive` what was received."""
        assert self._buffer is not None, "under way"
        return self._buffer

    def sending(self, key: Key) -> Iterable[tuple[Strip, Callable[[Tensor], None]]]:
        """The strips of a tensor that leave (or stay), each with what writes its values to the wire."""
        assert self._buffer is not None, "started already"
        for strip in self._route.sends.get(key, ()):
            values, tail = strip.on(self._buffer)
            yield strip, partial(strip.coding.write, values=values, tail=tail)

    def start(self) -> None:
        """Begin the exchange.  What was sent may not be touched until it has arrived."""
        assert self._buffer is not None, "started already"
        if self._note is not None:
            for start in _starts(self._route.send_counts):
                self._buffer.narrow(0, start, NOTE).copy_(self._note)
        self._arrive = self._link.start(self._buffer)

    def arrive(self) -> None:
        """Wait until everything is here; the sending side's memory is given back."""
        assert self._arrive is not None, "not started"
        self._buffer = self._arrive()
        self._arrive = None

    def check(self) -> None:
        """Compare what the ranks are about to do; waits for the device.

        Raises:
            RuntimeError: on every rank, if any two ranks intend different things.
        """
        assert self._buffer is not None, "not started"
        if self._note is None:
            return
        notes = torch.stack([self._buffer.narrow(0, at, NOTE) for at in _starts(self._route.receive_counts)])
        disagree = (notes != self._note).any(dim=1).nonzero().flatten().tolist()
        if disagree:
            raise RuntimeError(
                f"ranks disagree about this optimizer step: ranks {disagree} of the group have gradients for other "
                "parameters than this one. A parameter's gradient must be present on all ranks that hold it or on "
                "none. The momentum of the others has taken this gradient in; do not repeat the step"
            )

    def received(self, key: Key, own: Sequence[Parcel] = ()) -> Iterable[tuple[Strip, Tensor]]:
        """What there is of a tensor: each strip that arrived, or is our own (:func:`kept`), with its values, dense."""
        assert self._buffer is not None, "not arrived"
        strips = self._route.receives.get(key, ())
        return opened([*((strip, strip.on(self._buffer)) for strip in strips), *own])


Parcel = tuple[Strip, tuple[Tensor, Tensor]]
"""A strip as it is coded: its values and its tail."""


def kept(own: Own, source: Callable[[Strip], Tensor], device: torch.device) -> list[Parcel]:
    """What a rank has for itself, coded as if it had travelled.

    Args:
        source: the values of a strip.
    """
    buffer = torch.empty(own.bytes, dtype=torch.uint8, device=device)
    for strip in own.sources:
        strip.coding.write(source(strip), *strip.on(buffer))
    return [(strip, strip.on(buffer)) for strip in own.targets]


def opened(parcels: Sequence[Parcel]) -> Iterable[tuple[Strip, Tensor]]:
    """All strips of one tensor, decoded."""
    if not parcels:
        return ()
    coding = parcels[0][0].coding
    return zip((strip for strip, _ in parcels), coding.read([coded for _, coded in parcels]), strict=True)


def shared_sum(ranks: Ranks) -> Callable[[Iterator[Tensor]], Tensor]:
    """Adds up what the blocks of a matrix give on the ranks that share it: the same bits however many they are.

    Collective over these ranks, and no others, when it is made and when it is used.
    """
    if len(ranks) == 1:
        return tree_sum
    group = new_group(ranks)

    def total(partials: Iterator[Tensor]) -> Tensor:
        mine = tree_sum(partials)
        everyone = [torch.empty_like(mine) for _ in ranks]
        dist.all_gather(everyone, mine, group)
        return tree_sum(everyone)

    return total


def add_up(number: Tensor, group: dist.ProcessGroup | None) -> None:
    """Add up a number over a group, in place; all ranks get the same bits, as it is added up in one place."""
    if group is not None:
        dist.all_reduce(number, group=group)


def add_in_order(number: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of a number over a small group, in the order of its ranks: other groups get the same bits from the same
    numbers."""
    everyone = [torch.empty_like(number) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, number, group)
    return torch.stack(everyone).sum(dim=0)


def gathered(tensor: Tensor) -> Tensor:
    """All of a tensor on every rank of its mesh; a ``Partial`` one is reduced.  Collective if it is a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def agree(digest: bytes, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Compare 16 bytes between all ranks of a group.

    Raises:
        RuntimeError: on every rank, if they differ.
    """
    if group is None:
        return
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group)
    differ = [rank for rank, theirs in enumerate(everyone) if not torch.equal(theirs, mine)]
    if differ:
        raise RuntimeError(
            f"ranks {differ} of the group planned another exchange than this one: every rank must build the optimizer "
            "from the same parameters, in the same groups and order"
        )


def _digest(intent: bytes) -> bytes:
    return hashlib.blake2b(intent, digest_size=NOTE).digest()


def _starts(counts: Sequence[int]) -> list[int]:
    return list(accumulate(counts, initial=0))[:-1]
