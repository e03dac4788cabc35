"""The optimizer's state: what each parameter has, how it begins, and what a loaded one must be to take its place."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..layouts.tensors import layout_of
from .matrices import matrices_of
from .scalar import adamw_state

SLOTS = {"muon": {"momentum_buffer"}, "adamw": {"step", "exp_avg", "exp_avg_sq"}}
"""State of a parameter, by algorithm, under torch's names."""

ADAMW = {"betas": (0.9, 0.95), "eps": 1e-8}

RESTORED = ("lr", "initial_lr", "momentum", "weight_decay", "betas", "eps")
"""Hyper-parameters that a loaded state brings with it: what schedules change during a run."""


def fresh_state(param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
    """State of a parameter that has not been stepped; refuses now what could not be stepped later."""
    if not param.is_floating_point():
        raise ValueError(f"expected a real floating-point parameter, got {param.dtype} of shape {tuple(param.shape)}")
    shape = layout_of(param).shape
    if group["algorithm"] == "adamw":
        return adamw_state(param)
    matrices_of(shape, pieces_of(group))
    return {"momentum_buffer": torch.zeros_like(param, memory_format=torch.contiguous_format)}


def merged(number: int, mine: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """A group as it is after loading: the code's, with what a run carries on."""
    if saved.get("algorithm", mine["algorithm"]) != mine["algorithm"]:
        raise ValueError(
            f"group {number} was saved by {saved['algorithm']!r}, this optimizer has {mine['algorithm']!r}"
        )
    if saved.get("convention", "ema") != "ema":
        raise ValueError(
            f"the state of group {number} was saved with momentum convention {saved['convention']!r}, this optimizer "
            "keeps 'ema'; convert it first: m_ema = (1 - momentum) * m_sum"
        )
    code = {key: value for key, value in mine.items() if key not in (*RESTORED, "params", "param_names")}
    differing = sorted(key for key in code.keys() & saved.keys() if _plain(saved[key]) != _plain(code[key]))
    if differing:
        shown = ", ".join(f"{key}={code[key]!r} (saved {saved[key]!r})" for key in differing)
        warnings.warn(f"group {number} keeps the code's {shown}", stacklevel=4)
    return {**mine, **{key: saved[key] for key in RESTORED if key in saved}, "params": saved["params"]}


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def fault(mine: Mapping[str, Tensor], found: Mapping[str, Any]) -> str | None:
    """Why a loaded state cannot take the place of this one, if it cannot."""
    missing = sorted(mine.keys() - found.keys())
    if missing:
        return f"lacks {missing}"
    for slot, tensor in mine.items():
        other = found[slot]
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


def pieces_of(group: dict[str, Any]) -> tuple[int, ...] | None:
    return tuple(group["pieces"]) if group["pieces"] else None
