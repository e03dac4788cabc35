"""The keys of optimizers in torch's state dicts; no other file recognises or writes them.

* Nested: ``(*root, "state", PARAMETER, SLOT)`` and ``(*root, "param_groups", NUMBER, OPTION)``, where a parameter is a
  name, or its number in the order in which groups list it.
* Flat: ``(*root, "state.PARAMETER.SLOT")`` and ``(*root, "param_groups.PARAMETER.OPTION")``; the string may begin with
  a prefix, and parameters have names.
* Megatron-LM's ``fsdp_dtensor``: nested, with ``(*root, "param_to_group_meta", PARAMETER, OPTION)`` in place of groups.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from .vocabulary import BY_RANK, PARAMS, KeyPath

STATE = "state"
PARAM_GROUPS = "param_groups"
PARAMETER_OPTIONS = "param_to_group_meta"
NUMBER = re.compile("0|[1-9][0-9]*")
"""The number of a parameter or of a group, as text."""


class StateForm(Enum):
    """The forms of an optimizer's state dict: parameters have numbers, or names in groups, or options each."""

    NUMBERED = "numbered"
    NESTED = "nested"
    FLAT = "flat"


def key_of(path: KeyPath) -> str:
    """Return a path as one string, with dots between its parts."""
    return ".".join(map(str, path))


def largest_parts(paths: Iterable[KeyPath], others: Iterable[KeyPath]) -> Iterator[KeyPath]:
    """Yield for each path its shortest beginning below which none of the other paths lies."""
    beginnings = {path[:length] for path in others for length in range(len(path) + 1)}
    for path in paths:
        length = 1
        while path[:length] in beginnings:
            length += 1
        yield path[:length]


# Paths of a checkpoint.


@dataclass(frozen=True, slots=True)
class KeyPlace:
    """The place of a model's or an optimizer's keys: the path ``root``, then ``prefix`` in the last part of a path.

    In an optimizer's ``flat`` form that part is the whole key.
    """

    root: KeyPath
    prefix: str = ""
    flat: bool = False

    def __str__(self) -> str:
        return key_of((*self.root, self.prefix.removesuffix("."))).strip(".") or "the top"


class OptimizerKey(NamedTuple):
    """A reading of a path: ``name`` is a parameter, or a group's number if nested; ``leaf`` is a slot or an option."""

    place: KeyPlace
    name: str
    leaf: str

    @classmethod
    def of_slot(cls, path: KeyPath) -> Iterator[OptimizerKey]:
        """Yield the readings of a path as that of a slot, the shortest prefix first."""
        return cls._readings(path, STATE)

    @classmethod
    def of_option(cls, path: KeyPath) -> Iterator[OptimizerKey]:
        """Yield the readings of a path as that of an option, likewise."""
        return (key for key in cls._readings(path, PARAM_GROUPS) if key.place.flat or NUMBER.fullmatch(key.name))

    @classmethod
    def of_parameter_option(cls, path: KeyPath) -> Iterator[OptimizerKey]:
        """Yield the reading of a path as that of an option in Megatron-LM's form, which has them by parameter."""
        return (key for key in cls._readings(path, PARAMETER_OPTIONS) if not key.place.flat)

    @classmethod
    def _readings(cls, path: KeyPath, word: str) -> Iterator[OptimizerKey]:
        if len(path) > 2 and path[-3] == word:
            yield cls(KeyPlace(path[:-3]), str(path[-2]), str(path[-1]))
        # Flat keys may have a prefix, and names may contain the word: one reading for each place where it stands.
        last = str(path[-1])
        for match in _AFTER_DOT[word].finditer(last) if word in last else ():
            name, _, leaf = last[match.end() :].rpartition(".")
            if name and leaf:
                yield cls(KeyPlace(path[:-1], last[: match.start()], True), name, leaf)


