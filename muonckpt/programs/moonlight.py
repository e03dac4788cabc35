"""MoonshotAI/Moonlight's ``Muon`` (``examples/toy_train.py``), whose checkpoints can be read but not written."""

from __future__ import annotations

from ..names.vocabulary import Convention
from .codings import betas
from .dialect import Dialect, Mark, StoredMethod
from .torch import PLAIN

_RATES = {"lr": "lr", "weight_decay": "wd"}

PROGRAM = Dialect(
    "moonlight",
    who="MoonshotAI/Moonlight",
    convention=Convention.SUM,
    methods=(
        StoredMethod(
            "muon",
            {"momentum": "momentum_buffer"},
            {**_RATES, "momentum": "momentum", "nesterov": "nesterov", "ns_steps": "ns_steps"},
            inert_options={"adamw_betas": None, "adamw_eps": None},
        ),
        StoredMethod(
            "adamw",
            {"first": "moment1", "second": "moment2", "step": "step"},
            options={**_RATES, "eps": "adamw_eps"},
            codings=(betas("adamw_betas"),),
            inert_options={"momentum": None, "nesterov": None, "ns_steps": None},
        ),
    ),
    always=frozenset({"wd", "momentum", "adamw_betas", "adamw_eps"}),
    beside=frozenset(),
    marks=(Mark(slots={"use_muon"}, options={"wd", "adamw_betas", "adamw_eps"}), Mark(slots={"use_muon", "moment1"})),
    derived=frozenset({"use_muon"}),
    constant_options={
        "muon": {
            **PLAIN,
            "pieces": None,
            "gram": None,
            "ns_coefficients": "keller",
            "adjust_lr_fn": "match_rms_adamw",
        },
        "adamw": PLAIN,
    },
    writable=False,
)
