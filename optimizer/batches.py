"""Matrices that are orthogonalised together: of one shape and form, in one group's way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .forms import Form
from .newton_schulz import orthogonalize_batch
from .precision import PRECISIONS
from .units import Unit

Group = Mapping[str, Any]

LARGEST = 1 << 25
"""Elements of a stack: 64 heads of 128 x 4096, or two matrices of 4096 x 4096, which is more than a GPU does at a time.
In 16 bits they are 64 MiB, and Newton-Schulz takes up to four times that besides."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a group says about how its matrices are done."""

    algorithm: str
    ns: str
    steps: int
    dtype: str
    eps: float
    gram: tuple[int, ...] | None

    @classmethod
    def of(cls, group: Group) -> Options:
        gram = tuple(group["gram"]) if group["gram"] is not None else None
        return cls(group["algorithm"], group["ns"], group["ns_steps"], group["ns_dtype"], group["eps"], gram)

    def arguments(self) -> dict[str, Any]:
        """For the functions of `newton_schulz`, but for the Gram form."""
        dtype = PRECISIONS[self.dtype].compute
        return {"coefficients": self.ns, "steps": self.steps, "dtype": dtype, "eps": self.eps}


@dataclass(frozen=True, slots=True)
class Batch:
    """Matrices that are done by one call, with the numbers of their units; each gets the bits that it has alone.

    Raises:
        ValueError: no unit.
    """

    numbers: tuple[int, ...]
    shape: tuple[int, int]
    form: Form
    options: Options

    def __post_init__(self) -> None:
        if not self.numbers:
            raise ValueError("a batch of no matrix")

    def orthogonalized(self, stack: Tensor) -> Tensor:
        """``[B, m, n]`` of ``stack``, which has as many elements, in the order of ``numbers``."""
        whole = stack.view(len(self.numbers), *self.shape)
        return orthogonalize_batch(whole, **self.options.arguments(), gram=self.options.gram, form=self.form)


def in_batches(units: Sequence[Unit], numbers: Iterable[int], group_of: Callable[[int], Group]) -> list[Batch]:
    """The whole matrices ``numbers`` of ``units`` in batches, whose order and members follow from these alone.

    Kernels take up to `LARGEST` elements at a time.  torch's products take one matrix after the other, so there a batch
    would only take memory.
    """
    alike: defaultdict[tuple[tuple[int, int], Form, Options], list[int]] = defaultdict(list)
    for number in numbers:
        unit = units[number]
        alike[unit.rows_columns, unit.form, Options.of(group_of(unit.param))].append(number)
    found = []
    for (shape, form, options), members in alike.items():
        most = max(1, LARGEST // (shape[0] * shape[1])) if form.kernels else 1
        cut = (members[start : start + most] for start in range(0, len(members), most))
        found += [Batch(tuple(each), shape, form, options) for each in cut]
    return found
