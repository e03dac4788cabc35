"""Parts of tensors as placements distribute them, index by index, on meshes of any ranks."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(1.0, prod(shape) + 1).reshape(shape)


def strided(dim: int, split: int) -> _StridedShard:
    return _StridedShard(dim, split_factor=split)


def chunks(indices: list[int], count: int) -> list[list[int]]:
    size = -(-len(indices) // count)
    return [indices[size * number : size * (number + 1)] for number in range(count)]


def part_of(whole: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Tensor:
    """What this rank holds: placements take from what those before them have left; nothing if it is not on the mesh."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return whole.new_empty(0)
    for dim, size in enumerate(whole.shape):
        ranks_left = list(range(size))
        for parts, part_number, placement in zip(mesh.shape, coordinate, placements, strict=True):
            if placement.is_replicate() or placement.dim != dim:
                continue
            split = placement.split_factor if isinstance(placement, _StridedShard) else 1
            ranks_left = [index for group in chunks(ranks_left, split) for index in chunks(group, parts)[part_number]]
        whole = whole.index_select(dim, torch.tensor(ranks_left, dtype=torch.long))
    return whole


def placed(whole: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """A tensor on a mesh, with memory of its own."""
    dtensor: DTensor = DTensor.from_local(
        part_of(whole, mesh, placements).clone(),
        mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    return dtensor
