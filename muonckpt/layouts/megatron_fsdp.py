"""The door to models of Megatron-FSDP: their parameters as layouts, and what they want done around a step.

Both versions cut padded flat buffers where a shard ends, so their DTensors are uneven in ways that placements do not
say.  `IndexedModel` reads the buffer index of version 1, `PackedModel` the packed buffers of version 2 (the package's
``experimental``); `open_model` finds the version, and no other code asks for it.  The package is not imported here.
Checked with megatron-fsdp 0.6.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.hooks import RemovableHandle

from ..algebra.box import Index
from ..algebra.layout import TensorLayout
from ..algebra.overlap import IntArray
from ..names.errors import ArgumentError, LayoutError
from .flat import Cuts, FlatShard, flat_layout, uneven_layout
from .mesh import Mesh
from .tensors import local_of

WeightHook = Callable[[Tensor, Tensor], None]
"""Called with a parameter and its tensor in a state dict."""


class ShardedModel(Protocol):
    """A model of one version of Megatron-FSDP.

    Attributes:
        parameters: the sharded parameters that optimizers take, by name, in the same order on all ranks.
        parameters_elsewhere: other DTensors, without elements in the model's buffers.
    """

    parameters: Mapping[str, DTensor]
    parameters_elsewhere: Mapping[str, DTensor]

    def layout(self, param: Any) -> TensorLayout | None:
        """Return the layout of a parameter; None if mesh and placements say it."""

    def finish_gradients(self) -> None:
        """Make the gradients of the backward passes ready, so that all ranks have a parameter's, or none has."""

    def install_weights(self) -> None:
        """Copy the weights that a step or a load has changed to those that forward passes use."""

    def declare_weights(self, declare: WeightHook) -> tuple[RemovableHandle, ...]:
        """Let the model's ``state_dict()`` declare the boxes of its weights.

        Raises:
            ValueError: the model hands its gradients over in a way that optimizers do not read.
        """


def open_model(model: Any) -> ShardedModel:
    """Return the model's parameters, whichever version has sharded it."""
    return IndexedModel(model) if hasattr(model, "param_and_grad_buffer") else PackedModel(model)


def prove_local(layout: TensorLayout, param: Any) -> TensorLayout:
    """Return the layout of a parameter; raise LayoutError if this rank's local tensor is of another size."""
    rank, local_size = param.device_mesh.get_rank(), local_of(param).numel()
    expected_size = sum(fragment.box.numel for fragment in layout.fragments_of(rank))
    if expected_size != local_size:
        raise LayoutError(
            f"rank {rank} holds {local_size} elements of a parameter of shape {tuple(param.shape)}, but the buffer "
            f"index says {expected_size}"
        )
    return layout


def _foreign_error(param: Tensor) -> LayoutError:
    """Return the error of a tensor that no buffer of the model has."""
    return LayoutError(
        f"a tensor of shape {tuple(param.shape)} is not an optimizer parameter of this Megatron-FSDP model; "
        "take model.parameters() before the first forward pass, which puts its working copies in their place"
    )


class IndexedModel:
    """A ``megatron_fsdp.MegatronFSDP``: its index says where each parameter begins, and which mesh axes cut buffers."""

    def __init__(self, model: Any) -> None:
        self._model, self._flat = model, model.param_and_grad_buffer
        self.parameters: Mapping[str, DTensor] = dict(self._flat.optimizer_named_parameters)
        self.parameters_elsewhere: Mapping[str, DTensor] = {}
        # The buffers of each parameter are those of its group.
        self._groups = {}
        for param in self.parameters.values():
            self._groups[param] = self._flat.parameter_groups[self._flat.param_to_param_group[param.orig_param]]

    def layout(self, param: Any) -> TensorLayout:
        if param not in self._groups:
            raise _foreign_error(param)
        # Where the parameter begins in its buffer, and how long that is, if the buffer is cut.
        cuts = self._cuts(param)
        start, size = 0, local_of(param).numel()
        if cuts.flat:
            buffer = self._groups[param].main_weight_buffer or self._groups[param].model_weight_buffer
            start = buffer.item_index_map[buffer.param_idx[param.orig_param]].global_data_index
            size = buffer.bucket_index.size
            if cuts.shards != buffer.dp_world_size:
                raise LayoutError(
                    f"the mesh cuts buffers into {cuts.shards} shards, their group {buffer.dp_world_size}"
                )
        return uneven_layout(tuple(param.shape), start, size, cuts)

    def _cuts(self, param: Any) -> Cuts:
        """Return how the mesh cuts a parameter; the model's index names the mesh axes."""
        mesh, index = param.device_mesh, self._flat.dist_index
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

    def finish_gradients(self) -> None:
        # A second call would undo clipping, and could reduce twice.
        if self._model.microbatch_count:
            self._model.finish_grad_sync()
        for name, param in self._flat.optimizer_named_parameters:
            gradient = self._flat.dist_main_grad.get(name)
            # zero_grad_buffer() takes the local tensor out of them.
            local = None if gradient is None else gradient._local_tensor
            if param.grad is None and local is not None and local.numel() == 0:
                param.grad = gradient

    def install_weights(self) -> None:
        self._model.install_optimized_model_weights()

    def declare_weights(self, declare: WeightHook) -> tuple[RemovableHandle, ...]:
        if self._flat.use_decoupled_grad:
            raise ArgumentError("this model puts gradients into decoupled_grad; build it with use_decoupled_grad=False")
        return ()  # the package's own state_dict() declares boxes


