"""torch.optim.Muon and AdamW of torch 2.13 (``torch/optim/_muon.py``, ``adamw.py``), also as torchtitan saves them."""

from __future__ import annotations

from collections.abc import Mapping

from ..names import vocabulary
from ..names.coefficients import COEFFICIENTS
from ..names.vocabulary import Convention
from .codings import ALGORITHM, COUPLED, betas, coefficients, scale
from .dialect import (
    FLAT,
    FLAT_OPTIONS,
    NUMBERED,
    RATES,
    UNFUSED,
    Dialect,
    Kinds,
    Mark,
    OptionKind,
    OptionTable,
    StoredMethod,
    Template,
)

KELLER = COEFFICIENTS["keller"].tail
SCALES = {"original": ("original", None), "match_rms_adamw": ("match_rms_adamw",)}
MUON_OPTIONS = {**RATES, "momentum": "momentum", "nesterov": "nesterov", "eps": "eps"}
MUON_DEFAULTS = {"ns_coefficients": KELLER, "ns_steps": 5, "nesterov": True, "eps": 1e-7, "adjust_lr_fn": None}
PLAIN: Mapping[str, object] = {**vocabulary.PLAIN, **UNFUSED}
"""Facts of a program that lacks these options."""
STANDARD: Mapping[str, object] = {"gram": None, "ns_dtype": "bfloat16"}
"""The form of Newton-Schulz that torch computes unless its options say another one."""


def muon(scales: Mapping[str, tuple[object, ...]]) -> StoredMethod:
    return StoredMethod(
        "muon",
        {"momentum": "momentum_buffer"},
        MUON_OPTIONS,
        (coefficients(of_steps=False), ALGORITHM, scale("adjust_lr_fn", scales)),
        default_options=MUON_DEFAULTS,
        family="torch",
    )


ADAMW = StoredMethod(
    "adamw",
    {"first": "exp_avg", "second": "exp_avg_sq", "step": "step"},
    {**RATES, "eps": "eps", "maximize": "maximize", "amsgrad": "amsgrad"},
    (betas("betas"), COUPLED),
    inert_options={
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": True,
    },
    default_options={"eps": 1e-8},
    family="torch",
)
METHODS = (muon(SCALES), ADAMW)

RATE_KINDS: Mapping[str, OptionKind] = {"lr": Kinds.NUMBER, "weight_decay": Kinds.NUMBER}
MUON_KINDS: Mapping[str, OptionKind] = {
    **RATE_KINDS,
    "momentum": Kinds.NUMBER,
    "nesterov": Kinds.FLAG,
    "eps": Kinds.NUMBER,
    "ns_steps": Kinds.COUNT,
    "adjust_lr_fn": Kinds.TEXT.or_none(),
}
ADAMW_KINDS: Mapping[str, OptionKind] = {
    "betas": Kinds.PAIR,
    "eps": Kinds.NUMBER,
    "foreach": Kinds.FLAG.or_none(),
    "fused": Kinds.FLAG.or_none(),
    **dict.fromkeys(("amsgrad", "maximize", "capturable", "differentiable", "decoupled_weight_decay"), Kinds.FLAG),
}
NEXT_KINDS: Mapping[str, OptionKind] = {
    "ns_algorithm": OptionKind('"standard" or "gram"', lambda value: value in ("standard", "gram")),
    "gram_newton_schulz_config": Kinds.TABLE.or_none(),
    "gram_ns_coefficients": Kinds.TRIPLES,
    "gram_ns_reset_iterations": Kinds.COUNTS,
    "use_cuda_graph": Kinds.FLAG,
}
"""Options that a later torch.optim.Muon may have (PyTorch #187132, open in November 2026)."""

OPTIONS = OptionTable({**MUON_KINDS, "ns_coefficients": Kinds.TRIPLE}, {**ADAMW_KINDS, **NEXT_KINDS}, closed=True)
"""Options of torch.optim.Muon; beside them those of AdamW; torchtitan gives some of them to both."""

PROGRAM = Dialect(
    "torch",
    "torch.optim.Muon and AdamW, nested state dicts",
    Convention.EMA,
    METHODS,
    OPTIONS,
    marks=(Mark(closed=True),),
    constant_options={"muon": {**PLAIN, "pieces": None, **STANDARD}, "adamw": PLAIN},
)

TITAN = Dialect(
    "titan",
    "torchtitan: a flat optimizer, the model at the top",
    Convention.EMA,
    (muon({**SCALES, "spectral": ("spectral_unclamped",)}), ADAMW),
    OPTIONS,
    Template(("{name}",)),
    FLAT,
    FLAT_OPTIONS,
    marks=(Mark(closed=True, at_home=True),),
    constant_options={"muon": {**PLAIN, **STANDARD}, "adamw": PLAIN},
)
"""torchtitan: all optimizers in one flat state dict, with the model's weights at the top."""

# torch's keys and slots, of an unknown program.

_NEVER_ADDED = frozenset({"ns_coefficients"})
_KINDS = OptionTable(beside={**MUON_KINDS, **ADAMW_KINDS, **NEXT_KINDS, "ns_coefficients": Kinds.TRIPLES})
BY_NUMBER = Dialect(
    "fully_shard",
    "fsdp_dtensor, dialect B: megatron_fsdp.fully_shard, state by number",
    None,
    METHODS,
    _KINDS,
    state=NUMBERED,
    unwritten_options=_NEVER_ADDED,
)
UNKNOWN = Dialect(
    "dcp",
    "torch's nested state dicts, program unknown; also fsdp_dtensor, dialect C",
    None,
    METHODS,
    _KINDS,
    unwritten_options=_NEVER_ADDED,
)
