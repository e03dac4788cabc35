"""The matching of a checkpoint with a template: parameters by their names, parameter groups by their parameters.

`match` decides for one rank, `judge` for all of them together.  What is not in a `NamedOptimizer` goes by its key.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from glob import escape
from itertools import chain, repeat
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
from .template import LoadTemplate, Matching, OptimizerParameter, Stored

_NONE: Mapping[Any, Any] = MappingProxyType({})

_CODE_OPTIONS = frozenset(GIVEN_KEYS.values())
"""Options of groups that a state dict has only where a rate was changed; either side may lack them."""

_MERGEABLE_OPTIONS = NAMES_OF_GROUPS | {*FUSION, *_CODE_OPTIONS}
"""Options in which groups of a checkpoint may differ that are one group of the running optimizer."""

_OPTIONAL_OPTIONS = RUN_OPTIONS | _CODE_OPTIONS
"""Options of which nobody is told that a checkpoint lacks them: it must not, or it has them only where they differ."""


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
    if faults := [*_find_other_forms(template, stored)] or _find_moved_subtrees(template, stored):
        return Matching(covered_keys=frozenset(stored.entries), faults=tuple(faults))
    # Optimizers go by the names of parameters, everything else by its key.
    for key in template.numbered if globs.patterns else ():
        faults.append(
            f"the parameters of {key!r} have numbers, so fresh={list(globs.patterns)!r} cannot name them: save and "
            "load get_optimizer_state_dict(model, optimizer), which has names"
        )
    matchings = [Matching(faults=tuple(faults)), _match_by_key(template, stored, globs)]
    for optimizer in template.optimizers:
        kind = _UngroupedMatch if optimizer.groups is None else _GroupedMatch
        matchings.append(kind(optimizer, template, stored).match(globs))
    return Matching.joined(matchings)


_FORM_CODE = {
    StateForm.NUMBERED: "optimizer",
    StateForm.NESTED: "get_optimizer_state_dict(model, optimizer)",
    StateForm.FLAT: (
        "get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))"
    ),
}
"""The code of the values that users save and load, by the form of these."""

_FORM_PHRASES = {
    StateForm.NUMBERED: "the optimizer itself, or optimizer.state_dict(), whose parameters have numbers",
    StateForm.NESTED: f"{_FORM_CODE[StateForm.NESTED]}, whose parameters have names",
    StateForm.FLAT: f"{_FORM_CODE[StateForm.FLAT]}, whose parameters have names",
}


def _find_other_forms(template: LoadTemplate, stored: Stored) -> Iterator[str]:
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
                "To keep all of "
                f"its state, load it into what it was saved from. Write {key!r}: {_FORM_CODE[saved_form]} in the state "
                f"dict, {next_line}"
            )


def _find_moved_subtrees(template: LoadTemplate, stored: Stored) -> list[str]:
    """Return a fault if whole parts of the checkpoint stand at other keys than in the template."""
    template_paths = set(map(template.paths.__getitem__, template.paths.keys() - stored.entries.keys()))
    stored_paths = {stored.entries[key].path for key in stored.entries.keys() - template.values.keys()}
    subtrees = match_subtrees(template_paths, stored_paths)
    if not subtrees:
        return []
    # The parts that stand elsewhere, in words, and the code that gives them at the place of the checkpoint.
    sentences, moved_paths, code_by_path = [], set[KeyPath](), dict[KeyPath, str]()
    for place, stored_place in subtrees:
        label, stored_label = (repr(key_of(path)) if path else "its top" for path in (place, stored_place))
        sentences.append(f"the checkpoint has at {stored_label} what the state dict has at {label}")
        moved_paths |= {path for path in template_paths if path[: len(place)] == place}
        code_by_path[stored_place] = _code_of(place)
    # The code gives all else where it is; what the checkpoint lacks as well is told.
    for path in template.paths.values():
        if path not in template_paths:
            code_by_path[path[:1]] = _code_of(path[:1])
    missing_roots = dict.fromkeys(repr(path[0]) for path in sorted(template_paths - moved_paths, key=str))
    if missing_roots:
        sentences.append(f"it has no {', '.join(missing_roots)}")
    return [f"{'; '.join(sentences)}. Write state_dict = {code_by_path.get(()) or _nested_code(code_by_path)}"]


def _code_of(path: KeyPath) -> str:
    """Return the code of the part of the state dict at a path."""
    return f"state_dict{''.join(f'[{part!r}]' for part in path)}"


def _nested_code(values: Mapping[KeyPath, str]) -> str:
    """Return the code of a nested state dict, from the code of values by their paths."""
    parts: defaultdict[Any, dict[KeyPath, str]] = defaultdict(dict)
    for (root, *path), code in values.items():
        parts[root][tuple(path)] = code
    return f"{{{', '.join(f'{root!r}: {part.get(()) or _nested_code(part)}' for root, part in parts.items())}}}"


def _match_by_key(template: LoadTemplate, stored: Stored, globs: Globs) -> Matching:
    """Match by their keys the values that are in no optimizer with names.

    Weights that the checkpoint lacks keep their values if ``fresh=`` names them.
    """
    prefixes = _prefixes(template.optimizers)
    sources, kept_weights = dict[str, str](), dict[str, str]()
    missing_keys, faults, keys_of_other_ranks = list[str](), list[str](), list[str]()
    # 1. Keys that both sides have, weights that may stay as they are, and keys that only the template has.  Where ranks
    # saved values of their own under a key, this rank's is its origin; it is a fault if only other ranks have one.
    for key in sorted(key for key in template.values if not key.startswith(prefixes)):
        path = template.paths[key]
        if key in stored.entries:
            origin = stored.origin(key)
            if origin is None:
                keys_of_other_ranks.append(key)
                continue
            sources[key] = origin
            for fault in template.misfits(key, stored.entries[origin]):
                faults.append(f"{key!r} {fault}")
        elif isinstance(template.values[key], torch.Tensor) and globs.match(str(path[-1])):
            kept_weights[key] = str(path[-1])
        elif not (PARAM_GROUPS in path[:-1] and path[-1] in _CODE_OPTIONS):
            missing_keys.append(key)
    # 2. Weights that are tied to one that is loaded have its values: the checkpoint has one of their names.
    if missing_keys:
        tied_keys = template.tied_keys(sources)
        missing_keys = [key for key in missing_keys if key not in tied_keys]
    missing_faults = [*_describe_wrapped_names(missing_keys, template, stored)]
    missing_faults += _describe_missing_keys(missing_keys, template, stored)
    # 3. Options that only the checkpoint has come into the groups whose other options are loaded.
    options = [key for key, entry in stored.entries.items() if entry.path[-1] in _CODE_OPTIONS]
    added_options = {}
    if options:
        groups = {template.paths[key][:-1] for key in sources}
        for key in options:
            path = stored.entries[key].path
            if key not in template.values and path[:-1] in groups:
                added_options[path] = key
    # 4. Keys that no value of the template is read from, and that are not extra in the checkpoint all the same.
    covered_keys = {key for key, origin in sources.items() if key != origin}
    covered_keys |= {*keys_of_other_ranks, *added_options.values()}
    for key in keys_of_other_ranks:
        covered_keys |= {*stored.by_rank[key].values()}
    faults += _describe_values_of_other_ranks(keys_of_other_ranks, template, stored)
    return Matching(
        sources,
        frozenset(covered_keys),
        loaded=frozenset(_numbered_parameters(template, sources)),
        kept_weights=kept_weights,
        added={path: stored.option(key) for path, key in added_options.items()},
        faults=(*missing_faults, *faults),
    )


def _prefixes(optimizers: Iterable[NamedOptimizer]) -> tuple[str, ...]:
    """Return the beginnings of all keys of these optimizers."""
    return tuple(chain.from_iterable((optimizer.state, optimizer.options) for optimizer in optimizers))


def _describe_wrapped_names(missing_keys: Sequence[str], template: LoadTemplate, stored: Stored) -> Iterator[str]:
    """Yield the cure for each place at which a wrapper of the model changes all names in the same way."""
    missing_names, extra_names = defaultdict[KeyPath, set[str]](set), defaultdict[KeyPath, set[str]](set)
    for key in missing_keys:
        path = template.paths[key]
        missing_names[path[:-1]].add(str(path[-1]))
    for key, entry in stored.entries.items() if missing_keys else ():
        if key not in template.values:
            extra_names[entry.path[:-1]].add(str(entry.path[-1]))
    for parents, names in missing_names.items():
        if fault := describe_wrappers(names, extra_names[parents]):
            yield fault


def _describe_values_of_other_ranks(keys: Sequence[str], template: LoadTemplate, stored: Stored) -> Iterator[str]:
    """Yield a fault about items of which a rank has no value of its own, with what leaves them out."""
    if not keys:
        return
    ranks = set(chain.from_iterable(stored.by_rank[key] for key in keys))
    saved_ranks = f"{len(ranks)} of {max(ranks)[1]}" if len(ranks) < max(ranks)[1] else str(len(ranks))
    # The beginnings of paths at which the state dict holds something else as well.
    absent_paths = {template.paths[key] for key in keys}
    other_prefixes = set[KeyPath]()
    for path in template.paths.values():
        if path not in absent_paths:
            other_prefixes |= {path[:end] for end in range(1, len(path))}
    # The largest parts of the state dict that hold nothing else are left out.
    lines, globs = dict[str, None](), dict[str, None]()
    for path in sorted(absent_paths, key=str):
        end = 1
        while path[:end] in other_prefixes:
            end += 1
        lines[f"del {_code_of(path[:end])}"] = None
        globs[escape(key_of(path[:end])) + ".*" * (path[:end] not in absent_paths)] = None
    yield (
        f"{listed(map(repr, keys), 1)} differ from rank to rank: {saved_ranks} ranks saved a "
        f"value each, and {stored.place[1]} load, some without one. To go on without: {'; '.join(lines)}, with "
        f"allow_extra={[*globs, f'{BY_RANK}.*']!r}; muonckpt.open(...).items has all values"
    )


def _numbered_parameters(template: LoadTemplate, keys: Iterable[str]) -> Iterator[OptimizerParameter]:
    """Yield the parameters of optimizers with numbers that have state at these keys, as ``"optimizer#0"``."""
    for key in keys if template.numbered else ():
        for reading in OptimizerKey.of_slot(template.paths[key]):
            if (optimizer := key_of(reading.place.root)) in template.numbered:
                yield optimizer, f"{optimizer}#{reading.name}"


def _describe_missing_keys(keys: Sequence[str], template: LoadTemplate, stored: Stored) -> Iterator[str]:
    """Yield what only the state dict has; what holds no tensors, and the checkpoint has nothing of, as one."""
    if not keys:
        return
    shared_roots = {entry.path[0] for entry in stored.entries.values()}
    for key, value in template.values.items():
        if isinstance(value, torch.Tensor):
            shared_roots.add(template.paths[key][0])
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


# --- One optimizer ----------------------------------------------------------------------------------------------------

_Keys = Mapping[str, str]
"""Keys by slot, or by option."""


class _OptimizerMatch:
    """One optimizer, whose state goes by the names of parameters; its two forms say where options are.

    Attributes:
        options, saved_options: keys of options by parameter and option, in the template and in the checkpoint;
            parameters of a group share theirs.
    """

    options: Mapping[str, _Keys]
    saved_options: Mapping[str, _Keys]

    def __init__(self, optimizer: NamedOptimizer, template: LoadTemplate, stored: Stored) -> None:
        self.optimizer, self.template, self.stored = optimizer, template, stored

    def saved_groups_of(self, name: str) -> Sequence[int] | None:
        """Return the numbers of a parameter's groups in the checkpoint; None if options are by parameter."""
        return None

    def group_options(self, number: int) -> Mapping[str, Any]:
        """Return the options of a saved group in which others may not differ that become one group with it."""
        return _NONE

    def match_options(self, report: LoadReport, origins: Sequence[int | None]) -> Matching:
        """Decide which options are taken, after the state; ``origins`` has the saved group of each group."""
        raise NotImplementedError

    def match(self, globs: Globs) -> Matching:
        """Decide what the optimizer takes: the state of each parameter by its name, then options by groups."""
        # Fitting state is loaded, other state begins anew or is refused.
        live_states, saved_states = self._states()
        groups, partial = self.optimizer.groups or (), self.template.partial
        matcher = ParameterMatcher(
            live_states, saved_states, groups, cache(self.group_options), self._slot_fault, self._is_zeroed, partial
        )
        report, differences, faults, origins = matcher.match(globs)
        # Its outcome by keys, and by parameters of this optimizer, as others may have some of equal names.
        loaded_keys, fresh_keys = list[str](), list[str]()
        for name in report.loaded:
            loaded_keys += live_states[name].slots.values()
        for name in report.fresh:
            fresh_keys += live_states[name].slots.values()
        loaded, fresh, parameters = map(self._parameters, (report.loaded, report.fresh, live_states))
        state = Matching(
            dict(zip(loaded_keys, loaded_keys, strict=True)),
            zeros=tuple(fresh_keys),
            loaded=loaded,
            fresh=fresh,
            discarded=frozenset(report.discarded),
            parameters=parameters,
            differences={name: self._with_cure(reason) for name, reason in differences.items()},
            faults=faults,
        )
        return Matching.joined([state, self.match_options(report, origins)])

    def _states(self) -> tuple[dict[str, ParameterState], dict[str, ParameterState]]:
        """Return the state of parameters on both sides, with the options on which its meaning depends."""
        template, stored = self.template, self.stored
        keys = self.optimizer.state_of_names(template.values, self.options)
        saved_keys = self.optimizer.state_of_names(stored.entries, {*self.options, *self.saved_options})
        live_states, saved_states = {}, {}
        # Parameters of a group share their options and mostly the names of slots, so few are looked at.
        live_options: dict[int, Mapping[str, Any]] = {}
        meanings: dict[tuple[object, ...], Mapping[str, Any]] = {}
        for name in dict.fromkeys((*self.options, *keys)):
            slots, saved_slots = keys.get(name, _NONE), saved_keys.get(name, _NONE)
            if saved_slots and not slots:  # as if only the checkpoint had it
                continue
            option_keys, saved_option_keys = self.options.get(name, _NONE), self.saved_options.get(name, _NONE)
            group = id(option_keys)
            if group not in live_options:
                live_options[group] = {option: template.values[key] for option, key in option_keys.items()}
            meaning = group, id(saved_option_keys), meaning_options(saved_slots)
            if meaning not in meanings:
                common_options = option_keys.keys() & saved_option_keys.keys() & {*meaning_options(saved_slots)}
                meanings[meaning] = {option: stored.option(saved_option_keys[option]) for option in common_options}
            live_states[name] = ParameterState(slots, live_options[group])
            saved_states[name] = ParameterState(saved_slots, meanings[meaning], self.saved_groups_of(name))
        return live_states, saved_states

    def _slot_fault(self, key: str, saved_key: str) -> str | None:
        return next(self.template.misfits(key, self.stored.entries[saved_key]), None)

    def _is_zeroed(self, state: ParameterState, slot: str) -> bool:
        is_tensor = isinstance(self.template.values[state.slots[slot]], torch.Tensor)
        return is_tensor and begins_as_zeros(slot, state.options)

    def _parameters(self, names: Iterable[str]) -> frozenset[OptimizerParameter]:
        return frozenset(zip(repeat(self.optimizer.key), names, strict=False))

    def _with_cure(self, reason: str) -> str:
        """Return why a parameter differs, with what loads it where it is in no saved group."""
        if reason != UNGROUPED:
            return reason
        place = "state_dict"
        for part in self.optimizer.key.split("."):
            place += f"[{part}]" if part.isdecimal() else f"[{part!r}]"
        return (
            f"{reason} (write {place} = {{'state': {place}['state']}}, with "
            f"allow_extra=[{f'{self.optimizer.options}*'!r}], to load all state and keep the options of the code)"
        )

    def take_options(self, keys: _Keys, saved_keys: _Keys, origin: str, owner: str) -> Matching:
        """Take options; those that only one side has stay as they are, or are added.

        Args:
            keys, saved_keys: by option, the latter of a group or parameter ``origin`` of the checkpoint.
            owner: the group or the parameters that have the options, for people.
        """
        # Options of both sides are loaded where they fit.
        sources, faults, live_options = dict[str, str](), list[str](), list[str]()
        for option in sorted(keys.keys() - saved_keys.keys()):
            if not saved_keys or option in RUN_OPTIONS:
                faults.append(f"missing key {f'{self.optimizer.options}{origin}.{option}'!r}")
            if saved_keys and option not in _OPTIONAL_OPTIONS:
                live_options.append(f"{option}={self.template.values[keys[option]]!r}")
        for option, key in keys.items():
            if option in saved_keys:
                sources[key] = saved_keys[option]
                for fault in self.template.misfits(key, self.stored.entries[sources[key]]):
                    faults.append(f"{key!r} {fault}")
        # The history of a group goes on with it, although no code has set it.
        history_keys, added_options = [], {}
        for option, saved_key in saved_keys.items():
            if option in HISTORY_OPTIONS and option not in keys:
                history_keys.append(saved_key)
                if keys:
                    *parents, leaf = self.template.paths[next(iter(keys.values()))]
                    flattened, dot, _ = str(leaf).rpartition(".")
                    added_options[*parents, f"{flattened}{dot}{option}"] = self.stored.option(saved_key)
        return Matching(
            sources,
            frozenset(history_keys),
            own_options=(f"{owner}: {', '.join(live_options)}",) if live_options else (),
            added=added_options,
            faults=tuple(faults),
        )


