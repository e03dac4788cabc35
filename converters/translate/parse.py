"""Parses a checkpoint into the model view: parameters and groups in the source's words, whatever is to be written.

Groups have their options where they are stored; each is read when it is first used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...names.errors import SourceError, UnknownOptimizerError
from ...names.keys import STATE, optimizers_of
from ...names.vocabulary import PARAMS
from ...programs.detection import looks_like_state
from ...programs.dialect import Dialect
from ...programs.model_view import Entry, ModelView, ParameterGroup, Role, model_view
from ...programs.signs import GROUP_MEMBERS
from ...record.record import Blob, Manifest, StateRecord
from ...store.open_checkpoint import Items, Values

NAMES = "param_names"
"""The option in which torch's groups list the names of parameters that have numbers."""

_SCALAR = bool | int | float | str | None


def parse(manifest: Manifest, values: Values, dialect: Dialect, groups: tuple[ParameterGroup, ...]) -> ModelView:
    """Return the view of a checkpoint, whose parameters have the names that keys say, or that are recorded of numbers.

    Raises:
        SourceError: state is not recognised, or two optimizers have state of one parameter.
    """
    # Numbers get the names that groups or the manifest record, so that rules and other programs know them.
    names: dict[str, str] = {}
    if dialect.numbered:
        groups, names = name_numbers(groups, values)
        for tensor, (number, *_) in dialect.state_in(manifest.tensors):
            # The number includes that of its optimizer; in manifests it may stand alone.
            if tensor.name not in (None, number, number.rpartition("#")[2]):
                names[number] = str(tensor.name)
        groups = tuple(_with_names(group, names) for group in groups)
    # The keys of state count, even against other records.
    keys_by_state: dict[tuple[str, str], str] = {}
    tensors: list[StateRecord] = []
    for tensor in manifest.tensors:
        reading = dialect.keys.read_state(tensor.path)
        if reading is None and tensor.slot is not None:
            raise _unread(tensor, dialect)
        if reading:
            name, slot = names.get(reading.name, reading.name), reading.leaf
            if slot not in dialect.slots_called("step") and (name, slot) in keys_by_state:
                raise SourceError(
                    f"{keys_by_state[name, slot]!r} and {tensor.key!r} are state of parameters of the same name in "
                    "different optimizers; make a copy of each with its model, by `select=` of muonckpt.convert"
                )
            keys_by_state[name, slot] = tensor.key
            tensor = replace(tensor, name=name, slot=slot)
        tensors.append(tensor)
    counts: dict[str, int] = {}
    for _, chain, _, count in _common_optimizers(manifest, dialect, values):
        if isinstance(count, int):
            counts |= dict.fromkeys(_names_by_chain(manifest, dialect).get(chain, ()), count)
    view = replace(model_view(replace(manifest, tensors=tuple(tensors)), dialect, groups, names), counts=counts)
    # Other state would keep its keys and its convention silently.
    if not view.parameters:
        examples = ", ".join(repr(entry.key) for entry in entries_of(manifest)[:3])
        raise SourceError(
            f"found neither weights nor state: {_key_forms(dialect)}, but the checkpoint has keys such as {examples}"
        )
    others: tuple[Entry, ...] = (*view.tensors_of(Role.OTHER), *other_items(manifest, dialect))
    optimizers = optimizers_of(entry.path for entry in entries_of(manifest))
    for entry in others:
        if looks_like_state(entry.path, optimizers) and not dialect.holds_groups(entry.path):
            raise _unread(entry, dialect)
    return view


def entries_of(manifest: Manifest) -> tuple[Entry, ...]:
    return (*manifest.tensors, *manifest.blobs)


def other_items(manifest: Manifest, dialect: Dialect) -> tuple[Blob, ...]:
    """Return the items that are neither state nor options."""
    keys = dialect.keys
    return tuple(b for b in manifest.blobs if not (keys.read_state(b.path) or keys.read_option(b.path)))


def _unread(entry: Entry, dialect: Dialect) -> UnknownOptimizerError:
    return UnknownOptimizerError(
        f"{entry.key!r} is state of an optimizer that was not understood: {_key_forms(dialect)}; name the program with "
        "`from_dialect=`, or make a copy without it, by `select=` of muonckpt.convert"
    )


