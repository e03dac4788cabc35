"""Megatron-FSDP, versions 1 and 2: the layout of its shards, and the hooks that it asks of an optimizer.

::

    optimizer = Muon(groups, layout=layouts(model))  # groups of model.parameters()
    attach(optimizer, model)

`layouts.megatron_fsdp` is the door to both versions; nothing here depends on the version.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..algebra.box import Box
from ..algebra.layout import Fragment, TensorLayout, dense
from ..algebra.overlap import IntArray
from ..layouts.megatron_fsdp import open_model, prove_local
from ..layouts.tensors import declares_boxes, local_of
from ..names.errors import ArgumentError, LayoutError, called_like
from ..names.wording import listed
from .muon import Muon
from .options import params_of
from .planning.schedule import Ranks
from .state import declare_boxes
from .step.exchange import gather_numbers, max_over_ranks
from .step.rank_sets import collective_order, group_of, groups_of_mesh, ordinals, ranks_of


def layouts(model: Any) -> Callable[[Tensor], TensorLayout | None]:
    """Return the ``layout`` argument of `Muon` for a model.  Call it on all ranks.

    The result is a function of a parameter, which does not communicate.

    Version 1: for FSDP and hybrid FSDP (outer axis replicated or sharded) at any ZeRO stage, with experts on their
    own mesh and tensor parallelism.  A parameter is the experts that its name holds on this rank, on the ranks that
    share them; tensor-parallel parts are put end to end.

    Version 2: for FSDP and hybrid FSDP; the model may be a part of a larger one.  Where DTensors declare their boxes
    by DCP's hooks, and no buffer of the model has their elements, this call asks all ranks of their meshes.

    Args:
        model: what ``megatron_fsdp.fully_shard_model`` has returned, or a model to which
            ``megatron_fsdp.experimental.fully_shard`` was applied.

    Raises:
        LayoutError: boxes that ranks declare do not make up a tensor; (when called) a tensor that is none of the
            model's optimizer parameters; tensor-parallel parts that are not equal; a buffer that contradicts its index,
            the mesh or the local tensor.
    """
    sharded = open_model(model)
    declared = _declared_layouts(sharded.parameters_elsewhere)

    def layout(param: Tensor) -> TensorLayout | None:
        result = declared[param] if param in declared else sharded.layout(param)
        return None if result is None else prove_local(result, param)

    return layout


def finish_gradients(model: Any) -> None:
    """Finish the gradients of the backward passes, so that all ranks that hold a parameter have its gradient, or none.

    :func:`attach` does this before each step; call it yourself to look at or clip the gradients before that.

    For version 1, it calls ``finish_grad_sync()`` once after backward passes, as a second call would undo clipping, and
    could reduce twice.  An empty shard, whose ``grad`` Megatron-FSDP leaves as None, gets its empty gradient.  As
    always there, a parameter that no backward pass has reached has a gradient of zeros: its momentum fades and its
    weights decay.  Only frozen parameters have None, and all after ``zero_grad_buffer()``.

    For version 2, gradients are finished by the last backward pass.

    Raises:
        RuntimeError: hybrid FSDP of version 2 has not reduced them, as the last micro-batch was not marked as such.
    """
    open_model(model).finish_gradients()


@dataclass(frozen=True, slots=True)
class Attached:
    """The hooks that :func:`attach` put on an optimizer and its model."""

    handles: tuple[RemovableHandle, ...]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()


@called_like("attach(optimizer, model)")
def attach(optimizer: Muon, model: Any) -> Attached:
    """Hook a model to its optimizer: gradients are made ready before each step, new weights installed after it.

    Use it instead of the package's ``fully_shard_optimizer``, before the first step and before state is loaded.
    Collective: it adds the parameters to groups that other ranks have there, and this rank has left out because its
    shards of them are empty.

    Weights are also installed after ``model.load_state_dict()``, and before the first forward pass after a
    ``model.state_dict()``, which may have been loaded into.  Call the model itself, not its modules.

    A step takes gradients in the dtype of their parameters; afterwards they are as they were.  With version 1, call
    ``model.zero_grad_buffer()`` after each step; ``optimizer.zero_grad()`` is not enough.

    ``state_dict()`` of both tells stock DCP, by hooks on local tensors, their true boxes.  Empty shards have state too,
    so all ranks have the same keys.

    Raises:
        ArgumentError: the model hands its gradients over as ``decoupled_grad``, which `Muon` does not read; or a rank
            has left a parameter with elements out of the groups.
        RuntimeError: (in a step) a closure was given.
    """
    sharded, layout = open_model(model), layouts(model)
    replaced_gradients: list[tuple[Tensor, Tensor]] = []
    state_dicts = 0  # made since weights were installed

    def describe(_: Optimizer) -> None:
        for group in optimizer.param_groups:
            # State by row is sharded evenly, as its placements say.
            method = optimizer._method_of(group)
            slots = method.slots_of(group).items() if method is not None else ()
            other_slots = {name for name, slot in slots if slot.shape != "[m, n]"}
            for param in group["params"]:
                for name, value in optimizer.state[param].items():
                    if name not in other_slots:
                        declare(param, value)

    def declare(param: Tensor, value: Tensor) -> None:
        if not isinstance(value, DTensor) or (param_layout := layout(param)) is None:
            return
        rank = value.device_mesh.get_rank()
        boxes = [fragment.box for fragment in param_layout.fragments_of(rank)]
        if len(boxes) > 1:
            raise LayoutError(
                f"rank {rank} holds {len(boxes)} boxes of a tensor of shape {tuple(value.shape)}, DCP takes one"
            )
        declare_boxes(value, boxes)

    def finish(_: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if any(closure is not None for closure in (*args[1:], *kwargs.values())):
            raise RuntimeError("a closure would run after the gradients were finished: call it before step()")
        sharded.finish_gradients()
        for param in params_of(optimizer.param_groups):
            if param.grad is not None and param.grad.dtype != param.dtype:
                replaced_gradients.append((param, param.grad))
                _set_gradient(param, param.grad.to(param.dtype))

    def restore() -> None:
        while replaced_gradients:
            _set_gradient(*replaced_gradients.pop())

    def install(*_: Any) -> None:
        nonlocal state_dicts
        sharded.install_weights()
        state_dicts = 0

    def install_loaded(*_: Any) -> None:
        if state_dicts:
            install()

    def count(*_: Any) -> None:
        nonlocal state_dicts
        state_dicts += 1

    handles = sharded.declare_weights(declare)
    _complete_groups(optimizer, {**sharded.parameters, **sharded.parameters_elsewhere})
    return Attached(
        (
            *handles,
            model.register_state_dict_post_hook(count),
            model.register_load_state_dict_post_hook(install),
            model.register_forward_pre_hook(install_loaded, prepend=True),
            optimizer.register_step_pre_hook(finish),
            optimizer.register_step_end_hook(restore),
            optimizer.register_step_post_hook(install),
            optimizer.register_state_dict_pre_hook(describe),
        )
    )


def _set_gradient(param: Tensor, gradient: Tensor) -> None:
    """Give a parameter a gradient of any dtype."""
    param.grad = None  # the dtype cannot change while there is one
    param.grad_dtype = gradient.dtype
    param.grad = gradient


@dataclass(frozen=True, slots=True, eq=False)
class MeshMembers:
    """The DTensors of a model that are on the same ranks, by name, in the order of the model.

    Attributes:
        group: the process group of the ranks; None for one rank.
    """

    ranks: Ranks
    params: Mapping[str, DTensor]
    group: dist.ProcessGroup | None

    @property
    def device(self) -> torch.device:
        return next(iter(self.params.values())).device

    def largest(self, numbers: Iterable[int]) -> list[int]:
        """Return the largest of each number over the ranks.  Collective."""
        exact = torch.tensor([*numbers], dtype=torch.float64, device=self.device)
        return [int(number) for number in max_over_ranks(exact, self.group).tolist()]

    def gather(self, numbers: IntArray) -> tuple[Ranks, IntArray]:
        """Return an array of numbers of each rank, and the ranks in that order.  Collective."""
        if self.group is None:
            return self.ranks, numbers[None]
        sent = torch.from_numpy(numbers).flatten().to(self.device)
        table = gather_numbers(sent.unbind(), self.group).cpu().numpy()
        return tuple(dist.get_process_group_ranks(self.group)), table.reshape(-1, *numbers.shape)


def _by_ranks(params: Mapping[str, DTensor]) -> Iterator[MeshMembers]:
    """Yield parameters by the ranks of their meshes, in the order of collectives."""
    members: defaultdict[Ranks, dict[str, DTensor]] = defaultdict(dict)
    for name, param in params.items():
        members[ranks_of(param, None)][name] = param
    for ranks in sorted(members, key=collective_order):
        mesh = next(iter(members[ranks].values())).device_mesh
        yield MeshMembers(ranks, members[ranks], group_of(ranks, *groups_of_mesh(mesh)))


def _declared_layouts(params: Mapping[str, DTensor]) -> dict[Tensor, TensorLayout]:
    """Return the layouts of DTensors that declare boxes by DCP's hooks, which say what this rank has.  Collective."""
    declared: dict[Tensor, TensorLayout] = {}
    for members in _by_ranks(params):
        # Ranks tell each other the corners of as many boxes as any of them has; those that are missing are empty.
        boxes = [*map(_declared_boxes, members.params.values())]
        counts = members.largest(map(len, boxes))
        firsts = [*accumulate(counts, initial=0)]
        width = max(param.ndim for param in members.params.values())
        corners = np.zeros((firsts[-1], 2, width), np.int64)
        for first, param_boxes in zip(firsts, boxes, strict=False):
            for number, box in enumerate(param_boxes, first):
                corners[number, :, : box.ndim] = box.lo, box.hi
        if not corners.size:
            continue
        ranks, table = members.gather(corners)
        # Together they are the whole tensors; local tensors have their boxes one after the other.
        for (name, param), first, count in zip(members.params.items(), firsts, counts, strict=False):
            fragments: list[Fragment] = []
            for rank, rank_corners in zip(ranks, table[:, first : first + count, :, : param.ndim], strict=True):
                offset = 0
                for box in [Box(tuple(lo), tuple(hi)) for lo, hi in rank_corners.tolist()]:
                    fragments += [dense(box, rank, offset)] if box.numel else []
                    offset += box.numel
            if count:
                try:
                    declared[param] = TensorLayout.of(tuple(param.shape), fragments)
                except LayoutError as error:
                    raise LayoutError(
                        f"{name}: ranks declare boxes by __create_chunk_list__ that do not make up the tensor: {error}"
                    ) from None
    return declared


