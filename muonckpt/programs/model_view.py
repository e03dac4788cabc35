"""The meaning of a checkpoint: a :class:`ModelView` has tensors by role, and parameters with their state and options.

It is made once, by :func:`view_by_keys` of a manifest alone, or by :func:`model_view` where the program and the options
of the groups are known as well; everyone who asks for the role or the parameter of a tensor reads it there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import Any

from ..algebra.box import Index
from ..names.errors import SourceError
from ..names.vocabulary import CONVENTION, FLATTEN
from ..names.wording import unnumbered
from ..record.record import Blob, Manifest, StateRecord
from .detection import detect, with_slots_of
from .dialect import Dialect, StoredMethod
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
"""Plural nouns for the tensors of a role, where its value is none."""

BEGIN_AT_ZERO = frozenset({Role.MOMENTUM, Role.MOMENTS, Role.STEPS})
"""Roles of state that is zeros when training begins, and so can begin from zero."""

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

AVERAGES = frozenset({"momentum", "first", "second"})
"""Slots, by their common names, that are shaped like their parameter and begin as zeros; most have its dtype."""


def matrix_sides(shape: Index, flatten: bool = False) -> Index:
    """Return the rows and columns of the matrix in a shape, or of each in a stack; as many as it has, if fewer.

    More than three dims are those of a convolution: the first is the rows, and all others are the columns; so
    are three, if it is known to be flattened.
    """
    is_flattened = len(shape) > 3 or (flatten and len(shape) == 3)
    return (shape[0], math.prod(shape[1:])) if is_flattened else shape[-2:]


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
        """Return name and shape without the numbers of layers; the number of a parameter is no layer's."""
        return self.name if self.name.isdecimal() else unnumbered(self.name), self.shape

    @property
    def sides(self) -> Index:
        """Return the rows and columns of its matrices."""
        return matrix_sides(self.shape, bool(self.options.get(FLATTEN)))

    @property
    def is_matrix(self) -> bool:
        """Return whether there is more than one row and column to orthogonalise."""
        return len(self.shape) >= 2 and min(self.sides) > 1


