"""Words that several packages share: slots of optimizer state, momentum conventions, and the defaults of our optimizer.

A *slot* is a tensor that an optimizer keeps for a parameter.  Other programs' words are in `programs`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

KeyPath = tuple[str | int, ...]
"""A key as a path in a nested state dict: keys as strings, positions in lists as integers."""

MOMENTUM = "momentum_buffer"
"""A slot of Muon and NorMuon, shaped like the parameter; a `Convention` says what it accumulates."""

SECOND_MOMENT = "second_moment"
"""A slot of NorMuon: the mean square of each row of an orthogonalised matrix, as a moving average; float32."""

EXP_AVG = "exp_avg"
"""A slot of AdamW and Lion: the moving average of gradients, shaped like the parameter."""

EXP_AVG_SQ = "exp_avg_sq"
"""A slot of AdamW: the moving average of squared gradients, shaped like the parameter."""

STEP = "step"
"""A slot of AdamW: the number of updates of the parameter; a tensor without dims."""

MASTER = "fp32_param"
"""The float32 copy of a 16-bit parameter that the optimizer updates, shaped like the parameter; Megatron's name."""

AVERAGES = (MOMENTUM, EXP_AVG, EXP_AVG_SQ)
"""The slots that can be stored in another dtype than the parameter's."""

MOMENTUM_DTYPE = "momentum_dtype"
"""An option of groups that have momentum: its dtype, one of `STATE_DTYPES`; without it, the parameter's."""

STATE_DTYPE = "state_dtype"
"""The same of groups of AdamW and Lion, for all slots but the number of steps."""

STATE_DTYPES = ("float32", "bfloat16")
"""The values of the options."""

EIGHT_BIT_SLOTS = frozenset(f"{slot}_{part}" for slot in AVERAGES for part in ("codes", "scales"))
"""Slots of state in 8 bits, which this version refuses."""

BY_RANK = "by_rank"
"""The key below which a checkpoint has items that differ from rank to rank, each rank's below the rank's name."""

PLACEMENTS = ("padded-nscost", "padded-numel", "decoupled-total-order", "legacy-pingpong", "balanced")
"""The ways to place parameters in flat buffers so that matrices stay whole: the same names in training
(``LayerWise(layout=...)``), on the command line, in ``layer_wise.toml``, and in every record of a buffer.

All but "legacy-pingpong" put the parameters that are no matrices into buffers of their own, in equal shards that may
end inside a parameter."""

PARAMS = "params"
"""The option of a parameter group that lists its parameters, as in torch's optimizers."""

GIVEN_KEYS: Mapping[str, str] = MappingProxyType(
    {option: f"given_{option}" for option in ("lr", "weight_decay", "momentum", "betas", "beta2", "eps")}
)
"""The keys of state dicts that have the value that code gave to an option, where a schedule has changed it since."""

SCHEDULER_OPTIONS = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"})
"""Options that torch's schedulers write to parameter groups for themselves."""

HISTORY_OPTIONS = SCHEDULER_OPTIONS | {*GIVEN_KEYS.values()}
"""Options that no update reads: they tell how schedules got where they are."""

RUN_OPTIONS = frozenset({"lr", "weight_decay", "momentum", "betas"})
"""Options that schedules change during a run, so that no other run can replace a checkpoint that lacks them."""

ELEMENTWISE = frozenset({EXP_AVG, EXP_AVG_SQ})
"""Slots whose elements are updated independently, so that no rank needs a whole tensor."""

ZERO_SLOTS = frozenset({MOMENTUM, SECOND_MOMENT, EXP_AVG, EXP_AVG_SQ, STEP})
"""Slots that are zeros before a parameter's first update, in every program."""

ALGORITHM = "algorithm"
"""The option by which a parameter group of our optimizer names its algorithm."""

CONVENTION = "convention"
"""The option by which a group of matrices names the `Convention` of its momentum."""

OUR_OPTIONS = frozenset({ALGORITHM, "cautious"})
"""Options that every parameter group of our optimizer has, and together none of another program."""


def has_our_options(keys: Iterable[str]) -> bool:
    """Return whether keys of a state dict, or of a checkpoint, have the options of our optimizer."""
    options = {key.rpartition(".")[2] for key in keys}
    return "convention" in options or options >= OUR_OPTIONS