class _GroupedMatch(_OptimizerMatch):
    """An optimizer in the nested form, whose groups list their parameters.

    Attributes:
        groups, saved_groups: keys of options by group and option, in the template and in the checkpoint.
        homes: the numbers of each parameter's groups in the checkpoint.
    """

    def __init__(self, optimizer: NamedOptimizer, template: LoadTemplate, stored: Stored) -> None:
        super().__init__(optimizer, template, stored)
        self.groups = optimizer.options_of_groups(template.values)
        self.saved_groups = optimizer.options_of_groups(stored.entries)
        # Parameters are in the groups that list them, on both sides.
        self.homes: defaultdict[str, list[int]] = defaultdict(list)
        for number, names in enumerate(stored.groups(optimizer)):
            for name in names:
                self.homes[name].append(number)
        options: dict[str, _Keys] = {}
        for number, names in enumerate(optimizer.groups or ()):
            for name in names:
                options[name] = self.groups[number]
        self.options = options
        self.saved_options = {name: self.saved_groups[numbers[0]] for name, numbers in self.homes.items()}

    def saved_groups_of(self, name: str) -> Sequence[int]:
        return self.homes.get(name, ())

    def group_options(self, number: int) -> Mapping[str, Any]:
        options = {}
        for option, key in self.saved_groups[number].items():
            if option not in _MERGEABLE_OPTIONS:
                options[option] = self.stored.option(key)
        return options

    def match_options(self, report: LoadReport, origins: Sequence[int | None]) -> Matching:
        """Give each group the options of the saved group in which its parameters were."""
        # Groups of which parameters were loaded and that became one with others have options that are not taken.
        superfluous_numbers, superfluous_keys = set[int](), list[str]()
        for name in report.loaded:
            superfluous_numbers.update(self.homes[name] if name in self.options else ())
        for number in superfluous_numbers.difference(origins):
            superfluous_keys += self.saved_groups[number].values()
        matchings = [Matching(covered_keys=frozenset(superfluous_keys)), self._scheduler_misfit(origins)]
        # A group of which all starts fresh keeps the options that it has, and each its name and its parameters.
        for number, keys in self.groups.items():
            origin = origins[number]
            if origin is not None:
                options = {option: key for option, key in keys.items() if option not in NAMES_OF_GROUPS}
                matchings.append(self.take_options(options, self.saved_groups[origin], str(origin), f"group {number}"))
        return Matching.joined(matchings)

    def _scheduler_misfit(self, origins: Sequence[int | None]) -> Matching:
        """Return why state of schedulers, which know groups by their numbers, would not be that of these groups.

        Args:
            origins: the saved group of each group, None where all of it starts fresh.
        """
        names_by_group = {number: names for number, names in enumerate(self.optimizer.groups or ()) if names}
        rates = self._saved_rates()
        saved_rates = list(map(rates.get, range(max(self.saved_groups, default=-1) + 1)))
        # The rates of these groups after the load: where all of one starts fresh, it has its own.
        rate_keys = [self.groups.get(number, _NONE).get("initial_lr") for number in range(len(origins))]
        live_rates: list[Any] = []
        for number, (origin, key) in enumerate(zip(origins, rate_keys, strict=True)):
            own_rate = self.template.values[key] if key and number in names_by_group else None
            live_rates.append(own_rate if origin is None else rates.get(origin))
        # A scheduler that says for which rates it was made needs no guess; with several, it does not say whose it is.
        has_schedulers, base_rates = self._base_rates()
        if any(scheduler_misfit(base, live_rates) is None for base in base_rates.values()):
            return Matching()
        misfit = scheduler_misfit(saved_rates, live_rates)
        has_several, is_merged = len(self.template.optimizers) > 1, False
        if misfit:
            # Ranks that save together have groups each, of which this rank may have some, or several as one.
            saved_homes = list(map(self._saved_homes, names_by_group.values()))
            joint_numbers = sorted({*chain.from_iterable(saved_homes)})
            in_order = saved_homes == sorted(saved_homes)
            is_merged = all(saved_homes) and len(joint_numbers) > len(names_by_group) and in_order
            base_rates = base_rates if not has_several else {}
            joint_rates = list(map(rates.get, joint_numbers))
            if scheduler_misfit(joint_rates, list(map(live_rates.__getitem__, names_by_group))) is None:
                misfit = next((scheduler_misfit(base, live_rates) for base in base_rates.values()), None)
        if misfit:
            is_certain = bool(base_rates) or (not is_merged and (has_schedulers or any(rate_keys)))
            return Matching(faults=(misfit,)) if is_certain else Matching(doubts=(misfit,))
        doubts = []
        for key, base in base_rates.items() if not has_several and None not in live_rates else ():
            doubts.append(
                f"{key!r} of the checkpoint has {list(base)}, and the groups initial_lr {live_rates}: the scheduler "
                "gives groups other rates than they began with, as it does if their order has changed in the saved run"
            )
        return Matching(doubts=tuple(doubts))

    def _saved_homes(self, names: Iterable[str]) -> list[int]:
        """Return the numbers of the first saved group of each of these parameters, sorted."""
        return sorted({self.homes[name][0] for name in names if self.homes[name]})

    def _saved_rates(self) -> dict[int, Any]:
        """Return the rates with which saved groups began, by number, where a scheduler has written them."""
        rates = {}
        for number, keys in self.saved_groups.items():
            if "initial_lr" in keys:
                rates[number] = self.stored.option(keys["initial_lr"])
        return rates

    def _base_rates(self) -> tuple[bool, dict[str, tuple[Any, ...]]]:
        """Return whether the template has schedulers, and the rates for which saved ones were made, by key.

        A scheduler's ``base_lrs`` has a rate for each group, by the group's number.
        """
        has_schedulers, base_rates = False, {}
        for key, path in self.template.paths.items():
            if "base_lrs" not in path and "_schedulers" not in path:
                continue
            has_schedulers = True
            source = self.stored.origin(key) if path[-1] == "base_lrs" else None
            rates = self.stored.option(source) if source in self.stored.entries else None
            if isinstance(rates, tuple):
                base_rates[key] = rates
        return has_schedulers, base_rates


