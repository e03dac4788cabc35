"""`muonckpt merge`: the average of several checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from ..converters.merging import Average, merge
from ..store.io.location import Location
from .argument_types import CHECKPOINT
from .rewriting import LAYOUT_OPTIONS, MERGE_OPTIONS, RewriteCommand, decorated_by, rewrite


@click.command("merge", cls=RewriteCommand)
@click.argument("sources", type=CHECKPOINT, nargs=-1, required=True, metavar="SOURCE SOURCE...")
@click.argument("destination", type=CHECKPOINT)
@decorated_by(
    click.option("--proportions", metavar="NUMBER,...", help="How much each source counts."),
    click.option("--ema", metavar="DECAY", help="Moving average, the first source being the oldest."),
    click.option("--model-only", is_flag=True, help="Merge the model's weights and leave out all else."),
    click.option("--others-from", metavar="first|last|N", help="Whose counters, options and items to take."),
    LAYOUT_OPTIONS,
    MERGE_OPTIONS,
)
def command(
    sources: Sequence[Location],
    proportions: str | None,
    ema: str | None,
    others_from: str | None,
    model_only: bool,
    **options: Any,
) -> None:
    """Write the average of the checkpoints SOURCE, of any formats and meshes, as DESTINATION.

    Each element is computed exactly and rounded once.  Counters, options and other items are not averaged: they have to
    be the same in all sources, or --others-from says whose to take.

    \b
    muonckpt merge step-1000 step-2000 step-3000 averaged --model-only
    muonckpt merge run-a run-b both --proportions 3,1 --others-from last --mesh dp=8
    """
    numbers = None if proportions is None else proportions.split(",")
    average = Average(numbers, ema, others_from, model_only)
    rewrite(merge, "merge", sources=sources, average=average, **options)
