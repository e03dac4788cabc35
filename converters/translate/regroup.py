"""Parameter groups of a checkpoint that is translated: the same options for the same parameters, in other words."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import SourceError
from ...record import StateRecord
from ...store.formats.torch_save.plain_item import plain_item
from .dialects import Dialect, KeyPath
from .group_options import PARAMS, Group, Written, merged, say, understand
from .source_parameters import Columns, Param, Side
from .translation import CarriedItem, MadeItem


@dataclass(frozen=True, slots=True)
class Regrouped:
    """The target's groups: items that are carried, items that are made, and options that are tensors."""

    carried: tuple[CarriedItem, ...] = ()
    made: tuple[MadeItem, ...] = ()
    tensors: tuple[tuple[StateRecord, KeyPath], ...] = ()


def regroup(
    side: Side, groups: tuple[Group, ...], columns: Columns, params: Mapping[str, Param], notes: set[str]
) -> Regrouped:
    """The target's groups; ``notes`` gets a sentence for each thing that is not the source's.

    Raises:
        SourceError: parts of one parameter are in groups with different options.
    """
    if any(side.target.holds_groups(item.path) for item in side.has.items):
        if side.target.chains:
            raise SourceError(f"the groups in {side.target.common} cannot be rewritten for {side.target.name}")
        notes.add("the common state is carried as it is, with its groups")
        return Regrouped()
    if not groups:
        notes.add("the source does not say which parameters are in which group: none are written")
        return Regrouped()
    names = _names(side, groups, columns)
    if side.target is side.dialect:
        return _same(side, groups, names)
    by_group = {
        tensor.group: params[name] for tensors in columns.values() for name, tensor in tensors.items() if name in params
    }
    pairs = zip(groups, names, strict=True)
    written = merged(group for old, mine in pairs for group in _written(side, old, mine, by_group, notes))
    if side.target.common is not None:
        return Regrouped(made=(_item(side.target.common, [_common(written, by_group)]),))
    return Regrouped(made=tuple(_items(side.target, written)))


def _names(side: Side, groups: tuple[Group, ...], columns: Columns) -> list[tuple[str, ...]]:
    """The target's names of each group's parameters, each name in the first group that has a part of it."""
    after: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for tensors in columns.values():
        for tensor in tensors.values():
            for alias in tensor.aliases:
                after[alias][tensor.group] = None
    first: dict[str, Group] = {}
    names: list[tuple[str, ...]] = []
    for group in groups:
        found = dict.fromkeys(new for name in group.params for new in after.get(name, {name: None}))
        for name in found.keys() & first.keys():
            _check_alike(side, name, first[name], group)
        names.append(tuple(name for name in found if name not in first))
        first |= dict.fromkeys(names[-1], group)
    return names


def _check_alike(side: Side, name: str, one: Group, other: Group) -> None:
    """Raises `SourceError` if two groups that hold parts of one parameter differ."""
    for option in (one.items.keys() | other.items.keys()) - {PARAMS}:
        values = [side.values.read(group.items[option]) if option in group.items else None for group in (one, other)]
        if repr(values[0]) != repr(values[1]):
            raise SourceError(f"parts of {name!r} are in groups with {option}={values[0]!r} and {option}={values[1]!r}")


def _written(
    side: Side, group: Group, names: tuple[str, ...], by_group: Mapping[str, Param], notes: set[str]
) -> Iterator[Written]:
    """A source's group in the target's words; one for each method and step that its parameters have.

    A parameter without state goes with the others, if these are all alike.
    """
    kinds = {
        name: (param.theirs.name, param.step if "step" in param.ours.options else None)
        for name in names
        if (param := by_group.get(name))
    }
    only = next(iter(kinds.values())) if len(set(kinds.values())) == 1 else None
    alike: defaultdict[tuple[str, int | None], list[str]] = defaultdict(list)
    for name in names:
        if kind := kinds.get(name, only):
            alike[kind].append(name)
        else:
            notes.add(f"{name} has no state: it is in no group of the target")
    for (_, step), members in alike.items():
        first = next(by_group[name] for name in members if name in kinds)
        yield Written(tuple(members), _said(side, group, first, step, notes), group.number is not None)


