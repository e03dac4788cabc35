"""Rewrites the parameter groups of a translated checkpoint: the same options for the same parameters."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ...box import Index
from ...errors import SourceError
from ...record import StateRecord
from ...store.formats.torch_save.plain_item import plain_item
from ...vocabulary import PARAMS, SCHEDULED, KeyPath
from ..engine.checklist import Action, Findings
from ..engine.outputs import OutputItem, Outputs, OutputTensor
from .context import Context
from .dialect import Dialect, key_of
from .group_options import SourceGroup, TargetGroup, merge_equal, read_options, write_options
from .numbering import numbers_of
from .output_tensors import carried_tensor
from .source_parameters import Param, SlotTensors, shapes_by_name

JoinedRows = tuple[tuple[int, ...], int]
"""Rows of the parts that were joined to a parameter, in one turn, and the number of turns."""

_NONE: Mapping[str, str] = MappingProxyType({})


class Regrouped(NamedTuple):
    """The target's groups as ``outputs``, and the ``numbers`` of parameters, by name, if it has numbers for names."""

    outputs: Outputs
    numbers: Mapping[str, str] = _NONE


def regroup(
    context: Context,
    groups: tuple[SourceGroup, ...],
    names: list[tuple[str, ...]],
    by_slot: SlotTensors,
    params: Mapping[str, Param],
    findings: Findings,
) -> Regrouped:
    """The target's groups, as items and tensors; ``findings`` hears of every difference from the source.

    Args:
        names: the target's names of each group's parameters.

    Raises:
        SourceError: parts of one parameter are in groups with different options, or the target numbers parameters and
            their order is not known.
    """
    if any(context.target.holds_groups(item.path) for item in context.roles.items):
        if context.target.chains:
            raise SourceError(f"the groups in {context.target.common} cannot be rewritten for {context.target.name}")
        findings.add("the common state is copied unchanged, with its groups")
        return Regrouped(Outputs(()))
    if not groups:
        numbers = numbers_of(context, groups, names, (), findings)
        findings.add("the source does not say which parameters are in which group; no groups are written")
        return Regrouped(Outputs(()), numbers)
    if context.same_dialect and context.like is None:
        return Regrouped(_renamed(context, groups, names))
    shapes = shapes_by_name(by_slot)
    fused = {tensor.group: tensor.fused for tensors in by_slot.values() for tensor in tensors.values() if tensor.fused}
    by_group = {
        tensor.group: params[name] for tensors in by_slot.values() for name, tensor in tensors.items() if name in params
    } | {name: param for name, param in params.items() if param.stateless}
    pairs = zip(groups, names, strict=True)
    translated = [
        new
        for group, members in pairs
        for new in _target_groups(context, group, members, by_group, shapes, fused, findings)
    ]
    written = merge_equal(new for new, _ in translated)
    if context.like is not None:
        written = context.like.arranged(written, context.target, findings)
    derived = [item for _, items in translated for item in items]
    if context.target.common is not None:
        return Regrouped(Outputs((), [_item(context.target.common, [_common(written, by_group)])]))
    numbers = numbers_of(context, groups, names, written, findings)
    _report_schedules(context.target, written, findings)
    return Regrouped(Outputs((), [*_items(context.target, written, numbers), *derived]), numbers)


def _report_schedules(target: Dialect, groups: Iterable[TargetGroup], findings: Findings) -> None:
    """Report what schedulers have put into groups if torch would drop it, as it does of flattened state dicts."""
    if target.option is None or "param_groups.{name}.{option}" not in str(target.option):
        return
    said = {(option, repr(group.options[option])) for group in groups for option in SCHEDULED & group.options.keys()}
    for option in sorted({option for option, _ in said}):
        values = sorted(value for name, value in said if name == option)
        reason = (
            "of a flattened state dict torch loads it only into groups that have it: make the scheduler, or set any "
            "value, before loading"
        )
        findings.check(Action.SET, f"{option} of groups", *values, reason=reason)


def names_of_groups(context: Context, groups: tuple[SourceGroup, ...], by_slot: SlotTensors) -> list[tuple[str, ...]]:
    """The target's names of each group's parameters; a name is in the first group that has a part of it."""
    new_names: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for tensors in by_slot.values():
        for tensor in tensors.values():
            for alias in tensor.aliases:
                new_names[alias][tensor.group] = None
    first: dict[str, SourceGroup] = {}
    names: list[tuple[str, ...]] = []
    for group in groups:
        members = dict.fromkeys(new for name in group.params for new in new_names.get(name, {name: None}))
        for name in members.keys() & first.keys():
            _check_equal(context, name, first[name], group)
        names.append(tuple(name for name in members if name not in first))
        first |= dict.fromkeys(names[-1], group)
    return names


