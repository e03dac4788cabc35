"""Matrices that are orthogonalised together: in one form, by one recipe."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from ...coefficients import coefficient_set
from ...vocabulary import ParamGroup
from ..ground.places import Places, RowsColumns
from ..newton_schulz.iterations import orthogonalize_all
from ..newton_schulz.products import Form
from ..newton_schulz.recipe import Recipe
from ..planning.matrices import PRECISIONS, Unit

LARGEST = 1 << 25
"""Elements of a stack: 64 heads of 128 x 4096, or two matrices of 4096 x 4096, which is more than a GPU does at a time.
In 16 bits they are 64 MiB, and Newton-Schulz takes up to four times that besides."""

TOGETHER = 1 << 18
"""The same for torch's products: what lies in memory for them, there and back, is then 1 MiB in 16 bits.  How many
of them are multiplied together is up to `products.STACK`."""

BUSY = 64
"""Tiles of 128 x 128 that keep a large GPU busy: half of its multiprocessors are enough, as tiles can be smaller."""


def recipe_of(group: ParamGroup) -> Recipe:
    """How the matrices of a group are orthogonalised."""
    gram = None if group["gram"] is None else tuple(group["gram"])
    dtype = PRECISIONS[group["ns_dtype"]].compute
    return Recipe(coefficient_set(group["ns_coefficients"]), group["ns_steps"], dtype, group["eps"], gram)


@dataclass(frozen=True)
class Batch:
    """Matrices that are done by one call, with the numbers of their units; each gets the bits that it has alone.

    Raises:
        ValueError: no unit, or not as many as there are places.
    """

    numbers: tuple[int, ...]
    places: Places
    form: Form
    algorithm: str
    recipe: Recipe

    def __post_init__(self) -> None:
        if not self.numbers or len(self.numbers) != len(self.places):
            raise ValueError(f"a batch of {len(self.numbers)} matrices, with {len(self.places)} places")

    @cached_property
    def sizes(self) -> dict[int, int]:
        """How many elements each unit has, in their order."""
        return {number: rows * columns for number, (rows, columns) in zip(self.numbers, self.places, strict=True)}

    def orthogonalized(self, memory: Tensor) -> Tensor:
        """The matrices of ``[places.numel]``, end to end in the order of ``numbers``."""
        return orthogonalize_all(memory, self.places, self.recipe, self.form)


def fills_gpu(rows: int, columns: int, copies: int) -> bool:
    """Whether the Gram matrices of so many matrices have `BUSY` tiles to compute: one has from 1281² on."""
    side = -(-min(rows, columns) // 128)
    return copies * side * (side + 1) // 2 >= BUSY


_Kind = tuple[Form, str, Recipe]
"""What matrices of one batch share: their form, algorithm and recipe."""


def in_batches(units: Sequence[Unit], numbers: Iterable[int], group_of: Callable[[int], ParamGroup]) -> list[Batch]:
    """The whole matrices ``numbers`` of ``units`` in batches, whose order and members follow from these alone.

    Kernels take up to `LARGEST` elements at a time: matrices of one shape if these fill a GPU, else all that do not
    together, tall ones apart.  torch's products take up to `TOGETHER` elements, of matrices of one shape.
    """
    alike: defaultdict[tuple[RowsColumns, _Kind], list[int]] = defaultdict(list)
    for number in numbers:
        unit = units[number]
        group = group_of(unit.param)
        alike[unit.rows_columns, (unit.form, group["algorithm"], recipe_of(group))].append(number)
    together: defaultdict[tuple[RowsColumns | bool, _Kind], list[tuple[int, RowsColumns]]] = defaultdict(list)
    for (shape, kind), members in alike.items():
        rows, columns = shape
        alone = not kind[0].kernels or fills_gpu(rows, columns, len(members))
        company = shape if alone else rows > columns
        together[company, kind] += [(number, shape) for number in members]
    return [
        Batch(tuple(number for number, _ in cut), Places.of(shape for _, shape in cut), *kind)
        for (_, kind), members in together.items()
        for cut in _cut(members, LARGEST if kind[0].kernels else TOGETHER)
    ]


def _cut(members: Sequence[tuple[int, RowsColumns]], most: int) -> Iterator[list[tuple[int, RowsColumns]]]:
    """Runs of members of at most ``most`` elements, or of one member."""
    cut: list[tuple[int, RowsColumns]] = []
    held = 0
    for number, (rows, columns) in members:
        if cut and held + rows * columns > most:
            yield cut
            cut, held = [], 0
        cut.append((number, (rows, columns)))
        held += rows * columns
    if cut:
        yield cut
