"""What of a checkpoint goes where in a template: parameters by their names, parameter groups by their parameters.

`match` decides for one rank, `judge` for all of them together.  What is not in a `NamedOptimizer` goes by its key.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from glob import escape
from types import MappingProxyType
from typing import Any

import torch

from ..names.errors import ArgumentError
from ..names.keys import PARAM_GROUPS, NamedOptimizer, OptimizerKey, StateForm, key_of
from ..names.resumption import (
    GONE,
    NAMES_OF_GROUPS,
    UNGROUPED,
    Globs,
    LoadReport,
    ParameterMatcher,
    ParameterState,
    as_tuples,
    describe_wrappers,
    match_subtrees,
    meaning_options,
    scheduler_misfit,
)
from ..names.vocabulary import BY_RANK, FUSION, GIVEN_KEYS, HISTORY_OPTIONS, RUN_OPTIONS, KeyPath, begins_as_zeros
from ..names.wording import listed
from ..record.record import StateRecord
from .template import LoadTemplate, Matching, OwnParameter, Stored

_NONE: Mapping[Any, Any] = MappingProxyType({})


def selection(allow_extra: bool | Iterable[str], fresh: Iterable[str]) -> tuple[Globs, Globs]:
    """Return what a user has given as ``allow_extra=`` and ``fresh=``.

    Raises:
        ArgumentError: one of them is something else.
    """
    try:
        return Globs.of_extra(allow_extra), Globs.of(fresh)
    except TypeError as error:
        raise ArgumentError(str(error)) from error


# --- One rank ---------------------------------------------------------------------------------------------------------


def match(template: LoadTemplate, stored: Stored, globs: Globs) -> Matching:
    """Decide what a rank's template takes from a checkpoint."""
    if forms := tuple(_other_forms(template, stored)):
        return Matching(spared=frozenset(stored.entries), faults=forms)
    if moved := _moved(template, stored):
        return Matching(spared=frozenset(stored.entries), faults=(moved,))
    unnamed = tuple(
        f"the parameters of {key!r} have numbers, so fresh={list(globs.patterns)!r} cannot name them: save and load "
        "get_optimizer_state_dict(model, optimizer), which has names"
        for key in template.numbered
        if globs.patterns
    )
    of_optimizers = (_OptimizerMatch(optimizer, template, stored).taken(globs) for optimizer in template.optimizers)
    return Matching.joined([Matching(faults=unnamed), _by_key(template, stored, globs), *of_optimizers])


_GIVEN = {
    StateForm.NUMBERED: "the optimizer itself, or optimizer.state_dict(), whose parameters have numbers",
    StateForm.NESTED: "get_optimizer_state_dict(model, optimizer), whose parameters have names",
    StateForm.FLAT: (
        "get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)), "
        "whose parameters have names"
    ),
}
"""What users save and load, by its form."""

_LINES = {
    form: text.removeprefix("the optimizer itself, or ").partition(", whose")[0] for form, text in _GIVEN.items()
} | {StateForm.NUMBERED: "optimizer"}


def _other_forms(template: LoadTemplate, stored: Stored) -> Iterator[str]:
    """Yield a fault for each optimizer that the checkpoint has in another form than the template."""
    if template.is_ours and not stored.translated:
        return  # another program's, and to be translated first
    asked = {optimizer.key: optimizer.form for optimizer in template.optimizers}
    for key, form in {**asked, **dict.fromkeys(template.numbered, StateForm.NUMBERED)}.items():
        saved = stored.form(key)
        if saved not in (None, form):
            after = "which load then sets itself, without set_optimizer_state_dict"
            if saved is not StateForm.NUMBERED:
                after = f"and then set_optimizer_state_dict(model, optimizer, optim_state_dict=state_dict[{key!r}])"
            yield (
                f"{key!r} was saved from {_GIVEN[saved]}, and is to be loaded into {_GIVEN[form]}. To keep all of "
                f"its state, load it into what it was saved from. Write {key!r}: {_LINES[saved]} in the state "
                f"dict, {after}"
            )


