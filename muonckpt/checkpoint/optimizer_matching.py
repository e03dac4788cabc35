"""The matching of one optimizer: state by the names of parameters, and options by groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, repeat
from types import MappingProxyType
from typing import Any

import torch

from ..names.keys import NamedOptimizer
from ..names.resumption import (
    NAMES_OF_GROUPS,
    OTHER_OPTIONS,
    Choices,
    LoadReport,
    ParameterMatcher,
    ParameterState,
    as_tuples,
    meaning_options,
    scheduler_misfit,
)
from ..names.vocabulary import FUSION, GIVEN_KEYS, HISTORY_OPTIONS, RUN_OPTIONS, KeyPath, begins_as_zeros
from ..names.wording import listed
from .live_state import LiveState
from .stored import Matching, OptimizerParameter, OptionGroup, Stored, has_grown, misfits, option_groups

_NONE: Mapping[Any, Any] = MappingProxyType({})

CODE_OPTIONS = frozenset(GIVEN_KEYS.values())
"""Options of groups that a state dict has only where a rate was changed; either side may lack them."""

_MERGEABLE_OPTIONS = NAMES_OF_GROUPS | {*FUSION, *CODE_OPTIONS}
"""Options in which groups of a checkpoint may differ that are one group of the running optimizer."""

_OPTIONAL_OPTIONS = RUN_OPTIONS | CODE_OPTIONS
"""Options whose absence in a checkpoint is not reported: it must lack them, or has them only where they differ."""


def match_optimizer(optimizer: NamedOptimizer, live: LiveState, stored: Stored, choices: Choices) -> Matching:
    """Decide what an optimizer takes: the state of each parameter by its name, then the options of its groups."""
    match = _OptimizerMatch.of(optimizer, live, stored)
    live_states, saved_states = match.states()
    names: dict[str, str] = {}
    for name, state in live_states.items():
        names |= dict.fromkeys(state.slots.values(), name)

    def slot_fault(key: str, saved_key: str) -> str | None:
        entry = stored.entries[saved_key]
        grows = has_grown(live.flat[key], entry) and choices.grow.match(names[key])
        return next(iter(misfits(live, key, entry, grows)), None)

    def is_zeroed(state: ParameterState, slot: str) -> bool:
        is_tensor = isinstance(live.flat[state.slots[slot]], torch.Tensor)
        return is_tensor and begins_as_zeros(slot, state.options)

    # 1. Fitting state is loaded, other state begins from zero or is refused.
    groups = [group.names for group in match.groups]
    may_have_more = choices.allow_extra.matches_all
    matcher = ParameterMatcher(
        live_states, saved_states, groups, cache(match.group_options), slot_fault, is_zeroed, may_have_more
    )
    report, differences, faults, origins = matcher.match(choices.fresh, choices.ungrouped)
    if optimizer.groups is None and any(reason.startswith(OTHER_OPTIONS) for reason in differences.values()):
        faults = (
            *faults,
            "a flattened state dict does not say which parameters are one group: load a nested one "
            "(flatten_optimizer_state_dict=False)",
        )
    # 2. Loaded tensors may have more rows, if it is known how these begin.
    loaded_keys, unknown_rows, grown = list[str](), list[str](), dict[str, str]()
    for name in report.loaded:
        for slot, key in live_states[name].slots.items():
            loaded_keys.append(key)
            if has_grown(live.flat[key], stored.entries[key]):
                grown[key] = name
                if not is_zeroed(live_states[name], slot):
                    unknown_rows.append(f"{name!r} cannot grow: it is not known how new rows of its {slot} begin")
    fresh_keys = chain.from_iterable(live_states[name].slots.values() for name in report.fresh)
    # 3. The outcome by keys, and by parameters of this optimizer, as others may have some of equal names.
    taken = Matching(
        dict(zip(loaded_keys, loaded_keys, strict=True)),
        zeros=tuple(fresh_keys),
        grown=grown,
        loaded=match.parameters(report.loaded),
        fresh=match.parameters(report.fresh),
        discarded=frozenset(report.discarded),
        ungrouped=match.parameters(name for name in report.loaded if not saved_states[name].groups),
        parameters=match.parameters(live_states),
        differences=differences,
        faults=(*faults, *unknown_rows),
    )
    return Matching.joined([taken, *match.options_of_groups(report, origins)])


@dataclass(frozen=True, slots=True)
class _OptimizerMatch:
    """One optimizer and its groups on both sides.

    Attributes:
        saved_groups: without the options that no run said: the running optimizer's stay.
        unsaid_keys: those of these options.
        homes: the numbers of each parameter's groups in the checkpoint.
    """

    optimizer: NamedOptimizer
    live: LiveState
    stored: Stored
    groups: Sequence[OptionGroup]
    saved_groups: Sequence[OptionGroup]
    unsaid_keys: frozenset[str]
    homes: Mapping[str, Sequence[int]]

    @classmethod
    def of(cls, optimizer: NamedOptimizer, live: LiveState, stored: Stored) -> _OptimizerMatch:
        values = live.flat
        groups = option_groups(optimizer, values, values.__getitem__, lambda key: str(as_tuples(values[key])))
        saved_groups, unsaid_keys = list[OptionGroup](), set[str]()
        homes: defaultdict[str, list[int]] = defaultdict(list)
        for number, (names, keys) in enumerate(stored.groups(optimizer)):
            unsaid = frozenset[str]().union(*(stored.unsaid.get(name, ()) for name in names))
            said = {option: keys[option] for option in keys if option not in unsaid}
            unsaid_keys.update(chain.from_iterable(keys[option] for option in keys.keys() - said.keys()))
            saved_groups.append(OptionGroup(names, said))
            for name in names:
                homes[name].append(number)
        return cls(optimizer, live, stored, groups, saved_groups, frozenset(unsaid_keys), dict(homes))

    def parameters(self, names: Iterable[str]) -> frozenset[OptimizerParameter]:
        return frozenset(zip(repeat(self.optimizer.key), names, strict=False))

    def states(self) -> tuple[dict[str, ParameterState], dict[str, ParameterState]]:
        """Return the state of parameters on both sides, with the options on which its meaning depends."""
        values, stored = self.live.flat, self.stored
        options: dict[str, Mapping[str, Any]] = {}
        for names, keys in self.groups:
            common_options = {option: values[first] for option, (first, *_) in keys.items()}
            options |= dict.fromkeys(names, common_options)

        @cache
        def meaning(number: int, of_meaning: tuple[str, ...]) -> Mapping[str, Any]:
            keys = self.saved_groups[number].keys
            return {option: stored.option(keys[option][0]) for option in of_meaning if option in keys}

        state = self.optimizer.state_of_names(values, options)
        saved_state = self.optimizer.state_of_names(stored.entries, {*options, *self.homes})
        live_states, saved_states = {}, {}
        for name in dict.fromkeys((*options, *state)):
            slots, saved_slots = state.get(name, _NONE), saved_state.get(name, _NONE)
            if saved_slots and not slots:  # as if only the checkpoint had it
                continue
            homes = self.homes.get(name, ())
            saved_options = meaning(homes[0], meaning_options(saved_slots)) if homes else _NONE
            live_states[name] = ParameterState(slots, options.get(name, _NONE))
            saved_states[name] = ParameterState(saved_slots, saved_options, homes)
        return live_states, saved_states

    def group_options(self, number: int) -> Mapping[str, Any]:
        """Return the options of a saved group in which others may not differ that become one group with it."""
        keys = self.saved_groups[number].keys
        return {option: self.stored.option(keys[option][0]) for option in keys if option not in _MERGEABLE_OPTIONS}

    def options_of_groups(self, report: LoadReport, origins: Sequence[int | None]) -> Iterator[Matching]:
        """Yield which options are taken, after the state; ``origins`` has the saved group of each group."""
        # Groups that were merged with others have options that are not taken, though parameters were loaded.
        merged_numbers, covered_keys = set[int](), {*self.unsaid_keys}
        for name in (*report.loaded, *report.discarded):
            merged_numbers.update(self.homes.get(name, ()))
        for number in merged_numbers.difference(origins):
            covered_keys.update(chain.from_iterable(self.saved_groups[number].keys.values()))
        yield Matching(covered_keys=frozenset(covered_keys))
        if self.optimizer.groups is not None:
            yield self._scheduler_misfit(origins)
        homeless = {name for name in report.loaded if name not in self.homes}
        for number, (group, origin) in enumerate(zip(self.groups, origins, strict=True)):
            if ungrouped := [name for name in group.names if name in homeless]:
                text = f"all of {listed(ungrouped, 3)}, which has those of group {number} here"
                yield Matching(own_options=(text,))
            # A group without fitting state in the checkpoint keeps its options.
            if origin is not None:
                owner = "parameters" if self.optimizer.groups is None else f"group {number}"
                yield self._taken_options(group.keys, self.saved_groups[origin].keys, owner)

    def _taken_options(
        self, keys: Mapping[str, Sequence[str]], saved_keys: Mapping[str, Sequence[str]], owner: str
    ) -> Matching:
        """Give a group, in words the owner of its options, those of a saved one; its own stay where that has none."""
        live, stored = self.live, self.stored
        sources, faults, live_options, covered_keys = dict[str, str](), list[str](), list[str](), list[str]()
        for option in sorted(keys.keys() - NAMES_OF_GROUPS - saved_keys.keys()):
            if option in RUN_OPTIONS:
                faults.append(f"missing key {keys[option][0]!r}")
            elif option not in _OPTIONAL_OPTIONS:
                live_options.append(f"{option}={live.flat[keys[option][0]]!r}")
        added_options: dict[KeyPath, Any] = {}
        for option, (saved_key, *equal_keys) in saved_keys.items():
            # Each group keeps its name and its parameters.
            if option in keys and option not in NAMES_OF_GROUPS:
                covered_keys += equal_keys
                for key in keys[option]:
                    sources[key] = saved_key
                    faults += (f"{key!r} {fault}" for fault in misfits(live, key, stored.entries[saved_key]))
            # The history of a group goes on with it, although no code has set it.
            elif option in HISTORY_OPTIONS:
                covered_keys += (saved_key, *equal_keys)
                for key in next(iter(keys.values()), ()):
                    *parents, leaf = live.paths[key]
                    flattened, dot, _ = str(leaf).rpartition(".")
                    added_options[*parents, f"{flattened}{dot}{option}"] = stored.option(saved_key)
        return Matching(
            sources,
            frozenset(covered_keys),
            own_options=(f"{owner}: {', '.join(live_options)}",) if live_options else (),
            added=added_options,
            faults=tuple(faults),
        )

    def _scheduler_misfit(self, origins: Sequence[int | None]) -> Matching:
        """Return why state of schedulers, which know groups by their numbers, would not be that of the present groups.

        Args:
            origins: the saved group of each group, None where no saved state fits it.
        """
        # The rates with which groups began, where a scheduler has written them: when saved, and after the load.
        # A group without fitting state in the checkpoint keeps its own.
        saved_rates = [group.initial_rate(self.stored.option) for group in self.saved_groups]
        live_rates: list[Any] = []
        for group, origin in zip(self.groups, origins, strict=True):
            own_rate = group.initial_rate(self.live.flat.__getitem__) if group.names else None
            live_rates.append(own_rate if origin is None else saved_rates[origin])
        # A scheduler that says for which rates it was made needs no guess; with several, it does not say whose it is.
        has_schedulers, base_rates = self._base_rates()
        if any(scheduler_misfit(base, live_rates) is None for base in base_rates.values()):
            return Matching()
        if len(self.live.optimizers) > 1:
            base_rates = {}
        misfit = scheduler_misfit(saved_rates, live_rates)
        if not misfit:
            doubts = []
            for key, base in base_rates.items() if None not in live_rates else ():
                # A scheduler of some of the groups steps an optimizer that was saved together with others.
                if len(base) == len(live_rates):
                    doubts.append(
                        f"{key!r} of the checkpoint has {list(base)}, and the groups initial_lr {live_rates}: the "
                        "scheduler gives groups other rates than they began with, as it does if their order has "
                        "changed in the saved run"
                    )
            return Matching(doubts=tuple(doubts))
        # Each saving rank has groups: this rank may have some of them, and then only a scheduler tells; or several as
        # one, and then a scheduler that is made for these groups is meant.
        homes, used_rates = list[list[int]](), list[Any]()
        for group, rate in zip(self.groups, live_rates, strict=True):
            if group.names:
                homes.append(sorted({self.homes[name][0] for name in group.names if name in self.homes}))
                used_rates.append(rate)
        used_numbers = sorted({*chain.from_iterable(homes)})
        if scheduler_misfit([saved_rates[number] for number in used_numbers], used_rates) is None:
            misfit = next((scheduler_misfit(base, live_rates) for base in base_rates.values()), None)
            if not misfit:
                return Matching()
        is_merged = all(homes) and homes == sorted(homes) and len(used_numbers) > len(homes)
        has_rates = any("initial_lr" in group.keys for group in self.groups)
        is_certain = bool(base_rates) or (not is_merged and (has_schedulers or has_rates))
        return Matching(faults=(misfit,)) if is_certain else Matching(doubts=(misfit,))

    def _base_rates(self) -> tuple[bool, dict[str, tuple[Any, ...]]]:
        """Return whether the state dict has schedulers, and the rates for which saved ones were made, by key.

        A scheduler's ``base_lrs`` has a rate for each group, by the group's number.
        """
        has_schedulers, base_rates = False, {}
        for key, path in self.live.paths.items():
            if "base_lrs" not in path and "_schedulers" not in path:
                continue
            has_schedulers = True
            source = self.stored.origin(key) if path[-1] == "base_lrs" else None
            rates = self.stored.option(source) if source in self.stored.entries else None
            if isinstance(rates, tuple):
                base_rates[key] = rates
        return has_schedulers, base_rates


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
