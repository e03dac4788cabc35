"""`muonckpt inspect`: what is in a checkpoint and how it is laid out, from its metadata alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from ..converters.buffer_summary import labelled_buffers
from ..converters.inspection import Inspection, inspect
from ..record import StateRecord
from ..store.io.location import Location
from . import buffer_tables
from .argument_types import CHECKPOINT
from .printing import print_section, printable, size


@click.command("inspect")
@click.argument("checkpoint", type=CHECKPOINT)
@click.option("--tensors", is_flag=True, help="List every tensor.")
@click.option("--ranks", is_flag=True, help="List every rank of flat buffers, however many.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON; with --tensors also the manifest.")
def command(checkpoint: Location, tensors: bool, ranks: bool, as_json: bool) -> None:
    """Say what is in CHECKPOINT, of any format, and how it is laid out.

    Reads metadata only.
    """
    inspection = inspect(checkpoint)
    if as_json:
        manifest = {"manifest": json.loads(inspection.manifest.to_json())} if tensors else {}
        click.echo(json.dumps({**inspection.to_json(), **manifest}, indent=1))
        return
    for label, value in lines(inspection):
        click.echo(printable(f"{label:<13} {value}"))
    print_section(("slot", "tensors", "elements", "bytes", "dtypes"), list(map(_slot_row, inspection.slots)))
    buffer_tables.print_summary(inspection.buffers, ranks)
    if tensors:
        buffer_tables.print_parameters(labelled_buffers(inspection.manifest.provenance))
        headers = ("tensor", "shape", "dtype", "convention", "chunks", "fingerprint")
        print_section(headers, list(map(_row, inspection.manifest.tensors)))


def lines(inspection: Inspection) -> Iterator[tuple[str, str]]:
    """The summary of a checkpoint as labelled lines; the tables are not included."""
    yield "checkpoint", inspection.checkpoint
    yield "kind", inspection.kind
    for name, value in inspection.provenance.items():
        yield name, value if isinstance(value, str) else json.dumps(value)
    yield "tensors", f"{inspection.tensors} in {inspection.chunks} chunks, {size(inspection.bytes)}"
    yield "other items", str(inspection.other_items)
    yield "files", str(inspection.files)
    dialect = inspection.dialect
    yield "keys", f"{dialect['name']} ({dialect['who']})" if dialect["name"] else "unknown"
    for reason in dialect["reasons"]:
        yield "", reason
    for layout in inspection.layouts:
        yield "layout", f"{layout['tensors']} tensors {_how(layout)}"


def _how(layout: Mapping[str, Any]) -> str:
    match layout:
        case {"algorithm": "mesh", "mesh": [*sizes], "placements": [*placements]}:
            return f"on mesh {_mesh(sizes, layout)}: {', '.join(map(str, placements))}"
        case {"algorithm": algorithm, "version": version, "mesh": [*sizes], "cuts": [*cuts]}:
            cut = "".join(f", {axis} cuts dim {dim}" for axis, dim in cuts)
            return f"by {algorithm} v{version} on mesh {_mesh(sizes, layout)}{cut}"
        case _:
            return json.dumps({name: value for name, value in layout.items() if name != "tensors"})


def _mesh(sizes: Sequence[object], layout: Mapping[str, Any]) -> str:
    axes = layout.get("axes") or [None] * len(sizes)
    named = (str(size) if axis is None else f"{axis}={size}" for axis, size in zip(axes, sizes, strict=True))
    return " x ".join(named)


def _slot_row(slot: Mapping[str, Any]) -> tuple[object, ...]:
    return slot["slot"], slot["tensors"], slot["elements"], size(slot["bytes"]), ", ".join(slot["dtypes"])


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
