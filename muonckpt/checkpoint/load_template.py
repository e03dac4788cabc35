"""What a state dict asks for, what a checkpoint has, and what the one takes from the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch

from ..keys import NamedOptimizer, StateForm, named_optimizers, numbered_optimizers, option_prefix
from ..record import Blob, StateRecord
from ..resumption import as_tuples
from ..store.open_checkpoint import OpenCheckpoint
from ..vocabulary import PARAMS, Convention, KeyPath
from .bits import dtype_name
from .live_state import LiveState

OwnParameter = tuple[str, str]
"""The key of an optimizer's state dict, and the name of one of its parameters."""


@dataclass(frozen=True, slots=True)
class LoadTemplate:
    """What a state dict asks for.

    Attributes:
        values: by flat key.
        paths: of the keys.
        numbered: keys of optimizers whose parameters have numbers; these go by key.
        conventions: of momentum, by key, where the state dict declares them.
        partial: whether the checkpoint may hold more than it asks for.
    """

    values: Mapping[str, Any]
    paths: Mapping[str, KeyPath]
    optimizers: tuple[NamedOptimizer, ...]
    numbered: tuple[str, ...]
    conventions: Mapping[str, Convention]
    partial: bool


def template_of(live: LiveState, partial: bool) -> LoadTemplate:
    """Return what a nested state dict asks for."""
    notes = {key: live.annotations.get(path) for key, path in live.paths.items()}
    return LoadTemplate(
        live.flat,
        live.paths,
        tuple(named_optimizers(live.nested)),
        tuple(numbered_optimizers(live.nested)),
        {key: note.convention for key, note in notes.items() if note and note.convention},
        partial,
    )


@dataclass(frozen=True, slots=True)
class Matching:
    """What one rank's template, or a part of it, takes from a checkpoint.

    Attributes:
        sources: keys of the checkpoint, by keys of the template.
        spared: keys of the checkpoint whose values equal others that are taken in their place.
        zeros: keys of the template, of state that starts fresh.
        loaded, fresh, discarded: as in a `LoadReport`.
        kept: names of weights that keep their values, by key.
        parameters: all that optimizers have.
        own_options: options that stay as the running optimizer has them, as the checkpoint does not say them; as text.
        added: options that only the checkpoint has and that are added to the state dict, by their paths in it.
        differences: why the state of a parameter cannot be loaded, by name.
        extra_state: keys that only the checkpoint has, of state and options of an optimizer that the template has.
        faults: what else does not fit.
        doubts: what fits and is probably not meant.
    """

    sources: Mapping[str, str] = field(default_factory=dict)
    spared: frozenset[str] = frozenset()
    zeros: tuple[str, ...] = ()
    loaded: frozenset[OwnParameter] = frozenset()
    fresh: frozenset[OwnParameter] = frozenset()
    discarded: frozenset[str] = frozenset()
    kept: Mapping[str, str] = field(default_factory=dict)
    parameters: frozenset[OwnParameter] = frozenset()
    own_options: tuple[str, ...] = ()
    added: Mapping[KeyPath, Any] = field(default_factory=dict)
    differences: Mapping[str, str] = field(default_factory=dict)
    extra_state: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return not self.differences and not self.faults

    @property
    def names(self) -> set[str]:
        """Names of all parameters, also of those that only the checkpoint has, if that is known."""
        return {*self.differences, *(name for _, name in self.parameters)}

    @classmethod
    def joined(cls, parts: Sequence[Matching]) -> Matching:
        """Join what several parts of a template, or several ranks, take."""
        return cls(
            dict(chain.from_iterable(part.sources.items() for part in parts)),
            frozenset().union(*(part.spared for part in parts)),
            tuple(chain.from_iterable(part.zeros for part in parts)),
            frozenset().union(*(part.loaded for part in parts)),
            frozenset().union(*(part.fresh for part in parts)),
            frozenset().union(*(part.discarded for part in parts)),
            dict(chain.from_iterable(part.kept.items() for part in parts)),
            frozenset().union(*(part.parameters for part in parts)),
            tuple(dict.fromkeys(chain.from_iterable(part.own_options for part in parts))),
            dict(chain.from_iterable(part.added.items() for part in parts)),
            dict(chain.from_iterable(part.differences.items() for part in parts)),
            tuple(chain.from_iterable(part.extra_state for part in parts)),
            tuple(dict.fromkeys(chain.from_iterable(part.faults for part in parts))),
            tuple(dict.fromkeys(chain.from_iterable(part.doubts for part in parts))),
        )


