"""The engine behind `reshard`, `convert` and `export`: a plan, the work, and what is said of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import click

from ..converters.engine import run as reshard
from ..converters.engine.job import Job, check_destination, make_job
from ..converters.engine.workers import LaunchError, worker_of
from ..converters.target.container import Container
from ..converters.target.formats import OF_RANKS, OF_WHOLE_TENSORS, container_of
from ..converters.target.topology import Rule, Target
from ..errors import TargetError
from ..record import Manifest
from .asked import Asked
from .output import counted, printable, progress, size, some_of, table


@dataclass(frozen=True, slots=True)
class Way:
    """What can be asked and told of a kind of format: files of what ranks hold, or of whole tensors.

    Args:
        lacks: fields of `Asked` that mean nothing there.
        container: what the files are.
        where: ranks, mesh and layout as JSON data.
        told: the same in the words of the report.
    """

    lacks: tuple[str, ...]
    container: Callable[[Asked], Container]
    where: Callable[[Job], Mapping[str, Any]]
    told: Callable[[Job], str]


def _of_ranks(job: Job) -> Mapping[str, Any]:
    from ..converters.buffer_summary import buffer_summary, labelled

    shared = buffer_summary(labelled({"buffers": job.buffers}))
    target = job.target
    return {"ranks": target.ranks, "mesh": dict(target.mesh), "layout": target.layout, "buffers": shared}


CUT = Way(
    ("shard_size",),
    lambda asked: container_of(asked.format),
    _of_ranks,
    lambda job: f"over {counted(job.target.ranks, 'rank')}",
)
WHOLE = Way(
    ("shard", "layout"),
    lambda asked: container_of(asked.format, asked.shard_size),
    lambda job: {},
    lambda job: f"whole in {counted(len(job.files), 'file')}",
)
WAYS: Mapping[str, Way] = {**dict.fromkeys(OF_RANKS, CUT), **dict.fromkeys(OF_WHOLE_TENSORS, WHOLE)}
"""By the name of the format."""


def carry_out(asked: Asked, doing: str) -> None:
    """Do what is asked, or with ``--dry-run`` say what it would be.  ``doing`` is the command's name."""
    way = WAYS[asked.format]
    with _usage_errors():
        worker = worker_of(os.environ)
        _refuse(asked, way)
        container = way.container(asked)
        check_destination(asked.source, asked.destination, container)
        target = Target(asked.mesh or {"dp": 1}, tuple(Rule(*rule) for rule in asked.shard), asked.layout)
        job = make_job(asked.source, target, asked.select, asked.outputs, container)
    if worker.leads and way is WHOLE and asked.mesh:
        click.echo(f"note: {asked.format} holds whole tensors, on any mesh alike", err=True)
    if asked.dry_run:
        if worker.leads:
            _show(job, way, asked)
        return
    if worker.leads and (unchecked := _unchecked(job)):
        click.echo(f"note: {unchecked} source chunks carry no checksum; their bytes cannot be judged", err=True)
    total = job.bytes_to_check + job.payload_to_write * (1 + asked.verify)
    with progress(doing if worker.world == 1 else str(worker), total // worker.world) as advance:
        manifest = reshard.run(
            job,
            asked.destination,
            memory=asked.memory,
            threads=asked.jobs,
            resume=asked.resume,
            verify=asked.verify,
            progress=advance,
            worker=worker,
            patience=asked.patience,
        )
    if manifest is not None:  # this worker has published it
        _report(job, way, asked, manifest)


def _refuse(asked: Asked, way: Way) -> None:
    """Options that the format has no use for: nothing is silently ignored."""
    absent = {field.name: field.default for field in fields(Asked)}
    for name in way.lacks:
        if getattr(asked, name) != absent[name]:
            raise click.UsageError(f"--{name.replace('_', '-')} means nothing to format {asked.format}; leave it out")


def describe(job: Job, way: Way, asked: Asked) -> dict[str, Any]:
    """The plan as JSON data; bytes.  ``avoided`` is what a reader of whole chunks would read besides ``read``."""
    return {
        "source": str(job.source.path),
        "format": asked.format,
        **way.where(job),
        "checked": job.bytes_to_check,
        "read": job.payload_to_write,
        "avoided": job.reads_avoided,
        "written": job.bytes_to_write,
        "unchecked": _unchecked(job),
        "left_out": list(job.left_out),
        "notes": list(job.notes),
        "files": [
            {
                "file": asked.destination.name if file.name == job.container.root else file.name,
                "items": file.count,
                "elements": file.payload,
                "bytes": file.length,
            }
            for file in job.files
        ],
    }


def _unchecked(job: Job) -> int:
    """Chunks of the source of which nothing says what their bytes should be."""
    with job.source.payloads as payloads:
        chunks = (chunk for tensor in job.manifest.tensors for chunk in tensor.chunks if chunk.box.numel)
        return sum(not payloads.is_checked(chunk) for chunk in chunks)


def _show(job: Job, way: Way, asked: Asked) -> None:
    from . import buffer_tables

    found = describe(job, way, asked)
    if asked.as_json:
        click.echo(json.dumps(found, indent=1))
        return
    _tell_notes(job)
    rows = [(f["file"], f["items"], size(f["elements"]), size(f["bytes"])) for f in found["files"]]
    table(("file", "items", "elements", "bytes"), rows)
    buffer_tables.show(found.get("buffers", ()))
    _tell_left_out(job)
    click.echo(
        f"would check {size(found['checked'])} of {job.source.path}, read {size(found['read'])} of it again "
        f"(whole chunks would be {size(found['avoided'])} more), and write {size(found['written'])}"
    )


def _report(job: Job, way: Way, asked: Asked, manifest: Manifest) -> None:
    if asked.as_json:
        prints = {tensor.key: tensor.fingerprint for tensor in manifest.tensors}
        more = {"destination": str(asked.destination), "fingerprints": prints}
        click.echo(json.dumps({**describe(job, way, asked), **more}, indent=1))
        return
    _tell_notes(job)
    _tell_left_out(job)
    compared = sum(tensor.fingerprint is not None for tensor in job.tensors)
    equal = f"{compared} fingerprints compared with the source's, all equal"
    told = equal if compared else "no fingerprints of the source to compare with"
    click.echo(
        f"{asked.destination}: {len(manifest.tensors)} tensors {way.told(job)}, {size(job.bytes_to_write)}; {told}"
    )


def _tell_notes(job: Job) -> None:
    for note in job.notes:
        click.echo(printable(note))


def _tell_left_out(job: Job) -> None:
    if job.left_out:
        click.echo(printable(f"left out: {some_of(job.left_out)}"))


@contextmanager
def _usage_errors() -> Iterator[None]:
    """A target that does not fit is a mistake in the command line, as is a launch that cannot be."""
    try:
        yield
    except (TargetError, LaunchError) as error:
        raise click.UsageError(str(error)) from error