def _moved(template: LoadTemplate, stored: Stored) -> str | None:
    """Return a fault if whole parts of the checkpoint stand at other keys than in the template."""
    mine = {path for key, path in template.paths.items() if key not in stored.entries}
    theirs = {entry.path for key, entry in stored.entries.items() if key not in template.values}
    if not (places := match_subtrees(mine, theirs)):
        return None
    told, written = [], {}
    for here, there in places:
        names = (repr(".".join(map(str, path))) if path else "its top" for path in (there, here))
        told.append("the checkpoint has at {} what the state dict has at {}".format(*names))
        written[there] = f"state_dict{''.join(f'[{part!r}]' for part in here)}"
    moved = {path for path in mine if any(path[: len(here)] == here for here, _ in places)}
    for root in dict.fromkeys(path[0] for path in template.paths.values() if path not in mine):
        written[root,] = f"state_dict[{root!r}]"
    if lacking := dict.fromkeys(repr(path[0]) for path in sorted(mine - moved, key=str)):
        told.append(f"it has no {', '.join(lacking)}")
    return f"{'; '.join(told)}. Write state_dict = {written.get(()) or _as_code(written)}"


def _as_code(values: Mapping[KeyPath, str]) -> str:
    """Return a nested state dict as code, from the code of values by their paths."""
    parts: defaultdict[Any, dict[KeyPath, str]] = defaultdict(dict)
    for (root, *rest), code in values.items():
        parts[root][tuple(rest)] = code
    return f"{{{', '.join(f'{root!r}: {part.get(()) or _as_code(part)}' for root, part in parts.items())}}}"


_GIVEN_OPTIONS = frozenset(GIVEN_KEYS.values())
"""Options of groups that a state dict has only where a rate was changed; either side may lack them."""


def _by_key(template: LoadTemplate, stored: Stored, globs: Globs) -> Matching:
    """Take by its key what is in no optimizer.  Weights that the checkpoint lacks may be kept."""
    elsewhere = tuple(prefix for optimizer in template.optimizers for prefix in (optimizer.state, optimizer.options))
    sources: dict[str, str] = {}
    kept, missing, faults, of_other_ranks = {}, [], [], []
    lacking, unasked = defaultdict(set), defaultdict(set)
    for key in sorted(template.values):
        *above, name = template.paths[key]
        if key.startswith(elsewhere):
            continue
        if key in stored.entries:
            if (origin := stored.origin(key)) is None:
                of_other_ranks.append(key)
                continue
            sources[key] = origin
            faults += [f"{key!r} {fault}" for fault in template.misfits(key, stored.entries[origin])]
        elif isinstance(template.values[key], torch.Tensor) and globs.match(str(name)):
            kept[key] = str(name)
        elif not (PARAM_GROUPS in above and name in _GIVEN_OPTIONS):
            missing.append(key)
    tied = template.tied_keys(sources) if missing else ()  # loaded under the name that the checkpoint has
    missing = [key for key in missing if key not in tied]
    for *above, name in map(template.paths.__getitem__, missing):
        lacking[tuple(above)].add(str(name))
    for key, entry in stored.entries.items() if missing else ():
        *above, name = entry.path
        if key not in template.values:
            unasked[tuple(above)].add(str(name))
    wrapped = filter(None, (describe_wrappers(names, unasked[above]) for above, names in lacking.items()))
    groups = {template.paths[key][:-1] for key in sources}
    added = {
        entry.path: key
        for key, entry in stored.entries.items()
        if entry.path[-1] in _GIVEN_OPTIONS and key not in template.values and entry.path[:-1] in groups
    }
    spared = {key for key, origin in sources.items() if key != origin} | {*of_other_ranks, *added.values()}
    faults += _of_other_ranks(of_other_ranks, template, stored)
    return Matching(
        sources,
        frozenset(spared.union(*(stored.by_rank[key].values() for key in of_other_ranks))),
        loaded=frozenset(_of_numbers(template, sources)),
        kept=kept,
        added={path: stored.option(key) for path, key in added.items()},
        faults=(*wrapped, *_missing_keys(missing, template, stored), *faults),
    )


