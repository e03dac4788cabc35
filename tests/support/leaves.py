"""What a state dict holds, as values that compare: what was loaded is what was saved if these are equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def leaves(value: Any, path: str = "") -> dict[str, object]:
    """Copies of all values below this one, by where they are; tensors as their dtype, shape and elements."""
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    if isinstance(value, torch.Tensor):
        return {path: (value.dtype, tuple(value.shape), value.tolist())}
    if not isinstance(value, (Mapping, list, tuple)) or not value:
        return {path: value}
    parts = value.items() if isinstance(value, Mapping) else enumerate(value)
    return {key: leaf for name, part in parts for key, leaf in leaves(part, f"{path}.{name}").items()}