def _key_forms(dialect: Dialect) -> str:
    return f"keys of {dialect.name} are like {dialect.keys.state_form} and {dialect.keys.model_form}"


# Groups.


def stored_groups(manifest: Manifest, dialect: Dialect, values: Values) -> tuple[ParameterGroup, ...]:
    """Return the parameter groups of a checkpoint, in their order.

    Raises:
        SourceError: a group does not list its parameters.
    """
    if dialect.common is not None:
        return tuple(_groups_in_common(manifest, dialect, values))
    # A group is a position in a list, or a single parameter by its name; several optimizers have lists of their own.
    listed_entries: defaultdict[tuple[str, int], dict[str, Entry]] = defaultdict(dict)
    named_entries: defaultdict[tuple[str, str], dict[str, Entry]] = defaultdict(dict)
    entries: tuple[Entry, ...] = (*manifest.blobs, *manifest.tensors)
    for entry in entries:
        if (reading := dialect.keys.read_option(entry.path)) is None:
            continue
        if reading.listed:
            listed_entries[reading.chain, int(reading.name)][reading.leaf] = entry
        else:
            named_entries[reading.chain, reading.name][reading.leaf] = entry
    groups: list[ParameterGroup] = []
    for (chain, position), options in sorted(listed_entries.items()):
        if PARAMS not in options:
            raise SourceError(f"group {position} does not list its parameters under {PARAMS!r}")
        names = tuple(dialect.keys.full_name(str(name), chain) for name in values.read(options[PARAMS]))
        groups.append(_group(names, options, values, (position,), chain))
    groups += _groups_by_name(named_entries, manifest, dialect, values)
    if not dialect.chained:
        return tuple(groups)
    # An optimizer does not update parameters whose state is in another one.
    chains_by_name: defaultdict[str, set[str]] = defaultdict(set)
    for _, reading in dialect.state_in(manifest.tensors):
        chains_by_name[reading.name].add(reading.chain)
    own_groups = []
    for group in groups:
        names = tuple(n for n in group.parameters if group.chain in chains_by_name.get(n, {group.chain}))
        own_groups += [replace(group, parameters=names)] if names or not group.parameters else []
    return tuple(own_groups)


def _groups_by_name(
    named_entries: Mapping[tuple[str, str], Mapping[str, Entry]], manifest: Manifest, dialect: Dialect, values: Values
) -> Iterator[ParameterGroup]:
    """Yield a group for each parameter that has options, which are by optimizer and name."""
    # Options may have a name of their own for parameters that are stored under others, or in parts.
    stored_names: list[str] = []
    for tensor in manifest.tensors if dialect.option_names else ():
        readings = dialect.keys.read_state(tensor.path), dialect.keys.read_weight(tensor.path)
        stored_names += (reading.name for reading in readings if reading)
    listed_names = dialect.listed_names(stored_names)
    members = {key: listed_names.get(key[1], (key[1],)) for key in named_entries}

    def stated(key: tuple[str, str]) -> dict[str, str]:
        return {option: repr(values.read(entry)) for option, entry in named_entries[key].items()}

    keys_by_member: dict[tuple[str, str], tuple[str, str]] = {}
    for key in sorted(named_entries, key=lambda key: -len(members[key])):
        for name in members[key]:
            first_key = keys_by_member.setdefault((key[0], name), key)
            if first_key != key and stated(first_key) != stated(key):
                raise SourceError(
                    f"options are listed of {first_key[1]!r} and of {key[1]!r}, which are one parameter, and differ: "
                    "make a copy without one of them, by `select=` of muonckpt.convert"
                )
    for key, options in named_entries.items():
        names = tuple(name for name in members[key] if keys_by_member[key[0], name] == key)
        if names:
            yield _group(names, options, values, (), key[0])


def _group(
    names: tuple[str, ...], entries: Mapping[str, Entry], values: Values, positions: tuple[int, ...], chain: str
) -> ParameterGroup:
    options = {option: entry for option, entry in entries.items() if option != PARAMS}
    return ParameterGroup(names, options=Items(options, values), positions=positions, entries=entries, chain=chain)


