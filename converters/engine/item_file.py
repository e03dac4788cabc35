"""Non-tensor items beside a destination that holds tensors only: ``NAME.items.json``, with plain data as JSON.

Items are decoded without running anything that is in them.  Those that are not plain data are listed with the reason,
so that nothing is dropped silently.  docs/formats/items.md describes the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from io import StringIO
from typing import Any

from ...names.errors import SourceError
from ...record.json_fields import sealed_text
from ...store.formats.torch_save.plain_item import plain_value
from ...store.open_checkpoint import checked_blob
from ...store.reading.payloads import Payloads
from .outputs import OutputItem

_VERSION = 1

_MAX_JSON = 32 << 20
"""The longest JSON text of one item: a small pickle can refer to the same part a million times."""


@dataclass(frozen=True, slots=True)
class ItemFile:
    """The bytes of a file of items, and the keys of those whose values are in it, and of those that it only lists."""

    data: bytes
    decoded: tuple[str, ...]
    undecoded: tuple[str, ...]

    @classmethod
    def of(cls, items: Iterable[OutputItem], payloads: Payloads, source: str) -> ItemFile:
        """Make the file of these items of the checkpoint called ``source``.

        Raises:
            SourceError: an item is damaged.
        """
        values: list[tuple[str, str]] = []
        reasons: list[tuple[str, str]] = []
        for item in items:
            raw = item.data if item.source is None else checked_blob(payloads, item.source)
            named = {"key": item.key, "path": list(item.path)}
            try:
                values.append((item.key, _text({**named, "value": _plain(plain_value(raw), {})})))
            except RecursionError:
                reasons.append((item.key, _text({**named, "bytes": len(raw), "reason": "it is nested too deeply"})))
            except SourceError as error:
                reasons.append((item.key, _text({**named, "bytes": len(raw), "reason": str(error)})))
        head = _text({"format": "muonckpt items", "version": _VERSION, "source": source})[:-1]
        listed = (",\n  ".join(text for _, text in entries) for entries in (values, reasons))
        text = sealed_text('{},\n "items": [\n  {}\n ],\n "undecoded": [\n  {}\n ]'.format(head, *listed))
        keys = (tuple(key for key, _ in entries) for entries in (values, reasons))
        return cls(text.encode(), *keys)


def _text(value: object) -> str:
    """Return a value as JSON of bounded length.

    Raises:
        SourceError: it would be longer.
    """
    text = StringIO()
    for part in json.JSONEncoder(allow_nan=False).iterencode(value):
        text.write(part)
        if text.tell() > _MAX_JSON:
            raise SourceError(f"expected at most {_MAX_JSON >> 20} MiB of JSON, found more")
    return text.getvalue()


def _plain(value: Any, converted: dict[int, Any]) -> Any:
    """Return plain data as JSON has it: numbers that JSON lacks become strings, integer keys become text.

    ``converted`` holds parts by id, because they may be shared.

    Raises:
        SourceError: two keys of a dict would become one.
    """
    if id(value) not in converted:
        converted[id(value)] = _converted(value, converted)
    return converted[id(value)]


def _converted(value: Any, converted: dict[int, Any]) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case list() | tuple():
            return [_plain(part, converted) for part in value]
        case dict():
            named = {str(key): _plain(part, converted) for key, part in value.items()}
            if len(named) != len(value):
                raise SourceError(f"expected keys that differ as text, found {sorted(map(repr, value))[:8]}")
            return named
    return value
