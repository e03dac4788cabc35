"""`muonckpt reshard`: rewrite a checkpoint for another mesh, layout, format or program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from ..converters.rewrite import reshard
from ..converters.target.topology import LAYOUTS, ROWS, AxisCut
from .argument_types import LayoutType, MeshType, ShardRuleType
from .rewriting import rewrite
from .shared_options import SHARED_OPTIONS, SOURCE_AND_DESTINATION, RewriteCommand, decorated_by


@click.command("reshard", cls=RewriteCommand)
@SOURCE_AND_DESTINATION
@decorated_by(
    click.option("--mesh", type=MeshType(), help="Mesh axes, outermost first: dp=8,tp=2."),
    click.option(
        "--shard",
        type=ShardRuleType(),
        multiple=True,
        metavar="GLOB=AXIS:DIM,...",
        help="Axes that cut matching tensors; repeatable.",
    ),
    click.option(
        "--layout",
        type=LayoutType(list(LAYOUTS)),
        default=ROWS,
        metavar="LAYOUT",
        help=f"What each rank holds: {', '.join(LAYOUTS)}.",
    ),
    SHARED_OPTIONS,
)
def command(shard: Sequence[tuple[str, tuple[AxisCut, ...]]], **options: Any) -> None:
    """Rewrite the checkpoint SOURCE as DESTINATION for another mesh, layout, format or program.

    Needs no GPU.  DESTINATION must not exist; it appears when everything has been written and checked.  Nothing is
    renamed or rescaled unless you ask for it.  `muonckpt rules` lists layouts, programs and tables.
    """
    rules: dict[str, tuple[AxisCut, ...]] = {}
    for glob, cuts in shard:  # the first that matches wins
        rules.setdefault(glob, cuts)
    rewrite(reshard, "reshard", shard=rules, **options)
