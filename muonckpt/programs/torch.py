"""torch.optim.Muon and AdamW of torch 2.13 (``torch/optim/_muon.py``, ``adamw.py``), also as torchtitan saves them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..names import vocabulary
from ..names.coefficients import COEFFICIENTS
from ..names.keys import KeyPlace
from ..names.vocabulary import Convention
from .codings import ALGORITHM, COUPLED, betas, coefficients, scale
from .dialect import FLAT, RATES, TRIPLE, UNFUSED, Dialect, Keys, Mark, StoredMethod

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
        options=MUON_OPTIONS,
        codings=(coefficients(of_steps=False), ALGORITHM, scale("adjust_lr_fn", scales)),
        default_options=MUON_DEFAULTS,
        family="torch",
    )


ADAMW = StoredMethod(
    "adamw",
    {"first": "exp_avg", "second": "exp_avg_sq", "step": "step"},
    options={**RATES, "eps": "eps", "maximize": "maximize", "amsgrad": "amsgrad"},
    codings=(betas("betas"), COUPLED),
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

ALWAYS = frozenset({*MUON_OPTIONS.values(), "ns_coefficients", "ns_steps", "adjust_lr_fn"})
_BESIDE = ADAMW.all_options | {"use_cuda_graph"}
"""torchtitan gives options of AdamW to both, and a later torch.optim.Muon may have that one (PyTorch #187132)."""

PROGRAM = Dialect(
    "torch",
    who="torch.optim.Muon and AdamW, nested state dicts",
    convention=Convention.EMA,
    methods=METHODS,
    always=ALWAYS,
    beside=_BESIDE,
    kinds={"ns_coefficients": TRIPLE},
    marks=(Mark(options=ALWAYS),),
    constant_options={"muon": {**PLAIN, "pieces": None, **STANDARD}, "adamw": PLAIN},
)

TITAN = replace(
    PROGRAM,
    name="titan",
    who="torchtitan: a flat optimizer, the model at the top",
    methods=(muon({**SCALES, "spectral": ("spectral_unclamped",)}), ADAMW),
    keys=Keys((FLAT,), (KeyPlace(()),)),
    marks=(Mark(options=ALWAYS, at_home=True),),
    constant_options={"muon": {**PLAIN, **STANDARD}, "adamw": PLAIN},
)
"""torchtitan: all optimizers in one flat state dict, with the model's weights at the top."""

# torch's keys and slots, of an unknown program.

UNKNOWN = Dialect(
    "dcp",
    "torch's nested state dicts, program unknown; also fsdp_dtensor, dialect C",
    convention=None,
    methods=METHODS,
    unwritten_options=frozenset({"ns_coefficients"}),
)
BY_NUMBER = replace(
    UNKNOWN,
    name="fully_shard",
    who="fsdp_dtensor, dialect B: megatron_fsdp.fully_shard, state by number",
    keys=Keys(numbered=frozenset(Keys().optimizers)),
)
