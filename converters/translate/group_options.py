"""Parameter groups: reads their options from one dialect and writes them in another.

Options are small items (or 0-d tensors) of a checkpoint.  A group is either a position in a list, with the names of its
parameters, or a single parameter by its name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from ...box import Index
from ...coefficients import plain_coefficients
from ...errors import SourceError
from ...record import Blob, Manifest, StateRecord
from ...store.stored_items import Values
from ...vocabulary import PARAMS, SCHEDULED
from ..engine.checklist import Action, Findings
from .dialect import Dialect, StoredMethod

StoredEntry = Blob | StateRecord

_SCALAR = bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class SourceGroup:
    """Parameters of the source that share options.

    ``number`` is the position in the list of groups, None if groups are by name.  ``items`` holds where the options are
    stored, by the dialect's names; they are read only when they are needed.  ``chain`` says to which of several
    optimizers the group belongs, as a field of the keys if they have that field.
    """

    number: int | None
    params: tuple[str, ...]
    items: Mapping[str, StoredEntry] = field(default_factory=dict)
    chain: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TargetGroup:
    """A group of the target: its parameters and options, and whether the source had it in a list (``listed``)."""

    params: tuple[str, ...]
    options: Mapping[str, object]
    listed: bool


def source_groups(manifest: Manifest, dialect: Dialect, values: Values) -> tuple[SourceGroup, ...]:
    """The parameter groups of a checkpoint, in their order.

    Raises:
        SourceError: a group does not list its parameters.
    """
    if dialect.option is None:
        return tuple(_in_common(manifest, dialect, values))
    listed: defaultdict[tuple[str, int], dict[str, StoredEntry]] = defaultdict(dict)
    named: defaultdict[tuple[str, str], dict[str, StoredEntry]] = defaultdict(dict)
    entries: tuple[StoredEntry, ...] = (*manifest.blobs, *manifest.tensors)
    for entry in entries:
        fields = dialect.option.read(entry.path) or {}
        match fields:
            case {"group": number, "option": option}:
                listed[fields.get("chain", ""), int(number)][option] = entry
            case {"name": name, "option": option}:
                named[fields.get("chain", ""), name][option] = entry

    def chain_field(chain: str) -> dict[str, str]:
        return {"chain": chain} if dialect.option is not None and dialect.option.chained else {}

    groups = (
        SourceGroup(number, _params(number, items, values), items, chain_field(chain))
        for (chain, number), items in sorted(listed.items())
    )
    by_name = (SourceGroup(None, (name,), items, chain_field(chain)) for (chain, name), items in named.items())
    return (*groups, *by_name)


def _in_common(manifest: Manifest, dialect: Dialect, values: Values) -> Iterator[SourceGroup]:
    """The groups in Megatron's common state that are alone in their optimizer; of others the parameters are unknown."""
    names: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for tensor in manifest.tensors:
        fields = dialect.state.read(tensor.path)
        if fields:
            names[fields["chain"]][fields["name"]] = None
    for blob in manifest.blobs:
        if dialect.holds_groups(blob.path):
            whole = values.parts(blob)
            optimizers = _optimizers("", whole[0] if isinstance(whole, list) and whole else whole)
            for number, (chain, groups) in enumerate(optimizers):
                if len(groups) == 1 and chain in names:
                    plain = {option: value for option, value in groups[0].items() if _is_plain(value)}
                    items = {option: values.part(blob, f"{chain}{option}", value) for option, value in plain.items()}
                    yield SourceGroup(number, tuple(names[chain]), items)


def _optimizers(chain: str, node: object) -> Iterator[tuple[str, list[dict[str, object]]]]:
    """The groups of each optimizer, with the prefix of its keys of state; :mod:`.regroup` writes the same nesting."""
    match node:
        case {"param_groups": [*groups]} if all(isinstance(group, dict) for group in groups):
            yield chain, groups
        case {"optimizer": inner}:
            yield from _optimizers(chain, inner)
        case dict():
            for number, child in node.items():
                if isinstance(number, int):
                    yield from _optimizers(f"{chain}chained_{number}.", child)


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(part, _SCALAR) for part in value)
    return isinstance(value, _SCALAR)


def _params(number: int, items: Mapping[str, StoredEntry], values: Values) -> tuple[str, ...]:
    if PARAMS not in items:
        raise SourceError(f"group {number} does not list its parameters under {PARAMS!r}")
    return tuple(map(str, values.read(items[PARAMS])))


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """The options of a group for parameters of one shape.

    ``known`` are those with common names (:mod:`.codings`); ``unknown`` are the others, as the source calls them.
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
    """The options of a dialect's group as its program would read them for a parameter of this shape.

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
    """Coefficients as our optimizer writes them, or unchanged if they are none."""
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
    """The options as the target names them; ``findings`` hears of every difference, with the values.

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
        reason = f"{source.name} does not say it; written as in a new optimizer of {target.name}"
        findings.check(Action.SET, f"{option} of {about}", repr(value), reason=reason)
    idle = {option: value for option, value in method.idle.items() if option not in said}
    _unsaid(said.keys() | assumed.keys() | idle.keys(), source, target, method, findings)
    method_name = {target.method_option: method.name} if target.method_option else {}
    return {**said, **assumed, **idle, **method_name}


def _unsaid(said: Collection[str], source: Dialect, target: Dialect, method: StoredMethod, findings: Findings) -> None:
    """Report the options of the target that it does not get, because the source does not say them."""
    names = {own: common for common, own in method.options.items()}
    names |= {own: coding.common[0] for coding in method.codings if not coding.optional for own in coding.own}
    for option in sorted(names.keys() - {*said, *target.unsaid, method.options.get("step")}):
        common = names[option]
        hint = source.hints.get(common) or source.hints.get({"ns_coefficients": "ns"}.get(option, ""), "")
        reason = f"{source.name} does not say it{f' ({hint})' if hint else ''}; the running optimizer's stays"
        findings.check(Action.SET, f"{option} of {method.name} groups", reason=reason)


def merge_equal(groups: Iterable[TargetGroup]) -> list[TargetGroup]:
    """Merge groups that were by name and have the same options, in the order of their first parameters."""
    merged: dict[str, TargetGroup] = {}
    for number, group in enumerate(groups):
        key = str(number) if group.listed else repr(sorted(group.options.items()))
        params = (*merged[key].params, *group.params) if key in merged else group.params
        merged[key] = replace(group, params=params)
    return list(merged.values())
