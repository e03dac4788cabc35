"""What of a checkpoint goes where in a template: parameters by their names, parameter groups by their parameters.

`match` decides for one rank, `judge` for all of them together.  What is not in a `NamedOptimizer` goes by its key.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch

from ..record import Blob, StateRecord
from ..resumption import GONE, NAMES_OF_GROUPS, NEW, SAID, Globs, LoadReport, as_tuples, origin_groups, said_otherwise
from ..vocabulary import BEGIN_AS_ZEROS, Convention, KeyPath
from .bits import dtype_name
from .named_optimizer import NamedOptimizer, Stored

OwnParameter = tuple[str, str]
"""The key of an optimizer's state dict, and the name of one of its parameters."""

_NONE: Mapping[Any, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class LoadTemplate:
    """What a state dict asks for.

    Attributes:
        values: by flat key.
        paths: of the keys.
        numbered: keys of optimizers whose parameters have numbers; these go by key.
        conventions: of momentum, by key, where the state dict declares them.
        partial: whether the checkpoint may hold more than it asks for.
    """

    values: Mapping[str, Any]
    paths: Mapping[str, KeyPath]
    optimizers: tuple[NamedOptimizer, ...]
    numbered: tuple[str, ...]
    conventions: Mapping[str, Convention]
    partial: bool


@dataclass(frozen=True, slots=True)
class Matching:
    """What one rank's template, or a part of it, takes from a checkpoint.

    Attributes:
        sources: keys of the checkpoint, by keys of the template.
        zeros: keys of the template, of state that starts fresh.
        loaded, fresh, discarded: as in a `LoadReport`.
        kept: names of weights that keep their values, by key.
        parameters: all that optimizers have.
        differences: why the state of a parameter cannot be loaded, by name.
        faults: what else does not fit.
    """

    sources: Mapping[str, str] = field(default_factory=dict)
    zeros: tuple[str, ...] = ()
    loaded: frozenset[OwnParameter] = frozenset()
    fresh: frozenset[OwnParameter] = frozenset()
    discarded: frozenset[str] = frozenset()
    kept: Mapping[str, str] = field(default_factory=dict)
    parameters: frozenset[OwnParameter] = frozenset()
    differences: Mapping[str, str] = field(default_factory=dict)
    faults: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return not self.differences and not self.faults

    @property
    def names(self) -> set[str]:
        """Those of all parameters, also of those that only the checkpoint has, if that is known."""
        return {*self.differences, *(name for _, name in self.parameters)}

    @classmethod
    def joined(cls, parts: Sequence[Matching]) -> Matching:
        """What several parts of a template, or several ranks, take."""
        return cls(
            dict(chain.from_iterable(part.sources.items() for part in parts)),
            tuple(chain.from_iterable(part.zeros for part in parts)),
            frozenset().union(*(part.loaded for part in parts)),
            frozenset().union(*(part.fresh for part in parts)),
            frozenset().union(*(part.discarded for part in parts)),
            dict(chain.from_iterable(part.kept.items() for part in parts)),
            frozenset().union(*(part.parameters for part in parts)),
            dict(chain.from_iterable(part.differences.items() for part in parts)),
            tuple(dict.fromkeys(chain.from_iterable(part.faults for part in parts))),
        )


@dataclass(frozen=True, slots=True)
class RankRequest:
    """What a rank tells the coordinator: what it takes, which optimizers it has, and which globs were given."""

    matching: Matching
    optimizers: tuple[NamedOptimizer, ...]
    globs: Globs


def match(template: LoadTemplate, stored: Stored, globs: Globs) -> Matching:
    """What a rank's template takes from a checkpoint."""
    unnamed = tuple(
        f"the parameters of {key!r} have numbers, so fresh={list(globs.patterns)!r} cannot name them: save and load "
        "get_optimizer_state_dict(model, optimizer), which has names"
        for key in template.numbered
        if globs.patterns
    )
    of_optimizers = (_state(optimizer, template, stored, globs) for optimizer in template.optimizers)
    return Matching.joined([Matching(faults=unnamed), _keys(template, stored, globs), *of_optimizers])


def judge(requests: Sequence[RankRequest], stored: Stored, allow_extra: bool) -> tuple[Matching, LoadReport]:
    """What all ranks together take, with all that does not fit.

    Args:
        allow_extra: the checkpoint may hold more than the templates ask for.
    """
    given = list(dict.fromkeys(request.globs for request in requests))
    if len(given) > 1:
        fault = f"ranks were given different fresh={list(given[0].patterns)!r} and {list(given[1].patterns)!r}"
        return Matching(faults=(fault,)), LoadReport()
    globs, ranks = given[0], Matching.joined([request.matching for request in requests])
    unclaimed = sorted(stored.entries.keys() - set(ranks.sources.values()))
    optimizers = {optimizer.key: optimizer for request in requests for optimizer in request.optimizers}.values()
    dropped, settled, differences = set(), set(), {}
    for optimizer in optimizers:
        mine = {name for key, name in ranks.parameters if key == optimizer.key}
        for name, keys in optimizer.state_of_names(unclaimed, mine | stored.names(optimizer)).items():
            settled |= {*keys.values()}
            if name not in mine and globs.match(name):
                dropped.add(name)
            elif name not in mine and not allow_extra:
                differences[name] = GONE
        settled |= {*_passed_over(optimizer, unclaimed, stored, ranks.loaded)}
    entries = [stored.entries[key] for key in unclaimed if key not in settled]
    weights = {
        entry.key: str(entry.path[-1])
        for entry in entries
        if isinstance(entry, StateRecord) and entry.slot is None and globs.match(str(entry.path[-1]))
    }
    faults = [f"extra key {entry.key!r}" for entry in entries if entry.key not in weights and not allow_extra]
    faults += [
        f"fresh={pattern!r} matches no parameter with state, and no weight that only one side has"
        for pattern in globs.idle((*ranks.names, *dropped, *differences, *ranks.kept.values(), *weights.values()))
    ]
    report = LoadReport(
        tuple(sorted({name for _, name in ranks.loaded})),
        tuple(sorted({name for _, name in ranks.fresh})),
        tuple(sorted(ranks.discarded)),
        tuple(sorted({*dropped, *weights})),
        tuple(sorted(ranks.kept)),
    )
    return Matching.joined([ranks, Matching(differences=differences, faults=tuple(faults))]), report


def _passed_over(
    optimizer: NamedOptimizer, keys: Sequence[str], stored: Stored, loaded: Collection[OwnParameter]
) -> Iterator[str]:
    """Options that nothing takes, and that are not missed: names, and those of groups of which nothing is loaded."""
    if optimizer.groups is None:
        for name, of_name in optimizer.options_of_names(keys).items():
            yield from of_name.values() if (optimizer.key, name) not in loaded else ()
        return
    groups = stored.groups(optimizer)
    for number, options in optimizer.options_of_groups(keys).items():
        left = not any((optimizer.key, name) in loaded for name in groups[number])
        yield from (key for option, key in options.items() if left or option in NAMES_OF_GROUPS)


def _keys(template: LoadTemplate, stored: Stored, globs: Globs) -> Matching:
    """What is not in an optimizer goes by its key.  Weights that the checkpoint lacks may be kept."""
    elsewhere = tuple(prefix for optimizer in template.optimizers for prefix in (optimizer.state, optimizer.options))
    sources, kept, missing, faults = {}, {}, [], []
    for key in sorted(template.values):
        if key.startswith(elsewhere):
            continue
        if key in stored.entries:
            sources[key] = key
            faults += [f"{key!r} {fault}" for fault in _faults(template, key, stored.entries[key])]
        elif isinstance(template.values[key], torch.Tensor) and globs.match(str(template.paths[key][-1])):
            kept[key] = str(template.paths[key][-1])
        else:
            missing.append(f"missing key {key!r}")
    return Matching(sources, kept=kept, faults=(*missing, *faults))


def _faults(template: LoadTemplate, key: str, entry: StateRecord | Blob) -> Iterator[str]:
    """Why an entry cannot be loaded at a key, in words that follow the key."""
    value = template.values[key]
    if isinstance(value, torch.Tensor) != isinstance(entry, StateRecord):
        stored_as, expected = ("a", "no") if isinstance(entry, StateRecord) else ("no", "a")
        yield f"is {stored_as} tensor in the checkpoint, and {expected} tensor in the state dict"
    elif isinstance(entry, StateRecord):
        if entry.shape != tuple(value.shape):
            yield f"has shape {entry.shape}, expected {tuple(value.shape)}"
        if entry.dtype != dtype_name(value.dtype):
            yield f"is {entry.dtype}, expected {dtype_name(value.dtype)} (nothing is cast silently)"
        expected_convention = template.conventions.get(key)
        if entry.convention and expected_convention and entry.convention != expected_convention:
            yield f"follows momentum convention {entry.convention}, expected {expected_convention}"


@dataclass(frozen=True, slots=True)
class _Options:
    """The keys of an optimizer's options by parameter and option, in the template and in the checkpoint.

    Attributes:
        home: in the nested form, the number of the group that a parameter has in the checkpoint.
    """

    mine: Mapping[str, Mapping[str, str]]
    theirs: Mapping[str, Mapping[str, str]]
    home: Mapping[str, int]


def _options(optimizer: NamedOptimizer, template: LoadTemplate, stored: Stored) -> _Options:
    if optimizer.groups is None:
        by_name = optimizer.options_of_names
        return _Options(by_name(template.values), by_name(stored.entries), {})
    groups, saved = stored.groups(optimizer), optimizer.options_of_groups(stored.entries)
    mine = optimizer.options_of_groups(template.values)
    live = [(name, number) for number, names in enumerate(optimizer.groups) for name in names]
    # Where ranks have groups of different parameters, only one rank's names are stored; the numbers are the same.
    home = {name: number for name, number in live if number in saved}
    home |= {name: number for number, names in enumerate(groups) for name in names}
    return _Options(
        {name: mine[number] for name, number in live}, {name: saved[number] for name, number in home.items()}, home
    )


def _state(optimizer: NamedOptimizer, template: LoadTemplate, stored: Stored, globs: Globs) -> Matching:
    """What an optimizer takes: state by the names of parameters, options by their groups."""
    options = _options(optimizer, template, stored)
    mine = optimizer.state_of_names(template.values, options.mine)
    theirs = optimizer.state_of_names(stored.entries, {*options.mine, *options.theirs})
    sources: dict[str, str] = {}
    zeros: list[str] = []
    faults, differences, loaded, fresh, discarded = [], {}, [], [], []
    for name in dict.fromkeys((*options.mine, *mine)):
        if name not in mine and name in theirs:  # as if only the checkpoint had it
            continue
        keys, reason = mine.get(name, _NONE), _reason(name, template, stored, mine, theirs, options)
        if globs.match(name):
            fresh.append(name)
            zeros += keys.values()
            faults += [fault for slot, key in keys.items() for fault in _unknown(slot, template.values[key], key)]
            discarded += [name] if keys and not reason else []
        elif reason:
            differences[name] = reason
        else:
            loaded.append(name)
            sources |= {key: key for key in keys.values()}
    taken = _options_by_name if optimizer.groups is None else _options_by_group
    return Matching.joined(
        [
            Matching(
                sources,
                tuple(zeros),
                frozenset((optimizer.key, name) for name in loaded),
                frozenset((optimizer.key, name) for name in fresh),
                frozenset(discarded),
                {},
                frozenset((optimizer.key, name) for name in (*loaded, *fresh, *differences)),
                differences,
                tuple(faults),
            ),
            taken(optimizer, template, stored, options, loaded, fresh),
        ]
    )


def _unknown(slot: str, value: Any, key: str) -> Iterator[str]:
    if slot not in BEGIN_AS_ZEROS or not isinstance(value, torch.Tensor):
        known = ", ".join(sorted(BEGIN_AS_ZEROS))
        yield f"{key!r} cannot start fresh: it is not known how a {slot!r} begins, only that of tensors {known}: zeros"


def _reason(
    name: str,
    template: LoadTemplate,
    stored: Stored,
    mine: Mapping[str, Mapping[str, str]],
    theirs: Mapping[str, Mapping[str, str]],
    options: _Options,
) -> str | None:
    """Why the state of a parameter cannot be loaded, if it cannot.

    Args:
        mine, theirs: keys of state in the template and in the checkpoint, by parameter and slot.
    """
    here, there = mine.get(name, _NONE), theirs.get(name, _NONE)
    if not there:
        return NEW if here else None
    now, then = options.mine.get(name, _NONE), options.theirs.get(name, _NONE)
    for option in SAID:
        if option in now and option in then:
            values = stored.option(then[option]), as_tuples(template.values[now[option]])
            if values[0] != values[1]:
                return said_otherwise(option, *values)
    if here.keys() != there.keys() and not (template.partial and here.keys() <= there.keys()):
        return f"with {', '.join(sorted(there))} in the checkpoint, expected {', '.join(sorted(here)) or 'nothing'}"
    for slot, key in here.items():
        for fault in _faults(template, key, stored.entries[there[slot]]):
            return f"with a {slot} that {fault}"
    return None


def _options_by_group(
    optimizer: NamedOptimizer,
    template: LoadTemplate,
    stored: Stored,
    options: _Options,
    loaded: Sequence[str],
    fresh: Sequence[str],
) -> Matching:
    """Options of the nested form: those of the group in which a group's parameters were."""
    saved = optimizer.options_of_groups(stored.entries)
    home = {name: options.home[name] for name in loaded if name in options.home}

    def of_saved(number: int) -> dict[str, Any]:
        return {option: stored.option(key) for option, key in saved[number].items() if option not in NAMES_OF_GROUPS}

    numbers, differences = origin_groups(optimizer.groups or (), home, of_saved)
    sources: dict[str, str] = {}
    faults = []
    for number, keys in optimizer.options_of_groups(template.values).items():
        source = numbers[number]
        if source is None:  # all of it starts fresh, with the options that it has
            continue
        mine = {option: key for option, key in keys.items() if option not in NAMES_OF_GROUPS}
        taken, missing = _taken(template, stored, mine, saved[source], f"{optimizer.options}{source}")
        sources |= taken
        faults += missing
    return Matching(sources, differences=differences, faults=tuple(faults))


def _options_by_name(
    optimizer: NamedOptimizer,
    template: LoadTemplate,
    stored: Stored,
    options: _Options,
    loaded: Sequence[str],
    fresh: Sequence[str],
) -> Matching:
    """Options of the flattened form: a parameter's own; a fresh one takes those that its group's others take.

    Its group is those with equal options in the template.
    """
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for name in loaded:
        alike[_shown(template, options.mine.get(name, _NONE))].append(name)
    origins, faults = {name: name for name in loaded}, []
    for name in fresh:
        others = alike.get(_shown(template, options.mine.get(name, _NONE)), [])
        theirs = {
            str({option: stored.option(key) for option, key in sorted(options.theirs.get(other, _NONE).items())})
            for other in others
        }
        if len(theirs) > 1:
            faults.append(
                f"the group of {name!r} is not known, as {others[0]!r} and others with the same options now have "
                "different ones in the checkpoint: load a nested state dict (flatten_optimizer_state_dict=False)"
            )
        elif others:
            origins[name] = others[0]
    sources: dict[str, str] = {}
    for name, origin in origins.items():
        mine, theirs_of = options.mine.get(name, _NONE), options.theirs.get(origin, _NONE)
        taken, missing = _taken(template, stored, mine, theirs_of, f"{optimizer.options}{origin}")
        sources |= taken
        faults += missing
    return Matching(sources, faults=tuple(faults))


def _taken(
    template: LoadTemplate, stored: Stored, mine: Mapping[str, str], theirs: Mapping[str, str], where: str
) -> tuple[dict[str, str], list[str]]:
    """Where options come from, by key of the template, and what does not fit.

    Args:
        mine, theirs: keys by option.
        where: what the checkpoint's keys begin with.
    """
    sources = {key: theirs[option] for option, key in mine.items() if option in theirs}
    faults = [f"missing key {f'{where}.{option}'!r}" for option in mine if option not in theirs]
    faults += [f"{key!r} {why}" for key, own in sources.items() for why in _faults(template, key, stored.entries[own])]
    return sources, faults


def _shown(template: LoadTemplate, keys: Mapping[str, str]) -> str:
    """The options of a parameter, as text that is the same for all parameters of its group."""
    return str(sorted((option, as_tuples(template.values[key])) for option, key in keys.items()))
