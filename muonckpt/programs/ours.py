"""muonckpt.optimizer.Muon.

Stock DCP loads nothing into our optimizer that lacks one of its options, so what a source does not say is the default,
but for rates, which are the run's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from ..names.vocabulary import (
    EXP_AVG,
    EXP_AVG_SQ,
    GROUP_OPTIONS,
    MASTER,
    MOMENTUM,
    MUON,
    MUON_CONVENTION,
    OUR_OPTIONS,
    RUN_OPTIONS,
    SECOND_MOMENT,
    STEP,
)
from .codings import FACTORS, OPTIONAL_FLATTEN, betas, scale
from .dialect import ANYTHING, FLAG, Dialect, Mark, StoredMethod

SLOTS = {
    "muon": {"momentum": MOMENTUM},
    "normuon": {"momentum": MOMENTUM, "rows": SECOND_MOMENT},
    "adamw": {"first": EXP_AVG, "second": EXP_AVG_SQ, "step": STEP},
    "lion": {"first": EXP_AVG},
}
"""The slots of each algorithm, by common names."""

_SCALE = scale("adjust_lr_fn", {name: (name,) for name in FACTORS})
_CONVENTION: Mapping[str, object] = {"convention": MUON_CONVENTION.value}


def _method(name: str, extra: Mapping[str, str]) -> StoredMethod:
    """Return how Muon stores a method of its own, with additional slots."""
    matrices, defaults = "momentum" in SLOTS[name], GROUP_OPTIONS[name]
    # Matrices have the scale of their rate, element-wise methods a pair of decay rates.
    codings = (_SCALE, OPTIONAL_FLATTEN) if matrices else (betas("betas"),)
    coded_options = set[str]().union(*(coding.options for coding in codings))
    return StoredMethod(
        name,
        slots={**SLOTS[name], **extra},
        options={option: option for option in defaults if option not in {*coded_options, *_CONVENTION}},
        codings=codings,
        inert_options=_CONVENTION if matrices else {},
        default_options={o: value for o, value in defaults.items() if o not in RUN_OPTIONS | {*_CONVENTION}},
    )


PROGRAM = Dialect(
    "muonckpt",
    who="muonckpt.optimizer.Muon",
    convention=MUON_CONVENTION,
    methods=(*(_method(name, {}) for name in SLOTS), *(_method(name, {"master": MASTER}) for name in SLOTS)),
    always=frozenset({"convention"}),
    kinds=dict.fromkeys((name for name, default in asdict(MUON).items() if isinstance(default, bool)), FLAG)
    | {"ns_coefficients": ANYTHING},
    marks=(Mark(options={"convention"}), Mark(options=OUR_OPTIONS)),
    method_option="algorithm",
    takes_methods=True,
    names_option="param_names",
)
