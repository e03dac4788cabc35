"""Writes the parameter groups of a translated model: split by what their options mean, or copied with new names."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from ...names.errors import SourceError
from ...names.keys import PARAM_GROUPS
from ...names.resumption import as_tuples
from ...names.vocabulary import FLATTEN, FUSION, HISTORY_OPTIONS, PARAMS, STEP
from ...names.wording import listed
from ...programs.dialect import Dialect
from ...programs.model_view import ParameterGroup
from ...record.record import Blob
from ..engine.outputs import Action, Check, OutputItem, OutputTensor, Topic
from .groups import (
    GroupTemplate,
    OptionWriter,
    WrittenOptions,
    common_options,
    common_structure,
    restructured_options,
)
from .matrices import UNKNOWN, Matrices
from .parameters import TranslatedModel, hides_pieces
from .parse import NAMES, merge_equal
from .state_writer import StateWriter, written_at
from .structure import TranslatedParameter

_FIXED_COMMON_STATE = (
    "the common state cannot be rewritten for {}: {}; convert the source to muonckpt, which has no use for it, and "
    "then the result"
)

_GONE = object()
"""The value of an option that a group no longer has."""


@dataclass(slots=True)
class GroupWriter:
    """Writes the parameter groups of a translated model in the words of a program.

    Attributes:
        state: writes the state of their parameters, and so has its keys.
        option_findings: what the report says of options, by method, each with the parameters whose they are.
        members: the parameters of groups that Megatron's common state has without names, by optimizer.
        unsaid: options that are written and that the source does not say, by the parameters that groups list.
    """

    source: TranslatedModel
    state: StateWriter
    option_findings: dict[tuple[str, Check], list[str]] = field(default_factory=lambda: defaultdict(list))
    members: dict[str, list[list[str]]] = field(default_factory=dict)
    unsaid: dict[str, frozenset[str]] = field(default_factory=dict)

    @property
    def target(self) -> Dialect:
        return self.source.target

    @property
    def like(self) -> GroupTemplate | None:
        return self.source.choices.like

    def outputs(self) -> list[OutputTensor | OutputItem]:
        """Return the groups, and state that follows from their options."""
        source, target = self.source, self.target
        # Megatron's groups are in one item, which is copied whole where no group changes its words or its optimizer.
        common_items = [item for item in source.items if target.holds_groups(item.path)]
        if common_items and (source.is_same_dialect or not source.groups):
            if target.chains and not source.is_same_dialect:
                reason = "it does not say which parameters are in which group"
                raise SourceError(_FIXED_COMMON_STATE.format(target.name, reason))
            source.findings.add("the common state is copied unchanged, with its groups")
            self.members = source.renamed_members()
            self._report_matrices()
            return []
        if not source.groups:
            self._number(())
            self.source.findings.add(
                "the source does not say which parameters are in which group; no groups are written"
            )
            self._report_matrices()
            return []
        # A group is split where its parameters get different options.
        derived, groups = list[OutputTensor | OutputItem](), list[ParameterGroup]()
        for group, members in source.groups:
            groups += self._renamed(group, members) if self.is_copied else self._translated(group, members, derived)
        if self.is_copied:
            return list(self._entries(groups))
        groups = merge_equal(groups)
        if self.like is not None:
            groups = self.like.arrange(groups, target, self.source.findings)
        if target.common is not None:
            return [written_at(target.common, [self._common_state(groups, common_items)])]
        self._number(groups)
        # torch drops the options that schedulers put into groups when it loads a flat state dict.
        for option in sorted(HISTORY_OPTIONS) if any(place.flat for place in target.keys.optimizers) else ():
            if stored := sorted({repr(group.options[option]) for group in groups if option in group.options}):
                reason = (
                    "torch loads it from a flattened state dict only where a group already has this option: make the "
                    "scheduler, or set any value, before loading"
                )
                subject = f"{option} of groups"
                source.findings.check(Action.SET, subject, *stored, reason=reason, topic=Topic.OPTIONS)
        return [*self._entries(groups), *derived]

    @property
    def is_copied(self) -> bool:
        """Return whether groups are in the same words, and so are copied but for what rules and the user change."""
        return self.source.is_same_dialect and self.like is None

    def _translated(
        self, group: ParameterGroup, members: Collection[str], derived: list[OutputTensor | OutputItem]
    ) -> Iterator[ParameterGroup]:
        """Yield the target's groups for a group of the source, one for each set of options.

        Adds to ``derived`` the items of state that follow from a parameter's options and its shape.
        """
        parameters = self.source.listed
        options_by_kind: dict[object, WrittenOptions] = {}
        options_by_name: dict[str, Mapping[str, object]] = {}
        # The steps that the group's parameters have counted, or else those of all.
        steps = _steps(parameters[name] for name in members if name in parameters) or _steps(parameters.values())
        for name in members:
            if name not in parameters:
                self.source.findings.add(
                    f"{name} has no state, and no option says by which method; it is in no group of the target"
                )
                continue
            parameter, method = parameters[name], self.state.method(parameters[name])
            # Options depend on the rows that are split or joined, the number of steps and the template.
            template_options = self.like.options_of(name) if self.like is not None else {}
            matrices = self._matrices(parameter)
            step = parameter.step if "step" in method.options else None
            # Matrices do not count steps: an option that does gets the most that another parameter has counted.
            if "step" in method.options and (step is None or parameter.is_stateless):
                if {"first", "second"} <= method.slots.keys() and not steps:
                    raise self.state.unknown_steps(parameter)
                step = max(steps, default=self.source.choices.step or 0)
            # Most parameters of a group are of one kind, for which options are translated once.
            structure = matrices and (repr(matrices.options()), matrices.is_flat)
            unsaid = self.source.unsaid_options(parameter)
            methods, shape = (parameter.method.name, method.name), (parameter.shape, parameter.is_flattened)
            kind = *methods, step, *shape, structure, unsaid, repr(template_options)
            if kind not in options_by_kind:
                options_by_kind[kind] = self._options(group, parameter, step, template_options, matrices)
            options_by_name[name] = self._noted(parameter, options_by_kind[kind])
            # State that follows from options is not copied from the source, unless nothing changes: it is computed.
            for slot in () if self.source.is_same_dialect else method.derived:
                derived += self._computed_slot(parameter, slot)
        yield from _by_options(options_by_name, group)

    def _renamed(self, group: ParameterGroup, members: Collection[str]) -> Iterator[ParameterGroup]:
        """Yield a group with its stored options, but for those that rules and the user change for its parameters."""
        step, listed, changes_by_name = self.source.choices.step, self.source.listed, dict[str, dict[str, object]]()
        stepped = (self.target.options_called("step") | {STEP}) & group.entries.keys()
        for name in members:
            changes_by_name[name] = dict.fromkeys(stepped, step) if step is not None else {}
            if (parameter := listed.get(name)) is not None:
                if unsaid := self.source.unsaid_options(parameter):
                    self.unsaid[name] = unsaid & group.options.keys()
                matrices = self._matrices(parameter) if parameter.regrouped else None
                if matrices is None:
                    continue
                # Rules have split or joined the parameter, so options say other matrices.
                options = {option: group.options[option] for option in group.entries if option != PARAMS}
                written = restructured_options(options, self.target, parameter.method, matrices, parameter.shape)
                restructured = self._noted(parameter, written)
                for option in options.keys() | restructured.keys():
                    value = restructured.get(option, _GONE)
                    if repr(as_tuples(value)) != repr(as_tuples(options.get(option, _GONE))):
                        changes_by_name[name][option] = value
        for made in _by_options(changes_by_name, group) if members else (replace(group, parameters=(), options={}),):
            names, changes, new_names = made.parameters, {**made.options}, self.source.new_names
            # The user's number of steps goes where AdamW looks for it, if it has no counters.
            counted = [listed[name] for name in names if name in listed and not listed[name].is_stateless]
            averages = [p for p in counted if {"first", "second"} <= p.slots.keys() and STEP not in p.method.slots]
            if step is not None and STEP not in group.entries and averages:
                changes[STEP] = step
            # A group may list names once more: its members', or all of a group with them.
            if NAMES in group.entries and new_names:
                all_names = group.options[NAMES]
                renamed = chain.from_iterable(new_names.get(name, (name,)) for name in all_names)
                changes[NAMES] = [*names] if {*all_names} <= {*group.parameters} else [*dict.fromkeys(renamed)]
            is_whole = names == group.parameters
            entries = {option: e for option, e in group.entries.items() if is_whole or option != PARAMS} | changes
            yield replace(made, options={o: value for o, value in entries.items() if value is not _GONE})

    def _matrices(self, parameter: TranslatedParameter) -> Matrices | None:
        """Return the matrices in a parameter, if not those of its options; tell of unknown ones."""
        is_changed = parameter.regrouped and "momentum" in parameter.method.slots
        matrices = parameter.matrices if is_changed else None
        if (matrices is None or not matrices.is_known) and parameter.sources:
            reasons = (hides_pieces(source, self.source.dialect, self.source.values) for source in parameter.sources)
            if reason := next(filter(None, reasons), ""):
                hint = self.source.dialect.hints.get("pieces", "give pieces where the optimizer is made")
                reason += f", and no option says how: {hint}"
                self.source.findings.check(
                    Action.SET, f"pieces of {parameter.name}", reason=reason, topic=Topic.OPTIONS
                )
                return UNKNOWN
        if matrices is not None and matrices.options() is None:
            reason = "its parts are cut into matrices in several ways, and no options say that"
            self.source.findings.check(Action.SET, f"pieces of {parameter.name}", reason=reason, topic=Topic.OPTIONS)
        return matrices

    def _report_matrices(self) -> None:
        """Report which matrices rules have made, where no groups are written that could say it."""
        for parameter in self.source.stateful:
            if (matrices := self._matrices(parameter)) is None or (common := matrices.options()) is None:
                continue
            told = {name: value for name, value in common.items() if value not in (None, 1, False)}
            for name, value in told.items() if common["pieces"] or common["columns"] else ():
                reason = f"rules have joined it, and no groups of {self.target.name} are written that say it"
                self.source.findings.check(Action.SET, f"{name} of {parameter.name}", repr(value), reason=reason)

    def _computed_slot(self, parameter: TranslatedParameter, slot: str) -> Iterator[OutputTensor | OutputItem]:
        """Yield a slot that follows from a parameter's options and its shape, if they tell it."""
        group, matrices, shape = parameter.group, self._matrices(parameter), parameter.shape
        if group is None or (matrices is not None and not matrices.is_known):
            return
        common = common_options(group.options, self.source.dialect, parameter.method, shape).common
        if matrices is not None:
            common = {**common, **common_structure(matrices, shape)}
        if (value := self.state.method(parameter).derived[slot](common, shape)) is not None:
            yield written_at(self.state.path(parameter, slot), value)

    def own_derived(self) -> Iterator[OutputTensor | OutputItem]:
        """Yield the slots that follow from options, for the source's own program; computed where rules change them."""
        for parameter in self.source.parameters.values():
            for slot in sorted(self.source.dialect.derived - self.source.left_slots):
                # The first of several parts says it for the whole.
                entry = next((source.slots[slot] for source in parameter.sources if slot in source.slots), None)
                if entry is not None and parameter.regrouped:
                    yield from self._computed_slot(parameter, slot)
                elif entry is not None:
                    yield written_at(self.state.path(parameter, slot), entry)

    def _options(
        self,
        group: ParameterGroup,
        parameter: TranslatedParameter,
        step: int | None,
        template_options: Mapping[str, object],
        matrices: Matrices | None,
    ) -> WrittenOptions:
        """Return the options of a group in the target's words; the template's count where the source says nothing."""
        source, target, method, shape = self.source, self.target, self.state.method(parameter), parameter.shape
        # Within one program, or a family, options keep their words; only those of another convention go.
        own = parameter.method
        if own.name == method.name and (own is method or (own.family is not None and own.family == method.family)):
            is_rescaled = source.choices.target_convention not in (None, source.dialect.convention)
            omitted = target.unwritten_options if is_rescaled else ()
            options = {option: group.options[option] for option in group.options if option not in omitted}
            findings, unsaid = list[Check](), source.unsaid_options(parameter)
            if matrices is not None and parameter.regrouped:
                restructured = restructured_options(options, target, method, matrices, shape)
                options, findings = dict(restructured.options), [*restructured.findings]
            for coding in method.codings:
                stated = {option: options[option] for option in coding.options if option in options}
                if coding.write(coding.read(stated, shape), shape) is None:
                    values = ", ".join(f"{option}={value!r}" for option, value in stated.items())
                    reason = f"unknown to {target.name}"
                    findings.append(Check(Action.SET, values, (), reason))
            requested_step, step_option = source.choices.step, method.options.get("step")
            if requested_step is not None and step_option in options:
                options[step_option] = requested_step
            return WrittenOptions({**template_options, **options}, unsaid & options.keys(), tuple(findings))
        unsaid = source.unsaid_options(parameter)
        said_options = {option: group.options[option] for option in group.options if option not in unsaid}
        stored = common_options(said_options, source.dialect, parameter.method, shape)
        common = dict(stored.common) if step is None else {**stored.common, "step": step}
        if matrices is not None:
            common = {name: value for name, value in common.items() if name not in FUSION}
            common |= common_structure(matrices, shape)
        # Momentum that is stored as a matrix was flattened, and so was one of more dims than a stack of matrices has.
        has_kernel_dims = len(shape) > 3 and FLATTEN not in stored.common and "momentum" in parameter.method.slots
        if parameter.is_flattened or has_kernel_dims:
            common[FLATTEN] = True
        stored, program = replace(stored, common=common), source.dialect
        writer = OptionWriter(program, target, parameter.method, method, said_options, stored, shape)
        written = writer.write(template_options)
        if not (parameter.is_flattened or has_kernel_dims):
            return written
        evidence = (
            "its momentum is stored as a matrix" if parameter.is_flattened else f"the parameter has {len(shape)} dims"
        )
        reason = f"{source.dialect.name} does not say it, but {evidence}"
        flattened = Check(Action.SET, FLATTEN, ("True",), reason)
        return replace(written, findings=(*written.findings, flattened))

    def _noted(self, parameter: TranslatedParameter, written: WrittenOptions) -> Mapping[str, object]:
        """Return the options of a parameter's group; note what the report and the manifest say of them."""
        for finding in written.findings:
            self.option_findings[self.state.method(parameter).name, finding].append(parameter.listed)
        if written.unsaid:
            self.unsaid[parameter.listed] = written.unsaid
        return written.options

    def _number(self, groups: Collection[ParameterGroup]) -> None:
        """Number the parameters of the target's groups, if the target has numbers and the source has not.

        torch numbers them in the order of the run's groups, which the source's list or a template has.  Otherwise a
        number would be a guess, by which momentum would silently go to another parameter of the same shape.
        """
        source, target = self.source, self.target
        if not target.numbered or source.dialect.numbered:
            return
        # The order of the run's groups has to be known.
        if self.like is None and not (source.groups and all(group.positions for group, _ in source.groups)):
            state = (
                "keeps options by parameter, without an order" if source.groups else "does not say what its groups are"
            )
            raise SourceError(
                f"{target.name} numbers parameters in the order of the run's groups, and {source.dialect.name} "
                f"{state}; give that order with `like=`"
            )
        names = list(chain.from_iterable(group.parameters for group in groups))
        if self.like is not None and not source.groups:
            names = list(chain.from_iterable(template[PARAMS] for template in self.like.groups))
        members = set[str]().union(*(members for _, members in source.groups))
        if ungrouped := sorted(members - set(names)):
            raise SourceError(
                f"nothing says by which method these members of the source's groups are updated: "
                f"{listed(map(repr, ungrouped), 1)}; so they are in no group of {target.name}, and all numbers after "
                "them would be wrong"
            )
        # From here on keys of state have numbers.
        self.state.numbers = {name: str(number) for number, name in enumerate(names)}
        self.source.findings.check(
            Action.SET,
            "the order of parameters in the optimizer",
            *(f"{number} {name}" for name, number in self.state.numbers.items()),
            reason=f"{target.name} knows them by number; the run's groups must list them so",
        )

    def _entries(self, groups: Sequence[ParameterGroup]) -> Iterator[OutputTensor | OutputItem]:
        """Yield the options of the target's groups: copies of stored ones, and values."""
        keys, counts, numbers = self.target.keys, Counter[str](), self.state.numbers
        # With flat keys, torch takes groups with equal values for one.
        names_by_values: defaultdict[str, list[str]] = defaultdict(list)
        for group in () if self.is_copied else groups:
            names_by_values[repr(sorted(group.options.items()))] += group.parameters
        # The target may look up the options of a stored name under several other names; it reads them all.
        names_in_groups = (parameter.listed for parameter in self.source.parameters.values())
        other_names: defaultdict[str, list[tuple[str, tuple[str, ...]]]] = defaultdict(list)
        for name, parts in self.target.listed_names((*self.source.parameters, *names_in_groups)).items():
            other_names[parts[0]].append((name, parts))
        for group in groups:
            options, names = dict(group.options), group.parameters
            is_listed = bool(group.positions) if self.is_copied else keys.listed
            if self.target.names_option and not self.is_copied:
                same_names = names_by_values[repr(sorted(group.options.items()))]
                options[self.target.names_option] = list(names) if is_listed else same_names
            if is_listed:
                # A list keeps its numbers, but a group that is added moves those after it.
                chain_name = group.chain if keys.chained else ""
                number = max((counts[chain_name], *(group.positions if self.is_copied else ())))
                counts[chain_name] = number + 1
                places = [(str(number), chain_name)]
                listing = [int(numbers.get(name, name)) for name in names] if self.target.numbered else list(names)
                options.setdefault(PARAMS, listing)
            else:
                # Options by name are in the optimizer of each parameter.
                listed = self.source.listed
                chains = {n: group.chain if self.is_copied else self.state.chain(listed[n]) for n in names}
                places = [*chains.items()]
                for member, chain_name in chains.items():
                    others = other_names.get(member, ())
                    places += [(n, chain_name) for n, parts in others if {*map(chains.get, parts)} == {chain_name}]
            for option, value in options.items():
                yield from (written_at(keys.write_option(name, option, chain), value) for name, chain in places)

    def _common_state(self, groups: Iterable[ParameterGroup], items: Iterable[Blob]) -> dict[Any, Any]:
        """Return Megatron's common state: that in the source's items, with its optimizers written again.

        These have groups without parameters, and AdamW's step.  The optimizer of a chain prefix is nested in dicts by
        its numbers: ``chained_0.`` becomes ``{0: …}``.

        Raises:
            SourceError: what the source has beside optimizers is more than plain data; or Megatron has no place for
                several steps or methods in one optimizer.
        """
        state: dict[Any, Any] = {}
        for item in items:
            try:
                stored = self.source.values.item(item)
            except SourceError as error:
                raise SourceError(_FIXED_COMMON_STATE.format(self.target.name, error)) from error
            match stored:
                case [{**content}] | {**content}:
                    state |= {key: value for key, value in content.items() if key != "optimizer"}
        # The optimizer of each chain, with its groups, and the step that AdamW counts for all parameters.
        optimizers: defaultdict[tuple[int, ...], dict[str, Any]] = defaultdict(dict)
        methods_by_chain: defaultdict[str, set[str]] = defaultdict(set)
        for group in groups:
            members = [self.source.listed[name] for name in group.parameters if name in self.source.listed]
            chain_prefix = self.state.chain(members[0])
            optimizer = optimizers[tuple(map(int, re.findall("[0-9]+", chain_prefix)))]
            methods_by_chain[chain_prefix] |= {self.state.method(member).name for member in members}
            optimizer.setdefault(PARAM_GROUPS, []).append(dict(group.options))
            self.members.setdefault(chain_prefix, []).append([*group.parameters])
            adamw = (parameter for parameter in members if "first" in parameter.method.slots)
            for step in {parameter.step for parameter in adamw if parameter.step is not None}:
                if optimizer.setdefault("state", {"common_step": step}) != {"common_step": step}:
                    raise SourceError(
                        f"Megatron stores one step for an optimizer, but found {optimizer['state']} and {step}"
                    )
        for chain_prefix, methods in methods_by_chain.items():
            if chain_prefix and len(methods) > 1:
                raise SourceError(
                    f"{' and '.join(sorted(methods))} would both be {chain_prefix[:-1]} of {self.target.name}, and "
                    "Megatron steps all of one optimizer by one method; convert a copy without the state of one of "
                    "them, by `select=`"
                )
        # Nested as Megatron nests optimizers in each other.
        for numbers_of_chain, optimizer in optimizers.items():
            node = state.setdefault("optimizer", {})
            for number in numbers_of_chain:
                node = node.setdefault(number, {})
            node["optimizer"] = optimizer
        return state


def _by_options(
    options_by_name: Mapping[str, Mapping[str, object]], source: ParameterGroup
) -> Iterator[ParameterGroup]:
    """Yield a group of the source for each set of options, with the parameters that have these."""
    names: defaultdict[str, list[str]] = defaultdict(list)
    for name, options in options_by_name.items():
        names[repr(sorted(options.items()))].append(name)
    for members in names.values():
        yield replace(source, parameters=tuple(members), options=options_by_name[members[0]])


def _steps(parameters: Iterable[TranslatedParameter]) -> set[int]:
    return {p.step for p in parameters if p.step is not None and not p.is_stateless}
