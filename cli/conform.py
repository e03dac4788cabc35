"""`muonckpt conform`: whether an optimizer does the same on a mesh as on one process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from ..names.wording import counted
from .printing import print_duration, print_json, print_line, print_table

if TYPE_CHECKING:
    from ..lab.conform.conform import Conformity, ConformityReport


@click.command("conform")
@click.argument("source", metavar="FILE.py:FUNCTION")
@click.option(
    "--ranks", type=click.IntRange(2, 8), multiple=True, help="A number of processes; repeatable, by default 2, 3, 4."
)
@click.option("--all", "every", is_flag=True, help="List every comparison, those that are equal too.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def conform_command(source: str, ranks: Sequence[int], every: bool, as_json: bool) -> int:
    """Say whether an optimizer does on a mesh what it does on one process; exit with 1 if it does not.

    FUNCTION takes a model, which has one parameter, and its device mesh, and returns an optimizer, or a list of them.
    It is run on 1, 2, 3 and 4 processes with the same global gradients, over shapes that are fused, uneven, smaller
    than the ranks and stacked, replicated, under FSDP2, tensor parallelism and HSDP.

    This runs your file, with your rights: name only what you would run yourself.

    \b
    muonckpt conform optimizers.py:make
    muonckpt conform optimizers.py:make --ranks 4 --all
    """
    from ..lab.conform.conform import RANKS, conform  # imports torch

    report = conform(source, ranks=ranks or RANKS)
    if as_json:
        print_json(report)
    else:
        _print(report, every)
        print_duration()
    return int(not report)


def _print(report: ConformityReport, every: bool) -> None:
    from ..lab.conform.conform import BITS

    counts: defaultdict[str, int] = defaultdict(int)
    for comparison in report.comparisons:
        counts[comparison.status] += 1
    shown = [c for c in report.comparisons if every or c.status != BITS or c.state]
    if shown:
        print_table(
            ("shape", "sharding", "ranks", "update", "off by", "where", "because", "state"), list(map(_row, shown))
        )
    totals = ", ".join(f"{count} {status}" for status, count in counts.items())
    print_line(f"{report.source}: {counted(len(report.comparisons), 'comparison')} with one process: {totals}")


def _row(comparison: Conformity) -> tuple[object, ...]:
    off = "-" if comparison.difference is None else f"{comparison.difference:.2g}"
    return (
        comparison.shape, comparison.sharding, comparison.ranks, comparison.status, off, comparison.place or "-",
        comparison.cause or "-", comparison.state or "-",
    )  # fmt: skip
