"""The parameters of a translation: their names, update methods, groups and step counts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...box import Index
from ...errors import SourceError
from .context import Context
from .dialect import StoredMethod
from .dialects import FOREIGN_OPTIONS
from .group_options import SourceGroup
from .structure import TranslatedTensor

SlotTensors = Mapping[str | None, Mapping[str, TranslatedTensor]]
"""The weights (under None) and the tensors of each slot, by the target's names of parameters."""

AS_THE_PARAMETER = frozenset({"momentum", "first", "second"})
"""Slots, by common names, that have the shape of their parameter and begin as zeros; most keep its dtype."""


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of the target: its names in the source, its method in both dialects, and its group.

    ``chain`` says to which of several optimizers it belongs, as a field of the target's keys if they have that field.
    One that is ``stateless`` has no state in the source, because it never had a gradient.
    """

    name: str
    aliases: tuple[str, ...]
    source_method: StoredMethod
    target_method: StoredMethod
    group: SourceGroup | None
    step: int | None
    chain: Mapping[str, str]
    stateless: bool = False


def shapes_by_name(by_slot: SlotTensors) -> dict[str, Index]:
    """The shapes of the target's parameters, by the names that groups know them by: of the weights, or of state."""
    shapes: dict[str, Index] = {}
    for tensors in by_slot.values():
        for tensor in tensors.values():
            if math.prod(tensor.shape) >= math.prod(shapes.get(tensor.group, ())):
                shapes[tensor.group] = tensor.shape
    return shapes | {tensor.group: tensor.shape for tensor in by_slot.get(None, {}).values()}


def params_of(context: Context, by_slot: SlotTensors) -> Iterator[Param]:
    """The parameters of the target that have state."""
    aliases: defaultdict[str, list[str]] = defaultdict(list)
    slots: defaultdict[str, set[str]] = defaultdict(set)
    for slot, tensors in by_slot.items():
        for name, tensor in tensors.items():
            aliases[name] += tensor.aliases
            slots[name] |= {slot} - {None} if slot is not None else set()
    for name, sources in aliases.items():
        slots[name].update(slot for alias in sources for slot in context.roles.counters.get(alias, ()))
        if slots[name]:
            yield _param(context, name, tuple(dict.fromkeys(sources)), frozenset(slots[name]))


def _param(context: Context, name: str, aliases: tuple[str, ...], slots: frozenset[str]) -> Param:
    group = next((context.groups[alias] for alias in aliases if alias in context.groups), None)
    if group and (foreign := next(iter(FOREIGN_OPTIONS.keys() & group.items.keys()), None)):
        raise SourceError(
            f"parameter {name!r}: its group has the option {foreign!r} of {FOREIGN_OPTIONS[foreign]}, which cannot be "
            "translated; first make a copy without its state, with `muonckpt reshard --select`"
        )
    option = context.dialect.method_option or ""
    named = context.values.read(group.items[option]) if group and option in group.items else None
    source_method = context.dialect.method(slots, named, name, context.dropped)
    target_method = source_method if context.same_dialect else context.target.writes(source_method)
    step, chain = _step(context, name, aliases, source_method, group), _chain(context, name, aliases, target_method)
    return Param(name, aliases, source_method, target_method, group, step, chain)


def _chain(context: Context, name: str, aliases: tuple[str, ...], method: StoredMethod) -> Mapping[str, str]:
    """The chain of a parameter in the target: the dialect's own if it has one, or else the source's.

    Raises:
        SourceError: parts of the parameter belong to different optimizers.
    """
    if not context.target.chained:
        return {}
    chains: set[str] = set().union(*(context.roles.chains[alias] for alias in aliases if alias in context.roles.chains))
    if len(chains) > 1:
        raise SourceError(f"parameter {name!r} is made of state of more than one optimizer: {sorted(chains)}")
    kept = next(iter(chains), "") if context.target.state == context.dialect.state else ""
    return {"chain": context.target.chains.get(method.name, kept)}


def _step(
    context: Context, name: str, aliases: tuple[str, ...], method: StoredMethod, group: SourceGroup | None
) -> int | None:
    """The number of steps that the parameter has taken, if the source or the user says it.

    Raises:
        SourceError: its parts have taken different numbers of steps.
    """
    slot, option = method.slots.get("step", ""), method.options.get("step", "")
    entries: list[Any] = [context.roles.counters[a][slot] for a in aliases if slot in context.roles.counters.get(a, ())]
    if not entries and group is not None and option in group.items:
        entries = [group.items[option]]
    steps = {_whole_number(context.values.read(entry), name) for entry in entries}
    if len(steps) > 1:
        raise SourceError(f"parameter {name!r} is made of parts that have taken {sorted(steps)} steps")
    return steps.pop() if steps else context.overrides.step


def _whole_number(value: object, name: str) -> int:
    if isinstance(value, int | float) and value == value // 1:
        return int(value)
    raise SourceError(f"parameter {name!r}: expected a whole number of steps, found {value!r}")
