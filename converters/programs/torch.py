"""torch.optim.Muon and AdamW of torch 2.13 (``torch/optim/_muon.py``, ``adamw.py``), in nested state dicts."""

from __future__ import annotations

from collections.abc import Mapping

from ...vocabulary import PARAMS, SCHEDULED, Convention
from .codings import COUPLED, betas, coefficients, scale
from .dialect import LISTED, MODEL, NESTED, NUMBERED, RATES, UNFUSED, Dialect, Mark, MomentumOptions, StoredMethod

KELLER = (3.4445, -4.775, 2.0315)
SCALES = {"original": ("original", None), "rms": ("match_rms_adamw",)}
MUON_OPTIONS = {**RATES, "momentum": "momentum", "nesterov": "nesterov", "eps": "eps"}
MUON_ASSUMED = {"ns_coefficients": KELLER, "ns_steps": 5, "nesterov": True, "eps": 1e-7, "adjust_lr_fn": None}
PLAIN: Mapping[str, object] = {"cautious": False, **UNFUSED}
"""Facts of a program whose decay is never cautious."""


def muon(scales: Mapping[str, tuple[object, ...]]) -> StoredMethod:
    return StoredMethod(
        "muon",
        {"momentum": "momentum_buffer"},
        MUON_OPTIONS,
        (coefficients(of_steps=False), scale("adjust_lr_fn", scales)),
        assumed=MUON_ASSUMED,
        family="torch",
    )


ADAMW = StoredMethod(
    "adamw",
    {"first": "exp_avg", "second": "exp_avg_sq", "step": "step"},
    {**RATES, "eps": "eps", "maximize": "maximize", "amsgrad": "amsgrad"},
    (betas("betas"), COUPLED),
    idle={
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": True,
    },
    assumed={"eps": 1e-8},
    family="torch",
)
METHODS = (muon(SCALES), ADAMW)

GROUP = MomentumOptions(
    always=frozenset({*MUON_OPTIONS.values(), "ns_coefficients", "ns_steps", "adjust_lr_fn"}),
    beside=frozenset({PARAMS, *SCHEDULED, "param_names", "name"})
    | {"betas", "amsgrad", "foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay"},
)  # fmt: skip
"""Options of torch.optim.Muon; beside them those that schedulers, state dicts and users add, and those of AdamW.  Other
programs write some of them, and other options beside them."""

PROGRAM = Dialect(
    "torch",
    "torch.optim.Muon and AdamW, nested state dicts",
    MODEL,
    NESTED,
    LISTED,
    Convention.EMA,
    METHODS,
    GROUP,
    marks=(Mark(closed=True),),
    facts={"muon": {**PLAIN, "pieces": None, "gram": None}, "adamw": PLAIN},
)

# torch's keys and slots, from nobody knows which program.

_NEVER_ADDED = frozenset({"ns_coefficients"})
BY_NUMBER = Dialect(
    "fully_shard",
    "fsdp_dtensor, dialect B: megatron_fsdp.fully_shard, state by number",
    MODEL,
    NUMBERED,
    LISTED,
    None,
    METHODS,
    unsaid=_NEVER_ADDED,
)
UNKNOWN = Dialect(
    "dcp",
    "torch's nested state dicts, program unknown; also fsdp_dtensor, dialect C",
    MODEL,
    NESTED,
    LISTED,
    None,
    METHODS,
    unsaid=_NEVER_ADDED,
)
