"""Options of parameter groups: which there are, what they may be, and which may change between steps.

Their defaults are in `vocabulary`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..coefficients import Coefficients, Plain, plain_coefficients
from ..vocabulary import MUON_CONVENTION, SCHEDULED, ParamGroup
from .newton_schulz.gram import spans
from .planning.precision import PRECISIONS
from .scalar import SCALARS
from .scales import UNNAMED
from .step.methods import MATRICES, STATISTICS, UPDATE_NORMS

T = TypeVar("T")

RATES = frozenset({"lr", "weight_decay", "momentum", "betas", "beta2"})
"""Options that every step reads anew, so that schedules may change them."""

NAMES = frozenset({"params", "param_names", "name"})
"""What a group consists of, and what it is called: ``name`` is the user's, for logs."""

TORCH_NAMES: Mapping[str, str] = {"adjust_lr_fn": "adjust_lr", "ns_coefficients": "ns"}
"""What torch.optim.Muon calls options of matrices, and what groups and state dicts call them here."""

FOREIGN = frozenset({"amsgrad", "capturable", "differentiable", "foreach", "fused", "maximize"})
"""Options of torch's optimizers that no algorithm here has; they may be there if they are off."""


CYCLED = ("momentum", "betas")
"""What torch's OneCycleLR and CyclicLR change besides rates: the first of a group's betas if ``Optimizer.defaults`` has
betas, else its momentum, if it has that; in all groups, whether they have it or not."""


def cycled(groups: Sequence[ParamGroup]) -> dict[str, Any]:
    """What may be in ``Optimizer.defaults`` for these schedulers: only what all groups have."""
    return {key: groups[0][key] for key in CYCLED if groups and all(key in group for group in groups)}


def fixed(group: ParamGroup) -> dict[str, Any]:
    """The options that plans are made of: all but rates.  If they change, plans are made anew."""
    return {key: value for key, value in group.items() if key not in RATES | SCHEDULED | NAMES}


def in_our_names(options: ParamGroup) -> dict[str, Any]:
    """Options of a group, some of which may have torch's names; ``adjust_lr_fn=None`` is torch's default.

    Raises:
        ValueError: an option is there under both names.
    """
    ours = {name: value for name, value in options.items() if name not in TORCH_NAMES}
    for torchs, name in TORCH_NAMES.items():
        if torchs not in options:
            continue
        value = options[torchs]
        alike = as_plain if name == "ns" else lambda option: option
        if alike(options.get(name, value)) != alike(value):
            raise ValueError(f"{torchs}={value!r} and {name}={options[name]!r} are one option: give only one of them")
        ours[name] = UNNAMED if torchs == "adjust_lr_fn" and value is None else value
    return ours


def renamed(name: str, value: T, former: str, given: T | None) -> T:
    """The value of an argument of a constructor, which may be given under its former name.

    Warns:
        DeprecationWarning: it is.
    """
    if given is None:
        return value
    warnings.warn(f"{former}= is called {name}= now", DeprecationWarning, stacklevel=3)
    return given


def refuse_unknown(group: ParamGroup, algorithm: str, options: Collection[str]) -> None:
    """Refuse keys that would be ignored silently.

    Raises:
        ValueError: names the first key that the algorithm does not have, and the option that may be meant.
    """
    off = {key for key in FOREIGN if not group.get(key)}
    for key in sorted(group.keys() - options - SCHEDULED - NAMES - off):
        near = get_close_matches(key, options, n=1, cutoff=0.85)
        cure = f"is {near[0]!r} meant?" if near else f"expected {', '.join(sorted(options))}, or 'name' for your logs"
        raise ValueError(f"{key}={group[key]!r}: {algorithm!r} groups have no such option; {cure}")


def as_plain(coefficients: Coefficients) -> Plain:
    """Coefficients as plain values.

    Raises:
        ValueError: as `coefficient_set`.
    """
    try:
        return plain_coefficients(coefficients)
    except ValueError as error:
        raise ValueError(f"ns_coefficients={coefficients!r}: {error}") from error


ONE_RATE = "match_rms_adamw"
"""The ``adjust_lr_fn`` with which the rate of matrices is AdamW's as well."""


def refuse_shared_rate(groups: Iterable[ParamGroup], algorithm: str, lr: float | Tensor) -> None:
    """Refuse that a group of an element-wise algorithm takes the rate of matrices, which is far too large for it.

    Args:
        groups: all groups.
        algorithm: of a group that does not say its rate.
        lr: the rate that it would have.

    Raises:
        ValueError: matrices of some group have a scale other than `ONE_RATE`.
    """
    for group in groups:
        if group["algorithm"] in MATRICES and group["adjust_lr"] != ONE_RATE:
            raise ValueError(
                f"a group of {algorithm!r} says no lr, and lr={float(lr)!r} is a rate of matrices with "
                f"adjust_lr_fn={group['adjust_lr']!r}: give the group its own, such as 'lr': 3e-4 "
                f"(adamw_lr=3e-4 of Muon.for_model), or give all "
                f"matrices adjust_lr_fn={ONE_RATE!r}, with which one rate serves both"
            )


def check(group: ParamGroup, scales: Collection[str]) -> None:
    """Refuse options out of range.

    Args:
        scales: the names that ``adjust_lr`` may have.

    Raises:
        ValueError: names the option, its value, and what is expected.
    """

    def need(name: str, fine: bool, expected: str) -> None:
        if not fine:
            raise ValueError(f"{name}={group[name]!r}: expected {expected}")

    one = torch.as_tensor(group["lr"]).numel() == 1
    need("lr", one and 0 <= float(group["lr"]) < math.inf, "a finite rate >= 0")
    need("weight_decay", 0 <= float(group["weight_decay"]) < math.inf, "a finite decay >= 0")
    if group["algorithm"] in SCALARS:
        SCALARS[group["algorithm"]].check(group)
        return
    need("momentum", 0 <= group["momentum"] < 1, "a number in [0, 1)")
    need("adjust_lr", group["adjust_lr"] in scales, f"a function, or one of {sorted(scales)}")
    need("ns_steps", group["ns_steps"] >= 1, "at least one step")
    need("ns_dtype", group["ns_dtype"] in PRECISIONS, f"one of {sorted(PRECISIONS)}")
    need("eps", 0 < group["eps"] < math.inf, "a positive number")
    need(
        "convention",
        group["convention"] == MUON_CONVENTION,
        f"{str(MUON_CONVENTION)!r}: converters translate state of another convention",
    )
    if group["gram"] is not None:
        spans(group["gram"], group["ns_steps"], PRECISIONS[group["ns_dtype"]].compute)
    if "beta2" in group:
        need("beta2", 0 <= group["beta2"] < 1, "a number in [0, 1)")
        need("statistics", group["statistics"] in STATISTICS, f"one of {sorted(STATISTICS)}")
        need("update_norm", group["update_norm"] in UPDATE_NORMS, f"one of {sorted(UPDATE_NORMS)}")