class _UngroupedMatch(_OptimizerMatch):
    """An optimizer in the flat form, whose parameters have options each."""

    def __init__(self, optimizer: NamedOptimizer, template: LoadTemplate, stored: Stored) -> None:
        super().__init__(optimizer, template, stored)
        self.options = optimizer.options_of_names(template.values)
        self.saved_options = optimizer.options_of_names(stored.entries)

    def match_options(self, report: LoadReport, origins: Sequence[int | None]) -> Matching:
        """Give each parameter its own options; a fresh one gets those of its group, which has equal options now."""
        names_by_options: defaultdict[str, list[str]] = defaultdict(list)
        for name in report.loaded:
            names_by_options[self._live_options(name)].append(name)
        sources = dict(zip(report.loaded, report.loaded, strict=True))
        for name in report.fresh:
            if similar_names := names_by_options.get(self._live_options(name)):
                sources[name] = similar_names[0]
        faults = tuple(filter(None, map(self._find_distinct_options, names_by_options.values())))
        matchings = [Matching(faults=faults)]
        for name, source in sources.items():
            options, saved_options = self.options.get(name, _NONE), self.saved_options.get(source, _NONE)
            matchings.append(self.take_options(options, saved_options, source, "parameters"))
        return Matching.joined(matchings)

    def _live_options(self, name: str) -> str:
        """Return text that is the same for parameters with equal options."""
        options = self.options.get(name, _NONE).items()
        return str(sorted((option, as_tuples(self.template.values[key])) for option, key in options))

    def _find_distinct_options(self, names: Sequence[str]) -> str | None:
        """Return a fault if parameters with equal options now had different ones in the saved run."""
        saved_keys, option_of = self.saved_options, self.stored.option
        for option in saved_keys.get(names[0], {}).keys() - _MERGEABLE_OPTIONS:
            # Equal values have one mark, so few are read.
            names_by_mark = {}
            for name in names:
                if option in saved_keys.get(name, _NONE):
                    names_by_mark[self.stored.mark(saved_keys[name][option])] = name
            value = option_of(saved_keys[names[0]][option])
            for other_name in names_by_mark.values():
                other_value = option_of(saved_keys[other_name][option])
                if other_value != value:
                    return (
                        f"{names[0]!r} and {other_name!r} have the same options now, and {option}={value!r} and "
                        f"{other_value!r} in the checkpoint; a flattened state dict does not say whether "
                        "they are one group: load a nested one (flatten_optimizer_state_dict=False)"
                    )
        return None