_AFTER_DOT = {word: re.compile(rf"(?:(?<=\.)|^){word}\.") for word in (STATE, PARAM_GROUPS, PARAMETER_OPTIONS)}


def optimizers_of(paths: Iterable[KeyPath]) -> set[KeyPlace]:
    """Return the places of all optimizers, by their parameter groups, which may be one item."""
    places = set[KeyPlace]()
    for path in paths:
        # Stock DCP may store all groups as one item, so that the path ends there.
        if PARAM_GROUPS in path:
            places |= {KeyPlace(path[:depth]) for depth, part in enumerate(path) if part == PARAM_GROUPS}
        elif path:
            places |= {key.place for key in OptimizerKey.of_option(path)}
    return places


def slot_in(path: KeyPath, optimizers: Collection[KeyPlace]) -> tuple[str | None, str | None]:
    """Return the parameter and the slot of a path, or two None if it is in none of the optimizers."""
    key = next((key for key in OptimizerKey.of_slot(path) if key.place in optimizers), None)
    return (None, None) if key is None else (key.name, key.leaf)


def is_of_optimizer(path: KeyPath, optimizers: Collection[KeyPlace]) -> bool:
    """Return whether a path is that of an option, or of state of a parameter in one of the optimizers."""
    return slot_in(path, optimizers) != (None, None) or any(OptimizerKey.of_option(path))


# Values of ranks.

_RANK = re.compile("(0|[1-9][0-9]*)-of-([1-9][0-9]*)")
"""The name of a rank of a save."""


def rank_key(key: str, path: KeyPath, rank: int, ranks: int) -> tuple[str, KeyPath]:
    """Return the key and the path, all strings, of one rank's value of an item that differs from rank to rank."""
    name = f"{rank}-of-{ranks}"
    return f"{BY_RANK}.{name}.{key}", (BY_RANK, name, *map(str, path))


class RankValue(NamedTuple):
    """A value of an item at ``path`` that one of ``ranks`` ranks saved."""

    rank: int
    ranks: int
    path: KeyPath


def rank_in(path: KeyPath) -> RankValue | None:
    """Read the path of one rank's value of an item; None for another path."""
    if len(path) > 2 and path[0] == BY_RANK and (match := _RANK.fullmatch(str(path[1]))):
        return RankValue(int(match[1]), int(match[2]), path[2:])
    return None


# State dicts in memory.


def is_optimizer(node: Mapping[Any, Any]) -> bool:
    """Return True if a dict has the keys of an optimizer's state dict in the nested form."""
    return {STATE, PARAM_GROUPS} <= node.keys()


def slots_of(node: Mapping[Any, Any]) -> Iterator[tuple[KeyPath, str, str, Mapping[str, Any]]]:
    """Yield path, parameter, slot and group of each state in an optimizer's state dict; nothing for another dict.

    A group from the flat form has only the options ``convention`` and ``pieces``.
    """
    match node:
        case {"state": Mapping() as state, "param_groups": [*groups]} if all(isinstance(g, Mapping) for g in groups):
            # The nested form.
            group_of: dict[Any, Mapping[str, Any]] = {}
            for group in groups:
                group_of |= dict.fromkeys(group.get(PARAMS) or (), group)
            for name, slots in state.items():
                for slot in slots if isinstance(slots, Mapping) else ():
                    yield (STATE, str(name), str(slot)), str(name), str(slot), group_of.get(name, {})
        # The flat form: state whose parameter has a learning rate beside it.
        case _:
            for key in node:
                prefix, _, suffix = str(key).partition(".")
                name, _, slot = suffix.rpartition(".")
                options = f"{PARAM_GROUPS}.{name}."
                if prefix == STATE and name and f"{options}lr" in node:
                    yield (str(key),), name, slot, {o: node.get(options + o) for o in ("convention", "pieces")}