@dataclass(frozen=True, slots=True)
class RankPosition:
    """The place of any rank on a mesh, for layouts that ask a DeviceMesh for that of this rank."""

    shape: Index
    coordinate: Index

    def size(self, axis: int) -> int:
        return self.shape[axis]

    def get_local_rank(self, axis: int) -> int:
        return self.coordinate[axis]


class PackedModel:
    """A module tree to which ``megatron_fsdp.experimental.fully_shard`` was applied: its buffers are packed in the
    order of their parameters, and say themselves which range each rank holds.

    The tree may have other parameters as well: plain ones, and DTensors that say or declare where they lie.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._ranges: dict[int, tuple[IntArray, IntArray]] = {}
        # The groups of all modules: each parameter has a number in the buffer of its group.
        self._groups: list[Any] = []
        for module in model.modules():
            self._groups += getattr(module, "parameter_groups", ())
        self._places: dict[Tensor, tuple[Any, int]] = {}
        working_copies = set[int]()
        for group in self._groups:
            self._places |= {param: (group.main_weight, n) for n, param in enumerate(_sharded_parameters(group))}
            working_copies |= {*map(id, _working_copies(group))}
        # The model's parameters are in a buffer or elsewhere; in a forward pass it has working copies, which no
        # optimizer takes.
        params = dict(model.named_parameters())
        self.parameters: Mapping[str, Any] = {name: p for name, p in params.items() if p in self._places}
        elsewhere = {name: param for name, param in params.items() if name not in self.parameters}
        self._elsewhere = {param for param in elsewhere.values() if id(param) not in working_copies}
        self.parameters_elsewhere: Mapping[str, DTensor] = {
            name: param for name, param in elsewhere.items() if isinstance(param, DTensor)
        }

    def layout(self, param: Any) -> TensorLayout | None:
        if param in self._elsewhere:
            return None
        if param not in self._places:
            raise _foreign_error(param)
        # Where the parameter begins in its buffer, and the ranks whose ranges have some of it.
        buffer, number = self._places[param]
        shape, start = tuple(buffer.layout.tensor_shapes[number]), buffer.layout.tensor_to_offset[number]
        starts, stops = self._ranges_of(buffer)
        lo, hi = np.maximum(starts - start, 0), np.minimum(stops - start, buffer.layout.tensor_shapes[number].numel())
        ranks = buffer.mesh.mesh.flatten().tolist()
        shards = tuple(FlatShard(ranks[n], int(lo[n]), int(hi[n])) for n in np.flatnonzero(lo < hi).tolist())
        return flat_layout(shape, 0, shards)

    def _ranges_of(self, buffer: Any) -> tuple[IntArray, IntArray]:
        """Return where the range of each rank of the mesh begins and ends in a buffer."""
        if id(buffer) not in self._ranges:
            shape = tuple(buffer.mesh.shape)
            coordinates = product(*map(range, shape))
            ranges = [
                buffer.layout.get_local_range(RankPosition(shape, coordinate), buffer.placements)
                for coordinate in coordinates
            ]
            starts, sizes = np.array(ranges, np.int64).T
            # This rank's memory proves them.
            position = buffer.mesh.mesh.flatten().tolist().index(buffer.mesh.get_rank())
            expected, actual = ranges[position], (buffer.offset, buffer.local_buffer.numel())
            if expected != actual:
                raise LayoutError(
                    f"rank {buffer.mesh.get_rank()} holds {actual[1]} elements of a buffer from element {actual[0]} "
                    f"on, but its layout says {expected[1]} from {expected[0]} on, for placements "
                    f"{buffer.placements}: expected Flat and Replicate, or others that the layout knows"
                )
            self._ranges[id(buffer)] = starts, starts + sizes
        return self._ranges[id(buffer)]

    def finish_gradients(self) -> None:
        for group in self._groups:
            gradients = group.main_grad
            if gradients is None or gradients.placements == group.main_weight.placements:
                continue
            if any(param.grad is not None for param in _sharded_parameters(group)):
                raise RuntimeError(
                    f"gradients are not reduced yet: they are {gradients.placements}, weights "
                    f"{group.main_weight.placements}. Run the last backward pass before a step outside of "
                    "microbatch(), or within microbatch(model, is_last=True)"
                )

    def install_weights(self) -> None:
        for group in self._groups:
            group.sync_model_weight_from_main_weight()

    def declare_weights(self, declare: WeightHook) -> tuple[RemovableHandle, ...]:
        def describe(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
            for name, param in {**self.parameters, **self.parameters_elsewhere}.items():
                if (weight := state.get(prefix + name)) is not None:
                    declare(param, weight)

        return (self._model.register_state_dict_post_hook(describe),)  # type: ignore[no-untyped-call]


def _sharded_parameters(group: Any) -> list[Tensor]:
    """Return a group's parameters in the order of its buffers; versions after 0.6.1 keep both forms together."""
    if hasattr(group, "fsdp_parameters"):
        return [param.sharded for param in group.fsdp_parameters]
    return list(group.sharded_parameters)


def _working_copies(group: Any) -> list[Tensor]:
    if hasattr(group, "fsdp_parameters"):
        return [param.unsharded for param in group.fsdp_parameters]
    return list(group.unsharded_parameters)
