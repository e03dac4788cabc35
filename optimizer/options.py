"""Checks of parameter group options.  Their defaults are in `vocabulary`."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from ..names.coefficients import Coefficients, Plain, plain_coefficients
from ..names.state_forms import BLOCK_SIZE, BLOCK_SIZES, MOMENTUM_DTYPE, STATE_DTYPE, STATE_DTYPES
from ..names.vocabulary import (
    HISTORY_OPTIONS,
    MUON_CONVENTION,
    ROUNDING_SEED,
    STEPS_TAKEN,
    ParamGroup,
)
from .ground.codecs import codec_of
from .ground.cuda_graphs import is_capturable
from .methods.form import MatrixMethod, Option
from .methods.matrix import is_matrix_method
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
    for key in sorted(group.keys() - options - HISTORY_OPTIONS - NAMES - off):
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


Declaration = tuple[Callable[[Any], bool], str]
"""What an option may be: whether a value is that, and in words."""


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and value.dtype is not torch.bool
    return isinstance(value, Real) and not isinstance(value, bool)


def _are_counts(value: Any) -> bool:
    return isinstance(value, Sequence) and all(_is_whole(count) and count >= 1 for count in value)


def _in_list(what: str) -> Declaration:
    expected = f"None, or whole numbers of at least 1 in a list: the {what} of each matrix that is fused in a parameter"
    return lambda counts: counts is None or (_are_counts(counts) and len(counts) > 0), expected


def _none_or(values: Collection[Any]) -> Declaration:
    return (None, *values).__contains__, f"None, or one of {list(values)}"


FLAG: Declaration = (lambda value: isinstance(value, bool), "True or False")
COUNT: Declaration = (lambda value: _is_whole(value) and value >= 1, "a whole number of at least 1")
COUNT_OR_NONE: Declaration = (lambda value: value is None or COUNT[0](value), f"None, or {COUNT[1]}")
_TYPES: Mapping[tuple[type, ...], Declaration] = {(bool,): FLAG, (int, float): (_is_number, "a number")}
_FRACTION: Declaration = (lambda value: _is_number(value) and 0 <= value < 1, "a number in [0, 1)")

_RATES: Mapping[str, Declaration] = {
    "lr": (lambda lr: _is_number(lr) and 0 <= float(lr) < math.inf, "a finite rate >= 0"),
    "weight_decay": (lambda decay: _is_number(decay) and 0 <= decay < math.inf, "a finite decay >= 0"),
    "momentum": _FRACTION,
    "beta2": _FRACTION,
    "betas": (
        lambda betas: isinstance(betas, Sequence) and len(betas) == 2 and all(map(_FRACTION[0], betas)),
        "two numbers in [0, 1)",
    ),
    STEPS_TAKEN: (lambda steps: _is_whole(steps) and steps >= 0, "a number of steps"),
}
"""What schedules change between steps."""

_DECLARATIONS: Mapping[str, Declaration] = {
    **_RATES,
    "cautious": FLAG,
    "nesterov": FLAG,
    "convention": (
        lambda convention: convention == MUON_CONVENTION,
        f"{str(MUON_CONVENTION)!r}: converters translate state of another convention",
    ),
    "ns_steps": (COUNT[0], "at least one step, as a whole number"),
    "ns_dtype": (PRECISIONS.__contains__, f"one of {sorted(PRECISIONS)}"),
    "gram": (lambda gram: gram is None or _are_counts(gram), "None, or the steps of restarts in a list"),
    "pieces": _in_list("rows"),
    "columns": _in_list("columns"),
    "interleaved": COUNT,
    MOMENTUM_DTYPE: _none_or(STATE_DTYPES),
    STATE_DTYPE: _none_or(STATE_DTYPES),
    BLOCK_SIZE: (BLOCK_SIZES.__contains__, f"a power of two from {BLOCK_SIZES[0]} to {BLOCK_SIZES[-1]}"),
    ROUNDING_SEED: (lambda seed: seed is None or _is_whole(seed), "an integer, or None"),
}
"""What options of groups may be, where that does not depend on the algorithm."""

_EPS: Mapping[bool, Declaration] = {
    True: (lambda eps: _is_number(eps) and 0 < eps < math.inf, "a positive number"),
    False: (lambda eps: _is_number(eps) and 0 <= eps < math.inf, "a finite number >= 0"),
}
"""The same of ``eps``: of matrices, which are divided by their norm, and of elements."""


def check_value(name: str, value: Any, declaration: Declaration) -> None:
    """Raise ValueError for a value that is not as declared."""
    is_expected, expected = declaration
    try:
        holds = is_expected(value)
    except (TypeError, ValueError, RuntimeError, AttributeError):  # of another type than the condition is for
        holds = False
    if not holds:
        raise ValueError(f"{name}={value!r}: expected {expected}")


def check_rates(groups: Iterable[ParamGroup], method_of: Callable[[ParamGroup], MatrixMethod | None]) -> None:
    """Raise ValueError for a rate that was set between steps and is not as declared.

    Tensors on a device are not looked at, as that would wait for it.
    """
    for number, group in enumerate(groups):
        method = method_of(group)
        for name, declaration in _RATES.items():
            values = group.get(name, ())
            if name not in group or any(map(_is_far, values if isinstance(values, tuple | list) else (values,))):
                continue
            option = method.options.get(name) if method is not None else None
            try:
                _check(name, group[name], [declaration] if option is None else _declared(option))
            except ValueError as error:
                raise ValueError(f"group {number}: {error}") from None


def _is_far(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.device.type != "cpu" or is_capturable(value.device))


def _declared(option: Option) -> list[Declaration]:
    """Return the declarations of a method's option: the type of its default, and its condition."""
    kinds = [kind for types, kind in _TYPES.items() if type(option.default) in types]
    return [*kinds, (option.holds, option.expected)]


def _check(name: str, value: Any, declarations: Iterable[Declaration]) -> None:
    for declaration in declarations:
        check_value(name, value, declaration)


def check(group: ParamGroup, scales: Collection[str], method: MatrixMethod | None) -> None:
    """Raise ValueError for an option that is not as declared.

    Args:
        scales: the names that ``adjust_lr_fn`` may have.
        method: None for element-wise algorithms.
    """
    options = {} if method is None else method.options
    for name, declaration in _DECLARATIONS.items():
        if name in group and name not in options:
            check_value(name, group[name], declaration)
    for name, option in options.items():
        _check(name, group[name], _declared(option))
    codec_of(group)
    if "eps" in group and "eps" not in options:
        check_value("eps", group["eps"], _EPS[method is not None])
    if method is None:
        return
    check_value("adjust_lr_fn", group["adjust_lr_fn"], (scales.__contains__, f"a function, or one of {sorted(scales)}"))
    if group.get("gram") is not None:
        spans(group["gram"], group["ns_steps"], PRECISIONS[group["ns_dtype"]].compute)
