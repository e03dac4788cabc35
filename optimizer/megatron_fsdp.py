"""Megatron-FSDP: the layout of its shards, and the hooks that it asks of an optimizer.

::

    optimizer = Muon(groups, layout=layouts(model))  # groups of model.parameters()
    attach(optimizer, model)

Megatron-FSDP cuts its flat buffers where a shard ends, so its DTensors are uneven in ways that placements do not say.
The model's buffer index says it, the same on every rank: where each parameter begins, how long the buffer is, which
mesh axes cut it.  Its package is not imported here; :class:`Model` lists the parts in use.  Checked with megatron-fsdp
0.6.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..algebra.layout import TensorLayout
from ..layouts.flat import Cuts, uneven_layout
from ..layouts.mesh import Mesh
from ..layouts.tensors import local_of
from ..names.errors import LayoutError
from .muon import Muon
from .state import declare_boxes


class Model(Protocol):
    """The part of a ``megatron_fsdp.MegatronFSDP`` that is used here.

    ``microbatch_count`` is the number of backward passes since the last ``finish_grad_sync()``.
    """

    param_and_grad_buffer: Any
    microbatch_count: int

    def finish_grad_sync(self) -> None: ...

    def install_optimized_model_weights(self) -> None: ...


def layouts(model: Model) -> Callable[[Tensor], TensorLayout]:
    """Return the ``layout`` argument of `Muon` for this model: a function of a parameter, which does not communicate.

    For FSDP and hybrid FSDP (outer axis replicated or sharded) at any ZeRO stage, with experts on their own mesh and
    tensor parallelism.  A parameter is the experts that its name holds on this rank, on the ranks that share them;
    tensor-parallel parts are put end to end.

    Raises:
        LayoutError: (when called) a tensor that is none of the model's optimizer parameters; tensor-parallel parts that
            are not equal; a buffer index that contradicts the mesh or the local tensor.
    """
    flat = model.param_and_grad_buffer
    group_of = {
        param: flat.parameter_groups[flat.param_to_param_group[param.orig_param]]
        for _, param in flat.optimizer_named_parameters
    }

    def layout(param: Any) -> TensorLayout:
        if param not in group_of:
            raise LayoutError(
                f"a tensor of shape {tuple(param.shape)} is not an optimizer parameter of this Megatron-FSDP model; "
                "take model.parameters() before the first forward pass, which puts its working copies in their place"
            )
        # Where the parameter begins in its buffer, and how long that is, if the buffer is cut.
        cuts = _cuts(param, flat.dist_index)
        start, size = 0, local_of(param).numel()
        if cuts.flat:
            buffer = group_of[param].main_weight_buffer or group_of[param].model_weight_buffer
            start = buffer.item_index_map[buffer.param_idx[param.orig_param]].global_data_index
            size = buffer.bucket_index.size
            if cuts.shards != buffer.dp_world_size:
                raise LayoutError(
                    f"the mesh cuts buffers into {cuts.shards} shards, their group {buffer.dp_world_size}"
                )
        # The local tensor proves the layout.
        result = uneven_layout(tuple(param.shape), start, size, cuts)
        rank, local_size = param.device_mesh.get_rank(), local_of(param).numel()
        expected_size = sum(fragment.box.numel for fragment in result.fragments_of(rank))
        if expected_size != local_size:
            raise LayoutError(
                f"rank {rank} holds {local_size} elements of a parameter of shape {tuple(param.shape)}, but the buffer "
                f"index says {expected_size}"
            )
        return result

    return layout


def _cuts(param: Any, index: Any) -> Cuts:
    """Return how the mesh cuts a parameter; the model's index names the mesh axes."""
    mesh = param.device_mesh
    flat: dict[str, int] = {}
    split = None
    # For parameters that nothing shards, Megatron-FSDP gives a placement of the first axis only.
    for axis, (name, placement) in enumerate(zip(mesh.mesh_dim_names, param.placements, strict=False)):
        if type(placement) is Replicate:
            continue
        if type(placement) is not Shard:
            raise LayoutError(f"{placement} on mesh axis {name!r}: expected Shard or Replicate")
        if name == index.tp_dim:
            split = (axis, placement.dim)
        else:
            flat[name] = axis
    # The outer axis cuts the shards of the inner one (FSDPDistributedIndex.get_logical_hybrid_fsdp_rank).
    order = [flat[name] for name in (index.dp_shard_dim, index.dp_outer_dim) if name in flat]
    return Cuts(Mesh(tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist())), tuple(order), split)


