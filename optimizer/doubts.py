"""Warnings of what works and is probably not meant."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .step.rank_set import RankSet


def doubt_idle(groups: Iterable[Mapping[str, Any]], stacklevel: int) -> None:
    """Warn if no parameter has a gradient.

    Args:
        stacklevel: of the warning, counted from here.
    """
    if all(param.grad is None for group in groups for param in group["params"]):
        warnings.warn(
            "no parameter of this optimizer has a gradient, so a step changes nothing. If the model was sharded "
            "(fully_shard) or materialised (to_empty) after the optimizer was built, it has other parameters now: "
            "build the optimizer of those",
            RuntimeWarning,
            stacklevel=stacklevel,
        )


def doubt_plain(held: RankSet) -> None:
    """Warn if this rank is to orthogonalise plain tensors alone, and there are others that may hold the same."""
    plain = [member for member in held.matrices if not isinstance(member.param, DTensor)]
    world = dist.get_world_size() if dist.is_initialized() else 1
    if plain and world > 1:
        warnings.warn(
            f"{len(plain)} parameters of matrix groups are plain tensors, so each of {world} ranks orthogonalises all "
            "of them. If ranks hold the same parameters (DDP), give replicas=torch.distributed.group.WORLD, or the "
            "group of DDP, and they share the work",
            RuntimeWarning,
            stacklevel=2,
        )
