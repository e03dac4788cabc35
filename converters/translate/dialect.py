"""How one program names what it saves: parameters, optimizer state and options of parameter groups.

A :class:`Dialect` is data: templates of key paths, the slots of each update method, and the names of group options.
The same template reads a key and writes one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from ...box import Index
from ...errors import SourceError
from ...store.formats.signs import COMMON_FILE
from ...vocabulary import Convention, KeyPath
from .codings import Coding


def key_of(path: KeyPath) -> str:
    """The flat key of a path in the nested state dict."""
    return ".".join(map(str, path))


_FIELDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "name": ("name", ".+"),
        "number": ("name", "0|[1-9][0-9]*"),
        "weight": ("name", r"(?!(?:chained_[0-9]+\.)*optimizer\.).+"),
        "slot": ("slot", "[^.]+"),
        "option": ("option", "[^.]+"),
        "group": ("group", "0|[1-9][0-9]*"),
        "chain": ("chain", r"(?:chained_[0-9]+\.)*"),
    }
)
"""The fields of templates: their names when read, and a pattern of their values.  Three are names of parameters."""


@dataclass(frozen=True, slots=True)
class Template:
    """A key path with fields, such as ``("model", "module.{name}")``; ``{group}`` is a list position.

    ``root`` is the path, without fields, under which this path lies.
    """

    parts: tuple[str, ...]
    root: KeyPath = ()

    def read(self, path: KeyPath) -> dict[str, str] | None:
        """The fields of a path, or None if the path does not match."""
        depth = len(self.root)
        if len(path) != depth + len(self.parts) or path[:depth] != self.root:
            return None
        fields: dict[str, str] = {}
        for pattern, part in zip(map(_pattern, self.parts), path[depth:], strict=True):
            match = pattern.fullmatch(str(part))
            if match is None:
                return None
            fields |= match.groupdict()
        return fields

    def write(self, **fields: str) -> KeyPath:
        """The path with these fields; a part that is a list position becomes an integer.

        Raises:
            SourceError: these fields cannot be read back from the path.
        """
        values = {field: fields.get(name, "") for field, (name, _) in _FIELDS.items()}
        parts = (int(values["group"]) if part == "{group}" else part.format(**values) for part in self.parts)
        path = (*self.root, *parts)
        if self.read(path) not in (fields, {"chain": "", **fields}):
            raise SourceError(f"{self} cannot hold {fields}")
        return path

    @property
    def numbered(self) -> bool:
        """Whether it names parameters by their number in the optimizer."""
        return "{number}" in self.parts

    @property
    def listed(self) -> bool:
        """Whether it names groups by their position in a list."""
        return "{group}" in self.parts

    @property
    def chained(self) -> bool:
        """Whether its paths say to which of several optimizers they belong."""
        return "{chain}" in self.parts[0]

    def __str__(self) -> str:
        return key_of((*self.root, *self.parts)).replace("{chain}", "")


@dataclass(frozen=True, slots=True)
class Templates:
    """A template for each of several optimizers; ``{chain}`` is the place of the optimizer, by which they are known."""

    by_chain: Mapping[str, Template]

    def read(self, path: KeyPath) -> dict[str, str] | None:
        """The fields of a path, or None if the path matches no template."""
        for chain, template in self.by_chain.items():
            if fields := template.read(path):
                return {**fields, "chain": chain}
        return None

    def write(self, *, chain: str, **fields: str) -> KeyPath:
        """The path with these fields, as in `Template.write`."""
        return self.by_chain[chain].write(**fields)

    @property
    def numbered(self) -> bool:
        """Whether they name parameters by their number in the optimizer."""
        return any(template.numbered for template in self.by_chain.values())

    @property
    def listed(self) -> bool:
        """Whether they name groups by their position in a list."""
        return all(template.listed for template in self.by_chain.values())

    @property
    def chained(self) -> bool:
        """Whether their paths say to which of several optimizers they belong: always."""
        return True

    def __str__(self) -> str:
        return " and ".join(map(str, self.by_chain.values()))


AnyTemplate = Template | Templates


@lru_cache(maxsize=256)
def _pattern(part: str) -> re.Pattern[str]:
    pieces = re.split(r"\{([a-z]+)\}", part)
    fields = (f"(?P<{name}>{allowed})" for name, allowed in map(_FIELDS.__getitem__, pieces[1::2]))
    return re.compile("".join(a + b for a, b in zip(map(re.escape, pieces[::2]), [*fields, ""], strict=True)))


@dataclass(frozen=True, slots=True)
class StoredMethod:
    """An update method as a dialect stores it.

    Attributes:
        slots: common names (``momentum``, ``first``, ``second``, ``step``, ``master``) mapped to those of the dialect.
        options: the same for options of a group whose values are common ones (``lr``, ``momentum``, ``pieces``, …).
        codings: what the other options mean that change the update.
        idle: options that a group of the program has and that do not change this method's update, with their values in
            a new optimizer.
        assumed: options that change it and that the program needs: what a new optimizer has.
        derived: the slots of each parameter that follow from its common options and its shape; None: they do not.
    """

    name: str
    slots: Mapping[str, str]
    options: Mapping[str, str] = field(default_factory=dict)
    codings: tuple[Coding, ...] = ()
    idle: Mapping[str, object] = field(default_factory=dict)
    assumed: Mapping[str, object] = field(default_factory=dict)
    derived: Mapping[str, Callable[[Mapping[str, Any], Index], float | None]] = field(default_factory=dict)

    def shares_options_with(self, other: StoredMethod) -> bool:
        """Whether group options mean the same in both, because both describe one program under different keys."""
        return self.options is other.options and self.idle is other.idle


@dataclass(frozen=True, slots=True)
class Dialect:
    """What one program's checkpoints look like.

    Attributes:
        name: the value of ``--to`` and ``--from``.
        who: the program.
        model, state, option: templates of keys; ``option`` is None if groups are not stored as items.
        convention: the convention of the momentum; None if the user must say it.
        methods: the update methods, in the order in which they are tried.
        derived: slots that the program can compute again; they are left out when another dialect is written.
        method_option: the group option that names the method; None if the slots tell it.
        facts: common options that the program has no words for, by method and name: what it always does.
        hints: for common options that the program does not store: where a user finds them.
        writable: whether checkpoints of this dialect can be written.
        common: the item that holds all groups and all other non-tensor values; None if there is no such item.
        chains: the key prefix for the state of each method, if the source has none.
        item: makes the key for an item of another program that this one does not know.
        unsaid: options that would point to a program, and so to a convention; they are never added.
        private: globs of the items that mean nothing to other programs; such of the same name here keep them.
        opaque: globs of state that only the program can read, as nothing says whose it is.
        format: the format that the program needs, by the name of the `Container`; None if any that DCP reads will do.
    """

    name: str
    who: str
    model: Template
    state: AnyTemplate
    option: AnyTemplate | None
    convention: Convention | None
    methods: tuple[StoredMethod, ...]
    derived: frozenset[str] = frozenset()
    method_option: str | None = None
    facts: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    hints: Mapping[str, str] = field(default_factory=dict)
    writable: bool = True
    common: KeyPath | None = None
    chains: Mapping[str, str] = field(default_factory=dict)
    item: Callable[[str], str] = str
    unsaid: frozenset[str] = frozenset()
    private: frozenset[str] = frozenset()
    opaque: frozenset[str] = frozenset()
    format: str | None = None

    @property
    def numbered(self) -> bool:
        """Whether parameters are named by their number in the optimizer."""
        return self.state.numbered

    def slots_called(self, name: str) -> frozenset[str]:
        """What its methods call the slot of this common name."""
        return frozenset(method.slots[name] for method in self.methods if name in method.slots)

    def holds_groups(self, path: KeyPath) -> bool:
        """Whether this is the item that holds all groups, in the checkpoint or in a file of its own."""
        return self.common is not None and path in (self.common, (COMMON_FILE,))

    @property
    def chained(self) -> bool:
        """Whether keys of state say to which of several optimizers it belongs."""
        return self.state.chained

    def writes(self, method: StoredMethod) -> StoredMethod:
        """The method of this dialect for what another dialect stores as ``method``.

        Raises:
            SourceError: there is none, or none with slots for all of that state.
        """
        candidates = [candidate for candidate in self.methods if candidate.name == method.name]
        needed = method.slots.keys() - {"step"}
        for candidate in candidates:
            if needed <= candidate.slots.keys():
                return candidate
        slots = sorted({slot for candidate in candidates for slot in candidate.slots.values()})
        available = ", ".join(slots) or "no such method"
        missing = ", ".join(sorted(method.slots[name] for name in needed))
        raise SourceError(
            f"{self.name} has no place for {method.name} with {missing} (it has {available}); leave out "
            "slots with --drop, and where these are float32 masters, make them weights with --weights masters, or "
            "leave them out with --weights model"
        )

    def method(
        self, slots: frozenset[str], named: str | None, about: str, dropped: Collection[str] = ()
    ) -> StoredMethod:
        """The method of a parameter whose state has these slots; ``named`` is the name in its group, if there is one.

        NorMuon whose row variances are ``dropped`` is Muon.

        Raises:
            SourceError: no method has these slots, or more than one.
        """
        stored = slots - self.derived
        without_dropped = [
            {name: slot for name, slot in m.slots.items() if slot not in dropped}
            for m in self.methods
            if m.name == named
        ]
        fitting = [
            method
            for method in self.methods
            if set(method.slots.values()) == stored
            and (named in (None, method.name) or ("momentum" in method.slots and method.slots in without_dropped))
        ]
        if len({method.name for method in fitting}) != 1:
            available = "; ".join(f"{m.name}: {', '.join(m.slots.values())}" for m in self.methods)
            state = f"{', '.join(sorted(stored))}" + (f" in a group of {named!r}" if named else "")
            count = "more than one method" if fitting else "no method"
            raise SourceError(
                f"parameter {about!r} has {state}: {count} of {self.name} ({available}) fits; "
                "--drop leaves a slot out, --from names another program"
            )
        return fitting[0]
