"""Algorithms that work element by element, for every parameter that is not a matrix: AdamW and Lion.

No element needs another, so a sharded parameter is stepped where it rests, without communication.  All arithmetic is
torch's: its AdamW kernels and its ``_foreach_`` operators.  Those compute an element alike wherever a shard begins or
ends, so the bits do not depend on the layout.  torch's fused AdamW does not on the CPU (the last elements of a tensor
are rounded otherwise than the vectors before them), so it is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ..layouts.tensors import local_of
from .capture import refuse_counted

Group = Mapping[str, Any]

FOREIGN = ("amsgrad", "capturable", "differentiable", "fused", "maximize")
"""Options of torch's optimizers that would change the update, and that no algorithm here has."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """An element-wise algorithm.

    Args:
        slots: the state of a parameter: by name, what makes it for a new parameter.
        defaults: options of its groups besides ``lr`` and ``weight_decay``.
        update: one step of local tensors: parameters, gradients, state by slot, all in the same order, and the group.
    """

    slots: Mapping[str, Callable[[Tensor], Tensor]]
    defaults: Mapping[str, Any]
    update: Callable[[list[Tensor], list[Tensor], Mapping[str, list[Tensor]], Group], None]

    def fresh(self, param: Tensor) -> dict[str, Tensor]:
        """State of a parameter that has not been stepped."""
        return {slot: make(param) for slot, make in self.slots.items()}

    def check(self, group: Group) -> None:
        """Refuse options that the algorithm does not have, or out of range.

        Raises:
            ValueError: names the option, its value and what is expected.
        """
        if len(group["betas"]) != 2 or not all(0 <= beta < 1 for beta in group["betas"]):
            raise ValueError(f"betas={group['betas']!r}: expected two numbers in [0, 1)")
        if group.get("eps", 0) < 0:
            raise ValueError(f"eps={group['eps']!r}: expected a number >= 0")

    def step(self, group: Group, state: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """Step those parameters of ``group`` that have a gradient, in place, with their state.

        Raises:
            RuntimeError: a CUDA graph is being captured.
        """
        active = [param for param in group["params"] if param.grad is not None]
        if not active:
            return
        refuse_counted(group["algorithm"])
        params = [local_of(param) for param in active]
        # A gradient may have a dtype of its own (`Tensor.grad_dtype`).
        gradients = [local_of(param.grad).to(param.dtype) for param in active]
        self.update(params, gradients, {slot: [local_of(state[p][slot]) for p in active] for slot in self.slots}, group)


def refuse_foreign(group: Group) -> None:
    """Refuse options that would be ignored silently.

    Raises:
        ValueError: names the first of `FOREIGN` that is on.
    """
    for name in FOREIGN:
        if group.get(name):
            raise ValueError(f"{name}={group[name]!r}: {group['algorithm']!r} groups do not have this option")


def decay(params: list[Tensor], updates: list[Tensor] | tuple[Tensor, ...], rate: float, cautious: bool) -> None:
    """Decoupled weight decay in place: ``p -= rate * p`` (Loshchilov & Hutter 2019, arXiv 1711.05101).

    If ``cautious``, only where the update, which will be subtracted, does not move the element away from zero, that is
    where ``update * p >= 0`` (Chen et al. 2025, arXiv 2510.12402, algorithm 1); the others keep their bits.

    Args:
        updates: only their signs matter; as ``params`` in shape and dtype.
        rate: learning rate times weight decay.
    """
    if not cautious:
        torch._foreach_mul_(params, 1 - rate)
        return
    # Signs, as a product of small numbers may vanish.  Every step but the last is exact.
    signs = torch._foreach_sign(updates)
    opposed = torch._foreach_mul(signs, params)
    torch._foreach_clamp_max_(opposed, 0)
    torch._foreach_mul_(opposed, signs)
    torch._foreach_add_(params, torch._foreach_sub(params, opposed), alpha=-rate)


def _adamw(params: list[Tensor], gradients: list[Tensor], state: Mapping[str, list[Tensor]], group: Group) -> None:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101), as `torch.optim.AdamW` with its defaults does it."""
    # Numbers, as torch's foreach kernels take neither a rate nor betas as tensors.
    lr, weight_decay = float(group["lr"]), group["weight_decay"]
    beta1, beta2 = map(float, group["betas"])
    if group["cautious"]:
        # The sign of Adam's update is the one of its first moment as the kernel will have it.
        decay(params, torch._foreach_lerp(state["exp_avg"], gradients, 1 - beta1), lr * weight_decay, cautious=True)
        weight_decay = 0.0
    adamw(
        params,
        gradients,
        state["exp_avg"],
        state["exp_avg_sq"],
        [],
        state["step"],
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=lr,
        weight_decay=weight_decay,
        eps=group["eps"],
        maximize=False,
    )


def _lion(params: list[Tensor], gradients: list[Tensor], state: Mapping[str, list[Tensor]], group: Group) -> None:
    """Lion (Chen et al. 2023, arXiv 2302.06675, algorithm 2): the sign of a mean of momentum and gradient."""
    lr = float(group["lr"])
    beta1, beta2 = map(float, group["betas"])
    updates = torch._foreach_lerp(state["exp_avg"], gradients, 1 - beta1)
    torch._foreach_sign_(updates)
    torch._foreach_lerp_(state["exp_avg"], gradients, 1 - beta2)
    decay(params, updates, lr * group["weight_decay"], group["cautious"])
    torch._foreach_add_(params, updates, alpha=-lr)


def _moment(param: Tensor) -> Tensor:
    """Zeros in the parameter's layout and dtype."""
    return torch.zeros_like(param, memory_format=torch.contiguous_format)


def _counter(param: Tensor) -> Tensor:
    """0-d float32 on the CPU, so that reading it waits for no device; a 16-bit float stops counting at 256."""
    return torch.zeros((), dtype=torch.float32, device="cpu")


SCALARS: Mapping[str, Scalar] = {
    "adamw": Scalar(
        slots={"step": _counter, "exp_avg": _moment, "exp_avg_sq": _moment},
        defaults={"betas": (0.9, 0.95), "eps": 1e-8, "cautious": False},
        update=_adamw,
    ),
    "lion": Scalar(slots={"exp_avg": _moment}, defaults={"betas": (0.9, 0.99), "cautious": False}, update=_lion),
}
