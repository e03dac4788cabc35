"""`muonckpt inspect`: what is in a checkpoint and how it is laid out, from its metadata alone."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import click

from ..converters.translate.detection import annotate, detect
from ..errors import SourceError
from ..record import Extent, Manifest, StateRecord
from ..store.io.location import Location
from ..store.open_checkpoint import OpenCheckpoint
from ..store.reading.dtypes import itemsize
from . import buffer_tables
from .argument_types import CHECKPOINT
from .buffer_tables import NO_STATE, Labelled, labelled
from .output import printable, section, size


@click.command("inspect")
@click.argument("checkpoint", type=CHECKPOINT)
@click.option("--tensors", is_flag=True, help="One line for every tensor.")
@click.option("--ranks", is_flag=True, help="Where there are flat buffers: one line for every rank, however many.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the summary, with --tensors the whole manifest.")
def command(checkpoint: Location, tensors: bool, ranks: bool, as_json: bool) -> None:
    """Say what is in CHECKPOINT and how it is laid out.

    Reads metadata only; the checkpoint may be one of ours or any that torch.distributed.checkpoint wrote.
    """
    with OpenCheckpoint(checkpoint) as opened:
        manifest = annotate(opened.outline)
    records = labelled(manifest.provenance)
    summary = summarise(checkpoint, opened.format.name, manifest, records)
    if as_json:
        if tensors:
            summary["manifest"] = json.loads(manifest.to_json())
        click.echo(json.dumps(summary, indent=1))
        return
    for label, value in lines(summary):
        click.echo(printable(f"{label:<13} {value}"))
    section(("slot", "tensors", "elements", "bytes", "dtypes"), list(map(_slot_row, summary["slots"])))
    buffer_tables.show(summary["buffers"], ranks)
    if tensors:
        buffer_tables.show_parameters(records)
        headers = ("tensor", "shape", "dtype", "convention", "chunks", "fingerprint")
        section(headers, list(map(_row, manifest.tensors)))


def summarise(path: Location, kind: str, manifest: Manifest, records: Sequence[Labelled]) -> dict[str, Any]:
    """The summary as JSON data: kind, provenance, counts and sizes, layouts, flat buffers, and a row per slot.

    What provenance records of flat buffers is long; of that there is only the summary, under ``buffers``.
    """
    layouts = Counter(json.dumps(tensor.layout) for tensor in manifest.tensors if tensor.layout)
    chunks = sum(len(tensor.chunks) for tensor in manifest.tensors)
    return {
        "checkpoint": str(path),
        "kind": kind,
        "dialect": _dialect(manifest),
        "provenance": buffer_tables.without(manifest.provenance),
        "tensors": len(manifest.tensors),
        "chunks": chunks,
        "bytes": sum(_bytes(tensor) for tensor in manifest.tensors),
        "other_items": len(manifest.blobs),
        "files": len({item.file for item in _items(manifest)}),
        "layouts": [{**json.loads(layout), "tensors": count} for layout, count in layouts.most_common()],
        "buffers": buffer_tables.summarise(records),
        "slots": [_slot(name, manifest.tensors) for name in dict.fromkeys(t.slot for t in manifest.tensors)],
    }


def _dialect(manifest: Manifest) -> dict[str, Any]:
    """Whose keys these are, if that can be told, and why or why not."""
    try:
        found = detect(manifest)
    except SourceError as error:
        return {"name": None, "who": None, "reasons": [str(error)]}
    return {"name": found.dialect.name, "who": found.dialect.who, "reasons": list(found.reasons)}


def lines(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The summary as labelled lines, without the tables."""
    yield "checkpoint", summary["checkpoint"]
    yield "kind", summary["kind"]
    for name, value in summary["provenance"].items():
        yield name, value if isinstance(value, str) else json.dumps(value)
    yield "tensors", f"{summary['tensors']} in {summary['chunks']} chunks, {size(summary['bytes'])}"
    yield "other items", str(summary["other_items"])
    yield "files", str(summary["files"])
    dialect = summary["dialect"]
    yield "keys", f"{dialect['name']} ({dialect['who']})" if dialect["name"] else "not told apart"
    for reason in dialect["reasons"]:
        yield "", reason
    for layout in summary["layouts"]:
        yield "layout", f"{layout['tensors']} tensors {_how(layout)}"


def _how(layout: dict[str, Any]) -> str:
    match layout:
        case {"algorithm": "mesh", "mesh": [*sizes], "placements": [*placements]}:
            return f"on mesh {_mesh(sizes, layout)}: {', '.join(map(str, placements))}"
        case {"algorithm": algorithm, "version": version, "mesh": [*sizes], "cuts": [*cuts]}:
            cut = "".join(f", {axis} cuts dim {dim}" for axis, dim in cuts)
            return f"by {algorithm} v{version} on mesh {_mesh(sizes, layout)}{cut}"
        case _:
            return json.dumps({name: value for name, value in layout.items() if name != "tensors"})


def _mesh(sizes: Sequence[object], layout: dict[str, Any]) -> str:
    axes = layout.get("axes") or [None] * len(sizes)
    named = (str(size) if axis is None else f"{axis}={size}" for axis, size in zip(axes, sizes, strict=True))
    return " x ".join(named)


def _slot(name: str | None, tensors: tuple[StateRecord, ...]) -> dict[str, Any]:
    mine = [tensor for tensor in tensors if tensor.slot == name]
    return {
        "slot": name or NO_STATE,
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