@dataclass(frozen=True, slots=True)
class NamedOptimizer:
    """An optimizer's state dict in a template, in which parameters have names.

    Attributes:
        key: its key in the template, such as "optimizer"; "" if it is the template itself.
        groups: the names of each group's parameters; None in the flat form, where parameters have options.
    """

    key: str
    groups: tuple[tuple[str, ...], ...] | None

    @property
    def form(self) -> StateForm:
        return StateForm.FLAT if self.groups is None else StateForm.NESTED

    @property
    def state(self) -> str:
        return f"{_child(self.key, STATE)}."

    @property
    def options(self) -> str:
        return f"{_child(self.key, PARAM_GROUPS)}."

    def state_of_names(self, keys: Iterable[str], names: Collection[str]) -> dict[str, dict[str, str]]:
        """Return the keys of its state, by parameter and slot.

        Args:
            names: parameters; in a key that begins with none of them, only the last part is the slot.
        """
        state: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for suffix, key in _suffixes(keys, self.state):
            # Names and slots may have dots: the longest name that is known.
            name = suffix.rpartition(".")[0]
            while name and name not in names:
                name = name.rpartition(".")[0]
            name = name or suffix.rpartition(".")[0]
            state[name][suffix.removeprefix(f"{name}.")] = key
        return dict(state)

    def options_of_names(self, keys: Iterable[str]) -> dict[str, dict[str, str]]:
        """Return the keys of its options in the flat form, by parameter and option."""
        options: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for suffix, key in _suffixes(keys, self.options):
            name, _, option = suffix.rpartition(".")
            options[name][option] = key
        return dict(options)

    def options_of_groups(self, keys: Iterable[str]) -> dict[int, dict[str, str]]:
        """Return the keys of its options in the nested form, by group number and option."""
        options: defaultdict[int, dict[str, str]] = defaultdict(dict)
        for suffix, key in _suffixes(keys, self.options):
            number, _, option = suffix.partition(".")
            if number.isdecimal():
                options[int(number)][option] = key
        return dict(options)


def _suffixes(keys: Iterable[str], prefix: str) -> Iterator[tuple[str, str]]:
    """Yield the keys that begin with a prefix, after what follows it."""
    for key in keys:
        if key.startswith(prefix):
            yield key.removeprefix(prefix), key


def _child(key: str, part: str) -> str:
    return f"{key}.{part}" if key else part


def named_optimizers(state_dict: Any, key: str = "") -> Iterator[NamedOptimizer]:
    """Yield the optimizers in a nested state dict whose parameters have names."""
    match state_dict:
        case {"state": Mapping(), "param_groups": list() as groups} if groups and all(
            _params_are(group, str) for group in groups
        ):
            yield NamedOptimizer(key, tuple(tuple(group[PARAMS]) for group in groups))
        case Mapping() if any(str(part).startswith(f"{PARAM_GROUPS}.") for part in state_dict):
            yield NamedOptimizer(key, None)
        case Mapping() | list():
            for part, value in _containers(state_dict):
                yield from named_optimizers(value, _child(key, part))


def numbered_optimizers(state_dict: Any, key: str = "") -> Iterator[str]:
    """Yield the keys of optimizers whose parameters have numbers, as in ``optimizer.state_dict()``."""
    match state_dict:
        case {"state": Mapping(), "param_groups": list() as groups} if groups and all(
            _params_are(group, int) for group in groups
        ):
            yield key
        case Mapping():
            for part, value in _containers(state_dict):
                yield from numbered_optimizers(value, _child(key, part))


def _containers(node: Mapping[Any, Any] | list[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a state dict that have parts of their own; DCP stores a tuple as one item."""
    for part, value in node.items() if isinstance(node, Mapping) else enumerate(node):
        if isinstance(value, Mapping | list):
            yield str(part), value


def _params_are(group: Any, kind: type) -> bool:
    params = group.get(PARAMS) if isinstance(group, Mapping) else None
    return isinstance(params, list | tuple) and all(isinstance(param, kind) for param in params)
