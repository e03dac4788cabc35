"""Hyper-parameters of the parameter groups, and how many steps have been taken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ...errors import MuonckptError, SourceError
from ...record import Blob, Manifest, StateRecord
from ...store.stored_items import Values
from ..translate.dialect import Dialect
from ..translate.group_options import SourceGroup, source_groups
from .contents import Contents, Role

_MOST_GROUPS = 64
"""The most groups of one parameter each whose options are read: thousands have few different ones."""

_MOST_COUNTERS = 32
"""The most step counters that are read."""

_CONVENTION = "convention"


@dataclass(frozen=True, slots=True)
class OptionsOfGroups:
    """Groups with the same options.

    Attributes:
        groups: their positions in the list of groups; empty if groups are by name.
        parameters: the names of their parameters.
        options: the options that matter to the optimizer, as the program calls them.
    """

    groups: tuple[int, ...]
    parameters: tuple[str, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class HyperParameters:
    """What the groups say; ``unread`` groups of one parameter were not looked at, ``notes`` say what is unreadable."""

    groups: tuple[OptionsOfGroups, ...]
    unread: int = 0
    notes: tuple[str, ...] = ()

    def values_of(self, option: str | None) -> dict[str, str]:
        """The text that an option has, by parameter, where it is one."""
        named = [(group.parameters, group.options.get(option or "")) for group in self.groups]
        return {name: value for names, value in named if isinstance(value, str) for name in names}

    @property
    def conventions(self) -> dict[str, str]:
        """The momentum convention that a group names, by parameter."""
        return self.values_of(_CONVENTION)


def hyper_parameters(manifest: Manifest, dialect: Dialect | None, values: Values) -> HyperParameters:
    """Read the options of the groups; what cannot be read is noted."""
    if dialect is None:
        return HyperParameters((), 0, ("the program is unknown, and so are its parameter groups",))
    try:
        groups = source_groups(manifest, dialect, values)
        read = [*(group for group in groups if group.number is not None)]
        named = [group for group in groups if group.number is None]
        chosen = _spread(named, _MOST_GROUPS)
        return HyperParameters(_merged([*read, *chosen], dialect, values), len(named) - len(chosen))
    except MuonckptError as error:
        return HyperParameters((), 0, (f"the parameter groups cannot be read: {error}",))


def _merged(groups: Sequence[SourceGroup], dialect: Dialect, values: Values) -> tuple[OptionsOfGroups, ...]:
    wanted = [
        option
        for method in dialect.methods
        for option in (*method.options.values(), *(own for coding in method.codings for own in coding.own))
    ]
    ordered = dict.fromkeys([*([dialect.method_option] if dialect.method_option else ()), *wanted, _CONVENTION])
    merged: dict[str, OptionsOfGroups] = {}
    for group in groups:
        options = {name: values.read(group.items[name]) for name in ordered if name in group.items}
        key = repr(sorted(options.items()))
        numbers = () if group.number is None else (group.number,)
        if other := merged.get(key):
            numbers, names = (*other.groups, *numbers), (*other.parameters, *group.params)
        else:
            names = group.params
        merged[key] = OptionsOfGroups(numbers, names, options)
    return tuple(merged.values())


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Step counters: the ``least`` and ``most`` of those ``read``, None if none was; how many there are."""

    least: int | float | None
    most: int | float | None
    read: int
    counters: int


def steps_of(contents: Contents, manifest: Manifest, values: Values, groups: HyperParameters) -> StepCounts:
    """Read step counters of parameters, evenly spread, or else those of the groups."""
    dialect = contents.dialect
    options = {method.options.get("step", "") for method in dialect.methods} - {""} if dialect else set()
    counters: list[Any] = [*contents.tensors.get(Role.STEPS, ()), *_counter_items(dialect, manifest)]
    read = list(_numbers(_spread(counters, _MOST_COUNTERS), values))
    if not counters:
        found = [group.options[option] for group in groups.groups for option in options & group.options.keys()]
        read = [value for value in found if isinstance(value, int | float)]
    return StepCounts(min(read, default=None), max(read, default=None), len(read), len(counters) or len(read))


def _counter_items(dialect: Dialect | None, manifest: Manifest) -> Iterator[Any]:
    if dialect is None:
        return
    slots = {method.slots["step"] for method in dialect.methods if "step" in method.slots}
    for blob in manifest.blobs:
        if (fields := dialect.state.read(blob.path)) and fields["slot"] in slots:
            yield blob


def _numbers(counters: Sequence[Any], values: Values) -> Iterator[int | float]:
    for counter in counters:
        try:
            value = values.read(counter)
        except SourceError:  # `verify` says what is damaged
            continue
        if isinstance(value, int | float):
            yield int(value) if value == value // 1 else value


def plain_items(manifest: Manifest, values: Values) -> dict[str, Any]:
    """All items and counters of one element, decoded, by key; what is not plain data as a sentence that says so."""
    decoded: dict[str, Any] = {}
    scalars = [tensor for tensor in manifest.tensors if tensor.shape == ()]
    entries: list[Blob | StateRecord] = [*manifest.blobs, *scalars]
    for entry in entries:
        try:
            decoded[entry.key] = values.read(entry)
        except MuonckptError as error:
            kind = f"scalar of {entry.dtype}" if isinstance(entry, StateRecord) else "not plain data"
            decoded[entry.key] = f"({kind}: {error})"
    return decoded


T = TypeVar("T")


def _spread(sequence: Sequence[T], most: int) -> list[T]:
    """At most so many of a sequence, evenly spread, the first and the last among them."""
    if len(sequence) <= most:
        return list(sequence)
    return [sequence[index * (len(sequence) - 1) // (most - 1)] for index in range(most)]
