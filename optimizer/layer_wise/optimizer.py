"""Layer-wise Muon: buckets of gradients are reduced to the owners of whole matrices during the backward pass, each
owner steps its parameters with a `Muon`, and the parameters are gathered again.

A `BufferLayout` says where parameters lie and who owns them, whichever placement made it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from ...algebra.box import Box
from ...layouts.boxed_tensor import parts_of
from ...layouts.buffers.buffer_layout import BufferLayout
from ...layouts.buffers.records import to_json
from ...names.errors import ArgumentError, called_like, warn_on_rank
from ...names.resumption import Globs, LoadReport, in_globs
from ...names.vocabulary import MASTER, MUON
from ...names.wording import listed
from ..clipping import IN_BUFFERS, clip_with, refuse_other_limits, sum_of_squares
from ..collective import CollectiveOptimizer
from ..ground.tensors import exact_dtype, rounded_once
from ..methods.matrix import is_matrix_method
from ..muon import Muon
from ..options import COUNT_OR_NONE, check_rates, check_value, options_of, params_of
from ..report import warn_of_no_gradient
from ..restoration import plan_restore
from ..state import CUT_OTHERWISE, GroupSnapshot, SlotSnapshot, boxed_dtensor, find_cleared, tensor_misfit
from ..step.agreement import (
    AGREE_ON_LOAD,
    AGREE_ON_PLAN,
    AGREE_ON_STEP,
    CLEARED,
    Facts,
    Intent,
    plan_facts,
    step_intent,
)
from ..step.exchange import GroupAgreement, Notes, gather_numbers, reduce_flags
from ..step.planner import DEFAULT_EXECUTION
from ..step.rank_sets import ordinals, ranks_of_group, refuse_ended_groups, unique_groups
from .buffers import (
    Gathers,
    Gradients,
    Members,
    Part,
    SharingGroup,
    fill_buffers,
    make_layouts,
    replace_params,
    size_of,
)

BUCKET_SIZE = 40_000_000
"""Megatron's smallest bucket, in elements."""


