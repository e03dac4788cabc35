"""Rewrites a checkpoint for another mesh, layout, format or program."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import update_wrapper
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from ..errors import DestinationError, TargetError
from ..layouts.buffers.placements import present_name
from ..store.formats.registry import BUFFERS
from ..store.formats.signs import NOT_READ, is_torch_dist
from ..store.io.location import Remote, location
from ..store.io.side_file import items_beside
from ..store.open_checkpoint import OpenCheckpoint, open
from ..store.reading.payloads import Progress
from ..vocabulary import Convention
from .engine.job import check_destination, make_job
from .engine.launch import TIMEOUT, joined
from .engine.run import MEMORY, THREADS
from .execution import Execution
from .report import Report
from .target.container import Container
from .target.formats import container_of
from .target.topology import ROWS, AxisCut, ShardRule, Target
from .translate.conventions import STATE_DTYPES, Overrides, WeightsFrom
from .translate.detection import momentum_note, with_slots
from .translate.dialect import Dialect
from .translate.dialects import DIALECTS
from .translate.group_template import GroupTemplate
from .translate.key_forms import placed
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
    keys: str | None = None,
    roots: Mapping[str, str] = MappingProxyType({}),
    rules: str | NameRules | Iterable[str | NameRules] = (),
    convention: str | None = None,
    target_convention: str | None = None,
    mu: float | None = None,
    step: int | None = None,
    drop: Collection[str] = (),
    fill_missing: bool = False,
    weights: str | None = None,
    state_dtype: str | None = None,
    like: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    memory: int = MEMORY,
    jobs: int = THREADS,
    resume: bool = False,
    verify: bool = False,
    dry_run: bool = False,
    timeout: float = TIMEOUT,
    progress: Progress = lambda count, total: None,
) -> Report | None:
    """Rewrite a checkpoint for another mesh, layout, format or program, without torch; nothing in it is executed.

    The destination must not exist.  It appears when everything has been written, checked and synced.

    Args:
        source: a checkpoint of any format.
        destination: where to write; a file for ``format="safetensors"`` without ``shard_size``, else a folder.
        mesh: axes and their sizes, the outermost first: ``{"dp": 8, "tp": 2}``.  Formats of whole tensors need none.
        shard: which axes cut which dims of the tensors whose key matches a shell pattern, in the order of cutting:
            ``{"*experts*": [("ep", 0), ("dp", 1)], "*norm*": []}``.  The first matching pattern counts.  Tensors that
            match none are cut by rows over all axes; in the layouts other than rows all ranks share their buffer.
        layout: what each rank holds, one of :data:`.topology.LAYOUTS` (`muonckpt rules --layouts`).
        format: the format to write, one of :data:`.formats.FORMATS`.  None means the one that ``to_dialect`` needs, or
            the source's if that is flat buffers or torch_dist, or else dcp.
        shard_size: the most bytes of tensors in a file of safetensors or zarr.
        tensors_only: leave out items that are not tensors.
        select: shell patterns; tensors and items whose key matches none of them are neither read nor written.
        from_dialect: the program whose keys the source has; None means that the keys tell.
        to_dialect: the program to write for: its keys, slots, groups and momentum convention.
        keys: the form of the optimizer's keys, ``"nested"`` or ``"flat"``; None means that of ``to_dialect``.
        roots: where the target has its model and its optimizer in the state dict, if not where ``to_dialect`` has
            them: ``{"optimizer": "app.optimizer", "model": "app.model"}``; an empty path is the top.
        rules: tables of names and structure, applied in order: names of ready-made ones, TOML files, or `NameRules`;
            ``inverse:`` before a name means the opposite direction.
        convention: of the source's momentum, if it is not recorded: ``"ema"`` or ``"sum"``.
        target_convention: the convention to write, if the target's program has none of its own.
        mu: the momentum coefficient, if the source's groups have none.
        step: the number of steps taken, if the target stores it and the source does not.
        drop: slots of optimizer state to leave out.
        fill_missing: write zeros as the state of parameters in groups that have none, as they never had a gradient.
        weights: what weights are made of where the source has float32 masters as well: ``"masters"``, or ``"model"``;
            the other is left out.  None: both are written, which only programs with masters can load.
        state_dtype: the dtype of momentum and moments, ``"float32"`` or ``"bfloat16"``, each element rounded once;
            None: the source's.
        like: the groups of the run that the result is for, as ``Muon.describe()`` returns them, or a file of JSON with
            that.  The result has these groups, in this order, and takes from them what the source does not say.
        memory: bytes of all buffers together.
        jobs: threads that check and write files.
        resume: continue an interrupted run with the same arguments.
        verify: read everything back and compare before it is published.
        dry_run: plan only; nothing is written.
        timeout: seconds without an answer after which another process counts as lost, which ends all of them, if
            several processes share the work (under torchrun).
        progress: receives the bytes done since its last call and the total.

    Returns:
        What was done, or would be.  If several processes share the work: None in all but the coordinator, rank 0.

    Raises:
        TargetError: an argument does not fit the others, or the checkpoint.
        SourceError: the source is damaged or refused, or the target cannot hold all of it.
        LayoutError: a tensor has a hole or an overlap, or rules do not fit it.
        DestinationError: the destination exists, lies inside the source, or cannot be written.
        Interrupted: the work can be resumed.
        LaunchError: the environment contradicts itself about the processes, or they do different work.
    """
    with joined(os.environ, timeout) as workers:
        request = Request(
            named_dialect("--from", from_dialect),
            with_keys(named_dialect("--to", to_dialect), keys, roots),
            rule_tables(rules),
            Overrides(
                as_convention(convention),
                as_convention(target_convention),
                mu,
                step,
                fill_missing,
                _weights(weights),
                _state_dtype(state_dtype),
            ),
            frozenset(drop),
            tensors_only,
            None if like is None else GroupTemplate.read(like),
        )
        shard_rules = tuple(ShardRule(glob, tuple(cuts)) for glob, cuts in shard.items())
        target = Target(mesh or _ONE_RANK, shard_rules, present_name(layout))
        place = location(destination, DestinationError)
        with open(source) as opened:
            container = container_of(format or default_format(opened, request.target), shard_size)
            check_use(container, mesh, bool(shard), layout)
            check_destination(opened.path, place, container)
            job = make_job(opened, target, select, request.outputs, container)
            momentum = () if request.translates else momentum_note(with_slots(opened.outline))
            notes = (*_unused(container, mesh), *_unread(opened), *momentum)
            execution = Execution(memory, jobs, resume, verify, dry_run, progress)
            return execution.run(job, place, notes, workers)


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


def named_dialect(option: str, name: str | None) -> Dialect | None:
    """The program of this name; ``option`` is the one that gave it.

    Raises:
        TargetError: there is none.
    """
    if name is None:
        return None
    if name not in DIALECTS:
        raise TargetError(f"{option}: unknown program {name!r}; expected one of {', '.join(DIALECTS)}")
    return DIALECTS[name]


def with_keys(dialect: Dialect | None, form: str | None, roots: Mapping[str, str]) -> Dialect | None:
    """The target in this form of keys, and under these roots.

    Raises:
        TargetError: there is no target, or it has no such form.
    """
    if form is None and not roots:
        return dialect
    if dialect is None:
        raise TargetError("--keys and --root have no meaning without --to; leave them out, and keys stay as they are")
    return placed(dialect, form, roots)


def as_convention(name: str | None) -> Convention | None:
    """The momentum convention of this name.

    Raises:
        TargetError: there is none.
    """
    if name is None:
        return None
    if name not in set(Convention):
        raise TargetError(f"unknown momentum convention {name!r}; expected one of {', '.join(Convention)}")
    return Convention(name)


def _weights(name: str | None) -> WeightsFrom | None:
    if name is None:
        return None
    if name not in set(WeightsFrom):
        raise TargetError(f"--weights {name!r}: expected one of {', '.join(WeightsFrom)}")
    return WeightsFrom(name)


def _state_dtype(name: str | None) -> str | None:
    if name not in (None, *STATE_DTYPES):
        raise TargetError(f"--state-dtype {name!r}: expected one of {', '.join(STATE_DTYPES)}")
    return name


def rule_tables(tables: str | NameRules | Iterable[str | NameRules]) -> NameRules:
    """One table of all these, in order."""
    sequence = [tables] if isinstance(tables, str | NameRules) else tables
    return sum((load_rules(table) if isinstance(table, str) else table for table in sequence), NameRules())


def default_format(source: OpenCheckpoint, target: Dialect | None) -> str:
    """The format that the target's program reads, or the source's if ranks can write it, or else DCP."""
    if target and target.format:
        return target.format
    if source.format is BUFFERS:
        return "buffers"
    return "torch_dist" if target is None and is_torch_dist(source.path) else "dcp"


def check_use(container: Container, mesh: Mapping[str, int] | None, has_rules: bool, layout: str) -> None:
    """Check that no argument would be silently ignored.

    Raises:
        TargetError: the format needs a mesh, or has no use for rules or a layout.
    """
    if container.of_ranks and mesh is None:
        raise TargetError(f"format {container.name} has a file for each rank: give their mesh, such as --mesh dp=8")
    for option, given in (("--shard", has_rules), ("--layout", layout != ROWS)):
        if given and not container.of_ranks:
            raise TargetError(f"{option} has no meaning for format {container.name}; leave it out")


def _unused(container: Container, mesh: Mapping[str, int] | None) -> tuple[str, ...]:
    """A note if a mesh makes no difference."""
    if container.of_ranks or math.prod((mesh or {}).values()) == 1:
        return ()
    return (f"{container.name} holds whole tensors; the mesh makes no difference",)


def _unread(source: OpenCheckpoint) -> tuple[str, ...]:
    """Notes on what lies beside the source, or in its folder, and is not read."""
    place = items_beside(source.path)
    notes = (f"the items in {place} are not read",) if place.exists() else ()
    others = source.provenance.get(NOT_READ, ())
    return (*notes, f"not read: {', '.join(others)}") if others else notes
