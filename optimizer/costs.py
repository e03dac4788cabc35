"""What orthogonalising a matrix costs, for sharing out the work: FLOPs, or measured times."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter_ns

import torch

from . import gram as gram_form
from .newton_schulz import orthogonalize

Cost = Callable[[int, int, int, Sequence[int] | None, int], int]
"""Cost of an ``m x n`` matrix on each of ``parts`` ranks that share it: ``(m, n, steps, gram, parts)``, in any unit."""


def flops(rows: int, columns: int, steps: int, gram: Sequence[int] | None = None, parts: int = 1) -> int:
    """Floating-point operations (`gram.cost`); a rank that shares a matrix still squares the whole Gram matrix."""
    if parts == 1:
        return gram_form.cost(rows, columns, steps, gram)
    short, long = sorted((rows, columns))
    return steps * (4 * short**2 * -(-long // parts) + 2 * short**3)


@dataclass(frozen=True, slots=True)
class CostTable:
    """Measured times by shape class, a `Cost`.

    A shape that was not measured costs what the nearest measured one does for a FLOP; nearest in the logarithms of
    both sides.  Ranks must use one table, as owners follow from it: measure on one, and give it to all.

    Attributes:
        nanoseconds: of one orthogonalisation of ``steps`` steps, by short and long side.
        steps, gram: what was measured.

    Raises:
        ValueError: an empty table, or a time that is not positive.
    """

    nanoseconds: Mapping[tuple[int, int], int]
    steps: int
    gram: tuple[int, ...] | None = None
    _rates: Mapping[tuple[int, int], float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.nanoseconds or min(self.nanoseconds.values()) <= 0:
            raise ValueError("a cost table needs at least one shape, and positive times")
        rates = {shape: time / flops(*shape, self.steps, self.gram) for shape, time in self.nanoseconds.items()}
        object.__setattr__(self, "_rates", rates)

    def __call__(self, rows: int, columns: int, steps: int, gram: Sequence[int] | None, parts: int) -> int:
        side = sorted((rows, columns))

        def apart(measured: tuple[int, int]) -> tuple[float, tuple[int, int]]:
            return math.hypot(*(math.log(a / b) for a, b in zip(measured, side, strict=True))), measured

        nearest = min(self._rates, key=apart)
        return max(1, round(self._rates[nearest] * flops(rows, columns, steps, gram, parts)))


def measure(
    shapes: Iterable[tuple[int, int]],
    *,
    steps: int = 5,
    dtype: torch.dtype = torch.bfloat16,
    gram: tuple[int, ...] | None = None,
    device: torch.device | str = "cpu",
    repeats: int = 5,
) -> CostTable:
    """Time this machine: medians of ``repeats`` runs for each shape, after one that is not counted."""
    times = {}
    for shape in shapes:
        matrix = torch.randn(shape, device=device)
        found = [_timed(matrix, steps, dtype, gram) for _ in range(repeats + 1)][1:]
        short, long = sorted(shape)
        times[short, long] = max(1, int(median(found)))
    return CostTable(times, steps, gram)


def _timed(matrix: torch.Tensor, steps: int, dtype: torch.dtype, gram: tuple[int, ...] | None) -> int:
    if matrix.is_cuda:
        torch.cuda.synchronize(matrix.device)
    begin = perf_counter_ns()
    orthogonalize(matrix, steps=steps, dtype=dtype, gram=gram)
    if matrix.is_cuda:
        torch.cuda.synchronize(matrix.device)
    return perf_counter_ns() - begin
