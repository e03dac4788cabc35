"""Sources for tests of offline resharding, each saved once, and words that these tests share."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import torch

import muonckpt
from muonckpt import OpenCheckpoint
from muonckpt.converters.engine import job as jobs
from muonckpt.converters.engine.container import Container, container_of
from muonckpt.converters.engine.job import Job
from muonckpt.converters.engine.outputs import Outputs, unchanged
from muonckpt.converters.engine.run import run_job
from muonckpt.converters.options import grouped as grouped  # for tests of other rooms
from muonckpt.converters.target.topology import Target
from muonckpt.record.record import Manifest
from support import sharded

DCP = container_of("dcp")
KINDS = {
    "file": ("safetensors", None),
    "shards": ("safetensors", 700),
    "zarr": ("zarr", None),
    "zarr in parts": ("zarr", 300),
}
"""Formats of whole tensors, and the bytes of a file of theirs."""

_FOLDER = tempfile.TemporaryDirectory(prefix="muonckpt-tests-")


@cache
def saved(name: str, values: str = "small") -> Path:
    """A checkpoint of `sharded.save_all`, saved when first asked for.  Do not change."""
    path = Path(_FOLDER.name) / f"{name} {values}".replace(" ", "-")
    sharded.save_all(name, values, path)
    return path


@cache
def plain() -> Path:
    """A checkpoint of this package on three ranks, of types that every format has.  Do not change."""
    tensors = {key: value for key, value in sharded.small().items() if key != "complex128"}
    muonckpt.save({"t": tensors, "odd": {"ä b/c": torch.ones(3)}}, Path(_FOLDER.name) / "plain")
    reshard(Path(_FOLDER.name) / "plain", Path(_FOLDER.name) / "plain-3", 3)
    return Path(_FOLDER.name) / "plain-3"


def make_job(source: Path, target: Target, select=(), make_outputs=unchanged, container: Container = DCP) -> Job:
    """What the engine plans for a checkpoint at this place; unless told otherwise, a copy of everything as DCP."""
    return jobs.make_job(OpenCheckpoint(source), target, select, make_outputs, container)


def plan_job(source: Path, ranks: int) -> Job:
    """The plainest target: every tensor cut by rows over ``ranks`` ranks."""
    return make_job(source, Target({"dp": ranks}))


def reshard(source: Path, destination: Path, ranks: int, **options) -> Manifest:
    return run_job(plan_job(source, ranks), destination, **options)


def plan_export(source: Path, kind: str, make_outputs=unchanged) -> Job:
    form, shard_bytes = KINDS[kind]
    return make_job(source, Target({"dp": 1}), make_outputs=make_outputs, container=container_of(form, shard_bytes))


def export(source: Path, destination: Path, kind: str, **options) -> Manifest:
    return run_job(plan_export(source, kind, tensors_only), destination, **options)


def rewrite(source: Path, destination: Path, way: str, **options) -> Manifest:
    """Write a checkpoint for two ranks ("dcp"), or its tensors in one of `KINDS`."""
    return reshard(source, destination, 2, **options) if way == "dcp" else export(source, destination, way, **options)


def tensors_only(source: OpenCheckpoint) -> Outputs:
    """Everything but what is no tensor."""
    return unchanged(source).tensors_only()


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def nothing_but(folder: Path, *names: str) -> bool:
    return sorted(file.name for file in folder.iterdir()) == sorted(names)


def once(action):
    """A progress callback that acts on the first call only."""
    actions = [action]
    return lambda count: actions.pop()() if actions else None
