"""Measured times of orthogonalising a matrix, for sharing out the work and for choosing a form."""

from __future__ import annotations

import json
import math
import timeit
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product, starmap
from statistics import median

import torch

from ...names.errors import ArgumentError
from ..ground.devices import time_replays
from .iterations import orthogonalize
from .products import Form, has_kernels
from .recipe import flops

Cost = Callable[[int, int, int, Sequence[int] | None], int]
"""The cost of an ``m x n`` matrix, in any unit: ``(m, n, steps, gram)``."""


@dataclass(frozen=True, slots=True)
class CostTable:
    """Measured times by shape and form.  ``table`` is a `Cost`, and ``table.form`` a `products.Choice`.

    Another shape takes the fastest form of the nearest measured one (in logarithms of both sides), and costs as much a
    FLOP.  Owners and last bits follow from it: measure on one rank, store it (:meth:`as_json`), and give it to all.

    Attributes:
        nanoseconds: of one of a stack of matrices, by short and long side, and form.

    Raises:
        ArgumentError: an empty table, a time that is not positive, or the Gram form without restarts.
    """

    nanoseconds: Mapping[tuple[int, int], Mapping[Form, int]]
    steps: int
    gram: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if not self.nanoseconds or not all(times and min(times.values()) > 0 for times in self.nanoseconds.values()):
            raise ArgumentError("nanoseconds: expected at least one shape, and positive times")
        if self.gram is None and any(form.gram for form in chain.from_iterable(self.nanoseconds.values())):
            raise ArgumentError("gram=None: expected the restarts of the Gram form, as the table has its times")

    def __call__(self, rows: int, columns: int, steps: int, gram: Sequence[int] | None) -> int:
        # The fastest form of the nearest shape that the group's options allow, scaled by FLOPs.
        shape = self._nearest_shape(rows, columns)
        times = {form: time for form, time in self.nanoseconds[shape].items() if gram is not None or not form.gram}
        form, time = min((times or self.nanoseconds[shape]).items(), key=lambda item: item[1])
        rate = time / flops(*shape, self.steps, self.gram if form.gram else None)
        return max(1, round(rate * flops(rows, columns, steps, gram if form.gram else None)))

    def form(self, device: torch.device, dtype: torch.dtype, rows: int, columns: int, copies: int) -> Form:
        """Return the fastest form that was measured, however many copies there are.

        Raises:
            ArgumentError: another dtype was measured.
        """
        if dtype != self.dtype:
            raise ArgumentError(f"this cost table was measured in {self.dtype}, not in {dtype}: measure that, too")
        times = self.nanoseconds[self._nearest_shape(rows, columns)]
        return min(times, key=times.__getitem__)

    def as_json(self) -> str:
        """Return the table as text for :meth:`from_json`: sides in elements, times in nanoseconds."""
        rows: list[list[int]] = []
        for shape, times in self.nanoseconds.items():
            rows += [[*shape, form.kernels, form.gram, time] for form, time in times.items()]
        name = str(self.dtype).removeprefix("torch.")
        return json.dumps({"dtype": name, "steps": self.steps, "gram": self.gram, "times": rows})

    @classmethod
    def from_json(cls, text: str) -> CostTable:
        """Return a table that :meth:`as_json` wrote.

        Raises:
            ArgumentError: the text is something else; or as the class does.
        """
        times: dict[tuple[int, int], dict[Form, int]] = {}
        try:
            data = json.loads(text)
            for short, long, kernels, gram, time in data["times"]:
                times.setdefault((short, long), {})[Form(kernels, gram)] = time
            restarts = None if data["gram"] is None else tuple(data["gram"])
            steps, dtype = data["steps"], getattr(torch, data["dtype"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ArgumentError(f"expected the text of CostTable.as_json(), found {text!r:.80}: {error!r}") from error
        return cls(nanoseconds=times, steps=steps, gram=restarts, dtype=dtype)

    def _nearest_shape(self, rows: int, columns: int) -> tuple[int, int]:
        side = sorted((rows, columns))

        def apart(measured: tuple[int, int]) -> tuple[float, tuple[int, int]]:
            return math.hypot(*(math.log(a / b) for a, b in zip(measured, side, strict=True))), measured

        return min(self.nanoseconds, key=apart)


def measure(
    shapes: Iterable[tuple[int, int]],
    *,
    steps: int = 5,
    dtype: torch.dtype = torch.bfloat16,
    gram: tuple[int, ...] | None = None,
    device: torch.device | str = "cpu",
    copies: int = 1,
    repeats: int = 5,
) -> CostTable:
    """Time this machine, in every form that it has: medians of ``repeats`` runs, after one that is not counted.

    Args:
        shapes: at least one, ``(m, n)``.
        gram: restarts of the Gram form; None: it is not measured.
        copies: matrices done at a time.  Small ones gain most: measure as many as a rank will own.
    """
    device = torch.device(device)
    arithmetic = (False, True) if has_kernels(device, dtype) else (False,)
    forms = list(starmap(Form, product(arithmetic, (False,) if gram is None else (False, True))))
    times: dict[tuple[int, int], dict[Form, int]] = {}
    for shape in shapes:
        stack = torch.randn((copies, *shape), device=device)
        short, long = sorted(shape)
        times[short, long] = {}
        for form in forms:
            work = partial(orthogonalize, stack, steps=steps, dtype=dtype, gram=gram, form=form)
            work()
            # Replayed as a CUDA graph: a step launches many kernels ahead, so Python does not count.
            took = (
                time_replays(work, times=2, rounds=repeats)
                if stack.is_cuda
                else median(timeit.repeat(work, number=1, repeat=repeats))
            )
            times[short, long][form] = max(1, round(took * 1e9 / copies))
    return CostTable(times, steps, gram, dtype)