def _declared_boxes(param: DTensor) -> list[Box]:
    """Return the boxes that a DTensor declares on this rank, empty ones included."""
    if not declares_boxes(param):
        return []
    chunks: Sequence[Any] = param.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return [Box.of(tuple(chunk.sizes)).shift(tuple(chunk.offsets)) for chunk in chunks]


def _complete_groups(optimizer: Muon, params: Mapping[str, DTensor]) -> None:
    """Add parameters to the groups in which other ranks have them, where this rank's shards are empty.  Collective.

    A rank of Megatron-FSDP may have no element of a parameter, which code then leaves out of groups; but all ranks of a
    parameter plan its step together, so they need the same groups.

    Raises:
        ArgumentError: on all ranks, if their groups cannot be made the same.
    """
    groups = optimizer.param_groups
    is_named = any("param_names" in group for group in groups)
    for members in _by_ranks(params):
        # This rank's facts about each parameter: its group, whether it is in none, and whether it has elements then.
        group_numbers = {param: number for number, group in enumerate(groups) for param in group["params"]}
        local_numbers = [group_numbers.get(param, -1) for param in members.params.values()]
        is_missing = [number < 0 for number in local_numbers]
        sizes = [local_of(param).numel() for param in members.params.values()]
        is_partial = [missing and size > 0 for missing, size in zip(is_missing, sizes, strict=True)]
        # The ranks agree on the largest of each number; for the negated count that gives the fewest groups.
        facts = members.largest([*local_numbers, *is_missing, *is_partial, len(groups), -len(groups), is_named])
        *parameter_facts, most_groups, negated_fewest, is_named_anywhere = facts
        rows = np.array(parameter_facts).reshape(3, -1).tolist()
        joint_numbers = dict(zip(members.params, rows[0], strict=True))
        incomplete_names, partial_names = list[str](), list[str]()
        for name, number, is_incomplete, has_elements in zip(members.params, *rows, strict=True):
            # A parameter that is in no group on any rank (-1) is not trained, and needs none.
            if number >= 0 and is_incomplete:
                incomplete_names.append(name)
            if number >= 0 and has_elements:
                partial_names.append(name)
        if not incomplete_names:
            continue
        # All ranks refuse alike what they cannot complete, or put the same parameters into each group in one order.
        num_groups = -negated_fewest, most_groups
        _refuse_groups(incomplete_names, partial_names, num_groups, optimizer._has_history)
        for number, group in enumerate(groups):
            joint_members: dict[Tensor, str] = {}
            for name, param in members.params.items():
                if joint_numbers[name] == number:
                    joint_members[param] = name
            _place_members(group, joint_members, named=bool(is_named_anywhere))
        # A rank without these parameters has not counted this optimizer among those of the ranks.
        if members.ranks not in optimizer._ordinals:
            params_here = {*members.params.values()}
            shared_groups = []
            for group in groups:
                shared_params = [param for param in group["params"] if param in params_here]
                shared_groups.append({**group, "params": shared_params, "param_names": ()})
            optimizer._ordinals |= ordinals(shared_groups, None)
        # The parameters that were added get state; nothing is lost, as no step was taken and nothing was loaded.
        optimizer._reset_state()


