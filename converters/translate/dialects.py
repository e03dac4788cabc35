"""The dialects of all known programs.

Nothing on disk says which program wrote a checkpoint; :mod:`.detection` tells it from the keys.

Sources: ``docs/formats/dcp.md`` and ``docs/formats/fsdp_dtensor.md`` list, for each dialect, where its keys were seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ...store.formats.signs import COMMON_FILE, COMMON_STATE, item_key
from ...vocabulary import MASTER, MUON_CONVENTION, Convention
from .dialect import Dialect, Template
from .program_methods import DION, MOONLIGHT, OURS, PLAIN, TITAN, TORCH, UNFUSED, VEOMNI, XTUNER, megatron

FOREIGN_OPTIONS: Mapping[str, str] = MappingProxyType({"dampening": "torch.optim.SGD, whose momentum_buffer is a sum"})
"""Options of optimizers whose state looks like that of a known method, but has another meaning."""


def _path(*parts: str) -> Template:
    return Template(parts)


_OPTIMIZER = ("optimizer",)
_LIST = Template(("param_groups", "{group}", "{option}"), _OPTIMIZER)
_NESTED = Template(("state", "{name}", "{slot}"), _OPTIMIZER)
_NUMBERED = Template(("state", "{number}", "{slot}"), _OPTIMIZER)
_MODEL = Template(("{name}",), ("model",))
_FLAT = (Template(("state.{name}.{slot}",), _OPTIMIZER), Template(("param_groups.{name}.{option}",), _OPTIMIZER))

_MASTER, _STEP = {"master": MASTER}, {"step": "step"}


_MEGATRON_ITEMS = frozenset(
    {COMMON_STATE, COMMON_FILE, "args", "checkpoint_version", "iteration", "num_floating_point_operations_so_far"}
    | {"opt_param_scheduler.*", "rng_state*", "rerun_state_machine*"}
)
"""What Megatron saves of its run."""

_BUCKETS = frozenset({"*optimizer.distributed.dp_group_idx_*"})
"""What Megatron's distributed optimizer saves in `dp_reshardable` form: flat buckets without the names in them."""


# What a matrix group of these programs is known to be, though no option says it.
_TORCH_FACTS = {"muon": {**PLAIN, "pieces": None, "gram": None}, "adamw": PLAIN}
_TITAN_FACTS = {"muon": {**PLAIN, "gram": None}, "adamw": PLAIN}
_VEOMNI_FACTS = {"muon": PLAIN, "adamw": PLAIN}
_DION_FACTS = dict.fromkeys(("muon", "normuon", "adamw", "lion"), UNFUSED)
_XTUNER_FACTS = {"muon": {**PLAIN, "ns": "quintic", "ns_steps": 5}, "adamw": PLAIN}
_MOONLIGHT_FACTS = {"muon": {**PLAIN, "pieces": None, "gram": None, "ns": "keller", "scale": "rms"}, "adamw": PLAIN}
_DION_HINTS = {
    "ns": "an argument of dion's constructor: 'polar_express_dion' is its default, 'quintic' with "
    "use_polar_express=False, 'polar_express_gram' with use_gram_newton_schulz=True",
    "ns_steps": "5 in dion",
}
_XTUNER_HINTS = {"pieces": "muon_split_sizes, an argument of XTuner's constructor"}
_MEGATRON_HINTS = {
    "ns": "Megatron's --muon-coefficient-type",
    "ns_steps": "Megatron's --muon-num-ns-steps",
    "nesterov": "Megatron's --muon-use-nesterov",
    "scale": "Megatron's --muon-scale-mode",
    "pieces": "Megatron splits fused qkv unless --muon-no-split-qkv",
}


def _torch_dist(name: str, who: str, chains: Mapping[str, str]) -> Dialect:
    return Dialect(
        name, who, _path("{weight}"), _path("{chain}optimizer.state.{slot}.{name}"), None, None, megatron(_MASTER, {}),
        hints=_MEGATRON_HINTS, common=(COMMON_STATE,), chains=chains, item=item_key, private=_MEGATRON_ITEMS,
        opaque=_BUCKETS, format="torch_dist",
    )  # fmt: skip


DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {
        dialect.name: dialect
        for dialect in (
            Dialect(
                "torch", "torch.optim.Muon and AdamW, nested state dicts", _MODEL, _NESTED, _LIST, Convention.EMA,
                TORCH, facts=_TORCH_FACTS,
            ),
            Dialect(
                "veomni", "VeOmni: several optimizers in one flat dict", _MODEL, *_FLAT, Convention.EMA,
                VEOMNI, facts=_VEOMNI_FACTS,
            ),
            Dialect(
                "titan", "torchtitan: a flat optimizer, the model at the top", _path("{name}"), *_FLAT, Convention.EMA,
                TITAN, facts=_TITAN_FACTS,
            ),
            Dialect(
                "dion", "microsoft/dion", _MODEL, _NESTED, _LIST, Convention.SUM,
                DION,
                method_option="algorithm", facts=_DION_FACTS, hints=_DION_HINTS,
            ),
            Dialect(
                "xtuner", "InternLM/XTuner", _MODEL, _NESTED, _LIST, Convention.SUM,
                XTUNER,
                derived=frozenset({"lr_ratio"}), method_option="algorithm", facts=_XTUNER_FACTS, hints=_XTUNER_HINTS,
            ),
            Dialect(
                "muonckpt", "muonckpt.optimizer.Muon", _MODEL, _NESTED, _LIST, MUON_CONVENTION,
                OURS,
                method_option="algorithm",
            ),
            Dialect(
                "moonlight", "MoonshotAI/Moonlight", _MODEL, _NESTED, _LIST, Convention.SUM,
                MOONLIGHT,
                derived=frozenset({"use_muon"}), facts=_MOONLIGHT_FACTS, writable=False,
            ),
            Dialect(
                "fsdp_dtensor", "fsdp_dtensor, dialect A: Megatron-LM with Megatron-FSDP v1",
                _path("model", "module.{name}"),
                _path("optimizer", "state", "module.module.module.{name}", "{slot}"),
                _path("optimizer", "param_to_group_meta", "module.module.module.{name}", "{option}"),
                None,
                megatron({}, _STEP), private=_MEGATRON_ITEMS,
            ),
            Dialect(
                "fully_shard", "fsdp_dtensor, dialect B: megatron_fsdp.fully_shard, state by number", _MODEL,
                _NUMBERED, _LIST, None, TORCH, unsaid=frozenset({"ns_coefficients"}),
            ),
            Dialect(
                "dcp", "torch's nested state dicts, program unknown; also fsdp_dtensor, dialect C", _MODEL, _NESTED,
                _LIST, None, TORCH, unsaid=frozenset({"ns_coefficients"}),
            ),
            _torch_dist("torch_dist", "Megatron torch_dist with layer-wise Muon", {}),
            _torch_dist("torch_dist_chained", "the same of more than one optimizer: Muon's state first, then AdamW's",
                        {"muon": "chained_0.", "adamw": "chained_1."}),
            Dialect(
                "layer_wise", "Megatron's layer_wise_optimizer_{rank}.pt, under names", _MODEL,
                _path("layer_wise", "state", "{name}", "{slot}"),
                _path("layer_wise", "param_groups", "{group}", "{option}"), None,
                megatron(_MASTER, {}, {**_MASTER, **_STEP}, _STEP), writable=False, private=_MEGATRON_ITEMS,
            ),
        )
    }
)  # fmt: skip
"""All dialects, by name."""
