"""The public question: what does my program's optimizer do, what is not meant, and what would ours do instead?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ...converters.target.topology import AxisCut
from ...names.errors import SourceError
from ...names.vocabulary import PARAMS
from ...names.wording import Finding, counted
from ...optimizer import Muon
from ...optimizer.methods.matrix import MATRICES
from ..forecasting.models import ModelParameter, ModelTensors, StateTensor, fresh_parameter
from ..forecasting.prospects import Prospect, prospect_of
from ..forecasting.topologies import MuonOptions
from .built import Built, Maker, build, maker_of
from .programs import class_of, known_optimizer, refusal
from .proof import NEAR, Proof, prove
from .replaced import Replacement, find_replacement
from .suspects import suspicions
from .treatments import Treatment, find_treatments


@dataclass(frozen=True, slots=True)
class Checkup:
    """What a program's optimizers do to its model.

    Attributes:
        source: the function that made them.
        device: where they were made: "meta", or "cpu", with the reason in ``why_cpu``.
        optimizers: the full names of their classes.
        parameters: what each parameter gets, in the model's order.
        findings: what is probably not meant, with what it means and the line to write.
        prospect: the costs on the meshes that were asked for; None without a mesh, or without a matrix in Muon.
        replacement: the lines of ours in place of another program's Muon; None if it is ours, or not known.
        proof: both stepped on the same gradients.
    """

    source: str
    device: str
    why_cpu: str
    optimizers: tuple[str, ...]
    parameters: tuple[Treatment, ...]
    findings: tuple[Finding, ...]
    prospect: Prospect | None = None
    replacement: Replacement | None = None
    proof: Proof | None = None


def doctor(
    make: str | Maker,
    *,
    meshes: Sequence[Mapping[str, int]] = (),
    shard: Mapping[str, Sequence[AxisCut]] | None = None,
    proof: bool = True,
) -> Checkup:
    """Say what each parameter of a model gets from its optimizer, what is probably not meant, and what a step costs.

    For another program's Muon also write the lines of ours with every option translated, and step both on copies of
    the same parameters with the same gradients.  The function is called on the meta device, where a model needs no
    memory, or on the CPU where that fails.  A file that is named is imported, which runs it, with your rights.

    Args:
        make: a function without arguments that returns a model and an optimizer (or several), or "FILE.py:FUNCTION".
        meshes: sizes of axes by name, the outermost first, on each of which a step is forecast.
        shard: axes and dims by patterns of parameters' names, as for `forecast`.
        proof: step both optimizers; else only translate.

    Raises:
        TargetError: the function cannot be imported or called, or returns something else; or a rule fits nothing.
    """
    source = make if isinstance(make, str) else getattr(make, "__qualname__", repr(make))
    built = build(maker_of(make) if isinstance(make, str) else make, source)
    treatments = find_treatments(built.model, built.optimizers)
    findings = [*_misplaced(built, treatments), *suspicions(built.model, treatments)]
    # Ours stands in for other programs' optimizers only if it stands in for all of them.
    replacement = None
    if not any(isinstance(optimizer, Muon) for optimizer in built.optimizers):
        unknown = [optimizer for optimizer in built.optimizers if known_optimizer(optimizer) is None]
        findings += [Finding("unknown_optimizer", refusal(o), (class_of(o),)) for o in unknown]
        if not unknown and any(treatment.optimizer is not None for treatment in treatments):
            try:
                replacement = find_replacement(built.model, built.optimizers, treatments)
            except SourceError as error:
                findings.append(Finding("no_counterpart", str(error), tuple(map(class_of, built.optimizers))))
    steps_proof = prove(built.optimizers, replacement) if replacement is not None and proof else None
    if steps_proof is not None and not steps_proof.equal:
        findings.append(_unproved(steps_proof))
    return Checkup(
        source,
        built.device,
        built.why,
        tuple(map(class_of, built.optimizers)),
        treatments,
        tuple(findings),
        _costs(built, treatments, meshes, shard or {}),
        replacement,
        steps_proof,
    )


def _misplaced(built: Built, treatments: Sequence[Treatment]) -> Iterator[Finding]:
    """Yield parameters that an optimizer has and the model has not, and those that are stepped twice."""
    names = {treatment.parameter: treatment.name for treatment in treatments}
    times: Counter[Tensor] = Counter()
    for optimizer in built.optimizers:
        for group in optimizer.param_groups:
            times.update(group["params"])
    # Strangers have no name, so a shape stands for them.
    strangers = [tuple(parameter.shape) for parameter in times.elements() if parameter not in names]
    if strangers:
        yield Finding(
            "not_in_model",
            f"{counted(len(strangers), 'parameter')} of the optimizer not in the model, one of shape {strangers[0]}",
            (),
            "the model was sharded, cast or materialised after the optimizer was made, or it is another model's: make "
            "the optimizer last",
        )
    twice = [names[parameter] for parameter, count in times.items() if count > 1 and parameter in names]
    if twice:
        means = "each of its groups updates it in every step; leave it in one of them"
        yield Finding.listing("stepped_twice", f"{counted(len(twice), 'parameter')} in several groups", twice, means)


def _unproved(proof: Proof) -> Finding:
    if proof.exact is None:
        means = "the lines are translated by the tables of that program, but nobody has compared them here"
        return Finding("not_proved", f"the other optimizer could not be stepped here: {proof.failure}", (), means)
    return Finding(
        "differs",
        f"ours does not do the same: updates differ by {proof.exact.update:.1e}, momentum by "
        f"{proof.exact.momentum:.1e} in float32 (most in {proof.exact.worst}); up to {NEAR:g} would be rounding",
        (proof.exact.worst,),
        "the notes name what has no counterpart; where there is none, the class is another version of that program, or "
        "a copy that has been changed",
    )


def _costs(
    built: Built,
    treatments: Sequence[Treatment],
    meshes: Sequence[Mapping[str, int]],
    shard: Mapping[str, Sequence[AxisCut]],
) -> Prospect | None:
    """Forecast a step on each mesh, as `muonckpt plan` does, of what these optimizers do."""
    parameters = [_model_parameter(built, t) for t in treatments if t.parameter.requires_grad]
    if not meshes or not any(parameter.method for parameter in parameters):
        return None
    ns_steps: list[int] = []
    for optimizer in built.optimizers:
        ns_steps += [int(group["ns_steps"]) for group in optimizer.param_groups if "ns_steps" in group]
    options = MuonOptions(ns_steps=max(ns_steps, default=MuonOptions().ns_steps))
    return prospect_of(ModelTensors(built.source, tuple(parameters)), meshes, shard, options)


def _model_parameter(built: Built, treatment: Treatment) -> ModelParameter:
    """Describe a parameter for `prospect_of`: as our optimizer has it, or as ours would have another's."""
    name, shape = treatment.name, treatment.shape
    is_matrix = treatment.has_matrices and 0 not in shape
    dtype = str(treatment.parameter.dtype).removeprefix("torch.")
    optimizer = None if treatment.optimizer is None else built.optimizers[treatment.optimizer]
    if not isinstance(optimizer, Muon):
        return fresh_parameter(name, shape, dtype, matrix=is_matrix, fused=treatment.fused)
    slots = optimizer.state[treatment.parameter].items()
    state = tuple(StateTensor(slot, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for slot, t in slots)
    if not is_matrix:
        return ModelParameter(name, shape, dtype, None, {}, state)
    options = {option: value for option, value in treatment.options.items() if option != PARAMS}
    return ModelParameter(name, shape, dtype, MATRICES[treatment.algorithm], options, state)
