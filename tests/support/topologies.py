"""Where parameters can live: on meshes of one to three axes, on parts of a mesh, whole on all ranks; or a mixture."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

NAMES = "xyz"
"""Of mesh axes: nothing depends on them."""


@dataclass(frozen=True)
class Home:
    """Where parameters live: on a mesh, or on some axes of it, and what each of these does to them."""

    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]
    axes: str = ""

    def opened(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """What puts a tensor there.  A dim that the tensor does not have is its last one."""
        mesh = init_device_mesh("cpu", self.mesh, mesh_dim_names=tuple(NAMES[: len(self.mesh)]))
        mesh = mesh[tuple(self.axes)] if self.axes else mesh

        def place(tensor: torch.Tensor) -> torch.Tensor:
            fit = [Shard(min(p.dim, tensor.ndim - 1)) if type(p) is Shard else p for p in self.placements]
            return distribute_tensor(tensor, mesh, fit, src_data_rank=None)

        return place

    def __str__(self) -> str:
        placement_of_axis = {axis: str(p) for axis, p in zip(self.axes or NAMES, self.placements, strict=False)}
        named = ", ".join(
            f"{size}: {placement_of_axis.get(axis, '–')}" for axis, size in zip(NAMES, self.mesh, strict=False)
        )
        return named.replace("_StridedShard(dim=0, sf=2)", "_StridedShard(0, 2)")


S, R, STRIDED = Shard, Replicate(), _StridedShard(0, split_factor=2)
PLAIN = None
"""A tensor of this process alone, or of DDP."""

TOPOLOGIES: dict[str, tuple[Home | None, ...]] = {
    "FSDP2, rows": (Home((4,), (S(0),)),),
    "FSDP2, rows, 3 ranks": (Home((3,), (S(0),)),),
    "FSDP2, columns": (Home((3,), (S(1),)),),
    "HSDP": (Home((2, 2), (R, S(0))),),
    "HSDP, replicas inside": (Home((2, 2), (S(0), R)),),
    "tensor parallel, columns or rows": (Home((4,), (S(1),)), Home((4,), (S(0),))),
    "FSDP2 × TP": (Home((2, 2), (STRIDED, S(0))),),
    "FSDP2 × TP, crosswise": (Home((2, 2), (S(0), S(1))),),
    "FSDP2 × TP on 6 ranks": (Home((3, 2), (STRIDED, S(0))), Home((3, 2), (S(0), S(1)))),
    "HSDP × TP": (Home((2, 2, 2), (R, STRIDED, S(0))),),
    "EP, and dense parameters in replicas": (Home((4,), (S(0),)), Home((4,), (R,))),
    "EP × FSDP2, both cut experts": (Home((2, 2), (S(0), S(0))),),
    "EP × FSDP2, rows": (Home((2, 2), (S(0), S(1))),),
    "EP × FSDP2, columns, 6 ranks": (Home((3, 2), (S(0), S(2))),),
    "EP × HSDP": (Home((2, 2, 2), (S(0), R, S(1))),),
    "replicas on both axes": (Home((2, 2), (R, R)),),
    "parts on different meshes": (
        Home((4,), (S(0),)),
        Home((2, 2), (S(1), S(0))),
        Home((2, 2), (S(0),), axes="y"),
        Home((2, 2), (S(0),), axes="x"),
    ),
    "DDP": (PLAIN,),
    "plain and sharded in one group": (PLAIN, Home((2, 2), (S(0), S(1)))),
}

HARD = (
    "FSDP2, rows, 3 ranks",
    "HSDP, replicas inside",
    "HSDP × TP",
    "EP × FSDP2, columns, 6 ranks",
    "parts on different meshes",
    "plain and sharded in one group",
)
"""Among these is every placement, every number of axes, shards of unequal sizes, and several homes in one optimizer."""


def world_of(homes: tuple[Home | None, ...]) -> int:
    return max((math.prod(home.mesh) for home in homes if home), default=3)


def placer(homes: tuple[Home | None, ...]) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """What puts the tensor of this number into its home; homes are used in turn."""
    places = [home.opened() if home else lambda tensor: tensor for home in homes]
    return lambda index, tensor: places[index % len(places)](tensor)


def part_of(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()
