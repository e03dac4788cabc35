"""Options of parameter groups that two programs express differently.

Between programs, options have *common* names and values, which are those of `muonckpt.optimizer`: ``ns_coefficients``,
``pieces``, ``adjust_lr_fn``; betas are one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ..algebra.box import Index
from ..names.coefficients import COEFFICIENTS, CoefficientSet, Triple, coefficient_set, plain_coefficients
from ..names.errors import SourceError
from ..names.vocabulary import MAX_STEPS_ON_ONE_GRAM

OptionValues = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Coding:
    """A program's encoding of common options, where that takes more than another name.

    Attributes:
        options: names of the program's options.
        common: names of the common options that they mean.
        read: returns the common options that the program's mean for a parameter of this shape.
        write: returns the program's options for known common ones; None if it cannot express them.
        optional: whether a group may lack the program's options.
        neutral: values of options that `write` leaves out, for groups that have them already; others go.
    """

    options: tuple[str, ...]
    common: tuple[str, ...]
    read: Callable[[OptionValues, Index], OptionValues]
    write: Callable[[OptionValues, Index], OptionValues | None]
    optional: bool = False
    neutral: OptionValues = field(default_factory=dict)

    def decode(self, options: OptionValues, shape: Index) -> OptionValues:
        """Return the common options that a group's mean."""
        return self.read({option: options[option] for option in self.options if option in options}, shape)

    def meanings(self, common: OptionValues) -> dict[str, Any]:
        """Return those of the common options that it writes."""
        return {name: common[name] for name in self.common if name in common}


def renamed(option: str, name: str) -> Coding:
    """Return the coding of an option that has the common values under another name."""
    return Coding(
        (option,),
        (name,),
        read=lambda options, shape: dict(zip((name,), options.values(), strict=False)),
        write=lambda common, shape: dict(zip((option,), common.values(), strict=False)),
    )


def betas(option: str) -> Coding:
    """Return the coding of two decay rates as a pair."""
    names = ("beta1", "beta2")
    return Coding(
        (option,),
        names,
        read=lambda options, shape: dict(zip(names, options.get(option) or (), strict=False)),
        write=lambda common, shape: {option: (common["beta1"], common["beta2"])} if len(common) == 2 else {},
    )


def scale(option: str, values: Mapping[str, Sequence[object]]) -> Coding:
    """Return the coding of a matrix's scale; of the program's words for a common one the first is written."""

    def read(options: OptionValues, shape: Index) -> OptionValues:
        if option not in options:
            return {}
        names = [name for name, spellings in values.items() if options[option] in spellings]
        return {"adjust_lr_fn": names[0] if names else f"{option}={options[option]!r}"}

    def write(common: OptionValues, shape: Index) -> OptionValues | None:
        if not common:
            return {}
        spellings = values.get(common["adjust_lr_fn"], ())
        return {option: spellings[0]} if spellings else None

    return Coding((option,), ("adjust_lr_fn",), read=read, write=write)


def _schedule(common: OptionValues) -> tuple[Triple, ...] | None:
    """Return the polynomials of all steps, the norm's margin in the first; None if that is not known."""
    try:
        polynomials = coefficient_set(common["ns_coefficients"])
    except (ValueError, TypeError):
        return None
    if "ns_steps" not in common:
        is_constant = polynomials.steps == (polynomials.tail,) and polynomials.norm_scale == 1
        return polynomials.steps if is_constant else None
    # Dividing the matrix by a margin is the same as scaling the first polynomial.
    (a, b, c), *further = polynomials.schedule(common["ns_steps"])
    margin = polynomials.norm_scale
    return ((a / margin, b / margin**3, c / margin**5), *further)


def _set_name(rows: tuple[Triple, ...]) -> object:
    """Return the name of the published set that begins with these rows, or the rows themselves."""
    if len(set(rows)) == 1:
        return plain_coefficients(rows[0])
    for name, published in COEFFICIENTS.items():
        if published.norm_scale == 1 and published.schedule(len(rows)) == rows:
            return name
    return plain_coefficients(CoefficientSet("custom", rows, "a checkpoint"))


