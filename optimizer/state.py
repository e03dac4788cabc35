"""The optimizer's state: what each parameter has, how it begins, and what a loaded one must be to take its place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..layout import TensorLayout
from ..layouts.tensors import zeros_placed_as
from ..vocabulary import MOMENTUM, MUON_CONVENTION, STEP
from .options import in_our_names
from .planning.matrices import Fused, Reduced, matrices_of
from .scalar import SCALARS, counted_on
from .step.methods import MATRICES

RESTORED = ("lr", "initial_lr", "momentum", "weight_decay", "betas", "beta2", "eps")
"""Hyper-parameters that a loaded state brings with it: what schedules change during a run."""


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


def merged(number: int, mine: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """A group as it is after loading: the code's, with what a run carries on."""
    saved = in_our_names(saved)
    if saved.get("algorithm", mine["algorithm"]) != mine["algorithm"]:
        raise ValueError(
            f"group {number} was saved by {saved['algorithm']!r}, this optimizer has {mine['algorithm']!r}"
        )
    if saved.get("convention", MUON_CONVENTION) != MUON_CONVENTION:
        raise ValueError(
            f"the state of group {number} was saved with momentum convention {saved['convention']!r}, this optimizer "
            f"keeps {MUON_CONVENTION.value!r}; convert it first: m_ema = (1 - momentum) * m_sum"
        )
    code = {key: value for key, value in mine.items() if key not in (*RESTORED, "params", "param_names")}
    differing = sorted(key for key in code.keys() & saved.keys() if _plain(saved[key]) != _plain(code[key]))
    if differing:
        shown = ", ".join(f"{key}={code[key]!r} (saved {saved[key]!r})" for key in differing)
        warnings.warn(f"group {number} keeps the code's {shown}", stacklevel=4)
    brought = {key: _like(mine.get(key), saved[key]) for key in RESTORED if key in saved}
    return {**mine, **brought, "params": saved["params"]}


def fitting(
    optimizer: Optimizer, state_dict: Mapping[str, Any], why: Callable[[Mapping[str, Tensor], Any], str | None]
) -> dict[str, Any]:
    """A state dict as it is loaded: checked, and with the groups as they will be.

    A frozen parameter may be missing, as stock DCP leaves it out when it sets a state dict; it keeps what it has.

    Args:
        why: the reason, if a parameter's state (the second) cannot take the place of what it has (the first).

    Raises:
        ValueError: names every parameter whose state does not fit, or the group of another algorithm or convention.
    """
    state, groups = state_dict["state"], state_dict["param_groups"]
    sizes = [[len(group["params"]) for group in side] for side in (optimizer.param_groups, groups)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"the state has groups of {sizes[1]} parameters, this optimizer of {sizes[0]}")
    hyper, complete, problems = [], dict(state), []
    for number, (mine, saved) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        hyper.append(merged(number, mine, saved))
        for index, (param, key) in enumerate(zip(mine["params"], saved["params"], strict=True)):
            if key not in state and not param.requires_grad:
                complete[key] = optimizer.state[param]
            if reason := why(optimizer.state[param], complete.get(key, {})):
                problems.append(f"group {number} parameter {index} {tuple(param.shape)}: {reason}")
    if problems:
        raise ValueError("the state does not fit, training would go on wrongly: " + "; ".join(problems))
    return {"state": complete, "param_groups": hyper}


def load_fitting(optimizer: Optimizer, load: Callable[[dict[str, Any]], None], state_dict: dict[str, Any]) -> None:
    """Load a state dict with ``load``, torch's own way, if it fits; every slot keeps the dtype that it has.

    Raises:
        ValueError: as `fitting`; nothing has been changed then.
    """
    fits: list[dict[str, Any]] = []

    def check(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        fits.append(fitting(optimizer, given, fault))
        return fits[0]

    dtypes = {param: {slot: mine.dtype for slot, mine in slots.items()} for param, slots in optimizer.state.items()}

    def restore(_: Optimizer) -> None:
        """torch casts state to the parameter's dtype, and leaves counts of steps on the device they come from."""
        keys = [key for group in fits[0]["param_groups"] for key in group["params"]]
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for param, key in zip(params, keys, strict=True):
            for slot, dtype in dtypes[param].items():
                held, device = optimizer.state[param][slot], counted_on(param) if slot == STEP else param.device
                if (held.dtype, held.device) != (dtype, device):
                    optimizer.state[param][slot] = fits[0]["state"][key][slot].to(device, dtype, copy=True)

    # After the hooks of users, which may mend a state, and before those that look at what was loaded.
    hooks = (
        optimizer.register_load_state_dict_pre_hook(check),
        optimizer.register_load_state_dict_post_hook(restore, prepend=True),
    )
    try:
        load(state_dict)
    finally:
        for hook in hooks:
            hook.remove()


def as_numbers(value: Any) -> Any:
    """A hyper-parameter as it is saved: rates and betas that are tensors as numbers."""
    if isinstance(value, tuple | list):
        return type(value)(map(as_numbers, value))
    return value.item() if isinstance(value, Tensor) else value


def _like(mine: Any, saved: Any) -> Any:
    """What `as_numbers` has saved, in tensors where this optimizer keeps it in tensors."""
    if isinstance(mine, tuple | list):
        return type(mine)(_like(*both) for both in zip(mine, saved, strict=True))
    return mine.clone().fill_(float(saved)) if isinstance(mine, Tensor) else saved


def _plain(value: Any) -> Any:
    """Lists as tuples: a format may keep either."""
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


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


def check_values(param: Tensor) -> None:
    """Refuse a parameter without values: it would never be trained.

    Raises:
        RuntimeError: the parameter is on the meta device.
    """
    if param.is_meta:
        raise RuntimeError(
            f"a parameter of shape {tuple(param.shape)} is on the meta device and has no values. A model that is "
            "materialised (to_empty) has other parameters: build the optimizer after that"
        )


def check_gradient(param: Tensor, gradient: Tensor | None) -> None:
    """Refuse a gradient that is not laid out exactly as its parameter; elements would go to wrong places."""
    if gradient is None:
        return
    if gradient.is_sparse:
        raise RuntimeError(f"Muon does not take sparse gradients (parameter of shape {tuple(param.shape)})")
    if not laid_out_alike(gradient, param):
        actual, expected = placing(gradient), placing(param)
        raise RuntimeError(f"a gradient is {actual}, its parameter {expected}; redistribute the gradient first")
