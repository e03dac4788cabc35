"""`muonckpt plan`: what a model would cost on meshes that are only imagined."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from ..names.vocabulary import STATE_DTYPES
from ..names.wording import counted, listed, size
from ..store.io.location import Location
from .argument_types import CHECKPOINT, MeshType, shard_option
from .printing import print_duration, print_json, print_line, print_table

if TYPE_CHECKING:
    from ..lab.forecasting.prospects import Prospect
    from ..lab.forecasting.topologies import Topology


@click.command("plan")
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
@click.option("--dtype", metavar="DTYPE", help="Of a model's parameters and state, if not the config's.")
@click.option("--state-dtype", metavar="DTYPE", help=f"Of momentum and moments: {listed(STATE_DTYPES)}.")
@click.option("--stages", type=click.IntRange(1), metavar="N", help="Most stages of a step, as Muon takes it.")
@click.option("--ns-steps", type=click.IntRange(1), metavar="N", help="Steps of Newton-Schulz.")
@click.option("--ns-dtype", metavar="DTYPE", help="What it computes in: bfloat16, float16 or float32.")
@click.option("--algorithm", metavar="NAME", help="Of a model's matrices: muon, normuon, adamuon or hyperball.")
@click.option("--padding", is_flag=True, help="Also print the padding of each layout in flat buffers.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def plan_command(
    meshes: Sequence[dict[str, int]], checkpoint: Location | None, padding: bool, as_json: bool, **options: Any
) -> None:
    """Say what a step of Muon sends, what a rank holds, and what a checkpoint has, on each mesh; and the cheapest.

    The optimizer's own planner plans the step, so this command needs torch; no process is started.

    \b
    muonckpt plan --model config.json --mesh dp=64 --mesh dp=8,tp=8 --shard '*_proj.weight=tp:0,dp:0'
    muonckpt plan --ckpt run/step-00001000 --mesh dp=512
    """
    if checkpoint is not None:
        from .runs import newest_checkpoint  # imports numpy

        checkpoint = newest_checkpoint(checkpoint)
    from ..lab.forecasting.prospects import forecast  # imports torch

    begin = time.monotonic()

    def progress(meshes_done: int, total: int) -> None:
        if time.monotonic() - begin >= 1 or sys.stderr.isatty():
            print_line(f"plan: mesh {meshes_done + 1} of {total}", err=True)

    # Options that are absent have the defaults of the function.
    arguments = {name: value for name, value in {**options, "checkpoint": checkpoint}.items() if value is not None}
    prospect = forecast(meshes, progress=progress, **arguments)
    if as_json:
        print_json(prospect)
        return
    _print(prospect, padding)
    print_duration()


def _print(prospect: Prospect, has_padding: bool) -> None:
    """Print the costs on each mesh, side by side; the padding of flat buffers only where ``has_padding``."""
    print_line(
        f"{prospect.source}: {counted(prospect.parameters, 'parameter')}, {prospect.elements:,} elements; "
        f"{prospect.matrices} by Muon"
    )
    print_line()
    rows = []
    for cells in zip(*(_column(topology, has_padding) for topology in prospect.topologies), strict=True):
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


def _column(t: Topology, has_padding: bool) -> Iterator[tuple[str, str]]:
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
    yield "  load: read, received", f"{size(t.checkpoint['most_read'])}, {size(t.checkpoint['most_received'])}"
    for padding in t.padding if has_padding else ():
        yield f"padding: {padding['layout']}", f"{padding['padding_percent']} %"
