"""`muonckpt stats`: the numbers of a checkpoint, and what looks odd in them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import click

from ..converters.compare.stats import STATS_MEMORY, CheckpointStats, stats
from ..names.wording import counted
from ..programs.quantised import describe_quantised
from ..store.io.location import Location
from ..store.verify.run import run_of
from .argument_types import CHECKPOINT, KEY, jobs_option, memory_option
from .printing import print_line, print_result, print_section, print_table, progress
from .runs import newest_whole


@click.command("stats")
@click.argument("checkpoint", type=CHECKPOINT)
@click.argument("globs", type=KEY, nargs=-1, metavar="[GLOB]...")
@click.option("--since", type=CHECKPOINT, metavar="CKPT", help="An earlier checkpoint: how far weights have moved.")
@click.option("--all", "every", is_flag=True, help="List every tensor, layers not folded.")
@click.option("--no-spectra", is_flag=True, help="Do not sketch singular values: faster.")
@memory_option(STATS_MEMORY)
@jobs_option()
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def stats_command(
    checkpoint: Location,
    globs: Sequence[str],
    since: Location | None,
    every: bool,
    no_spectra: bool,
    memory: int,
    jobs: int,
    as_json: bool,
) -> None:
    """Measure the weights, momentum and moments of CHECKPOINT, and say what looks odd and what that usually means.

    Reads every element once or several times, in bounded memory.  With GLOB only tensors whose keys match.  For the
    folder of a run, its newest whole step is measured, since the whole one before it.

    \b
    muonckpt stats run/step-00001000 '*momentum*'
    muonckpt stats run/step-00001100 --since run/step-00001000
    """
    # For a run: its newest whole step, compared with the whole one before it, if any.
    run = run_of(checkpoint)
    if run is not None:
        *earlier, checkpoint = newest_whole(run, min(max(len(run.whole), 1), 2))
        since = since or next(iter(earlier), None)
    with progress("stats") as advance:
        figures = stats(
            checkpoint, since, select=globs, spectra=not no_spectra, memory=memory, jobs=jobs, progress=advance
        )
    print_result(figures, as_json, partial(_print_stats, figures, every))


def _print_stats(figures: CheckpointStats, every: bool) -> None:
    """Print the table of tensors, the updates, and then what looks odd."""
    if every:
        rows = []
        for tensor in figures.tensors:
            f = tensor.figures
            zeros = f"{f.zeros / max(f.elements, 1):.1%}"
            magnitudes = _short(f.norm), _short(f.rms), _short(f.largest)
            rows.append((tensor.key, *magnitudes, zeros, f.nan + f.infinite, _short(tensor.stable_rank)))
        print_table(("tensor", "norm", "RMS", "largest", "zeros", "NaN, inf", "stable rank"), rows)
    else:
        _print_folded(figures)
    updates = [(u.key, *map(_short, (u.rms, u.per_step, u.lr, u.factor))) for u in figures.updates]
    print_section(("weights since the earlier", "RMS of change", "per step", "lr", "factor"), updates)
    print_line()
    if figures.quantised:
        print_line(f"not measured: {describe_quantised(figures.quantised)}")
    for finding in figures.health:
        print_line(f"look at: {finding.message}", fg="red")
        print_line(f"         usually {finding.means}")
    summary = counted(len(figures.health), "finding") if figures.health else "nothing odd"
    print_line(f"{figures.checkpoint}: {counted(len(figures.tensors), 'tensor')} measured, {summary}")


def _print_folded(figures: CheckpointStats) -> None:
    """Print a table for each kind of state, with a row for each parameter in all layers."""
    # The pattern of a slot is the parameter's name with something around it, which is the title of its table.
    tables: defaultdict[str, list[tuple[str, Mapping[str, Any]]]] = defaultdict(list)
    for row in figures.folded():
        prefix, name, suffix = row["pattern"].partition(row["name"]) if row["name"] else ("", "", "")
        if name:
            title = f"{prefix}*{suffix}"
            tables["weights" if title == "*" else title].append((name, row))
        else:
            tables["tensors"].append((row["pattern"], row))
    for number, (title, named_rows) in enumerate(tables.items()):
        is_odd = any(row["zeros"] or row["nonfinite"] for _, row in named_rows)
        odd_headers = ("zeros", "NaN, inf") if is_odd else ()
        headers = (title, "number", "RMS", "spread", "largest", *odd_headers, "stable rank")
        rows = []
        for name, row in named_rows:
            rms, odd_cells = row["rms"], (f"{row['zeros']:.1%}", row["nonfinite"]) if is_odd else ()
            spread = f"{rms['most'] / rms['least']:.2f}" if rms["least"] else "1.00" if rms["most"] == 0 else "inf"
            numbers = _short(rms["median"]), spread, _short(row["largest"]), *odd_cells, _short(row["stable_rank"])
            rows.append((name, row["tensors"], *numbers))
        (print_section if number else print_table)(headers, rows)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
