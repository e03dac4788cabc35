"""`muonckpt reshard`: rewrite a checkpoint for another number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ..converters.reshard import Job, check_destination, plan_job, run
from .output import progress, size, table
from .parameters import CHECKPOINT, JOBS, Bytes, MeshSizes


@click.command("reshard")
@click.argument("source", type=CHECKPOINT)
@click.argument("destination", type=CHECKPOINT)
@click.option("--mesh", type=MeshSizes(), required=True, help="The new mesh; in this version dp=N, rows over N ranks.")
@click.option("--dry-run", is_flag=True, help="Print the plan; read metadata only and write nothing.")
@click.option("--memory", type=Bytes(), default="256MiB", show_default=True, help="Most bytes of buffers.")
@click.option("--jobs", type=JOBS, default=2, show_default=True, help="Threads that check and write.")
@click.option("--resume", is_flag=True, help="Go on with an interrupted run of the same command.")
@click.option("--json", "as_json", is_flag=True, help="Print the result, or the plan, as JSON.")
def command(
    source: Path,
    destination: Path,
    mesh: dict[str, int],
    dry_run: bool,
    memory: int,
    jobs: int,
    resume: bool,
    as_json: bool,
) -> None:
    """Rewrite the checkpoint SOURCE as DESTINATION for another number of ranks.

    Streams bytes; nothing is deserialised and no GPU or process group is needed.  DESTINATION must not exist; it
    appears whole, when everything has been written, checked and synced.
    """
    if mesh.keys() != {"dp"}:
        raise click.UsageError(f"--mesh {','.join(mesh)}: this version reshards rows only; write --mesh dp=N")
    check_destination(source, destination)
    job = plan_job(source, mesh["dp"])
    plan = describe(job)
    if dry_run:
        if as_json:
            click.echo(json.dumps(plan, indent=1))
            return
        table(("file", "items", "bytes"), [(f["file"], f["items"], size(f["bytes"])) for f in plan["files"]])
        click.echo(f"would check {size(plan['checked'])} of {source} and write {size(plan['written'])}")
        return
    if plan["unchecked"]:
        click.echo(f"note: {plan['unchecked']} source chunks carry no checksum; their bytes cannot be judged", err=True)
    with progress("reshard", job.bytes_to_check + job.payload_to_write) as advance:
        manifest = run(job, destination, memory=memory, threads=jobs, resume=resume, progress=advance)
    if as_json:
        prints = {tensor.key: tensor.fingerprint for tensor in manifest.tensors}
        click.echo(json.dumps({**plan, "destination": str(destination), "fingerprints": prints}, indent=1))
        return
    compared = sum(tensor.fingerprint is not None for tensor in job.manifest.tensors)
    click.echo(
        f"{destination}: {len(manifest.tensors)} tensors over {job.ranks} ranks, {size(job.bytes_to_write)}; "
        f"{compared} fingerprints compared with the source's, all equal"
    )


def describe(job: Job) -> dict[str, Any]:
    """The plan as JSON data; bytes."""
    chunks = [chunk for tensor in job.manifest.tensors for chunk in tensor.chunks if chunk.box.numel]
    return {
        "source": str(job.source),
        "ranks": job.ranks,
        "checked": job.bytes_to_check,
        "written": job.bytes_to_write,
        "unchecked": sum(chunk.digest is None and chunk.crc32 is None for chunk in chunks),
        "files": [
            {"file": file.name, "items": len(file.items) + len(file.blobs), "bytes": file.length} for file in job.files
        ],
    }
