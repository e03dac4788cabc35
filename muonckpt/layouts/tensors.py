"""Turns live torch tensors into layouts: the door at which torch's placements become boxes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from weakref import WeakKeyDictionary

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate as TorchReplicate, Shard as TorchShard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement, _StridedShard as TorchStridedShard

from ..algebra.box import Index, row_major
from ..algebra.layout import Fragment, TensorLayout
from ..names.errors import LayoutError
from .flat import owned_layout
from .mesh import (
    AxisPlacement,
    Mesh,
    MeshPlacement,
    Replicate,
    Shard,
    StridedShard,
    fragments_on,
    local_shape,
    mesh_layout,
)


def layout_of(tensor: torch.Tensor, replicas: tuple[int, ...] = (0,)) -> TensorLayout:
    """Return the layout of a tensor over all ranks, without communication.

    The buffers of a DTensor are global ranks.  A plain tensor lies whole on each rank of ``replicas``.

    Raises:
        LayoutError: a ``Partial`` or unknown placement, or a local tensor of another shape than the placements imply.
    """
    if not isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        if len(replicas) == 1:
            return owned_layout(shape, replicas[0])
        return mesh_layout(shape, Mesh((len(replicas),), replicas), (Replicate(),))
    mesh, placements = _mesh_and_placements(tensor)
    return mesh_layout(tuple(tensor.shape), mesh, placements)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, which shares its memory and is detached from autograd."""
    local: torch.Tensor = _plain_local(tensor) if isinstance(tensor, DTensor) else tensor
    return local.detach() if local.requires_grad else local


