"""State that rests in host memory, and its visits to the device that computes with it, beside what the device does.

A tensor comes to the device as a copy, is changed there, and is copied back into the memory in which it rests; so its
bits are those that it would have on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

TURN_BYTES = 1 << 28
"""Bytes of state that come to a device together: at the 25 GB/s of a host's bus they take 10 ms, a hundred times as
long as it takes to launch the copies."""

AHEAD = 2
"""Turns that come before they are needed: one is used then, one is ready, and one is on its way."""

Key = tuple[int, str]
"""A tensor of state: the number of its parameter, and its slot."""

Tensors = Mapping[Key, Tensor]
Wait = Callable[[], None]


class Transfers(Protocol):
    """Copies between host memory and a device."""

    def begin(self) -> None:
        """Order the next copies after all that was launched before, by visits that were left in their midst too."""
        ...

    def fetch(self, resting: Sequence[Tensor]) -> tuple[list[Tensor], Wait]:
        """Begin to copy tensors to the device; the function lets the computation wait for them, but not the host."""
        ...

    def give_back(self, resting: Sequence[Tensor], here: Sequence[Tensor]) -> Wait:
        """Begin to copy tensors to where they rest, after what was computed; the function lets the host wait."""
        ...


@dataclass(frozen=True, slots=True)
class TransfersInOrder:
    """Copies that are done when they return, or by the same stream as what is computed."""

    device: torch.device

    def begin(self) -> None:
        return None

    def fetch(self, resting: Sequence[Tensor]) -> tuple[list[Tensor], Wait]:
        return [torch.empty_like(tensor, device=self.device).copy_(tensor) for tensor in resting], self.begin

    def give_back(self, resting: Sequence[Tensor], here: Sequence[Tensor]) -> Wait:
        for target, source in zip(resting, here, strict=True):
            target.copy_(source)
        return self.begin


class TransfersBeside:
    """Copies on two streams of a CUDA device, one for each direction, beside the stream that computes.

    The memory on the device belongs to the first of these streams.  Nobody else may free it early: it is dropped once
    the host has waited for the copy back, or before `begin`, which lets that stream wait for all others.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._there, self._back = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        self._there.wait_stream(torch.cuda.current_stream(self._device))
        self._there.wait_stream(self._back)

    def fetch(self, resting: Sequence[Tensor]) -> tuple[list[Tensor], Wait]:
        with torch.cuda.stream(self._there):
            here = [
                torch.empty_like(tensor, device=self._device).copy_(tensor, non_blocking=True) for tensor in resting
            ]
            arrived = self._there.record_event()
        return here, lambda: torch.cuda.current_stream(self._device).wait_event(arrived)

    def give_back(self, resting: Sequence[Tensor], here: Sequence[Tensor]) -> Wait:
        self._back.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._back):
            for target, source in zip(resting, here, strict=True):
                target.copy_(source, non_blocking=True)
            event = self._back.record_event()
        return lambda: event.synchronize()


@lru_cache
def transfers_of(device: torch.device) -> Transfers:
    """Return what copies between host memory and a device; the same for all optimizers, as it has two streams."""
    return TransfersBeside(device) if device.type == "cuda" else TransfersInOrder(device)


class Visits(Protocol):
    """Visits of tensors, by key, in turns."""

    def here(self, turn: int) -> Tensors:
        """Return the tensors of a turn that have come to the device; others have always been there."""
        ...

    def done(self, turn: int) -> Tensors:
        """Return, where they rest, the tensors that leave, as neither this turn nor the next ones need them."""
        ...

    def end(self) -> None:
        """Wait until all are where they rest: the host may read them."""
        ...


class NoVisits:
    """State that rests on the device."""

    def here(self, turn: int) -> Tensors:
        return {}

    def done(self, turn: int) -> Tensors:
        return {}

    def end(self) -> None:
        return None


class HostVisits:
    """Visits of tensors that rest in host memory.

    Args:
        turns: the tensors of each, which may be in several.
        ahead: how many turns come before they are needed: then they, and the turn that is computed, are on the device.
    """

    def __init__(self, device: torch.device, turns: Sequence[Tensors], ahead: int) -> None:
        self._transfers, self._turns, self._ahead = transfers_of(device), turns, ahead
        self._here: dict[Key, Tensor] = {}
        self._arrivals: dict[int, Wait] = {}
        self._leaving: list[tuple[Wait, list[Tensor]]] = []
        self._transfers.begin()
        for turn in range(ahead):
            self._come(turn)

    def here(self, turn: int) -> Tensors:
        self._arrivals[turn]()
        return {key: self._here[key] for key in self._turns[turn]}

    def done(self, turn: int) -> Tensors:
        needed = {key for after in self._turns[turn + 1 : turn + 1 + self._ahead] for key in after}
        gone = {key: tensor for key, tensor in self._turns[turn].items() if key not in needed}
        here = [self._here.pop(key) for key in gone]
        leaving = self._transfers.give_back([*gone.values()], here), here
        # The turn that comes now takes the memory of the one before this; meanwhile the device computes this one.
        self.end()
        self._leaving.append(leaving)
        self._come(turn + self._ahead)
        return gone

    def end(self) -> None:
        while self._leaving:
            wait, _ = self._leaving[-1]
            wait()
            del wait, _, self._leaving[-1]

    def _come(self, turn: int) -> None:
        if turn < len(self._turns):
            coming = {key: tensor for key, tensor in self._turns[turn].items() if key not in self._here}
            here, self._arrivals[turn] = self._transfers.fetch([*coming.values()])
            self._here.update(zip(coming, here, strict=True))


def most_here(turns: Sequence[Tensors], ahead: int) -> int:
    """Return the most bytes of visits that are on the device at once."""
    windows = ({key: t for turn in turns[i : i + ahead + 1] for key, t in turn.items()} for i in range(len(turns)))
    return max((sum(tensor.nbytes for tensor in window.values()) for window in windows), default=0)


def _pinned(tensor: Tensor, device: torch.device) -> Tensor:
    host = tensor.cpu()
    return host.pin_memory() if device.type == "cuda" and not host.is_pinned() else host


@dataclass(frozen=True, slots=True)
class StateMemory:
    """Where state rests between steps.

    Attributes:
        rest: returns a local tensor there, given the device that computes with it.
        visits: begins visits to a device, given the tensors of each of so many turns, and how many come ahead.
        most: bytes that a turn should have at most.
    """

    rest: Callable[[Tensor, torch.device], Tensor]
    visits: Callable[[torch.device, Callable[[int], Tensors], int, int], Visits]
    most: float

    def in_turns(self, count: int, size: Callable[[int], int]) -> list[range]:
        """Cut a list of ``count`` items, each of a number of bytes, to turns of neighbours."""
        if self.most == math.inf:
            return [range(count)]
        turns: list[range] = []
        held = 0
        for number in range(count):
            held += size(number)
            if turns and held <= self.most:
                turns[-1] = range(turns[-1].start, number + 1)
            else:
                turns.append(range(number, number + 1))
                held = size(number)
        return turns


ON_DEVICE = StateMemory(lambda tensor, device: tensor, lambda *of: NoVisits(), math.inf)
STATE_MEMORIES: Mapping[str | None, StateMemory] = {
    None: ON_DEVICE,
    "cpu": StateMemory(
        _pinned, lambda device, turn, count, ahead: HostVisits(device, [*map(turn, range(count))], ahead), TURN_BYTES
    ),
}
"""The memories of state, as ``offload`` names them."""
