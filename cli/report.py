"""`muonckpt report`: a checkpoint as one page for a browser."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import click

from ..converters.compare.stats import STATS_MEMORY
from ..page.checkpoint_page import StatsChoice, report
from ..store.io.location import Location
from ..store.run import run_of
from ..wording import counted
from .argument_types import CHECKPOINT, jobs_option, memory_option
from .printing import print_duration, print_json, print_line, progress
from .runs import newest_whole


@click.command("report")
@click.argument("checkpoint", type=CHECKPOINT)
@click.argument("other", type=CHECKPOINT, required=False)
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), required=True, metavar="FILE",
    help="Page to write.",
)  # fmt: skip
@click.option(
    "--stats", type=click.Choice(get_args(StatsChoice)), default="spectra", show_default=True,
    help="What is measured; none reads metadata only.",
)  # fmt: skip
@click.option("--select", multiple=True, metavar="GLOB", help="Measure only what has a matching key; repeatable.")
@memory_option(STATS_MEMORY)
@jobs_option()
@click.option("--json", "as_json", is_flag=True, help="Print the page's place, bytes and number of findings as JSON.")
def report_command(
    checkpoint: Location, other: Location | None, output: Path, select: Sequence[str], as_json: bool, **options: Any
) -> None:
    """Write a page about CHECKPOINT, of any format: findings, a map of its shards, balance, norms, and every tensor.

    With OTHER, such as an earlier checkpoint of the run, also what has changed since.  Of the folder of a run, the page
    is about its newest whole step.  The page is one file, and needs no network.

    \b
    muonckpt report run/step-00001000 -o report.html
    muonckpt report run/step-00001100 run/step-00001000 -o report.html --stats norms
    """
    if (run := run_of(checkpoint)) is not None:
        [checkpoint] = newest_whole(run)
    with progress("report") as advance:
        page = report(checkpoint, other, select=select, progress=advance, **options)
    written = page.write(output)
    if as_json:
        print_json({"page": str(output), "bytes": written, "findings": page.findings})
        return
    found = counted(page.findings, "finding") if page.findings else "nothing odd"
    print_line(f"{output}: {found} in {checkpoint}")
    print_duration()
