"""The element-wise parts of a step by torch's operators, strip by strip."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...vocabulary import MOMENTUM
from ..planning.routes import Key, Route, Strip
from ..planning.schedule import Schedule
from ..planning.units import Spec
from ..rounding import exact_dtype, rounded_once
from ..scalar import decay
from .elementwise import Sizes
from .resting import Resting


class TorchElementwise:
    """The element-wise backend that runs everywhere (`elementwise.Elementwise`).

    Args:
        specs: of the schedule's parameters.
    """

    def __init__(self, schedule: Schedule, specs: Sequence[Spec], device: torch.device) -> None:
        self._schedule, self._specs, self._device = schedule, specs, device
        self._listed: dict[int, tuple[Route, Route]] = {}
        self._scales = [specs[unit.param].scale(*unit.rows_columns) for unit in schedule.units]

    def begin(self, resting: Resting) -> None:
        pass

    def send_ahead(self, resting: Resting, stage: int, wire: Tensor) -> None:
        sends = self._routes(stage)[0].sends
        for unit, key in self._active(resting, stage):
            for strip in sends.get(key, ()):
                strip.on(wire).copy_(self._update(resting, unit, strip, resting.accumulated(self._param(unit), strip)))

    def take_in(self, resting: Resting) -> None:
        resting.accumulate(range(len(self._specs)))

    def send(self, resting: Resting, stage: int, wire: Tensor) -> None:
        sends = self._routes(stage)[0].sends
        for unit, key in self._active(resting, stage):
            for strip in sends.get(key, ()):
                strip.on(wire).copy_(self._update(resting, unit, strip, self._momentum(resting, unit, strip)))

    def assemble(self, resting: Resting, stage: int, sizes: Sizes, wire: Tensor) -> Tensor:
        gather, _ = self._routes(stage)
        dtype = self._specs[self._param(next(iter(sizes)))].slots[0].there
        stack = torch.empty(sum(sizes.values()), dtype=dtype, device=self._device)
        for unit, memory in zip(sizes, torch.split(stack, [*sizes.values()]), strict=True):
            for source, target in gather.own.get(self._key(unit), ()):
                target.of(memory).copy_(self._update(resting, unit, source, self._momentum(resting, unit, source)))
            for strip in gather.receives.get(self._key(unit), ()):
                strip.of(memory).copy_(strip.on(wire))
        return stack

    def release(self, resting: Resting, stage: int, sizes: Sizes, results: Tensor, wire: Tensor) -> None:
        _, scatter = self._routes(stage)
        for unit, memory in zip(sizes, torch.split(results, [*sizes.values()]), strict=True):
            for strip in scatter.sends.get(self._key(unit), ()):
                strip.on(wire).copy_(strip.of(memory))
            for source, target in scatter.own.get(self._key(unit), ()):
                self._apply(resting, unit, target, source.of(memory).to(target.dtype))

    def apply(self, resting: Resting, stage: int, wire: Tensor) -> None:
        receives = self._routes(stage)[1].receives
        for unit, key in self._active(resting, stage):
            for strip in receives.get(key, ()):
                self._apply(resting, unit, strip, strip.on(wire))

    def _routes(self, stage: int) -> tuple[Route, Route]:
        """There and back, made by the first step."""
        if stage not in self._listed:
            here = self._schedule.stages[stage]
            self._listed[stage] = here.gather.listed(), here.scatter.listed()
        return self._listed[stage]

    def _active(self, resting: Resting, stage: int) -> Iterator[tuple[int, Key]]:
        """The matrices of a stage that this rank holds parts of, and whose parameters take part."""
        for unit in self._schedule.stages[stage].held:
            if resting.gradients[self._param(unit)] is not None:
                yield unit, self._key(unit)

    def _momentum(self, resting: Resting, unit: int, strip: Strip) -> Tensor:
        return strip.of(resting.slots[self._param(unit)][MOMENTUM])

    def _update(self, resting: Resting, unit: int, strip: Strip, momentum: Tensor) -> Tensor:
        """Of the momentum at a strip; with Nesterov's look ahead."""
        param = self._param(unit)
        group, gradient = resting.groups[param], resting.gradients[param]
        if not group["nesterov"]:
            return momentum
        assert gradient is not None, "a parameter that takes part has a gradient"
        exact = exact_dtype(momentum)
        return torch.lerp(strip.of(gradient).to(exact), momentum.to(exact), group["momentum"])

    def _apply(self, resting: Resting, unit: int, strip: Strip, result: Tensor) -> None:
        """Decay, scale and subtract where a strip rests."""
        param = self._param(unit)
        group = resting.groups[param]
        rate = float(group["lr"])
        with rounded_once([strip.of(resting.weights[param])]) as [[exact]]:
            change = result.to(exact.dtype)
            decay([exact], [change], rate * group["weight_decay"], group["cautious"])
            exact.add_(change, alpha=-rate * self._scales[unit])

    def _param(self, unit: int) -> int:
        return self._schedule.units[unit].param

    def _key(self, unit: int) -> Key:
        return unit, MOMENTUM
