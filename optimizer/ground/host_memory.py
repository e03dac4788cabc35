"""State that rests in host memory, and its visits to the device that computes with it, beside what the device does.

A tensor comes to the device as a copy, is changed there, and is copied back into the memory in which it rests; so its
bits are those that it would have on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

TURN_BYTES = 1 << 28
"""Bytes of state that come to a device together: at the 25 GB/s of a host's bus they take 10 ms, a hundred times as
long as it takes to launch the copies."""

TURNS_AHEAD = 2
"""Turns that are fetched before they are needed: one is used then, one is ready, and one is on its way."""

SlotKey = tuple[int, str]
"""A tensor of state: the number of its parameter, and its slot."""

TensorsByKey = Mapping[SlotKey, Tensor]
Wait = Callable[[], None]


class Transfers:
    """Copies between host memory and a device, which are done when they return, or by the stream that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> None:
        """Order the next copies after all that was launched before, by visits that were broken off too."""

    def fetch(self, host_tensors: Sequence[Tensor]) -> tuple[list[Tensor], Wait]:
        """Begin to copy tensors to the device; the function lets the computation wait for them, but not the host."""
        return [torch.empty_like(tensor, device=self._device).copy_(tensor) for tensor in host_tensors], lambda: None

    def send_back(self, host_tensors: Sequence[Tensor], device_tensors: Sequence[Tensor]) -> Wait:
        """Begin to copy tensors to host memory, after the computation; the function lets the host wait."""
        for target, source in zip(host_tensors, device_tensors, strict=True):
            target.copy_(source)
        return lambda: None


class TransfersBeside(Transfers):
    """Copies on two streams of a CUDA device, one for each direction, beside the stream that computes.

    The memory on the device belongs to the first of these streams.  Nobody else may free it early: it is dropped once
    the host has waited for the copy back, or before `begin`, which lets that stream wait for all others.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._fetching, self._returning = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        self._fetching.wait_stream(torch.cuda.current_stream(self._device))
        self._fetching.wait_stream(self._returning)

    def fetch(self, host_tensors: Sequence[Tensor]) -> tuple[list[Tensor], Wait]:
        with torch.cuda.stream(self._fetching):
            copies = [torch.empty_like(t, device=self._device).copy_(t, non_blocking=True) for t in host_tensors]
            arrival = self._fetching.record_event()
        return copies, lambda: torch.cuda.current_stream(self._device).wait_event(arrival)

    def send_back(self, host_tensors: Sequence[Tensor], device_tensors: Sequence[Tensor]) -> Wait:
        self._returning.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._returning):
            for target, source in zip(host_tensors, device_tensors, strict=True):
                target.copy_(source, non_blocking=True)
            event = self._returning.record_event()
        return lambda: event.synchronize()


@lru_cache
def transfers_of(device: torch.device) -> Transfers:
    """Return the transfers of a device; the same for all optimizers, as they have two streams."""
    return TransfersBeside(device) if device.type == "cuda" else Transfers(device)


class Visits:
    """Visits of tensors to the device that computes with them, in turns; none, as state rests there."""

    def receive(self, turn: int) -> TensorsByKey:
        """Return the tensors of a turn that visit the device; others are always there."""
        return {}

    def release(self, turn: int) -> TensorsByKey:
        """Send back the tensors that neither this turn nor the next ones need; return them in host memory."""
        return {}

    def finish(self) -> None:
        """Wait until all state is back in host memory, which the host may read."""


class HostVisits(Visits):
    """Visits of tensors that rest in host memory.

    Args:
        turns: the tensors of each, which may be in several.
        ahead: how many turns are fetched before they are needed: then they, and the turn that is computed, are on the
            device.
    """

    def __init__(self, device: torch.device, turns: Sequence[TensorsByKey], ahead: int) -> None:
        self._transfers, self._turns, self._ahead = transfers_of(device), turns, ahead
        self._visitors: dict[SlotKey, Tensor] = {}
        self._arrivals: dict[int, Wait] = {}
        self._departures: list[tuple[Wait, list[Tensor]]] = []  # with the memory that is in use until then
        self._transfers.begin()
        for turn in range(ahead):
            self._fetch(turn)

    def receive(self, turn: int) -> TensorsByKey:
        self._arrivals[turn]()
        return {key: self._visitors[key] for key in self._turns[turn]}

    def release(self, turn: int) -> TensorsByKey:
        # Tensors that the next turns need stay on the device.
        staying = set().union(*self._turns[turn + 1 : turn + 1 + self._ahead])
        leaving = {key: tensor for key, tensor in self._turns[turn].items() if key not in staying}
        copies = [self._visitors.pop(key) for key in leaving]
        departure = self._transfers.send_back([*leaving.values()], copies), copies
        # The next turn takes the memory of the one before this; meanwhile the device computes this one.
        self.finish()
        self._departures.append(departure)
        self._fetch(turn + self._ahead)
        return leaving

    def finish(self) -> None:
        while self._departures:
            wait, _ = self._departures[-1]
            wait()
            del wait, _, self._departures[-1]

    def _fetch(self, turn: int) -> None:
        if turn < len(self._turns):
            missing = {key: tensor for key, tensor in self._turns[turn].items() if key not in self._visitors}
            copies, self._arrivals[turn] = self._transfers.fetch([*missing.values()])
            self._visitors.update(zip(missing, copies, strict=True))


def peak_bytes(turns: Sequence[TensorsByKey], ahead: int) -> int:
    """Return the most bytes of visits that are on the device at once."""
    # While a turn is computed, those that are fetched ahead are there too.
    peak = 0
    for number in range(len(turns)):
        visitors: dict[SlotKey, Tensor] = {}
        for turn in turns[number : number + ahead + 1]:
            visitors |= turn
        peak = max(peak, sum(tensor.nbytes for tensor in visitors.values()))
    return peak


@dataclass(frozen=True, slots=True)
class StateMemory:
    """The memory in which state rests between steps.

    Attributes:
        store: returns a local tensor there, given the device that computes with it.
        begin_visits: begins visits to a device, given the tensors of each of so many turns, and how many are fetched
            ahead.
        turn_bytes: bytes that a turn should have at most.
    """

    store: Callable[[Tensor, torch.device], Tensor]
    begin_visits: Callable[[torch.device, Callable[[int], TensorsByKey], int, int], Visits]
    turn_bytes: float

    def cut_turns(self, count: int, size: Callable[[int], int]) -> list[range]:
        """Cut a list of ``count`` items, each of a number of bytes, to turns of neighbours."""
        if self.turn_bytes == math.inf:
            return [range(count)]
        turns: list[range] = []
        filled_bytes = 0
        for number in range(count):
            filled_bytes += size(number)
            if turns and filled_bytes <= self.turn_bytes:
                turns[-1] = range(turns[-1].start, number + 1)
            else:
                turns.append(range(number, number + 1))
                filled_bytes = size(number)
        return turns


def _pin(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor in host memory, pinned if a GPU copies it."""
    host = tensor.cpu()
    return host.pin_memory() if device.type == "cuda" and not host.is_pinned() else host


ON_DEVICE = StateMemory(lambda tensor, device: tensor, lambda *_: Visits(), math.inf)
STATE_MEMORIES: Mapping[str | None, StateMemory] = {
    None: ON_DEVICE,
    "cpu": StateMemory(
        _pin, lambda device, turn, count, ahead: HostVisits(device, [*map(turn, range(count))], ahead), TURN_BYTES
    ),
}
"""The memories of state, as ``offload`` names them."""
