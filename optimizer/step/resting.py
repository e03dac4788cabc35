"""Where the matrices of a schedule rest on this rank at one step: parameters, gradients, state, and their groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...layouts.tensors import local_of
from ...vocabulary import MOMENTUM, ParamGroup
from ..portions import in_portions
from ..rounding import rounded_once

State = Mapping[Tensor, Mapping[str, Tensor]]


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

    def accumulate(self, lists: Iterable[Sequence[int]]) -> None:
        """Take the gradients of these parameters into their momenta, exponential moving averages.

        Args:
            lists: as `alike` gives them.
        """
        for numbers in lists:
            rate = 1 - self.groups[numbers[0]]["momentum"]
            gradients = [gradient for gradient in map(self.gradients.__getitem__, numbers) if gradient is not None]
            for momenta, taken in in_portions([[self.momenta[number] for number in numbers], gradients]):
                with rounded_once(momenta) as [exact]:
                    given = [gradient.to(exact[0].dtype) for gradient in taken]
                    # torch takes one number for all, or a list of tensors.
                    torch._foreach_lerp_(exact, given, [rate] * len(exact) if isinstance(rate, Tensor) else rate)

    def alike(self, numbers: Iterable[int]) -> list[list[int]]:
        """Those of some parameters that take part, in lists of one group, dtype and device."""
        lists: defaultdict[Hashable, list[int]] = defaultdict(list)
        for number in numbers:
            if self.gradients[number] is not None:
                momentum = self.momenta[number]
                lists[id(self.groups[number]), momentum.dtype, momentum.device].append(number)
        return list(lists.values())

    def return_to(self) -> None:
        """Copy back what is not contiguous in its own memory."""
        for own, dense in self.copied:
            own.copy_(dense)
