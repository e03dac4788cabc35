"""Megatron (megatron-core 0.19), whose keys have forms of their own: fsdp_dtensor, torch_dist, and files of ranks.

Sources: ``docs/formats/fsdp_dtensor.md`` and ``docs/formats/torch_dist.md`` list where the keys were seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..algebra.box import Index
from ..names.keys import KeyPlace
from ..names.vocabulary import MASTER, Convention, KeyPath
from .codings import Coding, OptionValues, betas
from .dialect import WRAPPERS, Dialect, KeyMeaning, Keys, OptionName, StoredMethod
from .signs import COMMON_FILE, COMMON_STATE

_IDLE: Mapping[str, object] = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
"""Options by which groups are distinguished (`param_group_identifier_keys` of core 0.19.2)."""

_MASTER, _STEP = {"master": MASTER}, {"step": "step"}


def _decay(by_parameter: bool) -> Coding:
    """Return the coding of decay, which the scheduler of a Megatron run sets to its own times `wd_mult` before a step.

    Options ``by_parameter`` replace those of the run that loads them; groups are only found by their `wd_mult`.
    """

    def read(options: OptionValues, shape: Index) -> OptionValues:
        # A multiplier that the decay has in it already says nothing new.
        is_applied = options.get("wd_mult") != 0 or options.get("weight_decay") == 0
        return {option: value for option, value in options.items() if option == "weight_decay" or not is_applied}

    def write(common: OptionValues, shape: Index) -> OptionValues:
        return {**common, "wd_mult": 0.0} if by_parameter and common.get("weight_decay") == 0 else common

    return Coding(("weight_decay", "wd_mult"), ("weight_decay", "wd_mult"), read=read, write=write)


def _methods(*slot_sets: Mapping[str, str], by_parameter: bool = False) -> tuple[StoredMethod, ...]:
    """Return Muon, AdamW and Lion, each with every given set of additional slots."""
    methods: list[StoredMethod] = []
    decay = _decay(by_parameter)
    for slots in slot_sets:
        momentum, moments = {"momentum": "momentum_buffer"}, {"first": "exp_avg", "second": "exp_avg_sq"}
        muon_options, adamw_options = {"lr": "lr", "momentum": "momentum"}, {"lr": "lr", "eps": "eps", "step": "step"}
        codings = decay, betas("betas")
        # AdamW's step is an option of its group, or one of the additional slots.
        methods += [
            StoredMethod(
                "muon",
                slots={**momentum, **slots},
                options=muon_options,
                codings=(decay,),
                inert_options=_IDLE,
                family="megatron",
            ),
            StoredMethod(
                "adamw",
                slots={**moments, **slots},
                options=adamw_options,
                codings=codings,
                inert_options=_IDLE,
                family="megatron",
            ),
            StoredMethod(
                "lion",
                slots={"first": "exp_avg", **slots},
                options={"lr": "lr"},
                codings=codings,
                inert_options=_IDLE,
                family="megatron",
                absent_options=frozenset({"eps"}),
            ),
        ]
    return tuple(methods)


_ITEMS = frozenset(
    {COMMON_STATE, COMMON_FILE, "args", "checkpoint_version", "iteration", "num_floating_point_operations_so_far"}
    | {"opt_param_scheduler.*", "rng_state*", "rerun_state_machine*"}
)
"""Items of Megatron's run."""

_OPTION_NAMES = (
    OptionName("{p*}.linear_qkv_down_proj.{x}", ("{p*}.linear_q_down_proj.{x}", "{p*}.linear_kv_down_proj.{x}")),
    OptionName(
        "{p*}.self_attention.linear_qkv_down_proj.layer_norm_{x}",
        ("{p*}.input_layernorm.{x}",),
        ("{p*}.self_attention.linear_kv_down_proj.weight",),
    ),
    OptionName("mtp.layers.{n}.mtp_model_layer.{p*}", ("mtp.layers.{n}.transformer_layer.{p*}",)),
    OptionName("{m*}.mtp.layers.{n}.mtp_model_layer.{p*}", ("{m*}.mtp.layers.{n}.transformer_layer.{p*}",)),
    OptionName("{p*}.linear_fc1.{x}", ("{p*}.linear_fc1.{x}_w", "{p*}.linear_fc1.{x}_v")),
)
"""The names that a run has of what fsdp_dtensor stores as runs without fused MLA projections, and from before the layer
of MTP was renamed, have this form, and in halves of a SwiGLU (`handle_mla_down_proj_in_state_dict`,
`handle_mtp_in_state_dict` and `handle_swiglu_in_state_dict` of Megatron-LM's fsdp_dtensor_checkpoint.py, #6271).
Mamba's MTP is stored under its
own name."""

_BUCKETS = frozenset({"*optimizer.distributed.dp_group_idx_*"})
"""State of Megatron's distributed optimizer in `dp_reshardable` form: flat buckets without the names in them."""

