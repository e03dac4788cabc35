"""Element-wise algorithms, for every parameter that is not a matrix: AdamW and Lion.

A sharded parameter is stepped where it lies, without communication.  The bits do not depend on the layout, as torch's
foreach operators, in float32 at least (`tensors.rounded_once`), compute an element alike wherever a shard begins or
ends.  torch's fused AdamW does not: on the CPU it rounds a tensor's last elements otherwise than the vectors before.

Rates and counts of steps are numbers of the host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...layouts.tensors import locals_of
from ...names.errors import ArgumentError
from ...names.vocabulary import ADAMW, EXP_AVG, EXP_AVG_SQ, LION, MOMENTUM_DTYPE, STATE_DTYPE, STEP, ParamGroup
from ..ground.tensors import (
    Tensors,
    cast_tensors,
    cut_portions,
    decay,
    interpolate,
    interpolate_,
    number_like,
    rounded_once,
)

Slots = Mapping[str, Tensors]


def average_dtype(param: Tensor, group: ParamGroup) -> torch.dtype:
    """Return the dtype in which a group keeps a parameter's averages; raise ArgumentError if it is too narrow."""
    name = group.get(MOMENTUM_DTYPE) or group.get(STATE_DTYPE)
    if name is None:
        return param.dtype
    if param.dtype.itemsize > 4:
        raise ArgumentError(
            f"state in {name} of a parameter of shape {tuple(param.shape)}, {param.dtype}: leave its dtype out, to "
            "keep it in that of the weight"
        )
    dtype: torch.dtype = getattr(torch, name)
    return dtype


@dataclass(frozen=True, slots=True)
class Scalar:
    """An element-wise algorithm.

    Args:
        slots: a parameter's state: averages that are shaped like it, and perhaps the number of steps.
        defaults: options of its groups besides those of every group.
        update: steps local tensors of one device and dtype, of at least 32 bits, given parameters, gradients and
            averages by slot in one order, their common count of steps, and the group, with numbers.
    """

    slots: tuple[str, ...]
    defaults: Mapping[str, Any]
    update: Callable[[Tensors, Tensors, Slots, float, ParamGroup], None]

    def fresh(self, param: Tensor, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return the state of a new parameter, with averages of a dtype, by default the parameter's."""
        state: dict[str, Tensor] = {}
        for slot in self.slots:
            if slot == STEP:  # float32, as a 16-bit float stops counting at 256
                state[slot] = torch.zeros((), dtype=torch.float32, device="cpu")
            else:
                state[slot] = torch.zeros_like(param, dtype=dtype, memory_format=torch.contiguous_format)
        return state

    def step(self, group: ParamGroup, state: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """Step, in place, the parameters of ``group`` that have a gradient."""
        params = [param for param in group["params"] if param.grad is not None]
        if not params:
            return
        lr, weight_decay, *betas = map(float, (group["lr"], group["weight_decay"], *group["betas"]))
        numbers = {**group, "lr": lr, "weight_decay": weight_decay, "betas": betas}
        counts = [0.0] * len(params)
        if STEP in self.slots:
            counters = [state[param][STEP] for param in params]
            _add_number(counters, 1)
            counts = [counter.item() for counter in counters]

        # A call takes tensors of one device, dtype and count of steps, and gradients of one dtype.
        averages = [slot for slot in self.slots if slot != STEP]
        lists = [locals_of(params), *[locals_of([state[param][slot] for param in params]) for slot in averages]]
        lists.append(locals_of([param.grad for param in params if param.grad is not None]))
        by_kind: defaultdict[tuple[float, *tuple[Hashable, ...]], list[tuple[Tensor, ...]]] = defaultdict(list)
        for count, *tensors in zip(counts, *lists, strict=True):
            by_kind[count, tensors[0].device, tensors[0].dtype, tensors[-1].dtype].append(tuple(tensors))
        for (count, *_), members in by_kind.items():
            for *changing, gradient in cut_portions([*zip(*members, strict=True)]):
                with rounded_once(*changing) as (exact, *exact_averages):
                    exact_slots = dict(zip(averages, exact_averages, strict=True))
                    self.update(exact, cast_tensors(gradient, exact[0].dtype), exact_slots, count, numbers)


def _add_number(tensors: Tensors, value: float) -> None:
    # Without ``alpha`` torch takes it for a number all the same.
    torch._foreach_add_(tensors, number_like(value, tensors), alpha=1)


def _step_adamw(params: Tensors, gradients: Tensors, slots: Slots, count: float, group: ParamGroup) -> None:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101): the operators of `torch.optim.AdamW` with its defaults."""
    means, squares, lr, (beta1, beta2) = slots[EXP_AVG], slots[EXP_AVG_SQ], group["lr"], group["betas"]
    interpolate_(means, gradients, 1 - beta1)
    # The sign of Adam's update is the one of its first moment.
    decay(params, means, group)
    torch._foreach_mul_(squares, number_like(beta2, squares))
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    divisors = torch._foreach_sqrt(squares)
    torch._foreach_div_(divisors, number_like((1 - beta2**count) ** 0.5, divisors))
    _add_number(divisors, group["eps"])
    torch._foreach_addcdiv_(params, means, divisors, -(lr / (1 - beta1**count)))


def _step_lion(params: Tensors, gradients: Tensors, slots: Slots, count: float, group: ParamGroup) -> None:
    """Lion (Chen et al. 2023, arXiv 2302.06675, algorithm 2): the sign of a mean of momentum and gradient."""
    momenta, lr, (beta1, beta2) = slots[EXP_AVG], group["lr"], group["betas"]
    updates = interpolate(momenta, gradients, 1 - beta1)
    torch._foreach_sign_(updates)
    interpolate_(momenta, gradients, 1 - beta2)
    decay(params, updates, group)
    torch._foreach_add_(params, updates, alpha=-lr)


SCALARS: Mapping[str, Scalar] = {
    "adamw": Scalar((STEP, EXP_AVG, EXP_AVG_SQ), ADAMW, _step_adamw),
    "lion": Scalar((EXP_AVG,), LION, _step_lion),
}