def _refuse_groups(
    incomplete: Sequence[str], partial: Sequence[str], num_groups: tuple[int, int], is_late: bool
) -> None:
    """Raise ArgumentError for groups that cannot be completed.

    Args:
        incomplete: names of parameters that are in a group on some ranks only.
        partial: those among them with elements on a rank that left them out.
        num_groups: the fewest and the most groups that any rank has.
        is_late: whether there is state already.
    """
    fewest, most = num_groups
    if most != fewest:
        raise ArgumentError(
            f"ranks have {fewest} to {most} parameter groups: give all of them the same groups in the same order, with "
            "{'params': []} where all shards of a group are empty"
        )
    if partial:
        raise ArgumentError(
            f"{listed(partial)}: in a parameter group on some ranks, and on others, which have elements of it, in "
            "none. Leave out parameters only where their shards are empty, or on all ranks"
        )
    if is_late:
        raise ArgumentError(
            f"{listed(incomplete)}: in a parameter group on some ranks only, and the optimizer has been stepped or "
            "loaded already. Call attach(optimizer, model) before that"
        )


def _place_members(group: dict[str, Any], members: Mapping[Tensor, str], named: bool) -> None:
    """Let parameters, by their names in the model, be the last ones of a group, in that order.

    They may be in the group already, and then change their place.
    """
    former_names = dict(zip(group["params"], group.get("param_names", ()), strict=False))
    group["params"] = [param for param in group["params"] if param not in members] + [*members]
    if named:
        group["param_names"] = [former_names.get(param) or members[param] for param in group["params"]]
