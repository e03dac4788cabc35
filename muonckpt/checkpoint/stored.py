"""The stored side of a load, and the outcome of its matching with a state dict."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ..algebra.box import Index
from ..names.keys import NamedOptimizer, StateForm, key_of, rank_in
from ..names.resumption import as_tuples, option_difference
from ..names.vocabulary import BY_RANK, CONVENTION, PARAMS, KeyPath, has_our_options
from ..programs.signs import unsaid_by_name
from ..record.record import Blob, StateRecord, says_convention
from ..store.open_checkpoint import OpenCheckpoint
from .bits import dtype_name
from .live_state import LiveState

_NONE: Mapping[Any, Any] = MappingProxyType({})

OptimizerParameter = tuple[str, str]
"""The key of an optimizer's state dict, and the name of one of its parameters."""


def has_grown(value: object, entry: StateRecord | Blob) -> bool:
    """Return whether a value is a tensor of the shape of an entry but for more rows."""
    if not isinstance(value, torch.Tensor) or not isinstance(entry, StateRecord) or not (value.ndim and entry.shape):
        return False
    return tuple(value.shape[1:]) == tuple(entry.shape[1:]) and value.shape[0] > entry.shape[0]


def misfits(live: LiveState, key: str, entry: StateRecord | Blob, grows: bool = False) -> list[str]:
    """Return why an entry cannot be loaded at a key, in words that follow the key.

    Args:
        grows: it has fewer rows, as is meant.
    """
    # A tensor has a shape and dtype to compare; where one side has none, that is all there is to say.
    value, faults = live.flat[key], list[str]()
    if isinstance(value, torch.Tensor) != isinstance(entry, StateRecord):
        stored_as, expected = ("a", "no") if isinstance(entry, StateRecord) else ("no", "a")
        return [f"is {stored_as} tensor in the checkpoint, and {expected} tensor in the state dict"]
    if isinstance(entry, StateRecord):
        if entry.shape != value.shape and not grows:
            faults.append(f"has shape {entry.shape}, expected {tuple(value.shape)}")
        if entry.dtype != dtype_name(value.dtype):
            faults.append(f"is {entry.dtype}, expected {dtype_name(value.dtype)}")
        convention = live.convention(live.paths[key]) if entry.convention else None
        if convention and entry.convention != convention:
            faults.append("is " + option_difference(CONVENTION, entry.convention, convention))
    return faults


class OptionGroup(NamedTuple):
    """Parameters that have their options in common.

    Attributes:
        keys: by option; in the flat form those of all its parameters, otherwise one.
    """

    names: tuple[str, ...]
    keys: Mapping[str, Sequence[str]]

    def initial_rate(self, value: Callable[[str], Any]) -> Any:
        """Return the rate with which the group began, if a scheduler has written it; ``value`` reads that of a key."""
        return value(self.keys["initial_lr"][0]) if "initial_lr" in self.keys else None


def option_groups(
    optimizer: NamedOptimizer, keys: Iterable[str], value: Callable[[str], Any], mark: Callable[[str], str]
) -> list[OptionGroup]:
    """Return an optimizer's groups by number; in the flat form, the parameters with equal options.

    Args:
        value, mark: return the value at a key, and text that is the same for equal ones.
    """
    groups: list[OptionGroup] = []
    if optimizer.groups is None:
        names_by_options: defaultdict[object, dict[str, Mapping[str, str]]] = defaultdict(dict)
        for name, options in optimizer.options_of_names(keys).items():
            names_by_options[frozenset((option, mark(key)) for option, key in options.items())][name] = options
        for members in names_by_options.values():
            columns = {option: [each[option] for each in members.values()] for option in next(iter(members.values()))}
            groups.append(OptionGroup(tuple(members), columns))
        return groups
    by_number = optimizer.options_of_groups(keys)
    # A number without a list of parameters keeps its place, as groups are known by their numbers.
    for number in range(max(by_number, default=-1) + 1):
        options = by_number.get(number, {})
        names = tuple(map(str, value(options[PARAMS]) or ())) if PARAMS in options else ()
        groups.append(OptionGroup(names, {option: [key] for option, key in options.items()}))
    return groups


