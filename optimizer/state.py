"""The optimizer's state: how it begins, its checks, and how it follows a parameter that is replaced.

Frameworks such as accelerate replace the parameters of groups by sharded ones, cast or move a model, or materialise
one from the meta device.  Such a parameter gets new state, into which the former state is copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ..algebra.box import Box, row_major
from ..algebra.layout import TensorLayout
from ..algebra.plan import make_share
from ..layouts.boxed_tensor import Parts, parts_of
from ..layouts.tensors import declares_boxes, layout_of, local_of, zeros_sharded_like
from ..names.state_forms import AVERAGES, stored_parts
from ..names.vocabulary import MOMENTUM
from .ground.codecs import codec_of, detect_codec, in_a_dim, stored_slots
from .ground.dcp_hooks import declare_boxes
from .methods.form import MatrixMethod
from .methods.matrix import fused_of, method_slots
from .methods.scalar import SCALARS, fresh_average
from .planning.matrices import Reduced, matrices_of


def fresh_state(
    param: Tensor, layout: TensorLayout, group: dict[str, Any], method: MatrixMethod | None
) -> dict[str, Tensor]:
    """Return the state that rests with a parameter which has not been stepped; refuses what could not be stepped later.

    Args:
        method: None for element-wise algorithms.
    """
    if not param.is_floating_point():
        raise ValueError(f"expected a real floating-point parameter, got {param.dtype} of shape {tuple(param.shape)}")
    if param.dtype.itemsize < 2:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} is {param.dtype}: no update is large enough to be seen there; "
            "train parameters of 16 bits or more, and make the 8-bit ones of them"
        )
    codec = codec_of(group)
    if method is None:
        return SCALARS[group["algorithm"]].fresh(param, codec)
    matrices_of(layout.shape, fused_of(group))
    state: dict[str, Tensor] = {}
    if method.averages:
        state |= fresh_average(param, MOMENTUM, codec)
    for slot, (kept, reduced) in method_slots(tuple(param.shape), group, method).items():
        dtype = kept.dtype or param.dtype
        if kept.shape == "[m, n]" and not kept.at_owner:
            state[slot] = torch.zeros_like(param, dtype=dtype, memory_format=torch.contiguous_format)
        elif not kept.at_owner:
            state[slot] = zeros_sharded_like(param, reduced.shape, dtype)
    return state


def owned_boxes(reduced: Reduced, owners: Sequence[int], rank: int) -> list[Box]:
    """Return the boxes that a rank has of a slot which rests at the owners of a parameter's matrices."""
    matrices = zip(matrices_of(reduced.shape, reduced.fused), owners, strict=True)
    return [piece.box for pieces, owner in matrices if owner == rank for piece in pieces]


def owned_state(
    param: Tensor,
    group: Mapping[str, Any],
    method: MatrixMethod,
    owners: Sequence[int],
    replicas: dist.ProcessGroup | None,
) -> dict[str, Tensor]:
    """Return the state of a parameter that rests at its owners, as zeros: matrix after matrix, each row by row.

    It is a DTensor on the mesh of the parameter, or of the ``replicas`` that share a plain one; `declare_owned` says
    where its boxes are.  What no other rank holds is a plain tensor.
    """
    mesh = param.device_mesh if isinstance(param, DTensor) else None
    if mesh is None and replicas is not None and dist.get_world_size(replicas) > 1:
        mesh = DeviceMesh.from_group(replicas, param.device.type)
    state: dict[str, Tensor] = {}
    for slot, (kept, reduced) in method_slots(tuple(param.shape), group, method).items():
        if not kept.at_owner:
            continue
        shape, dtype = reduced.shape, kept.dtype or param.dtype
        if mesh is None:
            state[slot] = torch.zeros(shape, dtype=dtype, device=param.device)
            continue
        numel = sum(box.numel for box in owned_boxes(reduced, owners, dist.get_rank()))
        here = shape if numel == math.prod(shape) else (numel, *(1,) * (len(shape) - 1))
        state[slot] = DTensor.from_local(
            torch.zeros(here, dtype=dtype, device=param.device),
            mesh,
            [Shard(0)] * mesh.ndim,
            run_check=False,
            shape=torch.Size(shape),
            stride=row_major(shape),
        )
    declare_owned(param, group, method, owners, state)
    return state


