"""`muonckpt report`: a checkpoint as one page for a browser."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import click

from ..converters.compare.stats import STATS_MEMORY
from ..converters.look.run_history import history_of
from ..lab.page.checkpoint_page import Page, Reading, StatsChoice, UnreadablePage, report
from ..lab.page.run_page import RunPage, page_of_run
from ..names.wording import command, counted
from ..store.io.location import Location
from .argument_types import CHECKPOINT, KEY, jobs_option, memory_option
from .printing import print_duration, print_json, print_line, progress


@click.command("report")
@click.argument("checkpoint", type=CHECKPOINT)
@click.argument("other", type=CHECKPOINT, required=False)
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Page to write.",
)  # fmt: skip
@click.option(
    "--stats", type=click.Choice(get_args(StatsChoice)),
    help="Measurements: spectra by default, norms of each step of a run; none reads metadata only.",
)  # fmt: skip
@click.option("--select", type=KEY, multiple=True, metavar="GLOB", help="Measure only these keys; repeatable.")
@memory_option(STATS_MEMORY)
@jobs_option()
@click.option("--json", "as_json", is_flag=True, help="Print the page's place, bytes and number of findings as JSON.")
def report_command(
    checkpoint: Location,
    other: Location | None,
    output: Path | None,
    stats: StatsChoice | None,
    select: Sequence[str],
    as_json: bool,
    **options: Any,
) -> int:
    """Write a page about CHECKPOINT, of any format, whole or damaged: its faults, findings, a map of its shards,
    balance, norms, and every tensor.

    With OTHER, such as an earlier checkpoint of the run, also the changes since.  For the folder of a run, write a page
    about all of its steps.  The page is one file, and needs no network.  Exits with 1 if anything is damaged.

    \b
    muonckpt report run/step-00001000 -o report.html
    muonckpt report run/step-00001100 run/step-00001000 -o report.html --stats norms
    muonckpt report run -o run.html
    """
    if output is None:
        line = command("report", checkpoint, "-o", f"{checkpoint.name}.html")
        raise click.UsageError(f"expected the page to write. Write {line}")
    history = history_of(checkpoint)
    if history is not None and other is not None:
        raise click.UsageError(f"{checkpoint} is a run, which is not compared with another; name one of its steps")
    page: Page | UnreadablePage | RunPage
    with progress("report") as advance:
        if history is None:
            page = report(checkpoint, other, stats=stats or "spectra", select=select, progress=advance, **options)
        else:
            page = page_of_run(history, Reading(stats or "norms", select, **options), advance)
    num_bytes = page.write(output)
    code = page.history.verdict.exit_code if isinstance(page, RunPage) else int(bool(page.diagnosis))
    if as_json:
        print_json({"page": str(output), "bytes": num_bytes, "findings": page.findings})
        return code
    lines = list(page.lines)
    if isinstance(page, RunPage):
        lines += [f"{label}: {text}" for label, text in page.history.verdict.facts if label == "unpublished"]
    for line in lines:
        print_line(line)
    to_look_at = "" if code else " to look at"
    summary = (
        f"{counted(page.findings, 'finding')}{to_look_at}"
        if page.findings
        else "nothing else odd"
        if lines
        else "nothing odd"
    )
    print_line(f"{output}: {summary} in {checkpoint}")
    print_duration()
    return code
