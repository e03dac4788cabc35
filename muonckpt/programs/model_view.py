"""What a checkpoint means: a :class:`ModelView` has its tensors by role, and its parameters with state and options.

It is made once, by :func:`view_by_keys` of a manifest alone, or by :func:`model_view` where the program and the options
of the groups are known as well; whoever asks what a tensor is, or whose it is, reads it there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType
from typing import Any

from ..algebra.box import Index
from ..names.errors import SourceError
from ..names.state_forms import stored_slot
from ..names.vocabulary import CONVENTION
from ..names.wording import unnumbered
from ..record.record import Blob, Manifest, StateRecord
from .detection import detect, with_slots_of
from .dialect import FOREIGN, Dialect, StoredMethod
from .registry import DIALECTS


class Role(StrEnum):
    """The roles that a tensor can have for a model and its optimizer."""

    WEIGHTS = "weights"
    MOMENTUM = "momentum"
    MOMENTS = "moments"
    MASTERS = "masters"
    STEPS = "steps"
    STATE = "other state"
    OPTIONS = "options"
    OTHER = "other tensors"


_NOUNS: Mapping[Role, str] = MappingProxyType(
    {Role.MOMENTUM: "momenta", Role.MASTERS: "master weights", Role.STEPS: "step counters"}
)
"""What people call the tensors of a role, in the plural, where its own name is none."""

BEGIN_ANEW = frozenset({Role.MOMENTUM, Role.MOMENTS, Role.STEPS})
"""State of these roles is zeros when training begins, so that it can begin with them anew."""

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
"""Roles by the common names of slots."""

_SHAPED = frozenset({"momentum", "first", "second", "master"})
"""Slots, by their common names, that are shaped like their parameter."""


Entry = StateRecord | Blob
"""A tensor or an item of a checkpoint."""


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters that share options: one group of an optimizer, or several with the same options.

    Attributes:
        parameters: their names.
        options: as the program calls them.
        positions: in the list of groups; empty if groups are by name.
        entries: where a checkpoint stores the options, and the list of parameters.
        chain: which of several optimizers the group belongs to, as a field of keys.
    """

    parameters: tuple[str, ...]
    options: Mapping[str, Any]
    positions: tuple[int, ...] = ()
    entries: Mapping[str, Entry] = field(default_factory=dict)
    chain: str = ""


@dataclass(frozen=True, slots=True)
class StoredParameter:
    """A parameter: its ``weight`` if that is stored, its ``state`` by slot, and its update ``method``.

    The method is None without state, and where no method of the dialect keeps such slots; the group is None where
    groups are unknown, or none lists the parameter.  ``items`` are slots that are stored as items, not as tensors.
    """

    name: str
    weight: StateRecord | None
    state: Mapping[str, StateRecord]
    method: StoredMethod | None
    group: ParameterGroup | None
    items: Mapping[str, Blob] = field(default_factory=dict)

    @property
    def slots(self) -> Mapping[str, Entry]:
        """Return its whole state, by slot."""
        return {**self.state, **self.items}

    @property
    def options(self) -> Mapping[str, Any]:
        return self.group.options if self.group else {}

    @property
    def shape(self) -> Index:
        return self.weight.shape if self.weight else max((t.shape for t in self.state.values()), key=math.prod)

    @property
    def layer_pattern(self) -> tuple[str, Index]:
        """Return what it has in common with its siblings in other layers; the number of a parameter is no layer's."""
        return self.name if self.name.isdecimal() else unnumbered(self.name), self.shape

    @property
    def is_matrix(self) -> bool:
        """Return whether there is more than one row and column to orthogonalise."""
        return len(self.shape) >= 2 and min(self.shape[-2:]) > 1

    def shaped(self) -> list[StateRecord]:
        """Return the state that has to be shaped like the parameter."""
        slots = {slot for common, slot in self.method.slots.items() if common in _SHAPED} if self.method else set()
        return [tensor for slot, tensor in self.state.items() if slot in slots]


