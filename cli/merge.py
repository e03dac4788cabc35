"""`muonckpt merge`: the average of several checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from ..converters.merging import merge
from ..converters.target.topology import LAYOUTS, ROWS, AxisCut
from ..store.io.location import Location
from .argument_types import CHECKPOINT, LayoutType, MeshType, ShardRuleType
from .rewriting import rewrite
from .shared_options import MERGE_OPTIONS, RewriteCommand, decorated_by


@click.command("merge", cls=RewriteCommand)
@click.argument("sources", type=CHECKPOINT, nargs=-1, required=True, metavar="SOURCE SOURCE...")
@click.argument("destination", type=CHECKPOINT)
@decorated_by(
    click.option("--weights", metavar="NUMBER,...", help="Weights of the sources, in any proportion."),
    click.option("--ema", metavar="DECAY", help="Moving average, the first source being the oldest."),
    click.option("--model-only", is_flag=True, help="Merge the model's weights and leave out all else."),
    click.option("--others-from", metavar="first|last|N", help="Whose counters, options and items to take."),
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
    MERGE_OPTIONS,
)
def command(
    sources: Sequence[Location],
    weights: str | None,
    shard: Sequence[tuple[str, tuple[AxisCut, ...]]],
    **options: Any,
) -> None:
    """Write the average of the checkpoints SOURCE, of any formats and meshes, as DESTINATION.

    Each element is computed exactly and rounded once.  Counters, options and other items are not averaged: they have to
    be the same in all sources, or --others-from says whose to take.

    \b
    muonckpt merge step-1000 step-2000 step-3000 averaged --model-only
    muonckpt merge run-a run-b both --weights 3,1 --others-from last --mesh dp=8
    """
    rules: dict[str, tuple[AxisCut, ...]] = {}
    for glob, cuts in shard:  # the first that matches wins
        rules.setdefault(glob, cuts)
    numbers = None if weights is None else weights.split(",")
    rewrite(merge, "merge", sources=sources, weights=numbers, shard=rules, **options)
