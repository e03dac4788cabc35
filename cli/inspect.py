"""`muonckpt inspect`: what is in a checkpoint and how it is laid out, from its metadata alone."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from ..record import Extent, Manifest, StateRecord
from ..store.dtypes import itemsize
from ..store.formats import format_of
from .output import printable, size, table
from .parameters import CHECKPOINT


@click.command("inspect")
@click.argument("checkpoint", type=CHECKPOINT)
@click.option("--tensors", is_flag=True, help="One line for every tensor.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the summary, with --tensors the whole manifest.")
def command(checkpoint: Path, tensors: bool, as_json: bool) -> None:
    """Say what is in CHECKPOINT and how it is laid out.

    Reads metadata only; the checkpoint may be one of ours or any that torch.distributed.checkpoint wrote.
    """
    found = format_of(checkpoint)
    manifest = found.outline(checkpoint)
    summary = summarise(checkpoint, found.name, manifest)
    if as_json:
        if tensors:
            summary["manifest"] = json.loads(manifest.to_json())
        click.echo(json.dumps(summary, indent=1))
        return
    for label, value in lines(summary):
        click.echo(printable(f"{label:<13} {value}"))
    click.echo()
    table(("slot", "tensors", "elements", "bytes", "dtypes"), list(map(_slot_row, summary["slots"])))
    if tensors:
        click.echo()
        table(("tensor", "shape", "dtype", "convention", "chunks", "fingerprint"), list(map(_row, manifest.tensors)))


def summarise(path: Path, kind: str, manifest: Manifest) -> dict[str, Any]:
    """The summary as JSON data: kind, provenance, counts and sizes, layouts, and a row per slot."""
    layouts = Counter(json.dumps(tensor.layout) for tensor in manifest.tensors if tensor.layout)
    chunks = sum(len(tensor.chunks) for tensor in manifest.tensors)
    return {
        "checkpoint": str(path),
        "kind": kind,
        "provenance": dict(manifest.provenance),
        "tensors": len(manifest.tensors),
        "chunks": chunks,
        "bytes": sum(_bytes(tensor) for tensor in manifest.tensors),
        "other_items": len(manifest.blobs),
        "files": len({item.file for item in _items(manifest)}),
        "layouts": [{**json.loads(layout), "tensors": count} for layout, count in layouts.most_common()],
        "slots": [_slot(name, manifest.tensors) for name in dict.fromkeys(t.slot for t in manifest.tensors)],
    }


def lines(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The summary as labelled lines, without the table of slots."""
    yield "checkpoint", summary["checkpoint"]
    yield "kind", summary["kind"]
    for name, value in summary["provenance"].items():
        yield name, value if isinstance(value, str) else json.dumps(value)
    yield "tensors", f"{summary['tensors']} in {summary['chunks']} chunks, {size(summary['bytes'])}"
    yield "other items", str(summary["other_items"])
    yield "files", str(summary["files"])
    for layout in summary["layouts"]:
        match layout:
            case {"algorithm": "mesh", "mesh": [*sizes], "placements": [*placements]}:
                how = f"on mesh {' x '.join(map(str, sizes))}: {', '.join(map(str, placements))}"
            case _:
                how = json.dumps({name: value for name, value in layout.items() if name != "tensors"})
        yield "layout", f"{layout['tensors']} tensors {how}"


def _slot(name: str | None, tensors: tuple[StateRecord, ...]) -> dict[str, Any]:
    mine = [tensor for tensor in tensors if tensor.slot == name]
    return {
        "slot": name or "(not optimizer state)",
        "tensors": len(mine),
        "elements": sum(math.prod(tensor.shape) for tensor in mine),
        "bytes": sum(map(_bytes, mine)),
        "dtypes": sorted({tensor.dtype for tensor in mine}),
    }


def _slot_row(slot: dict[str, Any]) -> tuple[object, ...]:
    return slot["slot"], slot["tensors"], slot["elements"], size(slot["bytes"]), ", ".join(slot["dtypes"])


def _items(manifest: Manifest) -> Iterator[Extent]:
    for tensor in manifest.tensors:
        yield from (chunk.item for chunk in tensor.chunks)
    yield from (blob.item for blob in manifest.blobs)


def _row(tensor: StateRecord) -> tuple[object, ...]:
    shape = " x ".join(map(str, tensor.shape)) or "scalar"
    pieces = f" ({'+'.join(map(str, tensor.pieces))} rows)" if tensor.pieces else ""
    return (
        tensor.key,
        shape + pieces,
        tensor.dtype,
        tensor.convention or "-",
        len(tensor.chunks),
        tensor.fingerprint or "-",
    )


def _bytes(tensor: StateRecord) -> int:
    return math.prod(tensor.shape) * itemsize(tensor.dtype)
