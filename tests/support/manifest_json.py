"""Manifests as JSON that tests read and change: tensors have their layouts, and their chunks one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def spread(data: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest with an object for each chunk, and without the digest of its text."""
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

    fields = {name: value for name, value in data.items() if name not in ("layouts", "boxes", "data_files", "digest")}
    return json.loads(json.dumps({**fields, "tensors": list(map(tensor, data["tensors"]))}))


def gathered(data: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest of which `spread` made this one."""
    layouts: list[Any] = []
    boxes: list[Any] = []
    names: dict[str, int] = {}

    def tensor(entry: dict[str, Any]) -> dict[str, Any]:
        chunks, number = entry["chunks"], None if entry["layout"] is None else len(layouts)
        layouts.extend([] if number is None else [entry["layout"]])
        boxes.append({corner: [chunk[corner] for chunk in chunks] for corner in ("lo", "hi")})
        payloads = [chunk["payload"] or [None, None] for chunk in chunks]
        columns = {
            "boxes": len(boxes) - 1,
            "file": [names.setdefault(chunk["file"], len(names)) for chunk in chunks],
            "item": [chunk["item"][0] for chunk in chunks],
            "item_length": [chunk["item"][1] for chunk in chunks],
            "payload": [payload[0] for payload in payloads],
            "payload_length": [payload[1] for payload in payloads],
            "crc32": [chunk["crc32"] for chunk in chunks],
            "digest": [chunk["digest"] for chunk in chunks],
        }
        return {**entry, "layout": number, "chunks": columns}

    tensors = list(map(tensor, data["tensors"]))
    return {**data, "data_files": list(names), "layouts": layouts, "boxes": boxes, "tensors": tensors}


def manifest_at(path: Path) -> dict[str, Any]:
    """Return the manifest in a file, spread."""
    return spread(json.loads(path.read_text()))


def put(path: Path, data: dict[str, Any]) -> None:
    """Write a spread manifest to a file."""
    path.write_text(json.dumps(gathered(data)))