def _of_other_ranks(keys: Sequence[str], template: LoadTemplate, stored: Stored) -> Iterator[str]:
    """Yield a fault about items of which a rank has no value of its own, with what leaves them out."""
    if not keys:
        return
    ranks = {rank for key in keys for rank in stored.by_rank[key]}
    saved = f"{len(ranks)} of {max(ranks)[1]}" if len(ranks) < max(ranks)[1] else str(len(ranks))
    left = {template.paths[key] for key in keys}
    beginnings = set[KeyPath]()
    for path in template.paths.values():
        beginnings |= {path[:end] for end in range(1, len(path)) if path not in left}
    ends = ((path, range(1, len(path) + 1)) for path in sorted(left, key=str))
    parts = dict.fromkeys(next(path[:end] for end in of_path if path[:end] not in beginnings) for path, of_path in ends)
    lines = "; ".join(f"del state_dict{''.join(f'[{part!r}]' for part in path)}" for path in parts)
    globs = [escape(key_of(path)) + ".*" * (path not in left) for path in parts]
    yield (
        f"{listed(map(repr, keys), 1)} differ from rank to rank: {saved} ranks saved a "
        f"value each, and {stored.place[1]} load, some without one. To go on without: {lines}, with "
        f"allow_extra={[*globs, f'{BY_RANK}.*']!r}; muonckpt.open(...).items has all values"
    )


def _of_numbers(template: LoadTemplate, keys: Iterable[str]) -> Iterator[OwnParameter]:
    """Yield the parameters of optimizers with numbers that have state at these keys, as ``"optimizer#0"``."""
    for key in keys if template.numbered else ():
        for reading in OptimizerKey.of_slot(template.paths[key]):
            if (optimizer := key_of(reading.place.root)) in template.numbered:
                yield optimizer, f"{optimizer}#{reading.name}"


def _missing_keys(keys: Sequence[str], template: LoadTemplate, stored: Stored) -> Iterator[str]:
    """Yield what only the state dict has; what holds no tensors, and the checkpoint has nothing of, as one."""
    known = {entry.path[0] for entry in stored.entries.values()}
    known |= {template.paths[key][0] for key, value in template.values.items() if isinstance(value, torch.Tensor)}
    roots: defaultdict[Any, list[str]] = defaultdict(list)
    for key in keys:
        root = template.paths[key][0]
        if root in known:
            yield f"missing key {key!r}"
        else:
            roots[root].append(key)
    for root, lost in roots.items():
        rest = f"the checkpoint has nothing of it; to load the rest: state_dict.pop({root!r})"
        yield f"missing key {listed(map(repr, lost), 1)} ({rest})"


_OF_SCHEDULERS = frozenset({"base_lrs", "_schedulers"})
"""Keys of schedulers' state dicts; ``base_lrs`` has a rate for each group, by the group's number."""

_OWN = NAMES_OF_GROUPS | {*FUSION, *GIVEN_KEYS.values()}
"""Options in which groups of a checkpoint may differ that are one group of the running optimizer."""

_UNASKED = RUN_OPTIONS | {*GIVEN_KEYS.values()}
"""Options of which nobody is told that a checkpoint lacks them: it must not, or it has them only where they differ."""

_WITHOUT_GROUPS = (
    " (write {0} = {{'state': {0}['state']}}, with allow_extra=[{1!r}], to load all state and keep the options of the "
    "code)"
)
"""The cure of parameters that are in no saved group."""

_Keys = Mapping[str, str]
"""Keys by slot, or by option."""


