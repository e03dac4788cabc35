"""`muonckpt reshard`: rewrite a checkpoint for another mesh or layout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from ..converters.job import Job, check_destination, make_job
from ..converters.reshard import run
from ..converters.target import LAYOUTS, Cut, Rule, Target, TargetError
from ..record import Manifest
from .output import progress, size, table
from .parameters import CHECKPOINT, JOBS, Bytes, MeshSizes, ShardRule


@click.command("reshard")
@click.argument("source", type=CHECKPOINT)
@click.argument("destination", type=CHECKPOINT)
@click.option("--mesh", type=MeshSizes(), required=True, help="Axes and sizes, the outermost first: dp=8,ep=4,tp=2.")
@click.option(
    "--shard",
    "rules",
    type=ShardRule(),
    multiple=True,
    help="Which axes cut which dims of the tensors whose key fits; the first rule that fits wins. Without: all axes "
    "cut the rows (dim 0), or in the other layouts share the buffer.",
)
@click.option("--layout", type=click.Choice(list(LAYOUTS)), default="rows", show_default=True, help="What ranks hold.")
@click.option("--select", multiple=True, metavar="GLOB", help="Take only what has a key that fits; may be repeated.")
@click.option("--dry-run", is_flag=True, help="Print the plan; read metadata only and write nothing.")
@click.option("--memory", type=Bytes(), default="256MiB", show_default=True, help="Most bytes of buffers.")
@click.option("--jobs", type=JOBS, default=2, show_default=True, help="Threads that check and write.")
@click.option("--resume", is_flag=True, help="Go on with an interrupted run of the same command.")
@click.option("--verify", is_flag=True, help="Read everything back and compare before it is published.")
@click.option("--json", "as_json", is_flag=True, help="Print the result, or the plan, as JSON.")
def command(
    source: Path,
    destination: Path,
    mesh: dict[str, int],
    rules: tuple[tuple[str, tuple[Cut, ...]], ...],
    layout: str,
    select: tuple[str, ...],
    dry_run: bool,
    memory: int,
    jobs: int,
    resume: bool,
    verify: bool,
    as_json: bool,
) -> None:
    """Rewrite the checkpoint SOURCE as DESTINATION for another mesh or layout.

    Streams bytes; nothing is deserialised and no GPU or process group is needed.  DESTINATION must not exist; it
    appears whole, when everything has been written, checked and synced.

    \b
    rows     cut by --shard, else by rows over all ranks
    flat     tensors end to end, cut evenly anywhere
    owned    whole tensors, owners balanced by their cost in Newton-Schulz
    padded   whole tensors, owners as in Megatron's padded layer-wise buffers
    compact  whole tensors, owners as in Megatron's compact ones (ping-pong)
    """
    with _usage_errors():
        target = Target(mesh, tuple(Rule(*rule) for rule in rules), layout)
        check_destination(source, destination)
        job = make_job(source, target, select)
    if dry_run:
        _show(describe(job), job, as_json)
        return
    if unchecked := _unchecked(job):
        click.echo(f"note: {unchecked} source chunks carry no checksum; their bytes cannot be judged", err=True)
    total = job.bytes_to_check + job.payload_to_write * (2 if verify else 1)
    with progress("reshard", total) as advance:
        manifest = run(job, destination, memory=memory, threads=jobs, resume=resume, verify=verify, progress=advance)
    _report(job, manifest, destination, as_json)


def describe(job: Job) -> dict[str, Any]:
    """The plan as JSON data; bytes.  ``avoided`` is what a reader of whole chunks would read besides ``read``."""
    return {
        "source": str(job.source),
        "ranks": job.target.ranks,
        "mesh": dict(job.target.mesh),
        "layout": job.target.layout,
        "checked": job.bytes_to_check,
        "read": job.payload_to_write,
        "avoided": job.reads_avoided,
        "written": job.bytes_to_write,
        "unchecked": _unchecked(job),
        "files": [
            {
                "file": file.name,
                "items": len(file.items) + len(file.entries),
                "elements": file.payload,
                "bytes": file.length,
            }
            for file in job.files
        ],
    }


def _unchecked(job: Job) -> int:
    chunks = [chunk for tensor in job.manifest.tensors for chunk in tensor.chunks if chunk.box.numel]
    return sum(chunk.digest is None and chunk.crc32 is None for chunk in chunks)


def _show(plan: dict[str, Any], job: Job, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(plan, indent=1))
        return
    rows = [(f["file"], f["items"], size(f["elements"]), size(f["bytes"])) for f in plan["files"]]
    table(("file", "items", "elements", "bytes"), rows)
    click.echo(
        f"would check {size(plan['checked'])} of {job.source}, read {size(plan['read'])} of it again (whole chunks "
        f"would be {size(plan['avoided'])} more), and write {size(plan['written'])}"
    )


def _report(job: Job, manifest: Manifest, destination: Path, as_json: bool) -> None:
    if as_json:
        prints = {tensor.key: tensor.fingerprint for tensor in manifest.tensors}
        click.echo(json.dumps({**describe(job), "destination": str(destination), "fingerprints": prints}, indent=1))
        return
    compared = sum(tensor.fingerprint is not None for tensor in job.tensors)
    click.echo(
        f"{destination}: {len(manifest.tensors)} tensors over {job.target.ranks} ranks, {size(job.bytes_to_write)}; "
        f"{compared} fingerprints compared with the source's, all equal"
    )


@contextmanager
def _usage_errors() -> Iterator[None]:
    """A target that does not fit is a mistake in the command line."""
    try:
        yield
    except TargetError as error:
        raise click.UsageError(str(error)) from error
