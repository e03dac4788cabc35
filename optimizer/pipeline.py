"""A step of the matrices of one schedule: momentum, exchange, orthogonalise, exchange back, apply.

Waves overlap: while the matrices of one are orthogonalised, the next one's updates are on their way to their owners
and the previous one's results on their way back.  So at most two waves are in memory at any time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..layouts.tensors import local_of
from .exchange import Link, Wire, agree, kept, link, opened, shared_sum
from .methods import MATRICES
from .newton_schulz import Total, orthogonalize, orthogonalize_parts
from .precision import PRECISIONS
from .route import Own, Strip
from .scalar import decay
from .schedule import Ranks, Schedule, Wave
from .units import Slot, Spec, Unit

Group = Mapping[str, Any]
Scale = Callable[[Group, int, int], float]


class Pipeline:
    """A schedule with its tensors.

    Args:
        schedule: for the matrices of ``params``, described by ``specs``.
        group: of the schedule's ranks; None for this process alone.
        exchange: a key of `exchange.LINKS`.
        scale: the learning-rate factor of an ``m x n`` matrix of a group.

    Raises:
        RuntimeError: on all ranks, if they have not made the same schedule.
    """

    def __init__(
        self,
        schedule: Schedule,
        params: Sequence[Tensor],
        specs: Sequence[Spec],
        group: dist.ProcessGroup | None,
        exchange: str,
        scale: Scale,
    ) -> None:
        self.schedule, self.params, self.specs = schedule, tuple(params), tuple(specs)
        self.device = params[0].device
        self.rank = dist.get_rank() if group is not None else schedule.ranks[0]
        self._scale = scale
        agree(schedule.digest, group, self.device)
        self._links: list[tuple[Link, Link]] = [
            (link(wave.gather, group, self.device, exchange), link(wave.scatter, group, self.device, exchange))
            for wave in schedule.waves
        ]
        self.totals: dict[Ranks, Total] = {
            owners: shared_sum(owners) for owners in dict.fromkeys(unit.owners for unit in self._shared())
        }

    def _shared(self) -> list[Unit]:
        """What this rank computes in blocks, in the order in which it takes part."""
        mine = (self.schedule.units[number] for number in self.schedule.owned)
        return [unit for unit in mine if unit.blocks > 1]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def step(self, groups: Sequence[Group], state: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """One update of those parameters that have a gradient.

        Args:
            groups: the parameter group of each parameter.
            state: by parameter and slot.

        Raises:
            RuntimeError: on all ranks, if they have gradients for different parameters.
        """
        with torch.autocast(self.device.type, enabled=False):  # it would round what is meant to be exact
            self._step(groups, state)

    def _step(self, groups: Sequence[Group], state: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        active = [param.grad is not None for param in self.params]
        _accumulate(
            [(p, g) for p, g, taking_part in zip(self.params, groups, active, strict=True) if taking_part], state
        )
        round_ = _Round(self, groups, state, active)
        returning: tuple[Wave, Wire] | None = None
        for number, (wave, coming) in enumerate(_one_ahead(map(round_.gather, range(len(self._links))))):
            coming.arrive()
            if number == 0:
                coming.check()
            back = round_.orthogonalized(number, wave, coming)
            del coming
            back.start()
            if returning:
                round_.apply(*returning)
            returning = wave, back
        if returning:
            round_.apply(*returning)
        round_.finish()


class _Round:
    """One step: what its waves share."""

    def __init__(
        self,
        pipeline: Pipeline,
        groups: Sequence[Group],
        state: Mapping[Tensor, Mapping[str, Tensor]],
        active: Sequence[bool],
    ) -> None:
        self.pipeline, self.groups, self.state, self.active = pipeline, groups, state, active
        self.units = pipeline.schedule.units
        self.intent = bytes(active)
        # What strips are views of: contiguous, as layouts say.
        self.weights = [local_of(param) for param in pipeline.params]
        self.dense = [weight.contiguous() for weight in self.weights]
        self.slots = [
            {name: local_of(tensor).contiguous() for name, tensor in state[param].items()} for param in pipeline.params
        ]
        self.gradients = [
            local_of(param.grad).contiguous() if param.grad is not None else None for param in pipeline.params
        ]

    def gather(self, number: int) -> tuple[Wave, Wire]:
        """Send what rests here to the owners of a wave's matrices."""
        wave = self.pipeline.schedule.waves[number]
        wire = Wire(wave.gather, self.pipeline._links[number][0], self.pipeline.device, self.intent)
        for unit in wave.held:
            param = self.units[unit].param
            if self.active[param]:
                self._pack(wire, unit, param)
        wire.start()
        return wave, wire

    def _pack(self, wire: Wire, unit: int, param: int) -> None:
        for slot in self.pipeline.specs[param].slots:
            for strip, write in wire.sending((unit, slot.name)):
                write(self._resting(param, slot, strip))

    def _resting(self, param: int, slot: Slot, strip: Strip) -> Tensor:
        """What an owner is given of a slot: of the momentum, the update that Nesterov's look ahead makes of it."""
        values = strip.of(self.slots[param][slot.name])
        group, gradient = self.groups[param], self.gradients[param]
        if slot is not self.pipeline.specs[param].slots[0] or not group["nesterov"]:
            return values
        assert gradient is not None, "an active parameter has a gradient"
        return torch.lerp(strip.of(gradient).to(values.dtype), values, group["momentum"])

    def orthogonalized(self, number: int, wave: Wave, arrived: Wire) -> Wire:
        """The results of this rank's matrices, ready to be sent back."""
        back = Wire(wave.scatter, self.pipeline._links[number][1], self.pipeline.device, self.intent)
        for unit in wave.owned:
            param = self.units[unit].param
            if not self.active[param]:
                continue
            whole = {}
            for slot in self.pipeline.specs[param].slots:
                # A fresh buffer: dense and aligned alike on every topology, as the bits of a product may depend on it.
                numel = sum(m * n for m, n in self.units[unit].parts(slot, self.pipeline.rank))
                memory = torch.empty(numel, dtype=slot.there.arrives, device=self.pipeline.device)
                key, source = (unit, slot.name), partial(self._resting, param, slot)
                own = kept(wave.gather.own.get(key, Own()), source, self.pipeline.device)
                for strip, values in arrived.received(key, own):
                    strip.of(memory).copy_(values)
                whole[slot.name] = memory
            done = self._finished(unit, whole)
            for name, memory in done.items():
                for strip, write in back.sending((unit, name)):
                    write(strip.of(memory))
            self._apply(unit, {name: self._own(wave, unit, name, memory) for name, memory in done.items()})
        return back

    def _own(self, wave: Wave, unit: int, name: str, memory: Tensor) -> Iterable[tuple[Strip, Tensor]]:
        """What of a result rests on this rank."""
        own = wave.scatter.own.get((unit, name), Own())
        return opened(kept(own, lambda strip: strip.of(memory), self.pipeline.device))

    def _finished(self, unit: int, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        """Orthogonalise one matrix, or this rank's blocks of it; the memory of each of its slots."""
        param = self.units[unit].param
        group, update = self.groups[param], self.pipeline.specs[param].slots[0]
        options = {
            "coefficients": group["ns"],
            "steps": group["ns_steps"],
            "dtype": PRECISIONS[group["ns_dtype"]].compute,
            "eps": group["eps"],
        }
        shapes = self.units[unit].parts(update, self.pipeline.rank)
        if self.units[unit].blocks > 1:
            tall = self.units[unit].rows_columns[0] > self.units[unit].rows_columns[1]
            cut = torch.split(whole[update.name], [math.prod(shape) for shape in shapes])
            parts = [part.view(shape) for part, shape in zip(cut, shapes, strict=True)]
            total = self.pipeline.totals[self.units[unit].owners]
            done = orthogonalize_parts([part.mT if tall else part for part in parts], **options, total=total)
            return {update.name: torch.cat([(part.mT if tall else part).reshape(-1) for part in done])}
        [shape] = shapes
        result = orthogonalize(whole.pop(update.name).view(shape), **options, gram=group["gram"])
        rows = {name: memory.view(-1, 1) for name, memory in whole.items()}
        return {update.name: MATRICES[group["algorithm"]].finish(result, rows, group), **rows}

    def apply(self, wave: Wave, arrived: Wire) -> None:
        """Apply what other owners have sent."""
        arrived.arrive()
        for unit in wave.held:
            param = self.units[unit].param
            if self.active[param]:
                names = [slot.name for slot in self.pipeline.specs[param].slots]
                self._apply(unit, {name: arrived.received((unit, name)) for name in names})

    def _apply(self, unit: int, results: Mapping[str, Iterable[tuple[Strip, Tensor]]]) -> None:
        """Decay, scale and subtract strips of a result, in float32 at least, whatever the parameter's dtype."""
        param = self.units[unit].param
        group, weight = self.groups[param], self.dense[param]
        update, *extras = self.pipeline.specs[param].slots
        precision = torch.promote_types(weight.dtype, torch.float32)
        rate = float(group["lr"])
        scale = self.pipeline._scale(group, *self.units[unit].rows_columns)
        for strip, values in results[update.name]:
            part = strip.of(weight)
            exact, change = part.to(precision), values.to(precision)
            decay([exact], [change], rate * group["weight_decay"], group["cautious"])
            exact.add_(change, alpha=-rate * scale)
            if exact is not part:
                part.copy_(exact)
        for slot in extras:
            for strip, values in results[slot.name]:
                strip.of(self.slots[param][slot.name]).copy_(values)

    def finish(self) -> None:
        """Copy back what is not contiguous in its own memory."""
        for weight, dense in zip(self.weights, self.dense, strict=True):
            if dense is not weight:
                weight.copy_(dense)
        for param, dense_slots in zip(self.pipeline.params, self.slots, strict=True):
            for name, dense in dense_slots.items():
                held = local_of(self.state[param][name])
                if held.data_ptr() != dense.data_ptr():
                    held.copy_(dense)


def _accumulate(active: Iterable[tuple[Tensor, Group]], state: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
    """Take gradients into momenta, an exponential moving average."""
    for param, group in active:
        momentum = local_of(state[param]["momentum_buffer"])
        gradient = local_of(param.grad)  # type: ignore[arg-type]
        momentum.lerp_(gradient.to(momentum.dtype), 1 - group["momentum"])


def _one_ahead(things: Iterable[tuple[Wave, Wire]]) -> Iterator[tuple[Wave, Wire]]:
    """Each of ``things``, when the one after it has been made."""
    rest = iter(things)
    current = next(rest, None)
    while current is not None:
        following = next(rest, None)
        yield current
        current = following
