"""`muonckpt inspect`: what is in a checkpoint and how it is laid out, from its metadata alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from .. import record
from ..record import Manifest, StateRecord
from ..store import directory
from ..store.dtypes import itemsize
from .output import size, table
from .parameters import CHECKPOINT


@click.command("inspect")
@click.argument("checkpoint", type=CHECKPOINT)
@click.option("--tensors", is_flag=True, help="One line for every tensor.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the summary, with --tensors the whole manifest.")
def command(checkpoint: Path, tensors: bool, as_json: bool) -> None:
    """Say what is in CHECKPOINT and how it is laid out.

    Reads metadata only; the checkpoint may be one of ours or any that torch.distributed.checkpoint wrote.
    """
    manifest = directory.read(checkpoint)
    summary = summarise(checkpoint, manifest)
    if as_json:
        if tensors:
            summary["manifest"] = json.loads(manifest.to_json())
        click.echo(json.dumps(summary, indent=1))
        return
    for label, value in lines(summary):
        click.echo(f"{label:<14}{value}")
    click.echo()
    table(("slot", "tensors", "elements", "bytes", "dtypes"), [list(row.values()) for row in summary["slots"]])
    if tensors:
        click.echo()
        table(("tensor", "shape", "dtype", "convention", "chunks", "fingerprint"), list(map(_row, manifest.tensors)))


def summarise(path: Path, manifest: Manifest) -> dict[str, Any]:
    """The summary as JSON data: kind, provenance, counts and sizes, layouts, and a row per slot."""
    layouts = Counter(json.dumps(tensor.layout) for tensor in manifest.tensors if tensor.layout)
    chunks = sum(len(tensor.chunks) for tensor in manifest.tensors)
    return {
        "checkpoint": str(path),
        "kind": "muonckpt" if (path / record.FILE).exists() else "stock DCP",
        "provenance": dict(manifest.provenance),
        "tensors": len(manifest.tensors),
        "chunks": chunks,
        "bytes": sum(_bytes(tensor) for tensor in manifest.tensors),
        "other_items": len(manifest.blobs),
        "files": len({chunk.item.file for tensor in manifest.tensors for chunk in tensor.chunks}),
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
        mesh = " x ".join(map(str, layout["mesh"]))
        yield "layout", f"{layout['tensors']} tensors on mesh {mesh}: {', '.join(layout['placements'])}"


def _slot(name: str | None, tensors: tuple[StateRecord, ...]) -> dict[str, Any]:
    mine = [tensor for tensor in tensors if tensor.slot == name]
    return {
        "slot": name or "(not optimizer state)",
        "tensors": len(mine),
        "elements": sum(_numel(tensor) for tensor in mine),
        "bytes": size(sum(map(_bytes, mine))),
        "dtypes": ", ".join(sorted({tensor.dtype for tensor in mine})),
    }


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


def _numel(tensor: StateRecord) -> int:
    numel = 1
    for n in tensor.shape:
        numel *= n
    return numel


def _bytes(tensor: StateRecord) -> int:
    return _numel(tensor) * itemsize(tensor.dtype)
