"""What of a checkpoint goes where in a template: parameters by their names, parameter groups by their parameters.

`match` decides for one rank, `judge` for all of them together.  What is not in a `NamedOptimizer` goes by its key.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from types import MappingProxyType
from typing import Any

import torch

from ..record import Blob, StateRecord
from ..resumption import (
    GONE,
    NAMES_OF_GROUPS,
    NEW,
    SAID,
    Extra,
    Globs,
    LoadReport,
    as_tuples,
    differences_listed,
    said_otherwise,
)
from ..vocabulary import BEGIN_AS_ZEROS
from .load_template import LoadTemplate, Matching, OwnParameter, misfits
from .named_optimizer import NamedOptimizer, Stored
from .taken_options import OptionKeys, option_keys, options_by_group, options_by_name

_NONE: Mapping[Any, Any] = MappingProxyType({})


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


def judge(requests: Sequence[RankRequest], stored: Stored, extra: Extra) -> tuple[Matching, LoadReport]:
    """What all ranks together take, with all that does not fit.

    Args:
        extra: what the checkpoint may hold besides what the templates ask for.
    """
    given = list(dict.fromkeys(request.globs for request in requests))
    if len(given) > 1:
        fault = f"ranks were given different fresh={list(given[0].patterns)!r} and {list(given[1].patterns)!r}"
        return Matching(faults=(fault,)), LoadReport()
    globs, ranks = given[0], Matching.joined([request.matching for request in requests])
    unclaimed = sorted(stored.entries.keys() - set(ranks.sources.values()) - ranks.spared)
    optimizers = {optimizer.key: optimizer for request in requests for optimizer in request.optimizers}.values()
    dropped, settled, differences = set(), set(), {}
    for optimizer in optimizers:
        mine = {name for key, name in ranks.parameters if key == optimizer.key}
        for name, keys in optimizer.state_of_names(unclaimed, mine | stored.names(optimizer)).items():
            settled |= {*keys.values()}
            if name not in mine and globs.match(name):
                dropped.add(name)
            elif name not in mine and not all(map(extra.match, keys.values())):
                differences[name] = GONE
        settled |= {*_passed_over(optimizer, unclaimed, stored, ranks.loaded)}
    entries = [stored.entries[key] for key in unclaimed if key not in settled]
    weights = {
        entry.key: str(entry.path[-1])
        for entry in entries
        if isinstance(entry, StateRecord) and entry.slot is None and globs.match(str(entry.path[-1]))
    }
    extras = [entry for entry in entries if entry.key not in weights and not extra.match(entry.key)]
    faults = _extra_keys(extras, ranks.sources)
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
        ranks.own_options,
    )
    owned = tuple(prefix for optimizer in optimizers for prefix in (optimizer.state, optimizer.options))
    extra_state = tuple(entry.key for entry in extras if entry.key.startswith(owned))
    unfit = Matching(differences=differences, extra_state=extra_state, faults=tuple(faults))
    return Matching.joined([ranks, unfit]), report


def _extra_keys(entries: Sequence[StateRecord | Blob], template: Iterable[str]) -> list[str]:
    """What only the checkpoint has, together what is under a root of its own, and how to leave it."""
    used = {key.partition(".")[0] for key in template}
    roots: defaultdict[str, list[str]] = defaultdict(list)
    for entry in entries:
        root, dot, _ = entry.key.partition(".")
        roots[escape(entry.key) if root in used or not dot else f"{escape(root)}.*"].append(entry.key)
    faults = [f"extra key {keys[0]!r}" + f" and {len(keys) - 1} more" * (len(keys) > 1) for keys in roots.values()]
    if faults:
        faults[0] += f" (allow_extra={list(roots)[:12]!r} leaves what only the checkpoint has)"
    return faults


def misfit(matching: Matching, cure: str) -> str:
    """All that does not fit, in one sentence.

    Args:
        cure: where ``fresh`` is given, such as ``"muonckpt.load(..., {})"``.
    """
    problems = list(matching.faults[:12])
    if len(matching.faults) > 12:
        problems.append(f"and {len(matching.faults) - 12} more")
    if matching.differences:
        problems.append(differences_listed(matching.differences, matching.names, cure))
    return "; ".join(problems)


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
            faults += [f"{key!r} {fault}" for fault in misfits(template, key, stored.entries[key])]
        elif isinstance(template.values[key], torch.Tensor) and globs.match(str(template.paths[key][-1])):
            kept[key] = str(template.paths[key][-1])
        else:
            missing.append(f"missing key {key!r}")
    return Matching(sources, kept=kept, faults=(*missing, *faults))


def _state(optimizer: NamedOptimizer, template: LoadTemplate, stored: Stored, globs: Globs) -> Matching:
    """What an optimizer takes: state by the names of parameters, options by their groups."""
    options = option_keys(optimizer, template, stored)
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
    taken = options_by_name if optimizer.groups is None else options_by_group
    return Matching.joined(
        [
            Matching(
                sources,
                frozenset(),
                tuple(zeros),
                frozenset((optimizer.key, name) for name in loaded),
                frozenset((optimizer.key, name) for name in fresh),
                frozenset(discarded),
                {},
                frozenset((optimizer.key, name) for name in (*loaded, *fresh, *differences)),
                differences=differences,
                faults=tuple(faults),
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
    options: OptionKeys,
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
        for fault in misfits(template, key, stored.entries[there[slot]]):
            return f"with a {slot} that {fault}"
    return None