def _said(side: Side, group: Group, param: Param, step: int | None, notes: set[str]) -> dict[str, object]:
    """The options of a group in the target's words."""
    if param.theirs.speaks_like(param.ours):  # the same optimizer under other keys: every option is as it was
        rescaled = side.said.target not in (None, side.dialect.convention)
        leave = {PARAMS, *(side.target.unsaid if rescaled else ())}
        return {option: side.values.read(item) for option, item in group.items.items() if option not in leave}
    words = understand(group, side.dialect, param.theirs, side.values)
    known = words.known if step is None else {**words.known, "step": step}
    return say(dataclasses.replace(words, known=known), side.target, param.ours, notes)


def _items(target: Dialect, groups: list[Written]) -> Iterator[MadeItem]:
    """The items of groups, in a list or by name."""
    assert target.option is not None
    listed = "{group}" in target.option.parts
    for number, group in enumerate(groups):
        options = {**group.options, PARAMS: _listing(target, group.params)} if listed else group.options
        for name in ("",) if listed else group.params:
            fields = {"group": str(number)} if listed else {"name": name}
            for option, value in options.items():
                yield _item(target.option.write(**fields, option=option), value)


def _common(groups: list[Written], by_group: Mapping[str, Param]) -> dict[str, object]:
    """Megatron's common state, as far as it is of optimizers: their groups, without parameters, and AdamW's step.

    The optimizer of each chain prefix is in dicts by its numbers: ``chained_0.`` is ``{0: …}``.

    Raises:
        SourceError: parameters of one optimizer have taken different numbers of steps.
    """
    optimizers: defaultdict[tuple[int, ...], dict[str, Any]] = defaultdict(dict)
    for group in groups:
        params = [by_group[name] for name in group.params if name in by_group]
        mine = optimizers[tuple(map(int, re.findall("[0-9]+", params[0].chain["chain"])))]
        mine.setdefault("param_groups", []).append(dict(group.options))
        for step in {param.step for param in params if param.step is not None and "first" in param.theirs.slots}:
            if mine.setdefault("state", {"common_step": step}) != {"common_step": step}:
                raise SourceError(f"Megatron keeps one step for an optimizer, found {mine['state']} and {step}")
    whole: dict[Any, Any] = {}
    for chain, mine in optimizers.items():
        place = whole.setdefault("optimizer", {})
        for number in chain:
            place = place.setdefault(number, {})
        place["optimizer"] = mine
    return whole


def _listing(target: Dialect, names: tuple[str, ...]) -> list[str] | list[int]:
    return [int(name) for name in names] if target.numbered else list(names)


def _item(path: KeyPath, value: object) -> MadeItem:
    return MadeItem(".".join(map(str, path)), path, plain_item(value))


def _same(side: Side, groups: tuple[Group, ...], names: list[tuple[str, ...]]) -> Regrouped:
    """Groups in the dialect that they are in: every option as it is, only the parameters' names are new."""
    carried: list[CarriedItem] = []
    made: list[MadeItem] = []
    tensors: list[tuple[StateRecord, KeyPath]] = []
    assert side.target.option is not None
    for group, params in zip(groups, names, strict=True):
        for option, item in group.items.items():
            if group.number is None:
                paths = [side.target.option.write(name=name, option=option) for name in params]
            elif option == PARAMS and params != group.params:
                made.append(_item(item.path, _listing(side.target, params)))
                continue
            else:
                paths = [item.path]
            if isinstance(item, StateRecord):
                tensors += [(item, path) for path in paths]
            else:
                carried += [CarriedItem(item, ".".join(map(str, path)), path) for path in paths]
    return Regrouped(tuple(carried), tuple(made), tuple(tensors))
