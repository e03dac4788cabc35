"""Finds the keys that a user asks for: whole, by shell patterns, or without what comes before them.

Whatever takes keys from people asks here, so that a word means the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType

from ..names.errors import TargetError, did_you_mean
from ..names.keys import OptimizerKey
from ..names.wording import listed
from .record import StateRecord

Names = Mapping[str, tuple[str, str]]
"""Other names of keys of optimizer state: the parameter's with the slot, and the parameter's alone."""

_NO_NAMES: Names = MappingProxyType({})


def names_of(tensors: Iterable[StateRecord]) -> Names:
    """Return the other names of the state among these tensors, whose keys may have numbers for parameters."""
    names = {}
    for tensor in tensors:
        if tensor.name is not None and tensor.slot is not None:
            names[tensor.key] = f"{tensor.name}.{tensor.slot}", tensor.name
        elif key := next(OptimizerKey.of_slot(tensor.path), None):
            names[tensor.key] = f"{key.name}.{key.leaf}", key.name
    return names


def find_keys(word: str, keys: Sequence[str], names: Names = _NO_NAMES) -> list[str]:
    """Return the keys that a word stands for; none if it stands for nothing.

    They are the key itself; or those that match it as a shell pattern; or those that end with it, from a dot on; or
    those of optimizer state whose parameter is called so, with or without the slot.  The first of these that finds
    anything counts.
    """
    if word in keys:  # there are keys with brackets
        return [word]
    ending = f".{word}"

    def fits(name: str) -> bool:
        return fnmatchcase(name, word) or name.endswith(ending) or fnmatchcase(name, f"*{ending}")

    return (
        [key for key in keys if fnmatchcase(key, word)]
        or [key for key in keys if fits(key)]
        or [key for key in keys if key in names and fits(names[key][0])]
        or [key for key in keys if key in names and fits(names[key][1])]
    )


def find_key(word: str, keys: Sequence[str], names: Names = _NO_NAMES, what: str = "tensor", where: str = "") -> str:
    """Return the one key that a word stands for.

    Raises:
        TargetError: it is none, and then the message names the closest ones; or several, and then it lists them.
    """
    found = find_keys(word, keys, names)
    if not found:
        raise TargetError(f"no {what} {word!r}{where}{did_you_mean(word, [*keys])}")
    if len(found) > 1:
        raise TargetError(_ambiguous(word, found, what, where))
    return found[0]


def match_keys(
    words: Sequence[str], keys: Sequence[str], names: Names = _NO_NAMES, what: str = "tensor", where: str = ""
) -> set[str]:
    """Return the keys that these words stand for; all of them if there are no words.

    Raises:
        TargetError: a word stands for nothing, or one without a wildcard for several keys; names them.
    """
    matching = set[str]() if words else {*keys}
    for word in words:
        found = find_keys(word, keys, names)
        if not found:
            raise TargetError(f"no {what} matches {word!r}{where}{did_you_mean(word, [*keys])}")
        if len(found) > 1 and not {*word} & {*"*?["}:
            raise TargetError(_ambiguous(word, found, what, where))
        matching.update(found)
    return matching


def _ambiguous(word: str, found: Sequence[str], what: str, where: str) -> str:
    return f"{word!r} may be each of {len(found)} {what}s{where}: {listed(found)}; write more of the key"