def name_numbers(groups: Iterable[ParameterGroup], values: Values) -> tuple[tuple[ParameterGroup, ...], dict[str, str]]:
    """Return groups whose parameters have names in place of numbers, and the names by number, where they record them.

    torch's groups list names once more as ``param_names`` if the optimizer was given them.
    """
    groups, names_by_number = tuple(groups), dict[str, str]()
    for group in groups:
        entry = group.entries.get(NAMES, group.entries.get(PARAMS))
        names = () if entry is None else values.read(entry)
        if isinstance(names, list | tuple) and len(names) == len(group.parameters):
            pairs = zip(group.parameters, names, strict=True)
            names_by_number |= {number: name for number, name in pairs if isinstance(name, str)}
    return tuple(_with_names(group, names_by_number) for group in groups), names_by_number


def _with_names(group: ParameterGroup, names: Mapping[str, str]) -> ParameterGroup:
    return replace(group, parameters=tuple(names.get(number, number) for number in group.parameters))


def _groups_in_common(manifest: Manifest, dialect: Dialect, values: Values) -> Iterator[ParameterGroup]:
    """Yield the groups in Megatron's common state, as far as their parameters are known.

    It does not name them: those of groups that an optimizer has all alike, or one of, are the optimizer's; those of
    others are in the provenance if a conversion wrote them.
    """
    names, number = _names_by_chain(manifest, dialect), 0
    for blob, chain, groups, _ in _common_optimizers(manifest, dialect, values):
        stated: list[dict[str, Any]] = [{} for _ in groups]
        for options, group in zip(stated, groups, strict=True):
            for option, value in group.items():
                parts = value if isinstance(value, list | tuple) else (value,)
                if option != PARAMS and all(isinstance(part, _SCALAR) for part in parts):
                    options[option] = value
        members: list[tuple[str, ...]] = []
        match manifest.provenance.get(GROUP_MEMBERS):
            case {**recorded} if isinstance(names_of := recorded.get(chain), list) and len(names_of) == len(groups):
                members = [tuple(map(str, group_names)) for group_names in names_of]
        if not members and all(group == stated[0] for group in stated):
            members, stated = [names[chain]] if chain in names else [], stated[:1]
        for group_names, options in zip(members, stated, strict=False):
            entries = {option: values.part(blob, f"{chain}{number}.{option}", v) for option, v in options.items()}
            yield _group(group_names, entries, values, (number,), "")
            number += 1


def _names_by_chain(manifest: Manifest, dialect: Dialect) -> dict[str, tuple[str, ...]]:
    """Return the names of parameters by the optimizer to which keys of state say that they belong."""
    names: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for _, reading in dialect.state_in(manifest.tensors):
        names[reading.chain][reading.name] = None
    return {chain: tuple(members) for chain, members in names.items()}


_CommonOptimizer = tuple[Blob, str, Sequence[dict[str, Any]], object]
"""The item that an optimizer is in, the prefix of its keys, its groups, and its number of updates if it counts them."""


def _common_optimizers(manifest: Manifest, dialect: Dialect, values: Values) -> Iterator[_CommonOptimizer]:
    for blob in manifest.blobs:
        if dialect.holds_groups(blob.path):
            state = values.parts(blob)
            for chain, groups, count in _optimizers("", state[0] if isinstance(state, list) and state else state):
                yield blob, chain, groups, count


def _optimizers(chain: str, node: Any) -> Iterator[tuple[str, Sequence[dict[str, Any]], object]]:
    """Yield the groups of each optimizer, with the prefix of its keys; :mod:`.group_writer` writes the same nesting."""
    match node:
        case {"param_groups": [*groups]} if all(isinstance(group, dict) for group in groups):
            state = node.get(STATE)
            yield chain, groups, state.get("common_step") if isinstance(state, dict) else None
        case {"optimizer": inner}:
            yield from _optimizers(chain, inner)
        case dict():
            for number, child in node.items():
                if isinstance(number, int):
                    yield from _optimizers(f"{chain}chained_{number}.", child)


def merge_equal(groups: Iterable[ParameterGroup]) -> list[ParameterGroup]:
    """Merge groups that were by name and have the same options, in the order of their first parameters."""
    merged: dict[str, ParameterGroup] = {}
    for number, group in enumerate(groups):
        key = str(number) if group.positions else repr(sorted(group.options.items()))
        parameters = (*merged[key].parameters, *group.parameters) if key in merged else group.parameters
        merged[key] = replace(group, parameters=parameters)
    return list(merged.values())
