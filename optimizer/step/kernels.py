"""The element-wise parts of a step by Triton kernels: what `operators` does strip by strip, in a few launches.

Updates go from where they rest to the wire, and to the owner's stack where that is this rank, in one pass over gradient
and momentum; results go from the wire or the stack to the parameters in one pass.  Where all elements of a parameter
are sent by this rank, its momentum takes the gradient in on the way.

This file needs Triton.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...vocabulary import MOMENTUM
from ..cuda_graphs import capturing, uploaded
from ..planning.schedule import Schedule
from ..planning.units import Spec
from ..triton import updates
from .elementwise import Sizes
from .moves import Move, Routed, carried, on_wire, own
from .resting import Resting
from .segments import KERNEL_DTYPES, Segments, TensorTable, addresses


@dataclass(frozen=True, slots=True)
class LaunchKind:
    """What tensors of one launch have in common: their dtypes, what travels, and whether momentum is changed."""

    momentum: torch.dtype
    gradient: torch.dtype
    weight: torch.dtype
    there: torch.dtype
    back: torch.dtype
    accumulate: bool


class KernelElementwise:
    """The element-wise backend for NVIDIA GPUs (`elementwise.Elementwise`).

    Tensors are numbered by parameter and shape of the matrix, as rates depend on both.

    Args:
        specs: of the schedule's parameters.
        numels: elements of each parameter that rest on this rank.
        guarded: whether updates are sent ahead of momenta, which then take all gradients in by themselves.
    """

    def __init__(
        self,
        schedule: Schedule,
        specs: Sequence[Spec],
        numels: Sequence[int],
        device: torch.device,
        *,
        guarded: bool = False,
    ) -> None:
        self._schedule, self._specs, self._device = schedule, specs, device
        entries = list(dict.fromkeys((unit.param, unit.rows_columns) for unit in schedule.units))
        number = {entry: index for index, entry in enumerate(entries)}
        self._params = [param for param, _ in entries]
        self._scales = [specs[param].scale(*shape) for param, shape in entries]
        self._entry = [number[unit.param, unit.rows_columns] for unit in schedule.units]
        sent = _sent(schedule)
        whole = (param for param, numel in enumerate(numels) if sent[param] == numel)
        self._accumulated = frozenset[int]() if guarded else frozenset(whole)
        self._kinds: list[LaunchKind] = []
        self._segments: dict[Hashable, list[tuple[LaunchKind, Segments]]] = {}
        self._tables: dict[Hashable, tuple[tuple[float, ...], Tensor]] = {}
        self._captured: list[Tensor] = []

    def begin(self, resting: Resting) -> None:
        """Look where tensors lie at this step, and what its rates are."""
        kinds = [self._kind(resting, param) for param in self._params]
        if kinds != self._kinds:
            self._kinds, self._segments = kinds, {}
        gradients = [resting.gradients[param] for param in self._params]
        pairs = list(zip(self._params, gradients, strict=True))
        momenta = [None if gradient is None else resting.slots[param][MOMENTUM] for param, gradient in pairs]
        weights = [None if gradient is None else resting.weights[param] for param, gradient in pairs]
        self._momenta = {kind: self._tensors("momenta", kind, kind.momentum, momenta) for kind in set(kinds)}
        self._gradients = {kind: self._tensors("gradients", kind, kind.gradient, gradients) for kind in set(kinds)}
        self._weights = {kind: self._tensors("weights", kind, kind.weight, weights) for kind in set(kinds)}
        # Kernels write behind torch's back: autograd must know that what it saved is no longer there.
        torch.autograd.graph.increment_version([t for t in (*momenta, *weights) if t is not None])
        groups = [resting.groups[param] for param in self._params]
        momentum = self._numbers("momentum", [group["momentum"] for group in groups])
        ahead = torch.where(self._numbers("nesterov", [bool(group["nesterov"]) for group in groups]) > 0, momentum, 1.0)
        self._averaging = torch.stack([1 - momentum, ahead], dim=1).float()
        self._rates = updates.rate_table(
            self._numbers("lr", [group["lr"] for group in groups]),
            self._numbers("scale", self._scales),
            self._numbers("weight_decay", [group["weight_decay"] for group in groups]),
            self._numbers("cautious", [bool(group["cautious"]) for group in groups]) > 0,
        )

    def send(self, resting: Resting, stage: int, wire: Tensor) -> None:
        sends, units = self._schedule.stages[stage].gather.sends, self._schedule.stages[stage].held
        self._send(("send", stage), lambda: on_wire(units, self._entry, sends), wire)

    def send_ahead(self, resting: Resting, stage: int, wire: Tensor) -> None:
        sends, units = self._schedule.stages[stage].gather.sends, self._schedule.stages[stage].held
        self._send(("send", stage), lambda: on_wire(units, self._entry, sends), wire, ahead=True)

    def take_in(self, resting: Resting) -> None:
        others = (param for param in range(len(self._specs)) if param not in self._accumulated)
        resting.accumulate(resting.alike(others))

    def assemble(self, resting: Resting, stage: int, sizes: Sizes, wire: Tensor) -> Tensor:
        gather = self._schedule.stages[stage].gather
        dtype = self._kinds[self._entry[next(iter(sizes))]].there
        stack = torch.empty(sum(sizes.values()), dtype=dtype, device=self._device)
        mine = partial(own, gather, sizes, self._entry, stack.element_size(), back=False)
        self._send(("own", stage, *sizes), mine, stack.view(torch.uint8))
        self._carry(("arrived", stage, *sizes), sizes, gather.receives, stack, wire, back=True)
        return stack

    def release(self, resting: Resting, stage: int, sizes: Sizes, results: Tensor, wire: Tensor) -> None:
        scatter = self._schedule.stages[stage].scatter
        mine = partial(own, scatter, sizes, self._entry, results.element_size(), back=True)
        self._carry(("back", stage, *sizes), sizes, scatter.sends, results, wire, back=False)
        self._apply(("mine", stage, *sizes), mine, results.view(torch.uint8))

    def apply(self, resting: Resting, stage: int, wire: Tensor) -> None:
        receives, units = self._schedule.stages[stage].scatter.receives, self._schedule.stages[stage].held
        self._apply(("apply", stage), lambda: on_wire(units, self._entry, receives), wire)

    def _send(
        self, key: Hashable, moves: Callable[[], Iterable[tuple[int, Move]]], buffer: Tensor, *, ahead: bool = False
    ) -> None:
        for kind, segments in self._planned(key, moves, lambda kind: kind.there):
            momenta, gradients = self._momenta[kind], self._gradients[kind]
            how = updates.AHEAD if ahead else kind.accumulate
            updates.send(segments, momenta, gradients, self._averaging, buffer, kind.there, accumulate=how)

    def _apply(self, key: Hashable, moves: Callable[[], Iterable[tuple[int, Move]]], buffer: Tensor) -> None:
        for kind, segments in self._planned(key, moves, lambda kind: kind.back):
            updates.apply(segments, self._weights[kind], self._rates, buffer, kind.back)

    def _carry(self, key: Hashable, sizes: Sizes, routed: Routed, stack: Tensor, wire: Tensor, *, back: bool) -> None:
        """Between a stack and the wire."""
        if key not in self._segments:
            moves = list(carried(sizes, routed))
            kind = self._kinds[self._entry[next(iter(sizes))]]
            self._segments[key] = [(kind, Segments.of(moves, 1, stack.dtype, self._device))] if moves else []
        for _, segments in self._segments[key]:
            where = TensorTable(uploaded((stack.data_ptr(),), torch.int64, self._device), stack.dtype)
            updates.carry(segments, where, wire, back=back)

    def _planned(
        self, key: Hashable, moves: Callable[[], Iterable[tuple[int, Move]]], dtype: Callable[[LaunchKind], torch.dtype]
    ) -> list[tuple[LaunchKind, Segments]]:
        """The launches for some moves of units, cut once."""
        if key not in self._segments:
            by_kind: defaultdict[LaunchKind, list[Move]] = defaultdict(list)
            for unit, move in moves():
                by_kind[self._kinds[self._entry[unit]]].append(move)
            self._segments[key] = [
                (kind, Segments.of(some, len(self._params), dtype(kind), self._device))
                for kind, some in by_kind.items()
            ]
        return self._segments[key]

    def _kind(self, resting: Resting, param: int) -> LaunchKind:
        update, gradient, weight = self._specs[param].slots[0], resting.gradients[param], resting.weights[param]
        return LaunchKind(
            resting.slots[param][MOMENTUM].dtype,
            weight.dtype if gradient is None else gradient.dtype,
            weight.dtype,
            update.there,
            update.back,
            param in self._accumulated,
        )

    def _tensors(
        self, name: str, kind: LaunchKind, dtype: torch.dtype, tensors: Sequence[Tensor | None]
    ) -> TensorTable:
        """Of the tensors of a kind."""
        chosen = [t if mine == kind else None for t, mine in zip(tensors, self._kinds, strict=True)]
        return TensorTable(self._table((name, kind), addresses(chosen, self._device), torch.int64), dtype)

    def _numbers(self, name: str, values: Sequence[float | Tensor]) -> Tensor:
        """One for each entry, fp64; those that are tensors on the device are read there, whenever this runs."""
        live = {id(value): value for value in values if isinstance(value, Tensor) and value.device == self._device}
        numbers = self._table(name, tuple(0.0 if id(v) in live else float(v) for v in values), torch.float64)
        for key, value in live.items():
            these = self._table((name, key), tuple(float(id(v) == key) for v in values), torch.float64)
            numbers = torch.where(these > 0, value.reshape(()).double(), numbers)
        return numbers

    def _table(self, name: Hashable, values: tuple[float, ...], dtype: torch.dtype) -> Tensor:
        """Numbers on the device, sent there when they change.  A captured graph reads them as long as it lives."""
        held = self._tables.get(name)
        if held is None or held[0] != values:
            held = values, uploaded(values, dtype, self._device)
            if not capturing():
                self._tables[name] = held
        if capturing():
            self._captured.append(held[1])
        return held[1]


def _sent(schedule: Schedule) -> Counter[int]:
    """How many elements of the update of each parameter this rank sends to owners, or has for itself."""
    sent: Counter[int] = Counter()
    for stage in schedule.stages:
        own = {key: [source for source, _ in copies] for key, copies in stage.gather.own.items()}
        for (unit, slot), strips in (*stage.gather.sends.items(), *own.items()):
            if slot == MOMENTUM:
                sent[schedule.units[unit].param] += sum(strip.numel for strip in strips)
    return sent


def suits(weights: Iterable[Tensor]) -> bool:
    """Whether there are kernels for parameters of these dtypes."""
    return all(weight.dtype in KERNEL_DTYPES for weight in weights)
