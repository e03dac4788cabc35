"""The engine behind `reshard`, `convert` and `export`: a plan, the work, and what is said of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import click

from ..converters import export, reshard
from ..converters.container import CONTAINERS
from ..converters.export import TARGETS, Export, plan_export
from ..converters.job import Job, check_destination, make_job
from ..converters.mover import Progress
from ..converters.target import Rule, Target, TargetError
from ..converters.workers import LaunchError, Worker, worker_of
from ..record import Manifest
from ..store.formats import format_of
from ..store.remote import Remote
from . import buffers
from .asked import Asked
from .output import counted, printable, progress, size, some_of, table

Plan = Job | Export


@dataclass(frozen=True, slots=True)
class Way:
    """One of the two ways to write: tensors cut over ranks (`Job`), or whole (`Export`).

    Args:
        lacks: fields of `Asked` that mean nothing there.
        run: what a worker does; None if another publishes.
        passes: how often the elements that are written pass: once, and again when they are read back.
        where: ranks, mesh and layout as JSON data.
        told: the same in the words of the report.
    """

    lacks: tuple[str, ...]
    plan: Callable[[Asked], Any]
    run: Callable[[Any, Asked, Worker, Progress], Manifest | None]
    passes: Callable[[Asked], int]
    where: Callable[[Any], Mapping[str, Any]]
    told: Callable[[Any], str]


def _job(asked: Asked) -> Job:
    target = Target(asked.mesh or {"dp": 1}, tuple(Rule(*rule) for rule in asked.shard), asked.layout)
    return make_job(asked.source, target, asked.select, asked.translate(), CONTAINERS[asked.format])


def _run_job(job: Job, asked: Asked, worker: Worker, advance: Progress) -> Manifest | None:
    return reshard.run(
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


def _of_ranks(job: Job) -> Mapping[str, Any]:
    shared = buffers.summarise(buffers.recorded({"buffers": job.buffers}))
    target = job.target
    return {"ranks": target.ranks, "mesh": dict(target.mesh), "layout": target.layout, "buffers": shared}


def _export(asked: Asked) -> Export:
    return plan_export(asked.source, asked.format, asked.select, asked.translate(), asked.shard_size)


def _run_export(job: Export, asked: Asked, worker: Worker, advance: Progress) -> Manifest:
    return export.run(job, asked.destination, memory=asked.memory, progress=advance)


CUT = Way(
    ("shard_size",),
    _job,
    _run_job,
    lambda asked: 1 + asked.verify,
    _of_ranks,
    lambda job: f"over {counted(job.target.ranks, 'rank')}, {size(job.bytes_to_write)}",
)
WHOLE = Way(
    ("shard", "layout", "jobs", "resume", "patience"),
    _export,
    _run_export,
    # An object is written front to back: the sums in the header of safetensors take a pass of their own.
    lambda asked: 3 if asked.format == "safetensors" and isinstance(asked.destination, Remote) else 2,
    lambda job: {},
    lambda job: f"whole in {counted(len(job.files), 'file')}, {size(job.bytes_to_write)}, read back equal",
)
WAYS: Mapping[str, Way] = {**dict.fromkeys(CONTAINERS, CUT), **dict.fromkeys(TARGETS, WHOLE)}
"""By the name of the format."""


def carry_out(asked: Asked, doing: str) -> None:
    """Do what is asked, or with ``--dry-run`` say what it would be.  ``doing`` is the command's name."""
    way = WAYS[asked.format]
    with _usage_errors():
        worker = worker_of(os.environ)
        _refuse(asked, way, worker)
        check_destination(asked.source, asked.destination)
        plan = way.plan(asked)
    if asked.dry_run:
        if worker.leads:
            _show(plan, way, asked)
        return
    if worker.leads and (unchecked := _unchecked(plan)):
        click.echo(f"note: {unchecked} source chunks carry no checksum; their bytes cannot be judged", err=True)
    total = plan.bytes_to_check + plan.payload_to_write * way.passes(asked)
    with progress(doing if worker.world == 1 else str(worker), total // worker.world) as advance:
        manifest = way.run(plan, asked, worker, advance)
    if manifest is not None:  # this worker has published it
        _report(plan, way, asked, manifest)


def _refuse(asked: Asked, way: Way, worker: Worker) -> None:
    """Options that the format has no use for: nothing is silently ignored."""
    absent = {field.name: field.default for field in fields(Asked)}
    for name in way.lacks:
        if getattr(asked, name) != absent[name]:
            raise click.UsageError(f"--{name.replace('_', '-')} means nothing to format {asked.format}; leave it out")
    if way is WHOLE and worker.world > 1:
        raise click.UsageError(f"{asked.format} is written by one process, and this is {worker}; start only one")
    if way is WHOLE and asked.mesh:
        click.echo(f"note: {asked.format} holds whole tensors, on any mesh alike", err=True)


def describe(plan: Plan, way: Way, asked: Asked) -> dict[str, Any]:
    """The plan as JSON data; bytes.  ``avoided`` is what a reader of whole chunks would read besides ``read``."""
    return {
        "source": str(plan.source),
        "format": asked.format,
        **way.where(plan),
        "checked": plan.bytes_to_check,
        "read": plan.payload_to_write,
        "avoided": plan.reads_avoided,
        "written": plan.bytes_to_write,
        "unchecked": _unchecked(plan),
        "left_out": list(plan.left_out),
        "notes": list(plan.notes),
        "files": [
            {
                "file": file.name or asked.destination.name,
                "items": file.count,
                "elements": file.payload,
                "bytes": file.length,
            }
            for file in plan.files
        ],
    }


def _unchecked(plan: Plan) -> int:
    """Chunks of the source of which nothing says what their bytes should be."""
    with format_of(plan.source).payloads(plan.source) as payloads:
        chunks = (chunk for tensor in plan.manifest.tensors for chunk in tensor.chunks if chunk.box.numel)
        return sum(not payloads.is_checked(chunk) for chunk in chunks)


def _show(plan: Plan, way: Way, asked: Asked) -> None:
    found = describe(plan, way, asked)
    if asked.as_json:
        click.echo(json.dumps(found, indent=1))
        return
    for note in plan.notes:
        click.echo(printable(note))
    rows = [(f["file"], f["items"], size(f["elements"]), size(f["bytes"])) for f in found["files"]]
    table(("file", "items", "elements", "bytes"), rows)
    buffers.show(found.get("buffers", ()))
    _tell_left_out(plan)
    click.echo(
        f"would check {size(found['checked'])} of {plan.source}, read {size(found['read'])} of it again (whole chunks "
        f"would be {size(found['avoided'])} more), and write {size(found['written'])}"
    )


def _report(plan: Plan, way: Way, asked: Asked, manifest: Manifest) -> None:
    if asked.as_json:
        prints = {tensor.key: tensor.fingerprint for tensor in manifest.tensors}
        more = {"destination": str(asked.destination), "fingerprints": prints}
        click.echo(json.dumps({**describe(plan, way, asked), **more}, indent=1))
        return
    _tell_left_out(plan)
    compared = sum(tensor.fingerprint is not None for tensor in plan.tensors)
    equal = f"{compared} fingerprints compared with the source's, all equal"
    told = equal if compared else "no fingerprints of the source to compare with"
    click.echo(f"{asked.destination}: {len(manifest.tensors)} tensors {way.told(plan)}; {told}")


def _tell_left_out(plan: Plan) -> None:
    if plan.left_out:
        click.echo(printable(f"left out: {some_of(plan.left_out)}"))


@contextmanager
def _usage_errors() -> Iterator[None]:
    """A target that does not fit is a mistake in the command line, as is a launch that cannot be."""
    try:
        yield
    except (TargetError, LaunchError) as error:
        raise click.UsageError(str(error)) from error
