"""The element-wise parts of a step by kernels: what `round` does by operators, strip by strip, in a few launches.

Updates go from where they rest to the wire, and to the owner's stack where that is this rank, in one pass over gradient
and momentum; results go from the wire or the stack to the parameters in one pass.  Where all elements of a parameter
are sent by this rank, its momentum takes the gradient in on the way.

This file needs Triton.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...vocabulary import MOMENTUM
from ..cuda_graphs import capturing, uploaded
from ..planning.routes import Key, Own, Route, Strip
from ..planning.schedule import Schedule
from ..planning.units import Spec
from ..triton import elementwise
from .segments import DTYPES, Move, Segments, Tensors, addresses

if TYPE_CHECKING:
    from .round import Round, Sizes

Routed = Mapping[Key, tuple[Strip, ...]]


@dataclass(frozen=True, slots=True)
class Kind:
    """What tensors of one launch have in common: their dtypes, what travels, and whether momentum is changed."""

    momentum: torch.dtype
    gradient: torch.dtype
    weight: torch.dtype
    there: torch.dtype
    back: torch.dtype
    accumulate: bool


class Fused:
    """The updates of a schedule.  Tensors are numbered by parameter and shape of the matrix, as rates depend on both.

    Args:
        numels: elements of each parameter that rest on this rank.

    Attributes:
        sends: parameters whose updates are sent by kernels: all but those that travel with an exponent (fp16).
        accumulates: those whose momenta are changed on the way.
        applies: those whose results are applied by kernels: all.
    """

    def __init__(self, schedule: Schedule, specs: Sequence[Spec], numels: Sequence[int], device: torch.device) -> None:
        self._schedule, self._specs, self._device = schedule, specs, device
        entries = list(dict.fromkeys((unit.param, unit.rows_columns) for unit in schedule.units))
        number = {entry: index for index, entry in enumerate(entries)}
        self._entries, self._params = entries, [param for param, _ in entries]
        self._entry = [number[unit.param, unit.rows_columns] for unit in schedule.units]
        self.applies = frozenset(range(len(specs)))
        self.sends = frozenset(param for param, spec in enumerate(specs) if not spec.slots[0].there.tail)
        sent = [0] * len(specs)
        for wave in schedule.waves:
            for routed in (wave.gather.sends, {key: own.sources for key, own in wave.gather.own.items()}):
                for (unit, slot), strips in routed.items():
                    param = schedule.units[unit].param
                    if slot == specs[param].slots[0].name:
                        sent[param] += sum(strip.numel for strip in strips)
        self.accumulates = frozenset(param for param in self.sends if sent[param] == numels[param])
        self._kinds: list[Kind] = []
        self._segments: dict[Hashable, list[tuple[Kind, Segments]]] = {}
        self._tables: dict[Hashable, tuple[tuple[float, ...], Tensor]] = {}
        self._captured: list[Tensor] = []

    def begin(self, round_: Round) -> None:
        """Look where tensors lie at this step, and what its rates are."""
        kinds = [self._kind(round_, param) for param in self._params]
        if kinds != self._kinds:
            self._kinds, self._segments = kinds, {}
        active = [round_.active[param] for param in self._params]
        momenta = [round_.slots[p][MOMENTUM] if on else None for p, on in zip(self._params, active, strict=True)]
        gradients = [round_.gradients[param] for param in self._params]
        weights = [round_.dense[param] if on else None for param, on in zip(self._params, active, strict=True)]
        self._momenta = {kind: self._tensors("momenta", kind, kind.momentum, momenta) for kind in set(kinds)}
        self._gradients = {kind: self._tensors("gradients", kind, kind.gradient, gradients) for kind in set(kinds)}
        self._weights = {kind: self._tensors("weights", kind, kind.weight, weights) for kind in set(kinds)}
        # Kernels write behind torch's back: autograd must know that what it saved is no longer there.
        torch.autograd.graph.increment_version([t for t in (*momenta, *weights) if t is not None])
        groups = [round_.groups[param] for param in self._params]
        momentum = self._numbers("momentum", [group["momentum"] for group in groups])
        ahead = torch.where(self._numbers("nesterov", [bool(group["nesterov"]) for group in groups]) > 0, momentum, 1.0)
        self._averaging = torch.stack([1 - momentum, ahead], dim=1).float()
        scales = [round_.scale(param, *shape) for param, shape in self._entries]
        self._rates = elementwise.rates(
            self._numbers("lr", [group["lr"] for group in groups]),
            self._numbers("scale", scales),
            self._numbers("weight_decay", [group["weight_decay"] for group in groups]),
            self._numbers("cautious", [bool(group["cautious"]) for group in groups]) > 0,
        )

    def send(self, number: int, wire: Tensor) -> None:
        """Updates of a wave that leave this rank: to the wire."""
        sends = self._schedule.waves[number].gather.sends
        units = self._schedule.waves[number].held
        self._send(("send", number), lambda: self._on_wire(units, sends), wire)

    def assemble(self, number: int, sizes: Sizes, stack: Tensor, wire: Tensor) -> None:
        """Updates of matrices that this rank owns, end to end: from where they rest here, and from the wire."""
        gather = self._schedule.waves[number].gather
        own = partial(self._own, gather, sizes, stack.element_size(), back=False)
        self._send(("own", number, *sizes), own, stack.view(torch.uint8))
        self._carry(("arrived", number, *sizes), sizes, gather.receives, stack, wire, back=True)

    def release(self, number: int, sizes: Sizes, stack: Tensor, wire: Tensor) -> None:
        """Results of matrices that this rank owns, end to end: to the wire, and to what rests here."""
        scatter = self._schedule.waves[number].scatter
        own = partial(self._own, scatter, sizes, stack.element_size(), back=True)
        self._carry(("back", number, *sizes), sizes, scatter.sends, stack, wire, back=False)
        self._apply(("mine", number, *sizes), own, stack.view(torch.uint8))

    def apply(self, number: int, wire: Tensor) -> None:
        """Results of a wave that have arrived: from the wire to the parameters."""
        receives = self._schedule.waves[number].scatter.receives
        units = self._schedule.waves[number].held
        self._apply(("apply", number), lambda: self._on_wire(units, receives, sent=False), wire)

    def _own(self, route: Route, sizes: Sizes, itemsize: int, *, back: bool) -> Iterator[tuple[int, Move]]:
        """Between where units rest on this rank and where they lie end to end."""
        for unit, begin in _begins(sizes):
            pairs = route.own.get((unit, self._slot(unit)), Own())
            for source, target in zip(pairs.sources, pairs.targets, strict=True):
                near, far = (target, source) if back else (source, target)
                yield unit, Move.to_memory(self._entry[unit], near, far, begin * itemsize)

    def _on_wire(self, units: Iterable[int], routed: Routed, sent: bool = True) -> Iterator[tuple[int, Move]]:
        for unit in units:
            if self._schedule.units[unit].param in (self.sends if sent else self.applies):
                for strip in routed.get((unit, self._slot(unit)), ()):
                    yield unit, Move.to_wire(self._entry[unit], strip)

    def _send(self, key: Hashable, moves: Callable[[], Iterable[tuple[int, Move]]], buffer: Tensor) -> None:
        for kind, segments in self._planned(key, moves, lambda kind: kind.there):
            momenta, gradients = self._momenta[kind], self._gradients[kind]
            elementwise.send(
                segments, momenta, gradients, self._averaging, buffer, kind.there, accumulate=kind.accumulate
            )

    def _apply(self, key: Hashable, moves: Callable[[], Iterable[tuple[int, Move]]], buffer: Tensor) -> None:
        for kind, segments in self._planned(key, moves, lambda kind: kind.back):
            elementwise.apply(segments, self._weights[kind], self._rates, buffer, kind.back)

    def _carry(self, key: Hashable, sizes: Sizes, routed: Routed, stack: Tensor, wire: Tensor, *, back: bool) -> None:
        """Between a stack and the wire."""
        if key not in self._segments:
            moves = [
                Move.to_wire(0, replace(strip, offset=begin + strip.offset))
                for unit, begin in _begins(sizes)
                for strip in routed.get((unit, self._slot(unit)), ())
            ]
            kind = self._kinds[self._entry[next(iter(sizes))]]
            self._segments[key] = [(kind, Segments.of(moves, 1, stack.dtype, self._device))] if moves else []
        for _, segments in self._segments[key]:
            where = Tensors(uploaded((stack.data_ptr(),), torch.int64, self._device), stack.dtype)
            elementwise.carry(segments, where, wire, back=back)

    def _planned(
        self, key: Hashable, moves: Callable[[], Iterable[tuple[int, Move]]], dtype: Callable[[Kind], torch.dtype]
    ) -> list[tuple[Kind, Segments]]:
        """The launches for some moves of units, cut once."""
        if key not in self._segments:
            by_kind: defaultdict[Kind, list[Move]] = defaultdict(list)
            for unit, move in moves():
                by_kind[self._kinds[self._entry[unit]]].append(move)
            self._segments[key] = [
                (kind, Segments.of(some, len(self._entries), dtype(kind), self._device))
                for kind, some in by_kind.items()
            ]
        return self._segments[key]

    def _slot(self, unit: int) -> str:
        return self._specs[self._schedule.units[unit].param].slots[0].name

    def _kind(self, round_: Round, param: int) -> Kind:
        update, gradient, weight = self._specs[param].slots[0], round_.gradients[param], round_.dense[param]
        return Kind(
            round_.slots[param][MOMENTUM].dtype,
            weight.dtype if gradient is None else gradient.dtype,
            weight.dtype,
            update.there.dtype,
            update.back.dtype,
            param in self.accumulates,
        )

    def _tensors(self, name: str, kind: Kind, dtype: torch.dtype, tensors: Sequence[Tensor | None]) -> Tensors:
        """Of the tensors of a kind."""
        chosen = [t if mine == kind else None for t, mine in zip(tensors, self._kinds, strict=True)]
        return Tensors(self._table((name, kind), addresses(chosen, self._device), torch.int64), dtype)

    def _numbers(self, name: str, values: Sequence[float | Tensor]) -> Tensor:
        """One for each entry, fp64; those that are tensors on the device are read there, whenever this runs."""
        live = {id(value): value for value in values if isinstance(value, Tensor) and value.device == self._device}
        found = self._table(name, tuple(0.0 if id(v) in live else float(v) for v in values), torch.float64)
        for key, value in live.items():
            these = self._table((name, key), tuple(float(id(v) == key) for v in values), torch.float64)
            found = torch.where(these > 0, value.reshape(()).double(), found)
        return found

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


def _begins(sizes: Sizes) -> Iterator[tuple[int, int]]:
    """Units that lie end to end, and at which element each begins."""
    return zip(sizes, accumulate(sizes.values(), initial=0), strict=False)


def suits(weights: Iterable[Tensor]) -> bool:
    """Whether there are kernels for parameters of these dtypes."""
    return all(weight.dtype in DTYPES for weight in weights)
