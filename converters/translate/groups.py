"""Parameter groups: where the source stores their options, what the target shall have, and a template of a given run.

A group is a position in a list, with the names of its parameters, or a single parameter by its name.  Its options are
read from one program into common words, and written in those of another.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...algebra.box import Index
from ...names.coefficients import plain_coefficients
from ...names.errors import SourceError, TargetError
from ...names.vocabulary import HISTORY_OPTIONS, PARAMS
from ...programs.dialect import Dialect, StoredMethod
from ...record.record import Blob, Manifest, StateRecord
from ...store.open_checkpoint import Values
from ..engine.outputs import Action, Findings

Entry = StateRecord | Blob

_SCALAR = bool | int | float | str | None


def entries_of(manifest: Manifest) -> tuple[Entry, ...]:
    return (*manifest.tensors, *manifest.blobs)


@dataclass(frozen=True, slots=True)
class SourceGroup:
    """Parameters of the source that share options.

    Attributes:
        number: the position in the list of groups; None if groups are by name.
        items: where the options are stored, by the source's names; they are read when they are needed.
        chain: which of several optimizers it belongs to, as a field of keys.
        members: the parameters by the target's names, once these are known.
    """

    number: int | None
    params: tuple[str, ...]
    items: Mapping[str, Entry] = field(default_factory=dict)
    chain: Mapping[str, str] = field(default_factory=dict)
    members: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TargetGroup:
    """A group of the target: its parameters and options, and whether the source had it in a list (``listed``)."""

    params: tuple[str, ...]
    options: Mapping[str, object]
    listed: bool


def source_groups(manifest: Manifest, dialect: Dialect, values: Values) -> tuple[SourceGroup, ...]:
    """Return the parameter groups of a checkpoint, in their order.

    Raises:
        SourceError: a group does not list its parameters.
    """
    template = dialect.option
    if template is None:
        return tuple(_in_common(manifest, dialect, values))
    listed: defaultdict[tuple[str, int], dict[str, Entry]] = defaultdict(dict)
    named: defaultdict[tuple[str, str], dict[str, Entry]] = defaultdict(dict)
    entries: tuple[Entry, ...] = (*manifest.blobs, *manifest.tensors)
    for entry in entries:
        match fields := template.read(entry.path) or {}:
            case {"group": number, "option": option}:
                listed[fields.get("chain", ""), int(number)][option] = entry
            case {"name": name, "option": option}:
                named[fields.get("chain", ""), name][option] = entry
    groups = []
    for (chain, position), items in sorted(listed.items()):
        if PARAMS not in items:
            raise SourceError(f"group {position} does not list its parameters under {PARAMS!r}")
        names = tuple(dialect.state.full_name(str(name), chain) for name in values.read(items[PARAMS]))
        groups.append(SourceGroup(position, names, items, {"chain": chain} if template.chained else {}))
    for (chain, name), items in named.items():
        groups.append(SourceGroup(None, (name,), items, {"chain": chain} if template.chained else {}))
    return tuple(groups)


_NAMES = "param_names"


def with_recorded_names(
    groups: Iterable[SourceGroup], values: Values
) -> tuple[tuple[SourceGroup, ...], dict[str, str]]:
    """Return groups whose parameters have names in place of numbers, and the names by number, where they record them.

    torch's groups list names once more as ``param_names`` if the optimizer was given them.
    """
    known: dict[str, str] = {}
    for group in groups:
        listed = next((group.items[option] for option in (_NAMES, PARAMS) if option in group.items), None)
        names = () if listed is None else values.read(listed)
        if isinstance(names, list | tuple) and len(names) == len(group.params):
            known |= {number: name for number, name in zip(group.params, names, strict=True) if isinstance(name, str)}
    return tuple(replace(group, params=tuple(known.get(n, n) for n in group.params)) for group in groups), known


def _in_common(manifest: Manifest, dialect: Dialect, values: Values) -> Iterator[SourceGroup]:
    """Yield the groups in Megatron's common state that are alone in their optimizer; others name no parameters."""
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
    """Yield the groups of each optimizer, with the prefix of its keys; :mod:`.render` writes the same nesting."""
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
    return all(isinstance(part, _SCALAR) for part in (value if isinstance(value, list | tuple) else (value,)))


def merge_equal(groups: Iterable[TargetGroup]) -> list[TargetGroup]:
    """Merge groups that were by name and have the same options, in the order of their first parameters."""
    merged: dict[str, TargetGroup] = {}
    for number, group in enumerate(groups):
        key = str(number) if group.listed else repr(sorted(group.options.items()))
        params = (*merged[key].params, *group.params) if key in merged else group.params
        merged[key] = replace(group, params=params)
    return list(merged.values())


# Options.


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """The options of a group for parameters of one shape.

    ``known`` are those with common names; ``unknown`` are the others, as the source calls them, and ``misfits`` says
    what was expected of those among them whose values are of another kind than the source's program has.
    """

    known: Mapping[str, object]
    unknown: Mapping[str, object]
    misfits: Mapping[str, str] = field(default_factory=dict)


