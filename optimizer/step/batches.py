"""Matrices that are orthogonalised together: of one form, in one group's way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..newton_schulz.coefficients import CoefficientSet, coefficient_set
from ..newton_schulz.forms import Form, fills
from ..newton_schulz.iterations import orthogonalize_all
from ..newton_schulz.places import Places, Shape
from ..planning.precision import PRECISIONS
from ..planning.units import Unit

Group = Mapping[str, Any]

LARGEST = 1 << 25
"""Elements of a stack: 64 heads of 128 x 4096, or two matrices of 4096 x 4096, which is more than a GPU does at a time.
In 16 bits they are 64 MiB, and Newton-Schulz takes up to four times that besides."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a group says about how its matrices are done."""

    algorithm: str
    ns: CoefficientSet
    steps: int
    dtype: str
    eps: float
    gram: tuple[int, ...] | None

    @classmethod
    def of(cls, group: Group) -> Options:
        gram = tuple(group["gram"]) if group["gram"] is not None else None
        ns = coefficient_set(group["ns"])
        return cls(group["algorithm"], ns, group["ns_steps"], group["ns_dtype"], group["eps"], gram)

    def arguments(self) -> dict[str, Any]:
        """For the functions of `newton_schulz`, but for the Gram form."""
        dtype = PRECISIONS[self.dtype].compute
        return {"coefficients": self.ns, "steps": self.steps, "dtype": dtype, "eps": self.eps}


@dataclass(frozen=True, slots=True)
class Batch:
    """Matrices that are done by one call, with the numbers of their units; each gets the bits that it has alone.

    Raises:
        ValueError: no unit, or not as many as there are places.
    """

    numbers: tuple[int, ...]
    places: Places
    form: Form
    options: Options

    def __post_init__(self) -> None:
        if not self.numbers or len(self.numbers) != len(self.places):
            raise ValueError(f"a batch of {len(self.numbers)} matrices, with {len(self.places)} places")

    @property
    def sizes(self) -> dict[int, int]:
        """How many elements each unit has, in their order."""
        return {number: rows * columns for number, (rows, columns) in zip(self.numbers, self.places, strict=True)}

    def orthogonalized(self, memory: Tensor) -> Tensor:
        """The matrices of ``[places.numel]``, end to end in the order of ``numbers``."""
        return orthogonalize_all(
            memory, self.places, **self.options.arguments(), gram=self.options.gram, form=self.form
        )


def in_batches(units: Sequence[Unit], numbers: Iterable[int], group_of: Callable[[int], Group]) -> list[Batch]:
    """The whole matrices ``numbers`` of ``units`` in batches, whose order and members follow from these alone.

    Kernels take up to `LARGEST` elements at a time: matrices of one shape if these fill a GPU, else all that do not
    together, tall ones apart.  torch's products take one matrix after the other, so there a batch would only take
    memory.
    """
    alike: defaultdict[tuple[Shape, Form, Options], list[int]] = defaultdict(list)
    for number in numbers:
        unit = units[number]
        alike[unit.rows_columns, unit.form, Options.of(group_of(unit.param))].append(number)
    together: defaultdict[tuple[Shape | bool, Form, Options], list[tuple[int, Shape]]] = defaultdict(list)
    for (shape, form, options), members in alike.items():
        rows, columns = shape
        company = shape if fills(rows, columns, len(members)) else rows > columns
        together[company, form, options] += [(number, shape) for number in members]
    return [
        Batch(tuple(number for number, _ in cut), Places.of(shape for _, shape in cut), form, options)
        for (_, form, options), members in together.items()
        for cut in _cut(members, LARGEST if form.kernels else 1)
    ]


def _cut(members: Sequence[tuple[int, Shape]], most: int) -> Iterator[list[tuple[int, Shape]]]:
    """Runs of members with up to so many elements, or of one."""
    cut: list[tuple[int, Shape]] = []
    held = 0
    for number, (rows, columns) in members:
        if cut and held + rows * columns > most:
            yield cut
            cut, held = [], 0
        cut.append((number, (rows, columns)))
        held += rows * columns
    if cut:
        yield cut
