"""`muonckpt lab`: whether an optimizer does the same on a mesh, what a step did, and what other meshes would cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ..names.vocabulary import STATE_DTYPES
from ..names.wording import counted, folded, listed, size
from ..store.io.location import Location
from .argument_types import CHECKPOINT, KEY, MeshType, shard_option
from .main import Commands
from .printing import or_dash, print_line, print_result, print_table, progress

if TYPE_CHECKING:
    from ..lab.conformity.conform import ConformityReport
    from ..lab.forecasting.prospects import Prospect
    from ..lab.forecasting.topologies import Topology
    from ..lab.step_audit.step_audit import StepAudit


@click.group("lab", cls=Commands)
def lab_command() -> None:
    """Examine what an optimizer does, what a step did, and what other meshes would cost.

    \b
    muonckpt lab conform optimizers.py:make
    muonckpt lab COMMAND --help
    """


@lab_command.command("conform")
@click.argument("source", metavar="FILE.py:FUNCTION")
@click.option(
    "--ranks", type=click.IntRange(2, 8), multiple=True, help="A number of processes; repeatable, by default 2, 3, 4."
)
@click.option("--all", "every", is_flag=True, help="List every comparison, those that are equal too.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def conform_command(source: str, ranks: Sequence[int], every: bool, as_json: bool) -> int:
    """Say whether an optimizer does on a mesh what it does alone.  Exit with 1 if it does not.

    FUNCTION takes a model, which has one parameter, and its device mesh, and returns an optimizer, or a list of them.
    It is run on 1, 2, 3 and 4 processes with the same global gradients, over shapes that are fused, uneven, smaller
    than the ranks and stacked, replicated, under FSDP2, tensor parallelism and HSDP.

    This runs your file, with your rights: name only what you would run yourself.

    \b
    muonckpt lab conform optimizers.py:make
    muonckpt lab conform optimizers.py:make --ranks 4 --all
    """
    from ..lab.conformity.conform import RANKS, conform  # imports torch

    report = conform(source, ranks=ranks or RANKS)
    print_result(report, as_json, partial(_print_conformity, report, every))
    return int(not report)


def _print_conformity(report: ConformityReport, every: bool) -> None:
    """Print the comparisons that are not equal, or with ``every`` all, then how many there are of each status."""
    from ..lab.conformity.conform import BITS

    counts: defaultdict[str, int] = defaultdict(int)
    for comparison in report.comparisons:
        counts[comparison.status] += 1
    shown = [c for c in report.comparisons if every or c.status != BITS or c.state]
    rows = []
    for c in shown:
        off = None if c.difference is None else f"{c.difference:.2g}"
        cells = (off, c.place or None, c.cause or None, c.state or None)
        rows.append((c.shape, c.sharding, c.ranks, c.status, *map(or_dash, cells)))
    if shown:
        print_table(("shape", "sharding", "ranks", "update", "off by", "where", "because", "state"), rows)
    totals = ", ".join(f"{count} {status}" for status, count in counts.items())
    print_line(f"{report.source}: {counted(len(report.comparisons), 'comparison')} with one process: {totals}")


@lab_command.command("audit-step")
@click.argument("before", type=CHECKPOINT)
@click.argument("after", type=CHECKPOINT)
@click.argument("globs", type=KEY, nargs=-1, metavar="[GLOB]...")
@click.option("--all", "every", is_flag=True, help="List every parameter, layers not folded.")
@click.option(
    "--flops", type=click.FloatRange(0, min_open=True), metavar="NUMBER",
    help="Limit of work for all hypotheses, by default 4e12; one parameter of each kind comes first.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def audit_step_command(
    before: Location, after: Location, globs: Sequence[str], every: bool, flops: float | None, as_json: bool
) -> int:
    """Say what the step between two checkpoints did.  Exit with 1 if anything contradicts that.

    Needs no model, data or GPU: weights and momentum of both give back the update and its parts.  Prints the
    orthogonalised matrices, with coefficients, Nesterov, scale and decay, beside the options.  Works for any program;
    the checkpoints have to be one step apart.  With GLOB only parameters whose names match.

    \b
    muonckpt lab audit-step run/step-00001000 run/step-00001001
    muonckpt lab audit-step early late '*.attention.*' --json
    """
    from ..lab.step_audit.step_audit import MAX_FLOPS, audit_step  # imports numpy

    with progress("audit-step") as advance:
        audit = audit_step(before, after, select=globs, flops=flops or MAX_FLOPS, progress=advance)
    print_result(audit, as_json, partial(_print_audit, audit, every))
    return int(bool(audit.findings))


def _print_audit(audit: StepAudit, every: bool) -> None:
    """Print a row for each kind of parameter, then what contradicts, and the summary."""
    from ..lab.step_audit.step_audit import verdict_row

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


@lab_command.command("plan")
@click.option("--model", type=CHECKPOINT, metavar="JSON", help="A config.json of Hugging Face's.")
@click.option(
    "--ckpt",
    "checkpoint",
    type=CHECKPOINT,
    metavar="CKPT",
    help="Or a checkpoint with optimizer state, or a run's folder.",
)
@click.option(
    "--mesh", "meshes", type=MeshType(), multiple=True, required=True,
    help="Axes, outermost first: dp=8,tp=2; repeatable.",
)  # fmt: skip
@shard_option("Axes that cut matching parameters, on meshes that have them; repeatable.")
@click.option("--select", multiple=True, metavar="GLOB", help="Only parameters with a matching name; repeatable.")
@click.option("--dtype", metavar="DTYPE", help="Dtype of a model's parameters and state, by default the config's.")
@click.option("--state-dtype", metavar="DTYPE", help=f"Dtype of momentum and moments: {listed(STATE_DTYPES)}.")
@click.option("--stages", type=click.IntRange(1), metavar="N", help="Most stages of a step, as Muon takes it.")
@click.option("--ns-steps", type=click.IntRange(1), metavar="N", help="Steps of Newton-Schulz.")
@click.option("--ns-dtype", metavar="DTYPE", help="Dtype of Newton-Schulz: bfloat16, float16 or float32.")
@click.option("--algorithm", metavar="NAME", help="Method of a model's matrices, such as normuon; muon by default.")
@click.option("--padding", is_flag=True, help="Also print the padding of each layout in flat buffers.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def plan_command(
    meshes: Sequence[dict[str, int]], checkpoint: Location | None, padding: bool, as_json: bool, **options: Any
) -> None:
    """Say what a step of Muon sends and a rank holds, on each mesh.

    The optimizer's own planner plans the step, so this command needs torch; no process is started.

    \b
    muonckpt lab plan --model config.json --mesh dp=64 --mesh dp=8,tp=8 --shard '*_proj.weight=tp:0,dp:0'
    muonckpt lab plan --ckpt run/step-00001000 --mesh dp=512
    """
    if checkpoint is not None:
        from .runs import newest_checkpoint  # imports numpy

        checkpoint = newest_checkpoint(checkpoint)
    from ..lab.forecasting.prospects import plan  # imports torch

    # Options that are absent have the defaults of the function.
    arguments = {name: value for name, value in {**options, "checkpoint": checkpoint}.items() if value is not None}
    prospect = plan(meshes, **arguments)
    print_result(prospect, as_json, partial(_print_prospect, prospect, padding))


def _print_prospect(prospect: Prospect, has_padding: bool) -> None:
    """Print the costs on each mesh, side by side; the padding of flat buffers only where ``has_padding``."""
    print_line(
        f"{prospect.source}: {counted(prospect.parameters, 'parameter')}, {prospect.elements:,} elements; "
        f"{prospect.matrices} by Muon"
    )
    print_line()
    # One column for each mesh, so the rows of all are joined by their label.
    rows = []
    for cells in zip(*(_cost_rows(topology, has_padding) for topology in prospect.topologies), strict=True):
        rows.append((cells[0][0], *(value for _, value in cells)))
    print_table(("", *(topology.name for topology in prospect.topologies)), rows)
    print_line()
    for topology in prospect.topologies:
        for rule in topology.unused_rules:
            print_line(f"note: {topology.name} has not all axes of the rule {rule}, which does not count there")
    if len(prospect.topologies) > 1:
        print_line(
            f"cheapest: {prospect.topologies[prospect.cheapest].name}, whose busiest rank sends the fewest bytes"
        )


def _cost_rows(t: Topology, has_padding: bool) -> Iterator[tuple[str, str]]:
    """Yield the costs on one mesh as labels and values; the labels are the same for all meshes of a prospect."""
    yield "ranks", str(t.ranks)
    yield "matrices", str(t.matrices)
    yield "stages", str(t.stages)
    yield "sent a step, mean", size(round(t.sent["mean"]))
    yield "  most", f"{size(t.sent['most'])} (rank {t.sent['busiest_rank']})"
    yield "Newton-Schulz, mean", f"{t.newton_schulz['mean'] / 1e12:.4g} TFLOP"
    yield "  most to mean", f"{t.newton_schulz['most_to_mean']:.3f}"
    for part, count in t.memory.items():
        yield f"memory: {part}", size(count)
    yield "  held, most to mean", f"{t.held['most_to_mean']:.3f}"
    yield "checkpoint", f"{size(t.checkpoint['bytes'])} in {counted(t.checkpoint['files'], 'file')}"
    yield "  most of a rank", size(t.checkpoint["most"])
    yield "  load: most received", size(t.checkpoint["most_received"])
    for padding in t.padding if has_padding else ():
        yield f"padding: {padding['layout']}", f"{padding['padding_percent']} %"