class _OptimizerMatch:
    """One optimizer, whose state goes by the names of parameters, and its options by their groups.

    Attributes:
        groups, saved_groups: keys of options by group and option, in the template and in the checkpoint (nested form).
        options, saved_options: keys of options by parameter and option, in the template and in the checkpoint.
        homes: the numbers of each parameter's groups in the checkpoint (nested form).
    """

    def __init__(self, optimizer: NamedOptimizer, template: LoadTemplate, stored: Stored) -> None:
        self.optimizer, self.template, self.stored = optimizer, template, stored
        self.homes: defaultdict[str, list[int]] = defaultdict(list)
        if optimizer.groups is None:
            self.options = optimizer.options_of_names(template.values)
            self.saved_options = optimizer.options_of_names(stored.entries)
            return
        self.groups = optimizer.options_of_groups(template.values)
        self.saved_groups = optimizer.options_of_groups(stored.entries)
        for number, names in enumerate(stored.groups(optimizer)):
            for name in names:
                self.homes[name].append(number)
        self.options = {name: self.groups[number] for number, names in enumerate(optimizer.groups) for name in names}
        self.saved_options = {name: self.saved_groups[numbers[0]] for name, numbers in self.homes.items()}

    def taken(self, globs: Globs) -> Matching:
        template, stored, groups = self.template, self.stored, self.optimizer.groups
        keys = self.optimizer.state_of_names(template.values, self.options)
        saved_keys = self.optimizer.state_of_names(stored.entries, {*self.options, *self.saved_options})
        live, saved, option_of = {}, {}, cache(stored.option)
        for name in dict.fromkeys((*self.options, *keys)):
            slots, saved_slots = keys.get(name, _NONE), saved_keys.get(name, _NONE)
            if saved_slots and not slots:  # as if only the checkpoint had it
                continue
            options = {option: template.values[key] for option, key in self.options.get(name, _NONE).items()}
            live[name], then = ParameterState(slots, options), self.saved_options.get(name, _NONE)
            compared = options.keys() & then.keys() & {*meaning_options(saved_slots)}
            meanings = {option: option_of(then[option]) for option in compared}
            saved[name] = ParameterState(saved_slots, meanings, None if groups is None else self.homes[name])
        matcher = ParameterMatcher(
            live,
            saved,
            groups or (),
            cache(self._group_options),
            slot_fault=lambda key, saved_key: next(template.misfits(key, stored.entries[saved_key]), None),
            is_zeroed=lambda state, slot: (
                begins_as_zeros(slot, state.options) and isinstance(template.values[state.slots[slot]], torch.Tensor)
            ),
            partial=template.partial,
        )
        report, differences, faults, origins = matcher.match(globs)
        loaded, fresh = (
            [key for name in names for key in live[name].slots.values()] for names in (report.loaded, report.fresh)
        )
        own = self.optimizer.key
        state = Matching(
            {key: key for key in loaded},
            zeros=tuple(fresh),
            loaded=frozenset((own, name) for name in report.loaded),
            fresh=frozenset((own, name) for name in report.fresh),
            discarded=frozenset(report.discarded),
            parameters=frozenset((own, name) for name in live),
            differences={name: self._with_cure(reason) for name, reason in differences.items()},
            faults=faults,
        )
        options_taken = self._options_by_name(report) if groups is None else self._options_by_group(report, origins)
        return Matching.joined([state, options_taken])

    def _with_cure(self, reason: str) -> str:
        if reason != UNGROUPED:
            return reason
        parts = ((part, part.isdecimal()) for part in self.optimizer.key.split("."))
        place = "".join(f"[{part if is_number else repr(part)}]" for part, is_number in parts)
        return f"{reason}{_WITHOUT_GROUPS.format(f'state_dict{place}', f'{self.optimizer.options}*')}"

    def _group_options(self, number: int) -> Mapping[str, Any]:
        """Return the options of a saved group in which others may not differ that become one group with it."""
        keys = self.saved_groups[number]
        return {option: self.stored.option(key) for option, key in keys.items() if option not in _OWN}

    def _options_by_group(self, report: LoadReport, origins: Sequence[int | None]) -> Matching:
        """Give each group the options of the saved group in which its parameters were."""
        joined = set[int]().union(*(self.homes[name] for name in report.loaded if name in self.options))
        spared = [key for number in joined - {*origins} for key in self.saved_groups[number].values()]
        taken = []
        for number, keys in self.groups.items():
            origin = origins[number]
            if origin is None:  # all of it starts fresh, with the options that it has
                continue
            options = {option: key for option, key in keys.items() if option not in NAMES_OF_GROUPS}
            taken.append(self._options(options, self.saved_groups[origin], str(origin), f"group {number}"))
        unfit = self._scheduler_misfit(origins)
        return Matching.joined([Matching(spared=frozenset(spared)), unfit, *taken])

    def _scheduler_misfit(self, origins: Sequence[int | None]) -> Matching:
        """Return why state of schedulers, which know groups by their numbers, would not be that of these groups.

        Args:
            origins: the saved group of each group, None where all of it starts fresh.
        """
        saved, template, stored = self.saved_groups, self.template, self.stored
        rates = {n: stored.option(keys["initial_lr"]) for n, keys in saved.items() if "initial_lr" in keys}
        mine = [self.groups.get(number, _NONE).get("initial_lr") for number in range(len(origins))]
        then = [rates.get(number) for number in range(max(saved, default=-1) + 1)]
        live = {number: names for number, names in enumerate(self.optimizer.groups or ()) if names}
        now = [
            rates.get(origin) if origin is not None else template.values[key] if key and number in live else None
            for number, (origin, key) in enumerate(zip(origins, mine, strict=True))
        ]
        # A scheduler that says for which rates it was made needs no guess; with several, it does not say whose it is.
        schedulers = [key for key, path in template.paths.items() if not _OF_SCHEDULERS.isdisjoint(path)]
        sources = {key: stored.origin(key) for key in schedulers if template.paths[key][-1] == "base_lrs"}
        options = {key: stored.option(source) for key, source in sources.items() if source in stored.entries}
        bases = {key: base for key, base in options.items() if isinstance(base, tuple)}
        if any(scheduler_misfit(base, now) is None for base in bases.values()):
            return Matching()
        unfit = scheduler_misfit(then, now)
        several, merged = len(template.optimizers) > 1, False
        if unfit:
            # Ranks that save together have groups each, of which this rank may have some, or several as one.
            homes = [sorted({self.homes[name][0] for name in names if self.homes[name]}) for names in live.values()]
            joint = sorted({number for numbers in homes for number in numbers})
            apart = scheduler_misfit([rates.get(number) for number in joint], [now[number] for number in live])
            merged = all(homes) and len(joint) > len(live) and homes == sorted(homes)
            bases = bases if not several else {}
            unfit = next((scheduler_misfit(base, now) for base in bases.values()), None) if apart is None else unfit
        if unfit:
            certain = bool(bases) or (not merged and (bool(schedulers) or any(mine)))
            return Matching(faults=(unfit,)) if certain else Matching(doubts=(unfit,))
        if several:
            return Matching()
        return Matching(
            doubts=tuple(
                f"{key!r} of the checkpoint has {list(base)}, and the groups initial_lr {now}: the scheduler gives "
                "groups other rates than they began with, as it does if their order has changed in the saved run"
                for key, base in bases.items()
                if None not in now
            )
        )

    def _options_by_name(self, report: LoadReport) -> Matching:
        """Give each parameter its own options; a fresh one gets those of its group, which has equal options now."""

        def group(name: str) -> str:
            options = self.options.get(name, _NONE).items()
            return str(sorted((option, as_tuples(self.template.values[key])) for option, key in options))

        alike: defaultdict[str, list[str]] = defaultdict(list)
        for name in report.loaded:
            alike[group(name)].append(name)
        origins = {name: name for name in report.loaded}
        origins |= {name: alike[of_name][0] for name in report.fresh if (of_name := group(name)) in alike}
        faults = tuple(filter(None, map(self._apart, alike.values())))
        taken = [
            self._options(self.options.get(name, _NONE), self.saved_options.get(origin, _NONE), origin, "parameters")
            for name, origin in origins.items()
        ]
        return Matching.joined([Matching(faults=faults), *taken])

    def _apart(self, names: Sequence[str]) -> str | None:
        """Return a fault if parameters with equal options now had different ones in the saved run."""
        theirs, option_of = self.saved_options, self.stored.option
        for option in theirs.get(names[0], {}).keys() - _OWN:
            keys = {name: theirs[name][option] for name in names if option in theirs.get(name, _NONE)}
            first = option_of(keys[names[0]])
            differing = {self.stored.mark(key): name for name, key in keys.items()}.values()
            for other in (name for name in differing if option_of(keys[name]) != first):
                return (
                    f"{names[0]!r} and {other!r} have the same options now, and {option}={first!r} and "
                    f"{option_of(keys[other])!r} in the checkpoint; a flattened state dict does not say whether they "
                    "are one group: load a nested one (flatten_optimizer_state_dict=False)"
                )
        return None

    def _options(self, mine: _Keys, theirs: _Keys, origin: str, who: str) -> Matching:
        """Take options; those that only one side has stay as they are, or are added.

        Args:
            mine, theirs: keys by option, the latter of a group or parameter ``origin`` of the checkpoint.
            who: has ``mine``, for people.
        """
        values, entries = self.template.values, self.stored.entries
        sources = {key: theirs[option] for option, key in mine.items() if option in theirs}
        lacking = sorted(mine.keys() - theirs.keys())
        faults = [
            f"missing key {f'{self.optimizer.options}{origin}.{option}'!r}"
            for option in lacking
            if not theirs or option in RUN_OPTIONS
        ]
        faults += [
            f"{key!r} {fault}" for key, own in sources.items() for fault in self.template.misfits(key, entries[own])
        ]
        own = [f"{option}={values[mine[option]]!r}" for option in lacking if option not in _UNASKED]
        only_there = [option for option in theirs if option in HISTORY_OPTIONS and option not in mine]
        added = {}
        for option in only_there if mine else ():
            *above, last = self.template.paths[next(iter(mine.values()))]
            flattened, dot, _ = str(last).rpartition(".")
            added[*above, f"{flattened}{dot}{option}"] = self.stored.option(theirs[option])
        return Matching(
            sources,
            frozenset(theirs[option] for option in only_there),
            own_options=(f"{who}: {', '.join(own)}",) if own and theirs else (),
            added=added,
            faults=tuple(faults),
        )


