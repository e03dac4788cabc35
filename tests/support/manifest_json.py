"""Manifests as JSON that tests read and change: as version 1, where tensors have layouts, and chunks fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def spread(data: dict[str, Any]) -> dict[str, Any]:
    """A manifest of version 2 as one of version 1, without the digest of its text; the reader takes both."""
    if data["version"] == 1:
        return {name: value for name, value in data.items() if name != "digest"}
    layouts, boxes, names = (data[name] for name in ("layouts", "boxes", "data_files"))

    def chunk(row: dict[str, Any]) -> dict[str, Any]:
        payload = None if row["payload"] is None else [row["payload"], row["payload_length"]]
        return {"lo": row["lo"], "hi": row["hi"], "file": names[row["file"]], "item": [row["item"], row["item_length"]],
                "payload": payload, "digest": row["digest"], "crc32": row["crc32"]}  # fmt: skip

    def tensor(entry: dict[str, Any]) -> dict[str, Any]:
        columns = {**entry["chunks"]}
        columns |= boxes[columns.pop("boxes")]
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        layout = None if entry["layout"] is None else layouts[entry["layout"]]
        return {**entry, "layout": layout, "chunks": list(map(chunk, rows))}

    kept = {name: value for name, value in data.items() if name not in ("layouts", "boxes", "data_files", "digest")}
    return json.loads(json.dumps({**kept, "version": 1, "tensors": list(map(tensor, data["tensors"]))}))


def manifest_at(path: Path) -> dict[str, Any]:
    """The manifest in a file, as version 1."""
    return spread(json.loads(path.read_text()))