def dropped_by_torch(added: Mapping[KeyPath, object]) -> tuple[str, ...]:
    """Return the options among those ``added`` that torch's ``set_state_dict`` drops, as text.

    Of a flattened state dict it takes only the options that the running optimizer's groups have.
    """
    dropped_options: dict[str, None] = {}
    for path, value in added.items():
        _, dot, option = str(path[-1]).rpartition(".")
        if dot and option not in _OPTIONAL_OPTIONS:
            dropped_options[f"{option}={value!r}"] = None
    return tuple(dropped_options)


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
    # 1. What one rank leaves another may take, so only what all of them leave is left.
    globs, joint = distinct_globs[0], Matching.joined([request.matching for request in requests])
    claimed_keys, optimizers = set(joint.covered_keys), dict[str, NamedOptimizer]()
    for request in requests:
        claimed_keys.update(request.matching.sources.values())
        optimizers |= {optimizer.key: optimizer for optimizer in request.optimizers}
    unclaimed_keys = sorted(stored.entries.keys() - claimed_keys)
    # 2. State that no rank takes: of parameters that are dropped on purpose, or gone.
    dropped_names, explained_keys, differences = set[str](), set[str](), dict[str, str]()
    for optimizer in optimizers.values():
        parameter_names = {name for key, name in joint.parameters if key == optimizer.key}
        unclaimed_state = optimizer.state_of_names(unclaimed_keys, parameter_names | stored.names(optimizer))
        for name, keys in unclaimed_state.items():
            explained_keys.update(keys.values())
            if name not in parameter_names and globs.match(name):
                dropped_names.add(name)
            elif name not in parameter_names and not all(map(extra.match, keys.values())):
                differences[name] = GONE
        explained_keys.update(_superfluous_options(optimizer, unclaimed_keys, stored, joint.loaded))
    # 3. Everything else that only the checkpoint has: weights dropped on purpose, and what is extra.
    dropped_weights, extra_keys = dict[str, str](), list[str]()
    for key in unclaimed_keys:
        entry = stored.entries[key]
        name = str(entry.path[-1])
        if key in explained_keys:
            continue
        if isinstance(entry, StateRecord) and entry.slot is None and globs.match(name):
            dropped_weights[key] = name
        elif not extra.match(key):
            extra_keys.append(key)
    faults = _describe_extra_keys(extra_keys, joint.sources)
    # 4. A glob that no rank had a use for is a mistake.
    matched_names = (
        *joint.names,
        *dropped_names,
        *differences,
        *joint.kept_weights.values(),
        *dropped_weights.values(),
    )
    for pattern in globs.unmatched(matched_names):
        faults.append(f"fresh={pattern!r} matches no parameter with state, and no weight that only one side has")
    report = LoadReport(
        tuple(sorted({name for _, name in joint.loaded})),
        tuple(sorted({name for _, name in joint.fresh})),
        tuple(sorted(joint.discarded)),
        tuple(sorted({*dropped_names, *dropped_weights})),
        tuple(sorted(joint.kept_weights)),
        joint.own_options,
    )
    prefixes = _prefixes(optimizers.values())
    extra_state = tuple(key for key in extra_keys if key.startswith(prefixes))
    misfit = Matching(differences=differences, extra_state=extra_state, faults=tuple(faults))
    return Matching.joined([joint, misfit]), report


