"""`muonckpt convert`: rewrite a checkpoint in another format."""

from __future__ import annotations

from typing import Any

import click

from ..store.formats import BUFFERS, format_of
from ..store.remote import Location
from .asked import CONTENT, CREW, FORMATS, PLACES, RANKS, WHOLE, WORK, Asked, taking
from .conversion import carry_out
from .parameters import MeshSizes


@click.command("convert")
@PLACES
@taking(
    click.option(
        "--format",
        type=click.Choice(FORMATS),
        help="What to write; without: flat buffers if SOURCE has them, else dcp.",
    ),
    click.option(
        "--mesh", type=MeshSizes(), help="Axes and sizes, the outermost first: dp=8,tp=2; one rank if not given."
    ),
    RANKS,
    WHOLE,
    CONTENT,
    CREW,
    WORK,
)
def command(**options: Any) -> None:
    """Rewrite the checkpoint SOURCE as DESTINATION in another format or layout.

    The same as reshard, with the format in front.  safetensors and zarr hold whole tensors; the files of the other
    formats are those of ranks, and all that reshard says of mesh and layout applies.
    """
    options["format"] = options["format"] or _kept(options["source"])
    carry_out(Asked(**options), "convert")


def _kept(source: Location) -> str:
    """The format that leaves a source what it is; DCP where files of its kind are not written by ranks."""
    return "buffers" if format_of(source) is BUFFERS else "dcp"
