"""Where the matrices of a schedule rest on this rank at one step: parameters, gradients, state, and their groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...layouts.tensors import local_of
from ...vocabulary import MOMENTUM, ParamGroup
from ..rounding import rounded_once

State = Mapping[Tensor, Mapping[str, Tensor]]


LARGEST_PORTION = 1 << 18
"""Elements of the largest list of momenta that take gradients in together: what is not float32 is copied before."""


@dataclass(frozen=True, slots=True, eq=False)
class Resting:
    """Local tensors by the number of their parameter: contiguous, as layouts say.

    Attributes:
        groups: the parameter group of each.
        weights, gradients: no gradient: the parameter takes no part.
        slots: state by name.
        momenta: of the slots.
        copied: of what is not contiguous in its own memory, that and its copy.
    """

    groups: Sequence[ParamGroup]
    weights: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    slots: Sequence[Mapping[str, Tensor]]
    momenta: Sequence[Tensor]
    copied: Sequence[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, params: Sequence[Tensor], groups: Sequence[ParamGroup], state: State) -> Resting:
        """These parameters, with the gradients that they have now."""
        copied: list[tuple[Tensor, Tensor]] = []

        def dense(tensor: Tensor) -> Tensor:
            local = local_of(tensor)
            if local.is_contiguous():
                return local
            copied.append((local, local.contiguous()))
            return copied[-1][1]

        slots = [{name: dense(tensor) for name, tensor in state[param].items()} for param in params]
        return cls(
            groups,
            [dense(param) for param in params],
            [local_of(param.grad).contiguous() if param.grad is not None else None for param in params],
            slots,
            [held[MOMENTUM] for held in slots],
            copied,
        )

    def gradient(self, number: int) -> Tensor:
        """Of a parameter that takes part."""
        gradient = self.gradients[number]
        assert gradient is not None, "a parameter that takes part has a gradient"
        return gradient

    def accumulate(self, numbers: Iterable[int]) -> None:
        """Take the gradients of these parameters into their momenta, exponential moving averages."""
        alike: defaultdict[tuple[int, torch.dtype, torch.device], list[int]] = defaultdict(list)
        for number in numbers:
            if self.gradients[number] is not None:
                momentum = self.momenta[number]
                alike[id(self.groups[number]), momentum.dtype, momentum.device].append(number)
        for some in alike.values():
            rate = 1 - self.groups[some[0]]["momentum"]
            for portion in self._portions(some):
                with rounded_once([self.momenta[number] for number in portion]) as [momenta]:
                    gradients = [self.gradient(number).to(momenta[0].dtype) for number in portion]
                    # A number for each: torch takes one number for all, or a list of tensors.
                    rates = [rate] * len(portion) if isinstance(rate, Tensor) else rate
                    torch._foreach_lerp_(momenta, gradients, rates)

    def _portions(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Runs of parameters of up to `LARGEST_PORTION` elements, or of one."""
        portion: list[int] = []
        held = 0
        for number in numbers:
            size = self.momenta[number].numel()
            if portion and held + size > LARGEST_PORTION:
                yield portion
                portion, held = [], 0
            portion.append(number)
            held += size
        yield portion

    def return_to(self) -> None:
        """Copy back what is not contiguous in its own memory."""
        for own, dense in self.copied:
            own.copy_(dense)
