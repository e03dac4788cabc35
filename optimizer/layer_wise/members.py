"""What layer-wise training asks of a model: names, who shares a parameter with whom, and what cannot be managed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...layouts.buffers.buffer_layout import BufferLayout
from ...layouts.buffers.parameters import GroupSizes, Parameter
from ...layouts.buffers.placements import ToPlace
from ...layouts.buffers.records import to_json
from ..methods.matrix import MATRICES
from ..step.agreement import Facts, fixed_options

SharingGroup = dist.ProcessGroup | None
"""None: this process alone."""


@dataclass(frozen=True, slots=True)
class Members:
    """The parameters of some groups of a model, in its order.

    Attributes:
        named: parameters by name.
        name_of: names by parameter.
        group_of: who shares each, by name.
        experts: names of those of experts.
        sizes: of the two process groups.
    """

    named: Mapping[str, Tensor]
    name_of: Mapping[Tensor, str]
    group_of: Mapping[str, SharingGroup]
    experts: frozenset[str]
    sizes: GroupSizes

    @classmethod
    def of(
        cls,
        model: nn.Module,
        groups: Sequence[Mapping[str, Any]],
        group: SharingGroup,
        experts: Iterable[Tensor],
        expert_group: SharingGroup,
    ) -> Members:
        """Return the parameters in ``groups``, with their names in the model.

        Raises:
            ValueError: a parameter is not the model's, is in no group, or cannot lie in flat buffers.
        """
        grouped = {id(param) for group in groups for param in group["params"]}
        named = {name: param for name, param in model.named_parameters() if id(param) in grouped}
        if len(named) < len(grouped):
            raise ValueError(f"{len(grouped) - len(named)} parameters in the groups are not the model's")
        if left := [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in grouped]:
            raise ValueError(f"parameters in no group, whose gradients would not be reduced: {', '.join(left[:8])}")
        for name, param in named.items():
            _check(name, param)
        name_of: dict[Tensor, str] = {param: name for name, param in named.items()}
        experts = list(experts)
        if strangers := [tuple(param.shape) for param in experts if param not in name_of]:
            raise ValueError(f"experts that are in no group: of shapes {strangers[:8]}")
        expert = frozenset(name_of[param] for param in experts)
        if expert and expert_group is None and dist.is_initialized():
            raise ValueError("experts need an expert_group: the ranks that hold the same ones")
        group_of = {name: expert_group if name in expert else group for name in named}
        return cls(named, name_of, group_of, expert, GroupSizes(size_of(group), size_of(expert_group)))

    def to_place(
        self,
        groups: Sequence[Mapping[str, Any]],
        bucket_size: int | None,
        previous: Mapping[str, int | None] | None,
    ) -> ToPlace:
        """Return what a placement has to know of the parameters, given complete groups."""
        own = [tuple(self.name_of[param] for param in group["params"]) for group in groups]
        matrices = [names for names, group in zip(own, groups, strict=True) if group["algorithm"] in MATRICES]
        return ToPlace(
            tuple(
                Parameter(name, tuple(param.shape), _dtype_name(param), expert=name in self.experts)
                for name, param in self.named.items()
            ),
            frozenset(name for names in matrices for name in names),
            self.sizes,
            groups=tuple(own),
            bucket_size=bucket_size,
            previous=previous,
        )

    def facts(self, groups: Sequence[Mapping[str, Any]], buffers: Sequence[BufferLayout]) -> Facts:
        """Return what must be the same on all ranks, given complete groups."""
        in_group = {self.name_of[param]: number for number, group in enumerate(groups) for param in group["params"]}
        about = {name: f"{tuple(param.shape)} {param.dtype}" for name, param in self.named.items()}
        numbers = {f"parameter {name}": f"{about[name]}, in group {in_group[name]}" for name in self.named}
        # Also what decides on them: the names of a layout's algorithm, sizes of buckets, owners of before.
        digest = hashlib.blake2b(json.dumps([*map(to_json, buffers)]).encode(), digest_size=8).hexdigest()
        return {**numbers, **fixed_options(dict(enumerate(groups))), "the layout of buffers": digest}

    def group_of_buffer(self, buffer: BufferLayout) -> SharingGroup:
        """Return the group of those who share a buffer's parameters."""
        return self.group_of[buffer.parameters[0].parameter.name]

    def mesh(self, group: SharingGroup) -> DeviceMesh | None:
        """Return the ranks of a group, for DTensors; makes no process group."""
        if group is None:
            return None
        return DeviceMesh.from_group(group, next(iter(self.named.values())).device.type)


def groups_with(stepped: Mapping[Tensor, Tensor], groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return parameter groups with other tensors in place of the parameters, or with nothing."""
    return [
        {**options_of(group), "params": [stepped[param] for param in group["params"] if param in stepped]}
        for group in groups
    ]


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group, without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def size_of(group: SharingGroup) -> int:
    return dist.get_world_size(group) if group is not None else 1


def this_rank() -> int:
    """Return this process's rank in the world."""
    return dist.get_rank() if dist.is_initialized() else 0


def ranks_in(group: SharingGroup) -> list[int]:
    """Return a group's global ranks, in its order."""
    return list(dist.get_process_group_ranks(group)) if group is not None else [0]


def _dtype_name(param: Tensor) -> str:
    return str(param.dtype).removeprefix("torch.")


def _check(name: str, param: Tensor) -> None:
    about = f"parameter {name!r}, {param.dtype} of shape {tuple(param.shape)}"
    if type(param.data) is not Tensor:
        raise ValueError(
            f"{about}: a {type(param.data).__name__}; layer-wise buffers hold plain tensors, of data parallelism "
            "only. Muon steps DTensors"
        )
    if not param.is_floating_point() or param.dtype.itemsize < 2:
        raise ValueError(f"{about}: FP8 and FP4 parameters cannot be gathered; keep parameters in 16 bits or more")
    if not param.requires_grad:
        raise ValueError(f"{about}: frozen; leave it out of the groups")
    if not param.ndim or not param.numel():
        raise ValueError(f"{about}: give it a dim and an element, as sharded data parallelism demands as well")
    if getattr(param, "_post_accumulate_grad_hooks", None):
        raise ValueError(
            f"{about}: its gradients go elsewhere already (FSDP, or another LayerWise, which has a close()); several "
            "optimizer instances for one model are not supported"
        )