class Stored:
    """The entries of a checkpoint, or of other ranks' state, by key; ``read`` gives the value of an option.

    Attributes:
        place: this rank's among those that load, and how many these are.
        by_rank: for items that differ from rank to rank, the key of each rank's value by the rank's place at the save.
        unsaid: the options that a conversion has written and that no run said, by the names of parameters.
    """

    def __init__(
        self,
        entries: Iterable[StateRecord | Blob],
        read: Callable[[StateRecord | Blob], Any],
        place: tuple[int, int],
        unsaid: Mapping[str, frozenset[str]] = _NONE,
    ) -> None:
        self.entries = {entry.key: entry for entry in entries}
        self.place, self.unsaid = place, unsaid
        self.by_rank: defaultdict[str, dict[tuple[int, int], str]] = defaultdict(dict)
        self._read = read
        self._options: dict[str, Any] = {}
        self._groups: dict[NamedOptimizer, list[OptionGroup]] = {}
        # Values by rank stand beside the item that they are of, which programs read that know no ranks.
        for key, entry in self.entries.items():
            value = rank_in(entry.path) if BY_RANK in entry.path else None
            if value is not None and (item := key_of(value.path)) in self.entries:
                self.by_rank[item][value.rank, value.ranks] = key

    @classmethod
    def of(cls, checkpoint: OpenCheckpoint, place: tuple[int, int]) -> Stored:
        outline = checkpoint.outline
        return cls(
            (*outline.tensors, *outline.blobs), checkpoint.values.read, place, unsaid_by_name(outline.provenance)
        )

    @property
    def tensors(self) -> Iterator[StateRecord]:
        return (entry for entry in self.entries.values() if isinstance(entry, StateRecord))

    def origin(self, key: str) -> str | None:
        """Return the key of the value that this rank takes of an item; None if only other ranks have one."""
        return self.by_rank[key].get(self.place) if key in self.by_rank else key

    @property
    def translated(self) -> bool:
        """True for a checkpoint of our optimizer, or converted for it: its groups, if it has any, have our options."""
        if has_our_options(self.entries):
            return True
        return says_convention(self.entries.values()) and not any(key.endswith(".lr") for key in self.entries)

    def form(self, key: str) -> StateForm | None:
        """Return the form in which an optimizer was saved, None if the checkpoint does not say it."""
        # Options below a number are those of groups, which list names or numbers; others begin with a name.
        optimizer = NamedOptimizer(key, None)
        lists = [each[PARAMS] for each in optimizer.options_of_groups(self.entries).values() if PARAMS in each]
        if members := next(filter(None, map(self.option, lists)), None):
            return StateForm.NUMBERED if isinstance(members[0], int) else StateForm.NESTED
        is_flat = not all(name.isdecimal() for name in optimizer.options_of_names(self.entries))
        return StateForm.FLAT if is_flat and not lists else None

    def option(self, key: str) -> Any:
        """Read an option, with lists as tuples."""
        if key not in self._options:
            self._options[key] = as_tuples(self._read(self.entries[key]))
        return self._options[key]

    def mark(self, key: str) -> str:
        """Return text that is the same for equal options, where possible without reading them."""
        entry = self.entries[key]
        recorded = entry.digest if isinstance(entry, Blob) else entry.fingerprint
        return recorded or str(self.option(key))

    def groups(self, optimizer: NamedOptimizer) -> list[OptionGroup]:
        """Return the groups of an optimizer, with their options."""
        if optimizer not in self._groups:
            self._groups[optimizer] = option_groups(optimizer, self.entries, self.option, self.mark)
        return self._groups[optimizer]


class MissingTensor(NamedTuple):
    """A tensor that a template asks for and a checkpoint lacks.

    Attributes:
        name: of a weight, or of the parameter whose state it is.
        slot: of state; empty for a weight.
    """

    name: str
    slot: str
    shape: Index
    dtype: str


@dataclass(frozen=True, slots=True)
class Matching:
    """The outcome for one rank's template, or a part of it: what it takes from a checkpoint, and what does not fit.

    Attributes:
        sources: keys of the checkpoint, by keys of the template.
        covered_keys: keys of the checkpoint that are not extra although no key of the template is read from them.
        zeros: keys of the template, of state that starts fresh.
        grown: names of parameters that have more rows here, by key of the template.
        loaded, fresh, discarded, own_options: as in a `LoadReport`.
        ungrouped: parameters that were loaded and are in no group of the checkpoint.
        kept_weights: names of weights that keep their values, by key.
        optimizers, parameters: those of the template, and all parameters that they have.
        added: options that only the checkpoint has and that the state dict gets, by path.
        differences: why the state of a parameter cannot be loaded, by name.
        misfits: why values outside of optimizers cannot be loaded, by key.
        missing_keys, extra_keys: keys of this kind that only the template has; and all that only the checkpoint has.
        faults: what else does not fit, each with its cure.
        missing_tensors: those of any kind, by key, if something does not fit.
        growable: names of parameters that ``grow`` would load.
        doubts: what fits and is probably not meant.
    """

    sources: Mapping[str, str] = field(default_factory=dict)
    covered_keys: frozenset[str] = frozenset()
    zeros: tuple[str, ...] = ()
    grown: Mapping[str, str] = field(default_factory=dict)
    loaded: frozenset[OptimizerParameter] = frozenset()
    fresh: frozenset[OptimizerParameter] = frozenset()
    discarded: frozenset[str] = frozenset()
    ungrouped: frozenset[OptimizerParameter] = frozenset()
    kept_weights: Mapping[str, str] = field(default_factory=dict)
    optimizers: tuple[NamedOptimizer, ...] = ()
    parameters: frozenset[OptimizerParameter] = frozenset()
    own_options: tuple[str, ...] = ()
    added: Mapping[KeyPath, Any] = field(default_factory=dict)
    differences: Mapping[str, str] = field(default_factory=dict)
    misfits: Mapping[str, str] = field(default_factory=dict)
    missing_keys: tuple[str, ...] = ()
    extra_keys: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    missing_tensors: Mapping[str, MissingTensor] = field(default_factory=dict)
    growable: frozenset[str] = frozenset()

    @property
    def fits(self) -> bool:
        return not (self.differences or self.misfits or self.missing_keys or self.extra_keys or self.faults)

    @property
    def names(self) -> set[str]:
        """Names of all parameters, with those that only the checkpoint has as far as known."""
        return {*self.differences, *(name for _, name in self.parameters)}

    @classmethod
    def joined(cls, parts: Sequence[Matching]) -> Matching:
        """Join what several parts of a template, or several ranks, take."""
        return cls(*[_join([getattr(part, name) for part in parts]) for name in cls.__slots__])


def _join(values: Sequence[Any]) -> Any:
    """Join the values of one field, whose kind says how: sets unite, mappings merge, tuples keep the first of each."""
    if isinstance(values[0], tuple):
        return tuple(dict.fromkeys(chain.from_iterable(values)))
    # Mostly one part alone has a value, which is then taken unchanged.
    values = [value for value in values if value] or values[:1]
    if len(values) == 1:
        return values[0]
    if isinstance(values[0], frozenset):
        return frozenset().union(*values)
    merged: dict[Any, Any] = {}
    for value in values:
        merged |= value
    return merged
