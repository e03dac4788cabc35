"""`muonckpt reshard`: rewrite a checkpoint for another mesh, layout, format or program."""

from __future__ import annotations

from typing import Any

import click

from ..converters.rewrite import reshard
from .rewriting import rewrite
from .shared_options import LAYOUT_OPTIONS, SHARED_OPTIONS, SOURCE_AND_DESTINATION, RewriteCommand, decorated_by


@click.command("reshard", cls=RewriteCommand)
@SOURCE_AND_DESTINATION
@decorated_by(
    LAYOUT_OPTIONS,
    SHARED_OPTIONS,
)
def command(**options: Any) -> None:
    """Rewrite the checkpoint SOURCE as DESTINATION for another mesh, layout, format or program.

    Needs no GPU.  DESTINATION must not exist; it appears when everything has been written and checked.  Nothing is
    renamed or rescaled unless you ask for it.  `muonckpt rules` lists layouts, programs and tables.
    """
    rewrite(reshard, "reshard", **options)
