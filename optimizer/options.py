"""Checks of parameter group options.  Their defaults are in `vocabulary`."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Collection, Iterable, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from ..coefficients import Coefficients, Plain, plain_coefficients
from ..vocabulary import (
    BLOCK_SIZE,
    BLOCK_SIZES,
    EIGHT_BITS,
    MOMENTUM_DTYPE,
    MUON_CONVENTION,
    ROUNDING_SEED,
    SCHEDULED,
    STATE_DTYPE,
    STATE_DTYPES,
    STEPS_TAKEN,
    ParamGroup,
)
from .ground.eight_bits import block_of
from .methods.form import MatrixMethod
from .methods.matrix import is_matrix_method
from .methods.scalar import SCALARS
from .newton_schulz.recipe import spans
from .planning.matrices import PRECISIONS
from .step.agreement import NAMES

FOREIGN = frozenset({"amsgrad", "capturable", "differentiable", "foreach", "fused", "maximize"})
"""Options of torch's optimizers that no algorithm here has; a group may have them if they are off."""

CYCLED = ("momentum", "betas")
"""Options that torch's OneCycleLR and CyclicLR set in every group, even in one without them: the first of the betas if
``Optimizer.defaults`` has betas, else momentum if the defaults have that."""


def options_of_state(method: MatrixMethod | None) -> Collection[str]:
    """Return the options of groups, besides those of their algorithm, that say in which dtype their state is kept.

    A group has those that it was given.
    """
    if method is None:
        return STATE_DTYPE, BLOCK_SIZE, ROUNDING_SEED, STEPS_TAKEN
    return (MOMENTUM_DTYPE, BLOCK_SIZE, ROUNDING_SEED, STEPS_TAKEN) if method.averages else ()


def cycled(groups: Sequence[ParamGroup]) -> dict[str, Any]:
    """Return the defaults for these schedulers: only options that all groups have."""
    return {key: groups[0][key] for key in CYCLED if groups and all(key in group for group in groups)}


def refuse_unknown(group: ParamGroup, algorithm: str, options: Collection[str]) -> None:
    """Raise ValueError for an option that the algorithm lacks, naming the one that may be meant."""
    off = {key for key in FOREIGN if not group.get(key)}
    for key in sorted(group.keys() - options - SCHEDULED - NAMES - off):
        near = get_close_matches(key, options, n=1, cutoff=0.85)
        cure = f"is {near[0]!r} meant?" if near else f"expected {', '.join(sorted(options))}, or 'name' for your logs"
        if key == "use_muon":  # of other programs' groups
            cure += f". Write 'algorithm': {'muon' if group[key] else 'adamw'!r} in its place"
        raise ValueError(f"{key}={reprlib.repr(group[key])}: {algorithm!r} groups have no such option; {cure}")


def refuse_repeated(groups: Sequence[ParamGroup]) -> None:
    """Refuse a parameter that groups have twice, which a step would move twice.

    Raises:
        ValueError: names both its places.
    """
    places: dict[Tensor, str] = {}
    for number, group in enumerate(groups):
        params = group["params"]
        for place, item in enumerate([params] if isinstance(params, Tensor) else params):
            name, param = item if isinstance(item, tuple) else (None, item)
            if "param_names" in group:
                name = group["param_names"][place]
            where = f"parameter {place} of group {number}{f', {name}' if name else ''}"
            if isinstance(param, Tensor) and places.setdefault(param, where) != where:
                raise ValueError(
                    f"{where} is {places[param]}, too: expected each parameter once, and none in more than one "
                    "parameter group. Write tied parameters once, as model.parameters() has them"
                )


def as_plain(coefficients: Coefficients) -> Plain:
    try:
        return plain_coefficients(coefficients)
    except ValueError as error:
        raise ValueError(f"ns_coefficients={coefficients!r}: {error}") from error


def refuse_shared_rate(groups: Iterable[ParamGroup], algorithm: str, lr: float | Tensor) -> None:
    """Raise ValueError if a group of an element-wise algorithm would share ``lr`` with matrices.

    Their rates are far too large for it, except with the scale "match_rms_adamw".
    """
    for group in groups:
        if is_matrix_method(group["algorithm"]) and group["adjust_lr_fn"] != "match_rms_adamw":
            raise ValueError(
                f"a group of {algorithm!r} says no lr, and lr={float(lr)!r} is a rate of matrices with "
                f"adjust_lr_fn={group['adjust_lr_fn']!r}: give the group its own, such as 'lr': 3e-4 "
                "(adamw_lr=3e-4 of Muon.for_model), or give all matrices adjust_lr_fn='match_rms_adamw', with which "
                "one rate serves both"
            )


def check(group: ParamGroup, scales: Collection[str], method: MatrixMethod | None) -> None:
    """Raise ValueError for an option out of range.

    Args:
        scales: the names that ``adjust_lr_fn`` may have.
        method: None for element-wise algorithms.
    """

    def need(name: str, fine: Callable[[Any], bool], expected: str) -> None:
        try:
            holds = fine(group[name])
        except (TypeError, RuntimeError):  # of another type, such as a string, or a tensor of several elements
            holds = False
        if not holds:
            raise ValueError(f"{name}={group[name]!r}: expected {expected}")

    for name in (MOMENTUM_DTYPE, STATE_DTYPE):
        if name in group:
            need(name, (None, *STATE_DTYPES).__contains__, f"None, or one of {list(STATE_DTYPES)}")
    if BLOCK_SIZE in group:
        ends = f"a power of two from {BLOCK_SIZES[0]} to {BLOCK_SIZES[-1]}"
        need(BLOCK_SIZE, lambda size: block_of(group) > 0, f"it with {MOMENTUM_DTYPE}= or {STATE_DTYPE}={EIGHT_BITS!r}")
        need(BLOCK_SIZE, BLOCK_SIZES.__contains__, ends)
    if group.get(ROUNDING_SEED) is not None:
        need(ROUNDING_SEED, lambda seed: isinstance(seed, int), "an integer, or None")
    if STEPS_TAKEN in group:
        need(STEPS_TAKEN, lambda steps: steps >= 0, "a number of steps")
    need("lr", lambda lr: torch.as_tensor(lr).numel() == 1 and 0 <= float(lr) < math.inf, "a finite rate >= 0")
    need("weight_decay", lambda decay: 0 <= decay < math.inf, "a finite decay >= 0")
    if method is None:
        SCALARS[group["algorithm"]].check(group)
        return
    need("adjust_lr_fn", scales.__contains__, f"a function, or one of {sorted(scales)}")
    if method.averages:
        need("momentum", lambda momentum: 0 <= momentum < 1, "a number in [0, 1)")
        need(
            "convention",
            MUON_CONVENTION.__eq__,
            f"{str(MUON_CONVENTION)!r}: converters translate state of another convention",
        )
    if method.orthogonalizes:
        need("ns_steps", lambda steps: steps >= 1, "at least one step")
        need("ns_dtype", PRECISIONS.__contains__, f"one of {sorted(PRECISIONS)}")
        need("eps", lambda eps: 0 < eps < math.inf, "a positive number")
        if group["gram"] is not None:
            spans(group["gram"], group["ns_steps"], PRECISIONS[group["ns_dtype"]].compute)
    for name, option in method.options.items():
        need(name, option.holds, option.expected)
