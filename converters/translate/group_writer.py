"""Writes the parameter groups of a translated model: split by what their options mean, or copied with new names."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from ...names.errors import SourceError
from ...names.keys import PARAM_GROUPS
from ...names.resumption import as_tuples
from ...names.vocabulary import FLATTEN, FUSION, HISTORY_OPTIONS, PARAMS, STEP
from ...names.wording import listed
from ...programs.model_view import ParameterGroup
from ...programs.signs import GROUP_MEMBERS
from ..engine.outputs import Action, Check, OutputItem, OutputTensor, Topic
from .groups import OptionWriter, WrittenOptions, common_options, common_structure, restructured_options
from .parameters import TranslatedModel
from .parse import NAMES, merge_equal
from .state_writer import StateWriter, unknown_steps, written_at
from .structure import TranslatedParameter

_FIXED_COMMON_STATE = (
    "the common state cannot be rewritten for {}: {}; convert the source to muonckpt, which has no use for it, and "
    "then the result"
)

_GONE = object()
"""The value of an option that a group no longer has."""


@dataclass(frozen=True, slots=True)
class TargetGroups:
    """The groups of a target: with options in its words, or copied, with entries of the source but for what changes.

    Attributes:
        options: of each member, by name, with what the report says of them; where groups are copied, what changes.
        numbers: what keys of state have in place of names, if the target knows parameters by number.
    """

    groups: Sequence[ParameterGroup]
    options: Mapping[str, WrittenOptions]
    numbers: Mapping[str, str]


def translate_groups(model: TranslatedModel) -> TargetGroups:
    """Return the groups of a model for its target; none where it copies their item whole, or the source has none."""
    target, like, findings = model.target, model.choices.like, model.findings
    if model.copies_common_state and target.chains and not model.is_same_dialect:
        reason = "it does not say which parameters are in which group"
        raise SourceError(_FIXED_COMMON_STATE.format(target.name, reason))
    if model.copies_common_state or not model.groups:
        findings.add(
            "the common state is copied unchanged, with its groups"
            if model.copies_common_state
            else "the source does not say which parameters are in which group; no groups are written"
        )
        # No options can say which matrices rules have made.
        for parameter in model.stateful:
            common = parameter.target_matrices and parameter.target_matrices.options()
            told = {name: value for name, value in (common or {}).items() if value not in (None, 1, False)}
            for name, value in told.items() if common and (common["pieces"] or common["columns"]) else ():
                reason = f"rules have joined it, and no groups of {target.name} are written that say it"
                findings.check(Action.SET, f"{name} of {parameter.name}", repr(value), reason=reason)
        return TargetGroups((), {}, _parameter_numbers(model, ()))
    # A group is split where its parameters get different options.
    groups, options = list[ParameterGroup](), dict[str, WrittenOptions]()
    for group, members in model.groups:
        member_options = _changed_options if model.copies_groups else _translated_options
        written = member_options(model, group, members)
        options |= written
        new_groups = [*_by_options(written, group)]
        if model.copies_groups:
            new_groups = new_groups if members else [replace(group, parameters=(), options={})]
            new_groups = [_with_changes(model, group, new_group) for new_group in new_groups]
        groups += new_groups
    if not model.copies_groups:
        groups = merge_equal(groups)
        groups = like.arrange(groups, target, findings) if like is not None else groups
    numbers = _parameter_numbers(model, groups)
    # torch drops the options that schedulers put into groups when it loads a flat state dict.
    is_flat = any(place.flat for place in target.keys.optimizers) and not model.copies_groups
    for option in sorted(HISTORY_OPTIONS) if is_flat and target.common is None else ():
        if stored := sorted({repr(group.options[option]) for group in groups if option in group.options}):
            reason = (
                "torch loads it from a flattened state dict only where a group already has this option: make the "
                "scheduler, or set any value, before loading"
            )
            findings.check(Action.SET, f"{option} of groups", *stored, reason=reason, topic=Topic.OPTIONS)
    return TargetGroups(groups, options, numbers)


def write_groups(model: TranslatedModel, target_groups: TargetGroups) -> Iterator[OutputTensor | OutputItem]:
    """Yield the options of the target's groups: copies of stored ones, and values."""
    target, keys = model.target, model.target.keys
    if target.common is not None and not model.copies_common_state and model.groups:
        yield written_at(target.common, [_common_state(model, target_groups.groups)])
        return
    # With flat keys, torch takes groups with equal values for one.
    names_by_values: defaultdict[str, list[str]] = defaultdict(list)
    for group in () if model.copies_groups else target_groups.groups:
        names_by_values[repr(sorted(group.options.items()))] += group.parameters
    # The target may look up the options of a stored name under several other names; it reads them all.
    names_in_groups = (parameter.listed for parameter in model.parameters.values())
    other_names: defaultdict[str, list[tuple[str, tuple[str, ...]]]] = defaultdict(list)
    for name, parts in target.listed_names((*model.parameters, *names_in_groups)).items():
        other_names[parts[0]].append((name, parts))
    counts = Counter[str]()
    for group in target_groups.groups:
        options, names = dict(group.options), group.parameters
        is_listed = bool(group.positions) if model.copies_groups else keys.listed
        if target.names_option and not model.copies_groups:
            same_names = names_by_values[repr(sorted(group.options.items()))]
            options[target.names_option] = list(names) if is_listed else same_names
        if is_listed:
            # A list keeps its numbers, but a group that is added moves those after it.
            chain_name = group.chain if keys.chained else ""
            number = max((counts[chain_name], *(group.positions if model.copies_groups else ())))
            counts[chain_name] = number + 1
            places = [(str(number), chain_name)]
            numbered = [target_groups.numbers.get(name, name) for name in names]
            options.setdefault(PARAMS, [*map(int, numbered)] if target.numbered else list(names))
        else:
            # Options by name are in the optimizer of each parameter.
            chains = {n: group.chain if model.copies_groups else model.listed[n].chain for n in names}
            places = [*chains.items()]
            for member, chain_name in chains.items():
                others = other_names.get(member, ())
                places += [(n, chain_name) for n, parts in others if {*map(chains.get, parts)} == {chain_name}]
        for option, value in options.items():
            yield from (written_at(keys.write_option(name, option, chain), value) for name, chain in places)


