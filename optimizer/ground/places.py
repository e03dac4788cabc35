"""Where matrices lie that are done together: end to end in one memory, each row by row, of whatever shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor

RowsColumns = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Places:
    """Shapes of matrices, in the order in which they lie.

    Attributes:
        runs: how many matrices in a row have one shape, their rows, their columns.

    Raises:
        ValueError: a run of none, a negative side, or two runs of one shape next to each other.
    """

    runs: tuple[tuple[int, int, int], ...]

    def __post_init__(self) -> None:
        if any(min(run) < 0 or run[0] < 1 for run in self.runs):
            raise ValueError(f"expected runs of at least one matrix, got {self.runs}")
        if any(run[1:] == after[1:] for run, after in pairwise(self.runs)):
            raise ValueError(f"neighbouring runs are of one shape: {self.runs}")

    @classmethod
    def of(cls, shapes: Iterable[RowsColumns]) -> Places:
        return cls(tuple((len(list(alike)), *shape) for shape, alike in groupby(shapes)))

    def __iter__(self) -> Iterator[RowsColumns]:
        """Yield the shape of each matrix."""
        for count, rows, columns in self.runs:
            for _ in range(count):
                yield rows, columns

    def __len__(self) -> int:
        return sum(count for count, _, _ in self.runs)

    @property
    def numel(self) -> int:
        return sum(count * rows * columns for count, rows, columns in self.runs)

    @property
    def tall(self) -> bool:
        """Whether matrices are taller than wide.

        Raises:
            ValueError: some are and some are not.
        """
        kinds = {rows > columns for _, rows, columns in self.runs}
        if len(kinds) > 1:
            raise ValueError(f"tall matrices are not done together with others: {self.runs}")
        return any(kinds)

    def begins(self) -> list[int]:
        """Return where each matrix begins, in elements, and where the last ends."""
        return list(accumulate((rows * columns for rows, columns in self), initial=0))

    def of_memory(self, memory: Tensor) -> list[Tensor]:
        """Return each matrix, a view of ``[numel]``."""
        if len(self) == 1:  # as a CPU does them: three operators less
            return [memory.view(self.runs[0][1:])]
        return [matrix for run in self.of_runs(memory) for matrix in run.unbind()]

    def of_runs(self, memory: Tensor) -> list[Tensor]:
        """Return each run, a view ``[count, rows, columns]`` of ``[numel]``."""
        parts = torch.split(memory, [count * rows * columns for count, rows, columns in self.runs])
        return [part.view(run) for part, run in zip(parts, self.runs, strict=True)]

    def filled_up(self, multiple: int) -> Places:
        """Return places of the same matrices with sides filled up to the next multiples."""
        return Places.of(
            (-(-rows // multiple) * multiple, -(-columns // multiple) * multiple) for rows, columns in self
        )


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """Matrices in one memory.

    Attributes:
        memory: ``[places.numel]``, contiguous.
        turned: each matrix is the transpose of what lies there.
    """

    memory: Tensor
    places: Places
    turned: bool = False

    @property
    def mT(self) -> Stack:
        return Stack(self.memory, self.places, not self.turned)

    def __iter__(self) -> Iterator[Tensor]:
        """Yield each matrix, a view."""
        return (matrix.mT if self.turned else matrix for matrix in self.places.of_memory(self.memory))