def dropped_by_torch(added: Mapping[KeyPath, object]) -> tuple[str, ...]:
    """Return the options among those ``added`` that torch's ``set_state_dict`` drops, as text.

    Of a flattened state dict it takes only the options that the running optimizer's groups have.
    """
    parts = [(str(path[-1]).rpartition("."), value) for path, value in added.items()]
    named = (f"{option}={value!r}" for (_, dot, option), value in parts if dot and option not in _UNASKED)
    return tuple(dict.fromkeys(named))


# --- All ranks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankRequest:
    """A rank's request to the coordinator."""

    matching: Matching
    optimizers: tuple[NamedOptimizer, ...]
    globs: Globs


def judge(requests: Sequence[RankRequest], stored: Stored, extra: Globs) -> tuple[Matching, LoadReport]:
    """Decide what all ranks together take, with all that does not fit.

    Args:
        extra: what the checkpoint may hold besides what the templates ask for.
    """
    given = list(dict.fromkeys(request.globs for request in requests))
    if len(given) > 1:
        fault = f"ranks were given different fresh={list(given[0].patterns)!r} and {list(given[1].patterns)!r}"
        return Matching(faults=(fault,)), LoadReport()
    globs, ranks = given[0], Matching.joined([request.matching for request in requests])
    claimed = set[str]().union(*(request.matching.sources.values() for request in requests))
    unclaimed = sorted(stored.entries.keys() - claimed - ranks.spared)
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
    extras = [entry.key for entry in entries if entry.key not in weights and not extra.match(entry.key)]
    faults = _extra_keys(extras, ranks.sources)
    faults += [
        f"fresh={pattern!r} matches no parameter with state, and no weight that only one side has"
        for pattern in globs.unmatched((*ranks.names, *dropped, *differences, *ranks.kept.values(), *weights.values()))
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
    extra_state = tuple(key for key in extras if key.startswith(owned))
    unfit = Matching(differences=differences, extra_state=extra_state, faults=tuple(faults))
    return Matching.joined([ranks, unfit]), report


def _extra_keys(keys: Sequence[str], template: Iterable[str]) -> list[str]:
    """Return what only the checkpoint has, by roots where these are its own, and how to leave it."""
    used = {key.partition(".")[0] for key in template}
    roots: defaultdict[str, list[str]] = defaultdict(list)
    for key in keys:
        root, dot, _ = key.partition(".")
        roots[escape(key) if root in used or not dot else f"{escape(root)}.*"].append(key)
    faults = [f"extra key {listed(map(repr, alike), 1)}" for alike in roots.values()]
    if faults:
        faults[0] += f" (to load them, give them in the state dict; allow_extra={list(roots)[:12]!r} loses them)"
    return faults


def _passed_over(
    optimizer: NamedOptimizer, keys: Sequence[str], stored: Stored, loaded: Collection[OwnParameter]
) -> Iterator[str]:
    """Yield options that nobody misses: names, and all of groups of which nothing is loaded."""
    if optimizer.groups is None:
        for name, of_name in optimizer.options_of_names(keys).items():
            yield from of_name.values() if (optimizer.key, name) not in loaded else ()
        return
    groups = stored.groups(optimizer)
    for number, options in optimizer.options_of_groups(keys).items():
        left = not any((optimizer.key, name) in loaded for name in groups[number])
        yield from (key for option, key in options.items() if left or option in NAMES_OF_GROUPS)
