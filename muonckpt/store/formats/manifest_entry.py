"""A tensor's entry in our manifest, without its chunks, as JSON for formats that cannot express these fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...errors import SourceError
from ...record import Manifest, StateRecord, record_fields

_VERSION = 1
"""The version of manifests whose tensors have these fields, each with its own layout."""


def entry_of(tensor: StateRecord) -> dict[str, Any]:
    """The fields of docs/formats/manifest.md, "A tensor", and the version that they follow."""
    return {"version": _VERSION, **json.loads(json.dumps(record_fields(tensor)))}


def tensor_of(entry: Mapping[str, Any]) -> StateRecord:
    """The tensor of such an entry, with no chunks yet.

    Raises:
        SourceError: the version is unknown, or a field is missing or not what it should be.
    """
    if entry.get("version") != _VERSION:
        raise SourceError(f"entry of version {entry.get('version')!r}; this program reads version {_VERSION}")
    whole: dict[str, Any] = {"format": "muonckpt", "version": _VERSION, "provenance": {}}
    whole |= {"tensors": [{**entry, "chunks": []}], "blobs": []}
    return Manifest.from_json(json.dumps(whole)).tensors[0]
