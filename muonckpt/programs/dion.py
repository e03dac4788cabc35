"""microsoft/dion (``dion/muon.py``) and XTuner: one class for matrices and scalars, so every group has every option."""

from __future__ import annotations

from collections.abc import Mapping

from ..names.vocabulary import Convention
from .codings import FLATTEN, SPLITS, equal_parts, lr_ratio, scale
from .dialect import RATES, UNFUSED, Dialect, Mark, StoredMethod
from .torch import PLAIN

SHARED = {**RATES, "step": "step"}
MATRIX = {"momentum": "mu", "nesterov": "nesterov", "eps": "epsilon"}
BETAS = {"beta1": "beta1", "beta2": "beta2"}
OF_MATRICES: Mapping[str, object] = {"mu": 0.95, "nesterov": False, "flatten": False}
OF_SCALARS: Mapping[str, object] = {"beta1": 0.9, "beta2": 0.95}
_ALWAYS = frozenset({"algorithm", "mu"})

SCALES = {"spectral": ("spectral_norm",), "match_rms_adamw": ("rms_norm",), "none": (None,)}
"""The words of ``adjust_lr`` for each common scale."""

_SHARED = {**SHARED, "cautious": "cautious_wd"}
_MATRIX_CODINGS = (scale("adjust_lr", SCALES), FLATTEN, SPLITS)
_ASSUMED = {"nesterov": False, "epsilon": 1e-8, "adjust_lr": "spectral_norm", "cautious_wd": False}
_INERT_OPTIONS = {**OF_MATRICES, "adjust_lr": "spectral_norm"}

PROGRAM = Dialect(
    "dion",
    who="microsoft/dion",
    convention=Convention.SUM,
    methods=(
        StoredMethod(
            "muon",
            slots={"momentum": "momentum"},
            options={**_SHARED, **MATRIX},
            codings=_MATRIX_CODINGS,
            inert_options=OF_SCALARS,
            default_options=_ASSUMED,
        ),
        StoredMethod(
            "normuon",
            slots={"momentum": "momentum", "dion_rows": "variance_neuron"},
            options={**_SHARED, **MATRIX, "beta2": "muon_beta2"},
            codings=_MATRIX_CODINGS,
            inert_options=OF_SCALARS,
            default_options=_ASSUMED,
        ),
        StoredMethod(
            "adamw",
            {"first": "momentum", "second": "variance", "step": "step_dev"},
            {**_SHARED, **BETAS, "eps": "epsilon"},
            inert_options=_INERT_OPTIONS,
            default_options={"epsilon": 1e-8, "cautious_wd": False},
        ),
        StoredMethod(
            "lion",
            {"first": "momentum"},
            {**_SHARED, **BETAS},
            inert_options={**_INERT_OPTIONS, "epsilon": 1e-8},
            default_options={"cautious_wd": False},
        ),
    ),
    always=_ALWAYS,
    beside=frozenset(),
    marks=(
        Mark(slots={"step_dev"}),
        Mark(slots={"variance_neuron"}),
        Mark(options={"cautious_wd", "algorithm", "epsilon", "mu"}),
    ),
    method_option="algorithm",
    constant_options=dict.fromkeys(("muon", "normuon", "adamw", "lion"), UNFUSED),
    hints={
        "ns_coefficients": "an argument of dion's constructor: 'polar_express_dion' is its default, 'quintic' with "
        "use_polar_express=False, 'polar_express_gram' with use_gram_newton_schulz=True",
        "ns_steps": "5 in dion",
    },
)

XTUNER = Dialect(
    "xtuner",
    who="InternLM/XTuner",
    convention=Convention.SUM,
    methods=(
        StoredMethod(
            "muon",
            slots={"momentum": "momentum"},
            options={**SHARED, **MATRIX},
            codings=(scale("adjust_lr", {**SCALES, "none": ("none",)}), FLATTEN, equal_parts("num_experts", True)),
            inert_options=OF_SCALARS,
            default_options={"nesterov": False, "epsilon": 1e-8, "adjust_lr": "rms_norm", "num_experts": 1},
            derived={"lr_ratio": lr_ratio},
        ),
        StoredMethod(
            "adamw",
            {"first": "momentum", "second": "variance"},
            {**SHARED, **BETAS, "eps": "epsilon"},
            inert_options={**OF_MATRICES, "adjust_lr": "rms_norm", "num_experts": 1},
            default_options={"epsilon": 1e-8},
        ),
    ),
    always=_ALWAYS,
    beside=frozenset({"clip_grad"}),
    marks=(
        Mark(slots={"lr_ratio"}),
        Mark(options={"num_experts", "algorithm", "epsilon", "mu"}),
        Mark(options={"clip_grad", "algorithm", "epsilon", "mu"}),
    ),
    derived=frozenset({"lr_ratio"}),
    method_option="algorithm",
    constant_options={"muon": {**PLAIN, "ns_coefficients": "quintic", "ns_steps": 5}, "adamw": PLAIN},
    hints={"pieces": "muon_split_sizes, an argument of XTuner's constructor"},
)
"""InternLM/XTuner (``xtuner/v1/optim/muon.py``), which has its optimizer from dion."""
