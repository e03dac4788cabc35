"""Options of parameter groups: their checks, and the code's own values, for a resume to report which it overrides.

A loaded state brings the rates of the saved run, so the code's present ones have no effect.  They were changed on
purpose if they differ from the code's at that time, which state dicts have under `GIVEN_KEYS`, as schedules change the
rates of groups.  Defaults are in `names.vocabulary`.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from itertools import chain
from numbers import Integral, Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..names.coefficients import Coefficients, Plain, plain_coefficients
from ..names.errors import ArgumentError, warn_on_rank
from ..names.resumption import are_close, as_tuples
from ..names.vocabulary import (
    FLATTEN,
    GIVEN_KEYS,
    HISTORY_OPTIONS,
    MOMENTUM_DTYPE,
    MUON,
    MUON_CONVENTION,
    SCHEDULER_OPTIONS,
    STATE_DTYPE,
    STATE_DTYPES,
    ParamGroup,
)
from ..names.wording import fitted
from .methods.form import MatrixMethod
from .methods.matrix import is_matrix_method
from .newton_schulz.recipe import spans
from .planning.matrices import PRECISIONS
from .step.agreement import NAMES

FOREIGN = frozenset({"amsgrad", "capturable", "differentiable", "foreach", "fused", "maximize"})
"""Options of torch's optimizers that no algorithm here has; a group may have them if they are off."""

CYCLED_OPTIONS = ("momentum", "betas")
"""Options that torch's OneCycleLR and CyclicLR set in every group, even in one without them: the first of the betas if
``Optimizer.defaults`` has betas, else momentum if the defaults have that."""


def as_numbers(value: Any) -> Any:
    """Return a hyper-parameter with tensors as numbers."""
    if isinstance(value, tuple | list):
        return type(value)(map(as_numbers, value))
    return value.item() if isinstance(value, Tensor) else value


def params_of(groups: Iterable[ParamGroup]) -> Iterator[Tensor]:
    """Yield the parameters of all groups."""
    return chain.from_iterable(group["params"] for group in groups)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group, without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def state_options(method: MatrixMethod | None) -> Collection[str]:
    """Return the options that say how a group stores its state; they have no defaults."""
    if method is None:
        return (STATE_DTYPE,)
    return (MOMENTUM_DTYPE,) if method.averages else ()


def cycled_defaults(groups: Sequence[ParamGroup]) -> dict[str, Any]:
    """Return the defaults for these schedulers: only options that all groups have."""
    common = set.intersection(*(set(group) for group in groups)) if groups else set()
    return {key: groups[0][key] for key in CYCLED_OPTIONS if key in common}


def refuse_unknown(group: ParamGroup, algorithm: str, options: Collection[str]) -> None:
    """Raise ArgumentError for an option that the algorithm lacks, naming the one that may be meant."""
    foreign_but_off = {key for key in FOREIGN if not group.get(key)}
    for key in sorted(group.keys() - options - HISTORY_OPTIONS - NAMES - foreign_but_off):
        near = get_close_matches(key, options, n=1, cutoff=0.85)
        cure = f"is {near[0]!r} meant?" if near else f"expected {', '.join(sorted(options))}, or 'name' for your logs"
        if key == "use_muon":  # of other programs' groups
            cure += f". Write 'algorithm': {'muon' if group[key] else 'adamw'!r} in its place"
        raise ArgumentError(f"{key}={reprlib.repr(group[key])}: {algorithm!r} groups have no such option; {cure}")


def refuse_repeated(groups: Sequence[ParamGroup]) -> None:
    """Raise ArgumentError for a parameter that groups have twice, which a step would move twice."""
    places: dict[Tensor, str] = {}
    for number, group in enumerate(groups):
        params = group["params"]
        for place, item in enumerate([params] if isinstance(params, Tensor) else params):
            name, param = item if isinstance(item, tuple) else (None, item)
            if "param_names" in group:
                name = group["param_names"][place]
            position = f"parameter {place} of group {number}{f', {name}' if name else ''}"
            if isinstance(param, Tensor) and places.setdefault(param, position) != position:
                raise ArgumentError(
                    f"{position} is {places[param]}, too: expected each parameter once, and none in more than one "
                    "parameter group. Write tied parameters once, as model.parameters() has them"
                )


def parse_coefficients(coefficients: Coefficients) -> Plain:
    """Return Newton-Schulz coefficients as a group has them; raise ArgumentError for anything else."""
    try:
        return plain_coefficients(coefficients)
    except ValueError as error:
        raise ArgumentError(f"ns_coefficients={coefficients!r}: {error}") from error


