"""The parameters of a checkpoint that is translated: what each is called, how it is updated, how far it is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import SourceError
from ...record import Manifest
from ...store.stored_items import Values
from .conventions import Said
from .dialects import FOREIGN, Dialect, Method
from .group_options import Group
from .roles import Contents
from .structure import Tensor

Columns = Mapping[str | None, Mapping[str, Tensor]]
"""The weights (None) and each slot's tensors, by the target's names of parameters."""


@dataclass(frozen=True, slots=True)
class Side:
    """What is known of the source while it is translated."""

    manifest: Manifest
    dialect: Dialect
    target: Dialect
    values: Values
    said: Said
    has: Contents
    groups: Mapping[str, Group]
    dropped: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of the target that has state: the source's names for it, its method in both dialects, its group.

    ``chain`` is a field of the target's keys of state, where they have it: which of several optimizers it belongs to.
    """

    name: str
    aliases: tuple[str, ...]
    theirs: Method
    ours: Method
    group: Group | None
    step: int | None
    chain: Mapping[str, str]


def params_of(side: Side, columns: Columns) -> Iterator[Param]:
    """The parameters of the target that have state."""
    aliases: defaultdict[str, list[str]] = defaultdict(list)
    slots: defaultdict[str, set[str]] = defaultdict(set)
    for slot, tensors in columns.items():
        for name, tensor in tensors.items():
            aliases[name] += tensor.aliases
            slots[name] |= {slot} - {None} if slot is not None else set()
    for name, known in aliases.items():
        slots[name].update(slot for alias in known for slot in side.has.counters.get(alias, ()))
        if slots[name]:
            yield _param(side, name, tuple(dict.fromkeys(known)), frozenset(slots[name]))


def _param(side: Side, name: str, aliases: tuple[str, ...], slots: frozenset[str]) -> Param:
    group = next((side.groups[alias] for alias in aliases if alias in side.groups), None)
    if group and (foreign := next(iter(FOREIGN.keys() & group.items.keys()), None)):
        raise SourceError(
            f"parameter {name!r}: the {foreign!r} of its group is of {FOREIGN[foreign]}, which no program here takes: "
            "first make a copy without its state, by reshard with --select"
        )
    option = side.dialect.method_option or ""
    named = side.values.read(group.items[option]) if group and option in group.items else None
    theirs = side.dialect.method(slots, named, name, side.dropped)
    ours = theirs if side.target is side.dialect else side.target.writes(theirs)
    step, chain = _step(side, name, aliases, theirs, group), _chain(side, name, aliases, ours)
    return Param(name, aliases, theirs, ours, group, step, chain)


def _chain(side: Side, name: str, aliases: tuple[str, ...], method: Method) -> Mapping[str, str]:
    """What the target puts in front of the state: what it always does, or else what the source had there.

    Raises:
        SourceError: parts of the parameter belong to different optimizers.
    """
    if not side.target.chained:
        return {}
    chains: set[str] = set().union(*(side.has.chains[alias] for alias in aliases if alias in side.has.chains))
    if len(chains) > 1:
        raise SourceError(f"parameter {name!r} is made of state of more than one optimizer: {sorted(chains)}")
    return {"chain": side.target.chains.get(method.name, next(iter(chains), ""))}


def _step(side: Side, name: str, aliases: tuple[str, ...], method: Method, group: Group | None) -> int | None:
    """How many steps the parameter has taken, if the source says so.

    Raises:
        SourceError: its parts have taken different numbers.
    """
    slot, option = method.slots.get("step", ""), method.options.get("step", "")
    entries: list[Any] = [side.has.counters[a][slot] for a in aliases if slot in side.has.counters.get(a, ())]
    if not entries and group is not None and option in group.items:
        entries = [group.items[option]]
    steps = {_whole(side.values.read(entry), name) for entry in entries}
    if len(steps) > 1:
        raise SourceError(f"parameter {name!r} is made of parts that have taken {sorted(steps)} steps")
    return steps.pop() if steps else side.said.step


def _whole(value: object, name: str) -> int:
    if isinstance(value, int | float) and value == value // 1:
        return int(value)
    raise SourceError(f"parameter {name!r}: expected a whole number of steps, found {value!r}")
