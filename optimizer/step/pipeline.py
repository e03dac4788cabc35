"""A step of the matrices of one schedule: momentum, exchange, orthogonalise, exchange back, apply.

Waves overlap: while the matrices of one are orthogonalised, the next one's updates are on their way to their owners
and the previous one's results on their way back.  So at most two waves are in memory at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...layouts.tensors import local_of
from ..cuda_graphs import capturable, capturing, refuse_absent, refuse_host
from ..newton_schulz.forms import has_kernels, missing_triton
from ..newton_schulz.iterations import Total
from ..planning.schedule import Ranks, Schedule, Wave
from ..planning.units import Spec, Unit
from .batches import Group
from .exchange import Link, Wire, agree, link, shared_sum
from .round import NoSweep, Round, Scale, Sweep


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
        self.scale = scale
        agree(schedule.digest, group, self.device)
        self.links: list[tuple[Link, Link]] = [
            (link(wave.gather, group, self.device, exchange), link(wave.scatter, group, self.device, exchange))
            for wave in schedule.waves
        ]
        self.totals: dict[Ranks, Total] = {
            owners: shared_sum(owners) for owners in dict.fromkeys(unit.owners for unit in self._shared())
        }
        self.sweep = sweep(schedule, specs, [local_of(param) for param in params])

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
        captured = capturing()
        if captured:
            refuse_absent([tuple(param.shape) for param in self.params], active)
            if not capturable(self.device):
                refuse_host("muon", self.device)
        round_ = Round(self, groups, state, active)
        returning: tuple[int, Wave, Wire] | None = None
        for number, (wave, coming) in enumerate(_one_ahead(map(round_.gather, range(len(self.links))))):
            coming.arrive()
            if number == 0 and not captured:  # all take part, as a graph is captured on all ranks or on none
                coming.check()
            back = round_.orthogonalized(number, wave, coming)
            del coming
            back.start()
            if returning:
                round_.apply(*returning)
            returning = number, wave, back
        if returning:
            round_.apply(*returning)
        round_.finish()


def sweep(schedule: Schedule, specs: Sequence[Spec], weights: Sequence[Tensor]) -> Sweep:
    """Kernels for the element-wise parts on NVIDIA GPUs, and nothing elsewhere: there operators are as good.

    Warns:
        RuntimeWarning: there is a GPU, and no Triton: operators do the work, in many more launches.
    """
    device = weights[0].device
    if not has_kernels(device, torch.bfloat16):
        return NoSweep()
    try:
        from .fused import Fused, suits
    except ModuleNotFoundError as error:
        missing_triton(error, "the element-wise parts of a step run on torch's operators, strip by strip")
        return NoSweep()
    if not suits(weights):
        return NoSweep()
    return Fused(schedule, specs, [weight.numel() for weight in weights], device)


def _one_ahead(things: Iterable[tuple[Wave, Wire]]) -> Iterator[tuple[Wave, Wire]]:
    """Each of ``things``, when the one after it has been made."""
    rest = iter(things)
    current = next(rest, None)
    while current is not None:
        following = next(rest, None)
        yield current
        current = following