def refuse_shared_rate(groups: Iterable[ParamGroup], algorithm: str, lr: float | Tensor) -> None:
    """Raise ValueError if a group of an element-wise algorithm would share ``lr`` with matrices.

    Their rates are far too large for it, except with the scale "match_rms_adamw".
    """
    for group in groups:
        if is_matrix_method(group["algorithm"]) and group["adjust_lr_fn"] != "match_rms_adamw":
            raise ArgumentError(
                f"a group of {algorithm!r} says no lr, and lr={float(lr)!r} is a rate of matrices with "
                f"adjust_lr_fn={group['adjust_lr_fn']!r}: give the group its own, such as 'lr': 3e-4 "
                "(adamw_lr=3e-4 of Muon.for_model), or give all matrices adjust_lr_fn='match_rms_adamw', with which "
                "one rate serves both"
            )


Declaration = tuple[Callable[[Any], bool], str]
"""A condition on the values of an option, and in words the values that meet it."""


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    if type(value) is float:
        return True
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and value.dtype is not torch.bool
    return isinstance(value, Real) and not isinstance(value, bool)


def _are_counts(value: Any) -> bool:
    return isinstance(value, Sequence) and all(_is_integer(count) and count >= 1 for count in value)


def _declare_counts(unit: str) -> Declaration:
    expected = f"None, or whole numbers of at least 1 in a list: the {unit} of each matrix that is fused in a parameter"
    return lambda counts: counts is None or (_are_counts(counts) and len(counts) > 0), expected


def _declare_none_or(values: Collection[Any]) -> Declaration:
    return (None, *values).__contains__, f"None, or one of {list(values)}"


FLAG: Declaration = (lambda value: isinstance(value, bool), "True or False")
COUNT: Declaration = (lambda value: _is_integer(value) and value >= 1, "a whole number of at least 1")
COUNT_OR_NONE: Declaration = (lambda value: value is None or COUNT[0](value), f"None, or {COUNT[1]}")
_TYPES: Mapping[tuple[type, ...], Declaration] = {(bool,): FLAG, (int, float): (_is_number, "a number")}
_FRACTION: Declaration = (lambda value: _is_number(value) and 0 <= value < 1, "a number in [0, 1)")

_RATES: Mapping[str, Declaration] = {
    "lr": (lambda lr: _is_number(lr) and 0 <= float(lr) < math.inf, "a finite rate >= 0"),
    "weight_decay": (lambda decay: _is_number(decay) and 0 <= decay < math.inf, "a finite decay >= 0"),
    "momentum": _FRACTION,
    "beta2": _FRACTION,
    "betas": (
        lambda betas: isinstance(betas, tuple | list | Sequence) and len(betas) == 2 and all(map(_FRACTION[0], betas)),
        "two numbers in [0, 1)",
    ),
}
"""Options that schedules change between steps."""

_DECLARATIONS: Mapping[str, Declaration] = {
    **dict.fromkeys((name for name, default in asdict(MUON).items() if isinstance(default, bool)), FLAG),
    **_RATES,
    "convention": (
        lambda convention: convention == MUON_CONVENTION,
        f"{str(MUON_CONVENTION)!r}: converters translate state of another convention",
    ),
    "ns_steps": (COUNT[0], "at least one step, as a whole number"),
    "ns_dtype": (PRECISIONS.__contains__, f"one of {sorted(PRECISIONS)}"),
    "gram": (lambda gram: gram is None or _are_counts(gram), "None, or the steps of restarts in a list"),
    "pieces": _declare_counts("rows"),
    "columns": _declare_counts("columns"),
    "interleaved": COUNT,
    MOMENTUM_DTYPE: _declare_none_or(STATE_DTYPES),
    STATE_DTYPE: _declare_none_or(STATE_DTYPES),
    FLATTEN: FLAG,
}
"""Options of groups, where their values do not depend on the algorithm."""

_EPS: Mapping[bool, Declaration] = {
    True: (lambda eps: _is_number(eps) and 0 < eps < math.inf, "a positive number"),
    False: (lambda eps: _is_number(eps) and 0 <= eps < math.inf, "a finite number >= 0"),
}
"""``eps`` of matrices, which are divided by their norm, and of elements."""


def check_value(name: str, value: Any, declaration: Declaration) -> None:
    """Raise ArgumentError for a value that is not as declared."""
    is_expected, expected = declaration
    try:
        is_valid = is_expected(value)
    except (TypeError, ValueError, RuntimeError, AttributeError):  # of another type than the condition is for
        is_valid = False
    if not is_valid:
        raise ArgumentError(f"{name}={value!r}: expected {expected}")