def coefficients(of_steps: bool) -> Coding:
    """Return the coding of coefficients as a triple, or ``of_steps`` also as one for each step."""

    def read(options: OptionValues, shape: Index) -> OptionValues:
        steps = {"ns_steps": options["ns_steps"]} if "ns_steps" in options else {}
        numbers = options.get("ns_coefficients")
        match numbers:
            case None:
                return steps
            # A triple for each step.
            case [[*_], *_]:
                rows = tuple((float(a), float(b), float(c)) for a, b, c in numbers)
                return {"ns_coefficients": _set_name(rows), "ns_steps": len(rows)}
            case [a, b, c]:
                return {"ns_coefficients": plain_coefficients((a, b, c)), **steps}
        return {"ns_coefficients": tuple(numbers), **steps}

    def write(common: OptionValues, shape: Index) -> OptionValues | None:
        if "ns_coefficients" not in common:
            return common
        # A program with one triple for all steps can only write equal ones.
        rows = _schedule(common)
        if rows is None or (len(set(rows)) > 1 and not of_steps):
            return None
        steps = {"ns_steps": common["ns_steps"]} if "ns_steps" in common else {}
        return {"ns_coefficients": rows[0] if len(set(rows)) == 1 else rows, **steps}

    return Coding(("ns_coefficients", "ns_steps"), ("ns_coefficients", "ns_steps"), read=read, write=write)


