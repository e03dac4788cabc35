"""`muonckpt reshard`: rewrite a checkpoint for another mesh, layout, format or program."""

from __future__ import annotations

from typing import Any

import click

from ..converters.rewrite import reshard
from .rewriting import LAYOUT_OPTIONS, SHARED_OPTIONS, SOURCE_AND_DESTINATION, RewriteCommand, decorated_by, rewrite


@click.command("reshard", cls=RewriteCommand)
@SOURCE_AND_DESTINATION
@decorated_by(
    LAYOUT_OPTIONS,
    SHARED_OPTIONS,
)
def command(**options: Any) -> None:
    """Rewrite the checkpoint SOURCE as DESTINATION for another mesh, layout, format or program.

    Needs no GPU.  DESTINATION must not exist; it appears when all is written and checked.

    \b
    muonckpt reshard step-1000 on-64 --mesh dp=64 --dry-run
    muonckpt reshard step-1000 moe --mesh ep=8,dp=8 --shard '*experts*=ep:0,dp:1'
    """
    rewrite(reshard, "reshard", **options)
