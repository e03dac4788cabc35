"""The fields of descriptions in JSON, checked one by one when they are read.

Each reader takes a value of `json.loads` and raises `TypeError` or `ValueError` if it is not what it should be.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from .box import Index
from .vocabulary import KeyPath

T = TypeVar("T")

_DEEPEST = 32
"""Levels of the free-form parts of a manifest."""


def compact(value: Any) -> str:
    """The JSON text of a value, on one line; lone surrogates, which UTF-8 cannot hold, are escaped as JSON has them."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def optional(read: Callable[[Any], T], value: Any) -> T | None:
    """What a reader makes of a value; None of null."""
    return None if value is None else read(value)


def free_form(value: Any) -> dict[str, Any]:
    """A JSON object of any content, which is not nested so deeply that it could not be written again."""
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, got {value!r:.200}")
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


def list_of(read: Callable[[Any], T]) -> Callable[[Any], list[T]]:
    """Return a reader of lists of what another one reads."""

    def read_list(value: Any) -> list[T]:
        if not isinstance(value, list):
            raise TypeError(f"expected a list, got {value!r:.200}")
        return list(map(read, value))

    return read_list


def provenance(value: Any) -> dict[str, Any]:
    """Return free-form JSON whose entries with a meaning, as docs/formats/manifest.md has them, have its forms."""
    return _checked(value, _PROVENANCE)


def layout(value: Any) -> dict[str, Any]:
    """Return the layout of a tensor, likewise."""
    checked = _checked(value, _LAYOUT)
    axes = checked.get("axes")
    if axes is not None and len(axes) != len(checked.get("mesh", axes)):
        raise ValueError(f"expected an axis for each of the sizes {checked['mesh']!r:.200}, got {axes!r:.200}")
    return checked


def _checked(value: Any, readers: Mapping[str, Callable[[Any], object]]) -> dict[str, Any]:
    """Check the entries that have readers; carry all."""
    entries = free_form(value)
    for name in readers.keys() & entries.keys():
        try:
            readers[name](entries[name])
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from error
    return entries


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


def _cut(value: Any) -> tuple[str, int]:
    """An axis, and the dim that it cuts."""
    axis, dim = list_of(lambda part: part)(value)
    return string(axis), whole_number(dim)


_PROVENANCE: Mapping[str, Callable[[Any], object]] = {
    "buffers": list_of(free_form),
    "exported": free_form,
    "folders": list_of(string),
    "layer_wise": free_form,
    "merged": list_of(free_form),
    "not_kept": list_of(string),
    "not_read": list_of(string),
    "numbered_parameters": list_of(string),
    "resharded": list_of(free_form),
}

_LAYOUT: Mapping[str, Callable[[Any], object]] = {
    "axes": partial(optional, list_of(partial(optional, string))),
    "cuts": list_of(_cut),
    "mesh": integers,
    "placements": list_of(string),
}
