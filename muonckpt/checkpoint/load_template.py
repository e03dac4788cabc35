"""What a state dict asks for, and what it, or a part of it, takes from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from ..record import Blob, StateRecord
from ..vocabulary import Convention, KeyPath
from .annotation import Annotation
from .bits import dtype_name
from .named_optimizer import NamedOptimizer, named_optimizers, numbered_optimizers

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


def template_of(
    state_dict: Mapping[str, Any],
    flat: Mapping[str, Any],
    paths: Mapping[str, KeyPath],
    annotations: Mapping[KeyPath, Annotation],
    partial: bool,
) -> LoadTemplate:
    """What a nested state dict asks for.

    Args:
        flat, paths: the same, as DCP makes it flat.
    """
    conventions = {key: annotations.get(tuple(path), Annotation()).convention for key, path in paths.items()}
    return LoadTemplate(
        flat,
        paths,
        tuple(named_optimizers(state_dict)),
        tuple(numbered_optimizers(state_dict)),
        {key: convention for key, convention in conventions.items() if convention},
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

    @property
    def fits(self) -> bool:
        return not self.differences and not self.faults

    @property
    def names(self) -> set[str]:
        """Those of all parameters, also of those that only the checkpoint has, if that is known."""
        return {*self.differences, *(name for _, name in self.parameters)}

    @classmethod
    def joined(cls, parts: Sequence[Matching]) -> Matching:
        """What several parts of a template, or several ranks, take."""
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
        )


def misfits(template: LoadTemplate, key: str, entry: StateRecord | Blob) -> Iterator[str]:
    """Why an entry cannot be loaded at a key, in words that follow the key."""
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
