"""`muonckpt convert`: rewrite a checkpoint in another format, or for another program."""

from __future__ import annotations

from typing import Any

import click

from ..converters.rewrite import convert
from .rewriting import SHARED_OPTIONS, SOURCE_AND_DESTINATION, RewriteCommand, rewrite


@click.command("convert", cls=RewriteCommand)
@SOURCE_AND_DESTINATION
@SHARED_OPTIONS
def command(**options: Any) -> None:
    """Rewrite the checkpoint SOURCE as DESTINATION in another format, or for another program.

    safetensors and zarr hold whole tensors; the other formats are written for one rank.  For more ranks and other
    layouts use `reshard`, which takes the same options.  `muonckpt rules` lists programs and tables.

    \b
    muonckpt convert dion-run/step-1000 ours --to muonckpt
    muonckpt convert run/step-00001000 model.safetensors --to-format safetensors --select 'model.*'
    """
    rewrite(convert, "convert", **options)
