"""The planner of an optimizer's steps: each rank plans for itself, and plans are compared once."""

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
from .agreement import AGREE_ON_PLAN, Intent, fixed_options
from .elementwise import Elementwise, TorchElementwise
from .exchange import agree, connect, link
from .rank_sets import RankSet, State, group_of, groups_of_mesh
from .step import Step


@dataclass(frozen=True, slots=True)
class Planner:
    """The options of an optimizer that its plans follow from, as `Muon` takes them.

    Attributes:
        resting: the layout of a parameter on these ranks.
        scale: the learning-rate factor of an ``m x n`` matrix of a group.
        nonfinite: the policy for gradients that are not finite; None: no step may be forbidden.
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
        """Plan the steps of a set of ranks, and connect them; or tell them of a failure.  Collective over these.

        Raises:
            AgreedError: on all of them, if they plan differently or one of them fails.
        """
        group = group_of(held.ranks, self.replicas, *groups_of_mesh(held.mesh))
        ranks = tuple(dist.get_process_group_ranks(group)) if group is not None else held.ranks or (0,)
        rank = dist.get_rank() if group is not None else ranks[0]
        params, device, guarded = [member.param for member in held.matrices], held.device, self.nonfinite is not None
        intent = Intent.of(AGREE_ON_PLAN, {})
        try:
            if failure is not None:
                raise failure
            with paused_collector():
                alike: dict[Hashable, Spec] = {}
                specs = []
                for member in held.matrices:
                    slots = self._slots(member.param, groups[member.group], state, ranks)
                    key = member.group, member.param.device, slots
                    if key not in alike:
                        alike[key] = self._spec(member.param.device, groups[member.group], slots)
                    specs.append(alike[key])
                schedule = make_schedule(specs, ranks, rank, self.stages)
            weights = [local_of(param) for param in params]
            backend = elementwise(schedule, specs, weights, device, guarded=guarded)
            facts = {"exchange": self.exchange, "nonfinite": self.nonfinite or "not looked for"}
            for index, (member, label) in enumerate(zip(held.members, held.labels, strict=True)):
                about = f"{tuple(member.param.shape)} {member.param.dtype} in group {held.numbers[member.group]}"
                facts[f"parameter {index}"] = about if member.name is None else f"{label}, {about}"
            facts |= fixed_options(held.groups(groups))
            for param, (rows, columns) in dict.fromkeys((unit.param, unit.rows_columns) for unit in schedule.units):
                number = held.numbers[held.matrices[param].group]
                scale = specs[param].scale(rows, columns)
                facts[f"adjust_lr_fn of group {number} for {rows} x {columns}"] = repr(scale)
            # What only the others' cost, form or layout can make different.
            intent = Intent.of(AGREE_ON_PLAN, {**facts, "the plan": schedule.digest.hex()})
        except Exception as error:
            intent = intent.failed(error, rank)
        agree(intent, group, device)
        connect(group, device, self.exchange)
        links = [
            (link(stage.gather, group, device, self.exchange), link(stage.scatter, group, device, self.exchange))
            for stage in schedule.stages
        ]
        return Step(schedule, params, specs, rank, backend, group, links, device, guarded=guarded)

    def _slots(self, param: Tensor, group: ParamGroup, state: State, ranks: Ranks) -> tuple[Slot, ...]:
        precision, fused = PRECISIONS[group["ns_dtype"]], fused_of(group)
        update = Slot(MOMENTUM, self.resting(param, ranks), fused, precision.there, precision.back)
        extras = [
            Slot(name, layout_of(state[param][name], ranks), kept.fused, torch.float32, torch.float32)
            for name, kept in extras_of(param, group).items()
        ]
        return (update, *extras)

    def _spec(self, device: torch.device, group: ParamGroup, slots: tuple[Slot, ...]) -> Spec:
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
    """Return the backend: kernels on NVIDIA GPUs, operators elsewhere, where they are as good.

    Warns:
        RuntimeWarning: there is a GPU, and no Triton: operators do the work, in many more launches.
    """
    if has_kernels(device, torch.bfloat16):
        try:
            from ..triton.updates import KERNEL_DTYPES
            from .kernels import KernelElementwise
        except ModuleNotFoundError as error:
            missing_triton(error, "the element-wise parts of a step run on torch's operators, strip by strip")
        else:
            if all(weight.dtype in KERNEL_DTYPES for weight in weights):
                numels = [weight.numel() for weight in weights]
                return KernelElementwise(schedule, specs, numels, device, guarded=guarded)
    return TorchElementwise(schedule, specs, [weight.shape for weight in weights], device)
