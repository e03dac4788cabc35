"""State follows its parameters, whatever a framework does to these between construction and a step.

Frameworks such as accelerate replace the parameters of groups by sharded ones, cast a model, move it to a device, or
give values to one that was built on the meta device.  The state of such a parameter is made anew, and what the former
one holds is copied to where its elements lie now.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..layout import Place
from ..layouts.tensors import layout_of, local_of
from ..plan import make_share
from .state import placing


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """The parameters of a group as they were when their state was made: each with its shape, dtype and device."""

    params: Sequence[Tensor]
    kinds: Sequence[tuple[torch.Size, torch.dtype, torch.device]]

    @classmethod
    def of(cls, params: Iterable[Tensor]) -> Seen:
        params = tuple(params)
        return cls(params, _kinds(params))

    def still(self, params: Sequence[Tensor]) -> bool:
        """Whether these are the parameters, as they were."""
        same = len(params) == len(self.params) and all(map(is_, params, self.params))
        return same and _kinds(params) == self.kinds


def _kinds(params: Sequence[Tensor]) -> list[tuple[torch.Size, torch.dtype, torch.device]]:
    return [(param.shape, param.dtype, param.device) for param in params]


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """A parameter that has taken the place of another in a group, or that is no longer as it was."""

    group: int
    name: str
    former: Tensor
    current: Tensor


def changes(seen: Sequence[Seen], groups: Sequence[Mapping[str, Any]]) -> list[Change]:
    """What has become of the parameters that state was made for.

    Replaced ones are matched by their order among those of their group that were replaced.

    Raises:
        ValueError: a group has more or fewer parameters than it had.
    """
    return [
        change
        for number, (former, group) in enumerate(zip(seen, groups, strict=True))
        for change in _changes(number, former, group)
    ]


def _changes(number: int, seen: Seen, group: Mapping[str, Any]) -> Iterator[Change]:
    params = group["params"]
    if seen.still(params):
        return
    if len(seen.params) != len(params):
        raise ValueError(
            f"group {number} had {len(seen.params)} parameters, and now it has {len(params)}: add parameters with "
            "add_param_group(), and keep those that are not to be trained, with requires_grad_(False)"
        )
    kinds, current = dict(zip(map(id, seen.params), seen.kinds, strict=True)), set(map(id, params))
    replaced = iter([former for former in seen.params if id(former) not in current])
    for index, (param, kind) in enumerate(zip(params, _kinds(params), strict=True)):
        former = param if id(param) in kinds else next(replaced)
        if former is not param or kinds[id(param)] != kind:
            name = repr(group["param_names"][index]) if "param_names" in group else f"{index} of group {number}"
            yield Change(number, f"parameter {name}", former, param)


def carry_over(change: Change, former: Mapping[str, Tensor], current: Mapping[str, Tensor]) -> None:
    """Copy what a parameter's state holds to the state that was made anew for it, in its dtype.

    Only for state that was stepped or loaded.  That this rank's part is zeros does not tell: other ranks may hold more.

    Raises:
        ValueError: the shapes differ, or other ranks hold what belongs here now.
    """
    for slot, target in current.items():
        source = former[slot]
        if source.is_meta:
            continue  # it never had values
        if source.shape != target.shape or not _copied(source, target):
            raise ValueError(
                f"{change.name} was replaced after it had been stepped: its {slot} is {placing(source)} and belongs "
                f"{placing(target)} now, which this rank cannot make from what it holds. Save a checkpoint before the "
                "change and load it afterwards, or build the optimizer when the model is sharded"
            )


def _copied(source: Tensor, target: Tensor) -> bool:
    """Copy this rank's part of a tensor to another place; False if this rank does not hold all of it."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    meshes = [tensor.device_mesh for tensor in (target, source) if isinstance(tensor, DTensor)]
    everywhere = tuple(meshes[0].mesh.flatten().tolist()) if meshes else (rank,)
    takes = make_share(layout_of(source, everywhere), layout_of(target, (rank,)), rank).takes
    if any(copy.source.buffer != rank for copy in takes):
        return False
    for copy in takes:
        _view(target, copy.target, copy.box.shape).copy_(_view(source, copy.source, copy.box.shape))
    return True


def _view(tensor: Tensor, place: Place, shape: Sequence[int]) -> Tensor:
    local = local_of(tensor)
    return local.as_strided(shape, place.strides, local.storage_offset() + place.offset)