@dataclass(frozen=True)
class ModelView:
    """A checkpoint in terms of a model and its optimizer.

    Attributes:
        dialect: the program whose keys it has; None if unknown.
        tensors: by role.
        parameters: by name; those without a weight or state as a tensor are not here.
        groups: with their options, as far as these were read.
        owners: the names of the parameters that weights and state are of, by key.
        names: of parameters that keys number, by number, as far as the checkpoint records them.
    """

    dialect: Dialect | None
    tensors: Mapping[Role, tuple[StateRecord, ...]]
    parameters: Mapping[str, StoredParameter]
    groups: Sequence[ParameterGroup] = ()
    owners: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)

    def tensors_of(self, *roles: Role) -> tuple[StateRecord, ...]:
        return tuple(tensor for role in roles for tensor in self.tensors.get(role, ()))

    def slots_of(self, role: Role) -> tuple[str, ...]:
        return tuple(dict.fromkeys(tensor.slot for tensor in self.tensors_of(role) if tensor.slot))

    @cached_property
    def groups_by_name(self) -> Mapping[str, ParameterGroup]:
        """The groups by the names of their parameters, those without a weight or state included."""
        return {name: group for group in self.groups for name in group.parameters}

    def role(self, tensor: StateRecord) -> Role:
        return self._roles[tensor.key]

    @cached_property
    def _roles(self) -> Mapping[str, Role]:
        return {tensor.key: role for role, members in self.tensors.items() for tensor in members}

    def noun(self, tensor: StateRecord) -> str:
        """Return what people call such tensors, in the plural."""
        role = self.role(tensor)
        if role is Role.OTHER and self.dialect is None:  # a manifest that has slots says itself what is no state
            return "weights" if len(self.tensors) > 1 else "tensors"
        return _NOUNS.get(role, role)

    def identity(self, tensor: StateRecord) -> tuple[str, str | None]:
        """Return the parameter and the slot of a tensor, by which it is known in any program's keys; else its key."""
        return (self.owners[tensor.key], tensor.slot) if tensor.key in self.owners else (tensor.key, None)

    def conventions(self, tensor: StateRecord) -> Mapping[str, str]:
        """Return what is said of the convention of a tensor, by who says it; the first of them counts.

        Only momentum has one; the manifest, the parameter group and the program may say it.
        """
        stated: dict[str, str | None] = {"the manifest": tensor.convention}
        if self.role(tensor) is Role.MOMENTUM:
            parameter = self.parameters.get(tensor.name or "")
            option = parameter.options.get(CONVENTION) if parameter else None
            stated["the parameter group"] = option if isinstance(option, str) else None
            if self.dialect:
                stated[f"{self.dialect.name} has no other"] = self.dialect.convention
        return {source: str(convention) for source, convention in stated.items() if convention}

    def convention(self, tensor: StateRecord) -> str | None:
        return next(iter(self.conventions(tensor).values()), None)


def model_view(
    manifest: Manifest,
    dialect: Dialect | None,
    groups: Sequence[ParameterGroup] = (),
    names: Mapping[str, str] = MappingProxyType({}),
) -> ModelView:
    """Sort the tensors of a checkpoint by what they are, and by whose they are.

    Args:
        manifest: with parameters and slots, as `with_slots_of` gives it.
        dialect: the program whose keys it has; None if unknown.
        groups: with the names of parameters as the manifest has them; they tell methods and conventions.
        names: those that the manifest's tensors and groups have in place of numbers.
    """
    # Weights and other tensors tell by their keys what they are; state by its parameter's method, once that is known.
    weights: dict[str, StateRecord] = {}
    state: defaultdict[str, dict[str, StateRecord]] = defaultdict(dict)
    roles: defaultdict[Role, list[StateRecord]] = defaultdict(list)
    owners: dict[str, str] = {}
    for tensor in manifest.tensors:
        if tensor.slot is not None and tensor.name is not None:
            state[tensor.name][tensor.slot] = tensor
            owners[tensor.key] = tensor.name
        elif dialect and dialect.option and dialect.option.read(tensor.path):
            roles[Role.OPTIONS].append(tensor)
        elif dialect and (fields := dialect.model.read(tensor.path)):
            weights[fields["name"]] = tensor
            owners[tensor.key] = fields["name"]
            roles[Role.WEIGHTS].append(tensor)
        else:
            roles[Role.OTHER].append(tensor)
    items: defaultdict[str, dict[str, Blob]] = defaultdict(dict)
    for blob in manifest.blobs:
        if dialect and (fields := dialect.state.read(blob.path)):
            items[names.get(fields["name"], fields["name"])][fields["slot"]] = blob
    # Parameters with their methods, by which a slot has its role: some slots mean something else in another method.
    words = dialect or DIALECTS["muonckpt"]
    usual_roles = _roles_of(reversed(words.methods))
    groups_by_name = {name: group for group in groups for name in group.parameters}
    parameters = {}
    for name in {**weights, **state}:
        slots, group = state.get(name, {}), groups_by_name.get(name)
        method = words.likely_method(frozenset(slots), _method_named(words, group)) if slots else None
        slot_roles = usual_roles | _roles_of([method] if method else [])
        for slot, tensor in slots.items():
            part = stored_slot(slot)
            average = part.slot if part.is_shaped else slot
            roles[slot_roles.get(slot) or slot_roles.get(average, Role.STATE)].append(tensor)
        parameters[name] = StoredParameter(name, weights.get(name), slots, method, group, items.get(name, {}))
    return ModelView(dialect, {r: tuple(roles[r]) for r in Role if r in roles}, parameters, groups, owners, names)


def view_by_keys(manifest: Manifest) -> ModelView:
    """Make the view of a checkpoint of any program from its keys alone; of an unknown one it has what is recorded."""
    try:
        dialect = detect(manifest).dialect
    except SourceError:
        return model_view(manifest, None)
    return model_view(with_slots_of(manifest, dialect), dialect)


def _roles_of(methods: Iterable[StoredMethod]) -> dict[str, Role]:
    """Return the roles of the slots of methods, where those of a later one count."""
    roles: dict[str, Role] = {}
    for method in methods:
        roles |= {slot: _ROLES.get(common, Role.STATE) for common, slot in method.slots.items()}
    return roles


def _method_named(dialect: Dialect, group: ParameterGroup | None) -> str | None:
    """Return the name of the update method that a group's options tell."""
    if group is None:
        return None
    foreign = [FOREIGN[option].name for option in FOREIGN.keys() & group.options.keys()]
    named = group.options.get(dialect.method_option or "")
    return foreign[0] if foreign else named if isinstance(named, str) else None
