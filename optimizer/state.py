"""The optimizer's state: how it begins, its checks, and how it follows a parameter that is replaced.

Frameworks such as accelerate replace the parameters of groups by sharded ones, cast or move a model, or materialise
one from the meta device.  Such a parameter gets new state, into which the former state is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from operator import is_, sub
from pickle import PicklingError
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ..algebra.box import Box, Index, row_major
from ..algebra.layout import TensorLayout
from ..layouts.boxed_tensor import BoxedTensor, parts_of
from ..layouts.tensors import declares_boxes, local_of, zeros_sharded_like
from ..names.errors import ArgumentError, LayoutError
from ..names.vocabulary import AVERAGES, FLATTEN, MOMENTUM, MOMENTUM_DTYPE, STATE_DTYPE
from .methods.form import MatrixMethod
from .methods.matrix import fused_of, method_slots
from .methods.scalar import SCALARS, average_dtype
from .planning.matrices import matrices_of


def fresh_state(
    param: Tensor, layout: TensorLayout, group: dict[str, Any], method: MatrixMethod | None
) -> dict[str, Tensor]:
    """Return the state beside a parameter that has not been stepped; raise ArgumentError if it never could be.

    Args:
        method: None for element-wise algorithms.
    """
    if not param.is_floating_point():
        raise ArgumentError(f"expected a real floating-point parameter, got {param.dtype}, shape {tuple(param.shape)}")
    if param.dtype.itemsize < 2:
        raise ArgumentError(
            f"a parameter of shape {tuple(param.shape)} is {param.dtype}: no update is large enough to be seen there; "
            "train weights of 16 bits or more, and cast the 8-bit ones from them"
        )
    dtype = average_dtype(param, group)
    if method is None:
        return SCALARS[group["algorithm"]].fresh(param, dtype)
    matrices_of(layout.shape, fused_of(group))  # refuses pieces that do not add up
    state: dict[str, Tensor] = {}
    if method.averages:
        state[MOMENTUM] = torch.zeros_like(param, dtype=dtype, memory_format=torch.contiguous_format)
    # Slots of the method, in the layout of the parameter or sharded as its rows or columns are.
    for name, (slot, reduced) in method_slots(tuple(param.shape), group, method).items():
        if slot.shape == "[m, n]":
            zeros = torch.zeros_like(param, dtype=slot.dtype, memory_format=torch.contiguous_format)
        else:
            zeros = zeros_sharded_like(param, reduced.shape, slot.dtype or param.dtype)
        state[name] = zeros
    return state


class DeclaredBoxes(BoxedTensor):
    """The boxes of a DTensor's local tensor, views of it; a deep copy of that tensor has views of its own memory."""

    def __deepcopy__(self, memo: dict[int, Any]) -> DeclaredBoxes:
        return type(self)(self.shape, deepcopy(dict(self.parts), memo), self.dtype, self.device)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise PicklingError(
            f"each rank has other boxes of a tensor of shape {tuple(self.shape)}, and one rank's file would be a part: "
            f"do not pickle this optimizer's state_dict() (torch.save); {_SAVE_ON_ALL}"
        )

    def refuse_gathering(self, *_: object, **__: object) -> NoReturn:
        """Replace `full_tensor` and `redistribute`, which would take the boxes for even shards."""
        raise LayoutError(
            f"each rank has other boxes of a tensor of shape {tuple(self.shape)}, which torch cannot gather "
            f"(full_tensor(), StateDictOptions(full_state_dict=True)): {_SAVE_ON_ALL}"
        )


_SAVE_ON_ALL = "save it on all ranks, by muonckpt.save or torch.distributed.checkpoint"


def declare_boxes(dtensor: Any, boxes: Sequence[Box]) -> None:
    """Put DCP's hooks on a local tensor, whose boxes lie dense, one after the other; none if it is empty."""
    local, parts, offset = dtensor._local_tensor, {}, 0
    for box in boxes:
        parts[box.lo] = local.view(-1)[offset : offset + box.numel].view(box.shape)
        offset += box.numel
    declared = DeclaredBoxes(dtensor.shape, parts, local.dtype, local.device)
    local.__create_chunk_list__ = declared.__create_chunk_list__
    local.__create_write_items__ = declared.__create_write_items__
    local.__get_tensor_shard__ = declared.__get_tensor_shard__
    dtensor.full_tensor = dtensor.redistribute = declared.refuse_gathering


