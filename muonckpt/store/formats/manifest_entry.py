"""A tensor's entry in our manifest, without its chunks, as JSON for formats that cannot express these fields."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from ...record import MANIFEST_VERSION, Manifest, StateRecord


def entry_of(tensor: StateRecord) -> dict[str, Any]:
    """The fields of docs/formats/manifest.md, "A tensor", and the version that they follow."""
    text = Manifest((dataclasses.replace(tensor, chunks=()),)).to_json()
    (entry,) = json.loads(text)["tensors"]
    del entry["chunks"]
    return {"version": MANIFEST_VERSION, **entry}


def tensor_of(entry: Mapping[str, Any]) -> StateRecord:
    """The tensor of such an entry, with no chunks yet.

    Raises:
        SourceError: the version is unknown, or a field is missing or not what it should be.
    """
    whole: dict[str, Any] = {"format": "muonckpt", "version": entry.get("version"), "provenance": {}}
    whole |= {"tensors": [{**entry, "chunks": []}], "blobs": []}
    return Manifest.from_json(json.dumps(whole)).tensors[0]
