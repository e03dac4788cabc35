"""`muonckpt reshard`: rewrite a checkpoint for another mesh, layout, format or program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from ..converters.rewrite import reshard
from ..converters.target.topology import LAYOUTS, ROWS, Cut
from .argument_types import LayoutName, MeshSizes, ShardRule
from .options import PLACES, SHARED, Command, taking
from .rewriting import rewrite


@click.command("reshard", cls=Command)
@PLACES
@taking(
    click.option("--mesh", type=MeshSizes(), help="Axes and sizes of the ranks, the outermost first: dp=8,ep=4,tp=2."),
    click.option(
        "--shard",
        type=ShardRule(),
        multiple=True,
        metavar="GLOB=AXIS:DIM,...",
        help="Which axes cut which dims of the tensors whose key fits.",
    ),
    click.option(
        "--layout",
        type=LayoutName(list(LAYOUTS)),
        default=ROWS,
        metavar="LAYOUT",
        help=f"What ranks hold: {', '.join(LAYOUTS)}.",
    ),
    SHARED,
)
def command(shard: Sequence[tuple[str, tuple[Cut, ...]]], **options: Any) -> None:
    """Rewrite the checkpoint SOURCE as DESTINATION for another mesh, layout, format or program.

    Streams bytes; needs no GPU and no process group.  DESTINATION must not exist; it appears whole, when everything
    has been written, checked and synced.  Nothing is renamed or rescaled unless asked for.
    """
    rules: dict[str, tuple[Cut, ...]] = {}
    for glob, cuts in shard:  # the first that fits wins
        rules.setdefault(glob, cuts)
    rewrite(reshard, "reshard", shard=rules, **options)
