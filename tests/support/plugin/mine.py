"""A program that another package brings: torch's nested keys, and a momentum that it calls ``velocity``."""

from __future__ import annotations

from muonckpt.names.vocabulary import Convention
from muonckpt.programs.dialect import RATES, Dialect, Mark, StoredMethod

PROGRAM = Dialect(
    "mine",
    "a program of one's own",
    Convention.SUM,
    (StoredMethod("muon", {"momentum": "velocity"}, {**RATES, "momentum": "inertia"}),),
    marks=(Mark(slots={"velocity"}),),
)
