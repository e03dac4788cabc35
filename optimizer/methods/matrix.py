"""Algorithms for matrices: what is done with an orthogonalised one, and how its rate grows with its shape.

Muon leaves the matrix alone, NorMuon normalises it.  That is done by the matrix's owner, who has all of it.  State that
this needs rests with the ranks that hold the parameter and travels to the owner and back with the update, so the result
does not depend on how either is sharded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...box import Index
from ...vocabulary import NORMUON, SECOND_MOMENT, ParamGroup
from ..planning.matrices import Fused, Reduced, one_column, one_line

Scale = Callable[[int, int], float]

ADJUST_LR: Mapping[str, Scale] = {
    "original": lambda m, n: math.sqrt(max(1.0, m / n)),
    "match_rms_adamw": lambda m, n: 0.2 * math.sqrt(max(m, n)),
    "spectral": lambda m, n: math.sqrt(m / n),
    "none": lambda m, n: 1.0,
}
"""Learning-rate factor of an ``m x n`` matrix.  "original": Jordan et al. 2024; "match_rms_adamw": Liu et al. 2025
(arXiv 2502.16982), so that AdamW's rate and decay carry over; "spectral": Bernstein & Newhouse (arXiv 2410.21265)."""

UNNAMED = "original"
"""What ``adjust_lr_fn=None`` means, as in torch."""


@dataclass
class Scales:
    """The scales that an optimizer's groups know by name: those of `ADJUST_LR`, and functions that users gave.

    Groups hold plain values, so a function is kept here.
    """

    given: dict[str, Scale] = field(default_factory=dict)

    def name_of(self, scale: str | Scale | None) -> str:
        """Return the name by which a group knows a scale.

        Raises:
            ValueError: another function has this name.
        """
        if not callable(scale):
            return scale or UNNAMED
        name = f"{scale.__module__}.{scale.__qualname__}"
        if self.given.setdefault(name, scale) is not scale:
            raise ValueError(f"adjust_lr_fn: two different functions are called {name}")
        return name

    def as_given(self, group: Mapping[str, Any]) -> dict[str, str | Scale]:
        """Return the scale of a group as it was given, which may be a function; nothing if the group has none."""
        name = group.get("adjust_lr_fn")
        return {} if name is None else {"adjust_lr_fn": self.given.get(name, name)}

    @property
    def names(self) -> list[str]:
        return [*ADJUST_LR, *self.given]

    def factor(self, group: Mapping[str, Any], rows: int, columns: int) -> float:
        """Return what the rate of a group is multiplied by for a matrix of it."""
        return {**ADJUST_LR, **self.given}[group["adjust_lr_fn"]](rows, columns)


@dataclass(frozen=True, slots=True)
class Method:
    """An algorithm for matrices.

    Attributes:
        slots: state besides ``momentum_buffer``, float32: by name, what it keeps of each matrix of a parameter of a
            group.
        defaults: options of its groups besides Muon's.
        finish: takes an orthogonalised matrix ``[m, n]``, its part of the slots, ``[m, 1]`` or ``[1, n]``, updated in
            place, and the group; returns what is to be applied.
    """

    slots: Mapping[str, Callable[[Index, Fused, ParamGroup], Reduced]]
    defaults: Mapping[str, Any]
    finish: Callable[[Tensor, Mapping[str, Tensor], ParamGroup], Tensor]


def _as_it_is(matrix: Tensor, slots: Mapping[str, Tensor], group: ParamGroup) -> Tensor:
    return matrix


MOMENT_EPS = 1e-8
"""Added to the root of a row's second moment (Li et al. 2025)."""


SMALLEST = 1e-30
"""By which a matrix of zeros is divided: what `UPDATE_NORMS` gives is finite over it, so zeros stay zeros."""


UPDATE_NORMS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "muon": torch.linalg.vector_norm,
    "rms": lambda matrix: matrix.new_tensor(0.2 * math.sqrt(matrix.numel())),
}
"""The Frobenius norm of what NorMuon applies, from the orthogonalised matrix.  "muon": that of the matrix, so that
learning rates carry over from Muon; "rms": a root mean square of 0.2, the scale of the paper, which belongs with
``adjust_lr_fn="none"``."""


def _normalized(matrix: Tensor, slots: Mapping[str, Tensor], group: ParamGroup) -> Tensor:
    """NorMuon (Li et al. 2025, arXiv 2510.05491, algorithm 1): every row over the root of its mean square's average.

    Or every column, if the slot keeps a row (`STATISTICS`).  The group's ``update_norm`` says how large the result is.
    The average starts at zero without a correction: it is common to all rows, and the norm takes it out.
    """
    exact = matrix.float()
    moment = slots[SECOND_MOMENT]
    summed = 1 if moment.shape[1] == 1 else 0
    moment.lerp_(exact.square().mean(dim=summed, keepdim=True), 1 - group["beta2"])
    normal = exact / moment.sqrt().add_(MOMENT_EPS)
    size = torch.linalg.vector_norm(normal).clamp_(min=SMALLEST)
    return normal.mul_(UPDATE_NORMS[group["update_norm"]](exact) / size)


STATISTICS: Mapping[str, Callable[[Index, Fused], Reduced]] = {"rows": one_column, "longer": one_line}
"""What NorMuon keeps mean squares of.  "rows": of every row, a neuron's, as in the paper; "longer": of every row of
tall matrices and every column of wide ones, as modded-nanogpt does."""


def _statistics(shape: Index, fused: Fused, group: ParamGroup) -> Reduced:
    return STATISTICS[group["statistics"]](shape, fused)


MATRICES: Mapping[str, Method] = {
    "muon": Method({}, {}, _as_it_is),
    "normuon": Method({SECOND_MOMENT: _statistics}, NORMUON, _normalized),
}


def extras_of(param: Tensor, group: Mapping[str, Any]) -> dict[str, Reduced]:
    """Return what an algorithm for matrices keeps besides momentum, by slot."""
    fused = fused_of(group)
    slots = MATRICES[group["algorithm"]].slots
    return {slot: reduced(tuple(param.shape), fused, group) for slot, reduced in slots.items()}


def fused_of(group: Mapping[str, Any]) -> Fused:
    """Return what a group says is fused in its parameters."""
    pieces, columns = (tuple(group[key]) if group[key] else None for key in ("pieces", "columns"))
    return Fused(pieces, columns, group["interleaved"])
