"""Parameter groups: reads their options from one dialect and writes them in another.

Options are small items (or 0-d tensors) of a checkpoint.  A group is either a position in a list, with the names of its
parameters, or a single parameter by its name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ...errors import SourceError
from ...record import Blob, Manifest, StateRecord
from ...store.stored_items import Values
from ...vocabulary import PARAMS
from ..engine.checklist import Findings
from .dialect import Dialect, StoredMethod

StoredEntry = Blob | StateRecord

_SCALAR = bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class SourceGroup:
    """Parameters of the source that share options.

    ``number`` is the position in the list of groups, None if groups are by name.  ``items`` holds where the options are
    stored, by the dialect's names; they are read only when they are needed.
    """

    number: int | None
    params: tuple[str, ...]
    items: Mapping[str, StoredEntry] = field(default_factory=dict)


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
    listed: defaultdict[int, dict[str, StoredEntry]] = defaultdict(dict)
    named: defaultdict[str, dict[str, StoredEntry]] = defaultdict(dict)
    entries: tuple[StoredEntry, ...] = (*manifest.blobs, *manifest.tensors)
    for entry in entries:
        match dialect.option.read(entry.path):
            case {"group": number, "option": option}:
                listed[int(number)][option] = entry
            case {"name": name, "option": option}:
                named[name][option] = entry
    groups = (SourceGroup(number, _params(number, items, values), items) for number, items in sorted(listed.items()))
    return (*groups, *(SourceGroup(None, (name,), items) for name, items in named.items()))


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
    """A group's options by common names: ``lr``, ``weight_decay``, ``momentum``, ``beta1``, ``scale``, …

    ``scale`` is the common name of an lr scale.  ``unknown`` are options without a common name, as the source calls
    them.
    """

    known: Mapping[str, object]
    unknown: tuple[str, ...]


def read_options(group: SourceGroup, dialect: Dialect, method: StoredMethod, values: Values) -> GroupOptions:
    """Read the options of a dialect's group; those without a common name are not read.

    Raises:
        SourceError: an option is damaged, or is not plain data.
    """
    known = {name: values.read(group.items[option]) for name, option in method.options.items() if option in group.items}
    match known.pop("betas", None):
        case [beta1, beta2]:
            known |= {"beta1": beta1, "beta2": beta2}
    if "scale" in known:
        names = [name for name, own_values in dialect.scales.items() if known["scale"] in own_values]
        known["scale"] = names[0] if names else f"{known['scale']!r} of {dialect.name}"
    named = {*method.options.values(), dialect.method_option, PARAMS}
    return GroupOptions(known, tuple(option for option in group.items if option not in named))


def write_options(options: GroupOptions, dialect: Dialect, method: StoredMethod, notes: Findings) -> dict[str, object]:
    """The options as a dialect names them, completed with those of a new optimizer of that program.

    ``notes`` receives a sentence for every difference from the source.
    """
    known = dict(options.known)
    if {"beta1", "beta2"} <= known.keys():
        known["betas"] = (known["beta1"], known["beta2"])
    withheld = set(dialect.unsaid)
    if "scale" in known and "scale" in method.options:
        values = dialect.scales.get(str(known["scale"]), ())
        if values:
            known["scale"] = values[0]
        else:
            option = method.options["scale"]
            withheld |= {option} - method.fresh.keys()
            change = "is left out" if option in withheld else f"becomes {method.fresh[option]!r}"
            scale = known.pop("scale")
            notes.add(f"{dialect.name} has no lr scale like {scale}: {option!r} {change}; choose a new lr")
    translated = {option: known[name] for name, option in method.options.items() if name in known}
    fresh = {name: value for name, value in method.fresh.items() if name not in translated and name not in withheld}
    absent = set(method.options.values()) - translated.keys() - fresh.keys() - withheld
    about = f"{method.name} groups"
    if fresh:
        values_text = ", ".join(f"{name}={value!r}" for name, value in fresh.items())
        notes.add(f"{about}: {values_text} as in a new optimizer of {dialect.name}")
    if absent:
        notes.add(f"{about}: {', '.join(sorted(absent))} of {dialect.name} are not in the source and are left out")
    if options.unknown:
        notes.add(f"{about}: {', '.join(sorted(options.unknown))} have no counterpart and are left out")
    method_name = {dialect.method_option: method.name} if dialect.method_option else {}
    return {**translated, **fresh, **method_name}


def merge_equal(groups: Iterable[TargetGroup]) -> list[TargetGroup]:
    """Merge groups that were by name and have the same options, in the order of their first parameters."""
    merged: dict[str, TargetGroup] = {}
    for number, group in enumerate(groups):
        key = str(number) if group.listed else repr(sorted(group.options.items()))
        params = (*merged[key].params, *group.params) if key in merged else group.params
        merged[key] = replace(group, params=params)
    return list(merged.values())
