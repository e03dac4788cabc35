"""What one set of ranks does at every step, planned by each of them and compared once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...layout import TensorLayout
from ...layouts.tensors import layout_of, local_of
from ...vocabulary import MOMENTUM, ParamGroup
from ..methods.matrix import extras_of, fused_of
from ..newton_schulz.costs import Cost
from ..newton_schulz.products import Choice, has_kernels, missing_triton
from ..planning.matrices import PRECISIONS, Slot, Spec
from ..planning.schedule import Ranks, Schedule, make_schedule, paused_collector
from .agreement import AGREE_ON_PLAN, Facts, Intent, fixed_options
from .elementwise import Elementwise, TorchElementwise
from .exchange import agree, connect, link
from .local_tensors import State
from .rank_sets import Member, RankSet, group_of, groups_of_mesh
from .step import Connection, Step


@dataclass(frozen=True, slots=True)
class Planner:
    """What an optimizer's plans are made of.

    Attributes:
        replicas: of plain tensors.
        exchange: a key of `exchange.LINKS`.
        stages: the largest number of stages; None: as many as are worth while.
        resting: where a parameter's elements are on these ranks.
        cost, form: as `Muon` takes them.
        scale: the learning-rate factor of an ``m x n`` matrix of a group.
        nonfinite: what is done about gradients that are not finite; None: nothing, and no step may be forbidden.
    """

    replicas: dist.ProcessGroup | None
    exchange: str
    stages: int | None
    resting: Callable[[Tensor, Ranks], TensorLayout]
    cost: Cost
    form: Choice
    scale: Callable[[ParamGroup, int, int], float]
    nonfinite: str | None

    def plan(self, held: RankSet, groups: Sequence[ParamGroup], state: State, failure: Exception | None) -> Step:
        """Plan the steps of a set of ranks, and connect them.  Collective over these.

        Args:
            groups: all of the optimizer.
            failure: what keeps this rank from it; the others learn of it.

        Raises:
            AgreedError: on all of them, if they plan differently or one of them fails.
        """
        group = group_of(held.ranks, self.replicas, *groups_of_mesh(held.mesh))
        ranks = tuple(dist.get_process_group_ranks(group)) if group is not None else held.ranks or (0,)
        rank = dist.get_rank() if group is not None else ranks[0]
        intent = Intent.of(AGREE_ON_PLAN, {})
        try:
            if failure is not None:
                raise failure
            with paused_collector():
                alike: dict[Hashable, Spec] = {}
                specs = [
                    alike.setdefault((member.group, member.param.device, slots), self._spec(member, groups, slots))
                    for member in held.matrices
                    for slots in [self._slots(member.param, groups[member.group], state, ranks)]
                ]
                schedule = make_schedule(specs, ranks, rank, self.stages)
            weights = [local_of(member.param) for member in held.matrices]
            backend = elementwise(schedule, specs, weights, held.device, guarded=self.nonfinite is not None)
            intent = Intent.of(AGREE_ON_PLAN, self._facts(held, groups, specs, schedule))
        except Exception as error:
            intent = intent.failed(error, rank)
        agree(intent, group, held.device)
        connect(group, held.device, self.exchange)
        links = [
            (
                link(stage.gather, group, held.device, self.exchange),
                link(stage.scatter, group, held.device, self.exchange),
            )
            for stage in schedule.stages
        ]
        params = [member.param for member in held.matrices]
        connection = Connection(group, links)
        guarded = self.nonfinite is not None
        return Step(schedule, params, specs, rank, backend, connection, held.device, guarded=guarded)

    def _facts(self, held: RankSet, groups: Sequence[ParamGroup], specs: Sequence[Spec], schedule: Schedule) -> Facts:
        """What must be the same on all ranks besides what every step compares."""
        facts = {"exchange": self.exchange, "nonfinite": self.nonfinite or "not looked for"}
        numbers, matrices = held.numbers, held.matrices
        for index, (member, label) in enumerate(zip(held.members, held.labels, strict=True)):
            about = f"{tuple(member.param.shape)} {member.param.dtype} in group {numbers[member.group]}"
            facts[f"parameter {index}"] = about if member.name is None else f"{label}, {about}"
        facts |= fixed_options(held.groups(groups))
        for param, (rows, columns) in dict.fromkeys((unit.param, unit.rows_columns) for unit in schedule.units):
            subject = f"adjust_lr_fn of group {numbers[matrices[param].group]} for {rows} x {columns}"
            facts[subject] = repr(specs[param].scale(rows, columns))
        # What only the others' cost, form or layout can make different.
        return {**facts, "the plan": schedule.digest.hex()}

    def _slots(self, param: Tensor, group: ParamGroup, state: State, ranks: Ranks) -> tuple[Slot, ...]:
        precision, fused = PRECISIONS[group["ns_dtype"]], fused_of(group)
        update = Slot(MOMENTUM, self.resting(param, ranks), fused, precision.there, precision.back)
        extras = [
            Slot(name, layout_of(state[param][name], ranks), kept.fused, torch.float32, torch.float32)
            for name, kept in extras_of(param, group).items()
        ]
        return (update, *extras)

    def _spec(self, member: Member, groups: Sequence[ParamGroup], slots: tuple[Slot, ...]) -> Spec:
        group, device = groups[member.group], member.param.device
        steps, gram, compute = group["ns_steps"], group["gram"], PRECISIONS[group["ns_dtype"]].compute
        return Spec(
            slots,
            lambda m, n: self.cost(m, n, steps, gram),
            lambda m, n, copies: self.form(device, compute, m, n, copies),
            lambda m, n: self.scale(group, m, n),
        )


def elementwise(
    schedule: Schedule, specs: Sequence[Spec], weights: Sequence[Tensor], device: torch.device, *, guarded: bool
) -> Elementwise:
    """Kernels for the element-wise parts on NVIDIA GPUs, and operators elsewhere: there they are as good.

    Args:
        guarded: whether updates are sent ahead of momenta.

    Warns:
        RuntimeWarning: there is a GPU, and no Triton: operators do the work, in many more launches.
    """
    if has_kernels(device, torch.bfloat16):
        try:
            from .kernels import KernelElementwise, suits
        except ModuleNotFoundError as error:
            missing_triton(error, "the element-wise parts of a step run on torch's operators, strip by strip")
        else:
            if suits(weights):
                numels = [weight.numel() for weight in weights]
                return KernelElementwise(schedule, specs, numels, device, guarded=guarded)
    return TorchElementwise(schedule, specs, [weight.shape for weight in weights], device)