def common_members(model: TranslatedModel, groups: Iterable[ParameterGroup]) -> dict[str, list[list[str]]]:
    """Return the parameters of groups that Megatron's common state has without names, by optimizer."""
    members: defaultdict[str, list[list[str]]] = defaultdict(list)
    if model.copies_common_state:
        for chain_name, old_groups in model.manifest.provenance.get(GROUP_MEMBERS, {}).items():
            for names in old_groups:
                new_names = chain.from_iterable(model.new_names.get(name, (name,)) for name in names)
                members[chain_name].append([*dict.fromkeys(new_names)])
    elif model.target.common is not None:
        for group in groups:
            members[model.listed[group.parameters[0]].chain].append([*group.parameters])
    return members


# Options of the members of a group.


def _translated_options(
    model: TranslatedModel, group: ParameterGroup, members: Collection[str]
) -> dict[str, WrittenOptions]:
    """Return the options of each member of a group in the target's words."""
    parameters, like = model.listed, model.choices.like
    options_by_kind: dict[object, WrittenOptions] = {}
    options_by_name: dict[str, WrittenOptions] = {}
    # The steps that the group's parameters have counted, or else those of all.
    counts = {name: p.step for name, p in parameters.items() if p.step is not None and not p.is_stateless}
    steps = {counts[name] for name in members if name in counts} or {*counts.values()}
    for name in members:
        if name not in parameters:
            model.findings.add(
                f"{name} has no state, and no option says by which method; it is in no group of the target"
            )
            continue
        parameter, method = parameters[name], parameters[name].target_method
        # Options depend on the rows that are split or joined, the number of steps and the template.
        template_options = like.options_of(name) if like is not None else {}
        step = parameter.step if "step" in method.options else None
        # Matrices do not count steps: an option that does gets the most that another parameter has counted.
        if "step" in method.options and (step is None or parameter.is_stateless):
            if {"first", "second"} <= method.slots.keys() and not steps:
                raise unknown_steps(parameter, model.target)
            step = max(steps, default=model.choices.step or 0)
        # Most parameters of a group are of one kind, for which options are translated once.
        matrices = parameter.target_matrices
        structure = matrices and (repr(matrices.options()), matrices.is_flat)
        methods, shape = (parameter.method.name, method.name), (parameter.shape, parameter.is_flattened)
        kind = *methods, step, *shape, structure, parameter.unsaid, repr(template_options)
        if kind not in options_by_kind:
            options_by_kind[kind] = _options_of_kind(model, group, parameter, step, template_options)
        options_by_name[name] = options_by_kind[kind]
    return options_by_name