class LayerWise(CollectiveOptimizer):
    """Muon for data parallelism with whole matrices, in flat buffers; AdamW or Lion for all others, cut anywhere.

    The model's parameters become views of flat buffers, with the values of rank 0 of their group.  Every backward pass
    reduces gradients into the buffers; run all but the last one of a step under `no_sync`.  ``param.grad`` is None
    afterwards; clip with `clip_grad_norm_`.  Only owners hold state (momentum, float32 masters of 16-bit parameters).
    State dicts have DTensors of the parameters' shapes, which runs on FSDP can load, and the other way round.  The same
    reduced gradients give the bits of `Muon` in one process, in every layout.  A parameter without a gradient on any
    rank is skipped; where only some ranks have one, the others count as zero.

    Args:
        model: its parameters are plain tensors; those that take gradients must all be in ``groups``.
        groups: parameters or parameter groups, as for `Muon`.
        layout: a placement: "padded-nscost" (equal shards with padding, as in Megatron main), "padded-numel" (as in
            core 0.18 and 0.19), "decoupled-total-order" (ping-pong owners without padding, as in Megatron dev),
            "legacy-pingpong" (ping-pong owners of everything) or "balanced" (ours); or the buffers that a checkpoint
            records (`layouts.buffers.records.run_buffers`), whose owners are kept.
        bucket_size: elements at which a bucket closes; None: one bucket for each buffer.
        group: data-parallel ranks; None: all, or this process alone if there is no process group.
        experts: parameters that only the ranks of ``expert_group`` share.
        gradient_dtype: of the gradient buffers; None: the parameters'.
        average: divide the sums of gradients by the size of ``group`` (those of experts too, as their tokens come from
            all of it).
        exact: reduce unequal shards to their owners only; False: each bucket by one all-reduce.
        overlap: `step` returns before gathers are done, and each module waits for its own parameters before its next
            forward.  Where a parameter is used elsewhere, call `wait` first.
        previous: owners by name, which "balanced" keeps where it can (`BufferLayout.owners`).
        options: of `Muon`, except ``replicas``; its ``execution`` has no ``stages`` and no ``exchange``.

    Raises:
        ArgumentError: parameters that are not the model's, left out, frozen, FP8, DTensors, or taken by another
            optimizer instance; and whatever `Muon` refuses.
        LayoutError: recorded buffers that do not fit.
    """

    @called_like("LayerWise(model, groups, lr=0.02)")
    def __init__(
        self,
        model: nn.Module,
        groups: Iterable[Any],
        lr: float | Tensor = MUON.lr,
        *,
        layout: str | Sequence[BufferLayout] = "padded-nscost",
        bucket_size: int | None = BUCKET_SIZE,
        group: SharingGroup = None,
        experts: Iterable[Tensor] = (),
        expert_group: SharingGroup = None,
        gradient_dtype: torch.dtype | None = None,
        average: bool = True,
        exact: bool = True,
        overlap: bool = False,
        previous: Mapping[str, int | None] | None = None,
        **options: Any,
    ) -> None:
        default_group = dist.group.WORLD if dist.is_initialized() else None
        group, expert_group = unique_groups(group or default_group, expert_group)
        self._group, self._overlap, self._is_built = group, overlap, False
        self._device = next((param.device for param in model.parameters()), torch.device("cpu"))
        self._agreement = GroupAgreement((group, expert_group), self._device)
        self._outside_ranks = sorted({*ranks_of_group(expert_group)} - {*ranks_of_group(group)})
        self._layout = layout if isinstance(layout, str) else "recorded"
        # Check the arguments and lay out buffers, alike on all ranks or on none.
        intent = Intent.of(AGREE_ON_PLAN, {})
        try:
            check_value("bucket_size", bucket_size, COUNT_OR_NONE)
            Optimizer.__init__(self, groups, {})
            self._members = Members.of(model, self.param_groups, group, experts, expert_group)
            self._template = self._make_template(lr, options)
            request = self._members.placement_request(self.param_groups, bucket_size, previous)
            self.buffers = make_layouts(layout, request)
            facts = {
                "average": str(average),
                "exact": str(exact),
                "overlap": str(overlap),
                "gradient_dtype": str(gradient_dtype),
                "expert_group": "reaches beyond group" if self._outside_ranks else "inside group",
            }
            intent = Intent.of(AGREE_ON_PLAN, {**facts, **self._members.facts(self.param_groups, self.buffers)})
        except Exception as error:
            intent = intent.failed(error)
        self._agree(intent)
        self._is_built = True
        # Ranks build it together, so all of them count alike.
        self._ordinal = sum(ordinals(self.param_groups, group).values())
        self._divisor = size_of(group) if average else 1
        # Move the model into the buffers, and make the state of this rank's parts.
        self._parts, buckets = fill_buffers(self.buffers, self._members, gradient_dtype, exact)
        self._inner = self._make_stepper(lr, options)
        self._share_state(self._members.name_of)
        self._snapshots = [GroupSnapshot.of(group["params"], self.state) for group in self.param_groups]
        self._slot_snapshot, self._restarted_names = SlotSnapshot.of(self.state), list[str]()
        self._addresses = {param: param.data_ptr() for param in self._members.name_of}
        self._gradients, self._gathers = Gradients(self._members.named, buckets), Gathers(buckets)
        # Parameters with a gradient on any rank; empty if there are none, None until gradients are finished.
        self._active_names: set[str] | None = None
        self._model, self._warned, self._is_closed = weakref.ref(model), set[str](), False
        IN_BUFFERS.update(dict.fromkeys(self._members.name_of, True))
        self._handles = self._gathers.hook(model, self._members.name_of) if overlap else []

    def _make_template(self, lr: float | Tensor, options: dict[str, Any]) -> Muon:
        """Return a `Muon` of whole parameters on the meta device, to refuse what any rank's would; copy its options."""
        execution = options.get("execution", DEFAULT_EXECUTION)
        if "replicas" in options or (execution.stages, execution.exchange) != (None, DEFAULT_EXECUTION.exchange):
            raise ArgumentError("replicas, stages, exchange: owners step whole matrices, so a step exchanges nothing")
        meta_params = {}
        for param in self._members.name_of:
            meta_params[param] = torch.empty_like(param, dtype=exact_dtype(param), device="meta")
        template = Muon(replace_params(self.param_groups, meta_params), lr, **options)
        self.defaults, self.code_options = dict(template.defaults), template.code_options
        for group, complete in zip(self.param_groups, template.param_groups, strict=True):
            group.update(options_of(complete))
        return template

    def _make_stepper(self, lr: float | Tensor, options: dict[str, Any]) -> Muon:
        """Return the `Muon` that steps this rank's parts."""
        # For matrices only the owned ones; for everything else this rank's part, even an empty one.
        masters = {}
        for group in self.param_groups:
            for param in group["params"]:
                part = self._parts[self._members.name_of[param]]
                if part.boxes or not is_matrix_method(group["algorithm"]):
                    masters[param] = part.master
        groups = replace_params(self.param_groups, masters)
        for group in groups:
            group |= self._template._scales.as_given(group) | self._template._methods.as_given(group)
        inner = Muon(groups, lr, **options)
        inner._warns = False  # no other rank has these tensors, and at times none has a gradient
        return inner

    def _share_state(self, params: Collection[Tensor]) -> None:
        """Give parameters the state with which this rank's parts are stepped."""
        members = self._members
        meshes: dict[dist.ProcessGroup | None, DeviceMesh | None] = {}
        for process_group in dict.fromkeys(members.group_of.values()):
            # A mesh of a group makes no process group.
            meshes[process_group] = (
                None if process_group is None else DeviceMesh.from_group(process_group, self._device.type)
            )
        for group, template_group in zip(self.param_groups, self._template.param_groups, strict=True):
            for param, meta in zip(group["params"], template_group["params"], strict=True):
                if param in params:
                    part = self._parts[members.name_of[param]]
                    mesh = meshes[members.group_of[members.name_of[param]]]
                    slots = self._inner.state.get(part.master, {})
                    shared = shared_state(meta, self._template.state[meta], part, slots, mesh)
                    self.state.setdefault(param, {}).update(shared)

    def _follow_state(self) -> None:
        """Let parameters whose state was cleared begin from zero, as `Muon` does; masters stay."""
        if self._slot_snapshot.is_current(self.state):
            return
        cleared = find_cleared(self._snapshots, self._slot_snapshot, self.param_groups, self.state)
        params = {param for param, _ in cleared}
        names = [self._members.name_of[param] for param in params]
        for name in names:
            self._inner.state.pop(self._parts[name].master, None)
        self._inner._follow_parameters()
        self._share_state(params)
        self._restarted_names = sorted({*self._restarted_names, *names})
        self._slot_snapshot = SlotSnapshot.of(self.state)

    @property
    def _cleared_fact(self) -> Facts:
        return {CLEARED: ", ".join(self._restarted_names) or "none"}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse groups once the buffers are laid out."""
        if self._is_built:
            raise ArgumentError("groups are fixed at construction: buffers cannot take more parameters")
        super().add_param_group(param_group)

    # Training.

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backward passes inside only add up gradients; the first one outside reduces the sum."""
        return self._gradients.accumulate_only()

    def finish_gradients(self) -> None:
        """Wait for the reduced gradients, as `step` does otherwise.  Collective."""
        if self._active_names is None:
            self._finish_gradients(None)

    def _agree(self, intent: Intent) -> None:
        """Compare the intents of all ranks, at once.  Collective."""
        self._agreement.agree(intent, partial(Notes.compare, at_once=True))
        if intent.error is not None:
            raise intent.error

    def _finish_gradients(self, failure: Exception | None) -> None:
        """Reduce the last gradients, agree on those that any rank has, and divide the sums.  Collective."""
        refuse_ended_groups(*self._agreement.groups)
        self._agreement.read()
        try:
            self._refuse_closed()
            self._gradients.collect_written()
            self._follow_state()
            check_rates(self.param_groups, self._inner._method_of)
        except Exception as error:
            failure = failure or error
        # A rank that fails reduces too, as the others wait for it.
        self._gradients.finish()
        self._active_names = self._agree_on_active_names(failure)
        for part in self._parts.values():
            with rounded_once([part.gradient]) as [[gradient]]:
                gradient.div_(self._divisor)

    def _agree_on_active_names(self, failure: Exception | None) -> set[str]:
        """Return the names of the parameters that have a gradient on any of the ranks that share them; raise on every
        rank, if rates differ or one rank has failed.
        """
        arrived_names, group_of = self._gradients.arrived_names, self._members.group_of
        active = {name for name, group in group_of.items() if group is None and name in arrived_names}

        def compare(notes: Notes, intent: Intent) -> None:
            names = [name for name, group in group_of.items() if group is notes.group]
            flags = torch.tensor([name in arrived_names for name in names], dtype=torch.uint8, device=notes.device)
            flags, arrived, sent = reduce_flags(flags, intent, notes.group)
            notes.check(intent, arrived, sent, at_once=True)
            active.update(name for name, flag in zip(names, flags.tolist(), strict=True) if flag)

        # Rates and options travel with the flags, as facts that must be the same.
        groups = dict(enumerate(self.param_groups))
        constants = {
            **plan_facts(groups),
            "the optimizer's number among those with equal parameters": f"{self._ordinal}",
            **self._cleared_fact,
        }
        intent = step_intent(groups, constants)
        self._agreement.agree(intent if failure is None else intent.failed(failure), compare)
        if failure is not None:
            raise failure
        return active

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, error_if_nonfinite: bool = False) -> Tensor:
        """Scale all gradients so that their norm over the whole model is at most ``max_norm``.  Collective.

        Returns and raises as `clipping.clip_grad_norm_`.

        Raises:
            ArgumentError: ranks of ``expert_group`` are not in ``group``: they would have another norm.
        """
        self.finish_gradients()
        if self._outside_ranks:
            raise ArgumentError(
                f"the ranks {listed(self._outside_ranks)} of expert_group are not in group, which has "
                f"{listed(ranks_of_group(self._group))}: they would have another norm; give a group that contains "
                "expert_group, or do not clip"
            )
        # Each rank has other parts, so their squares add up to those of the model.
        gradients = [part.gradient for part in self._parts.values()]
        squares = sum_of_squares(gradients, gradients[0].device)
        if self._group is not None:
            received = gather_numbers([squares, torch.full_like(squares, max_norm)], self._group)
            squares = received[:, 0].sum()
            refuse_other_limits(max_norm, received[:, 1])
        return clip_with(gradients, squares, max_norm, error_if_nonfinite)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step.  Collective.  Without ``overlap``, the parameters are gathered when it returns.

        Raises:
            Exception: on all ranks, if one fails; the failing rank raises its own error.
            RuntimeError: on all ranks, if their rates differ.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_parameters()
        if self._active_names is not None:
            self._gradients.collect_written()
        self._step_with_ranks(None)
        return loss

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise RuntimeError(
                "this optimizer was closed, and gets no gradients any more: step the one that was built after it, or "
                "build LayerWise(model, ...) again"
            )

    def _check_parameters(self) -> None:
        """Raise ArgumentError for a parameter that was replaced, cast or moved; warn of others with gradients."""
        params = {*params_of(self.param_groups)}
        model = self._model()
        model_params = dict(model.named_parameters()) if model is not None else {}
        for param, name in self._members.name_of.items():
            is_moved = param.data_ptr() != self._addresses[param]
            if param not in params or is_moved or model_params.get(name, param) is not param:
                raise ArgumentError(
                    f"parameter {name!r} was replaced, cast or moved after the optimizer was built, and lies "
                    "outside of its buffers. Load a model without assign=True, or close() this optimizer and build "
                    "another when the model has its final parameters"
                )
        # Others that have a gradient would train nowhere: tell it once.
        strangers = model_params.keys() - self._members.named.keys() - self._warned
        if names := [name for name in model_params if name in strangers and model_params[name].grad is not None]:
            self._warned.update(names)
            warn_on_rank(
                "parameters have gradients and are in no group, so these are not reduced and no step changes them: "
                f"{listed(in_globs(names, model_params.keys() - {*names}))}. To train them, close() this optimizer "
                "and build another with groups of all parameters",
                RuntimeWarning,
            )

    def _step_with_ranks(self, failure: Exception | None) -> None:
        """Step this rank's parts with the reduced gradients, and start to gather the parameters of all ranks.

        Args:
            failure: an error of this rank from before the ranks met, of a closure, say.  The rank takes part in
                collectives all the same, as the others wait for it there, and raises the error afterwards.
        """
        self._has_waiting_peers = False  # from here on the other ranks hear of errors in the collectives below
        # Finish the reduction of gradients, unless it is done: clipping, for one, needs them before the step.
        if self._active_names is None:
            self._finish_gradients(failure)
        if failure is None and not self._active_names:
            warn_of_no_gradient()
        # Gathers of the last step may still run, for parameters that no forward pass has used since.
        self.wait()
        # Step this rank's parts in their masters, with the options of the groups as they are now.
        intent = Intent.of(AGREE_ON_STEP, {})
        try:
            if failure is not None:
                raise failure
            assert self._active_names is not None
            self._follow_state()
            intent = Intent.of(AGREE_ON_STEP, self._cleared_fact)
            for group, inner_group in zip(self.param_groups, self._inner.param_groups, strict=True):
                inner_group.update(options_of(group))
            for name, part in self._parts.items():
                part.refresh_master()
                part.master.grad = part.gradient.to(part.master.dtype) if name in self._active_names else None
            self._inner.step()
        except Exception as error:
            intent = intent.failed(error)
        # Tell the others whether this rank has failed: it compares and gathers too then, as they wait for it.
        self._agreement.agree(intent, Notes.compare)
        self._publish()
        self.zero_grad()
        if not self._overlap:
            self.wait()
        if intent.error is not None:
            raise intent.error
        self._restarted_names = []

    def _publish(self) -> None:
        """Round masters to this rank's parts of the parameters, and start to gather those of others.  Collective."""
        for part in self._parts.values():
            part.master.grad = None
            part.publish()
        self._gathers.start()

    def wait(self) -> None:
        """Wait until all parameters are gathered."""
        self._gathers.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; no memory is written."""
        self._gradients.drop()
        self._active_names = None

    def close(self) -> None:
        """Remove the hooks from the model, for another optimizer to take over.  Steps are refused from then on."""
        self.wait()
        self._gradients.close()
        self._is_closed = True
        for param in self._members.name_of:
            if param in IN_BUFFERS:
                del IN_BUFFERS[param]
        for handle in self._handles:
            handle.remove()

    # Checkpoints.

    def provenance(self) -> dict[str, Any]:
        """Return the layout and its owners, for ``muonckpt.save(..., provenance=...)``."""
        ranks = []
        for group in map(self._members.group_of_buffer, self.buffers):
            ranks.append([0] if group is None else dist.get_process_group_ranks(group))
        return {"layer_wise": {"layout": self._layout, "buffers": [*map(to_json, self.buffers)], "ranks": ranks}}

    def state_dict(self) -> dict[str, Any]:
        """Return the state as any torch optimizer does, with rates that are tensors written as numbers."""
        self.wait()
        self._follow_state()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any], fresh: Iterable[str] = ()) -> LoadReport:  # type: ignore[override]
        """Copy state into this optimizer's, and hyper-parameters as `Muon.load_state_dict` does.  Collective.

        Parameters with masters become the loaded masters, rounded.  The masters of parameters that start ``fresh``
        become their weights.

        Raises:
            Exception: on all ranks, if one of them refuses the state (`plan_restore`); nothing is changed then.
        """
        intent = Intent.of(AGREE_ON_LOAD, {})
        try:
            self._refuse_closed()
            self._follow_state()
            restore, report = plan_restore(self, state_dict, _local_misfit, Globs.of(fresh), {MASTER})
        except Exception as error:
            intent = intent.failed(error)
        self._agree(intent)
        restore()
        self._restarted_names = []
        for name in report.fresh:
            self._parts[name].refresh_master()
        self._publish()
        self.wait()
        return report

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a LayerWise optimizer is bound to its model and process groups; save its state_dict()")


def shared_state(
    meta: Tensor, template: Mapping[str, Tensor], part: Part, inner: Mapping[str, Tensor], mesh: DeviceMesh | None
) -> dict[str, Tensor]:
    """Return the state of one parameter, with the same slots on every rank; it shares memory with the stepped state.

    Args:
        meta, template: the whole parameter on the meta device, and its state.
        part, inner: this rank's part of it, and its state; empty for a matrix that this rank does not own.
        mesh: the ranks that share the parameter; None: this process alone.
    """
    template, local = dict(template), dict(inner)
    if part.has_master:
        template[MASTER], local[MASTER] = meta, part.master
    state = {}
    for slot, whole in template.items():
        if whole.ndim == 0 or mesh is None:
            state[slot] = local[slot]
            continue
        shape, tensor = tuple(whole.shape), local.get(slot)
        if tensor is None or not part.boxes:
            tensor = torch.empty((0, *shape[1:]), dtype=whole.dtype, device=part.weight.device)
        # Whole state of an owner may have another shape than the parameter; state that is cut has not.
        boxes = (Box.of(shape),) if tensor.numel() == whole.numel() else part.boxes
        state[slot] = boxed_dtensor(tensor, mesh, shape, boxes)
    return state


def _local_misfit(tensor: Tensor, loaded: Any) -> str | None:
    """Return why a loaded tensor does not lie element for element where this one does, or None."""
    if reason := tensor_misfit(tensor, loaded):
        return reason
    if loaded.dtype != tensor.dtype:
        return f"is {loaded.dtype}, expected {tensor.dtype}"
    parts, loaded_parts = parts_of(tensor), parts_of(loaded)
    same_boxes = [*parts] == [*loaded_parts] and all(parts[lo].shape == loaded_parts[lo].shape for lo in parts)
    return None if same_boxes else CUT_OTHERWISE
