"""Muon momentum that survives any change of topology, and a Muon that runs on every one of them.

``muonckpt.save`` and ``muonckpt.load`` are imported when first used, so that tools which only look at checkpoints
start without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint.save_load import load, save

__all__ = ["load", "save"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(".checkpoint", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
