"""Layer-wise Muon: buckets of gradients are reduced to the owners of whole matrices during the backward pass, each
owner steps its parameters with a `Muon`, and the parameters are gathered again.

A `BufferLayout` says where parameters lie and who owns them, whichever placement made it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from ...algebra.box import Box, row_major
from ...layouts.boxed_tensor import BoxedTensor
from ...layouts.buffers.buffer_layout import BufferLayout
from ...layouts.buffers.records import to_json
from ...layouts.tensors import local_of
from ...names.errors import warn_on_rank
from ...names.resumption import Globs, LoadReport, in_globs
from ...names.state_forms import MOMENTUM_DTYPE, STATE_DTYPE
from ...names.vocabulary import MASTER, MUON, STEPS_TAKEN
from ...ranks import requests
from ..clipping import IN_BUFFERS, clip_with, refuse_other_limits, sum_of_squares
from ..collective import MAX_SKIPPED_STEPS, CollectiveOptimizer, GuardedGradient, NonFinite, max_gradient
from ..ground.codecs import codec_of
from ..ground.dcp_hooks import declare_boxes, declared_boxes
from ..ground.tensors import exact_dtype, rounded_once
from ..methods.matrix import is_matrix_method
from ..muon import Muon
from ..options import COUNT_OR_NONE, FLAG, adopt_saved_options, check_rates, check_value
from ..report import warn_of_no_gradient
from ..restoration import fit_state_dict
from ..state import CUT_OTHERWISE, GroupSnapshot, SlotSnapshot, find_cleared, tensor_misfit
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
from ..step.rank_sets import crossing_error, ordinals, ranks_of_group, refuse_ended_groups, unique_groups
from .buffers import (
    Gathers,
    Gradients,
    Members,
    Part,
    SharingGroup,
    filled,
    groups_with,
    laid_out,
    options_of,
    size_of,
    this_rank,
)

BUCKET = 40_000_000
"""Megatron's smallest bucket, in elements."""