def check_rates(groups: Iterable[ParamGroup], method_of: Callable[[ParamGroup], MatrixMethod | None]) -> None:
    """Raise ArgumentError for a rate that was set between steps and is not as declared."""
    for number, group in enumerate(groups):
        method = method_of(group)
        for name in _RATES:
            if name in group:
                try:
                    _check_option(name, group, method)
                except ValueError as error:
                    raise ArgumentError(f"group {number}: {error}") from None


def check_group(group: ParamGroup, scales: Collection[str], method: MatrixMethod | None) -> None:
    """Raise ArgumentError for an option that is not as declared.

    Args:
        scales: the names that ``adjust_lr_fn`` may have.
        method: None for element-wise algorithms.
    """
    # Each option by itself.
    for name in dict.fromkeys([*_DECLARATIONS, "eps", *(method.options if method is not None else ())]):
        if name in group:
            _check_option(name, group, method)
    # Options that depend on others: those of scales, and the restarts of the Gram form.
    if method is None:
        return
    check_value("adjust_lr_fn", group["adjust_lr_fn"], (scales.__contains__, f"a function, or one of {sorted(scales)}"))
    if group.get("gram") is not None:
        spans(group["gram"], group["ns_steps"], PRECISIONS[group["ns_dtype"]].compute)


def _check_option(name: str, group: ParamGroup, method: MatrixMethod | None) -> None:
    if method is not None and name in method.options:
        # An option of a user's method: the type of its default, and its condition.
        option = method.options[name]
        declarations = [declaration for types, declaration in _TYPES.items() if type(option.default) in types]
        declarations.append((option.holds, option.expected))
    else:
        declarations = [_EPS[method is not None] if name == "eps" else _DECLARATIONS[name]]
    for declaration in declarations:
        check_value(name, group[name], declaration)


def options_in_code(group: ParamGroup) -> dict[str, Any]:
    """Return the options that the code gave a group, as far as the group can tell."""
    # A scheduler has changed the rate, but not its initial value.
    options = {**group, "lr": group.get("initial_lr", group["lr"])}
    options |= {option: group[key] for option, key in GIVEN_KEYS.items() if key in group}
    return {option: as_tuples(as_numbers(options[option])) for option in GIVEN_KEYS if option in options}


def keys_of_code_options(group: ParamGroup, code_options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that a state dict needs, so that `options_in_code` tells the code's options."""
    stated = options_in_code(group)
    return {GIVEN_KEYS[key]: value for key, value in code_options.items() if key in stated and stated[key] != value}


def adopt_saved_options(
    groups: Sequence[dict[str, Any]], former_groups: Sequence[ParamGroup], code_options: Sequence[dict[str, Any]]
) -> None:
    """Warn, on the first rank, of options of the code that loaded groups override, and take over the saved run's."""
    overridden, lines = list[str](), list[str]()
    for number, (group, former, options) in enumerate(zip(groups, former_groups, code_options, strict=True)):
        saved = {option: group.pop(key) for option, key in GIVEN_KEYS.items() if key in group}
        # Compare the options of both codes, and what schedulers have written.
        live = options | {option: as_numbers(former[option]) for option in SCHEDULER_OPTIONS & former.keys()}
        loaded = saved | {option: as_numbers(group[option]) for option in SCHEDULER_OPTIONS & group.keys()}
        differing = {option for option in live.keys() & loaded.keys() if not are_close(live[option], loaded[option])}
        if "lr" in differing:  # which it follows
            differing.discard("initial_lr")
        # The saved run may have changed an option to what the code gives now; schedules change rates from the first.
        present = {**group, "lr": group.get("initial_lr", group["lr"])}
        differing = {option for option in differing if not are_close(as_numbers(present[option]), live[option])}
        if differing:
            changes = ", ".join(f"{option}={loaded[option]!r}, not {live[option]!r}" for option in sorted(differing))
            overridden.append(f"group {number} ({group['algorithm']}): {changes}")
            option = min(differing)
            lines.append(f"optimizer.param_groups[{number}][{option!r}] = {live[option]!r}")
        options.update(saved)
    if overridden and not (dist.is_initialized() and dist.get_rank()):
        subject = "hyper-parameters are those of the saved run, not of the code"
        step = (
            f"To train with the code's, write after loading {lines[0]}, and so on; for other rates of a scheduler "
            "begin a run in another folder: run.resume(begin_from=...)"
        )
        warn_on_rank(f"{subject}: {fitted(overridden, '; ', subject, step)}. {step}")
