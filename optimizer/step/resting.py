"""Where the matrices of a schedule rest on this rank at one step: parameters, gradients, state, and their groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...layouts.tensors import local_of
from ...vocabulary import MOMENTUM, ParamGroup
from ..planning.routes import Strip
from ..rounding import exact_dtype, rounded_once

State = Mapping[Tensor, Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class Resting:
    """Local tensors by the number of their parameter: contiguous, as layouts say.

    Attributes:
        groups: the parameter group of each.
        weights, gradients: no gradient: the parameter takes no part.
        slots: state by name.
    """

    groups: Sequence[ParamGroup]
    weights: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    slots: Sequence[Mapping[str, Tensor]]

    @classmethod
    def of(cls, params: Sequence[Tensor], groups: Sequence[ParamGroup], state: State) -> Resting:
        """These parameters, with the gradients that they have now."""
        return cls(
            groups,
            [local_of(param).contiguous() for param in params],
            [local_of(param.grad).contiguous() if param.grad is not None else None for param in params],
            [{name: local_of(tensor).contiguous() for name, tensor in state[param].items()} for param in params],
        )

    def accumulate(self, numbers: Iterable[int]) -> None:
        """Take the gradients of these parameters into their momenta, exponential moving averages."""
        for number in numbers:
            gradient = self.gradients[number]
            if gradient is not None:
                with rounded_once([self.slots[number][MOMENTUM]]) as [[momentum]]:
                    momentum.lerp_(gradient.to(momentum.dtype), 1 - self.groups[number]["momentum"])

    def accumulated(self, number: int, strip: Strip) -> Tensor:
        """The momentum at a strip of a parameter as `accumulate` will make it."""
        gradient = self.gradients[number]
        assert gradient is not None, "a parameter that takes part has a gradient"
        momentum = strip.of(self.slots[number][MOMENTUM])
        exact, rate = exact_dtype(momentum), 1 - self.groups[number]["momentum"]
        return torch.lerp(momentum.to(exact), strip.of(gradient).to(exact), rate).to(momentum.dtype)

    def return_to(self, params: Sequence[Tensor], state: State) -> None:
        """Copy back what is not contiguous in its own memory."""
        for param, weight, slots in zip(params, self.weights, self.slots, strict=True):
            for held, dense in ((param, weight), *((state[param][name], dense) for name, dense in slots.items())):
                own = local_of(held)
                if own.data_ptr() != dense.data_ptr():
                    own.copy_(dense)