def boxed_dtensor(local: Tensor, mesh: DeviceMesh, shape: Index, boxes: Sequence[Box]) -> DTensor:
    """Return a DTensor of a global shape, and declare the boxes of its local tensor."""
    dtensor: DTensor = DTensor.from_local(
        local, mesh, [Shard(0)] * mesh.ndim, run_check=False, shape=torch.Size(shape), stride=row_major(shape)
    )
    declare_boxes(dtensor, boxes)
    return dtensor


def check_state(
    param: Tensor,
    layout: TensorLayout,
    group: Mapping[str, Any],
    state: Mapping[str, Tensor],
    method: MatrixMethod | None,
) -> None:
    """Raise ArgumentError for options that need state of another shape or dtype than a parameter has."""
    expected = {slot: (param.shape, average_dtype(param, group)) for slot in AVERAGES if slot in state}
    options = [MOMENTUM_DTYPE, STATE_DTYPE]
    if method is not None:
        matrices_of(layout.shape, fused_of(group))  # refuses pieces that do not add up
        for name, (slot, reduced) in method_slots(tuple(param.shape), group, method).items():
            expected[name] = torch.Size(reduced.shape), slot.dtype or param.dtype
        options += ["columns", FLATTEN, *method.options]
    for name, kind in expected.items():
        tensor = state.get(name)
        if tensor is None or (tensor.shape, tensor.dtype) != kind:
            given = ", ".join(f"{option}={group[option]!r}" for option in options if option in group)
            found = "missing" if tensor is None else f"{tuple(tensor.shape)}, {tensor.dtype}"
            raise ArgumentError(
                f"a parameter of shape {tuple(param.shape)}: the options of its group ({given}) need a {name} of shape "
                f"{tuple(kind[0])}, {kind[1]}, and it is {found}: they cannot change once there is state; build a new "
                "optimizer, and load the state into it"
            )


def tensor_misfit(tensor: Tensor, loaded: Any) -> str | None:
    """Return why a loaded tensor cannot replace one of the state, in words that follow its slot, or None."""
    if not isinstance(loaded, Tensor) or not has_same_layout(loaded, tensor):
        return f"is {describe_layout(loaded)}, expected {describe_layout(tensor)}"
    if declares_boxes(tensor) and local_of(loaded).shape != local_of(tensor).shape:
        return CUT_OTHERWISE
    return None


CUT_OTHERWISE = "is cut otherwise; load it through a checkpoint"


