"""Which options an optimizer takes from a checkpoint: a parameter's own, or those of the group that it was in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..resumption import NAMES_OF_GROUPS, OF_THE_RUN, as_tuples, origin_groups
from ..vocabulary import SCHEDULED, KeyPath
from .load_template import LoadTemplate, Matching, misfits
from .named_optimizer import NamedOptimizer, Stored

_NONE: Mapping[Any, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class OptionKeys:
    """The keys of an optimizer's options by parameter and option, in the template and in the checkpoint.

    Attributes:
        home: in the nested form, the number of the group that a parameter has in the checkpoint.
    """

    mine: Mapping[str, Mapping[str, str]]
    theirs: Mapping[str, Mapping[str, str]]
    home: Mapping[str, int]


def option_keys(optimizer: NamedOptimizer, template: LoadTemplate, stored: Stored) -> OptionKeys:
    if optimizer.groups is None:
        by_name = optimizer.options_of_names
        return OptionKeys(by_name(template.values), by_name(stored.entries), {})
    groups, saved = stored.groups(optimizer), optimizer.options_of_groups(stored.entries)
    mine = optimizer.options_of_groups(template.values)
    live = [(name, number) for number, names in enumerate(optimizer.groups) for name in names]
    # Where ranks have groups of different parameters, only one rank's names are stored; the numbers are the same.
    home = {name: number for name, number in live if number in saved}
    home |= {name: number for number, names in enumerate(groups) for name in names}
    return OptionKeys(
        {name: mine[number] for name, number in live}, {name: saved[number] for name, number in home.items()}, home
    )


def options_by_group(
    optimizer: NamedOptimizer,
    template: LoadTemplate,
    stored: Stored,
    options: OptionKeys,
    loaded: Sequence[str],
    fresh: Sequence[str],
) -> Matching:
    """Options of the nested form: those of the group in which a group's parameters were."""
    saved = optimizer.options_of_groups(stored.entries)
    home = {name: options.home[name] for name in loaded if name in options.home}

    def of_saved(number: int) -> dict[str, Any]:
        return {option: stored.option(key) for option, key in saved[number].items() if option not in NAMES_OF_GROUPS}

    numbers, differences = origin_groups(optimizer.groups or (), home, of_saved)
    joined = [{home[name] for name in names if name in home} for names in optimizer.groups or ()]
    spared = [key for number in set().union(*joined) - {*numbers} for key in saved[number].values()]
    taken = []
    for number, keys in optimizer.options_of_groups(template.values).items():
        source = numbers[number]
        if source is None:  # all of it starts fresh, with the options that it has
            continue
        mine = {option: key for option, key in keys.items() if option not in NAMES_OF_GROUPS}
        taken.append(_taken(template, stored, mine, saved[source], f"{optimizer.options}{source}", f"group {number}"))
    return Matching.joined([Matching(spared=frozenset(spared), differences=differences), *taken])


def options_by_name(
    optimizer: NamedOptimizer,
    template: LoadTemplate,
    stored: Stored,
    options: OptionKeys,
    loaded: Sequence[str],
    fresh: Sequence[str],
) -> Matching:
    """Options of the flattened form: a parameter's own; a fresh one takes those that its group's others take.

    Its group is those with equal options in the template.
    """
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for name in loaded:
        alike[_shown(template, options.mine.get(name, _NONE))].append(name)
    apart = [_apart(names, stored, options) for names in alike.values()]
    faults = [fault for fault in apart if fault]
    origins = {name: name for name in loaded}
    for name in fresh:
        for other in alike.get(_shown(template, options.mine.get(name, _NONE)), [])[:1]:
            origins[name] = other
    taken = [
        _taken(
            template,
            stored,
            options.mine.get(name, _NONE),
            options.theirs.get(origin, _NONE),
            f"{optimizer.options}{origin}",
            "parameters",
        )
        for name, origin in origins.items()
    ]
    return Matching.joined([Matching(faults=tuple(faults)), *taken])


def _apart(names: Sequence[str], stored: Stored, options: OptionKeys) -> str | None:
    """Why parameters cannot be taken for one group, if they cannot: they had different options."""
    for option in options.theirs.get(names[0], _NONE):
        keys = {name: options.theirs[name][option] for name in names if option in options.theirs.get(name, _NONE)}
        first = stored.option(keys[names[0]])
        differing = {stored.mark(key): name for name, key in keys.items()}.values()
        for other in (name for name in differing if stored.option(keys[name]) != first):
            return (
                f"{names[0]!r} and {other!r} have the same options now, and {option}={first!r} and "
                f"{stored.option(keys[other])!r} in the checkpoint; a flattened state dict does not say whether they "
                "are one group: load a nested one (flatten_optimizer_state_dict=False)"
            )
    return None


def _taken(
    template: LoadTemplate, stored: Stored, mine: Mapping[str, str], theirs: Mapping[str, str], where: str, who: str
) -> Matching:
    """Where options come from, what stays as it is, what is added, and what does not fit.

    Args:
        mine, theirs: keys by option.
        where: what the checkpoint's keys begin with.
        who: has these options, for people.
    """
    sources = {key: theirs[option] for option, key in mine.items() if option in theirs}
    lacking = sorted(mine.keys() - theirs.keys())
    faults = [f"missing key {f'{where}.{option}'!r}" for option in lacking if not theirs or option in OF_THE_RUN]
    faults += [f"{key!r} {why}" for key, own in sources.items() for why in misfits(template, key, stored.entries[own])]
    own = [f"{option}={template.values[mine[option]]!r}" for option in lacking if option not in OF_THE_RUN]
    only_there = [option for option in theirs if option in SCHEDULED and option not in mine]
    return Matching(
        sources,
        frozenset(theirs[option] for option in only_there),
        own_options=(f"{who}: {', '.join(own)}",) if own and theirs else (),
        added={
            _beside(template.paths[key], option): stored.option(theirs[option])
            for option in only_there
            for key in list(mine.values())[:1]
        },
        faults=tuple(faults),
    )


def _beside(path: KeyPath, option: str) -> KeyPath:
    """The path of an option in the group, or flattened of the parameter, that has an option at ``path``."""
    *above, last = path
    flattened, dot, _ = str(last).rpartition(".")
    return (*above, f"{flattened}{dot}{option}")


def dropped_by_torch(added: Mapping[KeyPath, object]) -> tuple[str, ...]:
    """The options among those ``added`` that torch's ``set_state_dict`` drops, as text.

    Of a flattened state dict it takes only the options that the running optimizer's groups have.
    """
    parts = [(str(path[-1]).rpartition("."), value) for path, value in added.items()]
    return tuple(dict.fromkeys(f"{option}={value!r}" for (_, dot, option), value in parts if dot))


def _shown(template: LoadTemplate, keys: Mapping[str, str]) -> str:
    """The options of a parameter, as text that is the same for all parameters of its group."""
    return str(sorted((option, as_tuples(template.values[key])) for option, key in keys.items()))