def locals_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return this rank's parts of tensors, not detached: for operations that autograd does not record."""
    return [_plain_local(tensor) if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def _plain_local(tensor: DTensor) -> torch.Tensor:
    # Take a plain local tensor itself: to_local() makes a view for autograd first.
    return tensor._local_tensor if type(tensor._local_tensor) is torch.Tensor else tensor.to_local()


def is_first_copy(tensor: torch.Tensor) -> bool:
    """Return whether this rank is the first that holds its part of a tensor, or the tensor is a plain one.

    Raises:
        LayoutError: a ``Partial`` or unknown placement.
    """
    if not isinstance(tensor, DTensor):
        return True
    sharding = {axis for axis, placement in enumerate(_convert_placements(tensor)) if placement.dim is not None}
    coordinate = tensor.device_mesh.get_coordinate()
    return coordinate is not None and not any(index for axis, index in enumerate(coordinate) if axis not in sharding)


def rows_of(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return the ranges of rows (of the first dim) that this rank holds in part, in the order of its memory."""
    if not isinstance(tensor, DTensor):
        return [(0, tensor.shape[0])]
    # Sorted ranges are in the order of memory, as no placement reverses rows.
    return sorted({(fragment.box.lo[0], fragment.box.hi[0]) for fragment in fragments_here(tensor)})


def zeros_sharded_like(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros of another shape with as many dims, sharded as a tensor is.

    Where a dim is shorter than the axis that shards it, the last ranks are empty.
    """
    if not isinstance(tensor, DTensor):
        return torch.zeros(shape, dtype=dtype, device=tensor.device)
    # The global shape is given: where shards are uneven, torch cannot infer it from the local one.
    mesh, placements = _convert_mesh(tensor.device_mesh), _convert_placements(tensor)
    local = local_shape(shape, mesh, placements, torch.distributed.get_rank())
    zeros: torch.Tensor = DTensor.from_local(
        torch.zeros(local, dtype=dtype, device=tensor.device),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=row_major(shape),
    )
    return zeros


def mesh_placement_of(tensor: torch.Tensor) -> MeshPlacement | None:
    """Return mesh and placements of a tensor; None where they do not describe it."""
    if not isinstance(tensor, DTensor) or declares_boxes(tensor):
        return None
    return _mesh_placement(
        _convert_mesh(tensor.device_mesh), tensor.device_mesh.mesh_dim_names, tensor.placements, tensor.ndim
    )


@lru_cache(maxsize=4096)
def _mesh_placement(
    mesh: Mesh, names: tuple[str, ...] | None, placements: tuple[TorchPlacement, ...], ndim: int
) -> MeshPlacement:
    return MeshPlacement(mesh, names, tuple(_convert_placement(placement, ndim) for placement in placements))


def declares_boxes(tensor: torch.Tensor) -> bool:
    """Return whether a tensor, or a DTensor's local one, declares the boxes of this rank by DCP's hooks."""
    return hasattr(tensor._local_tensor if isinstance(tensor, DTensor) else tensor, "__create_chunk_list__")


def fragments_here(tensor: DTensor) -> tuple[Fragment, ...]:
    """Return the fragments of a DTensor on this rank, placed as if its local tensor were dense.

    Raises:
        LayoutError: as `layout_of`.
    """
    mesh, placements = _mesh_and_placements(tensor)
    return fragments_on(tuple(tensor.shape), mesh, placements, torch.distributed.get_rank())


def _mesh_and_placements(tensor: DTensor) -> tuple[Mesh, tuple[AxisPlacement, ...]]:
    """Return our mesh and placements of a DTensor, whose local tensor has the shape that they imply."""
    rank = torch.distributed.get_rank()
    mesh = _convert_mesh(tensor.device_mesh)
    placements, expected = _placements_and_shape(tensor.shape, mesh, tensor.placements, rank)
    actual = tuple(tensor._local_tensor.shape)  # to_local() makes a view for autograd, which costs most of the time
    if expected is not None and actual != expected:
        raise LayoutError(
            f"rank {rank} holds a local tensor of shape {actual}, but placements {tensor.placements} of a tensor of "
            f"shape {tuple(tensor.shape)} on mesh {mesh.shape} imply {expected}. If Megatron-FSDP has sharded it, give "
            "Muon layout=layouts(model) and call attach(optimizer, model), both of muonckpt.optimizer.megatron_fsdp, "
            "before state_dict()"
        )
    return mesh, placements


@lru_cache(maxsize=65536)
def _placements_and_shape(
    shape: torch.Size, mesh: Mesh, placements: tuple[TorchPlacement, ...], rank: int
) -> tuple[tuple[AxisPlacement, ...], Index | None]:
    """Return our placements, and the shape of a rank's local tensor; None if it is not on the mesh.

    Cached by what torch calls equal: a model has thousands of equal tensors.
    """
    if len(placements) != len(mesh.shape):
        raise LayoutError(
            f"expected a placement for each axis of mesh {mesh.shape}, found {placements} of a tensor of shape "
            f"{tuple(shape)}. Where Megatron-FSDP has replicas and shards nothing, let it shard optimizer states"
        )
    axis_placements = tuple(_convert_placement(placement, len(shape)) for placement in placements)
    local = local_shape(tuple(shape), mesh, axis_placements, rank) if rank in mesh.ranks else None
    return axis_placements, local


_meshes: WeakKeyDictionary[DeviceMesh, Mesh] = WeakKeyDictionary()
"""Weak, as a mesh keeps its process groups alive, and with them their threads."""


def _convert_mesh(mesh: DeviceMesh) -> Mesh:
    cached = _meshes.get(mesh)
    if cached is None:
        cached = _meshes[mesh] = Mesh(tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()))
    return cached


def _convert_placements(tensor: DTensor) -> tuple[AxisPlacement, ...]:
    return tuple(_convert_placement(placement, tensor.ndim) for placement in tensor.placements)


def _convert_placement(placement: TorchPlacement, ndim: int) -> AxisPlacement:
    match placement:
        case TorchStridedShard():
            return StridedShard(placement.dim % ndim, int(placement.split_factor))
        case TorchShard():
            return Shard(placement.dim % ndim)
        case TorchReplicate():
            return Replicate()
        case Partial():
            raise LayoutError(
                "a Partial tensor holds terms of a sum, not elements: reduce it first "
                "(tensor.redistribute(placements=[Replicate()]) or [Shard(dim)])"
            )
    raise LayoutError(f"unknown placement {placement!r}; expected Shard, _StridedShard or Replicate")
