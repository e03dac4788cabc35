"""The planner of an optimizer's steps: each rank plans for itself, and plans are compared once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...algebra.layout import TensorLayout
from ...layouts.tensors import layout_of, local_of
from ...names.collector import gc_paused
from ...names.errors import ArgumentError, constructed_like
from ...names.vocabulary import MOMENTUM, ParamGroup
from ..methods.matrix import Methods, fused_of, is_matrix_method, method_slots
from ..newton_schulz.costs import Cost
from ..newton_schulz.products import Choice, has_kernels, missing_triton, prefer_kernels
from ..newton_schulz.recipe import flops
from ..planning.matrices import UPDATE, WEIGHT, Slot, Spec
from ..planning.schedule import Ranks, Schedule, make_schedule
from .agreement import AGREE_ON_PLAN, CLEARED, AgreedError, Facts, Intent, plan_facts
from .elementwise import Elementwise, TorchElementwise
from .exchange import LINKS, Notes, Wire, connect
from .rank_sets import RankSet, group_of, groups_of_mesh
from .step import Step


@constructed_like("StepExecution(stages=4)")
@dataclass(frozen=True, slots=True)
class StepExecution:
    """How the work of a step is shared out, computed and sent; the same on every rank.

    No field changes which update a parameter gets; ``form`` may change its rounding.

    Raises:
        ArgumentError: an unknown exchange, or a number of stages below 1.
    """

    stages: int | None = None
    """The most rounds of exchange and compute, which overlap.  More need smaller buffers and more time.  None: up to 4,
    depending on the bytes (`schedule.worthwhile_stages`)."""

    exchange: str = "all_to_all"
    """The collective: "all_to_all", or "all_gather" for networks on which that does not scale; it sends more bytes."""

    cost: Cost | None = None
    """The cost of a matrix, by which owners share the work: a function of rows, columns, steps and ``gram``, or a
    `costs.CostTable` of measured times.  None: `recipe.flops`."""

    form: Choice | None = None
    """The choice of kernels or torch for a matrix and, with ``gram``, of the Gram form or not: a function, or the
    ``form`` of a `costs.CostTable`.  None: `products.prefer_kernels`, which estimates."""

    def __post_init__(self) -> None:
        if self.exchange not in LINKS:
            raise ArgumentError(f"exchange={self.exchange!r}: expected one of {sorted(LINKS)}")
        is_count = isinstance(self.stages, int) and not isinstance(self.stages, bool) and self.stages >= 1
        if self.stages is not None and not is_count:
            raise ArgumentError(f"stages={self.stages!r}: expected None, or a whole number of at least 1")


DEFAULT_EXECUTION = StepExecution()


@dataclass(frozen=True, slots=True)
class Planner:
    """The options of an optimizer that its plans follow from, as `Muon` takes them.

    Attributes:
        resting: the layout of a parameter on these ranks.
        scale: the learning-rate factor of an ``m x n`` matrix of a group.
        methods: by the names that groups hold.
        cleared: parameters whose state was cleared since the last step.
    """

    replicas: dist.ProcessGroup | None
    execution: StepExecution
    resting: Callable[[Tensor, Ranks], TensorLayout]
    scale: Callable[[ParamGroup, int, int], float]
    methods: Methods
    cleared: Collection[Tensor]

    def plan(self, rank_set: RankSet, groups: Sequence[ParamGroup], failure: Exception | None) -> Step:
        """Plan the steps of a set of ranks, and connect them; or tell them of a failure.  Collective over these.

        Raises:
            AgreedError: on all of them, if they plan differently or one of them fails.
        """
        group = group_of(rank_set.ranks, self.replicas, *groups_of_mesh(rank_set.mesh))
        ranks = tuple(dist.get_process_group_ranks(group)) if group is not None else rank_set.ranks or (0,)
        rank = dist.get_rank() if group is not None else ranks[0]
        params, device = [member.param for member in rank_set.matrices], rank_set.device
        intent = Intent.of(AGREE_ON_PLAN, {})
        try:
            if failure is not None:
                raise failure

            # Every rank derives the same schedule, without talking, and its own part of it.
            with gc_paused():
                specs = self._make_specs(rank_set, groups, ranks)
                schedule = make_schedule(specs, ranks, rank, self.execution.stages)

            # The element-wise parts run on kernels where these know all dtypes.
            weights = [local_of(param) for param in params]
            momenta = [state[MOMENTUM] for state in rank_set.matrix_states if MOMENTUM in state]
            backend = elementwise(schedule, specs, weights, momenta, device)

            # Facts that name the difference where ranks were built differently.
            intent = Intent.of(AGREE_ON_PLAN, self._list_facts(rank_set, groups, specs, schedule))
        except Exception as error:
            intent = intent.failed(error)
        if group is not None:
            Notes(group, device).compare(intent, at_once=True)
        elif intent.error is not None:
            raise AgreedError(intent.error)

        # Connections are made before the first step, amid which ranks might wait for each other.
        connect(group, device, self.execution.exchange)
        wires = []
        for stage in schedule.stages:
            routes = stage.gather, stage.scatter
            gather, scatter = (Wire(route, group, device, kind=self.execution.exchange) for route in routes)
            wires.append((gather, scatter))
        methods = [self.methods[member.algorithm] for member in rank_set.matrices]
        pairs = zip(rank_set.members, rank_set.labels, strict=True)
        labels = [label for member, label in pairs if is_matrix_method(member.algorithm)]
        return Step(
            schedule, params, specs, methods, labels, elementwise=backend, group=group, wires=wires, device=device
        )

    def _list_facts(
        self, rank_set: RankSet, groups: Sequence[ParamGroup], specs: Sequence[Spec], schedule: Schedule
    ) -> Facts:
        """Return everything that has to be the same on all ranks for their schedules to be parts of one."""
        facts = {"exchange": self.execution.exchange}
        members = list(zip(rank_set.members, rank_set.labels, strict=True))
        facts[CLEARED] = ", ".join(label for member, label in members if member.param in self.cleared) or "none"
        for index, (member, label) in enumerate(members):
            about = f"{tuple(member.param.shape)} {member.param.dtype} in group {rank_set.group_numbers[member.group]}"
            facts[f"parameter {index}"] = about if member.name is None else f"{label}, {about}"
        facts |= plan_facts(rank_set.groups(groups))
        for param, (rows, columns) in dict.fromkeys((unit.param, unit.rows_columns) for unit in schedule.units):
            number = rank_set.group_numbers[rank_set.matrices[param].group]
            scale = specs[param].scale(rows, columns)
            facts[f"adjust_lr_fn of group {number} for {rows} x {columns}"] = repr(scale)
        # Only the others' cost, form or layout can make this one different.
        facts["the plan"] = schedule.digest.hex()
        return facts

    def _make_specs(self, rank_set: RankSet, groups: Sequence[ParamGroup], ranks: Ranks) -> list[Spec]:
        """Return the parameters as planning sees them; equal ones, such as those of repeated layers, are one object."""
        known_specs: dict[Hashable, Spec] = {}
        specs = []
        for member, state in zip(rank_set.matrices, rank_set.matrix_states, strict=True):
            group = groups[member.group]
            slots = self._make_slots(member.param, group, state, ranks)
            key = member.group, member.param.device, slots
            if key not in known_specs:
                known_specs[key] = self._make_spec(member.param.device, group, slots)
            specs.append(known_specs[key])
        return specs

    def _make_slots(
        self, param: Tensor, group: ParamGroup, state: Mapping[str, Tensor], ranks: Ranks
    ) -> tuple[Slot, ...]:
        method, layout, fused = self.methods[group["algorithm"]], self.resting(param, ranks), fused_of(group)
        precision = method.precision(group)
        # The update comes first; the weight goes with it, and state.
        slots = [Slot(UPDATE, layout, fused, precision.sent_dtype, precision.returned_dtype)]
        if method.weight:
            slots.append(Slot.unrounded(WEIGHT, layout, fused, param.dtype, returns=False))
        for name, (slot, reduced) in method_slots(tuple(param.shape), group, method).items():
            tensor = state[name]
            slot_layout = layout if slot.shape == "[m, n]" else layout_of(tensor, ranks)
            slots.append(Slot.unrounded(name, slot_layout, reduced.fused, tensor.dtype))
        return tuple(slots)

    def _make_spec(self, device: torch.device, group: ParamGroup, slots: tuple[Slot, ...]) -> Spec:
        method = self.methods[group["algorithm"]]
        steps, gram = (group["ns_steps"], group["gram"]) if method.orthogonalizes else (1, None)
        compute, cost_of = method.precision(group).compute, self.execution.cost or flops
        choose_form = self.execution.form or prefer_kernels

        def cost(m: int, n: int) -> int:
            iterations = cost_of(m, n, steps, gram) if method.orthogonalizes else 0
            # A measured cost is of Newton-Schulz; a method's own FLOPs take as long as those.
            method_flops = method.cost(m, n, group)
            method_cost = round(method_flops * cost_of(m, n, 1, None) / flops(m, n, 1)) if method_flops else 0
            return max(1, iterations + method_cost)

        return Spec(
            slots,
            cost,
            form=lambda m, n, copies: choose_form(device, compute, m, n, copies),
            scale=lambda m, n: self.scale(group, m, n),
        )


def elementwise(
    schedule: Schedule,
    specs: Sequence[Spec],
    weights: Sequence[Tensor],
    momenta: Sequence[Tensor],
    device: torch.device,
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
            if {tensor.dtype for tensor in (*momenta, *weights)} <= {*KERNEL_DTYPES}:
                return KernelElementwise(schedule, specs, [weight.numel() for weight in weights], device)
    return TorchElementwise(schedule, specs, [weight.shape for weight in weights], device)
