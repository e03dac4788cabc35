"""The tensors of a checkpoint by role, and its parameters with their state."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from ...box import Index
from ...record import Manifest, StateRecord
from ..translate.dialect import Dialect, StoredMethod
from ..translate.dialects import DIALECTS

NO_STATE = "(not optimizer state)"
"""The label of tensors that are in no slot of optimizer state."""


class Role(StrEnum):
    """What a tensor is for."""

    WEIGHTS = "weights"
    MOMENTUM = "momentum"
    MOMENTS = "moments"
    MASTERS = "masters"
    STEPS = "steps"
    STATE = "other state"
    OPTIONS = "options"
    OTHER = "other tensors"


_ROLES: Mapping[str, Role] = MappingProxyType(
    {
        "momentum": Role.MOMENTUM,
        "first": Role.MOMENTS,
        "second": Role.MOMENTS,
        "rows": Role.MOMENTS,
        "dion_rows": Role.MOMENTS,
        "master": Role.MASTERS,
        "step": Role.STEPS,
    }
)
"""The role of each slot, by its common name."""

_SHAPED = frozenset({"momentum", "first", "second", "master"})
"""Slots, by their common names, that are shaped like their parameter."""


@dataclass(frozen=True, slots=True)
class StatefulParameter:
    """A parameter: its ``weight`` if that is stored, the tensors of its ``state`` by slot, and its update ``method``.

    ``method`` is None if there is no state, or if no method of the dialect keeps such slots.
    """

    name: str
    weight: StateRecord | None
    state: Mapping[str, StateRecord]
    method: StoredMethod | None

    @property
    def shape(self) -> Index:
        """The shape of the parameter, as its weight or its state has it."""
        return self.weight.shape if self.weight else max((t.shape for t in self.state.values()), key=math.prod)

    @property
    def is_matrix(self) -> bool:
        """Whether there are rows and columns to orthogonalise: more than one of each."""
        return len(self.shape) >= 2 and min(self.shape[-2:]) > 1

    def shaped(self) -> list[StateRecord]:
        """The state that has to be shaped like the parameter."""
        slots = {slot for common, slot in self.method.slots.items() if common in _SHAPED} if self.method else set()
        return [tensor for slot, tensor in self.state.items() if slot in slots]


@dataclass(frozen=True, slots=True)
class Contents:
    """A checkpoint's tensors by role.

    Attributes:
        dialect: the program whose keys it has, None if that is unknown.
        tensors: the tensors of each role.
        parameters: by name; those that have neither a weight nor state as a tensor are not here.
    """

    dialect: Dialect | None
    tensors: Mapping[Role, tuple[StateRecord, ...]]
    parameters: Mapping[str, StatefulParameter]

    def slots_of(self, role: Role) -> tuple[str, ...]:
        """The slots that the tensors of a role are in."""
        return tuple(dict.fromkeys(tensor.slot for tensor in self.tensors.get(role, ()) if tensor.slot))


def contents_of(manifest: Manifest, dialect: Dialect | None, method_names: Mapping[str, str]) -> Contents:
    """Sort the tensors of a checkpoint.

    Args:
        manifest: with parameters and slots, as `with_slots` gives it.
        dialect: the program whose keys it has.
        method_names: the update method of parameters, by name, where the groups say it.
    """
    weights: dict[str, StateRecord] = {}
    state: defaultdict[str, dict[str, StateRecord]] = defaultdict(dict)
    roles: defaultdict[Role, list[StateRecord]] = defaultdict(list)
    for tensor in manifest.tensors:
        if tensor.slot is not None and tensor.name is not None:
            state[tensor.name][tensor.slot] = tensor
        elif dialect and dialect.option and dialect.option.read(tensor.path):
            roles[Role.OPTIONS].append(tensor)
        elif dialect and (fields := dialect.model.read(tensor.path)):
            weights[fields["name"]] = tensor
            roles[Role.WEIGHTS].append(tensor)
        else:
            roles[Role.OTHER].append(tensor)
    words = dialect or DIALECTS["muonckpt"]
    known = {slot: _ROLES[common] for m in reversed(words.methods) for common, slot in m.slots.items()}
    parameters = {}
    for name in {**weights, **state}:
        method = _method(words, frozenset(state[name]), method_names.get(name)) if name in state else None
        own = known | {slot: _ROLES[common] for common, slot in method.slots.items()} if method else known
        for slot, tensor in state[name].items() if name in state else ():
            roles[own.get(slot, Role.STATE)].append(tensor)
        parameters[name] = StatefulParameter(name, weights.get(name), state.get(name, {}), method)
    return Contents(dialect, {role: tuple(roles[role]) for role in Role if role in roles}, parameters)


def _method(dialect: Dialect, slots: frozenset[str], named: str | None) -> StoredMethod | None:
    """The method that keeps these slots: that of the name, or else the first; counters may be items or in the group."""
    stored = slots - dialect.derived
    fitting = [
        method
        for method in dialect.methods
        if stored <= (every := frozenset(method.slots.values())) and every - stored <= {method.slots.get("step")}
    ]
    return next((method for method in fitting if method.name == named), fitting[0] if fitting else None)


def unnumbered(name: str) -> str:
    """A name with every part that is a number as ``*``, so that the same parameter of all layers has one name."""
    return re.sub(r"(?<![^.])[0-9]+(?![^.])", "*", name)
