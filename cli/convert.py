"""`muonckpt convert`: rewrite a checkpoint in another format, or for another program."""

from __future__ import annotations

from typing import Any

import click

from ..converters.rewrite import convert
from .options import PLACES, SHARED, Command
from .rewriting import rewrite


@click.command("convert", cls=Command)
@PLACES
@SHARED
def command(**options: Any) -> None:
    """Rewrite the checkpoint SOURCE as DESTINATION in another format, or for another program.

    safetensors and zarr hold whole tensors; the other formats are written as one rank has them.  For more ranks, and
    other layouts, see reshard, which takes the same options.
    """
    rewrite(convert, "convert", **options)
