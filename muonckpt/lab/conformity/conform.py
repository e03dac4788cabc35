"""The public question: does an optimizer do on a mesh what it does on one process?

Both step the same parameters with the same global gradients.  Where updates differ, the audit of a step says what the
mesh's step did: a slice that was orthogonalised explains it to the last digits, and rounding does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...names.errors import TargetError
from ...names.wording import fields_of
from ..step_audit.search import Search
from ..step_audit.step_audit import cut_words
from ..step_audit.updates import Cut, Evidence
from .trials import ONE_PROCESS, STEPS, Make, Trial, run_trials

RANKS = (2, 3, 4)

BITS, ROUNDED, OTHER, UNSURE, REFUSED = (
    "same bits", "rounded otherwise", "another update", "cannot tell", "refused"
)  # fmt: skip

_UNKNOWN = "no cut into matrices explains it"

_FLOPS = 1e11
"""Limit of work for the audit of one step."""


@dataclass(frozen=True, slots=True)
class Conformity:
    """A comparison of one parameter's steps on a mesh with those on one process.

    Attributes:
        shape, sharding, ranks: what was stepped, and where.
        status: `BITS`, `ROUNDED`: the same matrices were orthogonalised, in another order of sums; `OTHER`;
            `UNSURE`: updates differ, and the audit of a step does not know the method; `REFUSED`.
        difference: the largest distance of an update, as a part of the update of one process; None if refused.
        place: the rows and columns that differ, as text.
        cause: what the step did instead, or the error.
        state: faults of its state for a resume on another mesh; empty if it equals that of one process.
    """

    shape: str
    sharding: str
    ranks: int
    status: str
    difference: float | None = None
    place: str = ""
    cause: str = ""
    state: str = ""


@dataclass(frozen=True, slots=True)
class ConformityReport:
    """The comparisons of an optimizer; true if every one that was not refused is that of one process."""

    source: str
    comparisons: tuple[Conformity, ...]

    def __bool__(self) -> bool:
        return all(c.status != OTHER and not c.state for c in self.comparisons)

    def to_json(self) -> dict[str, Any]:
        return {"conforms": bool(self), **fields_of(self)}


def conform(source: str | Make, *, ranks: Sequence[int] = RANKS) -> ConformityReport:
    """Run an optimizer on several numbers of ranks, and say whether its updates and its state are those of one process.

    Each rank is a process on this machine, with gloo.  A file that is named is imported, which runs it, with your
    rights.

    Args:
        source: "FILE.py:FUNCTION", or a function that other processes can import; it is called with a model that has
            one parameter, ``weight``, and its device mesh, and returns an optimizer or a list of them.
        ranks: numbers of processes.

    Raises:
        TargetError: the optimizer steps nothing on one process, or a process died.
    """
    reference = {shape: trial for (_, shape), trial in run_trials(source, 1).items()}
    if all(trial.failure for trial in reference.values()):
        [first, *_] = reference.values()
        raise TargetError(f"{source} steps nothing on one process: {first.failure}")
    comparisons: list[Conformity] = []
    for count in ranks:
        for (sharding, shape), trial in run_trials(source, count).items():
            comparisons.append(_compare_with_one_process(reference[shape], trial, shape, sharding, count))
    name = source if isinstance(source, str) else f"{source.__module__}:{source.__qualname__}"
    return ConformityReport(name, tuple(comparisons))


def _compare_with_one_process(reference: Trial, trial: Trial, shape: str, sharding: str, ranks: int) -> Conformity:
    """Compare a mesh's steps with those of one process."""
    failure = (reference.failure and f"{ONE_PROCESS}: {reference.failure}") or trial.failure
    if failure:
        return Conformity(shape, sharding, ranks, status=REFUSED, cause=failure)
    # The first step that differs tells what happened; later ones begin from other weights.
    differences = [_difference(reference, trial, step) for step in range(1, STEPS + 1)]
    # State that a resume on another mesh would not find as one process has left it.
    state_faults = []
    if trial.has_plain_state:
        state_faults.append("a rank's part is a plain tensor, and torch saves one rank's for all")
    for slot in reference.states[-1]:
        if slot not in trial.states[-1]:
            state_faults.append(f"{slot} is not shaped like the parameter")
        elif not trial.has_drifted and not torch.equal(trial.states[0][slot], reference.states[0][slot]):
            state_faults.append(f"{slot} differs from that of one process after the first step")
    state = "; ".join(state_faults)
    step = next((number for number, difference in enumerate(differences, 1) if difference), STEPS)
    difference, place = differences[step - 1], _place(reference.weights[step], trial.weights[step])
    if trial.has_drifted:
        cause = "replicas of the weight differ: their updates were not made of the same gradients, or not sent"
        return Conformity(
            shape, sharding, ranks, status=OTHER, difference=difference, place=place, cause=cause, state=state
        )
    if not difference:
        return Conformity(shape, sharding, ranks, status=BITS, difference=difference, state=state)
    cause = _find_cause(trial, step)
    status = OTHER if cause else ROUNDED
    if cause == _UNKNOWN and _find_cause(reference, step) == _UNKNOWN:
        status, cause = UNSURE, "the audit of a step does not know this method, on one process either"
    return Conformity(shape, sharding, ranks, status, difference, place, cause, state)


def _difference(reference: Trial, trial: Trial, step: int) -> float:
    """Return the distance of an update from that of one process, as a part of the latter."""
    expected = reference.weights[step].double() - reference.weights[step - 1].double()
    update = trial.weights[step].double() - trial.weights[step - 1].double()
    return float((update - expected).norm() / expected.norm())


def _place(expected: Tensor, weight: Tensor) -> str:
    """Return the rows and columns that enclose all elements that differ."""
    indices = (expected != weight).nonzero()
    if not len(indices):
        return ""
    ranges = [f"{int(low)}:{int(high) + 1}" for low, high in zip(indices.amin(0), indices.amax(0), strict=True)]
    return f"[{', '.join(ranges)}]"


def _find_cause(trial: Trial, step: int) -> str:
    """Say which matrices a step orthogonalised instead of the whole; empty if it orthogonalised the whole."""
    slots = trial.states[step - 1]
    if len(slots) != 1:
        return _UNKNOWN
    [(slot, momentum)] = slots.items()
    momentum_before = trial.states[step - 2][slot] if step > 1 else torch.zeros_like(momentum)
    evidence = Evidence(
        slot,
        before=trial.weights[step - 1].double().numpy(),
        after=trial.weights[step].double().numpy(),
        momentum_before=momentum_before.double().numpy(),
        state={"momentum": momentum.double().numpy()},
        dtypes=("float32", "float32"),
    )
    # The slices of ranks are the first suspects.
    rows, columns = trial.slices
    result = Search(evidence, options={"pieces": rows, "columns": columns}, sibling=None, flops=_FLOPS).run("muon")
    if result is None or not result.explanations:
        return _UNKNOWN
    cuts = [explanation.cut for explanation in result.explanations]
    if any(not cut.pieces and not cut.columns for cut in cuts):
        return ""
    if any((cut.pieces, cut.columns) == trial.slices for cut in cuts):
        return f"each rank's slice was orthogonalised by itself: {cut_words(Cut(pieces=rows, columns=columns))}"
    return f"it orthogonalised {cut_words(result.best.cut)}"