def _describe_extra_keys(keys: Sequence[str], template: Iterable[str]) -> list[str]:
    """Return what only the checkpoint has, by roots where these are its own, and how to leave it."""
    template_roots = {key.partition(".")[0] for key in template}
    keys_by_glob: defaultdict[str, list[str]] = defaultdict(list)
    for key in keys:
        root, dot, _ = key.partition(".")
        keys_by_glob[escape(key) if root in template_roots or not dot else f"{escape(root)}.*"].append(key)
    faults = [f"extra key {listed(map(repr, members), 1)}" for members in keys_by_glob.values()]
    if faults:
        globs = list(keys_by_glob)[:12]
        faults[0] += f" (to load them, give them in the state dict; allow_extra={globs!r} loses them)"
    return faults


def _superfluous_options(
    optimizer: NamedOptimizer, keys: Sequence[str], stored: Stored, loaded: frozenset[OptimizerParameter]
) -> Iterator[str]:
    """Yield options that nobody misses: names, and all of groups of which nothing is loaded."""
    if optimizer.groups is None:
        for name, option_keys in optimizer.options_of_names(keys).items():
            yield from option_keys.values() if (optimizer.key, name) not in loaded else ()
        return
    groups = stored.groups(optimizer)
    for number, options in optimizer.options_of_groups(keys).items():
        is_used = not loaded.isdisjoint(zip(repeat(optimizer.key), groups[number], strict=False))
        for option, key in options.items():
            if not is_used or option in NAMES_OF_GROUPS:
                yield key
