"""Rewrites the parameter groups of a translated checkpoint: the same options for the same parameters."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import SourceError
from ...record import StateRecord
from ...store.formats.torch_save.plain_item import plain_item
from ...vocabulary import PARAMS, KeyPath
from ..engine.checklist import Findings
from ..engine.outputs import OutputItem, Outputs, OutputTensor
from .context import Context
from .dialect import Dialect, key_of
from .group_options import SourceGroup, TargetGroup, merge_equal, read_options, write_options
from .output_tensors import carried_tensor
from .source_parameters import Param, SlotTensors


def regroup(
    context: Context,
    groups: tuple[SourceGroup, ...],
    by_slot: SlotTensors,
    params: Mapping[str, Param],
    notes: Findings,
) -> Outputs:
    """The target's groups, as items and tensors; ``notes`` receives a sentence for every difference from the source.

    Raises:
        SourceError: parts of one parameter are in groups with different options.
    """
    if any(context.target.holds_groups(item.path) for item in context.roles.items):
        if context.target.chains:
            raise SourceError(f"the groups in {context.target.common} cannot be rewritten for {context.target.name}")
        notes.add("the common state is copied unchanged, with its groups")
        return Outputs(())
    if not groups:
        notes.add("the source does not say which parameters are in which group; no groups are written")
        return Outputs(())
    names = _names(context, groups, by_slot)
    if context.same_dialect:
        return _renamed(context, groups, names)
    by_group = {
        tensor.group: params[name] for tensors in by_slot.values() for name, tensor in tensors.items() if name in params
    }
    pairs = zip(groups, names, strict=True)
    written = merge_equal(
        new for group, members in pairs for new in _target_groups(context, group, members, by_group, notes)
    )
    if context.target.common is not None:
        return Outputs((), [_item(context.target.common, [_common(written, by_group)])])
    return Outputs((), list(_items(context.target, written)))


def _names(context: Context, groups: tuple[SourceGroup, ...], by_slot: SlotTensors) -> list[tuple[str, ...]]:
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
    context: Context, group: SourceGroup, names: tuple[str, ...], by_group: Mapping[str, Param], notes: Findings
) -> Iterator[TargetGroup]:
    """The target's groups for a group of the source: one for each method and step of its parameters.

    A parameter without state joins the others if these are all in one group.
    """
    kinds = {
        name: (param.source_method.name, param.step if "step" in param.target_method.options else None)
        for name in names
        if (param := by_group.get(name))
    }
    only = next(iter(kinds.values())) if len(set(kinds.values())) == 1 else None
    by_kind: defaultdict[tuple[str, int | None], list[str]] = defaultdict(list)
    for name in names:
        if kind := kinds.get(name, only):
            by_kind[kind].append(name)
        else:
            notes.add(f"{name} has no state, so it is in no group of the target")
    for (_, step), members in by_kind.items():
        first = next(by_group[name] for name in members if name in kinds)
        yield TargetGroup(tuple(members), _options(context, group, first, step, notes), group.number is not None)


def _options(
    context: Context, group: SourceGroup, param: Param, step: int | None, notes: Findings
) -> dict[str, object]:
    """The options of a group, as the target names them."""
    if param.source_method.shares_options_with(param.target_method):
        rescaled = context.overrides.target not in (None, context.dialect.convention)
        left_out = {PARAMS, *(context.target.unsaid if rescaled else ())}
        return {option: context.values.read(item) for option, item in group.items.items() if option not in left_out}
    options = read_options(group, context.dialect, param.source_method, context.values)
    known = options.known if step is None else {**options.known, "step": step}
    return write_options(dataclasses.replace(options, known=known), context.target, param.target_method, notes)


def _items(target: Dialect, groups: list[TargetGroup]) -> Iterator[OutputItem]:
    """The items of the target's groups, which are in a list or by name."""
    assert target.option is not None
    listed = "{group}" in target.option.parts
    for number, group in enumerate(groups):
        options = {**group.options, PARAMS: _listing(target, group.params)} if listed else group.options
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


def _listing(target: Dialect, names: tuple[str, ...]) -> list[str] | list[int]:
    return [int(name) for name in names] if target.numbered else list(names)


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
                paths = [context.target.option.write(name=name, option=option) for name in params]
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
