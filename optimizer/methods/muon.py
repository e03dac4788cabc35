"""Methods that take the orthogonalised momentum: Muon, NorMuon, AdaMuon, and MuonH on a hyperball."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from ...names import vocabulary as options_of
from ...names.vocabulary import SECOND_MOMENT, ParamGroup
from .form import FRACTION, MatrixMethod, MethodSlot, Option, WholeMatrix, of_each


def orthogonal_rms(m: int, n: int, group: ParamGroup) -> float:
    """Return the root mean square of an orthogonal ``m x n`` matrix."""
    return 1 / math.sqrt(max(m, n))


MUON = MatrixMethod("muon", lambda whole: whole.matrix, rms=orthogonal_rms, stacked=True)
"""Keller Jordan et al. 2024: momentum, orthogonalised, is the update."""

MOMENT_EPS = 1e-8
"""Added to the root of a second moment (Li et al. 2025)."""

MIN_NORM = 1e-30
"""The least norm that a matrix is divided by: `UPDATE_NORMS` over it is finite, so a matrix of zeros stays zeros."""

UPDATE_RMS = 0.2
"""The root mean square of AdamW's updates (Liu et al. 2025, arXiv 2502.16982), so that its rates carry over."""


# NorMuon evens out the rows of its updates.

UPDATE_NORMS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "muon": torch.linalg.vector_norm,
    "rms": lambda matrix: matrix.new_tensor(UPDATE_RMS * math.sqrt(matrix.numel())),
}
"""The Frobenius norm of NorMuon's update, given the orthogonalised matrix.  "muon": the matrix's own, so that learning
rates carry over from Muon; "rms": a root mean square of 0.2 as in the paper, for use with ``adjust_lr_fn="none"``."""

STATISTICS: Mapping[str, MethodSlot] = {"rows": MethodSlot("[m, 1]"), "longer": MethodSlot("longer")}
"""The mean squares that NorMuon keeps.  "rows": every row (a neuron), as in the paper; "longer": every row of tall
matrices and every column of wide ones, as in modded-nanogpt."""


def _normalized(whole: WholeMatrix) -> Tensor:
    """Divide every row, or column (`STATISTICS`), by the root of its mean square's moving average.

    NorMuon (Li et al. 2025, arXiv 2510.05491, algorithm 1).  The average starts at zero and is not corrected for that:
    the factor is common to all rows, and `UPDATE_NORMS` takes it out.
    """
    exact, moment = whole.matrix.float(), whole.state[SECOND_MOMENT]
    # The average of each row's, or column's, mean square ...
    mean = partial(torch.mean, dim=1 if moment.shape[2] == 1 else 0, keepdim=True)
    moment.lerp_(of_each(mean, exact.square()), 1 - whole.options["beta2"])
    # ... divides it; then the update has the norm that the option names.
    normal = exact / moment.sqrt().add_(MOMENT_EPS)
    norms = of_each(torch.linalg.vector_norm, normal).clamp_(min=MIN_NORM)
    return normal.mul_(of_each(UPDATE_NORMS[whole.options["update_norm"]], exact) / norms)


NORMUON = MatrixMethod(
    "normuon",
    _normalized,
    slots=lambda group: {SECOND_MOMENT: STATISTICS[group["statistics"]]},
    options={
        "beta2": Option(options_of.NORMUON["beta2"], *FRACTION),
        "update_norm": Option(
            options_of.NORMUON["update_norm"], UPDATE_NORMS.__contains__, f"one of {sorted(UPDATE_NORMS)}"
        ),
        "statistics": Option(options_of.NORMUON["statistics"], STATISTICS.__contains__, f"one of {sorted(STATISTICS)}"),
    },
    rms=lambda m, n, group: UPDATE_RMS if group["update_norm"] == "rms" else orthogonal_rms(m, n, group),
    stacked=True,
)


# AdaMuon divides every element by the root of its mean square.

SQUARES = "squares"
"""The slot of the mean squares of orthogonalised matrices."""


def _adapted(whole: WholeMatrix) -> Tensor:
    """Return the update of Si et al. 2025 (arXiv 2507.11005, algorithm 1) for the orthogonalised sign of momentum."""
    exact, squares = whole.matrix.float(), whole.state[SQUARES]
    squares.lerp_(exact.square(), 1 - whole.options["beta2"])
    adapted = exact / squares.sqrt().add_(MOMENT_EPS)
    norms = of_each(torch.linalg.vector_norm, adapted).clamp_(min=MIN_NORM)
    return adapted.mul_(UPDATE_RMS * math.sqrt(adapted[0].numel()) / norms)


ADAMUON = MatrixMethod(
    "adamuon",
    _adapted,
    slots={SQUARES: MethodSlot()},
    options={
        "beta2": Option(options_of.ADAMUON["beta2"], *FRACTION),
        "adjust_lr_fn": Option(options_of.ADAMUON["adjust_lr_fn"]),
    },
    before=torch.sign,
    rms=lambda m, n, group: UPDATE_RMS,
    stacked=True,
)


# MuonH: the weight stays on the sphere of its first norm, and moves there by a fraction of that norm.

RADIUS = "radius"
"""The slot of the norm that the weight had before its first update; 0 until then."""


def _on_the_sphere(whole: WholeMatrix) -> Tensor:
    """Return what takes the weight to ``r Norm(W - lr r Norm(U))``, given the orthogonalised momentum ``U``.

    Hyperball (Wen et al. 2025, "From weight decay to hyperball optimization", part 1).  The result may be rounded to 16
    bits: the next step begins from the radius, so errors do not add up.
    """
    assert whole.weight is not None, "requested below"
    direction, weight, rate = whole.matrix.float(), whole.weight.float(), float(whole.options["lr"])
    if rate == 0:
        return torch.zeros_like(direction)
    # The first update keeps the norm that the weight has then.
    radius, norms = whole.state[RADIUS], partial(of_each, torch.linalg.vector_norm)
    radius.copy_(torch.where(radius > 0, radius, norms(weight)))
    # A step along the direction, back to the sphere, and the difference as an update by that rate.
    step = weight - direction * (rate * radius / norms(direction).clamp_(min=MIN_NORM))
    target: Tensor = step * (radius / norms(step).clamp_(min=MIN_NORM))
    return (weight - target) / rate


HYPERBALL = MatrixMethod(
    "hyperball",
    _on_the_sphere,
    slots={RADIUS: MethodSlot("[1, 1]")},
    options={
        "weight_decay": Option(
            options_of.HYPERBALL["weight_decay"], lambda decay: decay == 0, "0, as the norm does not change"
        ),
        "adjust_lr_fn": Option(
            options_of.HYPERBALL["adjust_lr_fn"],
            lambda scale: scale == "none",
            "'none', as steps are fractions of the norm",
        ),
    },
    weight=True,
    stacked=True,
)
