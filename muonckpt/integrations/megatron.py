"""Megatron-LM: Muon among its emerging optimizers.  Importing this module registers it by the name "muonckpt"."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from warnings import warn

import torch.distributed as dist
from megatron.core.optimizer import emerging_optimizers as registry
from megatron.core.optimizer.optimizer_config import ParamKey

from ..names.coefficients import COEFFICIENTS, EMERGING_TYPES, Triple, emerging_coefficients
from ..names.errors import ArgumentError
from ..optimizer import Muon

NAME = "muonckpt"
"""The value of ``OptimizerConfig.optimizer``, unless it is registered by another name."""

FUSED = "fused_qkv"
"""Marks the groups with Megatron's ``is_qkv``."""

GROUP_WORDS = (
    *("default_config", "end_wd", "is_decoupled_lr", "is_expert_parallel", "lr_mult", "max_lr", "min_lr", "optimizer"),
    *("start_wd", "wd_mult", FUSED),
)
"""Entries that Megatron's schedule and checkpoints keep in parameter groups; no options of the update."""

SCALE_MODES: Mapping[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "shape_scaling": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
}
"""The factor of a matrix's rate, by ``muon_scale_mode``."""

MATMUL_PRECISIONS: Mapping[str, str] = {"medium": "bfloat16", "high": "float32", "highest": "float32"}
"""Our ``ns_dtype`` of each ``muon_fp32_matmul_prec``."""


class MegatronMuon(Muon):
    """`Muon` for the matrices that Megatron gives it; everything else goes to Megatron's own optimizers.

    Until the first step or the first loaded state, the groups may change: Megatron's layer-wise optimizer leaves each
    rank only the matrices that it owns, and its 16-bit wrapper replaces parameters by float32 masters.  The state is
    made for the parameters at that time.

    Args:
        params: Megatron's groups.
        qkv: rows of queries, keys and values of one query group, which are split in groups marked `FUSED`; None: they
            are orthogonalised whole.
        experts: as ``replicas``, for groups of experts.
        options: of `Muon`.
    """

    _warns = False

    def __init__(
        self,
        params: Any,
        *,
        qkv: Sequence[int] | None = None,
        replicas: dist.ProcessGroup | None = None,
        experts: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        self._qkv = tuple(qkv) if qkv else None
        groups = list(params)
        of_experts = any(group["is_expert_parallel"] for group in groups)
        super().__init__(groups, replicas=experts if of_experts else replicas, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with Megatron's entries beside the options."""
        megatron_entries, options = dict[str, Any](), dict[str, Any]()
        for key, value in param_group.items():
            (megatron_entries if key in GROUP_WORDS else options)[key] = value
        # A fused weight has the queries, keys and values of one query group after those of another.
        if megatron_entries.get(FUSED) and self._qkv and options["params"]:
            num_query_groups = options["params"][0].shape[0] // sum(self._qkv)
            options |= {"pieces": self._qkv, "interleaved": num_query_groups}
        super().add_param_group(options)
        self.param_groups[-1].update(megatron_entries)

    def _follow_parameters(self) -> None:
        if not self._has_history:
            self._reset_state()
        super()._follow_parameters()

    def _init_group(self, group: Mapping[str, Any], skip_non_grad_params: bool = True) -> None:
        """Megatron asks for state before it loads a checkpoint; here there always is."""
        self._follow_parameters()


def config_to_kwargs(config: Any, model_chunks: Sequence[Any], process_groups: Any) -> dict[str, Any]:
    """Translate Megatron's config to arguments of `MegatronMuon`; its ``muon_*`` options keep their meaning.

    Raises:
        ArgumentError: it asks for tensor parallelism, for decay that is not decoupled, or for an unknown coefficient
            type, scale mode or precision.
    """
    # Matrices have to be whole.
    for name in ("tp", "expt_tp", "gtp_remat", "expt_gtp_remat"):
        group = getattr(process_groups, name, None)
        if group is not None and group.size() > 1:
            raise ArgumentError(
                f"{name} has {group.size()} ranks, so each holds a part of a matrix, and Megatron's plain tensors do "
                "not say which; train without tensor parallelism, or with DTensors and muonckpt.optimizer.Muon"
            )
    if not config.decoupled_weight_decay:
        raise ArgumentError("decoupled_weight_decay=False: decay is decoupled here (p *= 1 - lr * weight_decay)")
    # Layer-wise, each rank has matrices of its own; else all ranks have replicas of all.
    layer_wise = config.use_layer_wise_distributed_optimizer or config.optimizer.startswith("dist_")
    shared = {"replicas": process_groups.dp_cp, "experts": getattr(process_groups, "expt_dp", None)}
    return {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "momentum": config.muon_momentum,
        "nesterov": config.muon_nesterov,
        "ns_coefficients": _choose_coefficients(config),
        "ns_steps": config.muon_num_ns_steps,
        "ns_dtype": _translate_choice("muon_fp32_matmul_prec", config, MATMUL_PRECISIONS),
        "adjust_lr_fn": _choose_scale(config),
        "qkv": registry._get_qkv_split_shapes(model_chunks[0].config) if config.muon_split_qkv else None,
        **({} if layer_wise else shared),
    }


def _translate_choice(option: str, config: Any, choices: Mapping[str, Any]) -> Any:
    value = getattr(config, option)
    if value not in choices:
        raise ArgumentError(f"{option}={value!r}: expected one of {', '.join(choices)}")
    return choices[value]


def _choose_coefficients(config: Any) -> str | Sequence[Triple]:
    kind, steps = config.muon_coefficient_type, config.muon_num_ns_steps
    published = _translate_choice("muon_coefficient_type", config, EMERGING_TYPES)
    coefficients = emerging_coefficients(kind, steps)
    if coefficients != published:
        warn(
            f"muon_coefficient_type={kind!r} with muon_num_ns_steps={steps}: past the end of its list "
            "Emerging-Optimizers goes on with triples that undo what was reached, and so does this run, to have the "
            f"same update; choose a number of steps up to {len(COEFFICIENTS[published].steps)}",
            stacklevel=2,
        )
    return coefficients


def _choose_scale(config: Any) -> Callable[[int, int], float]:
    by_shape, extra = _translate_choice("muon_scale_mode", config, SCALE_MODES), config.muon_extra_scale_factor

    def scale(rows: int, columns: int) -> float:
        return float(extra * by_shape(rows, columns))

    scale.__qualname__ = f"{config.muon_scale_mode} times {extra}"  # what groups and checkpoints call it
    return scale


def register(name: str = NAME) -> None:
    """Make Megatron build this optimizer for ``OptimizerConfig(optimizer=name)``.

    Megatron's training script accepts only names that it knows: ``register("muon")`` takes the place of its Muon.
    """
    muon = registry._EMERGING_OPTIMIZERS["muon"]
    # Megatron tells groups apart by few words when it loads them: "optimizer", which others do not say, is one.
    fused = {FUSED: True, "optimizer": name}
    registry._EMERGING_OPTIMIZERS[name] = replace(
        muon,
        optimizer_cls=MegatronMuon,
        init_state_fn=registry._eopt_init_state_fn,
        config_to_kwargs=config_to_kwargs,
        default_param_overrides={**muon.default_param_overrides, ParamKey(attr="is_qkv"): fused},
    )


register()
