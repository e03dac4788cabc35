"""`muonckpt plan`: what a model would cost on meshes that are only imagined."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from ..names.state_forms import STATE_DTYPES
from ..names.wording import counted, listed, size
from ..store.io.location import Location
from .argument_types import CHECKPOINT, ByteCountType, Cuts, MeshType, shard_option
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
    "--mesh", "meshes", type=MeshType(), multiple=True,
    help="Axes, outermost first: dp=8,tp=2; repeatable.",
)  # fmt: skip
@click.option("--fits", type=MeshType(), metavar="MESH", help="Only say if CKPT can be resumed there; 1 for no.")
@shard_option("Axes that cut matching parameters, on meshes that have them; repeatable.")
@click.option("--select", multiple=True, metavar="GLOB", help="Only parameters with a matching name; repeatable.")
@click.option("--dtype", metavar="DTYPE", help="Of a model's parameters and state, if not the config's.")
@click.option("--state-dtype", metavar="DTYPE", help=f"Of momentum and moments: {listed(STATE_DTYPES)}.")
@click.option("--link", type=ByteCountType(), metavar="BYTES", help="What a rank sends in a second: 50GB.")
@click.option("--disk", type=ByteCountType(), metavar="BYTES", help="What a rank writes or reads in a second: 2GB.")
@click.option(
    "--flops", type=click.FloatRange(0, min_open=True), metavar="NUMBER", help="FLOPs of a rank in a second: 400e12."
)
@click.option("--hardware", metavar="GPU,LINK", help="Their peak rates, such as h100,infiniband.")
@click.option(
    "--mfu", type=click.FloatRange(0, 1, min_open=True), metavar="SHARE", help="Of --flops, in the model: 0.4."
)
@click.option("--scheme", metavar="SCHEME", help="Of parameters: fsdp, zero2, owned or layerwise.")
@click.option("--keep", multiple=True, metavar="AXIS", help="Shards along it are not gathered (TP, EP); repeatable.")
@click.option(
    "--tokens", type=click.FloatRange(0, min_open=True), metavar="N", help="In an iteration, of all ranks: 4e6."
)
@click.option("--active", type=click.FloatRange(0, min_open=True), metavar="N", help="Parameters that a token uses.")
@click.option("--stages", type=click.IntRange(1), metavar="N", help="Most stages of a step, as Muon takes it.")
@click.option("--ns-steps", type=click.IntRange(1), metavar="N", help="Steps of Newton-Schulz.")
@click.option("--ns-dtype", metavar="DTYPE", help="What it computes in: bfloat16, float16 or float32.")
@click.option("--algorithm", metavar="NAME", help="Of a model's matrices: muon, normuon, adamuon or hyperball.")
@click.option("--padding", is_flag=True, help="Also print the padding of each layout in flat buffers.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def plan_command(
    meshes: Sequence[dict[str, int]],
    fits: dict[str, int] | None,
    shard: Mapping[str, Cuts],
    checkpoint: Location | None,
    hardware: str | None,
    mfu: float | None,
    keep: Sequence[str],
    padding: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Say what a step of Muon, a rank's memory and a checkpoint would cost on each mesh, and which is the cheapest.

    The optimizer's own planner plans the step, so this command needs torch; no process is started.

    \b
    muonckpt plan --model config.json --mesh dp=64 --mesh dp=8,tp=8 --shard '*_proj.weight=tp:0,dp:0'
    muonckpt plan --ckpt run/step-00001000 --mesh dp=512 --link 50GB --disk 2GB --flops 400e12
    muonckpt plan --ckpt run/step-00001000 --fits dp=48,tp=2
    """
    if fits is not None:
        if meshes or checkpoint is None:
            raise click.UsageError("--fits needs --ckpt, and no --mesh")
        from .inspect import print_fit

        return print_fit(checkpoint, fits, shard, None, as_json)
    if not meshes:
        raise click.UsageError("expected --mesh or --fits, such as --mesh dp=8")
    if checkpoint is not None:
        from .runs import newest_checkpoint  # imports numpy

        checkpoint = newest_checkpoint(checkpoint)
    from ..lab.forecasting.hardware import TYPICAL_MFU, UNKNOWN_RATES, rates_of
    from ..lab.forecasting.iteration import Training  # this imports torch
    from ..lab.forecasting.prospects import forecast

    begin = time.monotonic()

    def progress(meshes_done: int, total: int) -> None:
        if time.monotonic() - begin >= 1 or sys.stderr.isatty():
            print_line(f"plan: mesh {meshes_done + 1} of {total}", err=True)

    # Options that are absent have the defaults of the function; single rates count before those of the hardware.
    arguments = {name: value for name, value in {**options, "checkpoint": checkpoint}.items() if value is not None}
    single_rates = {name: arguments.pop(name) for name in ("link", "disk", "flops") if name in arguments}
    training = {name: arguments.pop(name) for name in ("scheme", "tokens", "active") if name in arguments}
    hardware_rates = UNKNOWN_RATES
    if hardware is not None:
        chip, _, link = hardware.partition(",")
        hardware_rates = rates_of(chip, link)
    flops = single_rates.get("flops", hardware_rates.flops)
    rates = replace(hardware_rates, **single_rates, model=None if flops is None else flops * (mfu or TYPICAL_MFU))
    prospect = forecast(
        meshes,
        shard=shard,
        progress=progress,
        rates=rates,
        training=Training(keep=frozenset(keep), **training),
        **arguments,
    )
    if as_json:
        print_json(prospect)
        return 0
    print_prospect(prospect, padding)
    print_duration()
    return 0


