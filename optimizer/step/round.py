"""One step of a schedule's matrices, wave by wave: what rests is packed, assembled, orthogonalised, released, applied.

The element-wise parts are done here by operators, strip by strip, or by a `Sweep` in a few launches; the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ...layouts.tensors import local_of
from ...vocabulary import MOMENTUM
from ..newton_schulz.iterations import Total, orthogonalize_parts, sums_of_parts
from ..planning.routes import Own, Strip
from ..planning.schedule import Wave
from ..planning.units import Slot
from ..rounding import exact_dtype, rounded_once
from ..scalar import decay
from .batches import Batch, Group, Options, in_batches
from .exchange import Wire, kept, opened
from .methods import MATRICES

if TYPE_CHECKING:
    from .pipeline import Pipeline

Scale = Callable[[Group, int, int], float]

Sizes = Mapping[int, int]
"""Units that lie end to end in one memory, and how many elements each has there."""


class Sweep(Protocol):
    """What moves the updates of many parameters at once, on one rank: `fused.Fused`, or nothing.

    ``sends`` are the parameters whose updates it sends and assembles, ``accumulates`` those whose momenta it changes on
    the way, ``applies`` those whose results it releases and applies.
    """

    sends: frozenset[int]
    accumulates: frozenset[int]
    applies: frozenset[int]

    def begin(self, round_: Round) -> None: ...

    def send(self, number: int, wire: Tensor) -> None: ...

    def assemble(self, number: int, sizes: Sizes, stack: Tensor, wire: Tensor) -> None: ...

    def release(self, number: int, sizes: Sizes, stack: Tensor, wire: Tensor) -> None: ...

    def apply(self, number: int, wire: Tensor) -> None: ...


class NoSweep:
    """Everything is done by operators."""

    sends = accumulates = applies = frozenset[int]()

    def begin(self, round_: Round) -> None:
        pass

    def send(self, number: int, wire: Tensor) -> None:
        pass

    def assemble(self, number: int, sizes: Sizes, stack: Tensor, wire: Tensor) -> None:
        pass

    def release(self, number: int, sizes: Sizes, stack: Tensor, wire: Tensor) -> None:
        pass

    def apply(self, number: int, wire: Tensor) -> None:
        pass


class Round:
    """One step: what its waves share.  Made, it has taken gradients into momenta, exponential moving averages."""

    def __init__(
        self,
        pipeline: Pipeline,
        groups: Sequence[Group],
        state: Mapping[Tensor, Mapping[str, Tensor]],
        active: Sequence[bool],
    ) -> None:
        self.pipeline, self.groups, self.state, self.active = pipeline, groups, state, active
        self.units, self.sweep = pipeline.schedule.units, pipeline.sweep
        self._accumulate()
        # What strips are views of: contiguous, as layouts say.
        self.weights = [local_of(param) for param in pipeline.params]
        self.dense = [weight.contiguous() for weight in self.weights]
        self.slots = [
            {name: local_of(tensor).contiguous() for name, tensor in state[param].items()} for param in pipeline.params
        ]
        self.gradients = [
            local_of(param.grad).contiguous() if param.grad is not None else None for param in pipeline.params
        ]
        self.sweep.begin(self)

    def scale(self, param: int, rows: int, columns: int) -> float:
        """The learning-rate factor of an ``m x n`` matrix of a parameter."""
        return self.pipeline.scale(self.groups[param], rows, columns)

    def fill(self, number: int, wire: Wire) -> None:
        """Write what rests here, for the owners of a wave's matrices."""
        self.sweep.send(number, wire.memory)
        for unit in self.pipeline.schedule.waves[number].held:
            param = self.units[unit].param
            for slot in self._left(param, self.sweep.sends) if self.active[param] else ():
                for strip, write in wire.sending((unit, slot.name)):
                    write(self._resting(param, slot, strip))

    def orthogonalize(self, number: int, arrived: Wire, back: Wire) -> None:
        """Do those matrices of a wave that this rank has alone, and write the results, to be sent back."""
        wave = self.pipeline.schedule.waves[number]
        mine = [unit for unit in wave.owned if self._acts(unit) and self.units[unit].blocks == 1]
        for batch in in_batches(self.units, mine, self._group):
            done = self._finished(batch, number, wave, arrived, back)
            self._release(number, wave, batch.sizes, done, back)

    def in_blocks(self, number: int) -> list[int]:
        """Those matrices of a wave of which this rank does some blocks, in the order that all ranks take."""
        owned = self.pipeline.schedule.waves[number].owned
        return [unit for unit in owned if self._acts(unit) and self.units[unit].blocks > 1]

    def orthogonalize_blocks(self, unit: int, total: Total, number: int, arrived: Wire, back: Wire) -> None:
        """Do this rank's blocks of a matrix, and write the results."""
        wave = self.pipeline.schedule.waves[number]
        done = self._blocks(unit, total, number, wave, arrived)
        self._release(number, wave, {unit: done.numel()}, done, back)

    def sums(self, unit: int) -> list[tuple[int, int]]:
        """The shapes of what the ranks that share a matrix add up."""
        return sums_of_parts(min(self.units[unit].rows_columns), self.groups[self.units[unit].param]["ns_steps"])

    def apply(self, number: int, arrived: Wire) -> None:
        """Apply what other owners have sent."""
        self.sweep.apply(number, arrived.memory)
        for unit in self.pipeline.schedule.waves[number].held:
            if self._acts(unit):
                for slot in self._left(self.units[unit].param, self.sweep.applies):
                    self._apply(unit, slot, arrived.received((unit, slot.name)))

    def _accumulate(self) -> None:
        for param, (tensor, group) in enumerate(zip(self.pipeline.params, self.groups, strict=True)):
            if tensor.grad is not None and param not in self.sweep.accumulates:
                with rounded_once([local_of(self.state[tensor][MOMENTUM])]) as [[momentum]]:
                    momentum.lerp_(local_of(tensor.grad).to(momentum.dtype), 1 - group["momentum"])

    def _acts(self, unit: int) -> bool:
        return self.active[self.units[unit].param]

    def _group(self, param: int) -> Group:
        return self.groups[param]

    def _left(self, param: int, swept: frozenset[int]) -> Sequence[Slot]:
        """What operators do of a parameter: all its slots, but for the update where that is swept."""
        slots = self.pipeline.specs[param].slots
        return slots[1:] if param in swept else slots

    def _resting(self, param: int, slot: Slot, strip: Strip) -> Tensor:
        """What an owner is given of a slot: of the momentum, the update that Nesterov's look ahead makes of it."""
        values = strip.of(self.slots[param][slot.name])
        group, gradient = self.groups[param], self.gradients[param]
        if slot is not self.pipeline.specs[param].slots[0] or not group["nesterov"]:
            return values
        assert gradient is not None, "an active parameter has a gradient"
        exact = exact_dtype(values)
        return torch.lerp(strip.of(gradient).to(exact), values.to(exact), group["momentum"])

    def _finished(self, batch: Batch, number: int, wave: Wave, arrived: Wire, back: Wire) -> Tensor:
        """Orthogonalise a batch, and do with each matrix what its algorithm does besides; end to end."""
        method = MATRICES[batch.options.algorithm]
        done = batch.orthogonalized(self._stack(batch.sizes, number, wave, arrived))
        if not method.slots:
            return done
        for unit, result in zip(batch.numbers, batch.places.of_memory(done), strict=True):
            param = self.units[unit].param
            extras = self.pipeline.specs[param].slots[1:]
            rows = {slot.name: self._rows(unit, slot, wave, arrived) for slot in extras}
            result.copy_(method.finish(result, rows, self.groups[param]))
            for slot in extras:
                self._put(wave, unit, slot, rows[slot.name], back)
        return done

    def _stack(self, sizes: Sizes, number: int, wave: Wave, arrived: Wire) -> Tensor:
        """The updates of matrices that are done together, end to end.

        A fresh buffer: dense and aligned alike on every topology, as the bits of a product may depend on it.
        """
        params = [self.units[unit].param for unit in sizes]
        updates = [self.pipeline.specs[param].slots[0] for param in params]
        stack = torch.empty(sum(sizes.values()), dtype=updates[0].there.arrives, device=self.pipeline.device)
        if self.sweep.sends.issuperset(params):
            self.sweep.assemble(number, sizes, stack, arrived.memory)
        else:
            for unit, slot, memory in zip(sizes, updates, torch.split(stack, [*sizes.values()]), strict=True):
                self._assemble(unit, slot, memory, wave, arrived)
        return stack

    def _rows(self, unit: int, slot: Slot, wave: Wave, arrived: Wire) -> Tensor:
        """The numbers that a slot has for each row of a matrix, ``[m, 1]``."""
        [(rows, columns)] = self.units[unit].parts(slot, self.pipeline.rank)
        memory = torch.empty(rows * columns, dtype=slot.there.arrives, device=self.pipeline.device)
        self._assemble(unit, slot, memory, wave, arrived)
        return memory.view(-1, 1)

    def _assemble(self, unit: int, slot: Slot, memory: Tensor, wave: Wave, arrived: Wire) -> None:
        source = partial(self._resting, self.units[unit].param, slot)
        own = kept(wave.gather.own.get((unit, slot.name), Own()), source, self.pipeline.device)
        for strip, values in arrived.received((unit, slot.name), own):
            strip.of(memory).copy_(values)

    def _release(self, number: int, wave: Wave, sizes: Sizes, done: Tensor, back: Wire) -> None:
        """Write results, end to end, to the wire, and apply what of them rests on this rank."""
        params = [self.units[unit].param for unit in sizes]
        if self.sweep.applies.issuperset(params):
            self.sweep.release(number, sizes, done, back.memory)
            return
        for unit, param, memory in zip(sizes, params, torch.split(done, [*sizes.values()]), strict=True):
            self._put(wave, unit, self.pipeline.specs[param].slots[0], memory, back)

    def _put(self, wave: Wave, unit: int, slot: Slot, memory: Tensor, back: Wire) -> None:
        for strip, write in back.sending((unit, slot.name)):
            write(strip.of(memory))
        own = wave.scatter.own.get((unit, slot.name), Own())
        self._apply(unit, slot, opened(kept(own, lambda strip: strip.of(memory), self.pipeline.device)))

    def _blocks(self, index: int, total: Total, number: int, wave: Wave, arrived: Wire) -> Tensor:
        """This rank's blocks of a matrix that is computed in blocks, end to end."""
        unit = self.units[index]
        [update] = self.pipeline.specs[unit.param].slots
        shapes = unit.parts(update, self.pipeline.rank)
        tall = unit.rows_columns[0] > unit.rows_columns[1]
        sizes = [math.prod(shape) for shape in shapes]
        memory = self._stack({index: sum(sizes)}, number, wave, arrived)
        cut = torch.split(memory, sizes)
        parts = [part.view(shape) for part, shape in zip(cut, shapes, strict=True)]
        options = Options.of(self.groups[unit.param]).arguments()
        done = orthogonalize_parts([part.mT if tall else part for part in parts], **options, total=total)
        return torch.cat([(part.mT if tall else part).reshape(-1) for part in done])

    def _apply(self, unit: int, slot: Slot, results: Iterable[tuple[Strip, Tensor]]) -> None:
        """Take in strips of a result: of the update, decay, scale and subtract; of another slot, what it is."""
        param = self.units[unit].param
        if slot is not self.pipeline.specs[param].slots[0]:
            for strip, values in results:
                strip.of(self.slots[param][slot.name]).copy_(values)
            return
        group, weight = self.groups[param], self.dense[param]
        rate, scale = float(group["lr"]), self.scale(param, *self.units[unit].rows_columns)
        for strip, values in results:
            with rounded_once([strip.of(weight)]) as [[exact]]:
                change = values.to(exact.dtype)
                decay([exact], [change], rate * group["weight_decay"], group["cautious"])
                exact.add_(change, alpha=-rate * scale)

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
