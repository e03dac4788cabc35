"""AdaMuon: every element of an orthogonalised matrix is divided by the root of its mean square."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...names.vocabulary import ADAMUON as OPTIONS
from .form import FRACTION, MatrixMethod, MethodSlot, Option, WholeMatrix, of_each
from .muon import MOMENT_EPS, SMALLEST, UPDATE_RMS

SQUARES = "squares"
"""The slot of the mean squares of orthogonalised matrices; with their owners, as it is as large as the matrix."""


def _adapted(whole: WholeMatrix) -> Tensor:
    """Return the update of Si et al. 2025 (arXiv 2507.11005, algorithm 1) for the orthogonalised sign of momentum."""
    exact, squares = whole.matrix.float(), whole.state[SQUARES]
    squares.lerp_(exact.square(), 1 - whole.options["beta2"])
    adapted = exact / squares.sqrt().add_(MOMENT_EPS)
    sizes = of_each(torch.linalg.vector_norm, adapted).clamp_(min=SMALLEST)
    return adapted.mul_(UPDATE_RMS * math.sqrt(adapted[0].numel()) / sizes)


ADAMUON = MatrixMethod(
    "adamuon",
    _adapted,
    slots={SQUARES: MethodSlot("[m, n]", at_owner=True)},
    options={"beta2": Option(OPTIONS["beta2"], *FRACTION), "adjust_lr_fn": Option(OPTIONS["adjust_lr_fn"])},
    before=torch.sign,
    rms=lambda m, n, group: UPDATE_RMS,
    stacked=True,
)
