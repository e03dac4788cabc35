"""The dialects of all known programs.

Nothing on disk says which program wrote a checkpoint; :mod:`.detection` tells it from the keys.

Sources: ``docs/formats/dcp.md`` and ``docs/formats/fsdp_dtensor.md`` list, for each dialect, where its keys were seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType

from ...store.formats.megatron.torch_dist import COMMON_STATE, item_key
from ...vocabulary import (
    ADAMW,
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    MOMENTUM,
    MUON,
    MUON_CONVENTION,
    SECOND_MOMENT,
    STEP,
    Convention,
)
from .dialect import Dialect, StoredMethod, Template

FOREIGN_OPTIONS: Mapping[str, str] = MappingProxyType({"dampening": "torch.optim.SGD, whose momentum_buffer is a sum"})
"""Options of optimizers whose state looks like that of a known method, but has another meaning."""


def _path(*parts: str) -> Template:
    return Template(parts)


_LIST = _path("optimizer", "param_groups", "{group}", "{option}")
_NESTED = _path("optimizer", "state", "{name}", "{slot}")
_MODEL = _path("model", "{name}")
_FLAT = (_path("optimizer", "state.{name}.{slot}"), _path("optimizer", "param_groups.{name}.{option}"))

# torch.optim.Muon and AdamW: what `param_groups` of a new one holds (torch 2.13).
_COMMON = {"lr": "lr", "weight_decay": "weight_decay"}
_TORCH_MUON = StoredMethod(
    "muon",
    {"momentum": "momentum_buffer"},
    {**_COMMON, "momentum": "momentum", "nesterov": "nesterov", "eps": "eps", "scale": "adjust_lr_fn"},
    {"ns_coefficients": (3.4445, -4.775, 2.0315), "ns_steps": 5, "nesterov": True, "eps": 1e-7},
)
_TORCH_ADAMW = StoredMethod(
    "adamw",
    {"first": "exp_avg", "second": "exp_avg_sq", "step": "step"},
    {**_COMMON, "betas": "betas", "eps": "eps"},
    {"amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False,
     "fused": None, "decoupled_weight_decay": True, "eps": 1e-8},
)  # fmt: skip
_TORCH_SCALES: Mapping[str, tuple[object, ...]] = {"original": ("original", None), "rms": ("match_rms_adamw",)}

# dion and XTuner: one class for matrices and scalars, so every group has every option.
_SHARED = {**_COMMON, "momentum": "mu", "nesterov": "nesterov", "eps": "epsilon", "beta1": "beta1", "beta2": "beta2",
           "step": "step", "scale": "adjust_lr"}  # fmt: skip
_SHARED_FRESH: Mapping[str, object] = {"mu": 0.95, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "nesterov": False,
                                       "flatten": False, "adjust_lr": "rms_norm"}  # fmt: skip
_DION_FRESH = {**_SHARED_FRESH, "cautious_wd": False}
_XTUNER_FRESH = {**_SHARED_FRESH, "nesterov": True, "num_experts": 1, "clip_grad": False}
_SHARED_SCALES: Mapping[str, tuple[object, ...]] = {
    "none": (None,),
    "spectral": ("spectral_norm",),
    "rms": ("rms_norm",),
}

# Rates and momentum belong to the run: if the source lacks one, it is left out, so that it is noticed.
_OUR_FRESH: Mapping[str, object] = {
    **{name: value for name, value in asdict(MUON).items() if name not in ("lr", "weight_decay", "momentum")},
    "convention": MUON_CONVENTION.value,
}

_OUR_SCALES: Mapping[str, tuple[object, ...]] = {"original": ("original",), "rms": ("match_rms_adamw",),
                                                 "spectral": ("spectral",), "none": ("none",)}  # fmt: skip

# Megatron: groups are told apart by these (`param_group_identifier_keys` of core 0.19.2), and by the schedule's bounds.
_MEGATRON: Mapping[str, tuple[Mapping[str, str], Mapping[str, str]]] = {
    "muon": ({"momentum": "momentum_buffer"}, {**_COMMON, "momentum": "momentum"}),
    "adamw": (
        {"first": "exp_avg", "second": "exp_avg_sq"},
        {**_COMMON, "betas": "betas", "eps": "eps", "step": "step"},
    ),
}
_MEGATRON_FRESH: Mapping[str, object] = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False,
                                         "is_decoupled_lr": False}  # fmt: skip
_MASTER, _STEP = {"master": MASTER}, {"step": "step"}


def _ours(*more: Mapping[str, str]) -> tuple[StoredMethod, ...]:
    """Our methods, each with every one of these sets of additional slots."""
    muon = {**_COMMON, "momentum": "momentum", "nesterov": "nesterov", "eps": "eps", "scale": "adjust_lr"}
    betas = {**_COMMON, "betas": "betas"}
    return tuple(
        method
        for extra in more
        for method in (
            StoredMethod("muon", {"momentum": MOMENTUM, **extra}, muon, _OUR_FRESH),
            StoredMethod("normuon", {"momentum": MOMENTUM, "rows": SECOND_MOMENT, **extra}),
            StoredMethod(
                "adamw",
                {"first": EXP_AVG, "second": EXP_AVG_SQ, "step": STEP, **extra},
                {**betas, "eps": "eps"},
                {"cautious": MUON.cautious, "eps": ADAMW["eps"]},
            ),
            StoredMethod("lion", {"first": EXP_AVG, **extra}, betas, {"cautious": MUON.cautious}),
        )
    )


def _megatron(*more: Mapping[str, str]) -> tuple[StoredMethod, ...]:
    """Megatron's methods, each with every one of these sets of additional slots."""
    return tuple(
        StoredMethod(name, {**slots, **extra}, options, _MEGATRON_FRESH)
        for extra in more
        for name, (slots, options) in _MEGATRON.items()
    )


