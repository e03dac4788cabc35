"""A buffer layout as JSON data, which checkpoints record so that no reader has to know how parameters were placed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from types import NoneType
from typing import Any

from ...box import MOST_ELEMENTS
from ...errors import SourceError
from .buffer_layout import BufferLayout, rank_of
from .parameters import Parameter
from .ranges import PlacedParameter, consecutive_shards

FieldTypes = Mapping[str, tuple[type, ...]]

LAYOUT: FieldTypes = {
    "algorithm": (str,),
    "version": (int,),
    "options": (dict,),
    "ranks": (int,),
    "numel": (int,),
    "padding": (int,),
    "alignment": (int,),
    "whole": (bool,),
    "buckets": (list,),
    "shards": (list,),
    "parameters": (list,),
}
"""The fields of a layout.  ``buckets`` are [start, stop], ``shards`` [start, stop, rank], in elements."""

PARAMETER: FieldTypes = {
    "name": (str,),
    "shape": (list,),
    "dtype": (str,),
    "expert": (bool,),
    "tied": (bool,),
    "chunk": (int,),
    "unit": (int, NoneType),
    "fold": (int,),
    "start": (int,),
    "stop": (int,),
    "bucket": (int,),
    "owner": (int, NoneType),
}
"""The fields of a parameter: what the algorithm looked at, then where the parameter lies, and its owner if it has
one."""


def to_json(layout: BufferLayout) -> dict[str, Any]:
    """The layout with owners and ends written out, parameters in forward order, so that readers compute nothing."""
    owners = layout.owners
    return {
        "algorithm": layout.algorithm,
        "version": layout.version,
        "options": dict(layout.options),
        "ranks": layout.ranks,
        "numel": layout.numel,
        "padding": layout.padding,
        "alignment": layout.alignment,
        "whole": layout.whole,
        "buckets": [list(bucket) for bucket in layout.buckets],
        "shards": [[shard.start, shard.stop, rank_of(shard)] for shard in layout.shards],
        "parameters": [
            {
                **asdict(placed.parameter),
                "shape": list(placed.parameter.shape),
                "start": placed.start,
                "stop": placed.stop,
                "bucket": placed.bucket,
                "owner": owners[placed.name],
            }
            for placed in layout.parameters
        ],
    }


def from_json(data: Mapping[str, Any]) -> BufferLayout:
    """Read what `to_json` wrote.  Parameters stay where they are, even if a later version of the algorithm differs.

    Raises:
        SourceError: a field is missing, unknown, of another type, or not what the others say.
    """
    try:
        check_fields(data, LAYOUT)
        layout = BufferLayout(
            **{key: data[key] for key in ("algorithm", "version", "options", "ranks", "alignment", "whole")},
            parameters=tuple(map(_placed, data["parameters"])),
            buckets=tuple((start, stop) for start, stop in map(int_tuple, data["buckets"])),
            shards=consecutive_shards((start, stop, rank) for start, stop, rank in map(int_tuple, data["shards"])),
        )
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise SourceError(f"damaged buffer layout: {error}") from error
    written = to_json(layout)
    if wrong := [key for key in LAYOUT if data[key] != written[key]]:
        raise SourceError(f"damaged buffer layout: {wrong} do not agree with the rest")
    return layout


def _placed(data: Any) -> PlacedParameter:
    check_fields(data, PARAMETER)
    seen = {field.name: data[field.name] for field in fields(Parameter)}
    return PlacedParameter(Parameter(**{**seen, "shape": int_tuple(data["shape"])}), data["start"], data["bucket"])


def check_fields(data: Any, kinds: FieldTypes) -> None:
    """Check that an object has exactly these fields, each of one of its types.

    Raises:
        TypeError: it does not.
    """
    if not isinstance(data, Mapping) or data.keys() != kinds.keys():
        raise TypeError(f"expected an object with {sorted(kinds)}, got {data!r:.200}")
    for key, value in data.items():
        if type(value) not in kinds[key]:  # a bool is not an int here
            raise TypeError(f"{key!r} cannot be {value!r:.200}")


def int_tuple(values: Any) -> tuple[int, ...]:
    """A JSON list of integers as a tuple.

    Raises:
        TypeError: it is something else.
    """
    if type(values) is not list or any(type(value) is not int or abs(value) > MOST_ELEMENTS for value in values):
        raise TypeError(f"expected a list of integers of at most {MOST_ELEMENTS}, got {values!r:.200}")
    return tuple(values)