def _check_equal(context: Context, name: str, one: SourceGroup, other: SourceGroup) -> None:
    """Check that two groups with parts of the same parameter have equal options.

    Raises:
        SourceError: they differ.
    """
    for option in (one.items.keys() | other.items.keys()) - {PARAMS}:
        values = [context.values.read(group.items[option]) if option in group.items else None for group in (one, other)]
        if repr(values[0]) != repr(values[1]):
            raise SourceError(f"parts of {name!r} are in groups with {option}={values[0]!r} and {option}={values[1]!r}")


def _target_groups(
    context: Context,
    group: SourceGroup,
    names: tuple[str, ...],
    by_group: Mapping[str, Param],
    shapes: Mapping[str, Index],
    fused: Mapping[str, JoinedRows],
    findings: Findings,
) -> Iterator[tuple[TargetGroup, list[OutputItem]]]:
    """The target's groups for a group of the source, one for each set of options, with what follows from these."""
    known: dict[object, Mapping[str, object]] = {}
    members: defaultdict[str, list[str]] = defaultdict(list)
    options: dict[str, Mapping[str, object]] = {}
    derived: defaultdict[str, list[OutputItem]] = defaultdict(list)
    common_steps = _steps(by_group[name] for name in names if name in by_group)
    for name in names:
        if name not in by_group:
            findings.add(f"{name} has no state, and no option says by which method; it is in no group of the target")
            continue
        param, shape = by_group[name], shapes.get(name, ())
        step = _step_of_group(context, param, common_steps or _steps(by_group.values()))
        given = context.like.options_of(name) if context.like is not None else {}
        split = _splits_unsaid(context, group, param, shape, findings)
        joined = None if split else fused.get(name)
        kind = (param.source_method.name, param.target_method.name, step, shape, split, joined, repr(given))
        if kind not in known:
            known[kind] = _options(context, group, param, step, shape, findings, given, split, joined)
        key = repr(sorted(known[kind].items()))
        members[key].append(name)
        options[key] = known[kind]
        derived[key] += _derived(context, group, param, shape)
    for key, params in members.items():
        yield TargetGroup(tuple(params), options[key], group.number is not None), derived[key]


def _steps(params: Iterable[Param]) -> set[int]:
    return {param.step for param in params if param.step is not None and not param.stateless}


def _step_of_group(context: Context, param: Param, others: Collection[int]) -> int | None:
    """The number of steps for a group's option, if the target has one.

    Matrices count none, so there it is that of other parameters.

    Raises:
        SourceError: the update depends on it, and it is not known.
    """
    if "step" not in param.target_method.options:
        return None
    if param.step is not None and not param.stateless:
        return param.step
    if "first" in param.target_method.slots and "second" in param.target_method.slots and not others:
        raise SourceError(
            f"parameter {param.name!r}: {context.target.name} stores the number of steps, which is unknown; give --step"
        )
    return max(others, default=context.overrides.step or 0)


def _options(
    context: Context,
    group: SourceGroup,
    param: Param,
    step: int | None,
    shape: Index,
    findings: Findings,
    given: Mapping[str, object],
    split: bool,
    joined: JoinedRows | None,
) -> Mapping[str, object]:
    """The options of a group, as the target names them; those ``given`` count where the source says nothing.

    If rows are ``split``, the source does not say how.  What was ``joined`` is orthogonalised in its parts as before.
    """
    method = param.target_method
    if param.source_method.shares_options_with(method):
        rescaled = context.overrides.target not in (None, context.dialect.convention)
        left_out = {PARAMS, *(context.target.unsaid if rescaled else ())}
        own = {option: context.values.read(item) for option, item in group.items.items() if option not in left_out}
        for coding in method.codings:
            if coding.write(coding.read({o: own[o] for o in coding.own if o in own}, shape), shape) is None:
                said = ", ".join(f"{option}={own[option]!r}" for option in coding.own if option in own)
                findings.check(
                    Action.SET, f"{said} of {method.name} groups", reason=f"unknown to {context.target.name}"
                )
        return {**given, **own}
    options = read_options(group, context.dialect, param.source_method, context.values, shape)
    known = dict(options.known) if step is None else {**options.known, "step": step}
    if split:
        known.pop("pieces", None)
    if joined is not None and "momentum" in param.source_method.slots and not known.get("pieces"):
        known["pieces"] = joined[0]
        known |= {"interleaved": joined[1]} if joined[1] > 1 else {}
    options = dataclasses.replace(options, known=known)
    return write_options(options, context.dialect, context.target, method, shape, findings, given)


