"""The options of parameter groups: read from one program into common words, and written in those of another."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ...box import Index
from ...coefficients import plain_coefficients
from ...errors import SourceError
from ...store.open_checkpoint import Values
from ...vocabulary import PARAMS, SCHEDULED
from ..engine.outputs import Action, Findings
from ..programs.dialect import Dialect, StoredMethod
from .groups import SourceGroup


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """The options of a group for parameters of one shape.

    ``known`` are those with common names; ``unknown`` are the others, as the source calls them.
    """

    known: Mapping[str, object]
    unknown: Mapping[str, object]


_HOW = frozenset({"foreach", "fused", "capturable", "differentiable", "clip_grad", "param_names", "name"})
"""Options that say how a program computes, or what a group is called, but not what is computed."""

_ROUNDING = frozenset({"gram", "ns_dtype"})
"""Common options that only change how a result is rounded; of them "bfloat16" is what every program computes in."""

_REFUSED = {"maximize": "it goes up the gradient", "coupled": "decay that is added to the gradient"}
"""Common options without which an update is another one altogether, and what they mean."""

_OFF: Mapping[str, object] = {"pieces": None, "columns": None, "interleaved": 1, "cautious": False, "maximize": False,
                              "flatten": False, "gram": None, "ns_dtype": "bfloat16"}  # fmt: skip
"""Common options that need no word where they have this value."""


def read_options(
    group: SourceGroup, dialect: Dialect, method: StoredMethod, values: Values, shape: Index
) -> GroupOptions:
    """Return the options of a dialect's group as its program would read them for a parameter of this shape.

    Raises:
        SourceError: an option is damaged, or is not plain data.
    """
    own = {option: values.read(item) for option, item in group.items.items() if option != PARAMS}
    named = {*method.options.values(), *method.idle, *_HOW, *SCHEDULED, dialect.method_option}
    known = dict(dialect.facts.get(method.name, {}))
    for coding in method.codings:
        known |= coding.read({option: own[option] for option in coding.own if option in own}, shape)
        named |= {*coding.own}
    known |= {name: own[option] for name, option in method.options.items() if option in own}
    if "ns" in known:
        known["ns"] = _canonical(known["ns"])
    return GroupOptions(
        known | {option: own[option] for option in SCHEDULED if option in own},
        {option: value for option, value in own.items() if option not in named},
    )


def _canonical(coefficients: Any) -> object:
    """Return coefficients as our optimizer writes them, or the value unchanged if it is none."""
    try:
        return plain_coefficients(coefficients)
    except (ValueError, TypeError):
        return coefficients


def write_options(
    options: GroupOptions,
    source: Dialect,
    target: Dialect,
    method: StoredMethod,
    shape: Index,
    findings: Findings,
    given: Mapping[str, object] = MappingProxyType({}),
) -> dict[str, object]:
    """Return the options as the target names them; ``findings`` gets every difference, with the values.

    ``given`` are options of the run that the result is for; they count where the source says nothing.

    Raises:
        SourceError: the target has no word for an option without which updates are altogether different.
    """
    known, lost = options.known, dict[str, object]()
    said = {own: known[name] for name, own in method.options.items() if name in known}
    named = {*method.options, *SCHEDULED, "step"}
    for coding in method.codings:
        mine = {name: known[name] for name in coding.common if name in known}
        written = coding.write(mine, shape)
        named |= {*coding.common}
        if written is None:
            lost |= mine
        else:
            said |= written
    facts = target.facts.get(method.name, {})
    lost |= {name: known[name] for name in known.keys() - named if known[name] not in (facts.get(name), _OFF.get(name))}
    said |= {option: known[option] for option in SCHEDULED if option in known}
    about = f"{method.name} groups"
    for name, value in sorted(lost.items()):
        if name in _REFUSED:
            raise SourceError(
                f"{about} have {name}={value!r}: {_REFUSED[name]}; {target.name} has no such thing, so training would "
                "go on altogether differently. Leave out the state of these parameters with --select"
            )
        if name == "scale" and method.derived:
            findings.check(Action.CARRIED, f"the lr scale {value} of {about}", *method.derived, reason="by parameter")
            continue
        action = Action.LEFT if name in _ROUNDING else Action.SET
        findings.check(action, f"{name} of {about}", repr(value), reason=f"{target.name} has no option for it")
    for name in sorted(facts.keys() - known.keys() - _OFF.keys()):
        reason = f"always so in {target.name}; {source.name} does not say it: {source.hints.get(name, 'unknown')}"
        findings.check(Action.SET, f"{name} of {about}", repr(facts[name]), reason=reason)
    for option, value in sorted(options.unknown.items()):
        findings.check(Action.LEFT, f"{option} of {about}", repr(value), reason=f"no counterpart in {target.name}")
    said = {option: value for option, value in said.items() if option not in target.unsaid}
    taken = {option: value for option, value in given.items() if option not in {*said, target.method_option}}
    for option in sorted(taken.keys() - method.idle.keys() - _HOW):
        reason = f"{source.name} does not say it; taken from the template"
        findings.check(Action.CARRIED, f"{option} of {about}", repr(taken[option]), reason=reason)
    said |= taken
    assumed = {option: value for option, value in method.assumed.items() if option not in {*said, *target.unsaid}}
    for option, value in assumed.items():
        hint = _hint(option, source, method)
        reason = f"{source.name} does not say it{hint}; written as in a new optimizer of {target.name}"
        findings.check(Action.SET, f"{option} of {about}", repr(value), reason=reason)
    idle = {option: value for option, value in method.idle.items() if option not in said}
    _unsaid(said.keys() | assumed.keys() | idle.keys(), source, target, method, findings)
    method_name = {target.method_option: method.name} if target.method_option else {}
    return {**said, **assumed, **idle, **method_name}


def _unsaid(said: Collection[str], source: Dialect, target: Dialect, method: StoredMethod, findings: Findings) -> None:
    """Report the options of the target that it does not get, because the source does not say them."""
    names = {*method.options.values()}
    names |= {own for coding in method.codings if not coding.optional for own in coding.own}
    for option in sorted(names - {*said, *target.unsaid, method.options.get("step")}):
        reason = f"{source.name} does not say it{_hint(option, source, method)}; the running optimizer's stays"
        findings.check(Action.SET, f"{option} of {method.name} groups", reason=reason)


def _hint(option: str, source: Dialect, method: StoredMethod) -> str:
    """Return where a user finds the value of an option that the source does not say, in brackets; empty if unknown."""
    names = {own: coding.common[0] for coding in method.codings for own in coding.own}
    names |= {own: common for common, own in method.options.items()} | {"ns_coefficients": "ns"}
    hint = source.hints.get(names.get(option, ""), "")
    return f" ({hint})" if hint else ""
