"""The fields of descriptions in JSON, checked one by one when they are read.

Each reader takes a value of `json.loads` and raises `TypeError` or `ValueError` if it is not what it should be.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, TypeVar

from .box import Index
from .vocabulary import KeyPath

T = TypeVar("T")

_DEEPEST = 32
"""Levels of the free-form parts of a manifest."""


def compact(value: Any) -> str:
    """The JSON text of a value, on one line."""
    return json.dumps(value, ensure_ascii=False)


def optional(read: Callable[[Any], T], value: Any) -> T | None:
    """What a reader makes of a value; None of null."""
    return None if value is None else read(value)


def free_form(value: Any) -> dict[str, Any]:
    """A JSON object of any content, which is not nested so deeply that it could not be written again."""
    level: list[Any] = [value]
    for _ in range(_DEEPEST):
        level = [
            part
            for container in level
            for part in (container.values() if isinstance(container, dict) else container)
            if isinstance(part, dict | list)
        ]
        if not level:
            return dict(value)
    raise ValueError(f"expected JSON of at most {_DEEPEST} levels")


def string(value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise TypeError(f"expected a string, got {value!r:.200}")
    return value


def whole_number(value: Any) -> int:
    """An integer >= 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"expected an integer >= 0, got {value!r:.200}")
    return value


def integers(value: Any) -> Index:
    """A list of integers >= 0."""
    if not isinstance(value, list):
        raise TypeError(f"expected a list of integers, got {value!r:.200}")
    return tuple(map(whole_number, value))


def key_path(value: Any) -> KeyPath:
    """A path in a nested state dict: strings, and integers for list positions."""
    if not isinstance(value, list):
        raise TypeError(f"expected a path, got {value!r:.200}")
    return tuple(part if isinstance(part, str) else whole_number(part) for part in value)


def all_strings(values: Sequence[Any]) -> Sequence[str]:
    """Strings.  Like the others that take many values, faster than each, and with the same errors."""
    return values if {str} >= {*map(type, values)} else list(map(string, values))


def all_optional(read: Callable[[Any], T], values: Iterable[Any]) -> list[T | None]:
    """What a reader makes of each value; None of null."""
    return [None if value is None else read(value) for value in values]


def all_integers(values: Sequence[Any]) -> Iterable[Index]:
    """Lists of integers >= 0."""
    simple = _are_lists(values, int) and min(chain.from_iterable(values), default=0) >= 0
    return map(tuple, values) if simple else map(integers, values)


def all_key_paths(values: Sequence[Any]) -> Iterable[KeyPath]:
    """Paths in a nested state dict."""
    return map(tuple, values) if _are_lists(values, str) else map(key_path, values)


def _are_lists(values: Sequence[Any], kind: type) -> bool:
    return {list} >= {*map(type, values)} and {kind} >= {*map(type, chain.from_iterable(values))}


def field_of_all(
    name: str, read: Callable[[Sequence[Any]], Iterable[T]], values: Sequence[Any], keys: Sequence[Any]
) -> list[T]:
    """What a reader makes of a field of all tensors with these keys.

    Raises:
        ValueError: it refuses a value; names the tensor and the field.
    """
    try:
        return list(read(values))
    except (TypeError, ValueError) as error:
        wrong = next((key for key, value in zip(keys, values, strict=True) if _is_refused(read, value)), None)
        raise ValueError(f"tensor {wrong!r:.200}: {name}: {error}") from error


def _is_refused(read: Callable[[Sequence[Any]], Iterable[Any]], value: Any) -> bool:
    try:
        list(read([value]))
    except (TypeError, ValueError):
        return True
    return False


def matching(pattern: re.Pattern[str]) -> Callable[[Any], str]:
    """A reader of strings that match a pattern."""

    def read(value: Any) -> str:
        if not pattern.fullmatch(string(value)):
            raise ValueError(f"{value!r:.200} does not match {pattern.pattern}")
        return str(value)

    return read
