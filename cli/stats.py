"""`muonckpt stats`: the numbers of a checkpoint, and what looks odd in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from ..converters.compare.stats import STATS_MEMORY, CheckpointStats, stats
from ..errors import TargetError
from ..store.io.location import Location
from ..wording import counted
from .argument_types import CHECKPOINT, JOBS, LEAST_MEMORY, ByteCountType
from .printing import print_duration, print_json, print_line, print_section, print_table, progress


@click.command("stats")
@click.argument("checkpoint", type=CHECKPOINT)
@click.argument("globs", nargs=-1, metavar="[GLOB]...")
@click.option("--since", type=CHECKPOINT, metavar="CKPT", help="An earlier checkpoint: how far weights have moved.")
@click.option("--all", "every", is_flag=True, help="List every tensor, layers not folded.")
@click.option("--no-spectra", is_flag=True, help="Do not sketch singular values: faster.")
@click.option(
    "--memory", type=ByteCountType(LEAST_MEMORY), default=f"{STATS_MEMORY >> 20}MiB", show_default=True, help="Memory."
)
@click.option("--jobs", type=JOBS, default=2, show_default=True, metavar="N", help="Threads.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
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

    Reads every element once or several times, in bounded memory.  With GLOB only tensors whose keys match.

    \b
    muonckpt stats run/step-00001000 '*momentum*'
    muonckpt stats run/step-00001100 --since run/step-00001000
    """
    try:
        with progress("stats") as advance:
            found = stats(
                checkpoint, since, select=globs, spectra=not no_spectra, memory=memory, jobs=jobs, progress=advance
            )
    except TargetError as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        print_json(found.to_json())
        return
    _print_tensors(found, every)
    _print_updates(found)
    print_line()
    for finding in found.health:
        print_line(f"look at: {finding.message}")
        print_line(f"         usually {finding.means}")
    print_line(f"{checkpoint}: {counted(len(found.tensors), 'tensor')} measured, {_odd(len(found.health))}")
    print_duration()


def _odd(count: int) -> str:
    return f"{counted(count, 'finding')}" if count else "nothing odd"


def _print_tensors(found: CheckpointStats, every: bool) -> None:
    if every:
        headers = ("tensor", "norm", "RMS", "largest", "zeros", "NaN, inf", "stable rank")
        rows = [
            (t.key, _short(t.figures.norm), _short(t.figures.rms), _short(t.figures.largest),
             f"{t.figures.zeros / max(t.figures.elements, 1):.1%}", t.figures.nan + t.figures.infinite,
             _short(t.stable_rank))
            for t in found.tensors
        ]  # fmt: skip
        print_table(headers, rows)
        return
    folded_headers = ("tensors", "number", "RMS median", "least", "most", "largest", "zeros", "NaN, inf", "stable rank")
    print_table(folded_headers, [_folded(row) for row in found.folded()])


def _folded(row: Any) -> tuple[object, ...]:
    rms = row["rms"]
    return (row["pattern"], row["tensors"], *(_short(rms[name]) for name in ("median", "least", "most")),
            _short(row["largest"]), f"{row['zeros']:.1%}", row["nonfinite"], _short(row["stable_rank"]))  # fmt: skip


def _print_updates(found: CheckpointStats) -> None:
    headers = ("weights since the earlier", "RMS of change", "per step", "lr", "factor")
    rows = [(u.key, *map(_short, (u.rms, u.per_step, u.lr, u.factor))) for u in found.updates]
    print_section(headers, rows)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
