"""Element-wise algorithms, for every parameter that is not a matrix: AdamW and Lion.

A sharded parameter is stepped where it lies, without communication.  The bits do not depend on the layout, as torch's
foreach operators, in float32 at least (`tensors.rounded_once`), compute an element alike wherever a shard begins or
ends.  torch's fused AdamW does not: on the CPU it rounds a tensor's last elements otherwise than the vectors before.

Rates and counts of steps are on the host or, where steps can be captured (`cuda_graphs.is_capturable`), on the device,
so that every replay of a CUDA graph reads the current ones.  torch's capturable AdamW does not serve: it reads betas
that are tensors back, and rounds rates to the parameter's dtype.
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
from ..ground.cuda_graphs import is_capturable, is_capturing, refuse_absent, refuse_host
from ..ground.tensors import Tensors, cast_tensors, decay, mask_opposed, number_like, rounded_once

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
        on_host, on_device: step local tensors of one device and dtype, of at least 32 bits, given parameters, gradients
            and state by slot in one order, and the group; on the host with their common count of steps, and with
            numbers in the group.  On a device nothing is read back.
    """

    slots: Mapping[str, Callable[[Tensor], Tensor] | None]
    defaults: Mapping[str, Any]
    on_host: Callable[[Tensors, Tensors, Slots, float, ParamGroup], None]
    on_device: Callable[[Tensors, Tensors, Slots, ParamGroup], None]

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

        Raises:
            RuntimeError: a CUDA graph is being captured, and a parameter has no gradient or is not on a GPU.
        """
        codec = codec_of(group)
        parts_of_slots: dict[str, list[str]] = {}
        for slot, make in self.slots.items():
            parts_of_slots[slot] = [slot] if make else [f"{slot}{part}" for part in codec.parts]
        if is_capturing():
            refuse_absent([tuple(p.shape) for p in group["params"]], [p.grad is not None for p in group["params"]])

        # Parameters of one device and dtype are stepped together.
        by_kind: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for param in group["params"]:
            if param.grad is not None:
                by_kind[param.device, param.dtype].append(param)
        for (device, _), params in by_kind.items():
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
            if is_capturable(device):
                self._step_on_device(weights, gradients, slots, group, places)
            else:
                refuse_host(group["algorithm"], device)
                self._step_on_host(weights, gradients, slots, group, places)

    def _step_on_device(
        self, weights: list[Tensor], gradients: list[Tensor], slots: Slots, group: ParamGroup, places: Sequence[Any]
    ) -> None:
        if STEP in slots:
            torch._foreach_add_(slots[STEP], 1)
        codec = codec_of(group)
        if not codec.depends_on_place:
            with rounded_once(weights, *slots.values()) as (exact, *exact_lists):
                # A gradient may have a dtype of its own (`Tensor.grad_dtype`).
                exact_gradients = cast_tensors(gradients, exact[0].dtype)
                self.on_device(exact, exact_gradients, dict(zip(slots, exact_lists, strict=True)), group)
            return
        # Where bits depend on places, one parameter after the other, with its own count of steps.
        averages = [slot for slot in slots if slot != STEP]
        for number, place in enumerate(places):
            single = slice(number, number + 1)
            lists = [weights[single], *(slots[slot][single] for slot in averages), gradients[single]]
            for (*changing, gradient), codecs in cut_state_portions(lists, codec, [None, *averages], [place]):
                with rounded_once(*changing, codecs=codecs) as (exact, *exact_averages):
                    exact_slots = dict(zip(averages, exact_averages, strict=True))
                    if STEP in slots:
                        exact_slots[STEP] = slots[STEP][single]
                    self.on_device(exact, cast_tensors(gradient, exact[0].dtype), exact_slots, group)

    def _step_on_host(
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
                    self.on_host(exact, cast_tensors(gradient, exact[0].dtype), exact_slots, count, numbers)


def _add_number(tensors: Tensors, value: float) -> None:
    # Without ``alpha`` torch takes it for a number all the same.
    torch._foreach_add_(tensors, number_like(value, tensors), alpha=1)


# Numbers on the host.


def _adamw_on_host(params: Tensors, gradients: Tensors, slots: Slots, count: float, group: ParamGroup) -> None:
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


def _lion_on_host(params: Tensors, gradients: Tensors, slots: Slots, count: float, group: ParamGroup) -> None:
    """Lion (Chen et al. 2023, arXiv 2302.06675, algorithm 2): the sign of a mean of momentum and gradient."""
    momenta, lr, (beta1, beta2) = slots[EXP_AVG], group["lr"], group["betas"]
    updates = torch._foreach_lerp(momenta, gradients, 1 - beta1)
    torch._foreach_sign_(updates)
    torch._foreach_lerp_(momenta, gradients, 1 - beta2)
    decay(params, updates, lr * group["weight_decay"], group["cautious"])
    torch._foreach_add_(params, updates, alpha=-lr)


# Numbers on the device.  Every operator rounds once, so the bits do not depend on which of its kernels torch takes.


def _adamw_on_device(params: Tensors, gradients: Tensors, slots: Slots, group: ParamGroup) -> None:
    """Step as `_adamw_on_host`: one launch a list, except two a tensor for its own count of steps."""
    lr, weight_decay, beta1, beta2 = _live(group, params[0].device)
    # Averages of gradients and of their squares.
    means, squares = slots[EXP_AVG], slots[EXP_AVG_SQ]
    _mix(means, _times(gradients, 1 - beta1), beta1)
    squared = torch._foreach_mul(gradients, gradients)
    torch._foreach_mul_(squared, (1 - beta2).to(squared[0].dtype))
    _mix(squares, squared, beta2)
    del squared

    # Decay, and the update: the corrections for averages that began at zero are divisors.
    _decay_on_device(params, means, lr * weight_decay, group["cautious"])
    count, dtype = torch.stack(slots[STEP]).double(), params[0].dtype
    divisors = torch._foreach_sqrt(squares)
    torch._foreach_div_(divisors, (1 - beta2**count).sqrt().to(dtype).unbind())
    torch._foreach_add_(divisors, group["eps"])
    # A rate of 0 makes them infinite, and the updates zeros.
    torch._foreach_mul_(divisors, ((1 - beta1**count) / lr).to(dtype).unbind())
    torch._foreach_addcdiv_(params, means, divisors, -1)


def _lion_on_device(params: Tensors, gradients: Tensors, slots: Slots, group: ParamGroup) -> None:
    lr, weight_decay, beta1, beta2 = _live(group, params[0].device)
    updates = _times(slots[EXP_AVG], beta1)
    torch._foreach_add_(updates, _times(gradients, 1 - beta1))
    torch._foreach_sign_(updates)
    _mix(slots[EXP_AVG], _times(gradients, 1 - beta2), beta2)
    _decay_on_device(params, updates, lr * weight_decay, group["cautious"])
    torch._foreach_sub_(params, _times(updates, lr))


def _decay_on_device(params: Tensors, updates: Tensors, rate: Tensor, cautious: bool) -> None:
    decaying = mask_opposed(params, updates) if cautious else params
    torch._foreach_sub_(params, _times(decaying, rate))


def _live(group: ParamGroup, device: torch.device) -> list[Tensor]:
    """Return rate, decay and betas as 0-d float64; only tensors on the device stay live in a captured graph."""

    def on_device(value: float | Tensor) -> Tensor:
        if isinstance(value, Tensor) and value.device == device:
            return value.reshape(()).double()
        return torch.full((), float(value), dtype=torch.float64, device=device)

    return [*map(on_device, (group["lr"], group["weight_decay"], *group["betas"]))]


def _mix(means: Tensors, shares: Tensors, beta: Tensor) -> None:
    """Update exponential moving averages in place: ``beta * mean + share``; a share is ``(1 - beta) * value``."""
    torch._foreach_mul_(means, beta.to(means[0].dtype))
    torch._foreach_add_(means, shares)


def _times(tensors: Tensors, factor: Tensor) -> tuple[Tensor, ...]:
    # A factor of another dtype would cost a launch for each tensor.
    products: tuple[Tensor, ...] = torch._foreach_mul(tensors, factor.to(tensors[0].dtype))
    return products


def counted_on(param: Tensor) -> torch.device:
    """Return the device that counts a parameter's steps: its own if a CUDA graph may count them, else the CPU."""
    return param.device if is_capturable(param.device) else torch.device("cpu")


def _counter(param: Tensor) -> Tensor:
    # float32, as a 16-bit float stops counting at 256
    return torch.zeros((), dtype=torch.float32, device=counted_on(param))


SCALARS: Mapping[str, Scalar] = {
    "adamw": Scalar(
        slots={STEP: _counter, EXP_AVG: None, EXP_AVG_SQ: None},
        defaults=ADAMW,
        on_host=_adamw_on_host,
        on_device=_adamw_on_device,
    ),
    "lion": Scalar(slots={EXP_AVG: None}, defaults=LION, on_host=_lion_on_host, on_device=_lion_on_device),
}