def finish_gradients(model: Model) -> None:
    """Finish the gradients of the backward passes, so that all ranks that hold a parameter have its gradient, or none.

    :func:`attach` does this before each step; call it yourself to look at or clip the gradients before that.  It calls
    ``finish_grad_sync()`` once after backward passes, as a second call would undo clipping, and could reduce twice.  An
    empty shard, whose ``grad`` Megatron-FSDP leaves as None, gets its empty gradient.

    As always with Megatron-FSDP, a parameter that no backward pass has reached has a gradient of zeros: its momentum
    fades and its weights decay.  Only frozen parameters have None, and all after ``zero_grad_buffer()``.
    """
    if model.microbatch_count:
        model.finish_grad_sync()
    flat = model.param_and_grad_buffer
    for name, param in flat.optimizer_named_parameters:
        gradient = flat.dist_main_grad.get(name)
        # zero_grad_buffer() takes the local tensor out of these.
        local = None if gradient is None else gradient._local_tensor
        if param.grad is None and local is not None and local.numel() == 0:
            param.grad = gradient


@dataclass(frozen=True, slots=True)
class Attached:
    """The hooks that :func:`attach` put on an optimizer."""

    handles: tuple[RemovableHandle, ...]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()


def attach(optimizer: Muon, model: Model) -> Attached:
    """Hook a model to its optimizer: gradients are finished before each step, new weights installed after it.

    Use it instead of ``megatron_fsdp.fully_shard_optimizer``, whose trial step would move the parameters.  Call
    ``model.zero_grad_buffer()`` after each step; ``optimizer.zero_grad()`` is not enough.

    ``state_dict()`` tells stock DCP, by hooks on local tensors, their true boxes.  Empty shards have state too, so all
    ranks have the same keys.

    Raises:
        ValueError: the model hands its gradients over as ``decoupled_grad``, which `Muon` does not read.
        RuntimeError: (in a step) a closure was given.
    """
    if model.param_and_grad_buffer.use_decoupled_grad:
        raise ValueError("this model puts gradients into decoupled_grad; build it with use_decoupled_grad=False")
    layout = layouts(model)

    def finish(_: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if any(closure is not None for closure in (*args[1:], *kwargs.values())):
            raise RuntimeError("a closure would run after the gradients were finished: call it before step()")
        finish_gradients(model)

    def install(*_: Any) -> None:
        model.install_optimized_model_weights()

    def describe(*_: Any) -> None:
        for group in optimizer.param_groups:
            # State by row is sharded evenly, as its placements say, and the optimizer declares state at owners.
            method = optimizer._method_of(group)
            slots = method.slots_of(group).items() if method is not None else ()
            other_slots = {name for name, slot in slots if slot.at_owner or slot.shape != "[m, n]"}
            for param in group["params"]:
                for name, value in optimizer.state[param].items():
                    if name in other_slots or not isinstance(value, DTensor):
                        continue
                    rank = value.device_mesh.get_rank()
                    boxes = [fragment.box for fragment in layout(param).fragments_of(rank)]
                    if len(boxes) > 1:
                        shape = tuple(value.shape)
                        raise LayoutError(
                            f"rank {rank} holds {len(boxes)} boxes of a tensor of shape {shape}, DCP takes one"
                        )
                    declare_boxes(value, boxes)

    return Attached(
        (
            optimizer.register_step_pre_hook(finish),
            optimizer.register_step_post_hook(install),
            optimizer.register_state_dict_pre_hook(describe),
        )
    )
