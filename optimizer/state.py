"""The optimizer's state: what each parameter has, how it begins, and when another can take its place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..layout import TensorLayout
from ..layouts.tensors import zeros_placed_as
from ..vocabulary import MOMENTUM
from .planning.matrices import Fused, Reduced, matrices_of
from .scalar import SCALARS
from .step.methods import MATRICES


def fresh_state(param: Tensor, layout: TensorLayout, group: dict[str, Any]) -> dict[str, Tensor]:
    """State of a parameter that has not been stepped; refuses now what could not be stepped later."""
    if not param.is_floating_point():
        raise ValueError(f"expected a real floating-point parameter, got {param.dtype} of shape {tuple(param.shape)}")
    if param.dtype.itemsize < 2:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} is {param.dtype}: no update is large enough to be seen there; "
            "train parameters of 16 bits or more, and make the 8-bit ones of them"
        )
    if group["algorithm"] in SCALARS:
        return SCALARS[group["algorithm"]].fresh(param)
    matrices_of(layout.shape, fused_of(group))
    momentum = torch.zeros_like(param, memory_format=torch.contiguous_format)
    extras = {slot: zeros_placed_as(param, kept.shape, torch.float32) for slot, kept in extras_of(param, group).items()}
    return {MOMENTUM: momentum, **extras}


def check_state(param: Tensor, layout: TensorLayout, group: Mapping[str, Any], held: Mapping[str, Tensor]) -> None:
    """Refuse what a group of matrices says of a parameter that has its state already.

    Raises:
        LayoutError: what is fused in the parameter does not add up to it.
        ValueError: it needs state of another shape.
    """
    matrices_of(layout.shape, fused_of(group))
    for slot, reduced in extras_of(param, group).items():
        if held[slot].shape != reduced.shape:
            raise ValueError(
                f"columns={group['columns']!r} and statistics={group['statistics']!r} of a parameter of shape "
                f"{tuple(param.shape)} need a {slot} of shape {reduced.shape}, and it is {tuple(held[slot].shape)}: "
                "they cannot change once there is state; build a new optimizer"
            )


def extras_of(param: Tensor, group: Mapping[str, Any]) -> dict[str, Reduced]:
    """What an algorithm for matrices keeps besides momentum, by slot."""
    fused = fused_of(group)
    slots = MATRICES[group["algorithm"]].slots
    return {slot: reduced(tuple(param.shape), fused, group) for slot, reduced in slots.items()}


def fused_of(group: Mapping[str, Any]) -> Fused:
    """What a group says is fused in its parameters."""
    pieces, columns = (tuple(group[key]) if group[key] else None for key in ("pieces", "columns"))
    return Fused(pieces, columns, group["interleaved"])


def as_numbers(value: Any) -> Any:
    """A hyper-parameter as it is saved: rates and betas that are tensors as numbers."""
    if isinstance(value, tuple | list):
        return type(value)(map(as_numbers, value))
    return value.item() if isinstance(value, Tensor) else value


def fault(mine: Mapping[str, Tensor], loaded: Mapping[str, Any]) -> str | None:
    """Why a loaded state cannot take the place of this one, if it cannot."""
    missing = sorted(mine.keys() - loaded.keys())
    if missing:
        return f"lacks {missing}"
    for slot, tensor in mine.items():
        other = loaded[slot]
        if not isinstance(other, Tensor) or not laid_out_alike(other, tensor):
            return f"{slot} is {placing(other)}, expected {placing(tensor)}"
    return None


def laid_out_alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape and, if they are DTensors (both or neither), mesh and placements."""
    if not isinstance(a, DTensor) or not isinstance(b, DTensor):
        return isinstance(a, DTensor) == isinstance(b, DTensor) and a.shape == b.shape
    return a.shape == b.shape and a.device_mesh == b.device_mesh and a.placements == b.placements


def placing(value: Any) -> str:
    """Shape, and for a DTensor mesh and placements, in words for messages."""
    shape = tuple(getattr(value, "shape", ()))
    if isinstance(value, DTensor):
        return f"{shape} as {value.placements} on mesh {value.device_mesh.mesh.tolist()}"
    return f"{shape}, not distributed" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def check_values(params: Iterable[Tensor]) -> None:
    """Refuse a parameter without values: it would never be trained.

    Raises:
        RuntimeError: a parameter is on the meta device.
    """
    for param in params:
        if param.is_meta:
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} is on the meta device and has no values. A model that is "
                "materialised (to_empty) has other parameters: build the optimizer after that"
            )


def check_gradients(params: Iterable[Tensor], gradients: Iterable[Tensor | None]) -> None:
    """Refuse a gradient that is not laid out exactly as its parameter; elements would go to wrong places.

    Raises:
        RuntimeError: a gradient is sparse, or laid out otherwise.
    """
    for param, gradient in zip(params, gradients, strict=True):
        if gradient is None:
            continue
        if gradient.is_sparse:
            raise RuntimeError(f"Muon does not take sparse gradients (parameter of shape {tuple(param.shape)})")
        if not laid_out_alike(gradient, param):
            actual, expected = placing(gradient), placing(param)
            raise RuntimeError(f"a gradient is {actual}, its parameter {expected}; redistribute the gradient first")
