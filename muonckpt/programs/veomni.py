"""VeOmni (``veomni/optim/muon.py``): torch's AdamW, and a Muon that also has the Gram form of Newton-Schulz."""

from __future__ import annotations

from ..names.vocabulary import Convention
from .codings import GRAM, coefficients, equal_parts, scale
from .dialect import FLAT, FLAT_OPTIONS, Dialect, Kinds, Mark, OptionTable, StoredMethod
from .torch import ADAMW, ADAMW_KINDS, MUON_DEFAULTS, MUON_KINDS, MUON_OPTIONS, PLAIN, SCALES

_MUON = StoredMethod(
    "muon",
    {"momentum": "momentum_buffer"},
    MUON_OPTIONS,
    (coefficients(of_steps=True), scale("adjust_lr_fn", SCALES), GRAM, equal_parts("head_blocks", False)),
    inert_options={"gram_ns_reset_iterations": (2,)},
    default_options={**MUON_DEFAULTS, "ns_implementation": "gram_quack"},
)

PROGRAM = Dialect(
    "veomni",
    "VeOmni: several optimizers in one flat dict",
    Convention.EMA,
    (_MUON, ADAMW),
    OptionTable(
        {"momentum": Kinds.NUMBER, "ns_implementation": Kinds.TEXT},
        {
            **MUON_KINDS,
            **ADAMW_KINDS,
            "ns_coefficients": Kinds.TRIPLES,
            "gram_ns_reset_iterations": Kinds.COUNTS,
            "head_blocks": Kinds.COUNT,
        },
        closed=True,
    ),
    state=FLAT,
    option=FLAT_OPTIONS,
    marks=(Mark(options={"ns_implementation", "gram_ns_reset_iterations"}),),
    constant_options={"muon": PLAIN, "adamw": PLAIN},
)