def _torch_dist(name: str, who: str, chains: Mapping[str, str]) -> Dialect:
    return Dialect(
        name, who, _path("{weight}"), _path("{chain}optimizer.state.{slot}.{name}"), None, None, _megatron(_MASTER, {}),
        common=(COMMON_STATE,), chains=chains, item=item_key, format="torch_dist",
    )  # fmt: skip


DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {
        dialect.name: dialect
        for dialect in (
            Dialect(
                "torch", "torch.optim.Muon and AdamW, nested state dicts", _MODEL, _NESTED, _LIST, Convention.EMA,
                (_TORCH_MUON, _TORCH_ADAMW), scales=_TORCH_SCALES,
            ),
            Dialect(
                "veomni", "VeOmni: several optimizers in one flat dict", _MODEL, *_FLAT, Convention.EMA,
                (_TORCH_MUON, _TORCH_ADAMW), scales=_TORCH_SCALES,
            ),
            Dialect(
                "titan", "torchtitan: a flat optimizer, the model at the top", _path("{name}"), *_FLAT, Convention.EMA,
                (_TORCH_MUON, _TORCH_ADAMW), scales={**_TORCH_SCALES, "spectral": ("spectral_unclamped",)},
            ),
            Dialect(
                "dion", "microsoft/dion", _MODEL, _NESTED, _LIST, Convention.SUM,
                (
                    StoredMethod("muon", {"momentum": "momentum"}, _SHARED, _DION_FRESH),
                    StoredMethod("normuon", {"momentum": "momentum", "dion_rows": "variance_neuron"}, _SHARED,
                                 _DION_FRESH),
                    StoredMethod("adamw", {"first": "momentum", "second": "variance", "step": "step_dev"}, _SHARED,
                                 _DION_FRESH),
                    StoredMethod("lion", {"first": "momentum"}, _SHARED, _DION_FRESH),
                ),
                method_option="algorithm", scales=_SHARED_SCALES,
            ),
            Dialect(
                "xtuner", "InternLM/XTuner", _MODEL, _NESTED, _LIST, Convention.SUM,
                (
                    StoredMethod("muon", {"momentum": "momentum"}, _SHARED, _XTUNER_FRESH),
                    StoredMethod("adamw", {"first": "momentum", "second": "variance"}, _SHARED, _XTUNER_FRESH),
                ),
                derived=frozenset({"lr_ratio"}), method_option="algorithm", scales=_SHARED_SCALES,
            ),
            Dialect(
                "muonckpt", "muonckpt.optimizer.Muon", _MODEL, _NESTED, _LIST, MUON_CONVENTION,
                _ours({}, _MASTER),
                method_option="algorithm", scales=_OUR_SCALES,
            ),
            Dialect(
                "moonlight", "MoonshotAI/Moonlight", _MODEL, _NESTED, _LIST, Convention.SUM,
                (
                    StoredMethod("muon", {"momentum": "momentum_buffer"}, {"lr": "lr", "weight_decay": "wd",
                           "momentum": "momentum", "nesterov": "nesterov"}),
                    StoredMethod("adamw", {"first": "moment1", "second": "moment2", "step": "step"},
                           {"lr": "lr", "weight_decay": "wd", "betas": "adamw_betas", "eps": "adamw_eps"}),
                ),
                derived=frozenset({"use_muon"}), writable=False,
            ),
            Dialect(
                "fsdp_dtensor", "fsdp_dtensor, dialect A: Megatron-LM with Megatron-FSDP v1",
                _path("model", "module.{name}"),
                _path("optimizer", "state", "module.module.module.{name}", "{slot}"),
                _path("optimizer", "param_to_group_meta", "module.module.module.{name}", "{option}"),
                None,
                _megatron({}, _STEP),
            ),
            Dialect(
                "fully_shard", "fsdp_dtensor, dialect B: megatron_fsdp.fully_shard, state by number", _MODEL,
                _path("optimizer", "state", "{number}", "{slot}"), _LIST, None, (_TORCH_MUON, _TORCH_ADAMW),
                scales=_TORCH_SCALES,
            ),
            Dialect(
                "dcp", "torch's nested state dicts, program unknown; also fsdp_dtensor, dialect C", _MODEL, _NESTED,
                _LIST, None, (_TORCH_MUON, _TORCH_ADAMW), scales=_TORCH_SCALES, unsaid=frozenset({"ns_coefficients"}),
            ),
            _torch_dist("torch_dist", "Megatron torch_dist with layer-wise Muon", {}),
            _torch_dist("torch_dist_chained", "the same of more than one optimizer: Muon's state first, then AdamW's",
                        {"muon": "chained_0.", "adamw": "chained_1."}),
            Dialect(
                "layer_wise", "Megatron's layer_wise_optimizer_{rank}.pt, under names", _MODEL,
                _path("layer_wise", "state", "{name}", "{slot}"),
                _path("layer_wise", "param_groups", "{group}", "{option}"), None,
                _megatron(_MASTER, {}, {**_MASTER, **_STEP}, _STEP), writable=False,
            ),
        )
    }
)  # fmt: skip
"""All dialects, by name."""