HOW = frozenset({"foreach", "fused", "capturable", "differentiable", "clip_grad", "param_names", "name"})
"""Options that say how a program computes, or what a group is called, but not what is computed."""

_ROUNDING = frozenset({"gram", "ns_dtype"})
"""Common options that only change how a result is rounded; of them "bfloat16" is what every program computes in."""

_REFUSED = {"maximize": "it goes up the gradient", "coupled": "decay that is added to the gradient"}
"""Common options without which an update is another one altogether, and what they mean."""

OFF: Mapping[str, object] = {"pieces": None, "columns": None, "interleaved": 1, "cautious": False, "maximize": False,
                              "amsgrad": False, "flatten": False, "gram": None, "ns_dtype": "bfloat16"}  # fmt: skip
"""Common options that need no word where they have this value."""


def read_options(
    group: SourceGroup, dialect: Dialect, method: StoredMethod, values: Values, shape: Index
) -> GroupOptions:
    """Return the options of a dialect's group as its program would read them for a parameter of this shape."""
    return common_options(option_values(group, values), dialect, method, shape)


def option_values(group: SourceGroup, values: Values) -> dict[str, Any]:
    """Return the options of a group as its program calls them."""
    return {option: values.read(item) for option, item in group.items.items() if option != PARAMS}