class LayerWise(CollectiveOptimizer):
    """Muon for data parallelism with whole matrices, in flat buffers; AdamW or Lion for the rest, cut anywhere.

    The model's parameters become views of flat buffers, with the values of rank 0 of their group.  Every backward pass
    reduces gradients into the buffers; run all but the last one of a step under `no_sync`.  ``param.grad`` is None
    afterwards; clip with `clip_grad_norm_`.  Only owners hold state (momentum, float32 masters of 16-bit parameters).
    State dicts have DTensors of the parameters' shapes, which runs on FSDP can load, and the other way round.  The same
    reduced gradients give the bits of `Muon` in one process, in every layout.

    A parameter without a gradient on any rank is skipped; where only some ranks have one, the others count as zero.

    Args:
        model: its parameters are plain tensors; those that take gradients must all be in ``groups``.
        groups: parameters or parameter groups, as for `Muon`.
        layout: a placement: "padded-nscost" (equal shards with padding, as in Megatron main), "padded-numel" (as in
            core 0.18 and 0.19), "decoupled-total-order" (ping-pong owners without padding, as in Megatron dev),
            "legacy-pingpong" (ping-pong owners of everything) or "balanced" (ours); or the buffers that a checkpoint
            records (`run_buffers` in `muonckpt.layouts.buffers.records`), whose owners are kept.
        bucket_size: elements at which a bucket closes; None: one bucket for each buffer.
        group: data-parallel ranks; None: all, or this process alone if there is no process group.
        experts: parameters that only the ranks of ``expert_group`` share.
        gradient_dtype: of the gradient buffers; None: the parameters'.
        average: divide the sums of gradients by the size of ``group`` (those of experts too, as their tokens come from
            all of it).
        exact: reduce unequal shards to their owners only; False: each bucket by one all-reduce.
        overlap: `step` leaves gathers under way, and each module waits for its own parameters before its next forward.
            Where a parameter is used elsewhere, call `wait` first.
        previous: owners by name, which "balanced" keeps where it can (`BufferLayout.owners`).
        nonfinite, most_skipped: as for `Muon`, but of reduced gradients.
        options: of `Muon`, except those of exchange.

    Raises:
        ValueError: parameters that are not the model's, left out, frozen, FP8, DTensors, or taken by another optimizer
            instance; and whatever `Muon` refuses.
        LayoutError: recorded buffers that do not fit.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Iterable[Any],
        lr: float | Tensor = MUON.lr,
        *,
        layout: str | Sequence[BufferLayout] = "padded-nscost",
        bucket_size: int | None = BUCKET,
        group: SharingGroup = None,
        experts: Iterable[Tensor] = (),
        expert_group: SharingGroup = None,
        gradient_dtype: torch.dtype | None = None,
        average: bool = True,
        exact: bool = True,
        overlap: bool = False,
        previous: Mapping[str, int | None] | None = None,
        nonfinite: str | None = None,
        most_skipped: int = MAX_SKIPPED_STEPS,
        **options: Any,
    ) -> None:
        group, expert_group = unique_groups(
            group or (dist.group.WORLD if dist.is_initialized() else None), expert_group
        )
        self._group, self._overlap, self._fixed = group, overlap, False
        self._device = next((param.device for param in model.parameters()), torch.device("cpu"))
        self._agreement = GroupAgreement((group, expert_group), self._device)
        self._outside = sorted({*ranks_of_group(expert_group)} - {*ranks_of_group(group)})
        self._nonfinite: NonFinite | None = None
        self._layout = layout if isinstance(layout, str) else "recorded"
        intent = Intent.of(AGREE_ON_PLAN, {})
        try:
            for name, value in {"average": average, "exact": exact, "overlap": overlap}.items():
                check_value(name, value, FLAG)
            check_value("bucket_size", bucket_size, COUNT_OR_NONE)
            if nonfinite is not None:
                self._nonfinite = NonFinite(nonfinite, most_skipped)
                if refusal := crossing_error([ranks_of_group(shared) for shared in self._agreement.groups]):
                    raise refusal
            Optimizer.__init__(self, groups, {})
            self._members = Members.of(model, self.param_groups, group, experts, expert_group)
            example = self._example(lr, options)
            self.buffers = laid_out(layout, self._members.to_place(self.param_groups, bucket_size, previous))
            policy = self._nonfinite.policy if self._nonfinite is not None else None
            transport = {"average": average, "exact": exact, "overlap": overlap, "gradient_dtype": gradient_dtype}
            facts = {name: str(value) for name, value in {**transport, "nonfinite": policy}.items()}
            facts["expert_group"] = "reaches beyond group" if self._outside else "lies in group"
            intent = Intent.of(AGREE_ON_PLAN, {**facts, **self._members.facts(self.param_groups, self.buffers)})
        except Exception as error:
            intent = intent.failed(error, this_rank())
        self._agree(intent)
        self._fixed = True
        # Ranks build it together, so all of them count alike.
        self._ordinal = sum(ordinals(self.param_groups, group).values())
        self._divisor = size_of(group) if average else 1
        self._parts, buckets = filled(self.buffers, self._members, gradient_dtype, exact)
        self._template, self._inner = example, self._stepper(example, lr, options)
        self._share_state(self._members.name_of)
        self._seen = [GroupSnapshot.of(group["params"], self.state) for group in self.param_groups]
        self._slots, self._begun_anew = SlotSnapshot.of(self.state), list[str]()
        self._addresses = {param: param.data_ptr() for param in self._members.name_of}
        self._gradients, self._gathers = Gradients(self._members.named, buckets), Gathers(buckets)
        self._active: set[str] | None = None
        self._skipped, self._closed = False, False
        self._model, self._warned = weakref.ref(model), set[str]()
        IN_BUFFERS.update(dict.fromkeys(self._members.name_of, True))
        self._handles = self._gathers.hook(model, self._members.name_of) if overlap else []

    def _example(self, lr: float | Tensor, options: dict[str, Any]) -> Muon:
        """Return a `Muon` of whole parameters on the meta device, to refuse what any rank's would; copy its options."""
        if refused := sorted({"replicas", "exchange", "stages"} & options.keys()):
            raise ValueError(f"{refused}: owners step whole matrices, nothing is exchanged during a step")
        wholes = {
            param: torch.empty_like(param, dtype=exact_dtype(param), device="meta") for param in self._members.name_of
        }
        example = Muon(groups_with(wholes, self.param_groups), lr, **options)
        for group in example.param_groups:
            if STATE_DTYPE in group and not codec_of(group).any_cut:
                dtype = group[STATE_DTYPE]
                raise ValueError(
                    f"{STATE_DTYPE}={dtype!r}: buffers cut parameters of AdamW and Lion anywhere, and blocks with "
                    f"them: keep their state in bfloat16. Matrices have whole owners; {MOMENTUM_DTYPE}={dtype!r} fits"
                )
        self.defaults, self.code_options = dict(example.defaults), example.code_options
        for mine, complete in zip(self.param_groups, example.param_groups, strict=True):
            mine.update(options_of(complete))
        return example

    def _stepper(self, example: Muon, lr: float | Tensor, options: dict[str, Any]) -> Muon:
        """Return the `Muon` that steps this rank's parts."""
        members, held = self._members, {}
        for group in self.param_groups:
            for param in group["params"]:
                # Of matrices only those that this rank owns; of everything else its part, even an empty one.
                part = self._parts[members.name_of[param]]
                if part.boxes or not is_matrix_method(group["algorithm"]):
                    held[param] = part.stepped
        own = groups_with(held, self.param_groups)
        given = [{**group, **example._scales.as_given(group), **example._methods.as_given(group)} for group in own]
        inner = Muon(given, lr, **options)
        inner._param_fragments = {
            part.stepped: (tuple(members.named[name].shape), part.fragments) for name, part in self._parts.items()
        }
        inner._warns = False  # no other rank has these tensors, and at times none has a gradient
        return inner

    def _share_state(self, params: Collection[Tensor]) -> None:
        """Give parameters the state with which this rank's parts are stepped."""
        members = self._members
        meshes = {  # which makes no process group
            group: DeviceMesh.from_group(group, self._device.type) if group is not None else None
            for group in dict.fromkeys(members.group_of.values())
        }
        for mine, whole_group in zip(self.param_groups, self._template.param_groups, strict=True):
            for param, whole in zip(mine["params"], whole_group["params"], strict=True):
                if param in params:
                    name = members.name_of[param]
                    part, mesh = self._parts[name], meshes[members.group_of[name]]
                    slots = self._inner.state.get(part.stepped, {})
                    shared = state_of(whole, self._template.state[whole], part, slots, mesh)
                    self.state.setdefault(param, {}).update(shared)

    def _follow_state(self) -> None:
        """Let parameters begin anew whose state was cleared, as `Muon` does; masters stay."""
        if self._slots.is_current(self.state):
            return
        params = {param for param, _ in find_cleared(self._seen, self._slots, self.param_groups, self.state)}
        names = [self._members.name_of[param] for param in params]
        for name in names:
            self._inner.state.pop(self._parts[name].stepped, None)
        self._inner._follow_parameters()
        self._share_state(params)
        self._begun_anew = sorted({*self._begun_anew, *names})
        self._slots = SlotSnapshot.of(self.state)

    @property
    def _cleared(self) -> Facts:
        return {CLEARED: ", ".join(self._begun_anew) or "none"}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse groups once the buffers are laid out."""
        if self._fixed:
            raise ValueError("groups are fixed at construction: buffers cannot take more parameters")
        super().add_param_group(param_group)

    # Training.

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backward passes inside only add up gradients; the first one outside reduces the sum."""
        return self._gradients.accumulating()

    def finish_gradients(self) -> None:
        """Wait for the reduced gradients, as `step` does otherwise.  Collective."""
        if self._active is None:
            self._finish(None)

    def _agree(self, intent: Intent) -> None:
        """Compare what all ranks intend, at once.  Collective."""
        self._agreement.agree(intent, partial(Notes.compare, at_once=True))
        if intent.error is not None:
            raise intent.error

    def _finish(self, failure: Exception | None) -> None:
        refuse_ended_groups(*self._agreement.groups)
        self._agreement.read()
        try:
            self._refuse_closed()
            self._gradients.take_written()
            self._follow_state()
            check_rates(self.param_groups, self._inner._method_of)
        except Exception as error:
            failure = failure or error
        self._gradients.finish()
        self._active = self._agreed(failure)
        for part in self._parts.values():
            with rounded_once([part.gradient]) as [[gradient]]:
                gradient.div_(self._divisor)

    def _agreed(self, failure: Exception | None) -> set[str]:
        """Return the names of the parameters that have a gradient on any of the ranks that share them.

        Raises:
            Exception: on every rank, if rates differ or one rank has failed.
        """
        seen, named = self._gradients.seen, self._members.group_of
        agreed = {name for name, group in named.items() if group is None and name in seen}
        skip = torch.zeros((), dtype=torch.bool)
        if self._nonfinite is not None:
            skip, failure = self._nonfinite.check(self._guarded(), failure)

        def compare(notes: Notes, intent: Intent) -> None:
            nonlocal skip
            names = [name for name, group in named.items() if group is notes.group]
            flags = torch.tensor([name in seen for name in names], dtype=torch.uint8, device=notes.device)
            asked = torch.tensor([requests.made() & bit > 0 for bit in requests.BITS]).to(flags)
            flags, differing = reduce_flags(torch.cat([flags, asked, skip.view(1).to(flags)]), intent, notes.group)
            notes.check(intent, differing, at_once=True)
            *told, skip = torch.split(flags, [len(names), len(asked), 1])
            agreed.update(name for name, flag in zip(names, told[0].tolist(), strict=True) if flag)
            notes.report(told[1].tolist())

        groups = dict(enumerate(self.param_groups))
        constants = {
            **plan_facts(groups),
            "the optimizer, of those built of equal parameters": f"number {self._ordinal}",
            **self._cleared,
        }
        intent = step_intent(groups, self._device, constants)
        self._agreement.agree(intent if failure is None else intent.failed(failure, this_rank()), compare)
        if failure is not None:
            raise failure
        self._skipped = bool(skip)
        return agreed

    def _guarded(self) -> Iterator[GuardedGradient]:
        for name, part in self._parts.items():
            if part.gradient.numel():
                yield GuardedGradient(part.gradient, max_gradient(self._inner.state[part.stepped]), name)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, error_if_nonfinite: bool = False) -> Tensor:
        """Scale all gradients so that their norm over the whole model is at most ``max_norm``.  Collective.

        Returns and raises as `clipping.clip_grad_norm_`.

        Raises:
            ValueError: ranks of ``expert_group`` are not in ``group``: they would have another norm.
        """
        self.finish_gradients()
        if self._outside:
            raise ValueError(
                f"the ranks {self._outside} of expert_group are not in group, which has {ranks_of_group(self._group)}: "
                "they would have another norm; give a group that contains expert_group, or do not clip"
            )
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
        self._refuse_strangers()
        if self._active is not None:
            self._gradients.take_written()
        self._step_with_ranks(None)
        return loss

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError(
                "this optimizer was closed, and gets no gradients any more: step the one that was built after it, or "
                "build LayerWise(model, ...) anew"
            )

    def _refuse_strangers(self) -> None:
        """Refuse other parameters in the place of those in the buffers; warn of others with gradients.

        Raises:
            ValueError: a parameter was replaced, cast or moved.
        """
        held = {param for group in self.param_groups for param in group["params"]}
        model = self._model()
        present = dict(model.named_parameters()) if model is not None else {}
        for param, name in self._members.name_of.items():
            if param not in held or param.data_ptr() != self._addresses[param] or present.get(name, param) is not param:
                raise ValueError(
                    f"parameter {name!r} was replaced, cast or moved after the optimizer was built, and lies "
                    "outside of its buffers. Load a model without assign=True, or close() this optimizer and build "
                    "another when the model has its final parameters"
                )
        others = present.keys() - self._members.named.keys() - self._warned
        if left := [name for name in present if name in others and present[name].grad is not None]:
            self._warned.update(left)
            warn_on_rank(
                "parameters have gradients and are in no group, so these are not reduced and no step changes them: "
                f"{', '.join(in_globs(left, present.keys() - {*left}))}. To train them, close() this optimizer and "
                "build another with groups of all parameters",
                RuntimeWarning,
                stacklevel=6,
            )

    @property
    def skipped_steps(self) -> int:
        """The number of steps that were skipped (`Muon.skipped_steps`)."""
        return self._nonfinite.skipped if self._nonfinite is not None else 0

    def _step_with_ranks(self, failure: Exception | None) -> bool:
        self._has_waiting_peers = False
        if self._active is None:
            self._finish(failure)
        if failure is None and not self._active:
            warn_of_no_gradient(stacklevel=7)
        if self._nonfinite is not None and failure is None:
            if self._skipped:
                self.zero_grad()  # which writes no memory
            self._nonfinite.record_step(self._skipped, self._guarded(), self._agreement.widest)
            if self._skipped:
                return False
        self.wait()  # for parameters that no forward pass has used
        intent = Intent.of(AGREE_ON_STEP, {})
        try:
            if failure is not None:
                raise failure
            assert self._active is not None
            self._follow_state()
            intent = Intent.of(AGREE_ON_STEP, self._cleared)
            for mine, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
                inner.update(options_of(mine))
            for name, part in self._parts.items():
                part.follow()
                part.stepped.grad = part.gradient.to(part.stepped.dtype) if name in self._active else None
            self._inner.step()
            for mine, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
                mine.update({key: inner[key] for key in (STEPS_TAKEN,) if key in inner})
        except Exception as error:
            intent = intent.failed(error, this_rank())
        self._agreement.agree(intent, Notes.compare)
        self._publish()
        self.zero_grad()
        if not self._overlap:
            self.wait()
        if intent.error is not None:
            raise intent.error
        self._begun_anew = []
        return True

    def _publish(self) -> None:
        for part in self._parts.values():
            part.stepped.grad = None
            part.publish()
        self._gathers.start()

    def wait(self) -> None:
        """Wait until all parameters are gathered."""
        self._gathers.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; no memory is written."""
        self._gradients.forget()
        self._active = None

    def close(self) -> None:
        """Remove the hooks from the model, for another optimizer to take over.  Steps are refused from then on."""
        self.wait()
        self._gradients.close()
        self._closed = True
        for param in self._members.name_of:
            if param in IN_BUFFERS:
                del IN_BUFFERS[param]
        for handle in self._handles:
            handle.remove()

    # Checkpoints.

    @cached_property
    def reduced_gradients(self) -> Mapping[Tensor, BoxedTensor]:
        """This rank's part of each parameter's gradient: what a step has taken, until the next backward pass."""

        def lying(param: Tensor, part: Part) -> BoxedTensor:
            memory, start = part.gradient, part.gradient.storage_offset()
            boxes = {
                fragment.box.lo: memory.as_strided(
                    fragment.box.shape, fragment.place.strides, start + fragment.place.offset
                )
                for fragment in part.fragments
            }
            return BoxedTensor(param.shape, boxes, memory.dtype, memory.device)

        return {param: lying(param, self._parts[name]) for param, name in self._members.name_of.items()}

    def provenance(self) -> dict[str, Any]:
        """Return the layout and its owners, for ``muonckpt.save(..., provenance=...)``."""
        sharing = map(self._members.group_of_buffer, self.buffers)
        ranks = [dist.get_process_group_ranks(group) if group is not None else [0] for group in sharing]
        return {"layer_wise": {"layout": self._layout, "buffers": [*map(to_json, self.buffers)], "ranks": ranks}}

    def state_dict(self) -> dict[str, Any]:
        """Return the state as any torch optimizer does, with rates that are tensors written as numbers."""
        self.wait()
        self._follow_state()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any], fresh: Iterable[str] = ()) -> LoadReport:  # type: ignore[override]
        """Copy state into this optimizer's, and hyper-parameters as `Muon.load_state_dict` does.  Collective.

        Parameters with masters become the loaded masters, rounded.  The masters of those that start ``fresh`` become
        their weights.

        Raises:
            Exception: on all ranks, if one of them refuses the state (`restoring`); nothing is changed then.
        """
        intent = Intent.of(AGREE_ON_LOAD, {})
        try:
            self._refuse_closed()
            self._follow_state()
            restore, report = restoring(self, state_dict, Globs.of(fresh))
        except Exception as error:
            intent = intent.failed(error, this_rank())
        self._agree(intent)
        restore()
        self._begun_anew = []
        for name in report.fresh:
            self._parts[name].follow()
        self._publish()
        self.wait()
        return report

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a LayerWise optimizer is bound to its model and process groups; save its state_dict()")


def state_of(
    whole: Tensor, example: Mapping[str, Tensor], part: Part, inner: Mapping[str, Tensor], mesh: DeviceMesh | None
) -> dict[str, Tensor]:
    """Return the state of one parameter, with the same slots on every rank; it shares memory with the stepped state.

    Args:
        whole, example: the parameter as it is stepped, on the meta device, and its state.
        part: this rank's part of it.
        inner: state of ``part.stepped``; empty for a matrix that this rank does not own.
        mesh: the ranks that share the parameter; None: this process alone.
    """
    template, held = dict(example), dict(inner)
    if part.mastered:
        template[MASTER], held[MASTER] = whole, part.stepped
    return {
        slot: held[slot] if like.ndim == 0 or mesh is None else _placed(like, held.get(slot), part, mesh)
        for slot, like in template.items()
    }


def _placed(like: Tensor, held: Tensor | None, part: Part, mesh: DeviceMesh) -> DTensor:
    shape = tuple(like.shape)
    if held is None or not part.boxes:
        held = torch.empty((0, *shape[1:]), dtype=like.dtype, device=part.weight.device)
    # Whole state of an owner may have another shape than the parameter; state that is cut has not.
    whole = held.numel() == like.numel()
    boxes = (Box.of(shape),) if whole else part.boxes
    placed: DTensor = DTensor.from_local(
        held, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=row_major(shape)
    )
    declare_boxes(placed, boxes)
    return placed


def restoring(
    optimizer: CollectiveOptimizer, state_dict: dict[str, Any], fresh: Globs
) -> tuple[Callable[[], None], LoadReport]:
    """Return a function that copies a state dict into an optimizer, and the report of that load.

    Masters of parameters that start ``fresh`` keep their values.

    Raises:
        ValueError: as `fit_state_dict`; or a slot has another dtype, or lies elsewhere.
    """
    for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = before(optimizer, state_dict) or state_dict
    loaded = fit_state_dict(optimizer, state_dict, _misfit, fresh, {MASTER})
    copies = [
        (local_of(value), local_of(loaded.state[key][slot]))
        for mine, group in zip(optimizer.param_groups, loaded.groups, strict=True)
        for param, key in zip(mine["params"], group["params"], strict=True)
        for slot, value in optimizer.state[param].items()
    ]

    def restore() -> None:
        for target, source in copies:
            target.copy_(source)
        former = [{**group} for group in optimizer.param_groups]
        for mine, group in zip(optimizer.param_groups, loaded.groups, strict=True):
            mine.update(options_of(group))
        adopt_saved_options(optimizer.param_groups, former, optimizer.code_options)
        for after in optimizer._optimizer_load_state_dict_post_hooks.values():
            after(optimizer)

    return restore, loaded.report


def _misfit(tensor: Tensor, loaded: Any) -> str | None:
    """Return why a loaded tensor does not lie element for element where this one does, or None."""
    if reason := tensor_misfit(tensor, loaded):
        return reason
    if loaded.dtype != tensor.dtype:
        return f"is {loaded.dtype}, expected {tensor.dtype}"
    return None if declared_boxes(loaded) == declared_boxes(tensor) else CUT_OTHERWISE
