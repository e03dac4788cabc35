"""Rewriting a checkpoint: for another mesh, layout, format or program.  What the commands of these names do."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import update_wrapper
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from ..errors import DestinationError, TargetError
from ..layouts.buffers.placements import present_name
from ..store.audit import Progress
from ..store.formats.registry import BUFFERS
from ..store.formats.signs import is_torch_dist
from ..store.io.location import Remote, location
from ..store.open_checkpoint import OpenCheckpoint, open
from ..vocabulary import Convention
from .engine.job import check_destination, make_job
from .engine.launch import TIMEOUT, joined
from .engine.run import MEMORY, THREADS, run_job
from .report import Report, report_of
from .target.container import Container
from .target.formats import container_of
from .target.item_file import item_file_location
from .target.topology import ROWS, AxisCut, ShardRule, Target
from .translate.conventions import Overrides
from .translate.dialect import Dialect
from .translate.dialects import DIALECTS
from .translate.names import NameRules
from .translate.request import Request
from .translate.tables import load_rules

_ONE_RANK = MappingProxyType({"dp": 1})


def reshard(
    source: str | os.PathLike[str] | Remote,
    destination: str | os.PathLike[str] | Remote,
    *,
    mesh: Mapping[str, int] | None = None,
    shard: Mapping[str, Sequence[AxisCut]] = MappingProxyType({}),
    layout: str = ROWS,
    format: str | None = None,
    shard_size: int | None = None,
    tensors_only: bool = False,
    select: Sequence[str] = (),
    from_dialect: str | None = None,
    to_dialect: str | None = None,
    rules: str | NameRules | Iterable[str | NameRules] = (),
    convention: str | None = None,
    target_convention: str | None = None,
    mu: float | None = None,
    step: int | None = None,
    drop: Collection[str] = (),
    memory: int = MEMORY,
    jobs: int = THREADS,
    resume: bool = False,
    verify: bool = False,
    dry_run: bool = False,
    timeout: float = TIMEOUT,
    progress: Progress = lambda count, total: None,
) -> Report | None:
    """Rewrite a checkpoint for another mesh, layout, format or program; without torch, and nothing in it is run.

    The destination must not exist.  It appears whole, when everything has been written, checked and synced.

    Args:
        source: a checkpoint of any format.
        destination: where to write; a file for ``format="safetensors"`` without ``shard_size``, else a folder.
        mesh: axes and their sizes, the outermost first: ``{"dp": 8, "tp": 2}``.  Formats of whole tensors need none.
        shard: which axes cut which dims of the tensors whose key fits a shell pattern, in the order of cutting:
            ``{"*experts*": [("ep", 0), ("dp", 1)], "*norm*": []}``.  The first pattern that fits wins.  Without one,
            all axes cut the rows; in other layouts all ranks share the buffer.
        layout: what ranks hold, of :data:`.topology.LAYOUTS` (`muonckpt rules --layouts`).
        format: what to write, of :data:`.formats.FORMATS`.  None: what ``to_dialect`` needs; or what the source is,
            if it is flat buffers or torch_dist; else dcp.
        shard_size: most bytes of tensors in a file of safetensors or zarr.
        tensors_only: leave out what is no tensor.
        select: shell patterns; what has a key that fits none of them is neither read nor written.
        from_dialect: the program whose keys the source has; found from them if None.
        to_dialect: the program to write for: its keys, slots, groups and momentum convention.
        rules: tables of names and structure, applied in order: names of ready-made ones, TOML files, or `NameRules`;
            ``inverse:`` before a name is the way back.
        convention: of the source's momentum, where nothing else says it: ``"ema"`` or ``"sum"``.
        target_convention: to write, where the target's program has none of its own.
        mu: the momentum coefficient, where the source's groups have none.
        step: steps taken, where the target stores them and the source does not.
        drop: slots of state to leave behind.
        memory: most bytes of buffers.
        jobs: threads that check and write files.
        resume: go on with an interrupted run of the same arguments.
        verify: read everything back and compare before it is published.
        dry_run: plan only; nothing is written.
        timeout: where several processes share the work (torchrun started them): seconds after which one that gives no
            answer counts as lost, and ends the others.
        progress: told how far the work is.

    Returns:
        What was done, or would be.  Where several processes share the work, None in all but the coordinator, rank 0.

    Raises:
        TargetError: an argument does not fit the others, or the checkpoint.
        SourceError: the source is damaged or refused, or the target has no place for something.
        LayoutError: a tensor has a hole or an overlap, or rules do not fit it.
        DestinationError: the destination exists, lies inside the source, or cannot be written.
        Interrupted: it can be resumed.
        LaunchError: the environment says something impossible about the processes, or they do different work.
    """
    with joined(os.environ, timeout) as workers:
        request = Request(
            _dialect("--from", from_dialect),
            _dialect("--to", to_dialect),
            _rules(rules),
            Overrides(_convention(convention), _convention(target_convention), mu, step),
            frozenset(drop),
            tensors_only,
        )
        shard_rules = tuple(ShardRule(glob, tuple(cuts)) for glob, cuts in shard.items())
        target = Target(mesh or _ONE_RANK, shard_rules, present_name(layout))
        place = location(destination, DestinationError)
        with open(source) as opened:
            container = container_of(format or _default_format(opened, request.target), shard_size)
            _check_use(container, mesh, bool(shard), layout)
            check_destination(opened.path, place, container)
            job = make_job(opened, target, select, request.outputs, container)
            report = report_of(job, place, (*_unused(container, mesh), *_unread(opened)))
            if dry_run:
                return report if workers.me.coordinates else None
            total = (job.bytes_to_check + job.payload_to_write * (1 + verify)) // workers.me.world
            manifest = run_job(
                job,
                place,
                memory=memory,
                threads=jobs,
                resume=resume,
                verify=verify,
                progress=lambda count: progress(count, total),
                workers=workers,
            )
        return None if manifest is None else report.finished(manifest)


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _called_like(model: Callable[Arguments, Result]) -> Callable[[Callable[..., Result]], Callable[Arguments, Result]]:
    """Give a function the signature of another, for type checkers and for `help`."""

    def decorate(function: Callable[..., Result]) -> Callable[Arguments, Result]:
        return update_wrapper(function, model, assigned=())

    return decorate


@_called_like(reshard)
def convert(*places: Any, **options: Any) -> Report | None:
    """Rewrite a checkpoint in another format or for another program: `reshard` with a mesh of one rank.

    The arguments, the result and the errors are those of `reshard`; only ``mesh`` is ``{"dp": 1}`` unless it is given.
    """
    return reshard(*places, **{"mesh": _ONE_RANK, **options})


def _dialect(option: str, name: str | None) -> Dialect | None:
    if name is None:
        return None
    if name not in DIALECTS:
        raise TargetError(f"{option}: no program {name!r}; there are {', '.join(DIALECTS)}")
    return DIALECTS[name]


def _convention(name: str | None) -> Convention | None:
    if name is None:
        return None
    if name not in set(Convention):
        raise TargetError(f"no momentum convention {name!r}; there are {', '.join(Convention)}")
    return Convention(name)


def _rules(tables: str | NameRules | Iterable[str | NameRules]) -> NameRules:
    listed = [tables] if isinstance(tables, str | NameRules) else tables
    return sum((load_rules(each) if isinstance(each, str) else each for each in listed), NameRules())


def _default_format(source: OpenCheckpoint, target: Dialect | None) -> str:
    """What the target's program reads, or what the source is; DCP where files of its kind are not written by ranks, or
    are another program's."""
    if target and target.format:
        return target.format
    if source.format is BUFFERS:
        return "buffers"
    return "torch_dist" if target is None and is_torch_dist(source.path) else "dcp"


def _check_use(container: Container, mesh: Mapping[str, int] | None, has_rules: bool, layout: str) -> None:
    """Nothing that is asked for is silently ignored.

    Raises:
        TargetError: the format needs a mesh, or has no use for rules or a layout.
    """
    if container.of_ranks and mesh is None:
        raise TargetError(f"format {container.name} has files of ranks: say for which, such as --mesh dp=8")
    for option, given in (("--shard", has_rules), ("--layout", layout != ROWS)):
        if given and not container.of_ranks:
            raise TargetError(f"{option} means nothing to format {container.name}; leave it out")


def _unused(container: Container, mesh: Mapping[str, int] | None) -> tuple[str, ...]:
    """What is said of a mesh that makes no difference."""
    if container.of_ranks or math.prod((mesh or {}).values()) == 1:
        return ()
    return (f"{container.name} holds whole tensors, on any mesh alike",)


def _unread(source: OpenCheckpoint) -> tuple[str, ...]:
    """What is said of a file of items beside the source."""
    place = item_file_location(source.path)
    return (f"what is no tensor lies in {place} and is not read",) if place.exists() else ()
