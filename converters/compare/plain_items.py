"""Items that are not tensors, compared as plain data."""

from __future__ import annotations

from typing import Any

from ...errors import MuonckptError
from ...store.formats.torch_save.plain_item import plain_value

OPAQUE = "(not plain data)"


def same_value(a: bytes, b: bytes) -> bool:
    """Whether two items have the same bytes, or both are plain data with the same values."""
    if a == b:
        return True
    values = value_of(a), value_of(b)
    return OPAQUE not in values and repr(values[0]) == repr(values[1])


def value_of(raw: bytes) -> Any:
    """The value of an item; `OPAQUE` if it is not plain data."""
    try:
        return plain_value(raw)
    except MuonckptError:
        return OPAQUE