def print_prospect(prospect: Prospect, has_padding: bool = False) -> None:
    """Print the costs on each mesh, side by side; the padding of flat buffers only where ``has_padding``."""
    print_line(
        f"{prospect.source}: {counted(prospect.parameters, 'parameter')}, {prospect.elements:,} elements; "
        f"{prospect.matrices} by Muon"
    )
    print_line()
    # A row for each cost that is known on some mesh.
    rows = []
    for cells in zip(*map(_column, prospect.topologies), strict=True):
        values = [value for _, value in cells]
        if {*values} != {"-"} and (has_padding or not cells[0][0].startswith("padding: ")):
            rows.append((cells[0][0], *values))
    print_table(("", *(topology.name for topology in prospect.topologies)), rows)
    print_line()
    for topology in prospect.topologies:
        for rule in topology.unused_rules:
            print_line(f"note: {topology.name} has not all axes of the rule {rule}, which does not count there")
    if len(prospect.topologies) > 1:
        print_line(f"cheapest: {prospect.topologies[prospect.cheapest].name}, {prospect.why}")


def _column(t: Topology) -> Iterator[tuple[str, str]]:
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
    for padding in t.padding:
        yield f"padding: {padding['layout']}", f"{padding['padding_percent']} %"
    i = t.iteration
    yield "iteration: parameters", size(round(i["parameters"] or 0))
    yield "iteration: gradients", size(round(i["gradients"] or 0))
    yield "iteration: collectives", str(i["collectives"])
    share = i["newton_schulz_share"]
    yield "Newton-Schulz of the model's FLOPs", "-" if share is None else f"{100 * share:.3g} %"
    for name, label in (
        ("model", "time: forward and backward"),
        ("traffic", "time: parameters, gradients"),
        ("exchange", "time: exchange"),
        ("newton_schulz", "time: Newton-Schulz"),
        ("muon", "time: Muon, overlapped"),
        ("iteration", "time: iteration"),
        ("save", "time: save"),
        ("reshard", "time: reshard, one process"),
    ):
        seconds = t.seconds[name]
        yield label, "-" if seconds is None else _seconds(seconds)


def _seconds(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
