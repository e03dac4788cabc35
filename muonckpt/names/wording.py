"""Text of results: findings, lists, numbers with their units, and JSON."""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")

LAYER_NUMBER = re.compile(r"(?<![^. ])[0-9]+(?![^. ])")
"""A part of a name, or of several with spaces between them, that is a number, as a layer's or an expert's."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: ``1 file``, ``2 files``; ``plural`` is one that does not only add an s."""
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"


def listed(items: Iterable[object], limit: int = 5, separator: str = ", ") -> str:
    """Return the first items of a list, and how many there are besides: ``a, b and 3 more``."""
    items = list(items)
    text = separator.join(map(str, items[:limit]))
    mark = separator.rstrip() if separator in ("; ", "\n- ") else ""
    return f"{text}{mark} and {len(items) - limit} more" if len(items) > limit else text


MAX_WORDS = 60
"""Words of an error."""


def fitted(items: Iterable[str], separator: str, *others: str) -> str:
    """Return the first items of a list, one at least, that leave an error with these ``others`` its `MAX_WORDS`."""
    items = list(items)
    left = MAX_WORDS - sum(len(text.split()) for text in others)
    texts = (listed(items, count, separator) for count in range(min(len(items), MAX_WORDS), 1, -1))
    return next((text for text in texts if len(text.split()) <= left), listed(items, 1, separator))


def by_fault(faults: Iterable[tuple[object, str]]) -> Iterator[tuple[str, str]]:
    """Yield each fault once, after the names of the steps that have it."""
    names: dict[str, list[object]] = {}
    for name, fault in faults:
        names.setdefault(fault, []).append(name)
    for fault, members in names.items():
        yield listed(members, 5), fault


def enumerated(texts: Sequence[str]) -> str:
    """Return all texts of a list, with ``and`` before the last: ``a, b and c``."""
    return " and ".join(filter(None, (", ".join(texts[:-1]), *texts[-1:])))


def unnumbered(name: str) -> str:
    """Replace every part of a name that is a number by ``*``: a parameter then has one name in all layers."""
    return LAYER_NUMBER.sub("*", name)


def common_name(names: Sequence[str]) -> str:
    """Return one name for several that differ in numbers only, with ``*`` where they do."""
    numbers: list[str] = []
    for column in zip(*map(LAYER_NUMBER.findall, names), strict=True):
        numbers.append(column[0] if len({*column}) == 1 else "*")
    remaining_numbers = iter(numbers)
    return LAYER_NUMBER.sub(lambda _: next(remaining_numbers), names[0])


def find_heads(names: Sequence[str], matrices: Sequence[str]) -> set[str]:
    """Find the likely output heads among these names: the last one that no other layer repeats, or else the layers of
    one pattern with which ``matrices`` end, unless these are all.
    """
    patterns = [unnumbered(name) for name in names]
    counts = Counter(patterns)
    if unique := [name for name, pattern in zip(names, patterns, strict=True) if counts[pattern] == 1]:
        return {unique[-1]}
    # No name is unique: a head of several layers stands at the end.
    layers = [name for name, pattern in zip(names, patterns, strict=True) if pattern == patterns[-1]]
    if {*layers} != {*matrices[-len(layers) :]}:
        return set()
    return {*layers} if len(matrices) > len(names) else {*layers[-1:]}


def folded(rows: Iterable[tuple[str, T]]) -> list[tuple[str, int, T]]:
    """Merge rows whose names differ only in numbers, as layers' do; return names with ``*`` there, and counts."""
    names_by_row: defaultdict[tuple[tuple[str, ...], T], list[str]] = defaultdict(list)
    for name, cells in rows:
        names_by_row[tuple(LAYER_NUMBER.split(name)), cells].append(name)
    return [(common_name(names), len(names), cells) for (_, cells), names in names_by_row.items()]


def merged_names(names: Iterable[str]) -> list[str]:
    """Return names as text, one for all layers in which they differ by numbers, with how many these are."""
    rows = folded((name, "") for name in names)
    return [name if count == 1 else f"{name} ({count})" for name, count, _ in rows]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def shape_text(shape: Iterable[int]) -> str:
    """Return a shape as tables show it: ``8 x 6``, or ``scalar``."""
    return " x ".join(map(str, shape)) or "scalar"


def size(count: int) -> str:
    """Return a number of bytes in binary units, with three figures."""
    value = float(count)
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            return f"{count} B" if unit == "B" else f"{value:.{3 if value < 999.5 else 4}g} {unit}"
        value /= 1024
    raise AssertionError("the last unit takes everything")


def printable(text: str) -> str:
    """Escape characters of a name that could control a terminal, break a line, or turn its direction."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shell_line(*words: object) -> str:
    """Return a command that can be pasted into bash, whatever characters are in its words."""
    return " ".join(map(_shell_word, map(str, words)))


def command(*arguments: object) -> str:
    """Return a command of ours as it can be pasted into a shell."""
    return shell_line("muonckpt", *arguments)


def _shell_word(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    characters: list[str] = []
    for character in word:
        if character in "\\'":
            characters.append(f"\\{character}")
        elif character.isprintable():
            characters.append(character)
        else:  # also a byte that is no text
            characters += [f"\\x{byte:02x}" for byte in os.fsencode(character)]
    return f"$'{''.join(characters)}'"


def moment(seconds: float) -> str:
    """Return a time, given in seconds since 1970, to the minute in UTC: ``2026-11-23 03:12``."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong or looks odd.

    Attributes:
        kind: one word for programs.
        message: the fault, what was expected, and where.
        names: of tensors, items, parameters, files or ranks that it concerns.
        means: the usual cause, and what to do; empty where the message says it.
    """

    kind: str
    message: str
    names: tuple[str, ...] = ()
    means: str = ""

    @property
    def key(self) -> str | None:
        """The first name; None if there is none."""
        return self.names[0] if self.names else None

    @classmethod
    def listing(cls, kind: str, message: str, names: Sequence[str], means: str = "") -> Finding:
        """Return a finding whose message ends with the first names."""
        return cls(kind, f"{message}: {listed(names, 3)}", tuple(names), means)


def fields_of(result: DataclassInstance) -> dict[str, Any]:
    """Return the fields of a dataclass by name, and their values as they are."""
    return {field.name: getattr(result, field.name) for field in fields(result)}


def as_json(result: Any) -> Any:
    """Return an object as `json.dumps` takes it, as its ``default``: by its ``to_json``, or its fields, or as text."""
    match result:
        case object(to_json=to_json):
            return to_json()
        case Mapping():
            return dict(result)
        case _ if is_dataclass(result) and not isinstance(result, type):
            return fields_of(result)
        case _:
            return str(result)
