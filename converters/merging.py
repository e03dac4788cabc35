"""Averages several checkpoints of one model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from ..names.errors import DestinationError, TargetError
from ..record.record import entry_keys
from ..store.io.location import Remote, location
from ..store.open_checkpoint import OpenCheckpoint
from ..store.verify.diagnosis import open
from .engine.container import container_of
from .engine.job import check_destination, make_job
from .engine.workers import joined
from .look.contents import first_look
from .merge.joined import JoinedCheckpoints, input_fingerprints, joined_checkpoints
from .merge.merged_outputs import MergeRequest, shares
from .options import AS_THE_SOURCE_SAYS, IN_ONE_GO, Execution, Translation
from .report import Report
from .rewrite import check_use, default_format, target_of
from .target.topology import ROWS, AxisCut


@dataclass(frozen=True, slots=True)
class Average:
    """Options of `merge`: how its inputs are weighted, and what else is taken from them.

    Attributes:
        proportions: of the inputs, positive numbers, as numbers or as text such as ``"1/3"``; None makes all equal.
        ema: the decay of a moving average: it begins with the first input, and each of the others changes it to
            ``ema * average + (1 - ema) * input``.
        others_from: the input whose counters, hyper-parameters and items are taken: ``"first"``, ``"last"``, or its
            number from 0.
    """

    proportions: Sequence[str | float | Fraction] | None = None
    ema: str | float | None = None
    others_from: str | int | None = None

    def request(self, count: int) -> MergeRequest:
        """Return the request for so many inputs.

        Raises:
            TargetError: the options do not fit them.
        """
        # The input may be named by its place in the order.
        number = None
        if self.others_from is not None:
            text = str(self.others_from)
            number = {"first": 0, "last": count - 1}.get(text, int(text) if text.isdecimal() else count)
            if number >= count:
                raise TargetError(
                    f"`others_from=`: expected first, last, or a number from 0 to {count - 1}, found {text!r}"
                )
        return MergeRequest(shares(count, self.proportions, self.ema), number)


_EQUAL = Average()


def merge(
    sources: Sequence[str | os.PathLike[str] | Remote],
    destination: str | os.PathLike[str] | Remote,
    *,
    average: Average = _EQUAL,
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
    """Write the average of checkpoints of one model, of any formats, meshes and layouts, without torch.

    Every element of a floating-point tensor is the weighted sum of the inputs' elements, added in float64 in their
    order and then rounded to the dtype.  Counters, hyper-parameters, integers and items are not averaged: they have to
    be the same in all inputs, or ``average.others_from`` says whose are taken.

    The arguments that are not listed are those of `reshard`.

    Args:
        sources: two checkpoints or more, in the order of training for ``average.ema``.
        mesh: of the destination; None means one rank.
        format: the format to write; None means the one that ``to_dialect`` needs, or that `reshard` would write for the
            first input.
        to_dialect: the program to translate all inputs for, if they are of several.
        translation: for all inputs that do not say it themselves.

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
    request = average.request(len(sources))
    with joined(os.environ, execution.timeout) as workers:
        one_request = translation.request(to_dialect)
        target = target_of(mesh or {"dp": 1}, shard, layout)
        place = location(destination, DestinationError)
        inputs = joined_checkpoints(map(open, sources))
        container = container_of(format or default_format(inputs[0], one_request.target), shard_size)
        check_use(container, target.mesh, bool(shard), layout)
        for checkpoint in inputs:
            check_destination(checkpoint.path, place, container)
        with inputs[0].payloads:  # the bytes of all
            # What is written, and what of the inputs goes into it; its fingerprints are recorded.
            outputs = request.outputs(inputs, list(map(one_request.outputs, inputs)), select)
            source = JoinedCheckpoints(inputs[0].path, inputs[0].payloads, [c.manifest for c in inputs])
            used_keys = {*entry_keys(outputs.used(source.manifest).tensors)}
            fingerprints: list[Mapping[str, str]] = []
            for checkpoint in inputs:
                no_reading = execution.dry_run
                fingerprints.append({} if no_reading else input_fingerprints(checkpoint, used_keys, execution.jobs))
            provenance = _provenance(request, translation.model_only, inputs, fingerprints)
            job = make_job(replace(source, provenance=provenance), target, select, lambda _: outputs, container)
            return execution.run(job, place, tuple(f"source: {checkpoint.path}" for checkpoint in inputs), workers)


def _provenance(
    request: MergeRequest,
    model_only: bool,
    inputs: Sequence[OpenCheckpoint],
    fingerprints: Sequence[Mapping[str, str]],
) -> dict[str, Any]:
    """Return the provenance of the input that gives what is not averaged, with an entry that lists all inputs."""
    # The step is that of the input whose counters are taken; of several steps the average has none.
    base = dict(inputs[request.others_from or 0].provenance)
    steps = [first_look(checkpoint).step for checkpoint in inputs]
    if request.others_from is None and len(set(steps)) > 1:
        base.pop("step", None)
    input_entries = []
    for checkpoint, step, weight, by_key in zip(inputs, steps, request.weights, fingerprints, strict=True):
        input_entries.append(
            {
                "name": checkpoint.path.resolve().name,
                "format": checkpoint.format.name,
                "step": step,
                "weight": str(weight),
                "fingerprints": by_key,
            }
        )
    entry = {"inputs": input_entries, "others_from": request.others_from, "model_only": model_only}
    return {**base, "merged": [*base.get("merged", ()), entry]}
