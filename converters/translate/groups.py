"""Parameter groups: where the source stores their options, what the target shall have, and a template of a given run.

A group is a position in a list, with the names of its parameters, or a single parameter by its name.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...errors import SourceError, TargetError
from ...record import Blob, Manifest, StateRecord
from ...store.open_checkpoint import Values
from ...vocabulary import PARAMS, SCHEDULED
from ..engine.outputs import Action, Findings
from ..programs.dialect import Dialect

StoredEntry = Blob | StateRecord

_SCALAR = bool | int | float | str | None


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
    items: Mapping[str, StoredEntry] = field(default_factory=dict)
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
    if isinstance(value, list | tuple):
        return all(isinstance(part, _SCALAR) for part in value)
    return isinstance(value, _SCALAR)


def _params(number: int, items: Mapping[str, StoredEntry], values: Values) -> tuple[str, ...]:
    if PARAMS not in items:
        raise SourceError(f"group {number} does not list its parameters under {PARAMS!r}")
    return tuple(map(str, values.read(items[PARAMS])))


def merge_equal(groups: Iterable[TargetGroup]) -> list[TargetGroup]:
    """Merge groups that were by name and have the same options, in the order of their first parameters."""
    merged: dict[str, TargetGroup] = {}
    for number, group in enumerate(groups):
        key = str(number) if group.listed else repr(sorted(group.options.items()))
        params = (*merged[key].params, *group.params) if key in merged else group.params
        merged[key] = replace(group, params=params)
    return list(merged.values())


# A template.

_RATES = frozenset({"lr", "weight_decay", "momentum", "betas", "eps", "step", *SCHEDULED})
"""Options that belong to a run, and that a template need not have as the source has them."""

_NONE: Mapping[str, Any] = MappingProxyType({})


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
        """Return the options of a parameter, by name."""
        group = next((group for group in self.groups if name in group[PARAMS]), _NONE)
        return {option: value for option, value in group.items() if option not in (PARAMS, "param_names")}

    def arranged(self, groups: Sequence[TargetGroup], target: Dialect, findings: Findings) -> list[TargetGroup]:
        """Return these groups' parameters in the groups of the template, in its order.

        Raises:
            SourceError: one side has parameters that the other has not, or a group would need two values of an option.
        """
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
