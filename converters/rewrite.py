"""Rewrites a checkpoint for another mesh, layout, format or program."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import update_wrapper
from inspect import unwrap
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from ..names.errors import DestinationError, SourceError, TargetError, called_like
from ..names.wording import listed
from ..record.record import Manifest
from ..store.formats.native import is_torch_dist
from ..store.formats.registry import BUFFERS
from ..store.io.location import Remote, is_there, items_beside, location
from ..store.open_checkpoint import OpenCheckpoint
from ..store.verify.diagnosis import open_whole
from .engine.container import Container, container_of
from .engine.job import Job, check_destination, make_job
from .engine.outputs import unchanged
from .engine.workers import joined
from .options import AS_THE_SOURCE_SAYS, IN_ONE_GO, Execution, Translation, outputs_of
from .report import Report
from .target.topology import ROWS, AxisCut, Target

if TYPE_CHECKING:
    from ..programs.dialect import Dialect

_ONE_RANK = MappingProxyType({"dp": 1})

_FIELD_LINES = {
    field.name: f"{option}=muonckpt.{kind.__name__}({field.name}=...)"
    for option, kind in (("translation", Translation), ("execution", Execution))
    for field in fields(kind)
} | {"to": "to_dialect=...", "to_format": "format=..."}
"""Where the options go that errors name alone, such as `from_dialect=`, and those of the command."""


@called_like("muonckpt.reshard(source, destination, mesh={'dp': 8})", **_FIELD_LINES)
def reshard(
    source: str | os.PathLike[str] | Remote,
    destination: str | os.PathLike[str] | Remote,
    *,
    mesh: Mapping[str, int] | None = None,
    shard: Mapping[str, Sequence[AxisCut]] = MappingProxyType({}),
    layout: str = ROWS,
    format: str | None = None,
    shard_size: int | None = None,
    select: Sequence[str] = (),
    to_dialect: str | None = None,
    translation: Translation = AS_THE_SOURCE_SAYS,
    execution: Execution = IN_ONE_GO,
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
        layout: what each rank holds, one of :data:`.topology.LAYOUTS`.
        format: the format to write, one of :data:`.formats.FORMATS`.  None means the one that ``to_dialect`` needs, or
            the source's if that is flat buffers or torch_dist, or else dcp.
        shard_size: the most bytes of tensors in a file of safetensors or zarr.
        select: shell patterns; tensors and items whose key matches none of them are neither read nor written.
        to_dialect: the program to write for: its keys, slots, groups and momentum convention.
        translation: names, structure and conventions, where checkpoint and program do not say them.
        execution: memory and threads, and whether only to plan.

    Returns:
        The result, or the plan.  If several processes share the work: None in all but the coordinator, rank 0.

    Raises:
        TargetError: an argument does not fit the others, or the checkpoint.
        SourceError: the source is damaged or refused, or the target cannot hold all of it.
        LayoutError: a tensor has a hole or an overlap, or rules do not fit it.
        DestinationError: the destination exists, lies inside the source, or cannot be written.
        Interrupted: another process that shares the work was interrupted or lost.
        LaunchError: the environment contradicts itself about the processes, or they do different work.
    """
    with joined(os.environ, execution.timeout) as workers:
        # Arguments are checked against each other before anything is read.
        translates = to_dialect is not None or translation != AS_THE_SOURCE_SAYS
        request = translation.request(to_dialect) if translates else None
        target = Target.of(mesh or _ONE_RANK, shard, layout)
        place = location(destination, DestinationError)
        workers.refuse_unseen(location(source, SourceError))
        with open_whole(source, partly=bool(select)) as opened:
            program = request.target if request else None
            container = container_of(format or _default_format(opened, program), shard_size)
            _check_use(container, mesh, bool(shard), layout)
            check_destination(opened.path, place)
            job = make_job(opened, target, select, outputs_of(request) if request else unchanged, container)
            # Report arguments that the format has no use for, and what lies beside the source and is not read.
            notes: list[str] = []
            if not container.of_ranks and math.prod((mesh or {}).values()) > 1:
                notes.append(f"{container.name} holds whole tensors; the mesh makes no difference")
            if is_there(items := items_beside(opened.path)):
                notes.append(f"the items in {items} are not read")
            if opened.not_read:
                notes.append(f"not read: {listed(opened.not_read)}")
            if not (request and request.translates):
                notes += _notes_on_momentum(job, opened.outline)
            return execution.run(job, place, tuple(notes), workers)


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _signed_as(model: Callable[Arguments, Result]) -> Callable[[Callable[..., Result]], Callable[Arguments, Result]]:
    """Give a function the signature and the annotations of another."""

    def decorate(function: Callable[..., Result]) -> Callable[Arguments, Result]:
        return update_wrapper(function, model, assigned=("__annotations__",))

    return decorate


@called_like("muonckpt.convert(source, destination, to_dialect='torch')", **_FIELD_LINES)
@_signed_as(reshard)
def convert(*places: Any, **options: Any) -> Report | None:
    """Rewrite a checkpoint in another format or for another program: `reshard` with a mesh of one rank.

    The arguments, the result and the errors are those of `reshard`; only ``mesh`` is ``{"dp": 1}`` unless it is given.
    """
    # Not the decorated one, so that an error names the function that was called.
    report: Report | None = unwrap(reshard)(*places, **{"mesh": _ONE_RANK, **options})
    return report


def _default_format(source: OpenCheckpoint, target: Dialect | None) -> str:
    """Return the format that the target's program reads, or the source's if ranks can write it, or else DCP."""
    if target and target.format:
        return target.format
    if source.format is BUFFERS:
        return "buffers"
    return "torch_dist" if target is None and is_torch_dist(source.path) else "dcp"


def _check_use(container: Container, mesh: Mapping[str, int] | None, has_rules: bool, layout: str) -> None:
    """Check that no argument would be silently ignored.

    Raises:
        TargetError: the format needs a mesh, or has no use for rules or a layout.
    """
    if container.of_ranks and mesh is None:
        raise TargetError(f"format {container.name} has a file for each rank: give their axes and sizes, as `mesh=`")
    for argument, is_given in (("shard", has_rules), ("layout", layout != ROWS)):
        if is_given and not container.of_ranks:
            raise TargetError(f"`{argument}=` has no meaning for format {container.name}; leave it out")


def _notes_on_momentum(job: Job, source: Manifest) -> tuple[str, ...]:
    """Return a note on the convention of the momenta that a job copies unchanged, if there are any."""
    if not any(tensor.slot is not None for tensor in job.tensors):
        return ()
    if recorded := {tensor.convention for tensor in source.tensors if tensor.convention is not None}:
        return (f"momentum: {' and '.join(sorted(recorded))}, because the manifest records it",)
    from ..programs.detection import detect, with_slots_of  # most reshards start sooner without it

    try:
        detected = detect(source)
    except SourceError:
        return ()
    dialect, reason = detected.dialect, detected.reasons[-1]
    slots = dialect.slots_called("momentum")
    if not any(tensor.slot in slots for tensor in with_slots_of(source, dialect).tensors):
        return ()
    why = f"that is what {dialect.name} keeps: {reason}" if dialect.convention else reason
    return (f"momentum: {dialect.convention or 'unknown'}, because {why}",)
