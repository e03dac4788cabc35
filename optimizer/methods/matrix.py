"""Algorithms for matrices: how the owner finishes an orthogonalised matrix, and how its rate grows with its shape.

The state that NorMuon needs for this stays with the ranks that hold the parameter, and travels to the owner and back
with the update, so the result does not depend on sharding.
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
    """Scales by the names that groups hold: `ADJUST_LR`, and functions that users gave."""

    given: dict[str, Scale] = field(default_factory=dict)

    def name_of(self, scale: str | Scale | None) -> str:
        """Return a scale's name; raise ValueError if another function has it."""
        if not callable(scale):
            return scale or UNNAMED
        name = f"{scale.__module__}.{scale.__qualname__}"
        if self.given.setdefault(name, scale) is not scale:
            raise ValueError(f"adjust_lr_fn: two different functions are called {name}")
        return name

    def as_given(self, group: Mapping[str, Any]) -> dict[str, str | Scale]:
        """Return a group's ``adjust_lr_fn`` as the user gave it; empty if it has none."""
        name = group.get("adjust_lr_fn")
        return {} if name is None else {"adjust_lr_fn": self.given.get(name, name)}

    @property
    def names(self) -> list[str]:
        return [*ADJUST_LR, *self.given]

    def factor(self, group: Mapping[str, Any], rows: int, columns: int) -> float:
        """Return the learning-rate factor of an ``m x n`` matrix of a group."""
        return {**ADJUST_LR, **self.given}[group["adjust_lr_fn"]](rows, columns)


@dataclass(frozen=True, slots=True)
class Method:
    """An algorithm for matrices.

    Attributes:
        slots: float32 state besides ``momentum_buffer``: its shape for a parameter of a group, by name.
        defaults: options of its groups besides Muon's.
        finish: takes an orthogonalised matrix ``[m, n]``, its part of the slots (``[m, 1]`` or ``[1, n]``, updated in
            place) and the group; returns the update.
    """

    slots: Mapping[str, Callable[[Index, Fused, ParamGroup], Reduced]]
    defaults: Mapping[str, Any]
    finish: Callable[[Tensor, Mapping[str, Tensor], ParamGroup], Tensor]


MOMENT_EPS = 1e-8
"""Added to the root of a row's second moment (Li et al. 2025)."""

SMALLEST = 1e-30
"""The least norm that a matrix is divided by: `UPDATE_NORMS` over it is finite, so a matrix of zeros stays zeros."""

UPDATE_NORMS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "muon": torch.linalg.vector_norm,
    "rms": lambda matrix: matrix.new_tensor(0.2 * math.sqrt(matrix.numel())),
}
"""The Frobenius norm of NorMuon's update, given the orthogonalised matrix.  "muon": the matrix's own, so that learning
rates carry over from Muon; "rms": a root mean square of 0.2 as in the paper, for use with ``adjust_lr_fn="none"``."""


def _normalized(matrix: Tensor, slots: Mapping[str, Tensor], group: ParamGroup) -> Tensor:
    """Divide every row, or column (`STATISTICS`), by the root of its mean square's moving average.

    NorMuon (Li et al. 2025, arXiv 2510.05491, algorithm 1).  The average starts at zero and is not corrected for that:
    the factor is common to all rows, and `UPDATE_NORMS` takes it out.
    """
    exact = matrix.float()
    moment = slots[SECOND_MOMENT]
    summed = 1 if moment.shape[1] == 1 else 0
    moment.lerp_(exact.square().mean(dim=summed, keepdim=True), 1 - group["beta2"])
    normal = exact / moment.sqrt().add_(MOMENT_EPS)
    size = torch.linalg.vector_norm(normal).clamp_(min=SMALLEST)
    return normal.mul_(UPDATE_NORMS[group["update_norm"]](exact) / size)


STATISTICS: Mapping[str, Callable[[Index, Fused], Reduced]] = {"rows": one_column, "longer": one_line}
"""What NorMuon keeps mean squares of.  "rows": every row (a neuron), as in the paper; "longer": every row of tall
matrices and every column of wide ones, as in modded-nanogpt."""

MATRICES: Mapping[str, Method] = {
    "muon": Method({}, {}, lambda matrix, slots, group: matrix),
    "normuon": Method(
        {SECOND_MOMENT: lambda shape, fused, group: STATISTICS[group["statistics"]](shape, fused)}, NORMUON, _normalized
    ),
}


def extras_of(param: Tensor, group: Mapping[str, Any]) -> dict[str, Reduced]:
    """Return the shapes of a parameter's state besides momentum."""
    fused = fused_of(group)
    slots = MATRICES[group["algorithm"]].slots
    return {slot: reduced(tuple(param.shape), fused, group) for slot, reduced in slots.items()}


def fused_of(group: Mapping[str, Any]) -> Fused:
    """Return a group's fused matrices."""
    pieces, columns = (tuple(group[key]) if group[key] else None for key in ("pieces", "columns"))
    return Fused(pieces, columns, group["interleaved"])
