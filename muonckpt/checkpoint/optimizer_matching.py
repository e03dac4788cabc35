"""The matching of one optimizer: state by the names of parameters; options by groups, or by names if flat."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import chain, repeat
from types import MappingProxyType
from typing import Any

import torch

from ..names.keys import NamedOptimizer
from ..names.resumption import (
    NAMES_OF_GROUPS,
    Choices,
    LoadReport,
    ParameterMatcher,
    ParameterState,
    as_tuples,
    meaning_options,
    scheduler_misfit,
)
from ..names.vocabulary import FLATTEN, FUSION, GIVEN_KEYS, HISTORY_OPTIONS, RUN_OPTIONS, KeyPath, begins_as_zeros
from ..names.wording import listed
from .template import LoadTemplate, Matching, OptimizerParameter, Stored

_NONE: Mapping[Any, Any] = MappingProxyType({})

CODE_OPTIONS = frozenset(GIVEN_KEYS.values())
"""Options of groups that a state dict has only where a rate was changed; either side may lack them."""

_MERGEABLE_OPTIONS = NAMES_OF_GROUPS | {*FUSION, *CODE_OPTIONS}
"""Options in which groups of a checkpoint may differ that are one group of the running optimizer."""

_OPTIONAL_OPTIONS = RUN_OPTIONS | CODE_OPTIONS
"""Options whose absence in a checkpoint is not reported: it must lack them, or has them only where they differ."""

_Keys = Mapping[str, str]
"""Keys by slot, or by option."""


class _OptimizerMatch:
    """One optimizer, with its state by the names of parameters; its two forms say where options are.

    Attributes:
        options, saved_options: keys of options by parameter and option, in the template and in the checkpoint;
            parameters of a group share theirs.
    """

    options: Mapping[str, _Keys]
    saved_options: Mapping[str, _Keys]

    def __init__(self, optimizer: NamedOptimizer, template: LoadTemplate, stored: Stored, choices: Choices) -> None:
        self.optimizer, self.template, self.stored, self.choices = optimizer, template, stored, choices
        self._growing_keys = set[str]()
        self._unsaid_keys = set[str]()

    def _said_options(self, keys: _Keys, names: Iterable[str]) -> _Keys:
        """Return the saved options of parameters without the unsaid ones: the running optimizer's stay."""
        unsaid = frozenset[str]().union(*(self.stored.unsaid.get(name, ()) for name in names)) & keys.keys()
        self._unsaid_keys.update(map(keys.__getitem__, unsaid))
        return {option: key for option, key in keys.items() if option not in unsaid} if unsaid else keys

    def saved_groups_of(self, name: str) -> Sequence[int] | None:
        """Return the numbers of a parameter's groups in the checkpoint; None if options are by parameter."""
        return None

    def group_options(self, number: int) -> Mapping[str, Any]:
        """Return the options of a saved group in which others may not differ that become one group with it."""
        return _NONE

    def match_options(self, report: LoadReport, origins: Sequence[int | None]) -> Matching:
        """Decide which options are taken, after the state; ``origins`` has the saved group of each group."""
        raise NotImplementedError

    def match(self) -> Matching:
        """Decide what the optimizer takes: the state of each parameter by its name, then options by groups."""
        # Fitting state is loaded, other state begins from zero or is refused.
        live_states, saved_states = self._states()
        groups, partial = self.optimizer.groups or (), self.template.partial
        matcher = ParameterMatcher(
            live_states, saved_states, groups, cache(self.group_options), self._slot_fault, self._is_zeroed, partial
        )
        report, differences, faults, origins = matcher.match(self.choices.fresh, self.choices.ungrouped)
        # Its outcome by keys, and by parameters of this optimizer, as others may have some of equal names.
        loaded_keys, fresh_keys, unknown_rows = list[str](), list[str](), list[str]()
        grown, rows = dict[str, str](), dict[str, int]()
        for name in report.loaded:
            for slot, key in live_states[name].slots.items():
                loaded_keys.append(key)
                if (saved_rows := self.template.saved_rows(key, self.stored.entries[key])) is not None:
                    grown[key], rows[key] = name, saved_rows
                    if not self._is_zeroed(live_states[name], slot):
                        unknown_rows.append(f"{name!r} cannot grow: it is not known how new rows of its {slot} begin")
        for name in report.fresh:
            fresh_keys += live_states[name].slots.values()
        loaded, fresh, parameters = map(self._parameters, (report.loaded, report.fresh, live_states))
        state = Matching(
            dict(zip(loaded_keys, loaded_keys, strict=True)),
            zeros=tuple(fresh_keys),
            grown=grown,
            rows=rows,
            loaded=loaded,
            fresh=fresh,
            discarded=frozenset(report.discarded),
            ungrouped=self._parameters(name for name in report.loaded if _is_homeless(saved_states[name])),
            parameters=parameters,
            differences=differences,
            faults=(*faults, *unknown_rows),
        )
        unsaid = Matching(covered_keys=frozenset(self._unsaid_keys))
        return Matching.joined([state, self.match_options(report, origins), unsaid])

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
            if self.choices.grow.match(name):
                self._growing_keys.update(slots.values())
            option_keys, saved_option_keys = self.options.get(name, _NONE), self.saved_options.get(name, _NONE)
            group = id(option_keys)
            if group not in live_options:
                live_options[group] = {option: template.values[key] for option, key in option_keys.items()}
            meaning = group, id(saved_option_keys), meaning_options(saved_slots)
            if meaning not in meanings:
                # A group that is not flattened does not say so, so the checkpoint's word counts without the template's.
                common_options = {*option_keys, FLATTEN} & saved_option_keys.keys() & {*meaning_options(saved_slots)}
                meanings[meaning] = {option: stored.option(saved_option_keys[option]) for option in common_options}
            live_states[name] = ParameterState(slots, live_options[group])
            saved_states[name] = ParameterState(saved_slots, meanings[meaning], self.saved_groups_of(name))
        return live_states, saved_states

    def _slot_fault(self, key: str, saved_key: str) -> str | None:
        entry = self.stored.entries[saved_key]
        grows = key in self._growing_keys and self.template.saved_rows(key, entry) is not None
        return next(iter(self.template.misfits(key, entry, grows)), None)

    def _is_zeroed(self, state: ParameterState, slot: str) -> bool:
        is_tensor = isinstance(self.template.values[state.slots[slot]], torch.Tensor)
        return is_tensor and begins_as_zeros(slot, state.options)

    def _parameters(self, names: Iterable[str]) -> frozenset[OptimizerParameter]:
        return frozenset(zip(repeat(self.optimizer.key), names, strict=False))

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

    def __init__(self, optimizer: NamedOptimizer, template: LoadTemplate, stored: Stored, choices: Choices) -> None:
        super().__init__(optimizer, template, stored, choices)
        self.groups = optimizer.options_of_groups(template.values)
        self.saved_groups = {}
        saved_names = dict(enumerate(stored.groups(optimizer)))
        for number, keys in optimizer.options_of_groups(stored.entries).items():
            self.saved_groups[number] = self._said_options(keys, saved_names.get(number, ()))
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
        # Groups that were merged with others have options that are not taken, though parameters were loaded.
        superfluous_numbers, superfluous_keys = set[int](), list[str]()
        for name in report.loaded:
            superfluous_numbers.update(self.homes[name] if name in self.options else ())
        for number in superfluous_numbers.difference(origins):
            superfluous_keys += self.saved_groups[number].values()
        matchings = [Matching(covered_keys=frozenset(superfluous_keys)), self._scheduler_misfit(origins)]
        homeless = {name for name in report.loaded if not self.saved_groups_of(name)}
        for number, names in enumerate(self.optimizer.groups or ()):
            if ungrouped := [name for name in names if name in homeless]:
                text = f"all of {listed(ungrouped, 3)}, which has those of group {number} here"
                matchings.append(Matching(own_options=(text,)))
        # A group that starts fresh as a whole keeps its options, and each group its name and its parameters.
        for number, keys in self.groups.items():
            origin = origins[number]
            if origin is not None:
                options = {option: key for option, key in keys.items() if option not in NAMES_OF_GROUPS}
                matchings.append(self.take_options(options, self.saved_groups[origin], str(origin), f"group {number}"))
        return Matching.joined(matchings)

    def _scheduler_misfit(self, origins: Sequence[int | None]) -> Matching:
        """Return why state of schedulers, which know groups by their numbers, would not be that of the present groups.

        Args:
            origins: the saved group of each group, None where all of it starts fresh.
        """
        names_by_group = {number: names for number, names in enumerate(self.optimizer.groups or ()) if names}
        rates = self._saved_rates()
        saved_rates = list(map(rates.get, range(max(self.saved_groups, default=-1) + 1)))
        # The rates of the groups after the load: a group that starts fresh as a whole keeps its own.
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
            # Each saving rank has groups; this rank may have some of them, or several as one.
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
            # A scheduler of some of the groups steps an optimizer that was saved together with others.
            if len(base) != len(live_rates):
                continue
            doubts.append(
                f"{key!r} of the checkpoint has {list(base)}, and the groups initial_lr {live_rates}: the scheduler "
                "gives groups other rates than they began with, as it does if their order has changed in the saved run"
            )
        return Matching(doubts=tuple(doubts))

    def _saved_homes(self, names: Iterable[str]) -> list[int]:
        """Return the numbers of the first saved group of each given parameter, sorted."""
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

    def __init__(self, optimizer: NamedOptimizer, template: LoadTemplate, stored: Stored, choices: Choices) -> None:
        super().__init__(optimizer, template, stored, choices)
        self.options = optimizer.options_of_names(template.values)
        self.saved_options = {}
        for name, keys in optimizer.options_of_names(stored.entries).items():
            self.saved_options[name] = self._said_options(keys, (name,))

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


def _is_homeless(saved: ParameterState) -> bool:
    """Return whether a saved parameter is in no group, in a form that has groups."""
    return saved.groups is not None and not saved.groups


def match_optimizer(optimizer: NamedOptimizer, template: LoadTemplate, stored: Stored, choices: Choices) -> Matching:
    """Decide what an optimizer of the template takes from a checkpoint."""
    kind = _UngroupedMatch if optimizer.groups is None else _GroupedMatch
    return kind(optimizer, template, stored, choices).match()


def dropped_by_torch(added: Mapping[KeyPath, object]) -> tuple[str, ...]:
    """Return the options among those ``added`` that torch's ``set_state_dict`` drops, as text.

    From a flattened state dict it takes only the options that the running optimizer's groups have.
    """
    dropped_options: dict[str, None] = {}
    for path, value in added.items():
        _, dot, option = str(path[-1]).rpartition(".")
        if dot and option not in _OPTIONAL_OPTIONS:
            dropped_options[f"{option}={value!r}"] = None
    return tuple(dropped_options)
