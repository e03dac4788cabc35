"""`muonckpt export`: the tensors of a checkpoint in a format that others read."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ..converters.export import TARGETS, plan_export, run
from ..converters.job import check_destination
from .output import printable, progress, size
from .parameters import CHECKPOINT, Bytes


@click.command("export")
@click.argument("source", type=CHECKPOINT)
@click.argument("destination", type=CHECKPOINT)
@click.option("--format", "target", type=click.Choice(list(TARGETS)), required=True, help="The format to write.")
@click.option(
    "--shard-size",
    type=Bytes(),
    help="Most bytes of tensors in a file. safetensors: write a folder of such files with an index, instead of one "
    "file. zarr: 1GiB unless given.",
)
@click.option("--tensors-only", is_flag=True, help="Leave out what is no tensor; without it such a SOURCE is refused.")
@click.option("--memory", type=Bytes(), default="256MiB", show_default=True, help="Most bytes of buffers.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    source: Path,
    destination: Path,
    target: str,
    shard_size: int | None,
    tensors_only: bool,
    memory: int,
    as_json: bool,
) -> None:
    """Write the tensors of the checkpoint SOURCE, whole, as DESTINATION in another format.

    Checks the source, streams bytes, reads back what was written and compares fingerprints.  DESTINATION must not
    exist; it appears when all that is done.
    """
    check_destination(source, destination)
    job = plan_export(source, target, tensors_only=tensors_only, shard_bytes=shard_size)
    with progress("export", 3 * job.bytes_to_write) as advance:
        manifest = run(job, destination, memory=memory, progress=advance)
    if as_json:
        prints = {tensor.key: tensor.fingerprint for tensor in manifest.tensors}
        places = {"source": str(source), "destination": str(destination), "format": target}
        counts = {"bytes": job.bytes_to_write, "left_out": job.left_out, "fingerprints": prints}
        click.echo(json.dumps({**places, **counts}, indent=1))
        return
    for key in job.left_out:
        click.echo(printable(f"left out: {key}"))
    compared = sum(tensor.fingerprint is not None for tensor in job.manifest.tensors)
    click.echo(
        f"{destination}: {len(manifest.tensors)} tensors, {size(job.bytes_to_write)}, read back equal; "
        f"{compared} fingerprints compared with the source's, all equal"
    )