def misfits(template: LoadTemplate, key: str, entry: StateRecord | Blob) -> Iterator[str]:
    """Yield why an entry cannot be loaded at a key, in words that follow the key."""
    value = template.values[key]
    if isinstance(value, torch.Tensor) != isinstance(entry, StateRecord):
        stored_as, expected = ("a", "no") if isinstance(entry, StateRecord) else ("no", "a")
        yield f"is {stored_as} tensor in the checkpoint, and {expected} tensor in the state dict"
    elif isinstance(entry, StateRecord):
        if entry.shape != tuple(value.shape):
            yield f"has shape {entry.shape}, expected {tuple(value.shape)}"
        if entry.dtype != dtype_name(value.dtype):
            yield f"is {entry.dtype}, expected {dtype_name(value.dtype)} (nothing is cast silently)"
        expected_convention = template.conventions.get(key)
        if entry.convention and expected_convention and entry.convention != expected_convention:
            yield f"follows momentum convention {entry.convention}, expected {expected_convention}"


# --- What a checkpoint has --------------------------------------------------------------------------------------------

_NONE: Mapping[str, str] = MappingProxyType({})


class Stored:
    """The entries of a checkpoint, or of the state of other ranks, by key; and its options as plain data.

    Args:
        read: gives the value of an entry that is an option.
    """

    def __init__(self, entries: Iterable[StateRecord | Blob], read: Callable[[StateRecord | Blob], Any]) -> None:
        self.entries = {entry.key: entry for entry in entries}
        self._read = read

    @classmethod
    def of(cls, checkpoint: OpenCheckpoint) -> Stored:
        return cls((*checkpoint.outline.tensors, *checkpoint.outline.blobs), checkpoint.values.read)

    @property
    def translated(self) -> bool:
        """Whether the checkpoint is our optimizer's, or converted for it: only then it says a momentum convention."""
        return any(
            entry.convention is not None if isinstance(entry, StateRecord) else key.endswith(".convention")
            for key, entry in self.entries.items()
        )

    def form(self, key: str) -> StateForm | None:
        """Return the form in which an optimizer was saved, None if the checkpoint does not say it."""
        begin = option_prefix(key)
        options = [option.removeprefix(begin) for option in self.entries if option.startswith(begin)]
        groups = [option for option in options if option.removesuffix(f".{PARAMS}").isdecimal()]
        members = [name for group in groups for name in self.option(begin + group) or ()]
        if groups:
            return None if not members else StateForm.NUMBERED if isinstance(members[0], int) else StateForm.NESTED
        return StateForm.FLAT if any(not option.rpartition(".")[0].isdecimal() for option in options) else None

    def option(self, key: str) -> Any:
        """Read an option, with lists as tuples."""
        return as_tuples(self._read(self.entries[key]))

    def mark(self, key: str) -> str:
        """Return what is the same for equal options, where possible without reading them."""
        entry = self.entries[key]
        known = entry.digest if isinstance(entry, Blob) else entry.fingerprint
        return known or str(self.option(key))

    def groups(self, optimizer: NamedOptimizer) -> list[tuple[str, ...]]:
        """Return the names of each group's parameters in the nested form, none in the other."""
        groups = optimizer.options_of_groups(self.entries) if optimizer.groups is not None else {}
        keys = [groups.get(number, _NONE).get(PARAMS) for number in range(max(groups, default=-1) + 1)]
        return [() if key is None else tuple(map(str, self.option(key) or ())) for key in keys]

    def names(self, optimizer: NamedOptimizer) -> set[str]:
        """Return the names of an optimizer's parameters, as its options have them."""
        named = self.groups(optimizer) if optimizer.groups is not None else [optimizer.options_of_names(self.entries)]
        return set(chain.from_iterable(named))