def begins_as_zeros(slot: str, options: Collection[str]) -> bool:
    """Return whether a slot is zeros before the first update: in groups with our options all slots but masters are."""
    return slot in ZERO_SLOTS or ({*options} >= OUR_OPTIONS and slot != MASTER)


FUSION_FREE_SLOTS = ELEMENTWISE | {MOMENTUM, MASTER, STEP}
"""Slots that mean the same whichever matrices are fused in the parameter."""


class Convention(StrEnum):
    """How a momentum buffer ``m`` accumulates gradients ``g``, given the momentum coefficient ``mu``."""

    EMA = "ema"
    """``m = mu * m + (1 - mu) * g``"""
    SUM = "sum"
    """``m = mu * m + g``"""


MUON_CONVENTION = Convention.EMA
"""The convention of `muonckpt.optimizer.Muon`."""


@dataclass(frozen=True, slots=True)
class MuonDefaults:
    """Default options of a group of matrices in `muonckpt.optimizer.Muon`."""

    lr: float = 1e-3
    weight_decay: float = 0.1
    cautious: bool = False
    momentum: float = 0.95
    nesterov: bool = True
    adjust_lr_fn: str = "original"
    ns_coefficients: str = "quintic"
    ns_steps: int = 5
    ns_dtype: str = "bfloat16"
    gram: tuple[int, ...] | None = None
    eps: float = 1e-15
    pieces: tuple[int, ...] | None = None
    columns: tuple[int, ...] | None = None
    interleaved: int = 1


MUON = MuonDefaults()

MAX_STEPS_ON_ONE_GRAM = 3
"""The most steps of Newton-Schulz on one Gram matrix in 16 bits; `docs/design/newton_schulz.md` has errors of more."""

ParamGroup = Mapping[str, Any]
"""A parameter group of an optimizer: its parameters and their options."""

NORMUON: Mapping[str, object] = MappingProxyType({"beta2": 0.95, "update_norm": "muon", "statistics": "rows"})
"""Options of a NorMuon group besides those of `MUON`."""

ADAMUON: Mapping[str, object] = MappingProxyType({"beta2": 0.95, "adjust_lr_fn": "none"})
"""Options of an AdaMuon group, likewise, and those with other defaults."""

HYPERBALL: Mapping[str, object] = MappingProxyType({"weight_decay": 0.0, "adjust_lr_fn": "none"})
"""Options of a group of MuonH with other defaults."""

ADAMW: Mapping[str, object] = MappingProxyType({"betas": (0.9, 0.95), "eps": 1e-8})
"""Options of an AdamW group besides those of every group, which are those of `MUON`."""

LION: Mapping[str, object] = MappingProxyType({"betas": (0.9, 0.99)})
"""Options of a Lion group, likewise."""

OF_EVERY_GROUP = MappingProxyType({name: asdict(MUON)[name] for name in ("lr", "weight_decay", "cautious")})
"""Options of every group, with defaults."""

PLAIN = MappingProxyType({name: default for name, default in OF_EVERY_GROUP.items() if name not in RUN_OPTIONS})
"""Options of every group that are no rates.  With their defaults an update is as in programs that lack them."""

_MATRIX = {**asdict(MUON), "convention": MUON_CONVENTION.value}

GROUP_OPTIONS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "muon": MappingProxyType(_MATRIX),
        "normuon": MappingProxyType({**_MATRIX, **NORMUON}),
        "adamuon": MappingProxyType({**_MATRIX, **ADAMUON}),
        "hyperball": MappingProxyType({**_MATRIX, **HYPERBALL}),
        "adamw": MappingProxyType({**OF_EVERY_GROUP, **ADAMW}),
        "lion": MappingProxyType({**OF_EVERY_GROUP, **LION}),
    }
)
"""All options of a group of `muonckpt.optimizer.Muon` but ``params`` and ``algorithm``, with defaults, by algorithm.
A state dict has every one, so whatever stock DCP loads into it must have them."""

FLATTEN = "flatten"
"""An option of groups of matrices, which only flattened ones have: a parameter of more than two dims is one matrix, of
its first dim and all others (convolutions).  Without it a parameter of three dims is a stack."""

FUSION = ("pieces", "columns", "interleaved", FLATTEN)
"""Options that say which matrices are in a parameter.  NorMuon's second moment depends on them, momentum not."""