def declare_owned(
    param: Tensor,
    group: Mapping[str, Any],
    method: MatrixMethod,
    owners: Sequence[int],
    state: Mapping[str, Tensor],
) -> None:
    """Tell DCP which boxes this rank has of the slots that rest at owners."""
    for slot, (kept, reduced) in method_slots(tuple(param.shape), group, method).items():
        if kept.at_owner and isinstance(value := state[slot], DTensor):
            declare_boxes(value, owned_boxes(reduced, owners, dist.get_rank()))


def check_state(
    param: Tensor, layout: TensorLayout, group: Mapping[str, Any], held: Mapping[str, Tensor], method: MatrixMethod
) -> None:
    """Refuse options of a group of matrices that do not fit a parameter's existing state.

    Raises:
        LayoutError, ValueError: the options do not fit the parameter's shape; they need state of another shape.
    """
    matrices_of(layout.shape, fused_of(group))
    for slot, (kept, reduced) in method_slots(tuple(param.shape), group, method).items():
        own = held.get(slot)
        if own is None or own.shape != reduced.shape or own.dtype != (kept.dtype or param.dtype):
            options = ", ".join(f"{name}={group[name]!r}" for name in ("columns", *method.options))
            actual = "missing" if own is None else f"{own.dtype} {tuple(own.shape)}"
            raise ValueError(
                f"{options} of a parameter of shape {tuple(param.shape)} need a {slot} of shape {reduced.shape}, and "
                f"it is {actual}: they cannot change once there is state; build a new optimizer"
            )


def in_form(mine: Mapping[str, Tensor], loaded: Mapping[str, Any]) -> dict[str, Any]:
    """Return a loaded state with averages stored by the codecs of this state: decoded, and rounded to the nearest.

    What does not fit otherwise stays as it is, for `fault` to say why.
    """
    formed = {**loaded}
    for slot in AVERAGES:
        stored, saved = stored_parts(mine, slot), stored_parts(loaded, slot)
        placings = ({name: placing(value) for name, value in side.items()} for side in (stored, saved))
        if not stored or next(placings) == next(placings) or (exact := _exact(saved, stored)) is None:
            continue
        fresh = {name: torch.zeros_like(like) for name, like in stored.items()}
        kept, *others = (in_a_dim(local_of(value)) for value in fresh.values())
        if (codec := detect_codec(stored)) is not None:
            codec.local_codec([kept, *others]).encode(kept, exact.to(kept.device))
            formed = {name: value for name, value in formed.items() if name not in saved} | fresh
    return formed


def _exact(saved: Mapping[str, Any], stored: Mapping[str, Tensor]) -> Tensor | None:
    """Return this rank's part of a loaded average as float32, in one dim at least; None if it is incomplete, or not
    laid out as it is ``stored`` here.
    """
    tensors = {name: value for name, value in saved.items() if isinstance(value, Tensor)}
    codec = detect_codec(tensors) if len(tensors) == len(saved) else None
    if codec is None:
        return None
    like, first = (next(iter(side.values())) for side in (stored, tensors))
    local, *others = (in_a_dim(local_of(value)) for value in tensors.values())
    if not laid_out_alike(first, like) or local.shape != in_a_dim(local_of(like)).shape:
        return None
    shapes = [shape for shape, _ in stored_slots(codec, "", local).values()]
    if shapes != [tuple(part.shape) for part in (local, *others)]:
        return None
    return codec.local_codec([local, *others]).decode(local)


def as_numbers(value: Any) -> Any:
    """Return a hyper-parameter with tensors as numbers."""
    if isinstance(value, tuple | list):
        return type(value)(map(as_numbers, value))
    return value.item() if isinstance(value, Tensor) else value


def fault(tensor: Tensor, loaded: Any) -> str | None:
    """Return why a loaded tensor cannot replace one of the state, in words that follow its slot, or None."""
    if not isinstance(loaded, Tensor) or not laid_out_alike(loaded, tensor):
        return f"is {placing(loaded)}, expected {placing(tensor)}"
    if declares_boxes(tensor) and local_of(loaded).shape != local_of(tensor).shape:
        return CUT_OTHERWISE
    return None


CUT_OTHERWISE = "is cut otherwise; load it through a checkpoint"


