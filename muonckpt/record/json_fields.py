"""Descriptions in JSON: readers of fields, which check them, and digests that show accidental damage.

A reader takes a value of `json.loads`, and raises `TypeError` or `ValueError` if it is not as it should be.

A text that only we write is closed by a digest of its own bytes (`sealed_text`).  A file that other programs may lay
out again, as zarr's and Hugging Face's JSON, has a digest of the values in it (`digest_of`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import xxhash

from ..algebra.box import Index
from ..names.errors import DamageError
from ..names.vocabulary import KeyPath

T = TypeVar("T")

_MAX_LEVELS = 32
"""Levels of the free-form parts of a manifest."""


def compact(value: Any) -> str:
    """Return a value as JSON text on one line, with lone surrogates, which UTF-8 cannot hold, escaped as in JSON."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def optional(read: Callable[[Any], T], value: Any) -> T | None:
    return None if value is None else read(value)


def free_form(value: Any) -> dict[str, Any]:
    """Read a JSON object of any content, unless it is nested so deeply that it could not be written again."""
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, got {value!r:.200}")
    level: list[Any] = [value]
    for _ in range(_MAX_LEVELS):
        # Go down one level at a time: recursion would end before a hostile nesting does.
        inner: list[Any] = []
        for part in level:
            values = part.values() if isinstance(part, dict) else part
            inner += [value for value in values if isinstance(value, dict | list)]
        level = inner
        if not level:
            return dict(value)
    raise ValueError(f"expected JSON of at most {_MAX_LEVELS} levels")


def list_of(read: Callable[[Any], T]) -> Callable[[Any], list[T]]:
    """Return a reader of lists whose elements ``read`` reads."""

    def read_list(value: Any) -> list[T]:
        if not isinstance(value, list):
            raise TypeError(f"expected a list, got {value!r:.200}")
        return list(map(read, value))

    return read_list


def provenance(value: Any) -> dict[str, Any]:
    """Read a provenance: free-form JSON, in which the entries that docs/formats/manifest.md lists have their forms."""
    return _check_fields(value, _PROVENANCE)


def layout(value: Any) -> dict[str, Any]:
    """Read the layout of a tensor: free-form JSON, in which some entries have forms."""
    checked = _check_fields(value, _LAYOUT)
    axes = checked.get("axes")
    if axes is not None and len(axes) != len(checked.get("mesh", axes)):
        raise ValueError(f"expected an axis for each of the sizes {checked['mesh']!r:.200}, got {axes!r:.200}")
    return checked


def _check_fields(value: Any, readers: Mapping[str, Callable[[Any], object]]) -> dict[str, Any]:
    entries = free_form(value)
    for name in readers.keys() & entries.keys():
        try:
            readers[name](entries[name])
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from error
    return entries


def string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, got {value!r:.200}")
    return value


def whole_number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"expected an integer >= 0, got {value!r:.200}")
    return value


def integers(value: Any) -> Index:
    return tuple(list_of(whole_number)(value))


def key_path(value: Any) -> KeyPath:
    """Read a path in a nested state dict: strings, and integers for list positions."""
    return tuple(list_of(lambda part: part if isinstance(part, str) else whole_number(part))(value))


# Readers of one field of many tensors: faster than a call for each, with the same errors.


def all_strings(values: Sequence[Any]) -> Sequence[str]:
    return values if {str} >= {*map(type, values)} else list(map(string, values))


def all_optional(read: Callable[[Any], T], values: Iterable[Any]) -> list[T | None]:
    return [None if value is None else read(value) for value in values]


def all_integers(values: Sequence[Any]) -> Iterable[Index]:
    are_valid = _are_lists(values, int) and min(chain.from_iterable(values), default=0) >= 0
    return map(tuple, values) if are_valid else map(integers, values)


def all_key_paths(values: Sequence[Any]) -> Iterable[KeyPath]:
    return map(tuple, values) if _are_lists(values, str) else map(key_path, values)


def _are_lists(values: Sequence[Any], kind: type) -> bool:
    return {list} >= {*map(type, values)} and {kind} >= {*map(type, chain.from_iterable(values))}


def field_of_all(
    name: str, read: Callable[[Sequence[Any]], Iterable[T]], values: Sequence[Any], keys: Sequence[Any]
) -> list[T]:
    """Read one field of all tensors with these keys.

    Raises:
        ValueError: ``read`` refuses a value; names the tensor and the field.
    """
    try:
        return list(read(values))
    except (TypeError, ValueError):
        for key, value in zip(keys, values, strict=True):  # find the tensor
            try:
                list(read([value]))
            except (TypeError, ValueError) as error:
                raise ValueError(f"tensor {key!r:.200}: {name}: {error}") from error
        raise


def matching(pattern: re.Pattern[str]) -> Callable[[Any], str]:
    """Return a reader of strings that match a pattern."""

    def read(value: Any) -> str:
        if not pattern.fullmatch(string(value)):
            raise ValueError(f"{value!r:.200} does not match {pattern.pattern}")
        return str(value)

    return read


def _read_cut(value: Any) -> tuple[str, int]:
    axis, dim = list_of(lambda part: part)(value)
    return string(axis), whole_number(dim)


_PROVENANCE: Mapping[str, Callable[[Any], object]] = {
    "buffers": list_of(free_form),
    "exported": free_form,
    "folders": list_of(string),
    "frozen": list_of(string),
    "layer_wise": free_form,
    "not_kept": list_of(string),
    "not_read": list_of(string),
    "numbered_parameters": list_of(string),
    "resharded": list_of(free_form),
    "source_roots": free_form,
}

_LAYOUT: Mapping[str, Callable[[Any], object]] = {
    "axes": partial(optional, list_of(partial(optional, string))),
    "cuts": list_of(_read_cut),
    "mesh": integers,
    "placements": list_of(string),
}


_END = ',\n "digest": "{}"}}\n'.format
_END_LENGTH = len(_END("0" * 32))


def sealed_text(text: str) -> str:
    """Close the text of a JSON object, given without its brace, by a last field: the digest of the text."""
    return "".join(sealed_parts([text]))


def sealed_parts(parts: Iterable[str]) -> Iterator[str]:
    """Close a text that is given in parts, as `sealed_text` does."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part.encode(errors="surrogatepass"))
        yield part
    yield _END(digest.hexdigest())


def check_seal(text: bytes, fields: Mapping[str, Any]) -> None:
    """Check the UTF-8 text of a JSON object that `sealed_text` closed; other programs write it without a ``digest``.

    Raises:
        DamageError: the text is not the one that was sealed.
    """
    if "digest" not in fields:
        return
    digest = xxhash.xxh3_128_hexdigest(memoryview(text)[:-_END_LENGTH])
    if text[-_END_LENGTH:] != _END(digest).encode():
        raise DamageError(f"its text is not the one that was written: digest {digest}, expected {fields['digest']}")


def digest_of(value: Any) -> str:
    """Return the xxh3-128 of JSON data, in hex, whatever the order and the spacing of its text."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(text.encode(errors="surrogatepass"))


def check_digest(recorded: object, value: Any) -> None:
    """Raise `DamageError` if JSON data do not have the recorded digest."""
    if recorded != (digest := digest_of(value)):
        raise DamageError(f"it is not the one that was written: digest {digest}, expected {recorded}")
