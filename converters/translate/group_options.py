"""Parameter groups: their options read from one dialect and written in another.

Options are small items (or 0-d tensors) of a checkpoint; a group is either a position in a list, with the names of
its parameters, or one parameter by its name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ...errors import SourceError
from ...record import Blob, Manifest, StateRecord
from ...store.stored_items import Values
from ...vocabulary import PARAMS
from .dialect import Dialect, StoredMethod

StoredEntry = Blob | StateRecord

_SCALAR = bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class SourceGroup:
    """Parameters that share options, as the source has them.

    ``number`` is the position in the list of groups, None where groups are by name.  ``items`` are where the options
    are stored, by the dialect's words; they are read only when they are needed.
    """

    number: int | None
    params: tuple[str, ...]
    items: Mapping[str, StoredEntry] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TargetGroup:
    """A group as the target has it: the names of its parameters and its options.  ``listed`` as in the source."""

    params: tuple[str, ...]
    options: Mapping[str, object]
    listed: bool


def source_groups(manifest: Manifest, dialect: Dialect, values: Values) -> tuple[SourceGroup, ...]:
    """The groups of a checkpoint, in their order.

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
    """Groups in Megatron's common state, but for those that share an optimizer: it does not say what is in which."""
    names: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for tensor in manifest.tensors:
        found = dialect.state.read(tensor.path)
        if found:
            names[found["chain"]][found["name"]] = None
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
    """The groups of each optimizer, and the prefix of the keys of its state, as `.regroup` nests them."""
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
        return all(isinstance(each, _SCALAR) for each in value)
    return isinstance(value, _SCALAR)


def _params(number: int, items: Mapping[str, StoredEntry], values: Values) -> tuple[str, ...]:
    if PARAMS not in items:
        raise SourceError(f"group {number} does not list its parameters under {PARAMS!r}")
    return tuple(map(str, values.read(items[PARAMS])))


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """A group's options in our words: ``lr``, ``weight_decay``, ``momentum``, ``beta1``, ``scale``, …

    ``unknown`` are options without one, by the source's words; ``scale`` is an lr scale by its name here.
    """

    known: Mapping[str, object]
    unknown: tuple[str, ...]


def read_options(group: SourceGroup, dialect: Dialect, method: StoredMethod, values: Values) -> GroupOptions:
    """What a dialect's group says.  Options without a word of ours are not read.

    Raises:
        SourceError: an option is damaged, or no plain data.
    """
    known = {word: values.read(group.items[own]) for word, own in method.options.items() if own in group.items}
    match known.pop("betas", None):
        case [beta1, beta2]:
            known |= {"beta1": beta1, "beta2": beta2}
    if "scale" in known:
        meant = [word for word, same in dialect.scales.items() if known["scale"] in same]
        known["scale"] = meant[0] if meant else f"{known['scale']!r} of {dialect.name}"
    taken = {*method.options.values(), dialect.method_option, PARAMS}
    return GroupOptions(known, tuple(word for word in group.items if word not in taken))


def write_options(words: GroupOptions, dialect: Dialect, method: StoredMethod, notes: set[str]) -> dict[str, object]:
    """The same in a dialect's words, completed with what a new optimizer of that program has.

    ``notes`` gets a sentence for each thing that is not the source's.
    """
    known = dict(words.known)
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
            done = "is left out" if option in withheld else f"becomes {method.fresh[option]!r}"
            scale = known.pop("scale")
            notes.add(f"{dialect.name} has no lr scale like {scale}: {option!r} {done}; the lr must be chosen anew")
    said = {own: known[word] for word, own in method.options.items() if word in known}
    fresh = {own: value for own, value in method.fresh.items() if own not in said and own not in withheld}
    absent = {own for word, own in method.options.items() if own not in said and own not in fresh} - withheld
    about = f"{method.name} groups"
    if fresh:
        told = ", ".join(f"{own}={value!r}" for own, value in fresh.items())
        notes.add(f"{about}: {told} as a new optimizer of {dialect.name} has them")
    if absent:
        notes.add(f"{about}: {', '.join(sorted(absent))} of {dialect.name} are not in the source and are left out")
    if words.unknown:
        notes.add(f"{about}: {', '.join(sorted(words.unknown))} have no counterpart and are left behind")
    method_name = {dialect.method_option: method.name} if dialect.method_option else {}
    return {**said, **fresh, **method_name}


def merge_equal(groups: Iterable[TargetGroup]) -> list[TargetGroup]:
    """Groups that were by name, and have the same options, as one each, in the order of their first parameters."""
    out: dict[str, TargetGroup] = {}
    for at, group in enumerate(groups):
        key = str(at) if group.listed else repr(sorted(group.options.items()))
        params = (*out[key].params, *group.params) if key in out else group.params
        out[key] = replace(group, params=params)
    return list(out.values())