def _changed_options(
    model: TranslatedModel, group: ParameterGroup, members: Collection[str]
) -> dict[str, WrittenOptions]:
    """Return the stored options of a group that rules and the user change, for each of its members."""
    step, stepped = model.choices.step, (model.target.options_called("step") | {STEP}) & group.entries.keys()
    written_by_name: dict[str, WrittenOptions] = {}
    for name in members:
        changes: dict[str, object] = dict.fromkeys(stepped, step) if step is not None else {}
        written_by_name[name] = WrittenOptions(changes)
        if (parameter := model.listed.get(name)) is None:
            continue
        findings: tuple[Check, ...] = ()
        if (matrices := parameter.target_matrices) is not None:
            # Rules have split or joined the parameter, so options say other matrices.
            options = {option: group.options[option] for option in group.entries if option != PARAMS}
            written = restructured_options(options, model.target, parameter.method, matrices, parameter.shape)
            findings = written.findings
            for option in options.keys() | written.options.keys():
                value = written.options.get(option, _GONE)
                if repr(as_tuples(value)) != repr(as_tuples(options.get(option, _GONE))):
                    changes[option] = value
        written_by_name[name] = WrittenOptions(changes, parameter.unsaid & group.options.keys(), findings)
    return written_by_name


def _with_changes(model: TranslatedModel, group: ParameterGroup, members: ParameterGroup) -> ParameterGroup:
    """Return a group of some members of a stored one, with its options but for their changes."""
    step, names, changes, new_names = model.choices.step, members.parameters, {**members.options}, model.new_names
    # The user's number of steps goes where AdamW looks for it, if it has no counters.
    counted = [p for p in map(model.listed.get, names) if p is not None and not p.is_stateless]
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
    return replace(members, options={o: value for o, value in entries.items() if value is not _GONE})


def _options_of_kind(
    model: TranslatedModel,
    group: ParameterGroup,
    parameter: TranslatedParameter,
    step: int | None,
    template_options: Mapping[str, object],
) -> WrittenOptions:
    """Return the options of a group in the target's words; the template's count where the source says nothing."""
    target, own, method, shape = model.target, parameter.method, parameter.target_method, parameter.shape
    matrices, unsaid = parameter.target_matrices, parameter.unsaid
    # Within one program, or a family, options keep their words; only those of another convention go.
    if own.name == method.name and (own is method or (own.family is not None and own.family == method.family)):
        is_rescaled = model.choices.target_convention not in (None, model.dialect.convention)
        omitted = target.unwritten_options if is_rescaled else ()
        options = {option: group.options[option] for option in group.options if option not in omitted}
        written = WrittenOptions(options)
        if matrices is not None and parameter.regrouped:
            written = restructured_options(options, target, method, matrices, shape)
        findings, options = [*written.findings], {**template_options, **written.options}
        for coding in method.codings:
            stated = {option: written.options[option] for option in coding.options if option in written.options}
            if coding.write(coding.read(stated, shape), shape) is None:
                values = ", ".join(f"{option}={value!r}" for option, value in stated.items())
                findings.append(Check(Action.SET, values, (), f"unknown to {target.name}"))
        if model.choices.step is not None and method.options.get("step") in written.options:
            options[method.options["step"]] = model.choices.step
        return WrittenOptions(options, unsaid & written.options.keys(), tuple(findings))
    said_options = {option: group.options[option] for option in group.options if option not in unsaid}
    stored = common_options(said_options, model.dialect, own, shape)
    common = dict(stored.common) if step is None else {**stored.common, "step": step}
    if matrices is not None:
        common = {name: value for name, value in common.items() if name not in FUSION}
        common |= common_structure(matrices, shape)
    # Momentum that is stored as a matrix was flattened, and so was one of more dims than a stack of matrices has.
    evidence = ""
    if parameter.is_flattened:
        evidence = "its momentum is stored as a matrix"
    elif len(shape) > 3 and FLATTEN not in stored.common and "momentum" in own.slots:
        evidence = f"the parameter has {len(shape)} dims"
    if evidence:
        common[FLATTEN] = True
    stored = replace(stored, common=common)
    written = OptionWriter(
        model.dialect, target=target, source_method=own, method=method, options=said_options, stored=stored, shape=shape
    ).write(template_options)
    if not evidence:
        return written
    reason = f"{model.dialect.name} does not say it, but {evidence}"
    return replace(written, findings=(*written.findings, Check(Action.SET, FLATTEN, ("True",), reason)))


def _parameter_numbers(model: TranslatedModel, groups: Iterable[ParameterGroup]) -> Mapping[str, str]:
    """Return the numbers of parameters by name, if the target knows them by number.

    torch numbers them in the order of the run's groups, which the source's list or a template has.  Otherwise a
    number would be a guess, by which momentum would silently go to another parameter of the same shape.
    """
    target, like = model.target, model.choices.like
    if not target.numbered:
        return {}
    if model.dialect.numbered:
        return {name: number for number, name in model.view.names.items()}
    # The order of the run's groups has to be known.
    if like is None and not (model.groups and all(group.positions for group, _ in model.groups)):
        state = "keeps options by parameter, without an order" if model.groups else "does not say what its groups are"
        raise SourceError(
            f"{target.name} numbers parameters in the order of the run's groups, and {model.dialect.name} "
            f"{state}; give that order with `like=`"
        )
    names = list(chain.from_iterable(group.parameters for group in groups))
    if like is not None and not model.groups:
        names = list(chain.from_iterable(template[PARAMS] for template in like.groups))
    members = set[str]().union(*(members for _, members in model.groups))
    if ungrouped := sorted(members - set(names)):
        raise SourceError(
            f"nothing says by which method these members of the source's groups are updated: "
            f"{listed(map(repr, ungrouped), 1)}; so they are in no group of {target.name}, and all numbers after "
            "them would be wrong"
        )
    model.findings.check(
        Action.SET,
        "the order of parameters in the optimizer",
        *(f"{number} {name}" for number, name in enumerate(names)),
        reason=f"{target.name} knows them by number; the run's groups must list them so",
    )
    return {name: str(number) for number, name in enumerate(names)}