def has_same_layout(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same shape, mesh and placements."""
    if not isinstance(a, DTensor):
        return a.shape == b.shape and not isinstance(b, DTensor)
    same_mesh = isinstance(b, DTensor) and a.device_mesh == b.device_mesh and a.placements == b.placements
    return same_mesh and a.shape == b.shape


def describe_layout(value: Any) -> str:
    """Describe a tensor's shape, and a DTensor's mesh and placements, for messages."""
    shape = tuple(getattr(value, "shape", ()))
    if isinstance(value, DTensor):
        return f"{shape} as {value.placements} on mesh {value.device_mesh.mesh.tolist()}"
    return f"{shape}, not distributed" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def refuse_meta(params: Iterable[Tensor]) -> None:
    """Raise RuntimeError for a parameter on the meta device."""
    for param in params:
        if param.is_meta:
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} is on the meta device and has no values. A model that is "
                "materialised (to_empty) has other parameters: build the optimizer after that"
            )


def check_gradients(params: Iterable[Tensor], gradients: Iterable[Tensor | None]) -> None:
    """Raise RuntimeError for a gradient that is sparse, or not laid out exactly as its parameter."""
    for param, gradient in zip(params, gradients, strict=True):
        if gradient is None:
            continue
        if gradient.is_sparse:
            raise RuntimeError(
                f"Muon does not take sparse gradients, as of the parameter of shape {tuple(param.shape)}. Write "
                "nn.Embedding(..., sparse=False)"
            )
        if not has_same_layout(gradient, param):
            actual, expected = describe_layout(gradient), describe_layout(param)
            raise RuntimeError(f"a gradient is {actual}, its parameter {expected}; redistribute the gradient first")


TensorKind = tuple[torch.Size, torch.dtype, torch.device]


def _kind_of(tensor: Tensor) -> TensorKind:
    return tensor.shape, tensor.dtype, tensor.device


@dataclass(frozen=True, slots=True, eq=False)
class GroupSnapshot:
    """The parameters of a group when their state was made, their kinds then, and the slots that all of them have."""

    params: Sequence[Tensor]
    kinds: Sequence[TensorKind]
    slots: frozenset[str]

    @classmethod
    def of(cls, params: Iterable[Tensor], state: Mapping[Tensor, Mapping[str, Tensor]]) -> GroupSnapshot:
        params = tuple(params)
        return cls(params, [*map(_kind_of, params)], frozenset(state[params[0]] if params else ()))

    def is_current(self, params: Sequence[Tensor]) -> bool:
        """Return whether these are the same parameters, unchanged."""
        return (
            len(params) == len(self.params)
            and all(map(is_, params, self.params))
            and [*map(_kind_of, params)] == self.kinds
        )


@dataclass(frozen=True, slots=True, eq=False)
class ParameterChange:
    """A parameter that has replaced another in a group, or that has another shape, dtype or device now."""

    group: int
    name: str
    former: Tensor
    current: Tensor


def find_changes(snapshots: Sequence[GroupSnapshot], groups: Sequence[Mapping[str, Any]]) -> Iterator[ParameterChange]:
    """Yield the parameters that were replaced or changed since their state was made.

    Replaced ones are matched by their order.

    Raises:
        ArgumentError: there are other groups than there were, or a group has another number of parameters.
    """
    if len(snapshots) != len(groups):
        raise ArgumentError(
            f"the optimizer had {len(snapshots)} parameter groups, and now it has {len(groups)}: {_KEEP_GROUPS}"
        )
    for number, (snapshot, group) in enumerate(zip(snapshots, groups, strict=True)):
        params = group["params"]
        if snapshot.is_current(params):
            continue
        # The group must have its members, and as many.
        members = set(map(id, params))
        for former_number, former_group in enumerate(snapshots):
            if former_number != number and not members.isdisjoint(map(id, former_group.params)):
                raise ArgumentError(f"group {number} has parameters that were in group {former_number}: {_KEEP_GROUPS}")
        if len(snapshot.params) != len(params):
            raise ArgumentError(
                f"group {number} had {len(snapshot.params)} parameters, and now it has {len(params)}: add parameters "
                "with add_param_group(), and keep those that are not to be trained, with requires_grad_(False)"
            )
        # New parameters take the place of removed ones, in order.
        former_kinds = dict(zip(map(id, snapshot.params), snapshot.kinds, strict=True))
        replaced = iter([former for former in snapshot.params if id(former) not in members])
        for index, param in enumerate(params):
            former = param if id(param) in former_kinds else next(replaced)
            if former is not param or former_kinds[id(param)] != _kind_of(param):
                yield ParameterChange(group=number, name=_name_of(group, number, index), former=former, current=param)


_KEEP_GROUPS = (
    "put param_groups back as they were. Add groups with add_param_group(), and keep those that are not to be trained, "
    "with requires_grad_(False) for their parameters: schedulers and checkpoints know groups by their numbers"
)


def _name_of(group: Mapping[str, Any], number: int, index: int) -> str:
    return (
        f"parameter {group['param_names'][index]!r}"
        if "param_names" in group
        else f"parameter {index} of group {number}"
    )


@dataclass(frozen=True, slots=True, eq=False)
class SlotSnapshot:
    """The slots of all parameters at one time, and how many each had."""

    params: Sequence[Tensor] = ()
    slots: Sequence[Mapping[str, Tensor]] = ()
    counts: Sequence[int] = ()

    @classmethod
    def of(cls, state: Mapping[Tensor, Mapping[str, Tensor]]) -> SlotSnapshot:
        slots = tuple(state.values())
        return cls(tuple(state), slots, [*map(len, slots)])

    def is_current(self, state: Mapping[Tensor, Mapping[str, Tensor]]) -> bool:
        """Return whether these are the same slots, with none less or more: without looking parameters up."""
        return (
            isinstance(state, dict)
            and len(state) == len(self.slots)
            and all(map(is_, state.values(), self.slots))
            and [*map(len, self.slots)] == self.counts
        )


def find_cleared(
    snapshots: Sequence[GroupSnapshot],
    slot_snapshot: SlotSnapshot,
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[Tensor, Mapping[str, Tensor]],
) -> Iterator[tuple[Tensor, int]]:
    """Yield the parameters that have no state any more, with the numbers of their groups.

    Raises:
        ArgumentError: a parameter has only a part of its state, or a slot is of another kind than it was.
    """
    if not isinstance(state, Mapping):
        raise ArgumentError(
            f"optimizer.state is a {type(state).__name__}, expected a dict. To let all state begin from zero write "
            "optimizer.state = {}"
        )
    former_slots = dict(zip(slot_snapshot.params, slot_snapshot.slots, strict=True))
    for number, (snapshot, group) in enumerate(zip(snapshots, groups, strict=True)):
        for index, param in enumerate(snapshot.params):
            name, current = _name_of(group, number, index), state.get(param, {})
            if not isinstance(current, Mapping):
                raise ArgumentError(
                    f"the state of {name} is a {type(current).__name__}, expected a dict. To let it begin from zero "
                    "write optimizer.state.pop(parameter)"
                )
            # All slots, or none.
            slots = {slot for slot in snapshot.slots & current.keys() if isinstance(current[slot], Tensor)}
            if slots and slots != snapshot.slots:
                raise ArgumentError(
                    f"{name} has lost {sorted(snapshot.slots - slots)} of its state and kept {sorted(slots)}: expected "
                    "all or none. To let it begin from zero write optimizer.state.pop(parameter)"
                )
            if snapshot.slots and not slots:
                yield param, number
            # Slots of another dict must be as the former ones were.
            former = former_slots.get(param, current)
            for slot in sorted(slots & former.keys()) if former is not current else ():
                kind, former_kind = _kind_of(current[slot]), _kind_of(former[slot])
                if kind != former_kind:
                    raise ArgumentError(
                        f"{slot} of {name} was replaced by one of {_describe_kind(kind)}, expected "
                        f"{_describe_kind(former_kind)}: cast it, or to let it begin from zero write "
                        "optimizer.state.pop(parameter)"
                    )


def _describe_kind(kind: TensorKind) -> str:
    shape, dtype, device = kind
    return f"shape {tuple(shape)}, {str(dtype).removeprefix('torch.')}, on {device}"


def carry_over(change: ParameterChange, former: Mapping[str, Tensor], current: Mapping[str, Tensor]) -> None:
    """Copy a parameter's former state to its new state; raise LayoutError if this rank does not hold all of it."""
    for slot, target in current.items():
        source = former[slot]
        if source.is_meta:
            continue  # it never had values
        # Copy what this rank has of each part of the new layout.
        num_missing = int(source.shape != target.shape)
        for corner, part in parts_of(target).items() if not num_missing else ():
            box = Box.of(part.shape).shift(corner)
            num_missing += box.numel
            for source_corner, source_part in parts_of(source).items():
                common = box & Box.of(source_part.shape).shift(source_corner)
                if common is not None:
                    _view(part, corner, common).copy_(_view(source_part, source_corner, common))
                    num_missing -= common.numel
        if num_missing:
            raise LayoutError(
                f"{change.name} was replaced after it had been stepped: its {slot} is {describe_layout(source)} and "
                f"belongs {describe_layout(target)} now, which this rank cannot make from what it holds. Save a "
                "checkpoint before the change and load it afterwards, or build the optimizer when the model is sharded"
            )


def _view(part: Tensor, corner: Index, box: Box) -> Tensor:
    """Return the view of a box in a part that begins at a corner."""
    starts = map(sub, box.lo, corner)
    return part[tuple(slice(start, start + size) for start, size in zip(starts, box.shape, strict=True))]
