"""Optimizers of scripts and closures, whose checkpoints can be read but not written.

But for Moonlight's they do not tell the program, so no registry has them: `lab.doctor`, which sees the optimizer, reads
their groups.
"""

from __future__ import annotations

from ..names.vocabulary import Convention
from .codings import betas, flattened_kernels
from .dialect import RATES, Dialect, Kinds, Mark, OptionTable, StoredMethod
from .torch import PLAIN, RATE_KINDS

_MOMENTUM = {"momentum": "momentum_buffer"}
_CONSTANTS = {**PLAIN, "gram": None, "ns_dtype": "bfloat16"}

KELLER = Dialect(
    "keller",
    "Keller Jordan's script (muon.py)",
    Convention.EMA,
    (
        StoredMethod(
            "muon",
            _MOMENTUM,
            {**RATES, "momentum": "momentum"},
            (flattened_kernels(),),
            inert_options={"use_muon": True},
        ),
        StoredMethod(
            "adamw",
            {"first": "exp_avg", "second": "exp_avg_sq", "step": "step"},
            {**RATES, "eps": "eps"},
            (betas("betas"),),
            inert_options={"use_muon": False},
        ),
    ),
    OptionTable(
        {**RATE_KINDS, "momentum": Kinds.NUMBER},
        {"use_muon": Kinds.FLAG},
        {"betas": Kinds.PAIR, "eps": Kinds.NUMBER},
        closed=True,
    ),
    constant_options={
        "muon": {**_CONSTANTS, "pieces": None, "nesterov": True, "scale": "original"}
        | {"ns": "keller", "ns_steps": 5, "eps": 1e-7},
        "adamw": PLAIN,
    },
    writable=False,
)
"""``Muon``, ``SingleDeviceMuon`` and their siblings ``…WithAuxAdam`` of KellerJordan/Muon 857d1ad, with the scale of
flattened kernels that it has since January 2026."""

EMERGING = Dialect(
    "emerging",
    "NVIDIA's Emerging-Optimizers, and Megatron's TensorParallelMuon",
    Convention.EMA,
    (StoredMethod("muon", _MOMENTUM, {**RATES, "momentum": "momentum"}),),
    OptionTable({**RATE_KINDS, "momentum": Kinds.NUMBER}),
    constant_options={"muon": {**_CONSTANTS, "eps": 1e-15}},
    writable=False,
)
"""``Muon`` of NVIDIA-NeMo/Emerging-Optimizers fd77292: all but rates and momentum are in its closure."""

EMERGING_SCALES = {"shape_scaling": ("original", 1.0), "unit_rms_norm": ("spectral", 1.0), "spectral": ("rms", 5.0)}
"""The common scale of each value of its ``scale_mode``, and the factor on that: ``rms`` has 0.2 before the root."""

_MOONLIGHT_RATES = {"lr": "lr", "weight_decay": "wd"}

MOONLIGHT = Dialect(
    "moonlight",
    "MoonshotAI/Moonlight",
    Convention.SUM,
    (
        StoredMethod(
            "muon",
            {"momentum": "momentum_buffer"},
            {**_MOONLIGHT_RATES, "momentum": "momentum", "nesterov": "nesterov", "ns_steps": "ns_steps"},
            inert_options={"adamw_betas": None, "adamw_eps": None},
        ),
        StoredMethod(
            "adamw",
            {"first": "moment1", "second": "moment2", "step": "step"},
            {**_MOONLIGHT_RATES, "eps": "adamw_eps"},
            (betas("adamw_betas"),),
            inert_options={"momentum": None, "nesterov": None, "ns_steps": None},
        ),
    ),
    OptionTable(
        {"wd": Kinds.NUMBER, "momentum": Kinds.NUMBER, "adamw_betas": Kinds.PAIR, "adamw_eps": Kinds.NUMBER},
        {"lr": Kinds.NUMBER, "nesterov": Kinds.FLAG, "ns_steps": Kinds.COUNT},
        closed=True,
    ),
    marks=(Mark(slots={"use_muon"}, options={"wd", "adamw_betas", "adamw_eps"}), Mark(slots={"use_muon", "moment1"})),
    derived=frozenset({"use_muon"}),
    constant_options={"muon": {**PLAIN, "pieces": None, "gram": None, "ns": "keller", "scale": "rms"}, "adamw": PLAIN},
    writable=False,
)
"""``Muon`` of MoonshotAI/Moonlight (``examples/toy_train.py``)."""