def _common_state(model: TranslatedModel, groups: Iterable[ParameterGroup]) -> dict[Any, Any]:
    """Return Megatron's common state: that in the source's items, with its optimizers written again.

    These have groups without parameters, and AdamW's step.  The optimizer of a chain prefix is nested in dicts by
    its numbers: ``chained_0.`` becomes ``{0: …}``.

    Raises:
        SourceError: what the source has beside optimizers is more than plain data; or Megatron has no place for
            several steps or methods in one optimizer.
    """
    state: dict[Any, Any] = {}
    for item in model.common_items:
        try:
            stored = model.values.item(item)
        except SourceError as error:
            raise SourceError(_FIXED_COMMON_STATE.format(model.target.name, error)) from error
        match stored:
            case [{**content}] | {**content}:
                state |= {key: value for key, value in content.items() if key != "optimizer"}
    # The optimizer of each chain, with its groups, and the step that AdamW counts for all parameters.
    optimizers: defaultdict[tuple[int, ...], dict[str, Any]] = defaultdict(dict)
    methods_by_chain: defaultdict[str, set[str]] = defaultdict(set)
    for group in groups:
        members = [model.listed[name] for name in group.parameters if name in model.listed]
        chain_prefix = members[0].chain
        optimizer = optimizers[tuple(map(int, re.findall("[0-9]+", chain_prefix)))]
        methods_by_chain[chain_prefix] |= {member.target_method.name for member in members}
        optimizer.setdefault(PARAM_GROUPS, []).append(dict(group.options))
        adamw = (parameter for parameter in members if "first" in parameter.method.slots)
        for step in {parameter.step for parameter in adamw if parameter.step is not None}:
            if optimizer.setdefault("state", {"common_step": step}) != {"common_step": step}:
                raise SourceError(
                    f"Megatron stores one step for an optimizer, but found {optimizer['state']} and {step}"
                )
    for chain_prefix, methods in methods_by_chain.items():
        if chain_prefix and len(methods) > 1:
            raise SourceError(
                f"{' and '.join(sorted(methods))} would both be {chain_prefix[:-1]} of {model.target.name}, and "
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


def _by_options(written: Mapping[str, WrittenOptions], source: ParameterGroup) -> Iterator[ParameterGroup]:
    """Yield a group of the source for each set of options, with the parameters that have these."""
    names: defaultdict[str, list[str]] = defaultdict(list)
    for name, member in written.items():
        names[repr(sorted(member.options.items()))].append(name)
    for members in names.values():
        yield replace(source, parameters=tuple(members), options=written[members[0]].options)


# State that follows from options.


def derived_slots(
    model: TranslatedModel, groups: TargetGroups, state: StateWriter
) -> Iterator[OutputTensor | OutputItem]:
    """Yield slots that follow from options: as the source has them, if program and options stay; else computed."""
    slots: list[tuple[TranslatedParameter, str]] = []
    if model.is_same_dialect:
        own_slots = sorted(model.dialect.derived - model.left_slots)
        for parameter in model.parameters.values():
            for slot in own_slots:
                # The first of several parts says it for the whole.
                entries = parameter.entries.get(slot, ())
                if entries and parameter.regrouped:
                    slots.append((parameter, slot))
                elif entries:
                    yield written_at(state.path(parameter, slot), entries[0])
    else:
        for parameter in map(model.listed.__getitem__, groups.options):
            slots += [(parameter, slot) for slot in parameter.target_method.derived]
    for parameter, slot in slots:
        group, matrices, shape = parameter.group, parameter.target_matrices, parameter.shape
        if group is None or (matrices is not None and not matrices.is_known):
            continue
        common = common_options(group.options, model.dialect, parameter.method, shape).common
        if matrices is not None:
            common = {**common, **common_structure(matrices, shape)}
        if (value := parameter.target_method.derived[slot](common, shape)) is not None:
            yield written_at(state.path(parameter, slot), value)
