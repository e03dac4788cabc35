"""VeOmni (``veomni/optim/muon.py``): torch's AdamW, and a Muon that also has the Gram form of Newton-Schulz."""

from __future__ import annotations

from ..names.vocabulary import Convention
from .codings import GRAM, coefficients, equal_parts, scale
from .dialect import FLAT, Dialect, Keys, Mark, StoredMethod
from .torch import ADAMW, MUON_DEFAULTS, MUON_OPTIONS, PLAIN, SCALES

_MUON = StoredMethod(
    "muon",
    {"momentum": "momentum_buffer"},
    options=MUON_OPTIONS,
    codings=(coefficients(of_steps=True), scale("adjust_lr_fn", SCALES), GRAM, equal_parts("head_blocks", False)),
    inert_options={"gram_ns_reset_iterations": (2,)},
    default_options={**MUON_DEFAULTS, "ns_implementation": "gram_quack"},
)

PROGRAM = Dialect(
    "veomni",
    who="VeOmni: several optimizers in one flat dict",
    convention=Convention.EMA,
    methods=(_MUON, ADAMW),
    always=frozenset({"momentum", "ns_implementation"}),
    beside=ADAMW.all_options,
    keys=Keys((FLAT,)),
    marks=(Mark(options={"ns_implementation", "gram_ns_reset_iterations"}),),
    constant_options={"muon": PLAIN, "adamw": PLAIN},
)
