"""Averages checkpoints of one model into one."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from ..errors import DestinationError, TargetError
from ..layouts.buffers.placements import present_name
from ..store.io.location import Location, Remote, location
from ..store.open_checkpoint import OpenCheckpoint, open
from ..store.reading.payloads import Progress
from .engine.job import check_destination, make_job
from .engine.launch import TIMEOUT, joined
from .engine.run import MEMORY, THREADS
from .execution import Execution
from .look.first_look import first_look
from .merge.input_prints import input_prints
from .merge.joined import JoinedCheckpoints
from .merge.merged_outputs import MergeRequest, shares
from .report import Report
from .rewrite import as_convention, check_use, default_format, named_dialect, rule_tables, with_keys
from .target.formats import container_of
from .target.topology import ROWS, AxisCut, ShardRule, Target
from .translate.conventions import Overrides
from .translate.names import NameRules
from .translate.request import Request

_ENDS = {"first": 0, "last": -1}


def merge(
    sources: Sequence[str | os.PathLike[str] | Remote],
    destination: str | os.PathLike[str] | Remote,
    *,
    proportions: Sequence[str | float | Fraction] | None = None,
    ema: str | float | None = None,
    others_from: str | int | None = None,
    model_only: bool = False,
    mesh: Mapping[str, int] | None = None,
    shard: Mapping[str, Sequence[AxisCut]] = MappingProxyType({}),
    layout: str = ROWS,
    format: str | None = None,
    shard_size: int | None = None,
    select: Sequence[str] = (),
    from_dialect: str | None = None,
    to_dialect: str | None = None,
    keys: str | None = None,
    roots: Mapping[str, str] = MappingProxyType({}),
    convention: str | None = None,
    mu: float | None = None,
    rules: str | NameRules | Iterable[str | NameRules] = (),
    drop: Collection[str] = (),
    memory: int = MEMORY,
    jobs: int = THREADS,
    resume: bool = False,
    verify: bool = False,
    dry_run: bool = False,
    timeout: float = TIMEOUT,
    progress: Progress = lambda count, total: None,
) -> Report | None:
    """Write the average of checkpoints of one model, of any formats, meshes and layouts, without torch.

    Every element of a floating-point tensor is the weighted sum of the inputs' elements as if computed exactly, rounded
    once.  Counters, hyper-parameters, integers and items are not averaged: they have to be the same in all inputs, or
    ``others_from`` says whose are taken.

    The arguments that are not listed are those of `reshard`.

    Args:
        sources: two checkpoints or more, in the order of training for ``ema``.
        proportions: of the inputs, positive numbers, as numbers or as text such as ``"1/3"``; None means
            that all are equal.
        ema: the decay of a moving average: it begins with the first input, and each of the others changes it to
            ``ema * average + (1 - ema) * input``.
        others_from: the input whose counters, hyper-parameters and items are taken: ``"first"``, ``"last"``, or its
            number from 0.
        model_only: merge the model's weights only, and leave out everything else.
        mesh: of the destination; None means one rank.
        format: the format to write; None means the one that ``to_dialect`` needs, or that `reshard` would write for the
            first input.
        from_dialect, convention, mu: of all inputs that do not say it themselves.
        to_dialect: the program to translate all inputs for, if they are of several.

    Returns:
        What was done, or would be.  If several processes share the work: None in all but the coordinator, rank 0.

    Raises:
        TargetError: an argument does not fit the others, or the checkpoints.
        SourceError: an input is damaged or refused; or inputs differ in their tensors, or in what is not averaged.
        LayoutError: a tensor has a hole or an overlap.
        DestinationError: the destination exists, lies inside an input, or cannot be written.
        Interrupted: the work can be resumed.
        LaunchError: the environment contradicts itself about the processes, or they do different work.
    """
    if isinstance(sources, str | os.PathLike | Remote) or len(sources) < 2:
        raise TargetError("merge needs at least two checkpoints")
    request = MergeRequest(shares(len(sources), proportions, ema), _number_of(others_from, len(sources)), model_only)
    with joined(os.environ, timeout) as workers, ExitStack() as stack:
        translation = Request(
            named_dialect("--from", from_dialect),
            with_keys(named_dialect("--to", to_dialect), keys, roots),
            rule_tables(rules),
            Overrides(as_convention(convention), mu=mu),
            drop=frozenset(drop),
        )
        shard_rules = tuple(ShardRule(glob, tuple(cuts)) for glob, cuts in shard.items())
        target = Target(mesh or {"dp": 1}, shard_rules, present_name(layout))
        place = location(destination, DestinationError)
        inputs = [stack.enter_context(open(source)) for source in sources]
        container = container_of(format or default_format(inputs[0], translation.target), shard_size)
        check_use(container, target.mesh, bool(shard), layout)
        for one in inputs:
            check_destination(one.path, place, container)
        of_inputs = [translation.outputs(one) for one in inputs]
        outputs = request.outputs(JoinedCheckpoints(inputs), of_inputs).selected(select)
        used = outputs.used(JoinedCheckpoints(inputs).manifest)
        keys_used = {tensor.key for tensor in used.tensors}
        prints = [{} if dry_run else input_prints(one, keys_used, jobs) for one in inputs]
        source = JoinedCheckpoints(inputs, _provenance(request, inputs, prints))
        job = make_job(source, target, select, lambda _: outputs, container)
        execution = Execution(memory, jobs, resume, verify, dry_run, progress)
        return execution.run(job, place, tuple(f"source: {one.path}" for one in inputs), workers)


def _number_of(others_from: str | int | None, count: int) -> int | None:
    """The number of the input that is named.

    Raises:
        TargetError: there is no such input.
    """
    if others_from is None:
        return None
    text = str(others_from)
    number = _ENDS.get(text, int(text) if text.isdecimal() else count)
    if number >= count:
        raise TargetError(f"--others-from: expected first, last, or a number from 0 to {count - 1}, found {text!r}")
    return number % count


def _provenance(
    request: MergeRequest, inputs: Sequence[OpenCheckpoint], prints: Sequence[Mapping[str, str]]
) -> dict[str, Any]:
    """That of the input that gives what is not averaged, with an entry for this merge, which lists all inputs."""
    base = dict(inputs[request.others_from or 0].provenance)
    steps = [first_look(one).step for one in inputs]
    if request.others_from is None and len(set(steps)) > 1:
        base.pop("step", None)
    merged = [
        {"name": _name(one.path), "format": one.format.name, "step": step, "weight": str(weight), "fingerprints": found}
        for one, step, weight, found in zip(inputs, steps, request.weights, prints, strict=True)
    ]
    entry = {"inputs": merged, "others_from": request.others_from, "model_only": request.model_only}
    return {**base, "merged": [*base.get("merged", ()), entry]}


def _name(path: Location) -> str:
    return str(path.resolve().name)
