"""MuonH: the weight stays on the sphere of its first norm, and moves there by a fraction of that norm."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ...names.vocabulary import HYPERBALL as OPTIONS
from .form import MatrixMethod, MethodSlot, Option, WholeMatrix, of_each
from .muon import SMALLEST

RADIUS = "radius"
"""The slot of the norm that the weight had before its first update; 0 until then."""


def _on_the_sphere(whole: WholeMatrix) -> Tensor:
    """Return what takes the weight to ``r Norm(W - lr r Norm(U))``, given the orthogonalised momentum ``U``.

    Hyperball (Wen et al. 2025, "From weight decay to hyperball optimization", part 1).  The result may be rounded to 16
    bits: the next step begins from the radius, so errors do not add up.
    """
    assert whole.weight is not None, "asked for below"
    direction, weight, rate = whole.matrix.float(), whole.weight.float(), float(whole.options["lr"])
    if rate == 0:
        return torch.zeros_like(direction)
    radius = whole.state[RADIUS]
    norms = partial(of_each, torch.linalg.vector_norm)
    radius.copy_(torch.where(radius > 0, radius, norms(weight)))
    moved = weight - direction * (rate * radius / norms(direction).clamp_(min=SMALLEST))
    there: Tensor = moved * (radius / norms(moved).clamp_(min=SMALLEST))
    return (weight - there) / rate


HYPERBALL = MatrixMethod(
    "hyperball",
    _on_the_sphere,
    slots={RADIUS: MethodSlot("[1, 1]")},
    options={
        "weight_decay": Option(OPTIONS["weight_decay"], lambda decay: decay == 0, "0, as the norm does not change"),
        "adjust_lr_fn": Option(
            OPTIONS["adjust_lr_fn"], lambda scale: scale == "none", "'none', as steps are fractions of the norm"
        ),
    },
    weight=True,
    stacked=True,
)