# Constants of the run that Megatron has on its command line, and not in the checkpoint.
_HINTS = {
    "ns_coefficients": "Megatron's --muon-coefficient-type",
    "ns_steps": "Megatron's --muon-num-ns-steps",
    "nesterov": "Megatron's --muon-use-nesterov",
    "adjust_lr_fn": "Megatron's --muon-scale-mode",
    "pieces": "Megatron splits fused qkv unless --muon-no-split-qkv",
}


def _code_settings(arguments: Mapping[str, object]) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Yield the settings for matrices that Newton-Schulz saw cut by tensor parallelism; whole ones need none.

    Source: `TensorParallelMuon.orthogonalize` of core 0.19.2; the default changed on main in August 2026 (#6380).
    """
    mode = arguments.get("muon_tp_mode")
    values = map(arguments.get, ("tensor_model_parallel_size", "expert_tensor_parallel_size"))
    sizes = {size for size in values if type(size) is int}
    # Matrices that no rank cut are whole.
    if sizes and max(sizes) == 1:
        return
    ranks = "/".join(map(str, sorted(sizes - {1}))) or "N"
    blocks = (
        f"one matrix for each of {ranks} ranks: Split(pieces={ranks}) where rows were cut, columns={ranks} where "
        "columns were"
    )
    if mode == "blockwise":
        yield "matrices of weights under tensor parallelism", ("muon_tp_mode='blockwise'",), blocks
    elif mode is None:
        yield (
            "matrices of weights under tensor parallelism",
            (),
            "the checkpoint does not say --muon-tp-mode; duplicated, the default since August 2026, has whole matrices "
            f"as here; blockwise, the default before, has {blocks}",
        )


_TORCH_DIST_STATE = re.compile(r"((?:chained_[0-9]+\.)*)optimizer\.(?:state\.([^.]+)\.(.+)|.*)")


@dataclass(frozen=True)
class _TorchDistKeys(Keys):
    """Keys with the slot before the name, perhaps of one of several optimizers; weights have their names alone."""

    state_form = "optimizer.state.{slot}.{name}"
    model_form = "{weight}"
    chained = True
    listed = False

    def read_weight(self, path: KeyPath) -> KeyMeaning | None:
        has_name = len(path) == 1 and path[0] and not _TORCH_DIST_STATE.fullmatch(str(path[0]))
        return KeyMeaning(str(path[0])) if has_name else None

    def read_state(self, path: KeyPath) -> KeyMeaning | None:
        match = _TORCH_DIST_STATE.fullmatch(str(path[0])) if len(path) == 1 else None
        return KeyMeaning(match[3], match[2], match[1]) if match and match[3] else None

    def read_option(self, path: KeyPath) -> KeyMeaning | None:
        return None

    def write_weight(self, name: str, chain: str = "") -> KeyPath:
        return self._checked((name,), self.read_weight, KeyMeaning(name))

    def write_state(self, name: str, slot: str, chain: str = "") -> KeyPath:
        return self._checked((f"{chain}optimizer.state.{slot}.{name}",), self.read_state, KeyMeaning(name, slot, chain))


FSDP_DTENSOR = Dialect(
    "fsdp_dtensor",
    "dialect A: Megatron-LM with Megatron-FSDP",
    convention=None,
    methods=_methods({}, _STEP, by_parameter=True),
    keys=Keys(models=(KeyPlace(("model",), "module."),), wrappers=WRAPPERS),
    option_names=_OPTION_NAMES,
    unique_keys=True,
    hints=_HINTS,
    chains={"muon": "0", "adamw": "1", "lion": "1"},
    private=_ITEMS,
    arguments=_code_settings,
    runs_keep=Convention.EMA,
)
TORCH_DIST = Dialect(
    "torch_dist",
    "Megatron torch_dist with layer-wise Muon",
    convention=None,
    methods=_methods(_MASTER, {}),
    keys=_TorchDistKeys(),
    unique_keys=True,
    hints=_HINTS,
    common=(COMMON_STATE,),
    # The key of an item ends with its shard's number and the number of shards.
    item=lambda key: key if "/shard_" in key or key == COMMON_FILE else f"{key}/shard_0_1",
    private=_ITEMS,
    arguments=_code_settings,
    opaque=_BUCKETS,
    format="torch_dist",
    runs_keep=Convention.EMA,
)
TORCH_DIST_CHAINED = replace(
    TORCH_DIST,
    name="torch_dist_chained",
    who="the same of more than one optimizer: Muon's state first, then AdamW's or Lion's",
    chains={"muon": "chained_0.", "adamw": "chained_1.", "lion": "chained_1."},
)
LAYER_WISE = Dialect(
    "layer_wise",
    "Megatron's layer_wise_optimizer_{rank}.pt, under names",
    convention=None,
    methods=_methods(_MASTER, {}, {**_MASTER, **_STEP}, _STEP),
    keys=Keys((KeyPlace(("layer_wise",)),)),
    unique_keys=True,
    writable=False,
    private=_ITEMS,
    arguments=_code_settings,
)
