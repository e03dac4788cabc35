"""What one program's checkpoints look like: where keys say parameters, state and options, and in which words.

A :class:`Dialect` is data: templates of key paths, the slots of each update method, and the names of group options.
The same template reads a key and writes one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

from ...errors import SourceError
from ...store.formats.dcp.directory import COMMON_FILE
from ...vocabulary import Convention, KeyPath


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
"""What a template's fields are called when read, and what may stand in them: three are names of parameters."""


@dataclass(frozen=True, slots=True)
class Template:
    """A key path with fields, such as ``("model", "module.{name}")``; ``{group}`` is a list position."""

    parts: tuple[str, ...]

    def read(self, path: KeyPath) -> dict[str, str] | None:
        """The fields of a path, or None if it is another."""
        if len(path) != len(self.parts):
            return None
        found: dict[str, str] = {}
        for pattern, part in zip(map(_pattern, self.parts), path, strict=True):
            match = pattern.fullmatch(str(part))
            if match is None:
                return None
            found |= match.groupdict()
        return found

    def write(self, **fields: str) -> KeyPath:
        """The path with these fields; a part that is a list position becomes an integer.

        Raises:
            SourceError: reading it back would give other fields.
        """
        values = {field: fields.get(called, "") for field, (called, _) in _FIELDS.items()}
        path = tuple(int(values["group"]) if part == "{group}" else part.format(**values) for part in self.parts)
        if self.read(path) not in (fields, {"chain": "", **fields}):
            raise SourceError(f"{self} cannot say {fields}")
        return path

    def __str__(self) -> str:
        return ".".join(self.parts).replace("{chain}", "")


@lru_cache(maxsize=256)
def _pattern(part: str) -> re.Pattern[str]:
    pieces = re.split(r"\{([a-z]+)\}", part)
    fields = (f"(?P<{called}>{allowed})" for called, allowed in map(_FIELDS.__getitem__, pieces[1::2]))
    return re.compile("".join(a + b for a, b in zip(map(re.escape, pieces[::2]), [*fields, ""], strict=True)))


@dataclass(frozen=True, slots=True)
class StoredMethod:
    """An update method as a dialect stores it.

    ``slots`` translates our words (``momentum``, ``first``, ``second``, ``step``, ``master``) to the dialect's;
    ``options`` those of a group (``lr``, ``momentum``, ``beta1`` …).  ``fresh`` are options of a newly made optimizer
    of that program, written where the source has no such thing.
    """

    name: str
    slots: Mapping[str, str]
    options: Mapping[str, str] = field(default_factory=dict)
    fresh: Mapping[str, object] = field(default_factory=dict)

    def speaks_like(self, other: StoredMethod) -> bool:
        """Whether the options of a group mean the same in both: they are those of one program, under other keys."""
        return self.options is other.options and self.fresh is other.fresh


@dataclass(frozen=True, slots=True)
class Dialect:
    """What one program's checkpoints look like.

    Attributes:
        name: the word for ``--to`` and ``--from``.
        who: the program.
        model, state, option: templates of keys; ``option`` is None where groups are not stored as items.
        convention: of the momentum; None where it is the user's to say.
        methods: in the order in which they are tried.
        derived: slots that the program computes again; left behind when another dialect is written.
        method_option: the group option that names the method, None where the slots tell.
        scales: our words for the scale of a matrix's lr (``original``: sqrt(max(1, m/n)), ``spectral``: sqrt(m/n),
            ``rms``: 0.2 sqrt(max(m, n)), ``none``) to the values of the option that mean it, the first to be written.
        writable: whether checkpoints of it are made here.
        common: the item that holds all groups, with everything else that is no tensor; None where there is none.
        chains: what the state of each method's parameters is put behind, where the source does not say it.
        item: what an item of another program, which it knows nothing of, is called here.
        unsaid: options that would name a program, and with it a convention; they are not made up for this dialect.
        format: what the program's files must be, by the name of the `Container`, where it is not any that DCP reads.
    """

    name: str
    who: str
    model: Template
    state: Template
    option: Template | None
    convention: Convention | None
    methods: tuple[StoredMethod, ...]
    derived: frozenset[str] = frozenset()
    method_option: str | None = None
    scales: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    writable: bool = True
    common: KeyPath | None = None
    chains: Mapping[str, str] = field(default_factory=dict)
    item: Callable[[str], str] = str
    unsaid: frozenset[str] = frozenset()
    format: str | None = None

    @property
    def numbered(self) -> bool:
        """Whether parameters are called by their number in the optimizer."""
        return "{number}" in self.state.parts

    def holds_groups(self, path: KeyPath) -> bool:
        """Whether this is the item that holds all groups, be it one of the checkpoint or a file beside."""
        return self.common is not None and path in (self.common, (COMMON_FILE,))

    @property
    def chained(self) -> bool:
        """Whether keys of state say which of several optimizers it belongs to."""
        return "{chain}" in self.state.parts[0]

    def writes(self, method: StoredMethod) -> StoredMethod:
        """How this dialect stores what another stores as ``method``.

        Raises:
            SourceError: it has no such method, or none with slots for all of that state.
        """
        named = [mine for mine in self.methods if mine.name == method.name]
        needed = method.slots.keys() - {"step"}
        for mine in named:
            if needed <= mine.slots.keys():
                return mine
        known = ", ".join(sorted({slot for mine in named for slot in mine.slots.values()})) or "no such method"
        wanted = ", ".join(sorted(method.slots[word] for word in needed))
        raise SourceError(
            f"{self.name} has no place for {method.name} with {wanted} (it has {known}); leave slots out with --drop"
        )

    def method(
        self, slots: frozenset[str], named: str | None, about: str, dropped: Collection[str] = ()
    ) -> StoredMethod:
        """The method of a parameter whose state has these slots; ``named`` by its group, if that says.

        NorMuon without its row variances, where these are ``dropped``, is Muon.

        Raises:
            SourceError: no method has these slots, or more than one.
        """
        kept = slots - self.derived
        whole = [
            {word: own for word, own in m.slots.items() if own not in dropped} for m in self.methods if m.name == named
        ]
        fitting = [
            method
            for method in self.methods
            if set(method.slots.values()) == kept
            and (named in (None, method.name) or ("momentum" in method.slots and method.slots in whole))
        ]
        if len({method.name for method in fitting}) != 1:
            known = "; ".join(f"{m.name}: {', '.join(m.slots.values())}" for m in self.methods)
            found = f"{', '.join(sorted(kept))}" + (f" in a group of {named!r}" if named else "")
            which = "more than one method" if fitting else "no method"
            raise SourceError(
                f"parameter {about!r} has {found}: {which} of {self.name} ({known}); --drop leaves a slot out, --from "
                "names another program"
            )
        return fitting[0]