def _splits_unsaid(context: Context, group: SourceGroup, param: Param, shape: Index, findings: Findings) -> bool:
    """Whether a slot that follows from the options has another value: then its rows were split, and no option says so.

    XTuner takes the sizes as an argument of its constructor.
    """
    slots = [slots for alias in param.aliases if (slots := context.roles.derived.get(alias))]
    for slot, value_of in param.source_method.derived.items() if slots else ():
        options = read_options(group, context.dialect, param.source_method, context.values, shape)
        expected, found = value_of(options.known, shape), context.values.item(slots[0][slot])
        if expected is not None and not math.isclose(found, expected, rel_tol=1e-6):
            reason = (
                f"{context.dialect.name} has {slot}={found!r} and not {expected!r} of it, so its rows are split, and "
                "no option says how: give pieces where the optimizer is made"
            )
            findings.check(Action.SET, f"pieces of {param.name}", reason=reason)
            return True
    return False


def _derived(context: Context, group: SourceGroup, param: Param, shape: Index) -> Iterator[OutputItem]:
    """The items of state that follow from a parameter's options and its shape."""
    if param.target_method.derived and (context.roles.left_out or not context.same_dialect):
        options = read_options(group, context.dialect, param.source_method, context.values, shape)
        for slot, value_of in param.target_method.derived.items():
            value = value_of(options.known, shape)
            if value is not None:
                yield _item(context.state_path(param.name, slot, param.chain), value)


def _items(target: Dialect, groups: list[TargetGroup], numbers: Mapping[str, str]) -> Iterator[OutputItem]:
    """The items of the target's groups, which are in a list or by name; ``numbers`` stand for names."""
    assert target.option is not None
    listed = target.option.listed
    for number, group in enumerate(groups):
        options = {**group.options, PARAMS: _listing(target, group.params, numbers)} if listed else group.options
        for name in ("",) if listed else group.params:
            fields = {"group": str(number)} if listed else {"name": name}
            for option, value in options.items():
                yield _item(target.option.write(**fields, option=option), value)


def _common(groups: list[TargetGroup], by_group: Mapping[str, Param]) -> dict[str, object]:
    """The optimizers' part of Megatron's common state: their groups, without parameters, and AdamW's step.

    The optimizer of a chain prefix is nested in dicts by its numbers: ``chained_0.`` becomes ``{0: …}``.

    Raises:
        SourceError: parameters of one optimizer have taken different numbers of steps.
    """
    optimizers: defaultdict[tuple[int, ...], dict[str, Any]] = defaultdict(dict)
    for group in groups:
        params = [by_group[name] for name in group.params if name in by_group]
        optimizer = optimizers[tuple(map(int, re.findall("[0-9]+", params[0].chain["chain"])))]
        optimizer.setdefault("param_groups", []).append(dict(group.options))
        for step in {param.step for param in params if param.step is not None and "first" in param.source_method.slots}:
            if optimizer.setdefault("state", {"common_step": step}) != {"common_step": step}:
                raise SourceError(
                    f"Megatron stores one step for an optimizer, but found {optimizer['state']} and {step}"
                )
    state: dict[Any, Any] = {}
    for chain, optimizer in optimizers.items():
        node = state.setdefault("optimizer", {})
        for number in chain:
            node = node.setdefault(number, {})
        node["optimizer"] = optimizer
    return state


def _listing(target: Dialect, names: tuple[str, ...], numbers: Mapping[str, str] = _NONE) -> list[str] | list[int]:
    return [int(numbers.get(name, name)) for name in names] if target.numbered else list(names)


def _item(path: KeyPath, value: object) -> OutputItem:
    return OutputItem(key_of(path), path, data=plain_item(value))


def _renamed(context: Context, groups: tuple[SourceGroup, ...], names: list[tuple[str, ...]]) -> Outputs:
    """The groups in the same dialect: all options unchanged, with the new names of their parameters."""
    items: list[OutputItem] = []
    tensors: list[OutputTensor] = []
    assert context.target.option is not None
    for group, params in zip(groups, names, strict=True):
        for option, item in group.items.items():
            if group.number is None:
                paths = [context.target.option.write(name=name, option=option, **group.chain) for name in params]
            elif option == PARAMS and params != group.params:
                items.append(_item(item.path, _listing(context.target, params)))
                continue
            else:
                paths = [item.path]
            if isinstance(item, StateRecord):
                tensors += [carried_tensor(context, item, path) for path in paths]
            else:
                items += [OutputItem(key_of(path), path, item) for path in paths]
    return Outputs(tensors, items)
