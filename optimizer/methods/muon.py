"""Muon, and NorMuon, which evens out the rows of its updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from ...names.vocabulary import NORMUON as OPTIONS, SECOND_MOMENT, ParamGroup
from .form import FRACTION, MatrixMethod, MethodSlot, Option, WholeMatrix, of_each


def orthogonal_rms(m: int, n: int, group: ParamGroup) -> float:
    """Return the root mean square of an orthogonal ``m x n`` matrix."""
    return 1 / math.sqrt(max(m, n))


MUON = MatrixMethod("muon", lambda whole: whole.matrix, rms=orthogonal_rms, stacked=True)
"""Keller Jordan et al. 2024: momentum, orthogonalised, is the update."""

MOMENT_EPS = 1e-8
"""Added to the root of a row's second moment (Li et al. 2025)."""

SMALLEST = 1e-30
"""The least norm that a matrix is divided by: `UPDATE_NORMS` over it is finite, so a matrix of zeros stays zeros."""

UPDATE_RMS = 0.2
"""The root mean square of AdamW's updates (Liu et al. 2025, arXiv 2502.16982), so that its rates carry over."""

UPDATE_NORMS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "muon": torch.linalg.vector_norm,
    "rms": lambda matrix: matrix.new_tensor(UPDATE_RMS * math.sqrt(matrix.numel())),
}
"""The Frobenius norm of NorMuon's update, given the orthogonalised matrix.  "muon": the matrix's own, so that learning
rates carry over from Muon; "rms": a root mean square of 0.2 as in the paper, for use with ``adjust_lr_fn="none"``."""

STATISTICS: Mapping[str, MethodSlot] = {"rows": MethodSlot("[m, 1]"), "longer": MethodSlot("longer")}
"""What NorMuon keeps mean squares of.  "rows": every row (a neuron), as in the paper; "longer": every row of tall
matrices and every column of wide ones, as in modded-nanogpt."""


def _normalized(whole: WholeMatrix) -> Tensor:
    """Divide every row, or column (`STATISTICS`), by the root of its mean square's moving average.

    NorMuon (Li et al. 2025, arXiv 2510.05491, algorithm 1).  The average starts at zero and is not corrected for that:
    the factor is common to all rows, and `UPDATE_NORMS` takes it out.
    """
    exact, options = whole.matrix.float(), whole.options
    moment = whole.state[SECOND_MOMENT]
    summed = 1 if moment.shape[2] == 1 else 0
    moment.lerp_(of_each(partial(torch.mean, dim=summed, keepdim=True), exact.square()), 1 - options["beta2"])
    normal = exact / moment.sqrt().add_(MOMENT_EPS)
    sizes = of_each(torch.linalg.vector_norm, normal).clamp_(min=SMALLEST)
    return normal.mul_(of_each(UPDATE_NORMS[options["update_norm"]], exact) / sizes)


NORMUON = MatrixMethod(
    "normuon",
    _normalized,
    slots=lambda group: {SECOND_MOMENT: STATISTICS[group["statistics"]]},
    options={
        "beta2": Option(OPTIONS["beta2"], *FRACTION),
        "update_norm": Option(OPTIONS["update_norm"], UPDATE_NORMS.__contains__, f"one of {sorted(UPDATE_NORMS)}"),
        "statistics": Option(OPTIONS["statistics"], STATISTICS.__contains__, f"one of {sorted(STATISTICS)}"),
    },
    rms=lambda m, n, group: UPDATE_RMS if group["update_norm"] == "rms" else orthogonal_rms(m, n, group),
    stacked=True,
)
