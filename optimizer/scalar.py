"""AdamW for every parameter that is not a matrix: torch's own kernels on the local part of each tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ..layouts.tensors import local_of


def adamw_step(group: dict[str, Any], state: dict[Tensor, dict[str, Tensor]]) -> None:
    """One decoupled-decay Adam step (Loshchilov & Hutter 2019) for the parameters of ``group`` that have a gradient.

    The update is element by element, so sharded parameters need no communication.
    """
    active = [param for param in group["params"] if param.grad is not None]
    beta1, beta2 = group["betas"]
    adamw(
        [local_of(param) for param in active],
        [local_of(param.grad) for param in active],
        [local_of(state[param]["exp_avg"]) for param in active],
        [local_of(state[param]["exp_avg_sq"]) for param in active],
        [],
        [state[param]["step"] for param in active],
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def adamw_state(param: Tensor) -> dict[str, Tensor]:
    """Fresh state: both moments in the parameter's layout and dtype, and a step counter (0-d float32, CPU)."""
    return {
        "step": torch.zeros((), dtype=torch.float32),
        "exp_avg": torch.zeros_like(param, memory_format=torch.contiguous_format),
        "exp_avg_sq": torch.zeros_like(param, memory_format=torch.contiguous_format),
    }
