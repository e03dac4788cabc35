"""`muonckpt audit-step`: what the step between two checkpoints did."""

from __future__ import annotations

from collections.abc import Sequence

import click

from ..lab.step_audit.step_audit import MAX_FLOPS, StepAudit, audit_step, verdict_row
from ..names.wording import counted, folded
from ..store.io.location import Location
from .argument_types import CHECKPOINT, KEY
from .printing import print_duration, print_json, print_line, print_table, progress


@click.command("audit-step")
@click.argument("before", type=CHECKPOINT)
@click.argument("after", type=CHECKPOINT)
@click.argument("globs", type=KEY, nargs=-1, metavar="[GLOB]...")
@click.option("--all", "every", is_flag=True, help="List every parameter, layers not folded.")
@click.option(
    "--flops", type=click.FloatRange(0, min_open=True), default=MAX_FLOPS, show_default=True, metavar="NUMBER",
    help="What hypotheses may take in all; one parameter of each kind comes first.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def audit_step_command(
    before: Location, after: Location, globs: Sequence[str], every: bool, flops: float, as_json: bool
) -> int:
    """Say what the step between the checkpoints BEFORE and AFTER did; exit with 1 if anything contradicts that.

    Needs no model, data or GPU: weights and momentum of both give back the update and what it was made of.  Which
    matrices were orthogonalised, with which coefficients, Nesterov, scale and decay, beside what the options say.  Of
    any program; the checkpoints have to be one step apart.  With GLOB only parameters whose names match.

    \b
    muonckpt audit-step run/step-00001000 run/step-00001001
    muonckpt audit-step early late '*.attention.*' --json
    """
    with progress("audit-step") as advance:
        audit = audit_step(before, after, select=globs, flops=flops, progress=advance)
    if as_json:
        print_json(audit)
        return int(bool(audit.findings))
    _print(audit, every)
    print_duration()
    return int(bool(audit.findings))


def _print(audit: StepAudit, every: bool) -> None:
    """Print a row for each kind of parameter, then what contradicts, and the summary."""
    rows = [(verdict.name, verdict_row(verdict)) for verdict in audit.verdicts]
    grouped = [(name, 1, cells) for name, cells in rows] if every else folded(rows)
    print_table(
        ("parameter", "number", "did", "made of", "scale", "left over", "verdict"),
        [(name, count, *cells) for name, count, cells in grouped],
    )
    for finding in audit.findings:
        print_line(f"look at: {finding.message}", fg="red")
    summary = counted(len(audit.findings), "finding") if audit.findings else "nothing contradicts the options"
    print_line(f"{audit.before} to {audit.after}: {counted(len(audit.verdicts), 'parameter')}, {summary}")
