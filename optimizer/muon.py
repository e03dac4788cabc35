"""Muon: momentum orthogonalised by Newton-Schulz, for matrices that are sharded in any supported way.

A step updates momentum where it lies, sends it (16 bits an element) to each matrix's owner, which orthogonalises it and
sends the result back along the same boxes, to be applied in full precision.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..algebra.layout import TensorLayout
from ..layouts.tensors import layout_of, local_of
from ..names.coefficients import Coefficients
from ..names.errors import ArgumentError, LayoutError, called_like, value_in_short
from ..names.resumption import LOAD_LINES, Globs, LoadReport
from ..names.vocabulary import FLATTEN, FUSION, MUON, MUON_CONVENTION, PLAIN
from .collective import CollectiveOptimizer
from .for_model import EXAMPLE_LINE, WITH_ALGORITHM, ForModel, refuse_no_parameters
from .methods.form import MatrixMethod
from .methods.matrix import Methods, Scale, Scales, is_matrix_method
from .methods.scalar import SCALARS
from .options import (
    CYCLED_OPTIONS,
    check_group,
    check_rates,
    cycled_defaults,
    options_in_code,
    parse_coefficients,
    refuse_repeated,
    refuse_shared_rate,
    refuse_unknown,
    state_options,
)
from .planning.schedule import Ranks, Schedule
from .report import (
    MuonReport,
    count_matrices,
    count_sent_bytes,
    find_doubts,
    report_group,
    warn_if_unshared,
    warn_of_no_gradient,
)
from .restoration import plan_restore
from .state import (
    GroupSnapshot,
    SlotSnapshot,
    carry_over,
    check_gradients,
    check_state,
    find_changes,
    find_cleared,
    fresh_state,
    refuse_meta,
    tensor_misfit,
)
from .step.agreement import Facts, plan_options
from .step.planner import DEFAULT_EXECUTION, Planner, StepExecution as StepExecution
from .step.rank_sets import RankSet, ordinals
from .step.step import Step, Steps

_IN_EXECUTION = "Muon(params, execution=StepExecution({}=...)), from muonckpt.optimizer"
ELSEWHERE = {
    **{option: f"[{{'params': ..., '{option}': ...}}], which is an option of groups" for option in ("gram", *FUSION)},
    **{field.name: _IN_EXECUTION.format(field.name) for field in fields(StepExecution)},
    "algorithm": WITH_ALGORITHM,
}
"""The line to write for an option that is no argument of `Muon`."""


class Muon(ForModel, CollectiveOptimizer):
    """Muon for matrices and AdamW or Lion for all other parameters, in one optimizer.

    Each group chooses ``algorithm="muon"`` (the default), another of `methods.matrix.MATRICES` ("normuon", "adamuon",
    "hyperball"), a `MatrixMethod`, "adamw" or "lion".  Parameters are plain tensors or DTensors on any mesh
    (``Shard`` of any dim, even, uneven or empty; ``_StridedShard``; ``Replicate``), and the same global gradients give
    the same bits on all of them.

    A group of matrices may also say ``gram``, the restarts of the Gram form, and which matrices are in each parameter:
    ``pieces=(q, k, v)``, ``columns`` and ``interleaved`` (`matrices.Fused`).  A parameter of three dims is a stack of
    matrices (experts); with ``flatten=True`` it, or one of more dims, is a convolution: the matrix of its first dim and
    all others, and those in ``pieces`` equal groups.

    Every parameter has state from construction on, so stock ``get_optimizer_state_dict`` and DCP save and load all of
    it: in its own layout ``momentum_buffer`` (``m = momentum * m + (1 - momentum) * g``), NorMuon's ``second_moment``
    (one float32 number a row), or ``exp_avg``, ``exp_avg_sq`` and ``step``.  A parameter without a gradient is skipped,
    as in torch; it must then have none on any rank that holds it.

    Args:
        params: parameters or groups, as for any torch optimizer.
        lr: default of all groups.  Groups of AdamW and Lion need their own, unless every group of matrices has
            ``adjust_lr_fn="match_rms_adamw"``.
        weight_decay: default of all groups.  Decay is decoupled: ``p *= 1 - lr * weight_decay``.
        cautious: default of all groups: decay only elements that the update does not move away from zero.
        momentum, nesterov: of groups of matrices.
        adjust_lr_fn: scales the rate by a matrix's shape: a key of ``ADJUST_LR``, or a function of rows and columns,
            which state dicts only name.  None: "original".
        ns_coefficients: the name of a set of Newton-Schulz coefficients, a `CoefficientSet`, or one or more triples.
        ns_steps: Newton-Schulz iterations.
        ns_dtype: their dtype: "bfloat16", "float16" or "float32".
        eps: the smallest norm that a matrix is divided by.
        replicas: process group over which *plain* tensors are replicated (DDP); it shares out their matrices.  None:
            this process orthogonalises its plain tensors itself.
        layout: returns the layout of a parameter, its state and gradients; None if mesh and placements say it.
        execution: how the work of a step is shared out, computed and sent.

    Raises:
        ArgumentError: an unknown algorithm, scale, coefficient set or dtype, or a hyper-parameter out of range.
        LayoutError: a parameter is not a matrix, or its pieces do not add up to its rows.
    """

    _warns = True
    """Warn of plain tensors on several ranks, and of steps without a gradient."""

    @called_like(EXAMPLE_LINE, **ELSEWHERE)
    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]],
        lr: float | Tensor = MUON.lr,
        *,
        momentum: float = MUON.momentum,
        nesterov: bool = MUON.nesterov,
        weight_decay: float = MUON.weight_decay,
        cautious: bool = MUON.cautious,
        adjust_lr_fn: str | Scale | None = MUON.adjust_lr_fn,
        ns_coefficients: Coefficients = MUON.ns_coefficients,
        ns_steps: int = MUON.ns_steps,
        ns_dtype: str = MUON.ns_dtype,
        eps: float = MUON.eps,
        replicas: dist.ProcessGroup | None = None,
        layout: Callable[[Tensor], TensorLayout | None] | None = None,
        execution: StepExecution = DEFAULT_EXECUTION,
    ) -> None:
        refuse_no_parameters(params)
        if replicas is not None and not isinstance(replicas, dist.ProcessGroup):
            raise ArgumentError(
                f"replicas: expected the process group over which parameters are replicated, found {replicas!r}. Write "
                "replicas=torch.distributed.group.WORLD, or the process_group of DDP"
            )
        if not isinstance(execution, StepExecution):
            raise ArgumentError(
                f"execution={value_in_short(execution)}: expected a StepExecution, from muonckpt.optimizer"
            )
        self._replicas, self._layout, self._execution = replicas, layout, execution
        self._scales, self._methods, self._steps = Scales(), Methods(), Steps()
        self._planned_options: list[dict[str, Any]] = []
        self.code_options = []
        self._group_snapshots: list[GroupSnapshot] = []
        self._slot_snapshot = SlotSnapshot()
        self._restarted: dict[Tensor, Mapping[str, Tensor]] = {}  # state that took the place of cleared state
        self._has_history = False  # true once state may differ from fresh state
        self._rateless_algorithm: str | None = None  # of a group that does not say its rate
        self._matrix_defaults = {
            **asdict(MUON),
            "momentum": momentum,
            "nesterov": nesterov,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_coefficients": ns_coefficients,
            "ns_steps": ns_steps,
            "ns_dtype": ns_dtype,
            "eps": eps,
            FLATTEN: False,
            "convention": MUON_CONVENTION.value,
        }
        super().__init__(params, {"algorithm": "muon", "lr": lr, "weight_decay": weight_decay, "cautious": cautious})
        self._ordinals = ordinals(self.param_groups, replicas)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and create the state of its parameters.  If it is refused, nothing is changed."""
        number = len(self.param_groups)
        for option in CYCLED_OPTIONS:  # torch would give it to a group that has none
            self.defaults.pop(option, None)
        try:
            # The options of its algorithm, and defaults for those that it lacks.
            algorithm = self._methods.name_of(param_group.get("algorithm", "muon"))
            method = self._methods[algorithm] if is_matrix_method(algorithm) else None
            if method is not None:
                defaults = method.defaults(self._matrix_defaults)
            else:
                defaults = {**SCALARS[algorithm].defaults, **{name: self.defaults[name] for name in PLAIN}}
            refuse_unknown(param_group, algorithm, {*defaults, *self.defaults, *state_options(method)})
            if isinstance(params := param_group.get("params", ()), Iterator):
                param_group = {**param_group, "params": list(params)}
            refuse_repeated([*self.param_groups, {"params": (), **param_group}])
            super().add_param_group({**defaults, **param_group, "algorithm": algorithm})
            group = self.param_groups[-1]
            self._complete_options(group)
            has_no_rate = algorithm in SCALARS and "lr" not in param_group and group["params"]
            rateless_algorithm = algorithm if has_no_rate else self._rateless_algorithm
            if rateless_algorithm is not None:
                refuse_shared_rate(self.param_groups, rateless_algorithm, self.defaults["lr"])
            fresh = {}
            for index, param in enumerate(group["params"]):
                name = group.get("param_names", {index: f"parameter {index} of group {number}"})[index]
                try:
                    fresh[param] = self._fresh_state(param, group)
                except ArgumentError as error:
                    raise error.with_text(f"{name}: {error.fault}", error.advice) from None
                except LayoutError as error:
                    raise LayoutError(f"{name}: {error}. To have a model's parameters sorted: {EXAMPLE_LINE}") from None
        except Exception:
            del self.param_groups[number:]
            raise
        finally:
            self.defaults.update(cycled_defaults(self.param_groups))
        for param, slots in fresh.items():
            self.state.setdefault(param, {}).update(slots)
        self._steps.plan_again()
        self._planned_options.append(plan_options(group))
        self.code_options.append(options_in_code(group))
        self._group_snapshots.append(GroupSnapshot.of(group["params"], self.state))
        self._rateless_algorithm = rateless_algorithm

    def _complete_options(self, group: dict[str, Any]) -> None:
        """Write a group's options as state dicts have them, and check them."""
        method = self._method_of(group)
        if method is not None:
            group["adjust_lr_fn"] = self._scales.name_of(group["adjust_lr_fn"])
            if group.get(FLATTEN) is False:  # as in the checkpoints of groups that are not flattened
                del group[FLATTEN]
            if method.orthogonalizes:
                group["ns_coefficients"] = parse_coefficients(group["ns_coefficients"])
        check_group(group, self._scales.names, method)

    def _method_of(self, group: Mapping[str, Any]) -> MatrixMethod | None:
        """Return the method of a group of matrices, None for one of element-wise algorithms."""
        return self._methods[group["algorithm"]] if is_matrix_method(group["algorithm"]) else None

    def _fresh_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return fresh_state(param, self._layout_of(param, (0,)), group, self._method_of(group))

    @property
    def schedules(self) -> Mapping[Ranks, Schedule]:
        """The owners and stages of matrices, by the ranks that share them; planned by the first step."""
        return {ranks: step.schedule for ranks, step in self._steps.planned.items()}

    def report(self, most_elementwise: float = 0.5) -> MuonReport:
        """Report which parameters are stepped how, as data that print as a table.

        Args:
            most_elementwise: warn if AdamW and Lion step a larger share of the elements in parameters of two dims or
                more.

        Warns:
            RuntimeWarning: for each of `MuonReport.doubts`.
        """
        schedules = list(self.schedules.values())
        names = {decision.parameter: decision.names[0] for decision in self.decisions() or ()}
        groups = []
        for number, group in enumerate(self.param_groups):
            groups.append(report_group(number, group, self._scales, self._methods, names))
        state_bytes = 0
        for slots in self.state.values():
            state_bytes += sum(local_of(tensor).nbytes for tensor in slots.values())
        report = MuonReport(
            groups=tuple(groups),
            matrices_by_rank=count_matrices(schedules),
            sent_bytes=count_sent_bytes(schedules),
            state_bytes=state_bytes,
            doubts=tuple(find_doubts(self.param_groups, most_elementwise)),
        )
        for doubt in report.doubts:
            warnings.warn(doubt, RuntimeWarning, stacklevel=2)
        return report

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies, without plans, which refer to this optimizer's parameters."""
        copied = (
            "_ordinals _matrix_defaults _replicas _layout _execution _scales _methods "
            "_planned_options _group_snapshots _has_history _rateless_algorithm code_options"
        )
        attributes = {name: getattr(self, name) for name in copied.split()}
        cleared = {"_steps": Steps(), "_slot_snapshot": SlotSnapshot(), "_restarted": {}}
        return {**super().__getstate__(), **attributes, **cleared}

    def __deepcopy__(self, memo: dict[int, Any]) -> Muon:
        """Copy the optimizer, but not its process group."""
        memo[id(self._replicas)] = self._replicas
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin

    def state_dict(self) -> dict[str, Any]:
        """Return the state as any torch optimizer does, with rates that are tensors written as numbers."""
        self._follow_parameters()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], fresh: Iterable[str] = ()) -> LoadReport:  # type: ignore[override]
        """Load state, and the hyper-parameters that schedules change (`RESTORED`).  If refused, nothing is changed.

        Options of the arithmetic (``ns_coefficients``, ``adjust_lr_fn``, …) stay as the code has them.  Warnings tell
        where they differ, and which hyper-parameters of the code the saved run overrides.

        Args:
            state_dict: its parameters are matched by name if both optimizers have names, else by number.  Frozen ones
                may be missing, as stock DCP leaves them out; they keep their state.
            fresh: globs of names of parameters whose state becomes zeros, or is dropped if only ``state_dict`` has it.

        Raises:
            ValueError: lists every parameter that is new, gone, of another algorithm or other pieces, or whose state is
                incomplete or laid out otherwise; or a glob matches nothing, or the momentum convention is not "ema".
        """
        if not isinstance(state_dict, Mapping):
            raise ArgumentError(
                f"state_dict: expected a state dict, found {type(state_dict).__name__}. Write {LOAD_LINES}"
            )
        self._follow_parameters()
        restore, report = plan_restore(self, state_dict, tensor_misfit, Globs.of(fresh))
        restore()
        self._has_history, self._slot_snapshot, self._restarted = True, SlotSnapshot.of(self.state), {}
        self._steps.plan_again()
        return report

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step.  Collective: every rank that holds a parameter must call it.

        Raises:
            Exception: on all ranks that share parameters, if one fails; the failing rank raises its own error.
            RuntimeError: on all of them, if rates differ or a gradient is missing on some.
            LostRankError: a rank was lost, or did not answer within the process group's time-out.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_step()
        return loss

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _take_step(self) -> None:
        """Follow what code has changed, check gradients, and step matrices with other ranks, then elements."""
        self._follow_parameters()
        self._follow_options()
        has_gradients = False
        # Refuse what no step can do before ranks meet.
        for group in self.param_groups:
            gradients = [param.grad for param in group["params"]]
            refuse_meta(group["params"])
            check_gradients(group["params"], gradients)
            has_gradients = has_gradients or any(gradient is not None for gradient in gradients)
        if self._warns:
            if not has_gradients and any(group["params"] for group in self.param_groups):
                warn_of_no_gradient()
            if self._model_groups is not None:
                self._warn_of_left_out()
        self._has_history = True
        self._step_with_ranks(None)
        for group in self.param_groups:
            if group["algorithm"] in SCALARS:
                SCALARS[group["algorithm"]].step(group, self.state)

    @torch.no_grad()
    def _follow_parameters(self) -> None:
        """Move state to parameters that have been replaced, cast or moved, and let those without begin from zero."""
        changes = list(find_changes(self._group_snapshots, self.param_groups))
        self._follow_state()
        if not changes:
            return
        # Fresh state for the new parameters.
        fresh = {}
        for change in changes:
            group = self.param_groups[change.group]
            fresh[change.current] = self._fresh_state(change.current, group)
        # The former state, unless nothing has happened to it yet.
        for change in changes if self._has_history else ():
            if change.former not in self._restarted:
                carry_over(change, self.state[change.former], fresh[change.current])
        for change in changes:
            del self.state[change.former]
            if self._restarted.pop(change.former, None) is not None:
                self._restarted[change.current] = fresh[change.current]
        self.state.update(fresh)
        self._take_snapshots()
        self._steps.plan_again()

    def _follow_state(self) -> None:
        """Let parameters whose state was cleared begin from zero, as a step of torch's optimizers does."""
        if self._slot_snapshot.is_current(self.state):
            return
        cleared = list(find_cleared(self._group_snapshots, self._slot_snapshot, self.param_groups, self.state))
        fresh = {param: self._fresh_state(param, self.param_groups[number]) for param, number in cleared}
        for param, slots in fresh.items():
            self.state.setdefault(param, {}).update(slots)
        # These restart, and earlier ones whose state has not been replaced.
        unreplaced = {p: slots for p, slots in self._restarted.items() if self.state.get(p) is slots}
        self._restarted = {**unreplaced, **{param: self.state[param] for param in fresh}}
        self._slot_snapshot = SlotSnapshot.of(self.state)
        if fresh:
            self._steps.plan_again()
        else:
            self._steps.refresh_state()

    def _reset_state(self) -> None:
        """Replace all state by new state for the groups' present parameters."""
        self.state.clear()
        for group in self.param_groups:
            self.state.update({param: self._fresh_state(param, group) for param in group["params"]})
        self._take_snapshots()
        self._steps.plan_again()

    def _take_snapshots(self) -> None:
        self._group_snapshots = [GroupSnapshot.of(group["params"], self.state) for group in self.param_groups]
        self._slot_snapshot = SlotSnapshot.of(self.state)

    def _follow_options(self) -> None:
        """Check groups and plan again if options other than rates have changed."""
        if self._planned_options == [*map(plan_options, self.param_groups)]:
            check_rates(self.param_groups, self._method_of)
            return
        # Options may change between steps, but state cannot follow all of them.
        for planned, group in zip(self._planned_options, self.param_groups, strict=True):
            if group["algorithm"] != planned["algorithm"]:
                raise ArgumentError(
                    f"algorithm={group['algorithm']!r}: the group has state of {planned['algorithm']!r}, so it cannot "
                    "change; build a new optimizer"
                )
            self._complete_options(group)
            method = self._method_of(group)
            for param in group["params"]:
                check_state(param, self._layout_of(param, (0,)), group, self.state[param], method)
        self._steps.plan_again()
        self._planned_options = [*map(plan_options, self.param_groups)]

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # also called by a step that has failed
    def _step_with_ranks(self, failure: Exception | None) -> None:
        """Step matrices, or tell the other ranks of a failure of this one.  Collective."""
        self._has_waiting_peers = False
        history = self._consume_gradients()

        def constants(ranks: Ranks) -> Facts:
            ordinal = f"{self._ordinals.get(ranks)}"
            return {"the optimizer's number among those with equal parameters": ordinal, **history}

        self._steps.update(self.param_groups, self.state, self._replicas, self._plan, failure, constants)
        self._restarted = {}  # all ranks have planned with it

    def _plan(self, rank_set: RankSet, failure: Exception | None) -> Step:
        """Plan the steps of a set of ranks, as `Planner.plan` does.  Collective over them."""
        if self._warns and self._replicas is None:
            warn_if_unshared(rank_set)
        planner = Planner(
            self._replicas,
            self._execution,
            resting=self._layout_of,
            scale=self._scales.factor,
            methods=self._methods,
            cleared=self._restarted.keys(),
        )
        return planner.plan(rank_set, self.param_groups, failure)

    def _layout_of(self, param: Tensor, ranks: Ranks) -> TensorLayout:
        """Return the layout of a parameter, if a plain one is replicated over these ranks."""
        layout = self._layout(param) if self._layout is not None else None
        return layout if layout is not None else layout_of(param, replicas=ranks)
