"""The public question: what a step, a rank's memory and a checkpoint would cost on some meshes; which is cheapest."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ...converters.target.topology import AxisCut, ShardRule
from ...names.errors import SourceError, TargetError, did_you_mean
from ...optimizer.methods.form import MatrixMethod
from ...optimizer.methods.matrix import MATRICES
from ...optimizer.planning.matrices import PRECISIONS
from ...record.record import match_keys
from ...store.io.location import Remote, location
from .models import ModelTensors, model_of_checkpoint, model_of_config, with_state_in
from .topologies import MuonOptions, Topology, topology_of

PathLike = str | os.PathLike[str] | Remote


@dataclass(frozen=True, slots=True)
class Prospect:
    """The costs of a model on some meshes.

    Attributes:
        source: the configuration or checkpoint that it was read from.
        parameters, elements, matrices: counts of the whole model; ``matrices`` are parameters that Muon steps.
        topologies: one for each mesh, in their order.
        cheapest: the position of the mesh whose busiest rank sends the fewest bytes in a step; of equal ones, of that
            whose fullest rank holds the least.
    """

    source: str
    parameters: int
    elements: int
    matrices: int
    topologies: tuple[Topology, ...]
    cheapest: int


def plan(
    meshes: Sequence[Mapping[str, int]],
    *,
    model: PathLike | None = None,
    checkpoint: PathLike | None = None,
    shard: Mapping[str, Sequence[AxisCut]] | None = None,
    select: Sequence[str] = (),
    dtype: str | None = None,
    state_dtype: str | None = None,
    stages: int | None = None,
    ns_steps: int = MuonOptions().ns_steps,
    ns_dtype: str = MuonOptions().ns_dtype,
    algorithm: str | MatrixMethod = "muon",
) -> Prospect:
    """Compute what a model would cost on these meshes, as ``muonckpt lab plan`` prints it.

    Starts no process and reads no elements.  The optimizer's own planner plans a step, as the ranks would.

    Args:
        meshes: sizes of axes by name, the outermost first.
        model: a ``config.json`` of Hugging Face's, of a known family; or else
        checkpoint: a checkpoint of any program, with momentum or groups that name their methods.
        shard: axes and dims by patterns of parameters' names, as for `reshard`; a rule counts on the meshes that have
            its axes.  By default all axes cut the rows.
        select: patterns of the names of the parameters to count, such as those of a pipeline stage; by default all.
        dtype: of the parameters, gradients and state of a ``model``; by default the configuration's.
        state_dtype: of momentum and moments, as `Muon` takes it; by default ``dtype``, or what the checkpoint has.
        stages, ns_steps, ns_dtype: as for `muonckpt.optimizer.Muon`.
        algorithm: of a model's matrices; or a method of your own that groups of the checkpoint name, whose FLOPs would
            be unknown otherwise.

    Raises:
        SourceError: the configuration or the checkpoint cannot be read.
        TargetError: not one of ``model`` and ``checkpoint``; no mesh; an unknown family, dtype or algorithm; no
            matrices; a rule or a pattern that fits nothing.
        LayoutError: a matrix cannot be planned.
    """
    # Arguments are checked before a file is read, which can take a while.
    if not meshes:
        raise TargetError("expected at least one mesh, such as dp=8")
    if (model is None) == (checkpoint is None):
        raise TargetError("expected a model's config.json or a checkpoint, one of the two")
    if ns_dtype not in PRECISIONS:
        raise TargetError(f"unknown ns_dtype {ns_dtype!r}; expected one of {', '.join(PRECISIONS)}")
    if (stages is not None and stages < 1) or ns_steps < 1:
        raise TargetError(f"expected at least one stage and one step of Newton-Schulz, found {stages} and {ns_steps}")
    if isinstance(algorithm, str) and algorithm not in MATRICES:
        known = ", ".join(MATRICES)
        raise TargetError(f"unknown algorithm {algorithm!r} of matrices; expected one of {known}, or a MatrixMethod")
    method = MATRICES[algorithm] if isinstance(algorithm, str) else algorithm
    tensors = (
        model_of_checkpoint(location(checkpoint, SourceError), method)
        if checkpoint is not None
        else model_of_config(location(model, SourceError), dtype, method)  # type: ignore[arg-type]
    )
    if state_dtype is not None:
        tensors = with_state_in(tensors, state_dtype)
    tensors = _select_parameters(tensors, select)
    rules = tuple(ShardRule(glob, tuple(cuts)) for glob, cuts in (shard or {}).items())
    # A rule that matches nothing, or fits no mesh, is a misprint.
    names = [parameter.name for parameter in tensors.parameters]
    for rule in rules:
        if not any(fnmatchcase(name, rule.glob) for name in names):
            raise TargetError(f"rule {rule} matches no parameter{did_you_mean(rule.glob, names)}")
        axes = {axis for axis, _ in rule.cuts}
        if not any(mesh.keys() >= axes for mesh in meshes):
            raise TargetError(f"rule {rule}: no mesh has the axes {', '.join(sorted(axes))}")
    options = MuonOptions(ns_steps, ns_dtype, stages)
    topologies = [topology_of(tensors, mesh, rules, options) for mesh in meshes]
    return Prospect(
        tensors.source,
        parameters=len(tensors.parameters),
        elements=sum(parameter.numel for parameter in tensors.parameters),
        matrices=len(tensors.matrices),
        topologies=tuple(topologies),
        cheapest=min(range(len(topologies)), key=lambda i: (topologies[i].sent["most"], topologies[i].memory["total"])),
    )


def _select_parameters(model: ModelTensors, globs: Sequence[str]) -> ModelTensors:
    names = [parameter.name for parameter in model.parameters]
    matching = match_keys(globs, names, noun="parameter", where=f" of {model.source}")
    selection = tuple(parameter for parameter in model.parameters if parameter.name in matching)
    if not any(parameter.method for parameter in selection):
        raise TargetError(f"none of the selected parameters of {model.source} is Muon's, so there is nothing to plan")
    return ModelTensors(model.source, selection)