@dataclass(frozen=True)
class ModelView:
    """A checkpoint in terms of a model and its optimizer.

    Attributes:
        dialect: the program whose keys it has; None if unknown.
        tensors: by role.
        parameters: those with a weight or state as a tensor, by name.
        groups: with their options, as far as these were read.
        owners: the names of the parameters to which weights and state belong, by key.
        names: of parameters that keys number, by number, as far as the checkpoint records them.
        counts: of the updates that an optimizer counts for all of its parameters, by their names.
    """

    dialect: Dialect | None
    tensors: Mapping[Role, tuple[StateRecord, ...]]
    parameters: Mapping[str, StoredParameter]
    groups: Sequence[ParameterGroup] = ()
    owners: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)

    def tensors_of(self, *roles: Role) -> tuple[StateRecord, ...]:
        return tuple(chain.from_iterable(self.tensors.get(role, ()) for role in roles))

    def slots_of(self, role: Role) -> tuple[str, ...]:
        return tuple(dict.fromkeys(tensor.slot for tensor in self.tensors_of(role) if tensor.slot))

    @cached_property
    def groups_by_name(self) -> Mapping[str, ParameterGroup]:
        """The groups by the names of their parameters, those without a weight or state included."""
        return _groups_by_name(self.groups)

    def role(self, tensor: StateRecord) -> Role:
        return self._roles[tensor.key]

    @cached_property
    def _roles(self) -> Mapping[str, Role]:
        roles: dict[str, Role] = {}
        for role, members in self.tensors.items():
            roles |= dict.fromkeys((tensor.key for tensor in members), role)
        return roles

    def noun(self, tensor: StateRecord) -> str:
        """Return the plural noun for tensors of this role."""
        role = self.role(tensor)
        if role is Role.OTHER and self.dialect is None:  # where a manifest has slots, all else are weights
            return "weights" if len(self.tensors) > 1 else "tensors"
        return _NOUNS.get(role, role)

    def conventions(self, tensor: StateRecord) -> Mapping[str, str]:
        """Return the convention of a tensor by each source that says it; the first counts.

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


def model_view(
    manifest: Manifest,
    dialect: Dialect | None,
    groups: Sequence[ParameterGroup] = (),
    names: Mapping[str, str] = MappingProxyType({}),
) -> ModelView:
    """Sort the tensors of a checkpoint by role and by parameter.

    Args:
        manifest: with parameters and slots, as `with_slots_of` gives it.
        dialect: the program whose keys it has; None if unknown.
        groups: with the names of parameters as the manifest has them; they tell methods and conventions.
        names: those that the manifest's tensors and groups have in place of numbers.
    """
    sorted_tensors = _sorted_tensors(manifest, dialect)
    items: defaultdict[str, dict[str, Blob]] = defaultdict(dict)
    for blob, reading in dialect.state_in(manifest.blobs) if dialect else ():
        items[names.get(reading.name, reading.name)][reading.leaf] = blob
    # The method of a parameter tells the role of a slot: some slots mean something else in another method.
    program = dialect or DIALECTS["muonckpt"]
    usual_roles = _roles_of(reversed(program.methods))
    groups_by_name = _groups_by_name(groups)
    weights, state, roles = sorted_tensors.weights, sorted_tensors.state, sorted_tensors.roles
    parameters = {}
    for name in {**weights, **state}:
        parameter = StoredParameter(
            name,
            weight=weights.get(name),
            state=state.get(name, {}),
            method=None,
            group=groups_by_name.get(name),
            items=items.get(name, {}),
        )
        method = _method_of(parameter, program)
        parameters[name] = replace(parameter, method=method)
        slot_roles = usual_roles | _roles_of([method] if method else [])
        for slot, tensor in parameter.state.items():
            roles[slot_roles.get(slot, Role.STATE)].append(tensor)
    return ModelView(
        dialect=dialect,
        tensors={role: tuple(roles[role]) for role in Role if role in roles},
        parameters=parameters,
        groups=groups,
        owners=sorted_tensors.owners,
        names=names,
    )


@dataclass(frozen=True, slots=True)
class _SortedTensors:
    """The tensors of a checkpoint as their keys sort them.

    Attributes:
        weights, state: by the name of the parameter, and state then by slot.
        roles: the tensors by role, without those of ``state``, whose roles the methods tell.
        owners: as in `ModelView`.
    """

    weights: dict[str, StateRecord] = field(default_factory=dict)
    state: defaultdict[str, dict[str, StateRecord]] = field(default_factory=lambda: defaultdict(dict))
    roles: defaultdict[Role, list[StateRecord]] = field(default_factory=lambda: defaultdict(list))
    owners: dict[str, str] = field(default_factory=dict)


def _sorted_tensors(manifest: Manifest, dialect: Dialect | None) -> _SortedTensors:
    """Sort tensors by what their keys tell: the role of weights and others, but only the parameter of state."""
    sorted_tensors = _SortedTensors()
    for tensor in manifest.tensors:
        if tensor.slot is not None and tensor.name is not None:
            sorted_tensors.state[tensor.name][tensor.slot] = tensor
            sorted_tensors.owners[tensor.key] = tensor.name
        elif dialect and dialect.keys.read_option(tensor.path):
            sorted_tensors.roles[Role.OPTIONS].append(tensor)
        elif dialect and (reading := dialect.keys.read_weight(tensor.path)):
            sorted_tensors.weights[reading.name] = tensor
            sorted_tensors.owners[tensor.key] = reading.name
            sorted_tensors.roles[Role.WEIGHTS].append(tensor)
        else:
            sorted_tensors.roles[Role.OTHER].append(tensor)
    return sorted_tensors


def _method_of(parameter: StoredParameter, program: Dialect) -> StoredMethod | None:
    """Return the method that keeps the parameter's state; None without state, and where none of the program's does."""
    if not parameter.state:
        return None
    options = parameter.options
    if foreign := program.foreign_method(options):
        method, _ = foreign
    else:
        name = options.get(program.method_option or "")
        methods = program.methods_with(frozenset(parameter.state), name if isinstance(name, str) else None)
        if not methods:
            return None
        method = methods[0]
    # The slots may be what is left of another method's, or of a method that does not step this shape.
    is_of_another = not method.absent_options.isdisjoint(options)
    steps_shape = method not in program.methods or method.steps_shape(parameter.shape)
    return None if is_of_another or not steps_shape else method


def view_by_keys(manifest: Manifest) -> ModelView:
    """Make the view of a checkpoint from its keys alone; if no program has such keys, from the slots recorded in it."""
    try:
        dialect = detect(manifest).dialect
    except SourceError:
        return model_view(manifest, None)
    return model_view(with_slots_of(manifest, dialect), dialect)


def _groups_by_name(groups: Iterable[ParameterGroup]) -> dict[str, ParameterGroup]:
    by_name: dict[str, ParameterGroup] = {}
    for group in groups:
        by_name |= dict.fromkeys(group.parameters, group)
    return by_name


def _roles_of(methods: Iterable[StoredMethod]) -> dict[str, Role]:
    """Return the roles of the slots of methods; a later method overrides an earlier one."""
    roles: dict[str, Role] = {}
    for method in methods:
        roles |= {slot: _ROLES.get(common, Role.STATE) for common, slot in method.slots.items()}
    return roles
