"""DeepSpeed 0.19 (``runtime/zero/muon``): Keller Jordan's Muon, also in the Gram form, and torch's AdamW."""

from __future__ import annotations

from dataclasses import replace

from ..algebra.box import Index
from ..names.vocabulary import Convention
from .codings import Coding, OptionValues
from .dialect import RATES, Dialect, Mark, StoredMethod
from .torch import ADAMW, PLAIN

_FORMS: dict[str, OptionValues] = {
    "standard": {"gram": None, "ns_dtype": "bfloat16"},
    "gram": {"gram": (2,), "ns_dtype": "float16"},
}
"""The common options that each ``ns_method`` means; a device that lacks the dtype computes in float32."""


def _write_form(common: OptionValues, shape: Index) -> OptionValues | None:
    """Return the options for a form of Newton-Schulz; None if DeepSpeed has no such form."""
    if "gram" not in common:
        return {}
    restarts = common["gram"]
    options = {**common, "gram": restarts if restarts is None else tuple(restarts)}
    # A form fits if it has all the options that the source says.
    for word, form in _FORMS.items():
        if options.items() <= form.items():
            return {"ns_method": word}
    return None


_FORM = Coding(
    ("ns_method",),
    ("gram", "ns_dtype"),
    read=lambda options, shape: _FORMS.get(options.get("ns_method", ""), {}),
    write=_write_form,
)
_KERNELS = Coding(
    ("use_muon",),
    ("flatten",),
    read=lambda _, shape: {"flatten": True} if len(shape) == 4 else {},
    write=lambda common, shape: (
        {"use_muon": True} if len(shape) < 3 or common.get("flatten", len(shape) == 4) == (len(shape) == 4) else None
    ),
)
"""It flattens what has four dims, and takes all else for stacks."""


PROGRAM = Dialect(
    "deepspeed",
    who="DeepSpeed's Muon and AdamW, in the folders of ZeRO 1, 2 and 3",
    convention=Convention.EMA,
    methods=(
        StoredMethod(
            "muon",
            {"momentum": "momentum_buffer"},
            options={**RATES, "momentum": "momentum"},
            codings=(_FORM, _KERNELS),
            inert_options={"name": "muon-params"},
            default_options={"ns_method": "gram"},
        ),
        replace(
            ADAMW, inert_options={**ADAMW.inert_options, "use_muon": False, "name": "adam-params"}, family="deepspeed"
        ),
    ),
    always=frozenset({"lr", "weight_decay", "momentum", "use_muon", "ns_method"}),
    beside=frozenset(),
    marks=(Mark(options={"use_muon", "ns_method"}),),
    constant_options={
        "muon": {
            **PLAIN,
            "nesterov": True,
            "adjust_lr_fn": "original",
            "ns_coefficients": "keller",
            "ns_steps": 5,
            "eps": 1e-7,
        },
        "adamw": PLAIN,
    },
    format="universal",
    hints={"pieces": "none, unless the configuration had per_head_muon: then the heads of each projection"},
    private=frozenset({"deepspeed.*"}),
)
