"""torchtitan: torch's optimizers, all in one flat state dict, with the model's weights at the top."""

from __future__ import annotations

from ..names.vocabulary import Convention
from .dialect import FLAT, FLAT_OPTIONS, Dialect, Mark, Template
from .torch import ADAMW, OPTIONS, PLAIN, SCALES, muon

PROGRAM = Dialect(
    "titan",
    "torchtitan: a flat optimizer, the model at the top",
    Template(("{name}",)),
    FLAT,
    FLAT_OPTIONS,
    Convention.EMA,
    (muon({**SCALES, "spectral": ("spectral_unclamped",)}), ADAMW),
    OPTIONS,
    marks=(Mark(closed=True, at_home=True),),
    facts={"muon": {**PLAIN, "gram": None}, "adamw": PLAIN},
)