def common_options(own: Mapping[str, Any], dialect: Dialect, method: StoredMethod, shape: Index) -> GroupOptions:
    """Return a program's options of a group in common words, as it would read them for a parameter of this shape."""
    misfits = dialect.options.misfits(own)
    unread = {option: own[option] for option in misfits}
    own = {option: value for option, value in own.items() if option not in misfits}
    named = {*method.options.values(), *method.idle, *HOW, *HISTORY_OPTIONS, dialect.method_option}
    known: dict[str, Any] = dict(dialect.facts.get(method.name, {}))
    for coding in method.codings:
        known |= coding.read({option: own[option] for option in coding.options if option in own}, shape)
        named |= {*coding.options}
    known |= {name: own[option] for name, option in method.options.items() if option in own}
    if "ns" in known:
        with suppress(ValueError, TypeError):  # a value that is no set of coefficients stays as it is
            known["ns"] = plain_coefficients(known["ns"])
    return GroupOptions(
        known | {option: value for option, value in own.items() if option in HISTORY_OPTIONS},
        {option: value for option, value in own.items() if option not in named} | unread,
        misfits,
    )


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
    """
    known, lost = options.known, dict[str, object]()
    said = {own: known[name] for name, own in method.options.items() if name in known}
    named = {*method.options, *HISTORY_OPTIONS, "step"}
    for coding in method.codings:
        mine = {name: known[name] for name in coding.common if name in known}
        written = coding.write(mine, shape)
        named |= {*coding.common}
        if written is None:
            lost |= mine
        else:
            said |= written
    facts = target.facts.get(method.name, {})
    unnamed = [name for name in known if name not in named]
    lost |= {name: known[name] for name in unnamed if known[name] not in (facts.get(name), OFF.get(name))}
    said |= {option: value for option, value in known.items() if option in HISTORY_OPTIONS}
    groups = f"{method.name} groups"

    def report(action: Action, option: str, reason: str, *values: object) -> None:
        findings.check(action, f"{option} of {groups}", *map(repr, values), reason=reason)

    def unsaid(option: str) -> str:
        """Say that the source does not say an option, and in brackets where a user finds its value, if known."""
        names = {own: coding.common[0] for coding in method.codings for own in coding.options}
        names |= {own: common for common, own in method.options.items()} | {"ns_coefficients": "ns"}
        hint = source.hints.get(names.get(option, ""), "")
        return f"{source.name} does not say it{f' ({hint})' if hint else ''}"

    words = {own for m in target.methods for own in (*m.options.values(), *(o for c in m.codings for o in c.options))}

    def unread(option: str) -> str:
        """Say why an option of the source is not among those that were read."""
        if option in options.misfits:
            return f"expected {options.misfits[option]}, so what it means is unknown"
        if option in words:
            return f"nothing says that it means what {target.name}'s option of this name does"
        return f"no counterpart in {target.name}"

    for name, value in sorted(lost.items()):
        if name in _REFUSED:
            raise SourceError(
                f"{groups} have {name}={value!r}: {_REFUSED[name]}; {target.name} has no such thing, so training would "
                "go on altogether differently. Leave out the state of these parameters with --select"
            )
        if name == "scale" and method.derived:
            scale = f"the lr scale {value} of {groups}"
            findings.check(Action.CARRIED, scale, *method.derived, reason="by parameter")
        else:
            action = Action.LEFT if name in _ROUNDING else Action.SET
            report(action, name, f"{target.name} has no option for it", value)
    for name in sorted(facts.keys() - known.keys() - OFF.keys()):
        hint = source.hints.get(name, "unknown")
        report(Action.SET, name, f"always so in {target.name}; {source.name} does not say it: {hint}", facts[name])
    for option, value in sorted(options.unknown.items()):
        report(Action.LEFT, option, unread(option), value)
    said = {option: value for option, value in said.items() if option not in target.unsaid}
    taken = {option: value for option, value in given.items() if option not in {*said, target.method_option}}
    for option in sorted(taken.keys() - method.idle.keys() - HOW):
        report(Action.CARRIED, option, f"{source.name} does not say it; taken from the template", taken[option])
    said |= taken
    assumed = {option: value for option, value in method.assumed.items() if option not in {*said, *target.unsaid}}
    for option, value in assumed.items():
        report(Action.SET, option, f"{unsaid(option)}; written as in a new optimizer of {target.name}", value)
    said = {**said, **assumed, **{option: value for option, value in method.idle.items() if option not in said}}
    expected = {*method.options.values()}
    expected |= {own for coding in method.codings if not coding.optional for own in coding.options}
    for option in sorted(expected - {*said, *target.unsaid, method.options.get("step")}):
        report(Action.SET, option, f"{unsaid(option)}; the running optimizer's stays")
    return said | ({target.method_option: method.name} if target.method_option else {})


# A template.

_RATES = frozenset({"lr", "weight_decay", "momentum", "betas", "eps", "step", *HISTORY_OPTIONS})
"""Options that belong to a run, and that a template need not have as the source has them."""


@dataclass(frozen=True, slots=True)
class GroupTemplate:
    """The groups of a run, to which a conversion makes its result fit (``--like``).

    Its JSON is that of ``Muon.describe()``, or of torch's nested state dicts.

    Raises:
        TargetError: a group does not list its parameters, or a parameter is in two groups.
    """

    groups: tuple[Mapping[str, Any], ...]

    def __post_init__(self) -> None:
        names = [name for group in self.groups for name in group.get(PARAMS, ())]
        if not all(isinstance(group.get(PARAMS), tuple) for group in self.groups) or len(set(names)) < len(names):
            raise TargetError("a template's groups list the names of their parameters under 'params', each name once")

    @classmethod
    def read(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> GroupTemplate:
        """Read a template from a file of JSON, or from its data.

        Raises:
            TargetError: it cannot be read, or is no template.
        """
        try:
            data = source if isinstance(source, Mapping) else json.loads(Path(source).read_text(encoding="utf-8"))
            groups = [{option: _as_tuples(value) for option, value in group.items()} for group in data["param_groups"]]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise TargetError(
                f"cannot read the template {source!r} ({type(error).__name__}: {error}); expected JSON as "
                'Muon.describe() returns it: {"param_groups": [{"params": [names], "lr": 0.02, …}, …]}'
            ) from error
        return cls(tuple(groups))

    def options_of(self, name: str) -> Mapping[str, Any]:
        group = next((group for group in self.groups if name in group[PARAMS]), {})
        return {option: value for option, value in group.items() if option not in (PARAMS, "param_names")}

    def arranged(self, groups: Sequence[TargetGroup], target: Dialect, findings: Findings) -> list[TargetGroup]:
        """Return these groups' parameters in the groups of the template, in its order."""
        options = {name: group.options for group in groups for name in group.params}
        wanted = {name for group in self.groups for name in group[PARAMS]}
        if options.keys() != wanted:
            lacking, extra = sorted(wanted - options.keys()), sorted(options.keys() - wanted)
            raise SourceError(
                f"the template and the source have other parameters: only the template has {lacking[:5]}, only the "
                f"source has {extra[:5]}; --rules renames, splits and joins"
            )
        return [self._group(number, group, options, target, findings) for number, group in enumerate(self.groups)]

    def _group(
        self,
        number: int,
        mine: Mapping[str, Any],
        options: Mapping[str, Mapping[str, object]],
        target: Dialect,
        findings: Findings,
    ) -> TargetGroup:
        names = mine[PARAMS]
        first = options[names[0]] if names else {name: value for name, value in mine.items() if name != PARAMS}
        for name in names:
            for option in options[name].keys() | first.keys():
                values = first.get(option), options[name].get(option)
                if values[0] != values[1]:
                    raise SourceError(
                        f"group {number} of the template has {names[0]!r} and {name!r}, which in the source have "
                        f"{option}={values[0]!r} and {option}={values[1]!r}: give the run a group for each"
                    )
        for option in sorted(first.keys() & mine.keys() - _RATES):
            if first[option] != mine[option]:
                if option == target.method_option:
                    raise SourceError(
                        f"group {number} of the template is of {mine[option]!r}, and the source's state of "
                        f"{names[0]!r} is of {first[option]!r}: leave it out with --select and start it fresh"
                    )
                reason = f"the template has {mine[option]!r}; the source's was written"
                findings.check(Action.SET, f"{option} of group {number}", repr(first[option]), reason=reason)
        return TargetGroup(names, first, listed=True)


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value