def _equal_parts(count: object, shape: Index) -> OptionValues:
    """Return the pieces of a parameter of ``count`` equal matrices, one below the other.

    Raises:
        SourceError: the count is less than 1.
    """
    if not isinstance(count, int) or count == 1 or len(shape) < 2:
        return {"pieces": None}
    if count < 1:
        raise SourceError(f"a parameter has {count} equal matrices by the options of its group; expected 1 or more")
    return {"pieces": (shape[-2] // count,) * count}


def _count(common: OptionValues, shape: Index) -> int | None:
    """Return how many equal parts the pieces are; None if they are not."""
    pieces = common["pieces"]
    if pieces is None:
        return 1
    return len(pieces) if len(shape) == 2 and len(set(pieces)) == 1 and sum(pieces) == shape[0] else None


def equal_parts(option: str, always: bool) -> Coding:
    """Return the coding of a number of equal matrices; groups have it ``always``, or only if it is more than 1."""

    def read(options: OptionValues, shape: Index) -> OptionValues:
        return _equal_parts(options.get(option, 1), shape)

    def write(common: OptionValues, shape: Index) -> OptionValues | None:
        # A group without pieces has one matrix; pieces of unequal heights have no count.
        count = _count(common, shape) if common else 1
        if count is None:
            return None
        return {option: count} if always or count > 1 else {}

    return Coding((option,), ("pieces",), read=read, write=write, optional=True, neutral={option: 1})


def _write_splits(common: OptionValues, shape: Index) -> OptionValues | None:
    pieces = common.get("pieces")
    if pieces is None or len(pieces) == 1:
        return {}
    return {"split_sizes": tuple(pieces)} if len(shape) == 2 and sum(pieces) == shape[0] else None


SPLITS = Coding(
    ("split_sizes", "num_heads"),
    ("pieces",),
    read=lambda options, shape: (
        _equal_parts(options.get("num_heads"), shape)
        if options.get("split_sizes") is None
        else {"pieces": tuple(options["split_sizes"])}
    ),
    write=_write_splits,
    optional=True,
    neutral={"split_sizes": None, "num_heads": None},
)
"""The coding of dion's blocks of rows, of any sizes or equal."""

FLATTEN = Coding(
    ("flatten",),
    ("flatten",),
    read=lambda options, shape: {"flatten": bool(options.get("flatten"))} if len(shape) > 2 else {},
    write=lambda common, shape: {"flatten": common.get("flatten", False)},
)
"""The coding that says whether a parameter of more than two dims is one matrix, or a stack."""


def _write_flatten(common: OptionValues, shape: Index) -> OptionValues | None:
    is_flattened = common.get("flatten", False)
    if len(shape) > 3 and not is_flattened:
        return None if common else {}
    return {"flatten": True} if is_flattened else {}


OPTIONAL_FLATTEN = Coding(("flatten",), ("flatten",), read=FLATTEN.read, write=_write_flatten, optional=True)
"""The same, where only flattened groups have the option, and no stack has more than three dims."""


def _read_form(options: OptionValues, shape: Index) -> OptionValues:
    match options:
        case {"ns_implementation": "std"}:
            return {"gram": None}
        case {"ns_implementation": _, "gram_ns_reset_iterations": [*restarts]}:
            return {"gram": tuple(restarts)}
    return {}


def _write_form(common: OptionValues, shape: Index) -> OptionValues:
    if "gram" not in common:
        return {}
    restarts = common["gram"]
    if restarts is None:
        return {"ns_implementation": "std"}
    return {"ns_implementation": "gram", "gram_ns_reset_iterations": tuple(restarts)}


GRAM = Coding(("ns_implementation", "gram_ns_reset_iterations"), ("gram",), read=_read_form, write=_write_form)
"""The coding of VeOmni's form of Newton-Schulz."""


def _read_algorithm(options: OptionValues, shape: Index) -> OptionValues:
    """Return the form and the coefficients of torch's ``ns_algorithm``: those of squares are the standard ones."""
    if options.get("ns_algorithm") != "gram":
        return {}
    if len(set(shape[-2:])) == 1:
        return {"gram": None, "ns_dtype": "bfloat16"}
    configured = {**options, **(options.get("gram_newton_schulz_config") or {})}
    triples = configured.get("gram_ns_coefficients") or [COEFFICIENTS["keller"].tail] * 5
    rows = tuple((float(a), float(b), float(c)) for a, b, c in triples)
    restarts = sorted({step for step in configured.get("gram_ns_reset_iterations") or () if 0 < step < len(rows)})
    longest = max(stop - start for start, stop in pairwise((0, *restarts, len(rows))))
    common = {"ns_coefficients": _set_name(rows), "ns_steps": len(rows), "ns_dtype": "float16", "gram": tuple(restarts)}
    # More steps on one Gram matrix are refused here: the plain form has the same polynomials, and other rounding.
    return common if longest <= MAX_STEPS_ON_ONE_GRAM else {**common, "gram": None, STEPS_ON_ONE_GRAM: longest}


STEPS_ON_ONE_GRAM = "steps on one Gram matrix"
"""The common option of a form whose rounding nothing here has: so many steps in float16 without a restart."""

ALGORITHM = Coding(
    ("ns_algorithm", "gram_newton_schulz_config", "gram_ns_coefficients", "gram_ns_reset_iterations"),
    (),
    read=_read_algorithm,
    write=lambda common, shape: {},
    optional=True,
)
"""The coding of the form of Newton-Schulz that torch's Muon may have from #187132 on.  No released torch had it in
November 2026, so it is read and not written."""


COUPLED = Coding(
    ("decoupled_weight_decay", "weight_decay"),
    ("coupled",),
    read=lambda options, shape: (
        {"coupled": options["weight_decay"]}
        if options.get("decoupled_weight_decay") is False and options.get("weight_decay")
        else {}
    ),
    write=lambda common, shape: {"decoupled_weight_decay": False} if common else {},
    optional=True,
)
"""The coding of the decay that torch's Adam adds to the gradient."""


FACTORS: Mapping[str, Callable[[int, int], float]] = {
    "none": lambda rows, columns: 1.0,
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "spectral": lambda rows, columns: math.sqrt(rows / columns),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
"""The factor of a matrix's rate, by the common name of the scale."""


def lr_ratio(common: OptionValues, shape: Index) -> float | None:
    """Return XTuner's factor of a matrix's rate, which it keeps as state; None if the scale is not known.

    It scales split rows block by block, and then keeps 1.
    """
    factor = FACTORS.get(common.get("adjust_lr_fn", ""))
    if factor is None or len(shape) < 2:
        return None
    if common.get("flatten"):
        return factor(shape[0], math.prod(shape[1:]))
    count = _count({"pieces": common.get("pieces")}, shape)
    return 1.0 if count is None else factor(shape[-2] // count, shape[-1])
