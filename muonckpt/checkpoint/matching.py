"""The matching of a checkpoint with a template: parameters by their names, parameter groups by their parameters.

`match` decides for one rank, `judge` for all of them together.  What is not in a `NamedOptimizer` goes by its key.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from glob import escape
from itertools import chain
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
    # What is wrong as a whole is told alone: each key by itself would be missing or extra.
    if forms := tuple(_other_forms(template, stored)):
        return Matching(covered_keys=frozenset(stored.entries), faults=forms)
    if fault := _moved_subtrees(template, stored):
        return Matching(covered_keys=frozenset(stored.entries), faults=(fault,))
    # Optimizers go by the names of parameters, everything else by its key.
    unnamed = tuple(
        f"the parameters of {key!r} have numbers, so fresh={list(globs.patterns)!r} cannot name them: save and load "
        "get_optimizer_state_dict(model, optimizer), which has names"
        for key in template.numbered
        if globs.patterns
    )
    optimizer_matches = (_OptimizerMatch(optimizer, template, stored).match(globs) for optimizer in template.optimizers)
    return Matching.joined([Matching(faults=unnamed), _match_by_key(template, stored, globs), *optimizer_matches])


_FORM_PHRASES = {
    StateForm.NUMBERED: "the optimizer itself, or optimizer.state_dict(), whose parameters have numbers",
    StateForm.NESTED: "get_optimizer_state_dict(model, optimizer), whose parameters have names",
    StateForm.FLAT: (
        "get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)), "
        "whose parameters have names"
    ),
}
"""The calls whose values users save and load, by the form of these."""

_LINES = {
    form: text.removeprefix("the optimizer itself, or ").partition(", whose")[0] for form, text in _FORM_PHRASES.items()
} | {StateForm.NUMBERED: "optimizer"}


def _other_forms(template: LoadTemplate, stored: Stored) -> Iterator[str]:
    """Yield a fault for each optimizer that the checkpoint has in another form than the template."""
    if template.is_ours and not stored.translated:
        return  # another program's, and to be translated first
    named_forms = {optimizer.key: optimizer.form for optimizer in template.optimizers}
    for key, form in {**named_forms, **dict.fromkeys(template.numbered, StateForm.NUMBERED)}.items():
        saved_form = stored.form(key)
        if saved_form not in (None, form):
            next_line = "which load then sets itself, without set_optimizer_state_dict"
            if saved_form is not StateForm.NUMBERED:
                next_line = f"and then set_optimizer_state_dict(model, optimizer, optim_state_dict=state_dict[{key!r}])"
            yield (
                f"{key!r} was saved from {_FORM_PHRASES[saved_form]}, and is to be loaded into {_FORM_PHRASES[form]}. "
                f"To keep all of its state, load it into what it was saved from. Write {key!r}: {_LINES[saved_form]} "
                f"in the state dict, {next_line}"
            )


def _moved_subtrees(template: LoadTemplate, stored: Stored) -> str | None:
    """Return a fault if whole parts of the checkpoint stand at other keys than in the template."""
    template_paths = {path for key, path in template.paths.items() if key not in stored.entries}
    stored_paths = {entry.path for key, entry in stored.entries.items() if key not in template.values}
    if not (subtrees := match_subtrees(template_paths, stored_paths)):
        return None
    sentences, code_by_path = [], {}
    for template_place, stored_place in subtrees:
        labels = (repr(".".join(map(str, path))) if path else "its top" for path in (stored_place, template_place))
        sentences.append("the checkpoint has at {} what the state dict has at {}".format(*labels))
        code_by_path[stored_place] = f"state_dict{''.join(f'[{part!r}]' for part in template_place)}"
    moved_paths = set[KeyPath]()
    for place, _ in subtrees:
        moved_paths |= {path for path in template_paths if path[: len(place)] == place}
    for root in dict.fromkeys(path[0] for path in template.paths.values() if path not in template_paths):
        code_by_path[root,] = f"state_dict[{root!r}]"
    if missing_roots := dict.fromkeys(repr(path[0]) for path in sorted(template_paths - moved_paths, key=str)):
        sentences.append(f"it has no {', '.join(missing_roots)}")
    return f"{'; '.join(sentences)}. Write state_dict = {code_by_path.get(()) or _as_code(code_by_path)}"


def _as_code(values: Mapping[KeyPath, str]) -> str:
    """Return a nested state dict as code, from the code of values by their paths."""
    parts: defaultdict[Any, dict[KeyPath, str]] = defaultdict(dict)
    for (root, *path), code in values.items():
        parts[root][tuple(path)] = code
    return f"{{{', '.join(f'{root!r}: {part.get(()) or _as_code(part)}' for root, part in parts.items())}}}"


_CODE_OPTIONS = frozenset(GIVEN_KEYS.values())
"""Options of groups that a state dict has only where a rate was changed; either side may lack them."""


def _match_by_key(template: LoadTemplate, stored: Stored, globs: Globs) -> Matching:
    """Match by their keys the values that are in no optimizer with names.

    Weights that the checkpoint lacks keep their values if ``fresh=`` names them.
    """
    optimizer_prefixes = tuple(
        chain.from_iterable((optimizer.state, optimizer.options) for optimizer in template.optimizers)
    )
    sources: dict[str, str] = {}
    kept_weights, missing_keys, faults, keys_of_other_ranks = {}, [], [], []
    missing_names, extra_names = defaultdict(set), defaultdict(set)
    # 1. Keys that both sides have, weights that may stay as they are, and keys that only the template has.  Where ranks
    # saved values of their own under a key, this rank's is its origin; it is a fault if only other ranks have one.
    for key in sorted(template.values):
        *parents, name = template.paths[key]
        if key.startswith(optimizer_prefixes):
            continue
        if key in stored.entries:
            if (origin := stored.origin(key)) is None:
                keys_of_other_ranks.append(key)
                continue
            sources[key] = origin
            faults += [f"{key!r} {fault}" for fault in template.misfits(key, stored.entries[origin])]
        elif isinstance(template.values[key], torch.Tensor) and globs.match(str(name)):
            kept_weights[key] = str(name)
        elif not (PARAM_GROUPS in parents and name in _CODE_OPTIONS):
            missing_keys.append(key)
    # 2. Names that only one side has, by their place: a wrapper of the model changes all of them in the same way, which
    # is told with its cure beside the missing keys.
    tied_keys = template.tied_keys(sources) if missing_keys else ()  # loaded under the name that the checkpoint has
    missing_keys = [key for key in missing_keys if key not in tied_keys]
    for *parents, name in map(template.paths.__getitem__, missing_keys):
        missing_names[tuple(parents)].add(str(name))
    for key, entry in stored.entries.items() if missing_keys else ():
        *parents, name = entry.path
        if key not in template.values:
            extra_names[tuple(parents)].add(str(name))
    wrapper_faults = [describe_wrappers(names, extra_names[parents]) for parents, names in missing_names.items()]
    # 3. Options that only the checkpoint has come into the groups whose other options are loaded.
    groups = {template.paths[key][:-1] for key in sources}
    added_options = {
        entry.path: key
        for key, entry in stored.entries.items()
        if entry.path[-1] in _CODE_OPTIONS and key not in template.values and entry.path[:-1] in groups
    }
    # 4. Keys that no value of the template is read from, and that are not extra in the checkpoint all the same.
    covered_keys = {key for key, origin in sources.items() if key != origin}
    covered_keys |= {*keys_of_other_ranks, *added_options.values()}
    faults += _of_other_ranks(keys_of_other_ranks, template, stored)
    return Matching(
        sources,
        frozenset(covered_keys.union(*(stored.by_rank[key].values() for key in keys_of_other_ranks))),
        loaded=frozenset(_of_numbers(template, sources)),
        kept=kept_weights,
        added={path: stored.option(key) for path, key in added_options.items()},
        faults=(*filter(None, wrapper_faults), *_missing_keys(missing_keys, template, stored), *faults),
    )


def _of_other_ranks(keys: Sequence[str], template: LoadTemplate, stored: Stored) -> Iterator[str]:
    """Yield a fault about items of which a rank has no value of its own, with what leaves them out."""
    if not keys:
        return
    ranks = set(chain.from_iterable(stored.by_rank[key] for key in keys))
    saved_ranks = f"{len(ranks)} of {max(ranks)[1]}" if len(ranks) < max(ranks)[1] else str(len(ranks))
    absent_paths = {template.paths[key] for key in keys}
    kept_prefixes = set[KeyPath]()
    for path in template.paths.values():
        kept_prefixes |= {path[:end] for end in range(1, len(path)) if path not in absent_paths}
    # The largest parts of the state dict that hold nothing else are left out.
    parts: dict[KeyPath, None] = {}
    for path in sorted(absent_paths, key=str):
        prefixes = (path[:end] for end in range(1, len(path) + 1))
        parts[next(prefix for prefix in prefixes if prefix not in kept_prefixes)] = None
    lines = "; ".join(f"del state_dict{''.join(f'[{part!r}]' for part in path)}" for path in parts)
    globs = [escape(key_of(path)) + ".*" * (path not in absent_paths) for path in parts]
    yield (
        f"{listed(map(repr, keys), 1)} differ from rank to rank: {saved_ranks} ranks saved a "
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
    shared_roots = {entry.path[0] for entry in stored.entries.values()}
    tensors = (key for key, value in template.values.items() if isinstance(value, torch.Tensor))
    shared_roots |= {template.paths[key][0] for key in tensors}
    # Where neither side has tensors in common a part is no model or optimizer: it can be left out as one.
    roots: defaultdict[Any, list[str]] = defaultdict(list)
    for key in keys:
        root = template.paths[key][0]
        if root in shared_roots:
            yield f"missing key {key!r}"
        else:
            roots[root].append(key)
    for root, missing in roots.items():
        advice = f"the checkpoint has nothing of it; to load the rest: state_dict.pop({root!r})"
        yield f"missing key {listed(map(repr, missing), 1)} ({advice})"


_OF_SCHEDULERS = frozenset({"base_lrs", "_schedulers"})
"""Keys of schedulers' state dicts; ``base_lrs`` has a rate for each group, by the group's number."""

_MERGEABLE_OPTIONS = NAMES_OF_GROUPS | {*FUSION, *GIVEN_KEYS.values()}
"""Options in which groups of a checkpoint may differ that are one group of the running optimizer."""

_OPTIONAL_OPTIONS = RUN_OPTIONS | {*GIVEN_KEYS.values()}
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
        options: dict[str, dict[str, str]] = {}
        for number, names in enumerate(optimizer.groups):
            options.update((name, self.groups[number]) for name in names)
        self.options = options
        self.saved_options = {name: self.saved_groups[numbers[0]] for name, numbers in self.homes.items()}

    def match(self, globs: Globs) -> Matching:
        """Decide what the optimizer takes: the state of each parameter by its name, then options by groups."""
        template, stored, groups = self.template, self.stored, self.optimizer.groups
        keys = self.optimizer.state_of_names(template.values, self.options)
        saved_keys = self.optimizer.state_of_names(stored.entries, {*self.options, *self.saved_options})
        live_states, saved_states, option_of = {}, {}, cache(stored.option)
        # State of both sides, with the options on which its meaning depends.
        for name in dict.fromkeys((*self.options, *keys)):
            slots, saved_slots = keys.get(name, _NONE), saved_keys.get(name, _NONE)
            if saved_slots and not slots:  # as if only the checkpoint had it
                continue
            options = {option: template.values[key] for option, key in self.options.get(name, _NONE).items()}
            live_states[name], saved_options = ParameterState(slots, options), self.saved_options.get(name, _NONE)
            common_options = options.keys() & saved_options.keys() & {*meaning_options(saved_slots)}
            meanings = {option: option_of(saved_options[option]) for option in common_options}
            saved_states[name] = ParameterState(saved_slots, meanings, None if groups is None else self.homes[name])
        # What fits is loaded, the others begin anew or are refused.
        matcher = ParameterMatcher(
            live_states,
            saved_states,
            groups or (),
            cache(self._group_options),
            slot_fault=lambda key, saved_key: next(template.misfits(key, stored.entries[saved_key]), None),
            is_zeroed=lambda state, slot: (
                begins_as_zeros(slot, state.options) and isinstance(template.values[state.slots[slot]], torch.Tensor)
            ),
            partial=template.partial,
        )
        report, differences, faults, origins = matcher.match(globs)
        loaded_keys = [*chain.from_iterable(live_states[name].slots.values() for name in report.loaded)]
        fresh_keys = [*chain.from_iterable(live_states[name].slots.values() for name in report.fresh)]
        optimizer_key = self.optimizer.key
        state = Matching(
            {key: key for key in loaded_keys},
            zeros=tuple(fresh_keys),
            loaded=frozenset((optimizer_key, name) for name in report.loaded),
            fresh=frozenset((optimizer_key, name) for name in report.fresh),
            discarded=frozenset(report.discarded),
            parameters=frozenset((optimizer_key, name) for name in live_states),
            differences={name: self._with_cure(reason) for name, reason in differences.items()},
            faults=faults,
        )
        option_matching = self._options_by_name(report) if groups is None else self._options_by_group(report, origins)
        return Matching.joined([state, option_matching])

    def _with_cure(self, reason: str) -> str:
        if reason != UNGROUPED:
            return reason
        parts = ((part, part.isdecimal()) for part in self.optimizer.key.split("."))
        place = "".join(f"[{part if is_number else repr(part)}]" for part, is_number in parts)
        return f"{reason}{_WITHOUT_GROUPS.format(f'state_dict{place}', f'{self.optimizer.options}*')}"

    def _group_options(self, number: int) -> Mapping[str, Any]:
        """Return the options of a saved group in which others may not differ that become one group with it."""
        keys = self.saved_groups[number]
        return {option: self.stored.option(key) for option, key in keys.items() if option not in _MERGEABLE_OPTIONS}

    def _options_by_group(self, report: LoadReport, origins: Sequence[int | None]) -> Matching:
        """Give each group the options of the saved group in which its parameters were."""
        saved_numbers = set[int]().union(*(self.homes[name] for name in report.loaded if name in self.options))
        # Groups of which parameters were loaded and that became one with others have options that are not taken.
        superfluous_numbers = saved_numbers - {*origins}
        covered_keys = [*chain.from_iterable(self.saved_groups[number].values() for number in superfluous_numbers)]
        matchings = []
        for number, keys in self.groups.items():
            origin = origins[number]
            if origin is None:  # all of it starts fresh, with the options that it has
                continue
            options = {option: key for option, key in keys.items() if option not in NAMES_OF_GROUPS}
            matchings.append(self._options(options, self.saved_groups[origin], str(origin), f"group {number}"))
        scheduler_matching = self._scheduler_misfit(origins)
        return Matching.joined([Matching(covered_keys=frozenset(covered_keys)), scheduler_matching, *matchings])

    def _scheduler_misfit(self, origins: Sequence[int | None]) -> Matching:
        """Return why state of schedulers, which know groups by their numbers, would not be that of these groups.

        Args:
            origins: the saved group of each group, None where all of it starts fresh.
        """
        saved_groups, template, stored = self.saved_groups, self.template, self.stored
        rates = {n: stored.option(keys["initial_lr"]) for n, keys in saved_groups.items() if "initial_lr" in keys}
        rate_keys = [self.groups.get(number, _NONE).get("initial_lr") for number in range(len(origins))]
        saved_rates = [rates.get(number) for number in range(max(saved_groups, default=-1) + 1)]
        names_by_group = {number: names for number, names in enumerate(self.optimizer.groups or ()) if names}
        live_rates: list[Any] = []
        for number, (origin, key) in enumerate(zip(origins, rate_keys, strict=True)):
            own_rate = template.values[key] if key and number in names_by_group else None
            live_rates.append(own_rate if origin is None else rates.get(origin))
        # A scheduler that says for which rates it was made needs no guess; with several, it does not say whose it is.
        schedulers = [key for key, path in template.paths.items() if not _OF_SCHEDULERS.isdisjoint(path)]
        sources = {key: stored.origin(key) for key in schedulers if template.paths[key][-1] == "base_lrs"}
        options = {key: stored.option(source) for key, source in sources.items() if source in stored.entries}
        bases = {key: base for key, base in options.items() if isinstance(base, tuple)}
        if any(scheduler_misfit(base, live_rates) is None for base in bases.values()):
            return Matching()
        misfit = scheduler_misfit(saved_rates, live_rates)
        has_several, is_merged = len(template.optimizers) > 1, False
        if misfit:
            # Ranks that save together have groups each, of which this rank may have some, or several as one.
            homes = ({self.homes[name][0] for name in names if self.homes[name]} for names in names_by_group.values())
            saved_homes = [*map(sorted, homes)]
            joint_numbers = sorted({*chain.from_iterable(saved_homes)})
            in_order = saved_homes == sorted(saved_homes)
            is_merged = all(saved_homes) and len(joint_numbers) > len(names_by_group) and in_order
            bases = bases if not has_several else {}
            joint_rates, group_rates = map(rates.get, joint_numbers), (live_rates[number] for number in names_by_group)
            if scheduler_misfit([*joint_rates], [*group_rates]) is None:
                misfit = next((scheduler_misfit(base, live_rates) for base in bases.values()), None)
        if misfit:
            is_certain = bool(bases) or (not is_merged and (bool(schedulers) or any(rate_keys)))
            return Matching(faults=(misfit,)) if is_certain else Matching(doubts=(misfit,))
        if has_several:
            return Matching()
        return Matching(
            doubts=tuple(
                f"{key!r} of the checkpoint has {list(base)}, and the groups initial_lr {live_rates}: the scheduler "
                "gives groups other rates than they began with, as it does if their order has changed in the saved run"
                for key, base in bases.items()
                if None not in live_rates
            )
        )

    def _options_by_name(self, report: LoadReport) -> Matching:
        """Give each parameter its own options; a fresh one gets those of its group, which has equal options now."""

        def options_of(name: str) -> str:
            options = self.options.get(name, _NONE).items()
            return str(sorted((option, as_tuples(self.template.values[key])) for option, key in options))

        names_by_options: defaultdict[str, list[str]] = defaultdict(list)
        for name in report.loaded:
            names_by_options[options_of(name)].append(name)
        origins = {name: name for name in report.loaded}
        for name in report.fresh:
            if similar_names := names_by_options.get(options_of(name)):
                origins[name] = similar_names[0]
        faults = tuple(filter(None, map(self._apart, names_by_options.values())))
        matchings = [
            self._options(self.options.get(name, _NONE), self.saved_options.get(origin, _NONE), origin, "parameters")
            for name, origin in origins.items()
        ]
        return Matching.joined([Matching(faults=faults), *matchings])

    def _apart(self, names: Sequence[str]) -> str | None:
        """Return a fault if parameters with equal options now had different ones in the saved run."""
        saved_keys, option_of = self.saved_options, self.stored.option
        for option in saved_keys.get(names[0], {}).keys() - _MERGEABLE_OPTIONS:
            keys = {name: saved_keys[name][option] for name in names if option in saved_keys.get(name, _NONE)}
            first_value = option_of(keys[names[0]])
            distinct_names = {self.stored.mark(key): name for name, key in keys.items()}.values()
            for other_name in (name for name in distinct_names if option_of(keys[name]) != first_value):
                return (
                    f"{names[0]!r} and {other_name!r} have the same options now, and {option}={first_value!r} and "
                    f"{option_of(keys[other_name])!r} in the checkpoint; a flattened state dict does not say whether "
                    "they are one group: load a nested one (flatten_optimizer_state_dict=False)"
                )
        return None

    def _options(self, keys: _Keys, saved_keys: _Keys, origin: str, owner: str) -> Matching:
        """Take options; those that only one side has stay as they are, or are added.

        Args:
            keys, saved_keys: by option, the latter of a group or parameter ``origin`` of the checkpoint.
            owner: the group or the parameters that have the options, for people.
        """
        values, entries = self.template.values, self.stored.entries
        sources = {key: saved_keys[option] for option, key in keys.items() if option in saved_keys}
        missing_options = sorted(keys.keys() - saved_keys.keys())
        faults = [
            f"missing key {f'{self.optimizer.options}{origin}.{option}'!r}"
            for option in missing_options
            if not saved_keys or option in RUN_OPTIONS
        ]
        for key, source in sources.items():
            faults += [f"{key!r} {fault}" for fault in self.template.misfits(key, entries[source])]
        kept_options = [
            f"{option}={values[keys[option]]!r}" for option in missing_options if option not in _OPTIONAL_OPTIONS
        ]
        saved_history = [option for option in saved_keys if option in HISTORY_OPTIONS and option not in keys]
        added_options = {}
        for option in saved_history if keys else ():
            *parents, leaf = self.template.paths[next(iter(keys.values()))]
            flattened, dot, _ = str(leaf).rpartition(".")
            added_options[*parents, f"{flattened}{dot}{option}"] = self.stored.option(saved_keys[option])
        return Matching(
            sources,
            frozenset(saved_keys[option] for option in saved_history),
            own_options=(f"{owner}: {', '.join(kept_options)}",) if kept_options and saved_keys else (),
            added=added_options,
            faults=tuple(faults),
        )


def dropped_by_torch(added: Mapping[KeyPath, object]) -> tuple[str, ...]:
    """Return the options among those ``added`` that torch's ``set_state_dict`` drops, as text.

    Of a flattened state dict it takes only the options that the running optimizer's groups have.
    """
    options = [(str(path[-1]).rpartition("."), value) for path, value in added.items()]
    dropped_options = (
        f"{option}={value!r}" for (_, dot, option), value in options if dot and option not in _OPTIONAL_OPTIONS
    )
    return tuple(dict.fromkeys(dropped_options))


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
    distinct_globs = list(dict.fromkeys(request.globs for request in requests))
    if len(distinct_globs) > 1:
        patterns, other_patterns = (list(globs.patterns) for globs in distinct_globs[:2])
        fault = f"ranks were given different fresh={patterns!r} and {other_patterns!r}"
        return Matching(faults=(fault,)), LoadReport()
    # What one rank leaves another may take, so only what all of them leave is left.
    globs, joint = distinct_globs[0], Matching.joined([request.matching for request in requests])
    claimed_keys = set[str]().union(*(request.matching.sources.values() for request in requests))
    unclaimed_keys = sorted(stored.entries.keys() - claimed_keys - joint.covered_keys)
    all_optimizers = chain.from_iterable(request.optimizers for request in requests)
    optimizers = {optimizer.key: optimizer for optimizer in all_optimizers}.values()
    # State that no rank takes: of parameters that are dropped on purpose, or gone.
    dropped, settled_keys, differences = set(), set(), {}
    for optimizer in optimizers:
        parameter_names = {name for key, name in joint.parameters if key == optimizer.key}
        for name, keys in optimizer.state_of_names(unclaimed_keys, parameter_names | stored.names(optimizer)).items():
            settled_keys |= {*keys.values()}
            if name not in parameter_names and globs.match(name):
                dropped.add(name)
            elif name not in parameter_names and not all(map(extra.match, keys.values())):
                differences[name] = GONE
        settled_keys |= {*_passed_over(optimizer, unclaimed_keys, stored, joint.loaded)}
    # Everything else that only the checkpoint has.
    entries = [stored.entries[key] for key in unclaimed_keys if key not in settled_keys]
    weights = {
        entry.key: str(entry.path[-1])
        for entry in entries
        if isinstance(entry, StateRecord) and entry.slot is None and globs.match(str(entry.path[-1]))
    }
    extras = [entry.key for entry in entries if entry.key not in weights and not extra.match(entry.key)]
    faults = _extra_keys(extras, joint.sources)
    faults += [
        f"fresh={pattern!r} matches no parameter with state, and no weight that only one side has"
        for pattern in globs.unmatched((*joint.names, *dropped, *differences, *joint.kept.values(), *weights.values()))
    ]
    report = LoadReport(
        tuple(sorted({name for _, name in joint.loaded})),
        tuple(sorted({name for _, name in joint.fresh})),
        tuple(sorted(joint.discarded)),
        tuple(sorted({*dropped, *weights})),
        tuple(sorted(joint.kept)),
        joint.own_options,
    )
    optimizer_prefixes = tuple(chain.from_iterable((optimizer.state, optimizer.options) for optimizer in optimizers))
    extra_state = tuple(key for key in extras if key.startswith(optimizer_prefixes))
    misfit = Matching(differences=differences, extra_state=extra_state, faults=tuple(faults))
    return Matching.joined([joint, misfit]), report


def _extra_keys(keys: Sequence[str], template: Iterable[str]) -> list[str]:
    """Return what only the checkpoint has, by roots where these are its own, and how to leave it."""
    template_roots = {key.partition(".")[0] for key in template}
    roots: defaultdict[str, list[str]] = defaultdict(list)
    for key in keys:
        root, dot, _ = key.partition(".")
        roots[escape(key) if root in template_roots or not dot else f"{escape(root)}.*"].append(key)
    faults = [f"extra key {listed(map(repr, of_root), 1)}" for of_root in roots.values()]
    if faults:
        faults[0] += f" (to load them, give them in the state dict; allow_extra={list(roots)[:12]!r} loses them)"
    return faults


def _passed_over(
    optimizer: NamedOptimizer, keys: Sequence[str], stored: Stored, loaded: Collection[OwnParameter]
) -> Iterator[str]:
    """Yield options that nobody misses: names, and all of groups of which nothing is loaded."""
    if optimizer.groups is None:
        for name, option_keys in optimizer.options_of_names(keys).items():
            yield from option_keys.values() if (optimizer.key, name) not in loaded else ()
        return
    groups = stored.groups(optimizer)
    for number, options in optimizer.options_of_groups(keys).items():
        is_unused = not any((optimizer.key, name) in loaded for name in groups[number])
        yield from (key for option, key in options.items() if is_unused or option in NAMES_OF_GROUPS)
