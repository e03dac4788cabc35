"""Rules that rename parameters: patterns of names, and the rules that lead from the names of one side to the other's.

A rule is a pair of patterns.  ``{x}`` matches one part of a dotted name, ``{x*}`` one or more whole parts.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain, product
from string import ascii_lowercase

WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Parts that torch.compile, activation checkpointing and FSDP1 insert into names; DCP drops them too, mostly."""


def wrappers_in(names: Collection[str]) -> dict[str, int]:
    """Return the parts of names that wrappers have put there, and into how many; ``module`` if all begin with it."""
    counts: Counter[str] = Counter()
    for name in names:
        counts.update(WRAPPERS.intersection(name.split(".")))
    if names and all(name.startswith("module.") for name in names):
        counts["module"] = len(names)
    return dict(sorted(counts.items()))


PLACEHOLDER = re.compile(r"\{([a-z]+)(\*?)\}")
_ESCAPED_PLACEHOLDER = re.compile(r"\\\{([a-z]+)(\\\*)?\\\}")  # as re.escape() leaves it

_MAX_RULES = 100
"""The most rules that are looked for: a longer table is no help."""

Rule = tuple[str, str]
"""The pattern of the present names, and that of the new ones."""


@lru_cache(maxsize=1024)
def compiled(pattern: str, each: str | None = None) -> re.Pattern[str]:
    """Return a pattern as a regular expression, in which the placeholder ``each`` matches a number."""

    def group(match: re.Match[str]) -> str:
        name, many = match.groups()
        if name == each:
            return f"(?P<{name}>0|[1-9][0-9]*)"
        return f"(?P<{name}>.+)" if many else f"(?P<{name}>[^.]+)"

    return re.compile(_ESCAPED_PLACEHOLDER.sub(group, re.escape(pattern)))


def filled(pattern: str, values: Mapping[str, str]) -> str:
    """Return a pattern with values in place of its placeholders."""
    return PLACEHOLDER.sub(lambda match: values[match[1]], pattern)


def as_toml(rules: Iterable[Mapping[str, object]]) -> str:
    """Return rules, each by the keys of its table, as the file that ``muonckpt convert --rules`` reads."""
    tables = (["[[rule]]", *(f"{key} = {_as_toml(value)}" for key, value in rule.items())] for rule in rules)
    return "\n\n".join(map("\n".join, tables))


def _as_toml(value: object) -> str:
    match value:
        case str() if "'" in value or not value.isprintable():  # a string of JSON is one of TOML, but for DEL
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case str():
            return f"'{value}'"
        case [*parts]:
            return f"[{', '.join(map(_as_toml, parts))}]"
        case _:
            return str(value).lower()


def find_rules(saved: Mapping[str, Hashable], live: Mapping[str, Hashable]) -> tuple[Rule, ...]:
    """Return the rules that give saved parameters the names of a program's; none if that cannot be told exactly.

    Names of both sides belong together if they are equal but for the parts that only one side has, numbers aside, and
    so are their shapes and dtypes.  Each missing name has to have one such partner.

    Args:
        saved, live: shapes and dtypes of the weight and the state, by name.
    """
    gone = {name: form for name, form in saved.items() if name not in live}
    new = {name: form for name, form in live.items() if name not in saved}
    pairs = _pairs(gone, new) or _moved(gone, new)
    # Few rules first: of a common beginning with numbers as placeholders; longer ones where other names begin so, too.
    depth = max((name.count(".") + 1 for name in chain(*pairs.items())), default=0)
    for extra_parts, has_numbers in product(range(depth + 1), (False, True)):
        rules = tuple(dict.fromkeys(_rule(old, new, extra_parts, has_numbers) for old, new in pairs.items()))
        if len(rules) <= _MAX_RULES and all(_renamed(rules, name) == pairs.get(name, name) for name in saved):
            return rules
    return ()


def _pairs(saved: Mapping[str, Hashable], live: Mapping[str, Hashable]) -> Mapping[str, str]:
    """Return the new name of each saved one, by which all missing names are found; nothing if several may be meant."""
    parts = [{part for name in side for part in name.split(".")} for side in (saved, live)]
    one_sided = {part for part in parts[0] ^ parts[1] if not part.isdecimal()} | WRAPPERS
    candidates: list[defaultdict[Hashable, list[str]]] = []
    for side in (saved, live):
        names: defaultdict[Hashable, list[str]] = defaultdict(list)
        for name, form in side.items():
            names[".".join(part for part in name.split(".") if part not in one_sided), form].append(name)
        candidates.append(names)
    saved_names, live_names = candidates
    pairs: dict[str, str] = {}
    for key, new_names in live_names.items():
        if len(new_names) > 1 or len(saved_names.get(key, ())) != 1:
            return {}
        pairs[saved_names[key][0]] = new_names[0]
    return pairs


def _moved(saved: Mapping[str, Hashable], live: Mapping[str, Hashable]) -> Mapping[str, str]:
    """Return the new name of each saved one, where all have got or lost one beginning; nothing if that is not so."""
    inner, outer = sorted((saved, live), key=lambda side: min(map(len, side), default=0))
    some = min(inner, default="")
    beginnings = {name.removesuffix(some) for name in outer if name.endswith(f".{some}")}
    moves = [{name: beginning + name for name in inner} for beginning in beginnings]
    found = [names for names in moves if {names[name]: form for name, form in inner.items()} == outer]
    if len(found) != 1:
        return {}
    return found[0] if inner is saved else {new: old for old, new in found[0].items()}


def _rule(old: str, new: str, extra_parts: int, has_numbers: bool) -> Rule:
    """Return the rule for a pair of names and all that begin as they do.

    Args:
        extra_parts: how many of the last parts that both have are in the rule.
        has_numbers: whether it contains literal numbers, for other layers have other rules.
    """
    old_parts, new_parts = old.split("."), new.split(".")
    kept = max(common_tail(old_parts, new_parts) - extra_parts, 0)
    heads = [parts[: len(parts) - kept] for parts in (old_parts, new_parts)]
    numbers = [[part for part in head if part.isdecimal()] for head in heads]
    if not has_numbers and numbers[0] == numbers[1] and len(numbers[0]) <= len(ascii_lowercase):
        heads = [_with_placeholders(head) for head in heads]
    tail = ["{tail*}"] if kept else []
    return ".".join([*heads[0], *tail]), ".".join([*heads[1], *tail])


def common_tail(a: Sequence[object], b: Sequence[object]) -> int:
    """Return how many parts two names or paths have in common at their ends."""
    pairs = zip(reversed(a), reversed(b), strict=False)
    return next((number for number, (part, other) in enumerate(pairs) if part != other), min(len(a), len(b)))


def _with_placeholders(parts: Sequence[str]) -> list[str]:
    letters = iter(ascii_lowercase)
    return [f"{{{next(letters)}}}" if part.isdecimal() else part for part in parts]


def _renamed(rules: Iterable[Rule], name: str) -> str:
    """Return the name that a table of rules gives: each is applied to what those before it gave."""
    for old, new in rules:
        if match := compiled(old).fullmatch(name):
            name = filled(new, match.groupdict())
    return name
