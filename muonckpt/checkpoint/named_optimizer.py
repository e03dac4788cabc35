"""Optimizers whose parameters have names: in state dicts, of which torch has two forms, and in checkpoints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any

from ..record import Blob, StateRecord
from ..resumption import as_tuples
from ..store.open_checkpoint import OpenCheckpoint
from ..vocabulary import PARAMS

_NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class NamedOptimizer:
    """An optimizer's state dict in a template, in which parameters have names.

    Attributes:
        key: of the state dict, such as "optimizer"; "" if the template itself is one.
        groups: the names of each group's parameters; None in the flattened form, where parameters have options.
    """

    key: str
    groups: tuple[tuple[str, ...], ...] | None

    @property
    def state(self) -> str:
        """What the keys of its state begin with."""
        return _under(self.key, "state.")

    @property
    def options(self) -> str:
        """What the keys of its parameter groups begin with."""
        return _under(self.key, "param_groups.")

    def state_of_names(self, keys: Iterable[str], known: Collection[str]) -> dict[str, dict[str, str]]:
        """The keys of its state, by parameter and slot.

        Args:
            known: what follows one of these names is a slot; without any, the last part of a key is.
        """
        state: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for key in keys:
            if key.startswith(self.state):
                rest = key.removeprefix(self.state)
                name = rest.rpartition(".")[0]
                while name and name not in known:
                    name = name.rpartition(".")[0]
                name = name or rest.rpartition(".")[0]
                state[name][rest.removeprefix(f"{name}.")] = key
        return dict(state)

    def options_of_names(self, keys: Iterable[str]) -> dict[str, dict[str, str]]:
        """In the flattened form, the keys of its options, by parameter and option."""
        options: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for key in keys:
            if key.startswith(self.options):
                name, _, option = key.removeprefix(self.options).rpartition(".")
                options[name][option] = key
        return dict(options)

    def options_of_groups(self, keys: Iterable[str]) -> dict[int, dict[str, str]]:
        """In the nested form, the keys of its options, by the number of the group and option."""
        options: defaultdict[int, dict[str, str]] = defaultdict(dict)
        for key in keys:
            if key.startswith(self.options):
                number, _, option = key.removeprefix(self.options).partition(".")
                if number.isdecimal():
                    options[int(number)][option] = key
        return dict(options)


def named_optimizers(state_dict: Any, key: str = "") -> Iterator[NamedOptimizer]:
    """The optimizers' state dicts in a nested one, but for those whose parameters have numbers."""
    match state_dict:
        case {"state": Mapping(), "param_groups": list() as groups} if groups and all(
            _params_are(group, str) for group in groups
        ):
            yield NamedOptimizer(key, tuple(tuple(group[PARAMS]) for group in groups))
        case Mapping() if any(str(part).startswith("param_groups.") for part in state_dict):
            yield NamedOptimizer(key, None)
        case Mapping():
            for part, value in state_dict.items():
                yield from named_optimizers(value, _under(key, str(part)))
        case list():  # DCP stores a tuple as one item
            for index, value in enumerate(state_dict):
                yield from named_optimizers(value, _under(key, str(index)))


def numbered_optimizers(state_dict: Any, key: str = "") -> Iterator[str]:
    """The keys of optimizers' state dicts whose parameters have numbers, as ``optimizer.state_dict()`` has them."""
    match state_dict:
        case {"state": Mapping(), "param_groups": list() as groups} if groups and all(
            _params_are(group, int) for group in groups
        ):
            yield key
        case Mapping():
            for part, value in state_dict.items():
                yield from numbered_optimizers(value, _under(key, str(part)))


def _params_are(group: Any, kind: type) -> bool:
    params = group.get(PARAMS) if isinstance(group, Mapping) else None
    return isinstance(params, list | tuple) and all(isinstance(param, kind) for param in params)


def _under(key: str, part: str) -> str:
    return f"{key}.{part}" if key else part


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
        """Whether our optimizer's state was saved, or another program's was converted for it: only then is its momentum
        convention said."""
        return any(
            entry.convention is not None if isinstance(entry, StateRecord) else key.endswith(".convention")
            for key, entry in self.entries.items()
        )

    def option(self, key: str) -> Any:
        """An option, with lists as tuples."""
        return as_tuples(self._read(self.entries[key]))

    def mark(self, key: str) -> str:
        """What is the same for equal bytes, to compare options before they are read; their text where it is unknown."""
        entry = self.entries[key]
        known = entry.digest if isinstance(entry, Blob) else entry.fingerprint
        return known or str(self.option(key))

    def groups(self, optimizer: NamedOptimizer) -> list[tuple[str, ...]]:
        """The names of the parameters of each group of an optimizer in the nested form; none in the other."""
        groups = optimizer.options_of_groups(self.entries) if optimizer.groups is not None else {}
        keys = [groups.get(number, _NONE).get(PARAMS) for number in range(max(groups, default=-1) + 1)]
        return [() if key is None else tuple(map(str, self.option(key) or ())) for key in keys]

    def names(self, optimizer: NamedOptimizer) -> set[str]:
        """The names that an optimizer's options have."""
        named = self.groups(optimizer) if optimizer.groups is not None else [optimizer.options_of_names(self.entries)]
        return set(chain.from_iterable(named))
