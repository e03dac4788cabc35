"""A step of the matrices of one schedule: momentum, exchange, orthogonalise, exchange back, apply.

Waves overlap: while the matrices of one are orthogonalised, the next one's updates are on their way to their owners
and the previous one's results on their way back.  So at most two waves are in memory at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..layouts.tensors import local_of
from .exchange import Link, Wire, agree, link
from .matrices import rows_columns, shape_of
from .methods import MATRICES
from .newton_schulz import orthogonalize
from .precision import PRECISIONS
from .scalar import decay
from .schedule import Schedule, Wave
from .units import Spec

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
        self._scale = scale
        agree(schedule.digest, group, self.device)
        self._links: list[tuple[Link, Link]] = [
            (link(wave.gather, group, self.device, exchange), link(wave.scatter, group, self.device, exchange))
            for wave in schedule.waves
        ]

    def step(self, groups: Sequence[Group], state: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """One update of those parameters that have a gradient.

        Args:
            groups: the parameter group of each parameter.
            state: by parameter and slot.

        Raises:
            RuntimeError: on all ranks, if they have gradients for different parameters.
        """
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
        slots, gradient, group = self.slots[param], self.gradients[param], self.groups[param]
        update, *extras = self.pipeline.specs[param].slots
        assert gradient is not None, "an active parameter has a gradient"
        for strip, place in wire.sending((unit, update.name)):
            momentum = strip.of(slots["momentum_buffer"])
            if group["nesterov"]:
                momentum = torch.lerp(strip.of(gradient).to(momentum.dtype), momentum, group["momentum"])
            place.copy_(momentum)
        for slot in extras:
            for strip, place in wire.sending((unit, slot.name)):
                place.copy_(strip.of(slots[slot.name]))

    def orthogonalized(self, number: int, wave: Wave, arrived: Wire) -> Wire:
        """The results of this rank's matrices, ready to be sent back."""
        back = Wire(wave.scatter, self.pipeline._links[number][1], self.pipeline.device, self.intent)
        for unit in wave.owned:
            param = self.units[unit].param
            if not self.active[param]:
                continue
            group = self.groups[param]
            spec = self.pipeline.specs[param]
            # Fresh buffers: dense and aligned alike on every topology, as the bits of a product may depend on it.
            whole = {}
            for slot in spec.slots:
                shape = shape_of(slot.matrices[self.units[unit].index])
                memory = torch.empty(rows_columns(shape), dtype=slot.there, device=self.pipeline.device)
                for strip, values in arrived.received((unit, slot.name)):
                    strip.of(memory).copy_(values)
                whole[slot.name] = memory
            update = spec.slots[0].name
            result = orthogonalize(
                whole.pop(update),
                coefficients=group["ns"],
                steps=group["ns_steps"],
                dtype=PRECISIONS[group["ns_dtype"]].compute,
                eps=group["eps"],
                gram=group["gram"],
            )
            whole[update] = MATRICES[group["algorithm"]].finish(result, whole, group)
            for name, memory in whole.items():
                for strip, place in back.sending((unit, name)):
                    place.copy_(strip.of(memory))
        return back

    def apply(self, wave: Wave, arrived: Wire) -> None:
        """Decay, scale and subtract, in float32 at least, whatever the parameter's dtype."""
        arrived.arrive()
        for unit in wave.held:
            param = self.units[unit].param
            if not self.active[param]:
                continue
            group, weight = self.groups[param], self.dense[param]
            update, *extras = self.pipeline.specs[param].slots
            precision = torch.promote_types(weight.dtype, torch.float32)
            rate = float(group["lr"])
            scale = self.pipeline._scale(group, *self.units[unit].rows_columns)
            for strip, values in arrived.received((unit, update.name)):
                part = strip.of(weight)
                exact, change = part.to(precision), values.to(precision)
                decay([exact], [change], rate * group["weight_decay"], group["cautious"])
                exact.add_(change, alpha=-rate * scale)
                if exact is not part:
                    part.copy_(exact)
            for slot in extras:
                for strip, values in arrived.received((unit, slot.name)):
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
