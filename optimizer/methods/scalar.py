"""Element-wise algorithms, for every parameter that is not a matrix: AdamW and Lion.

A sharded parameter is stepped where it lies, without communication.  The bits do not depend on the layout, as torch's
foreach operators, in float32 at least (`tensors.rounded_once`), compute an element alike wherever a shard begins or
ends.  torch's fused AdamW does not: on the CPU it rounds a tensor's last elements otherwise than the vectors before.

Rates and counts of steps are numbers of the host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...layouts.flat import owned_layout
from ...layouts.tensors import locals_of, zeros_sharded_like
from ...names.vocabulary import ADAMW, EXP_AVG, EXP_AVG_SQ, LION, STEP, ParamGroup
from ..ground.codecs import PARAM_DTYPE_CODEC, Codec, LocalFragments, codec_of, cut_state_portions, stored_slots
from ..ground.tensors import Tensors, cast_tensors, decay, number_like, rounded_once

Slots = Mapping[str, Tensors]


def fresh_average(param: Tensor, slot: str, codec: Codec) -> dict[str, Tensor]:
    """Return zeros for what a codec stores of an average."""
    (first, (_, dtype)), *other_parts = stored_slots(codec, slot, param).items()
    zeros = torch.zeros_like(param, dtype=dtype, memory_format=torch.contiguous_format)
    return {first: zeros, **{name: zeros_sharded_like(param, *shape_dtype) for name, shape_dtype in other_parts}}


def whole_fragments(param: Tensor) -> LocalFragments:
    """Return the fragments of a parameter that lies whole in this process."""
    return tuple(param.shape), owned_layout(tuple(param.shape), 0).fragments_of(0)


@dataclass(frozen=True, slots=True)
class Scalar:
    """An element-wise algorithm.

    Args:
        slots: a parameter's state by name: None where it is shaped like the parameter, else the function that makes it.
        defaults: options of its groups besides ``lr``, ``weight_decay`` and ``cautious``.
        update: steps local tensors of one device and dtype, of at least 32 bits, given parameters, gradients and state
            by slot in one order, their common count of steps, and the group, with numbers.
    """

    slots: Mapping[str, Callable[[Tensor], Tensor] | None]
    defaults: Mapping[str, Any]
    update: Callable[[Tensors, Tensors, Slots, float, ParamGroup], None]

    def fresh(self, param: Tensor, codec: Codec = PARAM_DTYPE_CODEC) -> dict[str, Tensor]:
        """Return the state of a new parameter."""
        state: dict[str, Tensor] = {}
        for slot, make in self.slots.items():
            state |= fresh_average(param, slot, codec) if make is None else {slot: make(param)}
        return state

    def step(
        self,
        group: ParamGroup,
        state: Mapping[Tensor, Mapping[str, Tensor]],
        fragments_of: Callable[[Tensor], LocalFragments] = whole_fragments,
    ) -> None:
        """Step, in place, the parameters of ``group`` that have a gradient.

        Args:
            fragments_of: the elements of a parameter that this rank holds; asked where bits of state depend on them.
        """
        codec = codec_of(group)
        parts_of_slots: dict[str, list[str]] = {}
        for slot, make in self.slots.items():
            parts_of_slots[slot] = [slot] if make else [f"{slot}{part}" for part in codec.parts]

        # Parameters of one device and dtype are stepped together.
        by_kind: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for param in group["params"]:
            if param.grad is not None:
                by_kind[param.device, param.dtype].append(param)
        for params in by_kind.values():
            slots: dict[str, Tensors] = {}
            for slot, (first, *_) in parts_of_slots.items():
                slots[slot] = locals_of(state[param][first] for param in params)
            weights, gradients = locals_of(params), locals_of(p.grad for p in params if p.grad is not None)
            places: list[Any] = [None] * len(params)
            if codec.depends_on_place:
                other_parts = [parts for name, (_, *parts) in parts_of_slots.items() if name != STEP]
                for number, param in enumerate(params):
                    lists = [locals_of(map(state[param].__getitem__, parts)) for parts in other_parts]
                    places[number] = fragments_of(param), [(), *lists]
            self._step_together(weights, gradients, slots, group, places)

    def _step_together(
        self, weights: list[Tensor], gradients: list[Tensor], slots: Slots, group: ParamGroup, places: Sequence[Any]
    ) -> None:
        lr, weight_decay, *betas = map(float, (group["lr"], group["weight_decay"], *group["betas"]))
        numbers = {**group, "lr": lr, "weight_decay": weight_decay, "betas": betas}
        if STEP in slots:
            _add_number(slots[STEP], 1)
        counts = [counter.item() for counter in slots.get(STEP, ())] or [0.0] * len(weights)
        averages = {slot: tensors for slot, tensors in slots.items() if slot != STEP}

        # A call takes one count of steps, and gradients of one dtype.
        by_kind: defaultdict[tuple[torch.dtype, float], list[tuple[Any, ...]]] = defaultdict(list)
        for count, place, *tensors in zip(counts, places, weights, *averages.values(), gradients, strict=True):
            by_kind[tensors[-1].dtype, count].append((place, *tensors))
        for (_, count), members in by_kind.items():
            member_places, *lists = zip(*members, strict=True)
            portions = cut_state_portions(lists, codec_of(group), [None, *averages], member_places)
            for (*changing, gradient), codecs in portions:
                with rounded_once(*changing, codecs=codecs) as (exact, *exact_averages):
                    exact_slots = dict(zip(averages, exact_averages, strict=True))
                    self.update(exact, cast_tensors(gradient, exact[0].dtype), exact_slots, count, numbers)


def _add_number(tensors: Tensors, value: float) -> None:
    # Without ``alpha`` torch takes it for a number all the same.
    torch._foreach_add_(tensors, number_like(value, tensors), alpha=1)


def _step_adamw(params: Tensors, gradients: Tensors, slots: Slots, count: float, group: ParamGroup) -> None:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101): the operators of `torch.optim.AdamW` with its defaults."""
    means, squares, lr, (beta1, beta2) = slots[EXP_AVG], slots[EXP_AVG_SQ], group["lr"], group["betas"]
    torch._foreach_lerp_(means, gradients, 1 - beta1)
    # The sign of Adam's update is the one of its first moment.
    decay(params, means, lr * group["weight_decay"], group["cautious"])
    torch._foreach_mul_(squares, number_like(beta2, squares))
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    divisors = torch._foreach_sqrt(squares)
    torch._foreach_div_(divisors, number_like((1 - beta2**count) ** 0.5, divisors))
    _add_number(divisors, group["eps"])
    torch._foreach_addcdiv_(params, means, divisors, -(lr / (1 - beta1**count)))


def _step_lion(params: Tensors, gradients: Tensors, slots: Slots, count: float, group: ParamGroup) -> None:
    """Lion (Chen et al. 2023, arXiv 2302.06675, algorithm 2): the sign of a mean of momentum and gradient."""
    momenta, lr, (beta1, beta2) = slots[EXP_AVG], group["lr"], group["betas"]
    updates = torch._foreach_lerp(momenta, gradients, 1 - beta1)
    torch._foreach_sign_(updates)
    torch._foreach_lerp_(momenta, gradients, 1 - beta2)
    decay(params, updates, lr * group["weight_decay"], group["cautious"])
    torch._foreach_add_(params, updates, alpha=-lr)


def _counter(param: Tensor) -> Tensor:
    # float32, as a 16-bit float stops counting at 256
    return torch.zeros((), dtype=torch.float32, device="cpu")


SCALARS: Mapping[str, Scalar] = {
    "adamw": Scalar(
        slots={STEP: _counter, EXP_AVG: None, EXP_AVG_SQ: None},
        defaults=ADAMW,
        update=_step_adamw,
    ),
    "lion": Scalar(slots={EXP_AVG: None}, defaults=LION, update=_step_lion),
}
