"""`muonckpt convert`: rewrite a checkpoint in another format."""

from __future__ import annotations

from typing import Any

import click

from .argument_types import MeshSizes
from .asked import CONTENT, CREW, FORMAT, PLACES, RANKS, WHOLE, WORK, Asked, kept, taking
from .conversion import carry_out


@click.command("convert")
@PLACES
@taking(
    FORMAT,
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
    carry_out(Asked(**kept(options)), "convert")