def laid_out_alike(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same shape, mesh and placements."""
    if not isinstance(a, DTensor) or not isinstance(b, DTensor):
        return isinstance(a, DTensor) == isinstance(b, DTensor) and a.shape == b.shape
    return a.shape == b.shape and a.device_mesh == b.device_mesh and a.placements == b.placements


def placing(value: Any) -> str:
    """Describe a tensor's shape, and a DTensor's mesh and placements, for messages."""
    shape = tuple(getattr(value, "shape", ()))
    if isinstance(value, DTensor):
        return f"{shape} as {value.placements} on mesh {value.device_mesh.mesh.tolist()}"
    return f"{shape}, not distributed" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def check_values(params: Iterable[Tensor]) -> None:
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
        if not laid_out_alike(gradient, param):
            actual, expected = placing(gradient), placing(param)
            raise RuntimeError(f"a gradient is {actual}, its parameter {expected}; redistribute the gradient first")


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """The parameters of a group when their state was made: each with its shape, dtype and device, and the names of the
    slots that all have.
    """

    params: Sequence[Tensor]
    kinds: Sequence[tuple[torch.Size, torch.dtype, torch.device]]
    slots: frozenset[str]

    @classmethod
    def of(cls, params: Iterable[Tensor], state: Mapping[Tensor, Mapping[str, Tensor]]) -> Seen:
        params = tuple(params)
        return cls(params, _kinds(params), frozenset(state[params[0]] if params else ()))

    def still(self, params: Sequence[Tensor]) -> bool:
        """Return whether these are the same parameters, unchanged."""
        same = len(params) == len(self.params) and all(map(is_, params, self.params))
        return same and _kinds(params) == self.kinds


def _kinds(params: Sequence[Tensor]) -> list[tuple[torch.Size, torch.dtype, torch.device]]:
    return [(param.shape, param.dtype, param.device) for param in params]


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """A parameter that has replaced another in a group, or that has another shape, dtype or device now."""

    group: int
    name: str
    former: Tensor
    current: Tensor


def changes(seen: Sequence[Seen], groups: Sequence[Mapping[str, Any]]) -> Iterator[Change]:
    """Yield the parameters that were replaced or changed since their state was made.

    Replaced ones are matched by their order among those of their group that were replaced.

    Raises:
        ValueError: there are more or fewer groups than there were, or they are in another order; or a group has more or
            fewer parameters than it had.
    """
    if len(seen) != len(groups):
        raise ValueError(
            f"the optimizer had {len(seen)} parameter groups, and now it has {len(groups)}: {_KEEP_GROUPS}"
        )
    for number, (before, group) in enumerate(zip(seen, groups, strict=True)):
        params = group["params"]
        if before.still(params):
            continue
        members = set(map(id, params))
        for other, place in enumerate(seen):
            if other != number and not members.isdisjoint(map(id, place.params)):
                raise ValueError(f"group {number} has parameters that were in group {other}: {_KEEP_GROUPS}")
        if len(before.params) != len(params):
            raise ValueError(
                f"group {number} had {len(before.params)} parameters, and now it has {len(params)}: add parameters "
                "with add_param_group(), and keep those that are not to be trained, with requires_grad_(False)"
            )
        kinds, current = dict(zip(map(id, before.params), before.kinds, strict=True)), set(map(id, params))
        replaced = iter([former for former in before.params if id(former) not in current])
        for index, (param, kind) in enumerate(zip(params, _kinds(params), strict=True)):
            former = param if id(param) in kinds else next(replaced)
            if former is not param or kinds[id(param)] != kind:
                yield Change(number, _name_of(group, number, index), former, param)


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
class SeenSlots:
    """The slots of all parameters when they were last looked at, and how many each had."""

    params: Sequence[Tensor] = ()
    slots: Sequence[Mapping[str, Tensor]] = ()
    counts: Sequence[int] = ()

    @classmethod
    def of(cls, state: Mapping[Tensor, Mapping[str, Tensor]]) -> SeenSlots:
        slots = tuple(state.values())
        return cls(tuple(state), slots, [*map(len, slots)])

    def still(self, state: Mapping[Tensor, Mapping[str, Tensor]]) -> bool:
        """Return whether these are the same slots, with none less or more: without looking parameters up."""
        same = isinstance(state, Mapping) and len(state) == len(self.slots)
        same = same and all(map(is_, state.values(), self.slots))
        return same and [*map(len, self.slots)] == self.counts


def cleared(
    seen: Sequence[Seen],
    seen_slots: SeenSlots,
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[Tensor, Mapping[str, Tensor]],
) -> Iterator[tuple[Tensor, int]]:
    """Yield the parameters that have no state any more, with the numbers of their groups.

    Raises:
        ValueError: a parameter has a part of its state; or a dict is none; or a slot of another dict has another shape,
            dtype or device than it had.
    """
    former_slots = dict(zip(seen_slots.params, seen_slots.slots, strict=True))
    if not isinstance(state, Mapping):
        raise ValueError(
            f"optimizer.state is a {type(state).__name__}, expected a dict. To let all state begin anew write "
            "optimizer.state = {}"
        )
    for number, (before, group) in enumerate(zip(seen, groups, strict=True)):
        for index, param in enumerate(before.params):
            present = state.get(param, {})
            if not isinstance(present, Mapping):
                raise ValueError(
                    f"the state of {_name_of(group, number, index)} is a {type(present).__name__}, expected a dict. To "
                    "let it begin anew write optimizer.state.pop(parameter)"
                )
            slots = {slot for slot in before.slots & present.keys() if isinstance(present[slot], Tensor)}
            if slots and slots != before.slots:
                raise ValueError(
                    f"{_name_of(group, number, index)} has lost {sorted(before.slots - slots)} of its state and kept "
                    f"{sorted(slots)}: expected all or none. To let it begin anew write optimizer.state.pop(parameter)"
                )
            if before.slots and not slots:
                yield param, number
            former = former_slots.get(param, present)
            for slot in sorted(slots & former.keys()) if former is not present else ():
                _refuse_other_kind(f"{slot} of {_name_of(group, number, index)}", present[slot], former[slot])


def _refuse_other_kind(name: str, current: Tensor, former: Tensor) -> None:
    kind, former_kind = _kinds([current, former])
    if kind != former_kind:
        raise ValueError(
            f"{name} was replaced by one of {_in_words(kind)}, expected {_in_words(former_kind)}: cast it, or to let "
            "it begin anew write optimizer.state.pop(parameter)"
        )


def _in_words(kind: tuple[torch.Size, torch.dtype, torch.device]) -> str:
    shape, dtype, device = kind
    return f"shape {tuple(shape)}, {str(dtype).removeprefix('torch.')}, on {device}"


def carry_over(change: Change, former: Mapping[str, Tensor], current: Mapping[str, Tensor]) -> None:
    """Copy a parameter's former state to its new state.

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
    """Copy this rank's part of a tensor to another layout; False if this rank does not hold all of it."""
    if declares_boxes(target) or declares_boxes(source):
        return _copied_in_boxes(parts_of(source), parts_of(target))
    rank = dist.get_rank() if dist.is_initialized() else 0
    meshes = [tensor.device_mesh for tensor in (target, source) if isinstance(tensor, DTensor)]
    everywhere = tuple(meshes[0].mesh.flatten().tolist()) if meshes else (rank,)
    takes = make_share(layout_of(source, everywhere), layout_of(target, (rank,)), rank).takes
    if any(copy.source.buffer != rank for copy in takes):
        return False
    for copy in takes:
        to, of = (
            local.as_strided(copy.box.shape, place.strides, local.storage_offset() + place.offset)
            for local, place in ((local_of(target), copy.target), (local_of(source), copy.source))
        )
        to.copy_(of)
    return True


def _copied_in_boxes(source: Parts, target: Parts) -> bool:
    """Copy the boxes of a tensor that are whole in one of another; False if some are not."""
    for lo, part in target.items():
        wanted = Box.of(tuple(part.shape)).shift(lo)
        holding = ((at, given) for at, given in source.items() if wanted in Box.of(tuple(given.shape)).shift(at))
        found = next(holding, None)
        if found is None:
            return False
        at, given = found
        begins = (a - b for a, b in zip(lo, at, strict=True))
        part.copy_(given[tuple(slice(begin, begin + n) for begin, n in zip(begins, part.shape, strict=True))])
    return True
