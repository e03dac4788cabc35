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
    click.option("--mesh", type=MeshType(), help="Axes and sizes of the ranks, the outermost first: dp=8,ep=4,tp=2."),
    click.option(
        "--shard",
        type=ShardRuleType(),
        multiple=True,
        metavar="GLOB=AXIS:DIM,...",
        help="Which axes cut which dims of the tensors whose key fits.",
    ),
    click.option(
        "--layout",
        type=LayoutType(list(LAYOUTS)),
        default=ROWS,
        metavar="LAYOUT",
        help=f"What ranks hold: {', '.join(LAYOUTS)}.",
    ),
    SHARED_OPTIONS,
)
def command(shard: Sequence[tuple[str, tuple[AxisCut, ...]]], **options: Any) -> None:
    """Rewrite the checkpoint SOURCE as DESTINATION for another mesh, layout, format or program.

    Streams bytes; needs no GPU and no process group.  DESTINATION must not exist; it appears whole, when everything
    has been written, checked and synced.  Nothing is renamed or rescaled unless asked for.
    """
    rules: dict[str, tuple[AxisCut, ...]] = {}
    for glob, cuts in shard:  # the first that fits wins
        rules.setdefault(glob, cuts)
    rewrite(reshard, "reshard", shard=rules, **options)
