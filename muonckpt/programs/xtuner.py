"""InternLM/XTuner (``xtuner/v1/optim/muon.py``), which has its optimizer from dion."""

from __future__ import annotations

from ..names.vocabulary import Convention
from .codings import FLATTEN, equal_parts, lr_ratio, scale
from .dialect import COUNT, FLAG, LISTED, MODEL, NESTED, Dialect, Mark, StoredMethod
from .dion import BETAS, MATRIX, OF_MATRICES, OF_SCALARS, SCALES, SHARED, option_table
from .torch import PLAIN

PROGRAM = Dialect(
    "xtuner",
    "InternLM/XTuner",
    MODEL,
    NESTED,
    LISTED,
    Convention.SUM,
    (
        StoredMethod(
            "muon",
            {"momentum": "momentum"},
            {**SHARED, **MATRIX},
            (scale("adjust_lr", {**SCALES, "none": ("none",)}), FLATTEN, equal_parts("num_experts", True)),
            OF_SCALARS,
            {"nesterov": False, "epsilon": 1e-8, "adjust_lr": "rms_norm", "num_experts": 1},
            {"lr_ratio": lr_ratio},
        ),
        StoredMethod(
            "adamw",
            {"first": "momentum", "second": "variance"},
            {**SHARED, **BETAS, "eps": "epsilon"},
            idle={**OF_MATRICES, "adjust_lr": "rms_norm", "num_experts": 1},
            assumed={"epsilon": 1e-8},
        ),
    ),
    option_table({"num_experts": COUNT, "clip_grad": FLAG}),
    marks=(
        Mark(slots={"lr_ratio"}),
        Mark(options={"num_experts", "algorithm", "epsilon", "mu"}),
        Mark(options={"clip_grad", "algorithm", "epsilon", "mu"}),
    ),
    derived=frozenset({"lr_ratio"}),
    method_option="algorithm",
    facts={"muon": {**PLAIN, "ns": "quintic", "ns_steps": 5}, "adamw": PLAIN},
    hints={"pieces": "muon_split_sizes, an argument of XTuner's constructor"},
)
