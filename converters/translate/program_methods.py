"""The update methods of the known programs: their slots, and what the options of their parameter groups mean.

Sources: the constructors and the steps of torch 2.13 (``torch/optim/_muon.py``, ``adamw.py``), microsoft/dion
(``dion/muon.py``), InternLM/XTuner (``xtuner/v1/optim/muon.py``), VeOmni (``veomni/optim/muon.py``), Moonlight
(``examples/toy_train.py``) and megatron-core 0.19.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...vocabulary import EXP_AVG, EXP_AVG_SQ, MASTER, MOMENTUM, MUON_CONVENTION, SECOND_MOMENT, STEP
from .codings import COUPLED, FLATTEN, GRAM, SPLITS, betas, coefficients, equal_parts, lr_ratio, scale
from .dialect import StoredMethod

_RATES = {"lr": "lr", "weight_decay": "weight_decay"}
_MUON = {**_RATES, "momentum": "momentum", "nesterov": "nesterov", "eps": "eps"}
_KELLER = (3.4445, -4.775, 2.0315)

UNFUSED: Mapping[str, object] = {"columns": None, "interleaved": 1, "maximize": False}
"""What no other program can say, and none does: parameters of which columns or interleaved rows are fused."""

PLAIN: Mapping[str, object] = {"cautious": False, **UNFUSED}
"""Of programs whose decay is never cautious as well."""

# torch.optim.Muon and AdamW.
_TORCH_SCALES = {"original": ("original", None), "rms": ("match_rms_adamw",)}
_TITAN_SCALES = {**_TORCH_SCALES, "spectral": ("spectral_unclamped",)}
_TORCH_MUON_OPTIONS, _TORCH_MUON_IDLE = _MUON, dict[str, object]()
_TORCH_MUON_ASSUMED = {"ns_coefficients": _KELLER, "ns_steps": 5, "nesterov": True, "eps": 1e-7, "adjust_lr_fn": None}


def _torch_muon(scales: Mapping[str, tuple[object, ...]]) -> StoredMethod:
    return StoredMethod(
        "muon",
        {"momentum": "momentum_buffer"},
        _TORCH_MUON_OPTIONS,
        (coefficients(of_steps=False), scale("adjust_lr_fn", scales)),
        _TORCH_MUON_IDLE,
        _TORCH_MUON_ASSUMED,
    )


_TORCH_ADAMW = StoredMethod(
    "adamw",
    {"first": "exp_avg", "second": "exp_avg_sq", "step": "step"},
    {**_RATES, "eps": "eps", "maximize": "maximize"},
    (betas("betas"), COUPLED),
    {"amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False,
     "fused": None, "decoupled_weight_decay": True},
    {"eps": 1e-8},
)  # fmt: skip
TORCH = (_torch_muon(_TORCH_SCALES), _TORCH_ADAMW)
TITAN = (_torch_muon(_TITAN_SCALES), _TORCH_ADAMW)
VEOMNI = (
    StoredMethod(
        "muon",
        {"momentum": "momentum_buffer"},
        _MUON,
        (coefficients(of_steps=True), scale("adjust_lr_fn", _TORCH_SCALES), GRAM, equal_parts("head_blocks", False)),
        {"gram_ns_reset_iterations": (2,)},
        {**_TORCH_MUON_ASSUMED, "ns_implementation": "gram_quack"},
    ),
    _TORCH_ADAMW,
)

# dion and XTuner: one class for matrices and scalars, so every group has every option.
_SHARED = {**_RATES, "step": "step"}
_DION = {**_SHARED, "cautious": "cautious_wd"}
_MATRIX = {"momentum": "mu", "nesterov": "nesterov", "eps": "epsilon"}
_MEANS = {"beta1": "beta1", "beta2": "beta2"}
_OF_MATRICES: Mapping[str, object] = {"mu": 0.95, "nesterov": False, "flatten": False}
_OF_SCALARS: Mapping[str, object] = {"beta1": 0.9, "beta2": 0.95}
_DION_SCALE = scale("adjust_lr", {"spectral": ("spectral_norm",), "rms": ("rms_norm",), "none": (None,)})
_DION_MATRIX = (_DION_SCALE, FLATTEN, SPLITS)
_DION_ASSUMED = {"nesterov": False, "epsilon": 1e-8, "adjust_lr": "spectral_norm", "cautious_wd": False}
_DION_IDLE = {**_OF_MATRICES, "adjust_lr": "spectral_norm"}
DION = (
    StoredMethod("muon", {"momentum": "momentum"}, {**_DION, **_MATRIX}, _DION_MATRIX, _OF_SCALARS, _DION_ASSUMED),
    StoredMethod("normuon", {"momentum": "momentum", "dion_rows": "variance_neuron"},
                 {**_DION, **_MATRIX, "beta2": "muon_beta2"}, _DION_MATRIX, _OF_SCALARS, _DION_ASSUMED),
    StoredMethod("adamw", {"first": "momentum", "second": "variance", "step": "step_dev"},
                 {**_DION, **_MEANS, "eps": "epsilon"}, (), _DION_IDLE, {"epsilon": 1e-8, "cautious_wd": False}),
    StoredMethod("lion", {"first": "momentum"}, {**_DION, **_MEANS}, (), {**_DION_IDLE, "epsilon": 1e-8},
                 {"cautious_wd": False}),
)  # fmt: skip
_XTUNER_SCALE = scale("adjust_lr", {"spectral": ("spectral_norm",), "rms": ("rms_norm",), "none": ("none",)})
XTUNER = (
    StoredMethod("muon", {"momentum": "momentum"}, {**_SHARED, **_MATRIX},
                 (_XTUNER_SCALE, FLATTEN, equal_parts("num_experts", True)), _OF_SCALARS,
                 {"nesterov": False, "epsilon": 1e-8, "adjust_lr": "rms_norm", "num_experts": 1},
                 {"lr_ratio": lr_ratio}),
    StoredMethod("adamw", {"first": "momentum", "second": "variance"}, {**_SHARED, **_MEANS, "eps": "epsilon"}, (),
                 {**_OF_MATRICES, "adjust_lr": "rms_norm", "num_experts": 1}, {"epsilon": 1e-8}),
)  # fmt: skip

MOONLIGHT = (
    StoredMethod("muon", {"momentum": "momentum_buffer"},
                 {"lr": "lr", "weight_decay": "wd", "momentum": "momentum", "nesterov": "nesterov",
                  "ns_steps": "ns_steps"}, (), {"adamw_betas": None, "adamw_eps": None}),
    StoredMethod("adamw", {"first": "moment1", "second": "moment2", "step": "step"},
                 {"lr": "lr", "weight_decay": "wd", "eps": "adamw_eps"}, (betas("adamw_betas"),),
                 {"momentum": None, "nesterov": None, "ns_steps": None}),
)  # fmt: skip

# Ours: what a source does not say is left unsaid, so that the optimizer that loads it keeps its own, and says so.
_OUR_SCALE = scale("adjust_lr", {"original": ("original",), "rms": ("match_rms_adamw",), "spectral": ("spectral",),
                                 "none": ("none",)})  # fmt: skip
_OUR_MATRIX = {**_MUON, **{name: name for name in ("cautious", "ns", "ns_steps", "ns_dtype", "gram", "pieces",
                                                   "columns", "interleaved")}}  # fmt: skip
_OUR_CONVENTION: Mapping[str, object] = {"convention": MUON_CONVENTION.value}
_OUR_SCALAR = {**_RATES, "cautious": "cautious"}


def ours(*more: Mapping[str, str]) -> tuple[StoredMethod, ...]:
    """Our methods, each with every one of these sets of additional slots."""
    return tuple(
        method
        for extra in more
        for method in (
            StoredMethod("muon", {"momentum": MOMENTUM, **extra}, _OUR_MATRIX, (_OUR_SCALE,), _OUR_CONVENTION),
            StoredMethod(
                "normuon",
                {"momentum": MOMENTUM, "rows": SECOND_MOMENT, **extra},
                {**_OUR_MATRIX, "beta2": "beta2", "update_norm": "update_norm", "statistics": "statistics"},
                (_OUR_SCALE,),
                _OUR_CONVENTION,
            ),
            StoredMethod(
                "adamw",
                {"first": EXP_AVG, "second": EXP_AVG_SQ, "step": STEP, **extra},
                {**_OUR_SCALAR, "eps": "eps"},
                (betas("betas"),),
            ),
            StoredMethod("lion", {"first": EXP_AVG, **extra}, _OUR_SCALAR, (betas("betas"),)),
        )
    )


OURS = ours({}, {"master": MASTER})

# Megatron: groups are told apart by these (`param_group_identifier_keys` of core 0.19.2), and by the schedule's bounds.
_MEGATRON_IDLE: Mapping[str, object] = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False,
                                        "is_decoupled_lr": False}  # fmt: skip
_MEGATRON = (
    ("muon", {"momentum": "momentum_buffer"}, {**_RATES, "momentum": "momentum"}, ()),
    (
        "adamw",
        {"first": "exp_avg", "second": "exp_avg_sq"},
        {**_RATES, "eps": "eps", "step": "step"},
        (betas("betas"),),
    ),
)


def megatron(*more: Mapping[str, str]) -> tuple[StoredMethod, ...]:
    """Megatron's methods, each with every one of these sets of additional slots."""
    return tuple(
        StoredMethod(name, {**slots, **extra}, options, codings, _MEGATRON_IDLE)
        for extra in more
        for name, slots, options, codings in _MEGATRON
    )
